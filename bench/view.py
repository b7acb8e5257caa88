"""Size, number of DOM nodes and response time of the page in a browser, compared with the model view of BertViz.

    python -m bench.view
    python -m bench.view --timeout 60   seconds after which a page that is not ready is given up

Requires Chromium or Chrome (make browser). The page of BertViz loads three libraries from the network; here they come from
installed packages, so that only the drawing is measured.
"""

import argparse
import re
import tempfile
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Error, Page, Route, sync_playwright

from bench.measure import BenchmarkReport, add_json_option
from headwise.errors import HeadwiseError
from headwise.ui.report import write_report
from tests.ui.browser import find_browser
from tests.ui.report_fixtures import TEXT, make_maps, make_report_data, make_sentence

RUNS = 5
WATCH = """
window.long = [];
new PerformanceObserver((list) => window.long.push(...list.getEntries().map((one) => one.duration)))
  .observe({ entryTypes: ["longtask"] });
new MutationObserver(() => { if (document.documentElement?.dataset.ready) window.readyAt ??= performance.now(); })
  .observe(document, { subtree: true, attributes: true });
"""
# Replacement of require.js: load both libraries, call back, and record the end of the drawing.
REQUIRE = """
window.require = window.requirejs = (names, act) => Promise.all(["jquery", "d3"].map((name) => new Promise((done) => {
  const script = document.createElement("script");
  script.src = `https://libraries.test/${name}.js`;
  script.onload = done;
  document.head.append(script);
}))).then(() => { act(window.jQuery, window.d3); setTimeout(() => { document.documentElement.dataset.ready = "true"; }); });
window.require.config = () => {};
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=180, help="seconds until a page is given up")
    add_json_option(parser)
    options = parser.parse_args()
    path = find_browser()
    if path is None:
        raise HeadwiseError("Chromium or Chrome: not found. Run make browser.")
    report, rows, timeout_ms = BenchmarkReport("view", options.json), [], 1e3 * options.timeout
    with sync_playwright() as play, tempfile.TemporaryDirectory() as folder:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for layers, heads, tokens in ((12, 12, 32), (12, 12, 128), (32, 32, 512)):
            headwise_page = write_report(
                make_report_data(layers, heads, [make_sentence(layers, heads, tokens)]), Path(folder) / "ours.html"
            )
            size = f"{layers} × {heads} heads, {tokens} tokens"
            runs = [measure_page(browser, headwise_page, timeout_ms) for _ in range(RUNS)]
            rows.append(table_row(f"Headwise, {size}", headwise_page, best_run(runs), options.timeout))
            if heads == 12 and find_spec("bertviz"):
                bertviz_page = write_bertviz(Path(folder) / "theirs.html", layers, heads, tokens)
                num_runs = RUNS if tokens < 100 else 1
                runs = [measure_page(browser, bertviz_page, timeout_ms, hover=False) for _ in range(num_runs)]
                rows.append(table_row(f"BertViz, {size}", bertviz_page, best_run(runs), options.timeout))
        browser.close()
    columns = ["", "MB", "DOM nodes", "ready, s", "longest task while hovering, ms"]
    report.add("pages", "Report pages", columns, rows)
    report.write()


def measure_page(browser: Browser, path: Path, timeout_ms: float, *, hover: bool = True) -> dict[str, Any]:
    """Open a file once. Return the time until ready, the number of nodes, and the longest task while hovering."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.add_init_script(WATCH)
    page.route(re.compile("^https://"), serve_library)
    try:
        page.goto(path.as_uri(), timeout=timeout_ms)
        page.wait_for_selector("html[data-ready]", timeout=timeout_ms)
        timing = page.evaluate("({ ready: window.readyAt / 1000, nodes: document.querySelectorAll('*').length })")
        return {**timing, "longest": longest_hover_task(page) if hover else None}
    except Error as error:
        return {"failed": str(error).splitlines()[0]}
    finally:
        page.close()


def longest_hover_task(page: Page) -> float:
    """Hover over cells of the overview, words of the sentence and cells of the map. Return the longest task."""
    page.evaluate("window.long = []")
    for cell in page.query_selector_all(".cell")[::37][:20]:
        cell.hover()
    page.wait_for_timeout(100)
    max_task = page.evaluate("Math.max(0, ...window.long)")
    page.evaluate("location.hash = '#view=sentence'")
    page.wait_for_selector("main[data-view=sentence] .heat canvas")
    page.wait_for_timeout(300)
    page.evaluate("window.long = []")  # without the tasks of opening the view
    for token in page.query_selector_all(".tokens button")[2:20:3]:
        token.hover()
    heatmap = page.query_selector(".heat canvas")
    assert heatmap is not None
    heatmap.scroll_into_view_if_needed()
    box = heatmap.bounding_box()
    assert box is not None
    for step in range(20):
        page.mouse.move(box["x"] + 20 + step * 9, box["y"] + 20 + step * 7)
    page.wait_for_timeout(100)
    return max(max_task, page.evaluate("Math.max(0, ...window.long)"))


def write_bertviz(path: Path, layers: int, heads: int, tokens: int) -> Path:
    """Return the page of the BertViz model view of the same maps."""
    from bertviz import model_view  # pyright: ignore[reportMissingImports]

    attention = [maps[None] for maps, _, _ in make_maps(layers, heads, tokens)]  # (1, h, T, S) each
    view: Any = model_view(attention, [TEXT[i % len(TEXT)] for i in range(tokens)], html_action="return")
    path.write_text(f"<!doctype html><html><head><meta charset='utf-8'></head><body>{view.data}</body></html>")
    return path


def serve_library(route: Route) -> None:
    """Serve the libraries of a page from installed packages."""
    url = route.request.url
    if "require" in url:
        body = REQUIRE
    elif "d3" in url:
        body = (files("mpld3") / "js" / "d3.v5.min.js").read_text()
    elif "jquery" in url:
        body = (files("sphinxcontrib.jquery") / "jquery.js").read_text()
    else:
        return route.abort()
    return route.fulfill(body=body, content_type="text/javascript")


def best_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the best of several runs."""
    completed = [run for run in runs if "failed" not in run]
    if not completed:
        return runs[0]
    hovers = [run["longest"] for run in completed if run["longest"] is not None]
    return {
        "nodes": completed[0]["nodes"],
        "ready": min(run["ready"] for run in completed),
        "longest": min(hovers, default=None),
    }


def table_row(name: str, path: Path, result: dict[str, Any], timeout: float) -> list[object]:
    """Return the row of a page."""
    size = f"{path.stat().st_size / 1e6:.1f}"
    if "failed" in result:
        reason = f"not ready within {timeout:.0f} s" if "Timeout" in result["failed"] else result["failed"]
        return [name, size, reason, "–", "–"]
    task_text = (
        "–" if result["longest"] is None else "below 50" if result["longest"] == 0 else f"{result['longest']:.0f}"
    )
    return [name, size, f"{result['nodes']:,}", f"{result['ready']:.2f}", task_text]


if __name__ == "__main__":
    main()
