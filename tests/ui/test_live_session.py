"""The live page in a browser: type a sentence, switch a head off, see what changes, write on."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import headwise as hw
from headwise.ui.live_session import Live
from tests.ui.browser import find_browser
from tests.ui.live_model import View, make_folder, viewing

if TYPE_CHECKING:
    from playwright.sync_api import Page

TEXT = "the goat likes the dog"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("view"))


@pytest.fixture(scope="module")
def view(folder: Path) -> Iterator[View]:
    with viewing(folder, "--token") as opened:
        yield opened


@pytest.fixture
def page(view: View) -> "Iterator[Page]":
    """The live page, opened by the address that was printed; nothing may go wrong in it, nor be asked of anyone else."""
    chromium = find_browser()
    missing = "chromium" if chromium is None else "playwright" if find_spec("playwright") is None else None
    if missing is not None:
        assert os.environ.get("CI") != "true", f"{missing} is missing"
        pytest.skip(f"{missing} is missing")
    from playwright.sync_api import sync_playwright

    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request", lambda asked: None if asked.url.startswith(view.url.split("?")[0]) else wrong.append(asked.url)
        )
        page.goto(view.url)
        page.wait_for_selector("html[data-ready=true]")
        yield page
        browser.close()
    refused = "Failed to load resource: the server responded with a status of 413"  # what the browser itself says of it
    assert not [one for one in wrong if not one.startswith(("data:", refused))]


def test_type_silence_predict_and_step(page: "Page", folder: Path) -> None:
    live = Live(hw.load(folder / "small"))
    assert "token" not in page.url
    look(page, TEXT)
    page.get_by_role("button", name="Predict", exact=True).click()
    page.wait_for_selector("#outcome h3")
    whole, without = live.predict(TEXT)["before"], live.predict(TEXT, ["1.1"])["after"]
    assert told(page, 0) == told(page, 1) == whole
    switch_off = page.get_by_label("Switch a head off")
    switch_off.fill("1.1")
    switch_off.press("Enter")
    page.wait_for_selector("#outcome h3 >> text=Without 1.1")
    assert (told(page, 0), told(page, 1)) == (whole, without)
    page.get_by_label("Switch 1.1 on").click()
    page.wait_for_selector("#outcome h3", state="detached")
    switch_off.fill("1.1")
    switch_off.press("Enter")

    text = TEXT
    for _ in range(2):
        text = live.step(text, ["1.1"])["text"]
        page.get_by_role("button", name="Next word", exact=True).click()
        page.wait_for_function("text => document.querySelector('#steps .context')?.textContent === text", arg=text)
    assert page.locator("#steps [aria-label^='Where']").count() >= 2
    if shots := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(shots) / "live.png", full_page=True)


def test_a_pinned_look_is_explained(page: "Page", folder: Path) -> None:
    look(page, TEXT)
    page.evaluate("location.hash = location.hash.replace(/&?(pin|head)=[^&]*/g, '') + '&pin=4,1&head=1.1&heads=1.1'")
    page.evaluate("dispatchEvent(new PopStateEvent('popstate'))")
    made = hw.why(hw.load(folder / "small"), TEXT, "1.1", 4, 1, lead=True, words=False)
    page.get_by_role("button", name="Why did “dog” look at “goat”?").click()
    first = made.pairs[0]
    page.wait_for_selector(f"text={first.query} · {first.key}")
    if shots := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(shots) / "why.png", full_page=True)


def test_markup_in_a_text_is_text(page: "Page") -> None:
    look(page, "<img src=x onerror=alert(1)> the cat")
    assert page.locator("main img").count() == 0


def test_a_refusal_is_told(page: "Page") -> None:
    page.get_by_role("button", name="Sentence", exact=True).click()
    page.fill("#live-text", "the " * 200)
    with page.expect_response("**/api/sentence") as answer:
        page.get_by_role("button", name="Look", exact=True).click()
    assert answer.value.status == 413
    page.wait_for_selector("#status >> text=200 tokens; at most 128")


def look(page: "Page", text: str) -> None:
    """Type a text and wait until it is shown."""
    page.get_by_role("button", name="Sentence", exact=True).click()
    page.fill("#live-text", text)
    page.get_by_role("button", name="Look", exact=True).click()
    shown = "text => document.querySelector('[aria-label=\"The sentence\"]')?.textContent === text"
    page.wait_for_function(shown, arg=text.replace(" ", ""))


def told(page: "Page", side: int) -> list[tuple[str, float]]:
    """The predictions on one side, as they stand there."""
    bars = page.locator("#outcome > div").nth(side).locator(".bars")
    chances = bars.locator(".number").evaluate_all("all => all.map((one) => Number(one.dataset.value))")
    return list(zip(bars.locator("code").all_text_contents(), chances, strict=True))


@pytest.mark.slow
def test_a_picture_is_saved_under_the_servers_content_policy(page: "Page", tmp_path: Path) -> None:
    """Inline styles are refused there: the fixture fails on any word of the browser's."""
    for kind, start in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        with page.expect_download() as waiting:
            page.click(f"#acts >> text={kind}")
        waiting.value.save_as(tmp_path / kind)
        assert (tmp_path / kind).read_bytes().startswith(start)
