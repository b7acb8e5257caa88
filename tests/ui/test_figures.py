"""Figures match the profile, and the file suffix selects a figure or its data."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import headwise as hw
from headwise.analysis.roles.head_history import DEFAULT_METRICS, HeadHistory
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.similarity.compare_heads import HeadSimilarityResult
from headwise.compression.paired_evaluation import LossEstimate
from headwise.compression.pruning_curve import CurvePoint, PruningCurves
from headwise.errors import HeadwiseError
from headwise.ui.figures.diagram import draw_attention_diagram
from headwise.ui.figures.head_history_plots import draw_history
from headwise.ui.figures.role_grid import LEVEL_ALPHA, NO_ROLE_COLOR
from headwise.ui.figures.sentence_maps import draw_arcs, draw_heat_map
from headwise.ui.figures.tradeoff_curves import draw_pruning, draw_tradeoff
from headwise.ui.role_badges import role_badge
from tests.analysis.constructed_heads import DECODER, decoder, documents, encoder


@pytest.fixture(scope="module")
def profile() -> Profile:
    return hw.profile(decoder(), documents())


@pytest.fixture(scope="module")
def comparison() -> HeadSimilarityResult:
    return hw.compare_heads(decoder(), [document.text for document in documents(12)], rows=64)


def test_plot_roles_colors_every_head_by_role(profile: Profile) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import FancyBboxPatch

    saved_figure = profile.plot.roles()
    assert {row["head"]: row["role"] for row in saved_figure.rows} == {
        head: role for head, (role, _) in DECODER.items()
    }
    axes = saved_figure.figure.axes[0]
    cells = [patch for patch in axes.patches if isinstance(patch, FancyBboxPatch)]
    assert len(cells) == len(DECODER)
    for cell, (head, (role, level)) in zip(cells, DECODER.items(), strict=True):
        layer, index = map(int, head.split("."))
        assert (round(cell.get_x() + 0.44), round(cell.get_y() + 0.44)) == (layer, index)
        assert to_rgb(cell.get_facecolor()[:3]) == to_rgb(NO_ROLE_COLOR if role == "unclear" else role_badge(role)[1])
        if role != "unclear" and level is not None:
            assert cell.get_alpha() == LEVEL_ALPHA[level]


def test_plot_offsets_bar_at_head_offset(profile: Profile) -> None:
    saved_figure = profile.plot.offsets("1.1,1.2")
    for axes, offset in zip(saved_figure.figure.axes, (-3, 0), strict=True):
        heights = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in axes.patches}  # pyright: ignore[reportAttributeAccessIssue]
        assert max(heights, key=lambda key: heights[key]) == offset
        assert heights[offset] > 0.9
        assert min(heights) == -16, "a decoder does not attend to later tokens"
        assert max(heights) == 0
    assert {row["head"] for row in profile.plot.offsets().rows} >= {"0.0", "1.1", "1.2"}
    ahead = hw.profile(encoder(), documents(20)).plot.offsets("0.0")
    best = max(ahead.rows, key=lambda row: row["weight"])
    assert best["offset"] == 1


def test_plot_depth_equals_profile_metrics(profile: Profile) -> None:
    saved_figure = profile.plot.depth(("entropy", "first"))
    dots, line = saved_figure.figure.axes[0].lines
    np.testing.assert_array_equal(dots.get_ydata(), profile.metric("entropy"))
    np.testing.assert_array_equal(
        line.get_ydata(), [np.mean(profile.metric("entropy")[layer_slice]) for layer_slice in (slice(6), slice(6, 12))]
    )
    assert {row["head"]: row["value"] for row in saved_figure.rows if row["measure"] == "first"}["0.4"] == profile[
        "0.4"
    ].metrics["first"]
    with pytest.raises(HeadwiseError, match="did you mean entropy"):
        profile.plot.depth(("entropi",))


def test_plot_map_distances_equal_comparison(profile: Profile, comparison: HeadSimilarityResult) -> None:
    saved_figure = profile.plot.embedding(comparison)
    positions = np.array([[row["x"], row["y"]] for row in saved_figure.rows])
    np.testing.assert_allclose(np.asarray(saved_figure.figure.axes[0].collections[0].get_offsets()), positions)
    same = [
        index for index, row in enumerate(saved_figure.rows) if row["head"] in ("0.4", "1.4")
    ]  # both have uniform attention
    assert np.linalg.norm(positions[same[0]] - positions[same[1]]) < 1e-3
    assert {row["head"]: row["role"] for row in saved_figure.rows} == {
        head: role for head, (role, _) in DECODER.items()
    }


def test_plot_clusters_joins_equal_heads_first(profile: Profile, comparison: HeadSimilarityResult) -> None:
    saved_figure = profile.plot.clusters(comparison)
    leaf = {row["head"]: row["leaf"] for row in saved_figure.rows}
    assert sorted(leaf) == sorted(DECODER)
    assert abs(leaf["0.4"] - leaf["1.4"]) == 1
    assert len([line for line in saved_figure.figure.axes[0].lines if len(line.get_xdata()) == 4]) == len(DECODER) - 1  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("steps", "heads"), [(1, 2), (3, 10)])
def test_plot_training_history_equals_values(steps: int, heads: int) -> None:
    values = np.random.default_rng(1).random((steps, heads, 3)).astype(np.float32)
    values[:, 1, 0] = np.nan
    history = HeadHistory()
    history.addresses, history.metric_names = tuple(f"{i // 2}.{i % 2}" for i in range(heads)), DEFAULT_METRICS[:3]
    for step, row in enumerate(values):
        history._insert(step, row)
    saved_figure = draw_history(history, "entropy")
    np.testing.assert_array_equal(saved_figure.figure.axes[0].lines[0].get_ydata(), values[:, 0, 0])
    assert len(saved_figure.rows) == steps * heads
    assert json.loads(json.dumps(saved_figure.as_records()))[steps]["value"] is None, "missing values are null"


def test_plot_pruning_has_line_and_band_per_ranking() -> None:
    points = [
        CurvePoint(
            ranking, keep, 4, LossEstimate(2.0, 1.9, 2.1), LossEstimate(increase, increase - 0.1, increase + 0.1)
        )
        for ranking, increase in (("ablation", 0.2), ("random", 2.0))
        for keep in (0.75, 0.5)
    ]
    saved_figure = draw_pruning(PruningCurves("nats per token", 8, 3, LossEstimate(1.8, 1.7, 1.9), tuple(points)))
    axes = saved_figure.figure.axes[0]
    lines = {str(line.get_label()): line for line in axes.lines}
    np.testing.assert_allclose(np.asarray(lines["ablation"].get_xdata()), [0.5, 0.75, 1.0])
    np.testing.assert_allclose(np.asarray(lines["random"].get_ydata()), [2.0, 2.0, 0.0])
    assert len(axes.collections) == 2
    with pytest.raises(HeadwiseError, match="needs x and mean"):
        draw_tradeoff([{"heads": 1}])


def test_plot_diagram_counts_layer_parameters() -> None:
    spec = hw.preset("smollm2-135m")
    saved_figure = draw_attention_diagram(spec)
    numbers = sum(row["count"] * row["rows"] * row["columns"] for row in saved_figure.rows)
    layer = hw.MultiHeadAttention(spec.attention)
    assert numbers == sum(weight.numel() for weight in layer.parameters())
    labels = [text.get_text() for text in saved_figure.figure.axes[0].texts]
    assert labels.count("k") == 3, "heads 0, 1 and 2 share keys; 3 and 8 are groups of one"
    with pytest.raises(HeadwiseError, match="without heads"):
        draw_attention_diagram(replace(spec.attention, kept_heads=()))


def test_plot_heat_map_and_arcs_equal_maps() -> None:
    view = hw.attention_maps(decoder(), "1 w0x w1x w2x", "0.0,1.2")
    saved_figure = draw_heat_map(view, "0.0")
    np.testing.assert_array_equal(
        np.asarray(saved_figure.figure.axes[0].images[0].get_array()), view.map("0.0").numpy()
    )
    arc_figure = draw_arcs(view, query="w1x")
    assert {row["word"] for row in arc_figure.rows} == {"w1x"}
    assert (
        max((row for row in arc_figure.rows if row["head"] == "0.0"), key=lambda row: row["weight"])["looks at"]
        == "w0x"
    )
    with pytest.raises(HeadwiseError, match="at most 12"):
        draw_heat_map(hw.attention_maps(_make_many_heads_model(), "1 w0x"))


def _make_many_heads_model() -> hw.Transformer:
    from tests.analysis.constructed_heads import blank_model

    return blank_model(heads=7, layers=2)


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_saved_figure_formats_are_deterministic(kind: str, start: bytes, tmp_path: Path) -> None:
    saved_figure = draw_attention_diagram(hw.AttentionSpec(width=64, heads=4, kv_heads=2))
    first, second = (saved_figure.save(tmp_path / f"{name}.{kind}").read_bytes() for name in "ab")
    assert first.startswith(start)
    assert first == second


def test_saved_figure_csv_and_json_write_rows(profile: Profile, tmp_path: Path) -> None:
    saved_figure = profile.plot.roles()
    with saved_figure.save(tmp_path / "roles.csv").open() as file:
        csv_rows = list(csv.DictReader(file))
    assert [row["role"] for row in csv_rows] == [role for role, _ in DECODER.values()]
    assert json.loads(saved_figure.save(tmp_path / "roles.json").read_text()) == saved_figure.as_records()
    with pytest.raises(HeadwiseError, match=r"one of \.svg, \.png, \.pdf, \.csv, \.json. Got"):
        saved_figure.save(tmp_path / "a.gif")
    with pytest.raises(HeadwiseError, match="does not exist"):
        saved_figure.save(tmp_path / "nowhere" / "a.svg")
    assert saved_figure._repr_png_().startswith(b"\x89PNG")
