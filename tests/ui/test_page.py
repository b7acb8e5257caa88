"""The page in a browser: it shows the report data, and keys, links and both page forms work."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest

from headwise.ui.claims_page_data import claims_report_data
from headwise.ui.report import write_report
from headwise.ui.report_data import page_files
from tests.ui import report_fixtures
from tests.ui.browser import HEADS, LAYERS, TOKENS, open_page, open_report

VIEWS = ("overview", "sentence", "card", "flow", "compare", "relations", "curves", "plan", "claims", "glossary")


@pytest.mark.parametrize("view", VIEWS)
def test_page_every_view_opens_without_errors(page, report, view):
    open_report(page, report, f"view={view}")
    assert page.get_attribute("main", "data-view") == view
    assert page.locator("main .error").count() == 0
    assert page.locator("main section").count() >= 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.querySelectorAll('*').length") < 2_500


def test_page_card_equals_report_data(page, report, report_data):
    for address in ("5.1", "0.0", "3.11", "4.0"):
        head = next(entry for entry in report_data["heads"] if entry["address"] == address)
        open_report(page, report, f"view=card&head={address}")
        assert page.text_content('[data-fact="role"]') == head["role"] + (" +1" if head["roles"] else "")
        assert page.text_content('[data-fact="evidence"]') == head["evidence_level"]
        if head["score"] is not None:
            assert float(page.get_attribute('[data-fact="score"]', "data-value")) == head["score"]
            assert page.text_content('[data-fact="score"]') == f"{head['score']:.3f}"
            assert float(page.get_attribute('[data-fact="baseline"]', "data-value")) == head["baseline"]
        cells = page.locator('section[aria-label="Metrics"] tbody td')
        assert cells.evaluate_all("all => all.map(x => Number(x.dataset.value))") == list(head["metrics"].values())
        top_context = page.locator('section[aria-label="Largest attention weights"] .context mark.token').first
        assert top_context.text_content().strip() == "<b>ship</b>"  # text stays text
        cases = page.locator('section[aria-label="Examples of its roles"]')
        counts = cases.count(), cases.locator(".hit").count(), cases.locator(".miss").count()
        assert counts == ((1, 6, 2) if head["roles"] else (0, 0, 0))
        if head["roles"]:
            assert page.text_content('[data-fact="evaluated on"]') == "the probe set"
            assert f"{head['role']} >, the probe set: 3 of 4 examples are hits" in cases.text_content()
            assert "Also: possessive > " in page.text_content('[data-fact="roles"]')
            assert page.text_content('[data-fact="skipped"]') == "Not tested: successor. too <b>weak</b>."
            assert "corrected for 5,395 tests; for roles on prompts, 1,617 tests" in page.text_content("main")
            assert cases.locator(".miss").first.text_content() == "✗ 0.71the old painter sees the <i>sea</i> ship"
    assert page.text_content("#model-name") == "a <i>made</i> book"


def test_page_costs_equal_report_data(page, report, report_data):
    open_report(page, report, "view=plan")
    badges = {head: page.text_content(f'[data-head="{head}"]') for head in ("0.0", "0.1", "0.2", "1.1", "1.3")}
    assert badges == {"0.0": "✕", "0.1": "·", "0.2": "≋", "1.1": "4·3", "1.3": "4·3 ≋"}
    assert page.text_content('[data-fact="weights"]') == "538.0 MB → 151.0 MB"
    assert page.text_content('[data-fact="KV cache at 4,096 tokens"]') == "188.7 MB → 97.4 MB, 1.94× smaller"
    assert "<b>on</b> a text" in page.text_content("pre.description")  # text stays text
    page.select_option('[data-key="color"]', "qk at 4 bits")
    assert float(page.get_attribute('[data-head="3.5"]', "data-value")) == pytest.approx(0.0015)
    assert page.text_content('[data-head="3.5"]') == "0.002"
    assert "cost=qk" in page.url
    page.click('[data-head="3.2"]')
    assert page.get_attribute("main", "data-view") == "card"
    assert page.text_content('[data-fact="KV cache"]') == "KV head 3.1: 68 kB of 2097 at 4,096 tokens"
    assert page.text_content('[data-fact="state"]') == "cache: streaming 4 + 128; shares its KV head with 3.3"
    drifts = page.locator('[data-table="cost"] td:last-child').evaluate_all(
        "all => all.map(x => Number(x.dataset.value))"
    )
    assert drifts == [0.002, 0.002]
    assert page.locator('main [aria-label="Cost"]').count() == 1


def test_page_keyboard_navigation_and_history(page, report):
    open_report(page, report)
    page.focus('[data-head="0.0"]')
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.dataset.head") == "2.1"
    assert "2.1" in page.text_content(".peek")
    page.keyboard.press("Enter")
    page.wait_for_selector('main[data-view="card"]')
    assert page.evaluate("location.hash") == "#view=card&head=2.1"
    page.keyboard.press("Escape")
    page.wait_for_selector('main[data-view="overview"]')
    page.go_back()
    page.wait_for_selector('main[data-view="card"]')
    assert page.text_content("main section h2") == "Head 2.1"


def test_page_grid_has_aria_roles_and_labels(page, report):
    open_report(page, report)
    assert page.locator('[role="grid"] [role="row"]').count() == LAYERS
    assert page.locator('[role="grid"] [role="gridcell"]').count() == LAYERS * HEADS
    label = page.get_attribute('[data-head="1.4"]', "aria-label")
    assert label == "head 1.4: induction +1, the probe set, causal, score 0.15, baseline 0.06"  # (1 + 4/100) / 7
    nameless = page.evaluate(
        """[...document.querySelectorAll('button, select, input, canvas[tabindex]')].filter((one) =>
        !(one.textContent.trim() || one.getAttribute('aria-label') || one.closest('label'))).length"""
    )
    assert nameless == 0


def test_page_role_filter_and_search(page, report, report_data):
    open_report(page, report, "role=possessive")  # not the first role of any head
    assert (
        page.locator(".cell:not(.dim)").count()
        == sum("possessive" in head["roles"] for head in report_data["heads"])
        > 0
    )
    open_report(page, report, "role=induction")
    highlighted = page.locator(".cell:not(.dim)").evaluate_all("all => all.map(one => one.dataset.head)")
    assert highlighted == [head["address"] for head in report_data["heads"] if head["role"] == "induction"]
    open_report(page, report)
    page.fill('input[type="search"]', "5.1")
    assert page.locator(".cell:not(.dim)").evaluate_all("all => all.map(one => one.dataset.head)") == [
        "5.1",
        "5.10",
        "5.11",
    ]


def test_page_report_has_no_live_controls(page, report):
    open_report(page, report, "view=sentence")
    assert page.locator("textarea, #live-text").count() == 0
    open_report(page, report, "view=card&head=5.1")
    assert page.get_by_text("Silence head").count() == 0


def test_page_claims_equal_report_data(page, report, report_data):
    open_report(page, report, "view=claims")
    summary = "1 holds, 1 does not hold, 1 depends on conditions, 1 is undecided, 1 is true by construction."
    assert page.text_content('[data-fact="summary"]') == summary
    for claim in report_data["claims"]:
        part = page.locator(f"#claim-{claim['name']}")
        assert part.locator("h2").text_content() == f"{claim['number']}. {claim['statement']}"  # text is escaped
        verdict = part.locator('[data-fact="verdict"]').text_content()
        assert claim["verdict"] in verdict
        assert claim["depends_on"] in verdict
        assert ("indicative: 1 seed" in verdict) == claim["preliminary"]
        facts = part.locator("dd").all_text_contents()
        assert facts[:3] == [claim["counterevidence"], claim["setup"], claim["rule"]]
        assert (claim["identity"] in facts) == bool(claim["identity"])
        assert facts[-1] == claim["command"]
        part.locator("summary").click()
        cells = part.locator("tbody td.number").evaluate_all(
            "all => all.map(one => one.dataset.value === undefined ? null : Number(one.dataset.value))"
        )
        assert cells == [row[end] for row in claim["statistics"] for end in ("mean", "low", "high")]
    listed = page.locator('[data-table="claims"] tbody tr').all_text_contents()
    assert [("indicative" in row) for row in listed] == [claim["preliminary"] for claim in report_data["claims"]]


def test_page_claim_log_axis_and_bars_from_zero(page, report, report_data):
    open_report(page, report, "view=claims")
    lines = page.locator("#claim-more-heads svg")
    x_positions = lines.locator("circle").evaluate_all("all => all.map(one => Number(one.getAttribute('cx')))")
    steps = [b - a for a, b in pairwise(x_positions)]
    assert steps == pytest.approx([steps[0]] * 6)  # 1, 2, 4 … 64 heads
    assert {"1", "2", "4", "8", "16", "32", "64"} <= set(lines.locator("text").all_text_contents())
    get_edges = "all => all.map(one => { const at = one.getBoundingClientRect(); return [at.left, at.right]; })"
    (left, right), (low, high) = page.locator("#claim-roles .fill").evaluate_all(get_edges)
    assert left == pytest.approx(high, abs=0.5)  # +0.5 is right of zero, −0.25 left of it
    assert right - left == pytest.approx(2 * (high - low), rel=0.02)
    assert page.locator("#claim-roles .whisker").count() == 0  # one seed
    assert (page.locator("#claim-scale .fill").count(), page.locator("#claim-scale .dot").count()) == (0, 2)
    track = page.locator("#claim-scale .track").evaluate_all(get_edges)[0]
    ends = page.locator("#claim-scale .whisker").evaluate_all(get_edges)
    lowest, highest = 2.275 - 0.0625, 2.45 + 0.0625  # ends of the scale without its 5% margin
    padding = 0.05 * (highest - lowest)
    fraction = (2.45 - 0.0625 - lowest + padding) / (highest - lowest + 2 * padding)
    assert ends[1][0] == pytest.approx(track[0] + fraction * (track[1] - track[0]), abs=1.5)


def test_page_claims_filter_keyboard_and_url(page, report):
    open_report(page, report, "view=claims&verdict=depends")
    assert page.locator("main .claim").count() == 1
    page.click('[data-key="verdict "]')
    page.wait_for_selector("#claim-scale")
    assert page.evaluate("location.hash") == "#view=claims"
    page.focus('[data-key="to scale"]')
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.textContent.startsWith('3. ')")
    assert page.evaluate("location.hash") == "#view=claims&claim=scale"
    box = page.locator("#claim-scale").bounding_box()
    assert box["y"] + box["height"] <= 861
    page.focus('[data-key="from scale"]')
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.dataset.key === 'to scale'")
    page.go_back()
    page.wait_for_function("document.activeElement.textContent.startsWith('3. ')")


def test_page_claims_only_report_shows_only_claims(browser, report_data, tmp_path):
    claims_only = {**claims_report_data([]), "claims": report_data["claims"][:2]}
    path = write_report(claims_only, tmp_path / "claims.html")
    with open_page(browser) as page:
        page.set_viewport_size({"width": 400, "height": 800})
        open_report(page, path, "view=card")
        assert page.locator("nav button").all_text_contents() == ["Claims"]  # the report has no sentences and no heads
        assert page.get_attribute("main", "data-view") == "claims"
        assert page.text_content("#model-facts") == "2 claims · 1 to 3 seeds"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_page_without_claims_has_no_claims_view(page, report_data, tmp_path):
    before = {name: value for name, value in report_data.items() if name != "claims"}  # a report may have no claims
    open_report(page, write_report(before, tmp_path / "heads.html"), "view=claims")
    assert "Claims" not in page.locator("nav button").all_text_contents()
    assert page.get_attribute("main", "data-view") == "overview"


@pytest.mark.slow
def test_page_rows_equal_maps(page, report, report_data):
    import zlib
    from base64 import b64decode

    import numpy as np

    maps = (np.frombuffer(zlib.decompress(b64decode(report_data["sentences"][0]["maps"])), np.uint8) / 255.0) ** 2
    row = maps.reshape(LAYERS * HEADS, TOKENS, TOKENS)[2 * HEADS + 3, 11]
    open_report(page, report, "view=sentence&head=2.3&heads=2.3&pin=11,4")
    shown_weights = page.locator("details tbody td").evaluate_all("all => all.map(one => Number(one.dataset.value))")
    assert np.allclose(shown_weights, row[row > 0], atol=1e-6)
    readout = page.text_content("main .readout")
    assert readout == f"ever → us  {row[4]:.3f}  (pinned)"


@pytest.mark.slow
def test_page_hover_token_shows_attention(page, report):
    open_report(page, report, "view=sentence&heads=2.3,1.1")
    page.hover('[data-token="9"]')
    assert page.text_content("main table caption") == "Attention from “never”"
    assert page.locator("main .strip svg path").count() >= 2
    page.click('[data-token="9"]')
    assert "token=9" in page.evaluate("location.hash")
    page.check('[data-key="weight by value norms"]')
    page.wait_for_function("location.hash.includes('value_weighted=1')")


@pytest.mark.slow
def test_page_theme_follows_system_and_switch(browser, report):
    get_background = "getComputedStyle(document.body).backgroundColor"
    for scheme, other in (("light", "dark"), ("dark", "light")):
        with open_page(browser, color_scheme=scheme) as page:
            open_report(page, report)
            first = page.evaluate(get_background)
            page.click("#theme")
            page.wait_for_function(f"document.documentElement.dataset.theme === '{other}'")
            assert page.evaluate(get_background) != first
            assert f"theme={other}" in page.evaluate("location.hash")


@pytest.mark.slow
def test_page_relations_show_best_head_and_baseline(page, report, report_data):
    open_report(page, report, "view=relations")
    row = report_data["relations"]["rows"][0]
    cells = (
        page.locator('[data-table="relations"] tbody tr')
        .first.locator("td.number")
        .evaluate_all("all => all.map(one => Number(one.dataset.value))")
    )
    assert cells == [row["arcs"], row["accuracy"], row["offset_accuracy"], row["excess"], row["p"]]
    best = page.locator('[data-table="relation"] tbody tr').first
    assert best.locator("th").text_content() == row["head"]
    assert float(best.locator("td.number").first.get_attribute("data-value")) == row["accuracy"]


@pytest.mark.slow
def test_page_compare_head_with_other_report(page, report, report_data, tmp_path):
    other = write_report(report_fixtures.make_report_data(2, 3, name="smaller"), tmp_path / "other.html")
    open_report(page, report, "view=compare&head=1.1")
    page.set_input_files('input[type="file"]', other)
    page.wait_for_selector("text=1.1 in smaller")
    score = (
        page.locator("main section")
        .first.locator("tr", has_text="score")
        .locator("td")
        .evaluate_all("all => all.map(one => Number(one.dataset.value))")
    )
    assert score == [0.144286, 0.336667]  # (1 + 1/100) / 7 and / 3, with six digits


@pytest.mark.slow
def test_page_live_form_posts_requests(browser, report_data):
    requests = []

    class Server(BaseHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

        def answer(self, body, kind):
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            name = self.path.strip("/") or "index.html"
            if name == "api/report":
                return self.answer(json.dumps(report_data).encode(), "application/json")
            body = page_files()[name]
            if name == "index.html":
                body = body.replace(b"<head>", b'<head><meta name="headwise-live" content="1">')
            kinds = {"html": "text/html; charset=utf-8", "css": "text/css", "js": "text/javascript"}
            return self.answer(body, kinds[name.rsplit(".", 1)[1]])

        def do_POST(self):
            payload = json.loads(self.rfile.read(int(self.headers["content-length"])))
            requests.append((self.path, payload))
            responses = {
                "/api/sentence": {**report_fixtures.make_sentence(LAYERS, HEADS, 5, seed=2), "text": payload["text"]},
                "/api/predict": {"before": [[" sea", 0.5]], "after": [[" <b>land</b>", 0.25]]},
                "/api/step": {
                    "token": " sea",
                    "text": payload["text"] + " sea",
                    "rows": {"5.1": [0.5, 0.25, 0.125, 0.125, 0.0]},
                },
            }[self.path]
            self.answer(json.dumps(responses).encode(), "application/json")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with open_page(browser) as page:
            page.goto(f"http://127.0.0.1:{server.server_port}/#view=sentence&heads=5.1")
            page.wait_for_selector("html[data-ready]")
            page.fill("#live-text", "A new text")
            page.click('[data-key="Run"]')
            page.wait_for_function("location.hash.includes('sentence=2')")
            page.fill('[data-key="silence head"]', "5.1")
            page.keyboard.press("Enter")
            page.wait_for_selector("text=Without 5.1")
            assert "␣<b>land</b>" in page.text_content("#outcome")
            page.click("text=Next token")
            page.wait_for_selector("#steps .tokens")
            assert "A new text sea" in page.text_content("#steps")
    finally:
        server.shutdown()
        server.server_close()
    assert ("/api/sentence", {"text": "A new text"}) in requests
    assert ("/api/predict", {"text": "A new text", "silenced": ["5.1"]}) in requests
    assert ("/api/step", {"text": "A new text", "silenced": ["5.1"]}) in requests


@pytest.mark.slow
def test_page_1024_heads_512_tokens_has_few_nodes(page, tmp_path):
    """The time is measured by bench.view."""
    open_report(
        page,
        write_report(
            report_fixtures.make_report_data(32, 32, [report_fixtures.make_sentence(32, 32, 512)]),
            tmp_path / "big.html",
        ),
    )
    assert page.evaluate("document.querySelectorAll('*').length") <= 10_000
