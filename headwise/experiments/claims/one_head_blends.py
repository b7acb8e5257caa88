"""One head must blend relations that several heads keep apart."""

from collections.abc import Iterable, Iterator

from headwise.experiments.claim import Claim, Picture, Verdict
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.statistic import At, Figures
from headwise.experiments.experiment import Lab
from headwise.experiments.lookups import STEPS, LookUps, learn_lookups

TASK = LookUps(offsets=(1, 2, 3, 4))
HEADS = (1, 2, 4, 8)
LEARNED, BLENDED = 0.95, 0.5  # shares of places with all look-ups right
MATTERS = 0.05  # a share of right answers that counts


def measure(lab: Lab) -> Figures:
    """Answers on the little language with one head and with the usual number; then look-ups for every head count."""
    figures = Figures()
    one, many = ([lab.made(lab.point(seed, heads)).marks for seed in lab.seeds] for heads in (1, None))
    for relation in many[0]:
        pairs = [(a[relation], b[relation]) for a, b in zip(one, many, strict=True)]
        figures.add("right with one head", relation, [a for a, _ in pairs])
        figures.add("right with many heads", relation, [b for _, b in pairs])
        figures.add("lost by one head", relation, [b - a for a, b in pairs])
    width, steps = lab.size.width, min(STEPS, lab.size.steps)
    for name, hidden, counts in (("", 0, HEADS), (", MLP behind", 4 * width, HEADS[:-1])):
        for heads in counts:
            made = [
                learn_lookups(heads, TASK, width=width, hidden=hidden, steps=steps, seed=seed) for seed in lab.seeds
            ]
            figures.add(f"look-ups right{name}", heads, [share for share, _ in made])
            figures.add(f"all look-ups right{name}", heads, [every for _, every in made])
    return figures


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    blended, looked = _look_ups(figures)
    lost = {str(name): figure for name, figure in figures.at("lost by one head").items()}
    worse = [name for name, figure in lost.items() if figure.above(MATTERS)]
    better = [name for name, figure in lost.items() if figure.below(-MATTERS)]
    unsure = [name for name, figure in lost.items() if name not in worse and not figure.below(MATTERS)]
    loses = f"one head loses {', '.join(worse) or 'no relation for sure'}"
    if blended and worse and not better:
        return Verdict("holds", loses)
    if blended is False and not worse and not unsure:
        return Verdict("does not hold", looked)
    gains = f", does better at {', '.join(better)}" if better else ""
    stays = f"; open: {', '.join(unsure)}" if unsure else ""
    on = "seed" if blended is None or (unsure and not worse) else "relation"
    return Verdict("depends", f"on the {on}: {loses}{gains}{stays}; {looked}")


def _look_ups(figures: Figures) -> tuple[bool | None, str]:
    """Whether look-ups bear it out, surely do not, or leave it open (None); and in words."""
    needed, tried = len(TASK.offsets), figures.at("all look-ups right")
    one, many = tried[1], [tried[heads] for heads in _enough(figures)]
    if one.above(BLENDED):
        return False, f"{needed} look-ups at once go through one"
    if any(figure.below(LEARNED) for figure in many):
        return False, f"{needed} look-ups at once are not learned by {needed} heads or more either"
    if one.below(BLENDED) and all(figure.above(LEARNED) for figure in many):
        return True, f"{needed} look-ups at once do not go through one"
    return None, f"whether {needed} look-ups at once go through one and through {needed} heads or more stays open"


def _enough(figures: Figures) -> list[int]:
    """Head counts that could keep every look-up apart."""
    tried = figures.at("all look-ups right")
    return [heads for heads in tried if isinstance(heads, int) and heads >= len(TASK.offsets)]


def _asks(figures: Figures) -> Iterator[tuple[str, At]]:
    """Every relation, since losing any of them counts, and the look-ups that are judged."""
    yield from (("lost by one head", relation) for relation in figures.at("lost by one head"))
    yield from (("all look-ups right", heads) for heads in (1, *_enough(figures)))


def points(lab: Lab) -> Iterable[Point]:
    """One head and the usual number."""
    return [lab.point(seed, heads) for seed in lab.seeds for heads in (1, None)]


CLAIM = Claim(
    number=5,
    name="one-head-blends",
    says="One head must blend relations: it has one map of attention, and what several heads keep apart runs together in it.",
    against="A model with one head of the same width and as many parameters that gets every relation right as often; or one "
    "head whose output still tells several look-ups apart.",
    setup="Models of the little language with one head and with many, same width and parameters, examined on each relation; "
    f"and a single layer that must name the symbols {', '.join(map(str, TASK.offsets))} places back at once, read out "
    "linearly, with 1 to 8 heads of one width. The same with an MLP before the readout is shown and not judged: it can "
    "unpick much of a blend, as the models' own MLPs can.",
    rule=f"Look-ups bear it out if all of them are right at surely more than {LEARNED:.0%} of places with as many heads as "
    f"look-ups or more, and at surely fewer than {BLENDED:.0%} with one; they do not if one of these surely is the other way "
    f"round. Holds if they do, one head surely loses more than {MATTERS:.0%} of right answers in some relation, and surely "
    f"gains as much in none. Does not hold if they do not and one head surely loses less than {MATTERS:.0%} in every "
    "relation. Else depends: on the seed if look-ups leave it open, or if no relation is surely lost and some may be; or on "
    "the relation. Any relation will do, so intervals are widened for all of them together.",
    asks=_asks,
    measure=measure,
    judge=judge,
    picture=Picture(
        ("all look-ups right", "all look-ups right, MLP behind"),
        x="heads",
        y="places where all four look-ups are right",
        log=True,
    ),
    points=points,
)
