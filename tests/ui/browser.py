"""Start an installed browser; nothing is downloaded."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LAYERS, HEADS, TOKENS = 6, 12, 20  # sizes of the report under test


def find_browser() -> str | None:
    """Return the path of Chromium or Chrome."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def open_page(browser: Any, **options: Any) -> Iterator[Any]:
    """Open a page that fails the test on any error and on any request to another host."""
    page = browser.new_page(viewport={"width": 1280, "height": 860}, **options)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on(
        "request",
        lambda request: (
            problems.append(request.url) if request.url.startswith("http") and "127.0.0.1" not in request.url else None
        ),
    )
    yield page
    page.close()
    assert problems == []


def open_report(page: Any, report: Any, hash: str = "") -> None:
    """Open a report at the given URL fragment."""
    page.goto("about:blank")
    page.goto(f"{report.as_uri()}#{hash}")
    page.wait_for_selector("html[data-ready]")
