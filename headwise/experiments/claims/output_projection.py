"""The output projection matters: heads laid side by side and never mixed are not enough."""

from collections.abc import Iterable

from headwise.experiments.claim import Claim, Picture, Verdict, every
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.experiment import Lab

LEAST = 0.02  # nats: 2 % of perplexity
LEARNED = "learned"
STARTS = {LEARNED: "usual", "frozen random": "frozen W_O", "identity": "identity W_O"}


def measure(lab: Lab) -> Figures:
    """Loss and right answers with each kind of W_O, and what the fixed ones cost."""
    figures = Figures()
    made = {name: [lab.made(lab.point(seed, start=start)) for seed in lab.seeds] for name, start in STARTS.items()}
    for name, some in made.items():
        figures.add("loss", name, [one.loss for one in some])
        for relation in some[0].marks:
            figures.add(f"right, {name}", relation, [one.marks[relation] for one in some])
        if name != LEARNED:
            pairs = zip(some, made[LEARNED], strict=True)
            figures.add("lost", name, [one.loss - other.loss for one, other in pairs])
    return figures


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    lost = figures.at("lost")
    dear = [str(name) for name, figure in lost.items() if figure.above(LEAST)]
    cheap = [str(name) for name, figure in lost.items() if figure.below(LEAST)]
    if len(dear) == len(lost):
        return Verdict("holds")
    if len(cheap) == len(lost):
        return Verdict("does not hold")
    unsure = [str(name) for name in lost if str(name) not in dear + cheap]
    told = ((dear, "costs"), (cheap, "does not cost"), (unsure, "may cost, or not"))
    on = "the seed" if unsure else "what stands in its place"
    return Verdict("depends", f"on {on}: " + "; ".join(f"{', '.join(n)} {w}" for n, w in told if n))


def points(lab: Lab) -> Iterable[Point]:
    """All three kinds."""
    return [lab.point(seed, start=start) for seed in lab.seeds for start in STARTS.values()]


CLAIM = Claim(
    number=12,
    name="output-projection",
    says="The output projection W_O matters: what heads found must be mixed, not merely laid side by side.",
    against="A model whose W_O is the identity, or random and never trained, and that is as good.",
    setup="The usual model with W_O learned; frozen as it was drawn (small random numbers); and frozen as the identity, so "
    "that head h writes to channels h·d to (h + 1)·d alone. All else is trained, W_V too, which can make up for much: what a "
    "head writes is x W_V W_O. The identity begins larger than a drawn W_O does; the fixed ones train 4096 parameters a "
    "layer fewer at width 64. Losses are paired by seed.",
    rule=f"Holds if both fixed ones surely lose more than {LEAST:g} nats a token; does not hold if both surely lose less; "
    "else depends, on the seed if either stays open.",
    asks=every("lost"),
    measure=measure,
    judge=judge,
    picture=Picture(("lost",), y="loss above that of a learned W_O, nats a token"),
    points=points,
)
