"""The multi-head diagram: input, q k v for every head, scaled dot products, concatenation, W_O; with the sizes of a spec."""

from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError
from headwise.spec import AttentionSpec, ModelSpec
from headwise.ui.figures.figure_io import COLOURS, FAINT, INK, Drawing, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WHOLE = 6  # heads that are drawn one by one; of more, the first ones and the last
BOX = 0.62  # the height of a box; a head's row is 1
# Where columns begin, and how wide they are.
X, QKV, ATTEND, Z, CONCAT, W_O, OUT = (
    (0.0, 1.0),
    (2.3, 2.2),
    (5.3, 2.3),
    (8.4, 1.1),
    (10.2, 0.7),
    (11.6, 1.4),
    (13.7, 1.0),
)


def draw_diagram(spec: AttentionSpec | ModelSpec) -> Drawing:
    """One layer from left to right. Heads of a group share k and v: they are drawn once, beside the first of them."""
    spec = spec.attention if isinstance(spec, ModelSpec) else spec
    if not spec.head_ids:
        raise HeadwiseError("a layer without heads writes its bias alone; there is nothing to draw.")
    shown = _shown(len(spec.head_ids))
    tall = len(shown)
    figure = make_figure(9.6, 0.52 * tall + 1.5)
    panel = figure.subplots()
    middle = (tall - 1) / 2
    _box(panel, X, middle, f"x\nT × {spec.width}", INK, tall=1.6)
    _box(panel, OUT, middle, f"output\nT × {spec.width}", INK, tall=1.6)
    inner = len(spec.head_ids) * spec.value_dim
    _box(panel, W_O, middle, f"W_O\n{inner} × {spec.width}", INK, tall=1.6, fill=True)
    drawn: dict[int, int] = {}  # key head: the row it stands in
    for row, index in enumerate(shown):
        if index is None:
            for column in (QKV, ATTEND, Z):
                panel.text(column[0] + column[1] / 2, row, "⋮", ha="center", va="center", fontsize=12, color=FAINT)
            _box(panel, CONCAT, row, "⋮", FAINT, tall=1.0)
            continue
        _head(panel, spec, index, row, drawn, middle)
    for at, width in ((CONCAT[0] + CONCAT[1], W_O[0]), (W_O[0] + W_O[1], OUT[0])):
        _arrow(panel, (at, middle), (width, middle), INK)
    heads = f"{len(spec.head_ids)} heads" + (f", {len(spec.kv_ids)} key/value heads" if drawn and _shares(spec) else "")
    panel.set_title(f"{heads}, head size {spec.head_dim}, width {spec.width}", fontsize=9, color=INK, loc="left")
    named = (
        (X, "input"),
        (QKV, "project"),
        (ATTEND, "attend"),
        (Z, "found"),
        (CONCAT, "concat"),
        (W_O, "mix"),
        (OUT, ""),
    )
    for (left, width), name in named:
        panel.text(
            left + width / 2, tall - 0.15, name, ha="center", va="center", fontsize=8, color=FAINT, style="italic"
        )
    panel.set_xlim(-0.2, OUT[0] + OUT[1] + 0.2)
    panel.set_ylim(tall + 0.1, -0.8)
    panel.axis("off")
    return Drawing(figure, _rows(spec))


def _head(panel: "Axes", spec: AttentionSpec, index: int, row: int, drawn: dict[int, int], middle: float) -> None:
    number, group = spec.head_ids[index], spec.kv_of_head[index]
    colour = COLOURS[index % len(COLOURS)]
    shared = COLOURS[spec.kv_of_head.index(group) % len(COLOURS)]  # of the first head of the group
    first = group not in drawn
    drawn.setdefault(group, row)
    third = QKV[1] / 3
    _arrow(panel, (X[0] + X[1], middle), (QKV[0], row), FAINT)
    for place, letter in enumerate("qkv"):
        if letter == "q" or first:
            at = (QKV[0] + place * third + 0.04, third - 0.08)
            _box(panel, at, row, letter, colour if letter == "q" else shared, fill=True)
    if first:
        _arrow(panel, (QKV[0] + QKV[1], row), (ATTEND[0], row), colour)
    else:  # its own q, and what the first of the group made
        _arrow(panel, (QKV[0] + third, row), (ATTEND[0], row), colour)
        _arrow(panel, (QKV[0] + QKV[1], drawn[group]), (ATTEND[0], row), shared)
    _box(panel, ATTEND, row, "softmax(q kᵀ / √d) v", colour)
    _arrow(panel, (ATTEND[0] + ATTEND[1], row), (Z[0], row), colour)
    _box(panel, Z, row, f"z[{number}]", colour, fill=True)
    _arrow(panel, (Z[0] + Z[1], row), (CONCAT[0], row), colour)
    _box(panel, CONCAT, row, "", colour, tall=1.0, fill=True)


def _box(
    panel: "Axes",
    across: tuple[float, float],
    row: float,
    text: str,
    colour: str,
    tall: float = BOX,
    fill: bool = False,
) -> None:
    from matplotlib.patches import Rectangle

    left, width = across
    panel.add_patch(
        Rectangle((left, row - tall / 2), width, tall, edgecolor=colour, linewidth=1.0,
                  facecolor=(colour, 0.14) if fill else "#ffffff", zorder=2)
    )  # fmt: skip
    panel.text(left + width / 2, row, text, ha="center", va="center", fontsize=8, color=INK, zorder=3, linespacing=1.5)


def _arrow(panel: "Axes", start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    panel.annotate(
        "", end, start, zorder=1,
        arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7},
    )  # fmt: skip


def _shown(heads: int) -> list[int | None]:
    """Which heads are drawn; None is a gap."""
    return list(range(heads)) if heads <= WHOLE else [*range(WHOLE - 2), None, heads - 1]


def _shares(spec: AttentionSpec) -> bool:
    return len(spec.kv_ids) < len(spec.head_ids)


def _rows(spec: AttentionSpec) -> list[dict[str, Any]]:
    """Every matrix of the layer: how many there are, and their sizes."""
    H, K, D, d, e = len(spec.head_ids), len(spec.kv_ids), spec.width, spec.head_dim, spec.value_dim
    return [
        {"part": "W_Q", "count": H, "rows": D, "columns": d},
        {"part": "W_K", "count": K, "rows": D, "columns": d},
        {"part": "W_V", "count": K, "rows": D, "columns": e},
        {"part": "W_O", "count": H, "rows": e, "columns": D},
    ]
