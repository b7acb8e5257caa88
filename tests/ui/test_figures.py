"""Figures: what is drawn is what the profile says; pictures and their numbers, by the suffix."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import headwise as hw
from headwise.analysis.roles.history import MEASURES, HeadHistory
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.similarity.compare_heads import Comparison
from headwise.compression.curve import Curve, CurvePoint
from headwise.compression.evaluation import Estimate
from headwise.errors import HeadwiseError
from headwise.ui.figures.diagram import draw_diagram
from headwise.ui.figures.roles import EMPTY, STRENGTH
from headwise.ui.figures.sentence import arcs, heat_map
from headwise.ui.figures.tradeoff import draw_pruning, draw_tradeoff
from headwise.ui.figures.training_history import draw_lives
from headwise.ui.role_badges import sign
from tests.analysis.constructed_heads import DECODER, decoder, documents, encoder


@pytest.fixture(scope="module")
def profile() -> Profile:
    return hw.profile(decoder(), documents())


@pytest.fixture(scope="module")
def between() -> Comparison:
    return hw.compare(decoder(), [document.text for document in documents(12)], rows=64)


def test_the_grid_has_a_cell_for_every_head_coloured_by_its_role(profile: Profile) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import FancyBboxPatch

    drawn = profile.plot.roles()
    assert {row["head"]: row["role"] for row in drawn.rows} == {head: role for head, (role, _) in DECODER.items()}
    panel = drawn.figure.axes[0]
    cells = [patch for patch in panel.patches if isinstance(patch, FancyBboxPatch)]
    assert len(cells) == len(DECODER)
    for cell, (head, (role, rung)) in zip(cells, DECODER.items(), strict=True):
        layer, number = map(int, head.split("."))
        assert (round(cell.get_x() + 0.44), round(cell.get_y() + 0.44)) == (layer, number)
        assert to_rgb(cell.get_facecolor()[:3]) == to_rgb(EMPTY if role == "unclear" else sign(role)[1])
        if role != "unclear" and rung is not None:
            assert cell.get_alpha() == STRENGTH[rung]


def test_a_head_three_back_has_its_bar_there(profile: Profile) -> None:
    drawn = profile.plot.offsets("1.1,1.2")
    for panel, place in zip(drawn.figure.axes, (-3, 0), strict=True):
        heights = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in panel.patches}  # pyright: ignore[reportAttributeAccessIssue]
        assert max(heights, key=lambda at: heights[at]) == place
        assert heights[place] > 0.9
        assert min(heights) == -16, "a decoder never looks ahead, so nothing is drawn there"
        assert max(heights) == 0
    assert {row["head"] for row in profile.plot.offsets().rows} >= {"0.0", "1.1", "1.2"}
    ahead = hw.profile(encoder(), documents(20)).plot.offsets("0.0")
    best = max(ahead.rows, key=lambda row: row["weight"])
    assert best["offset"] == 1


def test_depth_is_the_profile_s_numbers(profile: Profile) -> None:
    drawn = profile.plot.depth(("entropy", "first"))
    dots, line = drawn.figure.axes[0].lines
    np.testing.assert_array_equal(dots.get_ydata(), profile.measure("entropy"))
    np.testing.assert_array_equal(
        line.get_ydata(), [np.mean(profile.measure("entropy")[at]) for at in (slice(6), slice(6, 12))]
    )
    assert {row["head"]: row["value"] for row in drawn.rows if row["measure"] == "first"}["0.4"] == profile[
        "0.4"
    ].measures["first"]
    with pytest.raises(HeadwiseError, match="did you mean entropy"):
        profile.plot.depth(("entropi",))


def test_distances_on_the_map_are_those_between_heads(profile: Profile, between: Comparison) -> None:
    drawn = profile.plot.map(between)
    places = np.array([[row["x"], row["y"]] for row in drawn.rows])
    np.testing.assert_allclose(np.asarray(drawn.figure.axes[0].collections[0].get_offsets()), places)
    same = [
        place for place, row in enumerate(drawn.rows) if row["head"] in ("0.4", "1.4")
    ]  # both look everywhere alike
    assert np.linalg.norm(places[same[0]] - places[same[1]]) < 1e-3
    assert {row["head"]: row["role"] for row in drawn.rows} == {head: role for head, (role, _) in DECODER.items()}


def test_the_tree_has_every_head_and_joins_equal_ones_first(profile: Profile, between: Comparison) -> None:
    drawn = profile.plot.clusters(between)
    leaf = {row["head"]: row["leaf"] for row in drawn.rows}
    assert sorted(leaf) == sorted(DECODER)
    assert abs(leaf["0.4"] - leaf["1.4"]) == 1
    assert len([line for line in drawn.figure.axes[0].lines if len(line.get_xdata()) == 4]) == len(DECODER) - 1  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("steps", "heads"), [(1, 2), (3, 10)])
def test_lives(steps: int, heads: int) -> None:
    values = np.random.default_rng(1).random((steps, heads, 3)).astype(np.float32)
    values[:, 1, 0] = np.nan
    made = HeadHistory()
    made.addresses, made.names = tuple(f"{i // 2}.{i % 2}" for i in range(heads)), MEASURES[:3]
    for step, row in enumerate(values):
        made._keep(step, row)
    drawn = draw_lives(made, "entropy")
    np.testing.assert_array_equal(drawn.figure.axes[0].lines[0].get_ydata(), values[:, 0, 0])
    assert len(drawn.rows) == steps * heads
    assert json.loads(json.dumps(drawn.as_records()))[steps]["value"] is None, "what is not known is null"


def test_a_curve_has_a_line_and_a_band_for_each_way_to_choose() -> None:
    points = [
        CurvePoint(by, keep, 4, Estimate(2.0, 1.9, 2.1), Estimate(more, more - 0.1, more + 0.1))
        for by, more in (("ablation", 0.2), ("random", 2.0))
        for keep in (0.75, 0.5)
    ]
    drawn = draw_pruning(Curve("nats a token", 8, 3, Estimate(1.8, 1.7, 1.9), tuple(points)))
    panel = drawn.figure.axes[0]
    lines = {str(line.get_label()): line for line in panel.lines}
    np.testing.assert_allclose(np.asarray(lines["ablation"].get_xdata()), [0.5, 0.75, 1.0])
    np.testing.assert_allclose(np.asarray(lines["random"].get_ydata()), [2.0, 2.0, 0.0])
    assert len(panel.collections) == 2
    with pytest.raises(HeadwiseError, match="rows with x and mean"):
        draw_tradeoff([{"heads": 1}])


def test_the_diagram_counts_what_the_layer_has() -> None:
    spec = hw.preset("smollm2-135m")
    drawn = draw_diagram(spec)
    numbers = sum(row["count"] * row["rows"] * row["columns"] for row in drawn.rows)
    layer = hw.MultiHeadAttention(spec.attention)
    assert numbers == sum(weight.numel() for weight in layer.parameters())
    said = [text.get_text() for text in drawn.figure.axes[0].texts]
    assert said.count("k") == 3, "heads 0, 1 and 2 share keys; 3 and 8 stand in a group each"
    with pytest.raises(HeadwiseError, match="without heads"):
        draw_diagram(replace(spec.attention, kept=()))


def test_a_sentence_is_drawn_as_it_was_seen() -> None:
    seen = hw.attend(decoder(), "1 w0x w1x w2x", "0.0,1.2")
    drawn = heat_map(seen, "0.0")
    np.testing.assert_array_equal(np.asarray(drawn.figure.axes[0].images[0].get_array()), seen.map("0.0").numpy())
    one = arcs(seen, source="w1x")
    assert {row["word"] for row in one.rows} == {"w1x"}
    assert max((row for row in one.rows if row["head"] == "0.0"), key=lambda row: row["weight"])["looks at"] == "w0x"
    with pytest.raises(HeadwiseError, match="14 heads do not fit into one picture; name at most 12"):
        heat_map(hw.attend(_many(), "1 w0x"))


def _many() -> hw.Transformer:
    from tests.analysis.constructed_heads import blank

    return blank(heads=7, layers=2)


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_pictures_are_written_and_the_same_each_time(kind: str, start: bytes, tmp_path: Path) -> None:
    drawn = draw_diagram(hw.AttentionSpec(width=64, heads=4, kv_heads=2))
    one, two = (drawn.save(tmp_path / f"{name}.{kind}").read_bytes() for name in "ab")
    assert one.startswith(start)
    assert one == two


def test_numbers_are_written_instead(profile: Profile, tmp_path: Path) -> None:
    drawn = profile.plot.roles()
    with drawn.save(tmp_path / "roles.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [row["role"] for row in read] == [role for role, _ in DECODER.values()]
    assert json.loads(drawn.save(tmp_path / "roles.json").read_text()) == drawn.as_records()
    with pytest.raises(HeadwiseError, match=r"written as \.svg, \.png, \.pdf, \.csv, \.json; got"):
        drawn.save(tmp_path / "a.gif")
    with pytest.raises(HeadwiseError, match="there is no folder"):
        drawn.save(tmp_path / "nowhere" / "a.svg")
    assert drawn._repr_png_().startswith(b"\x89PNG")
