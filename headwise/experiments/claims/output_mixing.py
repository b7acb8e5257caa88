"""Without mixing, heads do not know of each other."""

from collections.abc import Iterator
from itertools import combinations, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.ablation.eval_targets import ask, askable_units
from headwise.analysis.recording.batching import make_batch
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.similarity.compare_heads import compare
from headwise.experiments.claim import Claim, Picture, Verdict
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.statistic import At, Figures
from headwise.experiments.experiment import Lab
from headwise.heads import MultiHeadAttention
from headwise.kernels import causal
from headwise.model import AnyModel, Transformer, quiet

TEXTS, LONGEST = 48, 128
ROWS = 128  # on which what heads write is compared
ROUNDING = 1e-5
LITTLE = 0.05  # of what the two cost singly
LEARNED, NONE = "W_O as learned", "no mixing"


@torch.no_grad()
def within_layer(layer: MultiHeadAttention, x: Tensor, one: int = 0, other: int = 1) -> float:
    """How far two heads of a layer are from adding up in its output: silenced together, against each alone; relative.

    >>> within_layer(MultiHeadAttention(width=8, heads=2), torch.randn(1, 5, 8)) < 1e-5
    True
    """
    H = len(layer.spec.head_ids)

    def without(*heads: int) -> Tensor:
        gate = torch.ones(H)
        gate[list(heads)] = 0
        return layer(x, mask=causal(), gate=gate)  # (B, T, D)

    whole = without()
    return float((whole - without(one) - without(other) + without(one, other)).norm() / whole.norm())


@torch.no_grad()
def interaction(
    model: AnyModel, corpus: Any = None, *, pairs: int | None = None, texts: int = TEXTS, seed: int = 0
) -> float:
    """How far pairs of heads of one layer are from adding up in the loss, as a share of what they cost singly.

    Σ |cost of both − cost of one − cost of the other| over Σ (|cost of one| + |cost of the other|), where a cost is what the
    loss gains when heads are silenced. All pairs, or so many, drawn.
    """
    every = [pair for site in model.sites() for pair in combinations(map(str, site.addresses), 2)]
    order = np.random.default_rng(seed).permutation(len(every))[:pairs]
    chosen = [every[place] for place in sorted(order)]
    fitting = askable_units(model, Reading.of(model, corpus, answers=True, usual=LONGEST))
    asked = ask(model, make_batch(list(islice(fitting, texts)), device=model.device))

    def answers(*heads: str) -> Tensor:
        return asked.answers(model, asked.pick(asked.run(model, dict.fromkeys(heads, 0.0))))

    with quiet(model):
        clean = answers()

        def cost(*heads: str) -> float:
            return float(asked.lost(answers(*heads), clean).sum())

        alone = {head: cost(head) for head in dict.fromkeys(head for pair in chosen for head in pair)}
        off = [abs(cost(*pair) - alone[pair[0]] - alone[pair[1]]) for pair in chosen]
    size = sum(abs(alone[one]) + abs(alone[other]) for one, other in chosen)
    return sum(off) / size if size > 0 else 0.0


def writing(model: AnyModel, corpus: Any = None) -> tuple[float, float, float]:
    """How far heads of a layer write into the same directions: the overlap of their subspaces, chance, and the mean cosine
    of what they write."""
    found = compare(model, corpus, rows=ROWS)
    layers = list(found.by_layer().values())
    overlap, cosine = (float(np.nanmean([layer[name] for layer in layers])) for name in ("write", "output"))
    return overlap, float(found.nulls["write"]), cosine


def _asks(figures: Figures) -> Iterator[tuple[str, At]]:
    yield "interaction in the loss", NONE
    yield "interaction left without mixing", None


def points(lab: Lab) -> list[Point]:
    """The usual model, and one whose W_O is the identity and stays so."""
    return [lab.point(seed, start=start) for start in ("usual", "identity W_O") for seed in lab.seeds]


def measure(lab: Lab) -> Figures:
    """Both models, on held-out text."""
    figures, shares = Figures(), {}
    for start, name in (("usual", LEARNED), ("identity W_O", NONE)):
        models = [lab.made(lab.point(seed, start=start)).model() for seed in lab.seeds]
        texts = [lab.documents(seed) for seed in lab.seeds]
        shares[name] = [interaction(model, some) for model, some in zip(models, texts, strict=True)]
        figures.add("interaction in the loss", name, shares[name])
        figures.add("interaction within the layer", name, [_worst(model) for model in models])
        _add_writing(figures, name, [writing(model, some) for model, some in zip(models, texts, strict=True)])
    left = [none / learned if learned > 0 else 1.0 for none, learned in zip(shares[NONE], shares[LEARNED], strict=True)]
    return figures.add("interaction left without mixing", None, left)


def _worst(model: Transformer) -> float:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(1, 32, model.spec.width, generator=dice)
    with quiet(model):
        return max(within_layer(layer, x) for layer in model.attention_layers() if len(layer.spec.head_ids) > 1)


def _add_writing(figures: Figures, name: str, found: list[tuple[float, float, float]]) -> None:
    figures.add("overlap of write subspaces", name, [overlap for overlap, _, _ in found])
    figures.add("overlap of write subspaces", "chance", [chance for _, chance, _ in found])
    figures.add("cosine of writes", name, [cosine for _, _, cosine in found])


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    if any(max(figure.values) > ROUNDING for figure in figures.at("interaction within the layer").values()):
        return Verdict(
            "does not hold", "heads do not add up in their layer's own output, which breaks the sum over heads"
        )
    lost, left = figures["interaction in the loss", NONE], figures["interaction left without mixing"]
    if lost.below(LITTLE):
        return Verdict("holds")
    if left.below(0.5):
        return Verdict("depends", "on what comes behind: less than half is left without W_O, through later layers")
    if lost.above(LITTLE) and left.above(0.5):
        return Verdict("does not hold", "later layers and norms let heads meet, with W_O or without")
    return Verdict("depends", "on the seed: how far heads interact without W_O varies too much")


CLAIM = Claim(
    number=13,
    name="mixing",
    says="Without mixing by W_O, heads do not know of each other.",
    against="Heads laid side by side and never mixed whose effects on the loss still hang on each other.",
    setup="Two heads of a layer are silenced together and singly. Heads that do not know of each other add up. Tested is the "
    "layer's own output, where they must, with W_O or without; and the loss, behind later layers, of the usual model and of "
    "one whose W_O is the identity in training too: as a share of what both cost singly, over all pairs. Beside it the "
    "overlap of write subspaces (chance d/D, 0 for the identity) and the cosine of what heads write on text. Not tested is "
    "whether mixing helps.",
    rule=f"The loss decides. (Should heads fail to add up in a layer's output, by more than {ROUNDING:g}, it does not hold, "
    f"and the code is wrong.) Holds if without mixing the interaction in the loss is surely below {LITTLE:g}; depends "
    "if it surely is less than half of the usual model's; does "
    f"not hold if it surely is more than half and above {LITTLE:g}; else depends on the seed.",
    identity="in their layer's own output heads add up, with W_O or without: it is a sum over heads",
    asks=_asks,
    measure=measure,
    judge=judge,
    picture=Picture(("interaction in the loss", "interaction within the layer"), y="share of what both cost singly"),
    points=points,
)
