"""Students' heads are aligned through the teacher's logits rather than by imitating each head."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from headwise.analysis.roles.profile import profile
from headwise.analysis.similarity.match_heads import match
from headwise.experiments.claim import Claim, Picture, Verdict, every
from headwise.experiments.engine.experiment_config import Made, Point
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.experiment import Lab

LAYERS = 4, 2  # of the teacher, of its students
PART = 0.5  # of the usual steps
MATTERS = 0.01  # nats a token
TEXTS = 64  # on which heads are matched
MAPS = {"maps, by order": "order", "maps, first layers": "first", "maps, best assignment": "best"}
WAYS = {"text": "", "logits": "logits", **{name: f"maps {pairs}" for name, pairs in MAPS.items()}}
WAYS |= {"qkv": "qkv", "logits and maps": "logits+maps best"}
LOSS, RIGHT = "held-out loss", "right answers"
APART, ROLES = "bits from the nearest of the teacher's heads", "share of heads with a role"
GAP, NEARER = "nats of maps above logits", "bits nearer to the teacher's heads"


def family(lab: Lab, seed: int) -> dict[str, Point]:
    """A teacher, and a student with half its layers and half its heads for each way to learn, all begun and read alike."""
    steps = {"steps": max(8, int(lab.size.steps * PART))}
    teacher = replace(lab.point(seed, layers=LAYERS[0], recipe=steps), watch=())
    student = replace(lab.point(seed, max(1, lab.size.heads // 2), layers=LAYERS[1], recipe=steps), watch=())
    taught = {name: replace(student, by=by, teacher=teacher if by else None) for name, by in WAYS.items()}
    return {"teacher": teacher, **taught}


def points(lab: Lab) -> Iterator[Point]:
    """Those of every seed, teachers first: students ask for them."""
    families = [family(lab, seed) for seed in lab.seeds]
    yield from (one["teacher"] for one in families)
    yield from (point for one in families for name, point in one.items() if name != "teacher")


def measure(lab: Lab) -> Figures:
    """Loss, exam, how far heads are from the teacher's, and which have a role; differences paired over seeds."""
    made = [{name: lab.made(point) for name, point in family(lab, seed).items()} for seed in lab.seeds]
    documents = lab.documents()
    figures = Figures()
    for name in ("teacher", *WAYS):
        figures.add(LOSS, name, [one[name].loss for one in made])
        figures.add(RIGHT, name, [_right(one[name]) for one in made])
        found = [profile(one[name].model(), documents, causal=False) for one in made]
        figures.add(ROLES, name, [float(np.mean([bool(head.roles) for head in seen])) for seen in found])
    apart = {name: [_apart(one["teacher"], one[name], lab) for one in made] for name in WAYS}
    for name in WAYS:
        figures.add(APART, name, apart[name])
    for name in MAPS:
        figures.add(GAP, name, [one[name].loss - one["logits"].loss for one in made])
    figures.add(NEARER, "logits, beside text", _less(apart["logits"], apart["text"]))
    for name in MAPS:
        figures.add("bits nearer than by text", name, _less(apart[name], apart["text"]))
    return figures


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    gaps = figures.at(GAP)
    beaten = [str(name) for name, gap in gaps.items() if gap.below(-MATTERS)]
    as_good = all(gap.above(-MATTERS) for gap in gaps.values())
    aligned = figures[NEARER, "logits, beside text"].above(0)
    if as_good and aligned:
        return Verdict("holds")
    if beaten and not aligned:
        return Verdict("does not hold", f"{beaten[0]} teach better, and logits bring heads no nearer than text does")
    if beaten:
        return Verdict("depends", f"on what is asked: logits bring heads nearer, but {beaten[0]} teach better")
    if as_good:
        return Verdict("depends", "on what is asked: logits teach as well, but bring heads no nearer than text does")
    return Verdict("depends", "on the seed: intervals reach to both sides of the bar")


def _right(made: Made) -> float:
    """The mean over quizzes of right answers."""
    return float(np.mean(list(made.marks.values()))) if made.marks else float("nan")


def _apart(teacher: Made, student: Made, lab: Lab) -> float:
    """The mean over a student's heads of how far the nearest of the teacher's is, on texts it was not chosen on."""
    return float(
        np.mean([one.distance for one in match(teacher.model(), student.model(), lab.documents(), texts=TEXTS)])
    )


def _less(one: list[float], other: list[float]) -> list[float]:
    return [b - a for a, b in zip(one, other, strict=True)]


CLAIM = Claim(
    number=27,
    name="distillation",
    says="Students' heads are aligned indirectly, through the teacher's logits, rather than by imitating each head.",
    against="A student taught by attention maps that is better than one taught by logits; or heads of a student taught by "
    "logits that are no nearer to the teacher's than those of a student that read the same text alone.",
    setup=f"A teacher of {LAYERS[0]} layers with the usual heads, and students of {LAYERS[1]} layers with half as many, each "
    f"trained on the same documents for {PART:.0%} of the usual steps: from text alone, by logits, by maps (heads paired by "
    "order, with the teacher's first layers, by the best assignment on where they look at the start), by relations of q, k "
    "and v, by logits and maps. Beside the loss and the exam: how far the nearest of the teacher's heads is (word by word, "
    "chosen on half of the texts, judged on the other), and how many heads have a role.",
    rule="The loss by maps minus that by logits, for each pairing, and how much nearer to the teacher's heads logits bring a "
    f"student than text does, paired over seeds. Holds if no pairing is better by {MATTERS:g} nats a token, surely, and "
    "heads are surely nearer; does not hold if some pairing is surely better by that and heads are not surely nearer; else "
    "depends.",
    asks=every(GAP, NEARER),
    measure=measure,
    judge=judge,
    picture=Picture((LOSS,), x="", y="held-out loss, nats a token"),
    points=points,
)
