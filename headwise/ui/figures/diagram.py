"""Diagram of multi-head attention with the sizes of a spec: input, q k v per head, attention, concatenation, W_O."""

from typing import TYPE_CHECKING, Any

from headwise.errors import ArgumentError
from headwise.spec import AttentionSpec, ModelSpec
from headwise.ui.figures.figure_with_data import LINE_COLORS, MUTED_COLOR, TEXT_COLOR, FigureWithData, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_DRAWN_HEADS = 6  # with more heads, the first ones and the last are drawn
BOX_HEIGHT = 0.62  # relative to the row of a head
# Left edge and width of each column.
INPUT, QKV, ATTENTION, Z, CONCAT, W_O, OUTPUT = (
    (0.0, 1.0),
    (2.3, 2.2),
    (5.3, 2.3),
    (8.4, 1.1),
    (10.2, 0.7),
    (11.6, 1.4),
    (13.7, 1.0),
)


def draw_attention_diagram(spec: AttentionSpec | ModelSpec) -> FigureWithData:
    """Draw one layer from left to right. Heads of a group share k and v, which are drawn once, at the first head."""
    spec = spec.attention if isinstance(spec, ModelSpec) else spec
    if not spec.head_ids:
        raise ArgumentError("spec: a layer without heads cannot be drawn. Use a spec with at least one head.")
    drawn_heads = _heads_to_draw(len(spec.head_ids))
    num_rows = len(drawn_heads)
    figure = make_figure(9.6, 0.52 * num_rows + 1.5)
    axes = figure.subplots()
    middle = (num_rows - 1) / 2
    _draw_box(axes, INPUT, middle, f"x\nT × {spec.width}", TEXT_COLOR, height=1.6)
    _draw_box(axes, OUTPUT, middle, f"output\nT × {spec.width}", TEXT_COLOR, height=1.6)
    inner = len(spec.head_ids) * spec.value_dim
    _draw_box(axes, W_O, middle, f"W_O\n{inner} × {spec.width}", TEXT_COLOR, height=1.6, fill=True)
    kv_rows: dict[int, int] = {}  # KV head: its row
    for row, index in enumerate(drawn_heads):
        if index is None:
            for column in (QKV, ATTENTION, Z):
                axes.text(column[0] + column[1] / 2, row, "⋮", ha="center", va="center", fontsize=12, color=MUTED_COLOR)
            _draw_box(axes, CONCAT, row, "⋮", MUTED_COLOR, height=1.0)
            continue
        _draw_head(axes, spec, index, row, kv_rows, middle)
    for at, width in ((CONCAT[0] + CONCAT[1], W_O[0]), (W_O[0] + W_O[1], OUTPUT[0])):
        _draw_arrow(axes, (at, middle), (width, middle), TEXT_COLOR)
    heads = f"{len(spec.head_ids)} heads" + (
        f", {len(spec.kv_head_ids)} key/value heads" if kv_rows and _query_heads_share_kv(spec) else ""
    )
    axes.set_title(f"{heads}, head size {spec.head_dim}, width {spec.width}", fontsize=9, color=TEXT_COLOR, loc="left")
    column_names = (
        (INPUT, "input"),
        (QKV, "project"),
        (ATTENTION, "attend"),
        (Z, "head output"),
        (CONCAT, "concat"),
        (W_O, "mix"),
        (OUTPUT, ""),
    )
    for (left, width), name in column_names:
        axes.text(
            left + width / 2,
            num_rows - 0.15,
            name,
            ha="center",
            va="center",
            fontsize=8,
            color=MUTED_COLOR,
            style="italic",
        )
    axes.set_xlim(-0.2, OUTPUT[0] + OUTPUT[1] + 0.2)
    axes.set_ylim(num_rows + 0.1, -0.8)
    axes.axis("off")
    return FigureWithData(figure, _matrix_rows(spec))


def _draw_head(axes: "Axes", spec: AttentionSpec, index: int, row: int, kv_rows: dict[int, int], middle: float) -> None:
    head_id, group = spec.head_ids[index], spec.kv_of_head[index]
    color = LINE_COLORS[index % len(LINE_COLORS)]
    kv_color = LINE_COLORS[spec.kv_of_head.index(group) % len(LINE_COLORS)]  # color of the first head of the group
    is_group_first = group not in kv_rows
    kv_rows.setdefault(group, row)
    third = QKV[1] / 3
    _draw_arrow(axes, (INPUT[0] + INPUT[1], middle), (QKV[0], row), MUTED_COLOR)
    for slot, projection in enumerate("qkv"):
        if projection == "q" or is_group_first:
            at = (QKV[0] + slot * third + 0.04, third - 0.08)
            _draw_box(axes, at, row, projection, color if projection == "q" else kv_color, fill=True)
    if is_group_first:
        _draw_arrow(axes, (QKV[0] + QKV[1], row), (ATTENTION[0], row), color)
    else:  # its own q, with k and v of the first head of the group
        _draw_arrow(axes, (QKV[0] + third, row), (ATTENTION[0], row), color)
        _draw_arrow(axes, (QKV[0] + QKV[1], kv_rows[group]), (ATTENTION[0], row), kv_color)
    _draw_box(axes, ATTENTION, row, "softmax(q kᵀ / √d) v", color)
    _draw_arrow(axes, (ATTENTION[0] + ATTENTION[1], row), (Z[0], row), color)
    _draw_box(axes, Z, row, f"z[{head_id}]", color, fill=True)
    _draw_arrow(axes, (Z[0] + Z[1], row), (CONCAT[0], row), color)
    _draw_box(axes, CONCAT, row, "", color, height=1.0, fill=True)


def _draw_box(
    axes: "Axes",
    column: tuple[float, float],
    row: float,
    text: str,
    color: str,
    height: float = BOX_HEIGHT,
    *,
    fill: bool = False,
) -> None:
    from matplotlib.patches import Rectangle

    left, width = column
    axes.add_patch(
        Rectangle((left, row - height / 2), width, height, edgecolor=color, linewidth=1.0,
                  facecolor=(color, 0.14) if fill else "#ffffff", zorder=2)
    )  # fmt: skip
    axes.text(
        left + width / 2, row, text, ha="center", va="center", fontsize=8, color=TEXT_COLOR, zorder=3, linespacing=1.5
    )


def _draw_arrow(axes: "Axes", start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.annotate(
        "", end, start, zorder=1,
        arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7},
    )  # fmt: skip


def _heads_to_draw(heads: int) -> list[int | None]:
    """Return the indices of the heads to draw. None is a gap."""
    return list(range(heads)) if heads <= MAX_DRAWN_HEADS else [*range(MAX_DRAWN_HEADS - 2), None, heads - 1]


def _query_heads_share_kv(spec: AttentionSpec) -> bool:
    return len(spec.kv_head_ids) < len(spec.head_ids)


def _matrix_rows(spec: AttentionSpec) -> list[dict[str, Any]]:
    """Return count and sizes of every matrix of the layer."""
    H, K, D, d, e = len(spec.head_ids), len(spec.kv_head_ids), spec.width, spec.head_dim, spec.value_dim
    return [
        {"part": "W_Q", "count": H, "rows": D, "columns": d},
        {"part": "W_K", "count": K, "rows": D, "columns": d},
        {"part": "W_V", "count": K, "rows": D, "columns": e},
        {"part": "W_O", "count": H, "rows": e, "columns": D},
    ]
