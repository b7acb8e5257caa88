"""Pictures of one sentence: a heat map, and lines between words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.analysis.recording.attention_maps import Attended, Word
from headwise.errors import HeadwiseError
from headwise.heads.head import Pattern
from headwise.ui.figures.figure_io import COLOURS, FAINT, INK, Drawing, make_figure, safe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

Heads = Pattern | Sequence[str]
MOST = 12  # heads in one picture
FAINTEST = 0.02  # below this weight a line says nothing
PRINTED = 0.05  # from this weight on it is told as a number too
PICKED = 3  # heads in a picture for which none were named


def heat_map(attended: Attended, head: Heads = "*") -> Drawing:
    """One head's map, or several side by side: rows look, columns are looked at."""
    heads = _chosen(attended, head)
    looking, seen = attended.sides(heads[0])
    cell = 0.3 if max(len(looking.labels), len(seen.labels)) <= 40 else 0.2
    side = 0.09 * max(len(label) for label in looking.labels) + 0.3
    wide, high = len(seen.labels) * cell, len(looking.labels) * cell
    figure = make_figure(len(heads) * (wide + side + 0.35) + 0.6, high + 0.09 * max(map(len, seen.labels)) + 1.0)
    panels = figure.subplots(1, len(heads), squeeze=False)[0]
    drawn = [_heat(panel, attended, name) for panel, name in zip(panels, heads, strict=True)]
    figure.colorbar(drawn[0], ax=list(panels), fraction=0.03, pad=0.02, shrink=0.8, label="attention weight")
    return Drawing(figure, _rows(attended, heads))


def arcs(attended: Attended, head: Heads = "*", source: Word | None = None) -> Drawing:
    """Words in two columns, on the left those that look, on the right those that are looked at, with the weight of the
    strongest line that ends there. A line is as strong as its weight is beside the head's largest. Several heads stand side
    by side; `source` shows the lines of one word alone."""
    heads = _chosen(attended, head)
    both = [label for name in heads for part in attended.sides(name) for label in part.labels]
    tall = max(len(part.labels) for name in heads for part in attended.sides(name))
    margin = 0.085 * (max(map(len, both)) + 6) + 0.15  # inches a label and its number take
    figure = make_figure(len(heads) * (2 * margin + 1.9), 0.27 * tall + 1.0)
    panels = figure.subplots(1, len(heads), squeeze=False)[0]
    for number, (panel, name) in enumerate(zip(panels, heads, strict=True)):
        _lines(panel, attended, name, COLOURS[number % len(COLOURS)], source, margin / 1.5)
    rows = _rows(attended, heads)
    if source is not None:
        places = {name: attended.sides(name)[0].find(source) for name in heads}
        rows = [row for row in rows if row["place"] == places[row["head"]]]
    return Drawing(figure, rows)


def hardest(attended: Attended, source: Word | None = None, target: Word | None = None) -> tuple[str, ...]:
    """The heads that look hardest, of one word or of all; each at another word, or many would show the same; none at where
    heads rest. With a `target`, the heads that look hardest at it."""
    if source is not None and target is not None:
        return tuple(head for head, _ in attended.heads_for(source, target, PICKED))
    first: dict[str, str] = {}  # word that is looked at: the head that does so hardest
    for look in attended.strongest(len(attended.heads) * len(attended.words), source):
        if look.head not in first.values():
            first.setdefault(look.attended, look.head)
    return tuple(first.values())[:PICKED] or attended.heads[:1]


def _rows(attended: Attended, heads: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"head": name, "place": i, "word": looking.names[i], "looks at": seen.names[j], "weight": weight}
        for name in heads
        for looking, seen in [attended.sides(name)]
        for i, row in enumerate(attended.map(name).tolist())
        for j, weight in enumerate(row)
    ]


def _heat(panel: "Axes", attended: Attended, head: str) -> "AxesImage":
    looking, seen = attended.sides(head)
    weights = attended.map(head).cpu().numpy()
    drawn = panel.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal")
    size = 9 if max(weights.shape) <= 40 else 6
    panel.set_xticks(range(len(seen.labels)), list(map(safe, seen.labels)), rotation=90, fontsize=size, color=INK)
    panel.set_yticks(range(len(looking.labels)), list(map(safe, looking.labels)), fontsize=size, color=INK)
    panel.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
    panel.set_xticks([i - 0.5 for i in range(1, weights.shape[1])], minor=True)
    panel.set_yticks([i - 0.5 for i in range(1, weights.shape[0])], minor=True)
    panel.grid(which="minor", color="#eceff2", linewidth=0.5)
    panel.tick_params(which="minor", length=0)
    for spine in panel.spines.values():
        spine.set_color("#d5dade")
    panel.set_ylabel("looks", fontsize=8, color=FAINT, style="italic")
    panel.set_xlabel("is looked at", fontsize=8, color=FAINT, style="italic")
    panel.set_title(f"head {head}", fontsize=10, color=INK, loc="left", fontweight="bold", pad=8)
    return drawn


def _lines(panel: "Axes", attended: Attended, head: str, colour: str, source: Word | None, margin: float) -> None:
    looking, seen = attended.sides(head)
    only = None if source is None else looking.find(source)
    weights = attended.map(head).cpu().tolist()
    met = [0.0] * len(seen.labels)  # the strongest line that ends at each word
    drawn = [(i, j, weight) for i, row in enumerate(weights) if only in (None, i) for j, weight in enumerate(row)]
    largest = max((weight for _, _, weight in drawn), default=1.0) or 1.0
    for i, j, weight in drawn:
        if weight >= FAINTEST:
            met[j] = max(met[j], weight)
            share = weight / largest  # a head that spreads its attention would else show nothing but pale lines
            panel.plot((0, 1), (i, j), color=colour, alpha=0.15 + 0.85 * share, linewidth=0.6 + 2.6 * share,
                       solid_capstyle="round")  # fmt: skip
    for i, label in enumerate(map(safe, looking.labels)):
        lit = only is None or i == only
        panel.text(-0.04, i, label, ha="right", va="center", fontsize=10, color=INK if lit else FAINT,
                   fontweight="bold" if i == only else "normal")  # fmt: skip
    for j, label in enumerate(map(safe, seen.labels)):
        lit = met[j] >= PRINTED
        told = f"{label}  {met[j]:.2f}" if lit else label
        panel.text(1.04, j, told, ha="left", va="center", fontsize=10, color=INK if lit else FAINT)
    panel.set_xlim(-margin, 1 + margin)
    panel.set_ylim(max(len(looking.labels), len(seen.labels)) - 0.4, -1.5)
    for x, side, title in ((-0.04, "right", "looks"), (1.04, "left", "is looked at")):
        panel.text(x, -1, title, ha=side, va="center", fontsize=8, color=FAINT, style="italic")
    panel.set_title(f"head {head}", fontsize=10, color=colour, fontweight="bold", pad=6)
    panel.axis("off")


def _chosen(attended: Attended, head: Heads) -> tuple[str, ...]:
    heads = attended.choose(head)
    if len(heads) > MOST:
        raise HeadwiseError(f"{len(heads)} heads do not fit into one picture; name at most {MOST}, e.g. {heads[0]!r}.")
    return heads
