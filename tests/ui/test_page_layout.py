"""What a stranger meets: one line that says what is seen, words that explain themselves, phones, keys, pictures, links."""

import re

import pytest

from headwise.ui.glossary import WORDS
from tests.ui.browser import HEADS, LAYERS, opened, show

VIEWS = ("overview", "sentence", "card", "flow", "compare", "relations", "curves", "plan", "claims", "words")


def test_each_view_says_in_one_line_what_is_seen_and_the_first_visit_says_more(page, report):
    lines = set()
    for view in VIEWS:
        show(page, report, f"view={view}")
        lines.add(page.text_content("#seen"))
        if view == "overview":
            assert "does: for 58 of them something was found" in page.text_content(
                "#hello"
            )  # 72 heads, every fifth unclear
            page.click("#hello button")
        assert page.locator("#hello").count() == 0, "said once"
    assert len(lines) == len(VIEWS)
    assert "" not in lines


def test_axes_say_layer_and_head(page, report):
    show(page, report)
    assert page.text_content(".board .axis-name") == "↓ layer, → head"
    assert page.locator(".numbers span").all_text_contents()[1:] == [str(head) for head in range(HEADS)]
    show(page, report, "view=plan")
    assert page.text_content(".axis-name") == "↓ layer, → head"


def test_words_explain_themselves_by_pointer_and_by_keys(page, report):
    show(page, report, "view=card&head=1.0")
    page.hover('dl [data-word="baseline"]')
    assert WORDS["baseline"].meaning in page.text_content("#hint")
    page.mouse.move(0, 0)
    assert page.is_hidden("#hint")
    page.focus('[data-about="rests"] [data-word="rests"]')
    assert f"docs/{WORDS['rests'].docs}" in page.text_content("#hint")
    page.keyboard.press("Escape")
    assert page.is_hidden("#hint")
    assert page.get_attribute("main", "data-view") == "card", "the first Escape closes the hint alone"
    page.keyboard.press("Enter")
    page.wait_for_selector('main[data-view="words"]')
    page.wait_for_function("document.activeElement.id === 'word-rests'")
    assert "word=rests" in page.url
    assert page.locator('[data-table="words"] tbody tr').count() == len(WORDS)
    page.go_back()
    page.wait_for_selector('main[data-view="card"]')


def test_a_card_tells_the_story_as_text(page, report):
    show(page, report, "view=card&head=1.0")
    told = page.locator('section[aria-label="In plain words"] li')
    assert told.first.text_content() == "Head 1.0 tells a <b>story</b>. how?"
    assert page.locator("main .big .sign").all_text_contents() == ["pr", "po"]


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_on_a_phone_cells_can_be_touched_arcs_scroll_and_controls_fold(browser, report, scheme):
    with opened(browser, color_scheme=scheme, has_touch=True) as page:
        page.set_viewport_size({"width": 400, "height": 800})
        for view in VIEWS:
            show(page, report, f"view={view}")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        show(page, report)
        box = page.locator('[data-head="0.0"]').bounding_box()
        assert min(box["width"], box["height"]) >= 24
        assert not page.is_visible('input[type="search"]')
        page.locator(".fold summary").tap()
        assert page.is_visible('input[type="search"]')
        page.tap('[data-head="3.2"]')
        page.wait_for_selector('main[data-view="card"]')
        show(page, report, "view=sentence")
        wide = page.evaluate(
            "(() => { const s = document.querySelector('.strip'); return [s.scrollWidth, s.clientWidth]; })()"
        )
        assert wide[0] > wide[1]


def test_with_keys_alone_one_comes_from_the_grid_to_a_head_to_a_word_and_back(page, report):
    show(page, report)
    reached = ""
    for _ in range(60):
        page.keyboard.press("Tab")
        reached = page.evaluate("document.activeElement.dataset.head ?? ''")
        if reached:
            break
    assert reached == "0.0"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector('main[data-view="card"]')
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('whence')"):
            break
    assert page.is_visible("#hint")
    page.keyboard.press("Enter")
    page.wait_for_selector('main[data-view="words"]')


def test_heads_are_found_by_text_and_by_price(page, report, book):
    lit = "all => all.map(one => one.dataset.head)"
    show(page, report)
    page.fill('input[type="search"]', "head 3.2 tells")
    assert page.locator(".cell:not(.dim)").evaluate_all(lit) == ["3.2"]
    show(page, report, "cheap=cut")
    assert page.locator(".cell:not(.dim)").evaluate_all(lit) == [f"{layer}.0" for layer in range(LAYERS)]
    show(page, report, "cheap=free&sort=price qk 4")
    costs = [
        next(h for h in book["heads"] if h["address"] == a)["price"]["costs"][0]["more"]
        for a in page.locator(".cell").evaluate_all(lit)
    ]
    assert costs == sorted(costs, reverse=True)


def test_the_sentence_shows_heads_that_matter_and_leaves_resting_places_out(page, report, book):
    import zlib
    from base64 import b64decode

    import numpy as np

    given = book["sentences"][0]
    n = len(given["tokens"])
    maps, shares = (np.frombuffer(zlib.decompress(b64decode(given[name])), np.uint8) for name in ("maps", "shares"))
    weights = (maps.reshape(-1, n, n) / 255.0) ** 2
    weights = weights * ~np.eye(n, dtype=bool)
    weights[:, :, 0] = 0
    scores = weights.max(2) * shares.reshape(-1, n)
    chips = 'main .chip button[title="Open its card"]'

    def shown():
        return [re.findall(r"\d+\.\d+", text)[0] for text in page.locator(chips).all_text_contents()]

    show(page, report, "view=sentence")
    assert shown() == [given["heads"][i] for i in np.argsort(-scores.sum(1), kind="stable")[:4]]
    page.hover('[data-token="9"]')
    assert shown() == [given["heads"][i] for i in np.argsort(-scores[:, 9], kind="stable")[:4]]
    fewer = page.locator("main .strip svg path").count()
    page.click('[data-token="9"]')
    page.check('[data-key="show resting places"]')
    page.wait_for_function("location.hash.includes('rests=1')")
    page.wait_for_function(f"document.querySelectorAll('main .strip svg path').length > {fewer}")


@pytest.mark.parametrize("view", ["overview", pytest.param("card", marks=pytest.mark.slow)])
def test_a_view_is_saved_as_a_picture(page, report, view, tmp_path):
    show(page, report, f"view={view}&head=1.0")
    for kind, start in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        with page.expect_download() as waiting:
            page.click(f"#acts >> text={kind}")
        path = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(path)
        assert path.suffix == f".{kind.lower()}"
        assert path.read_bytes().startswith(start)
        assert path.stat().st_size > 10_000


def test_a_link_leads_back_to_just_this(browser, report):
    with opened(browser, permissions=["clipboard-read", "clipboard-write"]) as page:
        show(page, report, "view=card&head=2.3")
        page.click("text=Link")
        page.wait_for_function("document.getElementById('status').textContent.includes('link')")
        assert page.url.endswith("#view=card&head=2.3")
