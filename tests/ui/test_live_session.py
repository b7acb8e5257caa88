"""The live page in a browser: type a sentence, silence a head, compare predictions, generate."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import headwise as hw
from headwise.ui.live_session import LiveSession
from tests.ui.browser import enter_text, open_live_page
from tests.ui.live_model import ViewProcess, make_folder, running_view

if TYPE_CHECKING:
    from playwright.sync_api import Page

TEXT = "the goat likes the dog"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("view"))


@pytest.fixture(scope="module")
def view(folder: Path) -> Iterator[ViewProcess]:
    with running_view(folder, "--token") as opened:
        yield opened


@pytest.fixture
def page(view: ViewProcess) -> "Iterator[Page]":
    with open_live_page(view.url) as opened:
        yield opened


def test_live_page_silence_predict_and_step(page: "Page", folder: Path) -> None:
    live = LiveSession(hw.load(folder / "small"))
    assert "token" not in page.url
    enter_text(page, TEXT)
    page.get_by_role("button", name="Predict", exact=True).click()
    page.wait_for_selector("#outcome h3")
    full, silenced = live.predict(TEXT)["before"], live.predict(TEXT, ["1.1"])["after"]
    assert shown_predictions(page, 0) == shown_predictions(page, 1) == full
    switch_off = page.get_by_label("Silence a head")
    switch_off.fill("1.1")
    switch_off.press("Enter")
    page.wait_for_selector("#outcome h3 >> text=Without 1.1")
    assert (shown_predictions(page, 0), shown_predictions(page, 1)) == (full, silenced)
    page.get_by_label("Enable 1.1").click()
    page.wait_for_selector("#outcome h3", state="detached")
    switch_off.fill("1.1")
    switch_off.press("Enter")

    text = TEXT
    for _ in range(2):
        text = live.generate_next_token(text, ["1.1"])["text"]
        page.get_by_role("button", name="Next token", exact=True).click()
        page.wait_for_function("text => document.querySelector('#steps .context')?.textContent === text", arg=text)
    assert page.locator("#steps [aria-label^='Attention of']").count() >= 2
    if screenshots := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(screenshots) / "live.png", full_page=True)


def test_live_page_pinned_edge_is_explained(page: "Page", folder: Path) -> None:
    enter_text(page, TEXT)
    page.evaluate("location.hash = location.hash.replace(/&?(pin|head)=[^&]*/g, '') + '&pin=4,1&head=1.1&heads=1.1'")
    page.evaluate("dispatchEvent(new PopStateEvent('popstate'))")
    attribution = hw.explain(hw.load(folder / "small"), TEXT, "1.1", 4, 1, relative_to_mean=True, words=False)
    page.get_by_role("button", name="Why does “dog” attend to “goat”?").click()
    first = attribution.pairs[0]
    page.wait_for_selector(f"text={first.query} · {first.key}")
    if screenshots := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(screenshots) / "why.png", full_page=True)


def test_live_page_markup_is_shown_as_text(page: "Page") -> None:
    enter_text(page, "<img src=x onerror=alert(1)> the cat")
    assert page.locator("main img").count() == 0


def test_live_page_server_error_is_shown(page: "Page") -> None:
    page.get_by_role("button", name="Sentence", exact=True).click()
    page.fill("#live-text", "the " * 200)
    with page.expect_response("**/api/sentence") as response:
        page.get_by_role("button", name="Run", exact=True).click()
    assert response.value.status == 413
    page.wait_for_selector("#status >> text=200 tokens. Send at most 128")


def shown_predictions(page: "Page", side: int) -> list[tuple[str, float]]:
    """Return the displayed predictions of one side."""
    bars = page.locator("#outcome > div").nth(side).locator(".bars")
    probabilities = bars.locator(".number").evaluate_all("all => all.map((one) => Number(one.dataset.value))")
    return list(zip(bars.locator("code").all_text_contents(), probabilities, strict=True))


@pytest.mark.slow
def test_live_page_figure_download_under_content_policy(page: "Page", tmp_path: Path) -> None:
    """The content security policy blocks inline styles; the fixture fails on any browser message."""
    for kind, start in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        with page.expect_download() as download:
            page.click(f"#acts >> text={kind}")
        download.value.save_as(tmp_path / kind)
        assert (tmp_path / kind).read_bytes().startswith(start)
