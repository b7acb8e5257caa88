"""Page and figures of a circuit: layout, escaped text, and hovering in a browser."""

import csv
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from headwise.analysis.circuits.circuit_result import (
    CircuitEstimate,
    CircuitEvaluation,
    CircuitExample,
    CircuitResult,
    CircuitSettings,
    EdgeEffect,
    EvaluatedCircuit,
    FaithfulnessCurve,
    FaithfulnessDrop,
    FaithfulnessPoint,
    NodeScore,
    RandomSetTest,
)
from headwise.ui.circuit_layout import drawn_edges, place_nodes
from headwise.ui.circuit_page import circuit_html
from headwise.ui.circuit_text import circuit_parts
from headwise.ui.figures.circuit_plot import draw_circuit_graph, draw_faithfulness_curves

PROMPT = "a </script><b>&b</b> c"
NODES = (
    ("embedding", "embedding", -1),
    ("2.7", "head", 2),
    ("2.1", "head", 2),
    ("5.kv1", "kv", 5),
    ("mlp.5", "mlp", 5),
)
ONE = CircuitEstimate(0.9, 0.8, 1.0)


@pytest.fixture(scope="module")
def result() -> CircuitResult:
    settings = CircuitSettings(
        "in<duction", "llama, 6 layers, 48 heads", "metric", "exact", "given", 0.85, (2, 2, 4), (1, 1, 2), 60, 0
    )
    scores = tuple(NodeScore(name, kind, layer, 1.25, 1.25, 1.0, PROMPT, 2.5) for name, kind, layer in NODES)
    edges = (
        EdgeEffect("2.7", "5.kv1.k", CircuitEstimate(1.5, 1.0, 2.0), PROMPT, 3.25),
        EdgeEffect("embedding", "2.7.v", CircuitEstimate(-0.75, -1.0, -0.5)),
        EdgeEffect("mlp.5", "logits", CircuitEstimate(0.1, -0.1, 0.3)),
    )
    circuit = EvaluatedCircuit(
        tuple(name for name, *_ in NODES),
        tuple(CircuitEvaluation(name, ONE, CircuitEstimate(0.1)) for name in ("resample", "mean", "zero")),
        RandomSetTest((0.1, 0.3), 1 / 3, 1 / 3, ONE, 0.5),
        (FaithfulnessDrop("2.7", CircuitEstimate(0.5, 0.4, 0.6)),),
    )
    points = tuple(FaithfulnessPoint(size, CircuitEstimate(size / 60, math.nan, math.nan)) for size in (1, 5, 60))
    curve = FaithfulnessCurve("resample", points, ONE, ONE, ONE, ONE)
    example = CircuitExample(PROMPT, PROMPT, (" x",), (" y",), "t", 2.0, -2.0, 1.5)
    return CircuitResult(
        settings, 0.95, 2.0, -2.0, scores, circuit, curves=(curve,), examples=(example,), edges=edges, notes=("<i>",)
    )


def test_layout_orders_layers_and_columns(result: CircuitResult) -> None:
    layout = place_nodes(result)
    assert layout.rows == ("embedding", "layer 2", "layer 5", "MLP 5", "output")
    places = {name: (item.column, item.row) for name, item in layout.nodes.items()}
    # Columns: KV head 1, query heads 1 and 7, MLPs.
    assert places == {
        "embedding": (2, 0), "2.1": (1, 1), "2.7": (2, 1), "5.kv1": (0, 2), "mlp.5": (3, 3), "logits": (2, 4),
    }  # fmt: skip


def test_edges_whose_interval_contains_zero_are_not_drawn(result: CircuitResult) -> None:
    receivers = [(sender, receiver) for sender, receiver, _ in drawn_edges(result)]
    assert receivers == [("2.7", "5.kv1"), ("embedding", "2.7")]


class TagCollector(HTMLParser):
    """Collects start tags and text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_escapes_text_and_draws_width_by_effect(result: CircuitResult) -> None:
    html = TagCollector()
    html.feed(circuit_html(result))
    tags = [tag for tag, _ in html.tags]
    assert not {"b", "i", "script"} & set(tags)
    assert PROMPT in html.text
    edges = [values for tag, values in html.tags if tag == "path"]
    widths = {values["data-from"]: float(values["stroke-width"] or 0) for values in edges}
    assert widths["embedding"] == pytest.approx(widths["2.7"] / 2)  # effects −0.75 and 1.5
    assert tags.count("g") == len(NODES) + 1


def test_result_without_edges_and_curves_has_a_page_and_figures(result: CircuitResult, tmp_path: Path) -> None:
    bare = replace(result, edges=(), curves=(), examples=())
    assert "Edges were not measured" in circuit_html(bare)
    assert draw_circuit_graph(bare).rows[1] == {"node": "2.7"}


def test_graph_is_saved_as_image_and_as_edges(result: CircuitResult, tmp_path: Path) -> None:
    figure = draw_circuit_graph(result)
    assert b"<svg" in figure.save(tmp_path / "graph.svg").read_bytes()
    assert figure.save(tmp_path / "graph.pdf").read_bytes().startswith(b"%PDF")
    figure.save(tmp_path / "graph.csv")
    rows = list(csv.DictReader((tmp_path / "graph.csv").read_text().splitlines()))
    assert [(row["sender"], row["receiver"], float(row["effect"])) for row in rows] == [
        ("2.7", "5.kv1.k", 1.5), ("embedding", "2.7.v", -0.75), ("mlp.5", "logits", 0.1),
    ]  # fmt: skip
    assert draw_faithfulness_curves(result).save(tmp_path / "curve.pdf").read_bytes().startswith(b"%PDF")


def test_text_lists_edges(result: CircuitResult) -> None:
    titles = [getattr(part, "title", part) for part in circuit_parts(result)]
    assert "Edges, largest first (3 of 3), exact path patching, judged prompts" in titles


def test_hover_shows_numbers_and_example_of_nodes_and_edges(page: Any, result: CircuitResult, tmp_path: Path) -> None:
    page.goto(result.report(tmp_path / "circuit.html").as_uri())
    page.wait_for_selector("html[data-ready]")
    panel = page.locator(".panel")
    page.locator("[data-node='2.7']").hover()
    assert "0.50 [0.40, 0.60]" in panel.inner_text()
    assert PROMPT in panel.inner_text()
    assert page.locator(".edge.on").count() == 2
    page.locator("[data-node='mlp.5']").focus()
    assert "mlp.5" in panel.inner_text()
    assert page.locator(".edge.on").count() == 0
    page.locator(".edge").last.dispatch_event("mouseenter")  # the largest edge is drawn last
    assert "2.7 → 5.kv1.k" in panel.inner_text()
    assert "keys" in panel.inner_text()
    assert "+3.25" in panel.inner_text()
    page.locator("input[type=range]").fill("1")
    assert page.locator(".edge:visible").count() == 1
