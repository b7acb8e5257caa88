"""Layout of the page for new users: introduction, tooltips, small screens, keyboard, image download, links."""

import re

import pytest

from headwise.ui.glossary import GLOSSARY
from tests.ui.browser import HEADS, LAYERS, open_page, open_report

VIEWS = ("overview", "sentence", "card", "flow", "compare", "relations", "curves", "plan", "claims", "glossary")


def test_page_views_have_one_line_description(page, report):
    lines = set()
    for view in VIEWS:
        open_report(page, report, f"view={view}")
        lines.add(page.text_content("#seen"))
        if view == "overview":
            assert "58 of them have a role" in page.text_content("#hello")  # 72 heads, every fifth unclear
            page.click("#hello button")
        assert page.locator("#hello").count() == 0, "shown only once"
    assert len(lines) == len(VIEWS)
    assert "" not in lines


def test_page_axes_are_labeled(page, report):
    open_report(page, report)
    assert page.text_content(".board .axis-name") == "↓ layer, → head"
    assert page.locator(".numbers span").all_text_contents()[1:] == [str(head) for head in range(HEADS)]
    open_report(page, report, "view=plan")
    assert page.text_content(".axis-name") == "↓ layer, → head"


def test_page_glossary_hints_by_pointer_and_keyboard(page, report):
    open_report(page, report, "view=card&head=1.0")
    page.hover('dl [data-word="baseline"]')
    assert GLOSSARY["baseline"].meaning in page.text_content("#hint")
    page.mouse.move(0, 0)
    assert page.is_hidden("#hint")
    page.focus('[data-about="idle pattern"] [data-word="idle pattern"]')
    assert f"docs/{GLOSSARY['idle pattern'].docs}" in page.text_content("#hint")
    page.keyboard.press("Escape")
    assert page.is_hidden("#hint")
    assert page.get_attribute("main", "data-view") == "card", "the first Escape closes only the tooltip"
    page.keyboard.press("Enter")
    page.wait_for_selector('main[data-view="glossary"]')
    page.wait_for_function("document.activeElement.id === 'word-idle pattern'")
    assert "word=idle+pattern" in page.url
    assert page.locator('[data-table="words"] tbody tr').count() == len(GLOSSARY)
    page.go_back()
    page.wait_for_selector('main[data-view="card"]')


def test_page_card_shows_head_summary(page, report):
    open_report(page, report, "view=card&head=1.0")
    items = page.locator('section[aria-label="Summary"] li')
    assert items.first.text_content() == "Head 1.0 tells a <b>story</b>. how?"
    assert page.locator("main .big .sign").all_text_contents() == ["pr", "po"]


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_page_phone_layout_is_usable(browser, report, scheme):
    with open_page(browser, color_scheme=scheme, has_touch=True) as page:
        page.set_viewport_size({"width": 400, "height": 800})
        for view in VIEWS:
            open_report(page, report, f"view={view}")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        open_report(page, report)
        box = page.locator('[data-head="0.0"]').bounding_box()
        assert min(box["width"], box["height"]) >= 24
        assert not page.is_visible('input[type="search"]')
        page.locator(".fold summary").tap()
        assert page.is_visible('input[type="search"]')
        page.tap('[data-head="3.2"]')
        page.wait_for_selector('main[data-view="card"]')
        open_report(page, report, "view=sentence")
        scroll_and_client_width = page.evaluate(
            "(() => { const s = document.querySelector('.strip'); return [s.scrollWidth, s.clientWidth]; })()"
        )
        assert scroll_and_client_width[0] > scroll_and_client_width[1]


def test_page_keyboard_only_reaches_head_and_glossary(page, report):
    open_report(page, report)
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
    page.wait_for_selector('main[data-view="glossary"]')


def test_page_heads_found_by_text_and_cost(page, report, report_data):
    get_heads = "all => all.map(one => one.dataset.head)"
    open_report(page, report)
    page.fill('input[type="search"]', "head 3.2 tells")
    assert page.locator(".cell:not(.dim)").evaluate_all(get_heads) == ["3.2"]
    open_report(page, report, "cost_filter=pruned")
    assert page.locator(".cell:not(.dim)").evaluate_all(get_heads) == [f"{layer}.0" for layer in range(LAYERS)]
    open_report(page, report, "cost_filter=free&sort=cost qk 4")
    costs = [
        next(h for h in report_data["heads"] if h["address"] == a)["cost"]["costs"][0]["loss_increase"]
        for a in page.locator(".cell").evaluate_all(get_heads)
    ]
    assert costs == sorted(costs, reverse=True)


def test_page_sentence_shows_important_heads_without_idle_targets(page, report, report_data):
    import zlib
    from base64 import b64decode

    import numpy as np

    sentence = report_data["sentences"][0]
    n = len(sentence["tokens"])
    maps, shares = (np.frombuffer(zlib.decompress(b64decode(sentence[name])), np.uint8) for name in ("maps", "shares"))
    weights = (maps.reshape(-1, n, n) / 255.0) ** 2
    weights = weights * ~np.eye(n, dtype=bool)
    weights[:, :, 0] = 0
    scores = weights.max(2) * shares.reshape(-1, n)
    chips = 'main .chip button[title="Open this head"]'

    def shown_heads():
        return [re.findall(r"\d+\.\d+", text)[0] for text in page.locator(chips).all_text_contents()]

    open_report(page, report, "view=sentence")
    assert shown_heads() == [sentence["heads"][i] for i in np.argsort(-scores.sum(1), kind="stable")[:4]]
    page.hover('[data-token="9"]')
    assert shown_heads() == [sentence["heads"][i] for i in np.argsort(-scores[:, 9], kind="stable")[:4]]
    fewer = page.locator("main .strip svg path").count()
    page.click('[data-token="9"]')
    page.check('[data-key="show idle attention"]')
    page.wait_for_function("location.hash.includes('idle=1')")
    page.wait_for_function(f"document.querySelectorAll('main .strip svg path').length > {fewer}")


@pytest.mark.parametrize("view", ["overview", pytest.param("card", marks=pytest.mark.slow)])
def test_page_view_saved_as_figure(page, report, view, tmp_path):
    open_report(page, report, f"view={view}&head=1.0")
    for kind, start in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        with page.expect_download() as download:
            page.click(f"#acts >> text={kind}")
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        assert path.suffix == f".{kind.lower()}"
        assert path.read_bytes().startswith(start)
        assert path.stat().st_size > 10_000


def test_page_link_restores_view(browser, report):
    with open_page(browser, permissions=["clipboard-read", "clipboard-write"]) as page:
        open_report(page, report, "view=card&head=2.3")
        page.click("text=Link")
        page.wait_for_function("document.getElementById('status').textContent.includes('Link')")
        assert page.url.endswith("#view=card&head=2.3")
