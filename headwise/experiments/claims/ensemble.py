"""Heads act like an ensemble: several heads of one model against the average of as many models of one head."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.recording.batching import tokenizer_of
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, Picture, Verdict, every
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.statistic import Figure, Figures
from headwise.experiments.engine.train_model import EXAMINED, examine
from headwise.experiments.experiment import Lab
from headwise.model import Transformer
from headwise.text.corpus import Corpus

MEMBERS = 4
SAME = 0.02  # nats: 2 % of perplexity
WIDE, NARROW = "wide members", "narrow members"
OPEN = "by the seed"


class Average(nn.Module):
    """Decoders that answer together: forward gives the logarithm of their mean probability."""

    def __init__(self, models: Sequence[Transformer]) -> None:
        super().__init__()
        if not models or len({model.spec.vocab for model in models}) > 1:
            raise HeadwiseError("an ensemble needs at least one model, and the same vocabulary in all of them.")
        self.models = nn.ModuleList(models)
        self.tokenizer, self.device = tokenizer_of(models[0]), models[0].device

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) → (B, T, vocab)"""
        told = torch.stack([model(ids).log_softmax(-1) for model in self.models])  # (models, B, T, vocab)
        return told.logsumexp(0) - math.log(len(told))


@torch.no_grad()
def average_loss(models: Sequence[Transformer], corpus: Any) -> float:
    """The loss of models that answer together, nats a token, on texts that each begin anew; one model: its own loss."""
    together = Average(models).eval()
    total, count = 0.0, 0
    for text in Corpus.of(corpus).items():
        ids = torch.tensor([together.tokenizer.encode(text.text)])  # (1, T)
        told = together(ids[:, :-1].to(together.device))  # (1, T − 1, vocab)
        total -= float(told.gather(-1, ids[:, 1:, None].to(together.device)).double().sum())
        count += ids.shape[1] - 1
    return total / count


def measure(lab: Lab) -> Figures:
    """One model of several heads for each seed, beside two ensembles, all on the same held-out documents."""
    texts, figures = lab.documents(), Figures()
    made = [lab.made(lab.point(seed, MEMBERS)) for seed in lab.seeds]
    losses = [average_loss([one.model()], texts) for one in made]
    figures.add("loss", f"{MEMBERS} heads", losses)
    for relation in made[0].marks:
        figures.add(f"right, {MEMBERS} heads", relation, [one.marks[relation] for one in made])
    for name, some in _members(lab).items():
        models = [lab.made(point).model() for point in some]
        together = average_loss(models, texts)
        figures.add("loss", f"{name}, each alone", [average_loss([model], texts) for model in models])
        figures.add("loss", f"{name}, averaged", together)
        figures.add("above the ensemble", name, [loss - together for loss in losses])
        figures.add("parameters, of the heads' model 1", name, _parameters(some) / made[0].point.spec.parameters)
        for mark in examine(Average(models).eval(), lab.seeds[0], EXAMINED):  # pyright: ignore[reportArgumentType]
            figures.add(f"right, {name} averaged", mark.quiz, mark.right)
    return figures


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    found = {str(name): _compared(figure) for name, figure in figures.at("above the ensemble").items()}
    told = "; ".join(f"{word} {name} averaged" for name, word in found.items())
    words = set(found.values())
    if words == {"as good as"}:
        return Verdict("holds")
    if words == {"better than"} or words == {"worse than"}:
        return Verdict("does not hold", f"the heads are {told}")
    on = "the seed" if any(word.startswith(OPEN) for word in words) else "the members"
    return Verdict("depends", f"on {on}: the heads are {told}")


def points(lab: Lab) -> Iterable[Point]:
    """The model of several heads for each seed, and all members."""
    return [lab.point(seed, MEMBERS) for seed in lab.seeds] + [
        point for some in _members(lab).values() for point in some
    ]


def _members(lab: Lab) -> dict[str, list[Point]]:
    """Models of one head: as wide as the model, or as narrow as one of several heads."""
    seeds, narrow = range(lab.seeds[0], lab.seeds[0] + MEMBERS), lab.size.width // MEMBERS
    return {
        WIDE: [lab.point(seed, 1) for seed in seeds],
        NARROW: [lab.point(seed, 1, head_dim=narrow) for seed in seeds],
    }


def _parameters(some: Iterable[Point]) -> int:
    return sum(point.spec.parameters for point in some)


def _compared(gap: Figure) -> str:
    if gap.above(SAME):
        return "worse than"
    if gap.below(-SAME):
        return "better than"
    return "as good as" if gap.above(-SAME) and gap.below(SAME) else f"{OPEN} better or worse than"


CLAIM = Claim(
    number=24,
    name="ensemble",
    says="Heads act like an ensemble: h heads in one model are as good as h models of one head whose answers are averaged.",
    against="A model of h heads that is clearly worse than the average, or clearly better: then heads do together what no "
    "averaging of answers does.",
    setup=f"One model of {MEMBERS} heads for each seed, against {MEMBERS} models of one head, of {MEMBERS} seeds from "
    "the first one on (other weights, other documents), their probabilities averaged: "
    "members with a head as wide as the model, each with as "
    f"many parameters as the model of {MEMBERS} heads, so {MEMBERS} times as many together; and members with a head of a "
    f"{MEMBERS}th of the width, whose attention adds up to that of the one model, though their MLPs and tables do not. All "
    "read the same held-out documents. There is one ensemble of each kind: intervals are over seeds of the one model.",
    rule=f"As good means a loss surely within {SAME:g} nats a token of the ensemble's. Holds if the heads are as good as "
    "both ensembles; does not hold if they are surely better than both, or surely worse than both; else depends, on the seed "
    "if either stays open, or on the members.",
    asks=every("above the ensemble"),
    measure=measure,
    judge=judge,
    picture=Picture(("loss",), y="held-out loss, nats a token"),
    points=points,
)
