"""Attention on one sentence: heat maps, and lines between words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.analysis.recording.attention_maps import AttentionView, Word
from headwise.errors import ArgumentError
from headwise.heads.head import HeadPattern
from headwise.ui.figures.figure_with_data import (
    LINE_COLORS,
    MUTED_COLOR,
    TEXT_COLOR,
    FigureWithData,
    escape_dollar,
    make_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

HeadsArgument = HeadPattern | Sequence[str]
MAX_HEADS = 12  # heads per figure
MIN_LINE_WEIGHT = 0.02  # smaller weights are not drawn
MIN_LABEL_WEIGHT = 0.05  # larger weights are printed as numbers
DEFAULT_HEADS = 3  # number of heads if none are given


def draw_heat_map(view: AttentionView, heads: HeadsArgument = "*") -> FigureWithData:
    """Plot the map of one head, or of several side by side. Rows are queries, columns are keys."""
    selected = _select_heads(view, heads)
    query_groups, key_groups = view.query_key_groups(selected[0])
    cell = 0.3 if max(len(query_groups.labels), len(key_groups.labels)) <= 40 else 0.2
    label_width = 0.09 * max(len(label) for label in query_groups.labels) + 0.3
    width, height = len(key_groups.labels) * cell, len(query_groups.labels) * cell
    figure = make_figure(
        len(selected) * (width + label_width + 0.35) + 0.6, height + 0.09 * max(map(len, key_groups.labels)) + 1.0
    )
    panel_axes = figure.subplots(1, len(selected), squeeze=False)[0]
    images = [_draw_map(axes, view, name) for axes, name in zip(panel_axes, selected, strict=True)]
    figure.colorbar(images[0], ax=list(panel_axes), fraction=0.03, pad=0.02, shrink=0.8, label="attention weight")
    return FigureWithData(figure, _weight_rows(view, selected))


def draw_arcs(view: AttentionView, heads: HeadsArgument = "*", query: Word | None = None) -> FigureWithData:
    """Plot attention as lines from queries (left) to keys (right).

    The opacity of a line is its weight relative to the largest weight of the head. The number at a key is the largest weight
    on it.

    Args:
        view: The attention maps.
        heads: Heads to plot, side by side.
        query: Only show the lines of this word.
    """
    selected = _select_heads(view, heads)
    labels = [label for name in selected for group in view.query_key_groups(name) for label in group.labels]
    num_rows = max(len(group.labels) for name in selected for group in view.query_key_groups(name))
    margin = 0.085 * (max(map(len, labels)) + 6) + 0.15  # inches a label and its number take
    figure = make_figure(len(selected) * (2 * margin + 1.9), 0.27 * num_rows + 1.0)
    panel_axes = figure.subplots(1, len(selected), squeeze=False)[0]
    for index, (axes, name) in enumerate(zip(panel_axes, selected, strict=True)):
        _draw_lines(axes, view, name, LINE_COLORS[index % len(LINE_COLORS)], query, margin / 1.5)
    rows = _weight_rows(view, selected)
    if query is not None:
        positions = {name: view.query_key_groups(name)[0].find(query) for name in selected}
        rows = [row for row in rows if row["place"] == positions[row["head"]]]
    return FigureWithData(figure, rows)


def top_heads(view: AttentionView, query: Word | None = None, key: Word | None = None) -> tuple[str, ...]:
    """Return the heads with the largest weights, each on another key; idle attention does not count.

    Args:
        view: The attention maps.
        query: Only consider this query.
        key: With `query`, return the heads with the largest weight from query to key.
    """
    if query is not None and key is not None:
        return tuple(head for head, _ in view.top_heads_for_pair(query, key, DEFAULT_HEADS))
    head_of_key: dict[str, str] = {}  # key: the head with the largest weight on it
    for edge in view.top_edges(len(view.heads) * len(view.words), query):
        if edge.head not in head_of_key.values():
            head_of_key.setdefault(edge.attended, edge.head)
    return tuple(head_of_key.values())[:DEFAULT_HEADS] or view.heads[:1]


def _weight_rows(view: AttentionView, heads: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "head": name,
            "place": i,
            "word": query_groups.unique_labels[i],
            "looks at": key_groups.unique_labels[j],
            "weight": weight,
        }
        for name in heads
        for query_groups, key_groups in [view.query_key_groups(name)]
        for i, row in enumerate(view.map(name).tolist())
        for j, weight in enumerate(row)
    ]


def _draw_map(axes: "Axes", view: AttentionView, head: str) -> "AxesImage":
    query_groups, key_groups = view.query_key_groups(head)
    weights = view.map(head).cpu().numpy()
    image = axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal")
    size = 9 if max(weights.shape) <= 40 else 6
    axes.set_xticks(
        range(len(key_groups.labels)),
        list(map(escape_dollar, key_groups.labels)),
        rotation=90,
        fontsize=size,
        color=TEXT_COLOR,
    )
    axes.set_yticks(
        range(len(query_groups.labels)), list(map(escape_dollar, query_groups.labels)), fontsize=size, color=TEXT_COLOR
    )
    axes.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
    axes.set_xticks([i - 0.5 for i in range(1, weights.shape[1])], minor=True)
    axes.set_yticks([i - 0.5 for i in range(1, weights.shape[0])], minor=True)
    axes.grid(which="minor", color="#eceff2", linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set_color("#d5dade")
    axes.set_ylabel("query", fontsize=8, color=MUTED_COLOR, style="italic")
    axes.set_xlabel("key", fontsize=8, color=MUTED_COLOR, style="italic")
    axes.set_title(f"head {head}", fontsize=10, color=TEXT_COLOR, loc="left", fontweight="bold", pad=8)
    return image


def _draw_lines(axes: "Axes", view: AttentionView, head: str, color: str, query: Word | None, margin: float) -> None:
    query_groups, key_groups = view.query_key_groups(head)
    query_index = None if query is None else query_groups.find(query)
    weights = view.map(head).cpu().tolist()
    max_weight_of_key = [0.0] * len(key_groups.labels)  # largest weight on each key
    edges = [
        (i, j, weight) for i, row in enumerate(weights) if query_index in (None, i) for j, weight in enumerate(row)
    ]
    largest = max((weight for _, _, weight in edges), default=1.0) or 1.0
    for i, j, weight in edges:
        if weight >= MIN_LINE_WEIGHT:
            max_weight_of_key[j] = max(max_weight_of_key[j], weight)
            relative_weight = weight / largest  # otherwise a diffuse head would only have faint lines
            axes.plot((0, 1), (i, j), color=color, alpha=0.15 + 0.85 * relative_weight, linewidth=0.6 + 2.6 * relative_weight,
                       solid_capstyle="round")  # fmt: skip
    for i, label in enumerate(map(escape_dollar, query_groups.labels)):
        is_highlighted = query_index is None or i == query_index
        axes.text(-0.04, i, label, ha="right", va="center", fontsize=10, color=TEXT_COLOR if is_highlighted else MUTED_COLOR,
                   fontweight="bold" if i == query_index else "normal")  # fmt: skip
    for j, label in enumerate(map(escape_dollar, key_groups.labels)):
        is_highlighted = max_weight_of_key[j] >= MIN_LABEL_WEIGHT
        text = f"{label}  {max_weight_of_key[j]:.2f}" if is_highlighted else label
        axes.text(
            1.04, j, text, ha="left", va="center", fontsize=10, color=TEXT_COLOR if is_highlighted else MUTED_COLOR
        )
    axes.set_xlim(-margin, 1 + margin)
    axes.set_ylim(max(len(query_groups.labels), len(key_groups.labels)) - 0.4, -1.5)
    for x, side, title in ((-0.04, "right", "query"), (1.04, "left", "key")):
        axes.text(x, -1, title, ha=side, va="center", fontsize=8, color=MUTED_COLOR, style="italic")
    axes.set_title(f"head {head}", fontsize=10, color=color, fontweight="bold", pad=6)
    axes.axis("off")


def _select_heads(view: AttentionView, heads: HeadsArgument) -> tuple[str, ...]:
    selected = view.resolve_head_pattern(heads)
    if len(selected) > MAX_HEADS:
        raise ArgumentError(
            f"heads: a figure shows at most {MAX_HEADS}. Got {len(selected)}. Name fewer, for example {selected[0]!r}."
        )
    return selected
