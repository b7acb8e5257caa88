"""Start an installed browser; nothing is downloaded."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

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


@contextmanager
def open_live_page(url: str) -> Iterator[Any]:
    """Open the live page. Any message of the browser and any request to another host fails the test."""
    chromium = find_browser()
    missing = "chromium" if chromium is None else "playwright" if find_spec("playwright") is None else None
    if missing is not None:
        assert os.environ.get("CI") != "true", f"{missing} is missing"
        pytest.skip(f"{missing} is missing")
    from playwright.sync_api import sync_playwright

    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.on(
            "console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda request: None if request.url.startswith(url.split("?")[0]) else problems.append(request.url),
        )
        page.goto(url)
        page.wait_for_selector("html[data-ready=true]")
        yield page
        browser.close()
    refused = "Failed to load resource: the server responded with a status of 413"  # message of the browser
    assert not [problem for problem in problems if not problem.startswith(("data:", refused))]


def enter_text(page: Any, text: str) -> None:
    """Type a text and wait for its display."""
    page.get_by_role("button", name="Sentence", exact=True).click()
    page.fill("#live-text", text)
    page.get_by_role("button", name="Run", exact=True).click()
    is_shown = "text => document.querySelector('[aria-label=\"The sentence\"]')?.textContent === text"
    page.wait_for_function(is_shown, arg=text.replace(" ", ""))
