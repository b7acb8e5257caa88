"""Fixtures of the page tests: a browser, and a report with known values."""

import os

import pytest

from headwise.ui.report import write_report
from tests.ui import report_fixtures
from tests.ui.browser import HEADS, LAYERS, TOKENS, find_browser, open_page


@pytest.fixture(scope="module")
def browser():
    missing = None
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright, missing = None, "playwright is not installed: make install"
    path = find_browser()
    if path is None:
        missing = "there is no Chromium or Chrome here: make browser"
    if missing is not None or sync_playwright is None:
        if os.environ.get("CI") == "true":
            pytest.fail(missing or "no playwright")
        pytest.skip(missing or "no playwright")
    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def report_data():
    sentences = [
        report_fixtures.make_sentence(LAYERS, HEADS, TOKENS),
        report_fixtures.make_sentence(LAYERS, HEADS, 7, seed=1),
    ]
    return report_fixtures.round_six_digits(
        report_fixtures.make_report_data(LAYERS, HEADS, sentences, name="a <i>made</i> book")
    )


@pytest.fixture(scope="module")
def report(report_data, tmp_path_factory):
    return write_report(report_data, tmp_path_factory.mktemp("report") / "heads.html")


@pytest.fixture
def page(browser):
    with open_page(browser) as opened_page:
        yield opened_page
