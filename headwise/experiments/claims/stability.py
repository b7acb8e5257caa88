"""Many heads make training more stable: less spread over seeds, and higher rates before it breaks."""

import math
from collections.abc import Iterable

import numpy as np

from headwise.experiments.claim import Claim, Picture, Verdict, every
from headwise.experiments.engine.experiment_config import Made, Point
from headwise.experiments.engine.statistic import Figure, Figures
from headwise.experiments.experiment import Lab

HARD = (5, 15)  # times the usual rate
STEPS, WARMUP = 320, 10
MATTERS = 0.1  # nats that a high rate costs one head more than many
LOST = 0.5  # nats above the usual rate: such a run has learned little


def rise(made: Made, usual: Made) -> float:
    """How far a run ended above the same model at the usual rate; one that diverged knows no more than to guess."""
    return min(made.loss, math.log(made.point.spec.vocab)) - usual.loss


def measure(lab: Lab) -> Figures:
    """What high rates cost with one head, with the usual number and with four times as many; and the spread over seeds."""
    figures, rises = Figures(), {}
    for heads in _heads(lab):
        usual = [lab.made(_short(lab, seed, heads, 1)) for seed in lab.seeds]
        hard = [[lab.made(_short(lab, seed, heads, times)) for seed in lab.seeds] for times in HARD]
        for times, some in zip((1, *HARD), (usual, *hard), strict=True):
            name = "loss, one head" if heads == 1 else f"loss, {heads} heads"
            figures.add(name, lab.size.rate * times, [made.loss for made in some])
        rises[heads] = np.array(
            [[rise(*pair) for pair in zip(some, usual, strict=True)] for some in hard]
        )  # (rates, seeds)
        figures.add("runs lost", heads, (rises[heads] > LOST).mean(0).tolist())
        figures.add("cost of high rates", heads, rises[heads].mean(0).tolist())
    one, *many = rises
    for heads in many:
        figures.add("spared by many heads", heads, (rises[one] - rises[heads]).mean(0).tolist())
    if len(lab.seeds) > 1:
        losses = {heads: [lab.made(lab.point(seed, heads)).loss for seed in lab.seeds] for heads in rises}
        for heads, values in losses.items():
            figures.add("spread over seeds", heads, float(np.std(values, ddof=1)))
        for heads in many:
            figures.add("spread of one head over that of many", heads, Figure.spreads(losses[one], losses[heads]))
    return figures


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    spared = figures.at("spared by many heads")
    stable = [heads for heads, figure in spared.items() if figure.above(MATTERS)]
    ratios = figures.at("spread of one head over that of many")
    wider = [heads for heads, figure in ratios.items() if figure.below(1)]
    narrower = [heads for heads, figure in ratios.items() if figure.above(1)]
    not_so = [heads for heads, figure in spared.items() if figure.below(MATTERS)]
    unsure = [heads for heads in spared if heads not in (*stable, *not_so)]
    if len(not_so) == len(spared):
        return Verdict("does not hold")
    if not stable:
        return Verdict("depends", f"on the seed: whether high rates spare {_and(unsure)} heads stays open")
    if wider:
        told = f"high rates spare {_and(stable)} heads, but their losses spread further over seeds with {_and(wider)}"
        return Verdict("depends", f"on what stable means: {told}")
    if not_so:
        return Verdict("depends", f"on how many: high rates surely spare {_and(stable)} of {_and(spared)} heads")
    if unsure:
        told = f"high rates surely spare {_and(stable)} heads, whether {_and(unsure)} as well stays open"
        return Verdict("depends", f"on the seed: {told}")
    over = f"is less with {_and(narrower)}" if narrower else "shows no difference, of so few"
    return Verdict("holds", f"high rates cost one head more; the spread over seeds {over}")


def points(lab: Lab) -> Iterable[Point]:
    """Short runs at three rates; with several seeds also whole ones, which the sweep has anyway."""
    short = [_short(lab, seed, h, times) for seed in lab.seeds for h in _heads(lab) for times in (1, *HARD)]
    return short + [lab.point(seed, h) for seed in lab.seeds for h in _heads(lab) if len(lab.seeds) > 1]


def _heads(lab: Lab) -> tuple[int, ...]:
    return 1, lab.size.heads, min(4 * lab.size.heads, lab.size.width)


def _short(lab: Lab, seed: int, heads: int, times: float) -> Point:
    """A short run at so many times the usual rate, and with hardly a warm-up."""
    steps = min(STEPS, lab.size.steps)
    told = {"steps": steps, "warmup": min(WARMUP, steps // 2), "evaluate_every": steps, "save_every": steps}
    return lab.point(seed, heads, recipe={**told, "rate": lab.size.rate * times})


def _and(counts: Iterable[object]) -> str:
    return " and ".join(map(str, counts))


CLAIM = Claim(
    number=23,
    name="stability",
    says="Many heads make training more stable.",
    against="One head that bears high learning rates as well as many do; or losses that spread further over seeds with many.",
    setup=f"One head, the usual number and four times as many: short runs ({STEPS} steps, {WARMUP} of warm-up, gradients "
    f"clipped to length 1) at the usual rate and at {HARD[0]} and {HARD[1]} times that; whole runs at the usual rate for the "
    "spread of losses over seeds, where there are several. Each seed has held-out documents of its own, whose differences "
    "are part of that spread. A run that diverged counts as one that guesses.",
    rule="The cost of high rates is how far runs end above the same model at the usual rate, averaged over both. Does not "
    f"hold if both larger head counts surely save less than {MATTERS:g} nats a token of what they cost one head (paired by "
    "seed); else depends on the seed if neither surely saves more. If one does, depends on what stable means if losses "
    "spread surely further over seeds with many heads than with one (Fisher's F; of few seeds only a manifold spread would "
    "show), on how many if the other surely saves less, on the seed if that stays open. Else holds.",
    asks=every("spared by many heads", "spread of one head over that of many"),
    measure=measure,
    judge=judge,
    picture=Picture(("cost of high rates",), x="heads", y="nats above the usual rate", log=True),
    points=points,
)
