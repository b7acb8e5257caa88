"""The browser on this machine, if there is one: nothing is downloaded."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LAYERS, HEADS, TOKENS = 6, 12, 20  # of the report that is looked at


def find_browser() -> str | None:
    """Where Chromium or Chrome is."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


@contextmanager
def opened(browser: Any, **options: Any) -> Iterator[Any]:
    """A page that fails the test on any error, and on any call to another host."""
    made = browser.new_page(viewport={"width": 1280, "height": 860}, **options)
    troubles: list[str] = []
    made.on("pageerror", lambda error: troubles.append(str(error)))
    made.on("console", lambda said: troubles.append(said.text) if said.type == "error" else None)
    made.on(
        "request",
        lambda asked: (
            troubles.append(asked.url) if asked.url.startswith("http") and "127.0.0.1" not in asked.url else None
        ),
    )
    yield made
    made.close()
    assert troubles == []


def show(page: Any, report: Any, hash: str = "") -> None:
    """Open a report at what stands behind #."""
    page.goto("about:blank")
    page.goto(f"{report.as_uri()}#{hash}")
    page.wait_for_selector("html[data-ready]")
