"""Heads carry different gradients."""

import math
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.ablation.eval_targets import TargetBatch, ask, askable_units
from headwise.analysis.recording.batching import make_batch
from headwise.analysis.recording.tokenized_corpus import Reading, documents_for
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, Picture, Verdict, every
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.experiment import Lab
from headwise.heads.hook_point import Seen
from headwise.model import AnyModel, quiet

TEXTS = 32  # whose loss the gradient is of
LONGEST = 128
BAR = 0.3  # a mean cosine below it counts as different
OWN, MOVED, CHANCE = "of its weights", "of what it moves", "random vectors"


def cosines(vectors: Tensor) -> float:
    """The mean |cosine| over pairs of rows, (H, N); 1 for copies, about √(2/πN) for random ones.

    >>> cosines(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]))  # one pair of three points the same way
    0.3333333333333333
    """
    unit = nn.functional.normalize(vectors.double(), dim=1)
    upper = torch.ones(len(vectors), len(vectors)).triu(1).bool()
    return float((unit @ unit.mT)[upper].abs().mean())


def gradients(model: AnyModel, corpus: Any = None, texts: int = TEXTS) -> dict[str, float]:
    """How alike the gradients of a layer's heads are: mean |cosine| over pairs of heads and layers.

    `of its weights`: W_Q, W_K, W_V and W_O end to end (where keys are shared by a group, W_Q and W_O alone).
    `of what it moves`: of W_V W_O as one D×D matrix, which does not hang on the basis a head keeps its channels in.
    `random vectors`: what as many random numbers would give.
    """
    asked = _target_batch(model, corpus, texts)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    maps: list[Tensor] = []
    with quiet(model), torch.enable_grad(), ExitStack() as stack:
        for layer in model.attention_layers():
            stack.enter_context(layer.site.listen(lambda seen: maps.append(_maps(seen))))
            stack.callback(layer.register_forward_pre_hook(_keep_input(reads)).remove)
            stack.callback(layer.register_forward_hook(_keep_output(writes)).remove)
        hidden = asked.run(model).flatten(0, 1)  # (B·T, D)
        assert asked.targets is not None
        assert model.output is not None
        loss = model.output.cross_entropy(hidden, asked.targets.flatten())
        made = torch.autograd.grad(loss, [*weights, *writes], allow_unused=True)
    own = _by_head(model, dict(zip(weights, made, strict=False)))
    slopes = [slope for slope in made[len(weights) :] if slope is not None]
    parts = [one for one in zip(maps, reads, slopes, strict=True) if one[0].shape[1] > 1]
    return {
        OWN: _mean([cosines(layer) for layer in own]),
        MOVED: _mean([cosines(_moved(*one)) for one in parts]),
        CHANCE: math.sqrt(2 / math.pi / own[0].shape[1]),
    }


def _target_batch(model: AnyModel, corpus: Any, texts: int) -> TargetBatch:
    fitting = askable_units(model, Reading.of(model, corpus, answers=True, usual=LONGEST))
    asked = ask(model, make_batch(list(islice(fitting, texts)), device=model.device))
    if asked.targets is None:
        raise HeadwiseError("this model has no output over a vocabulary, so it has no loss to take gradients of.")
    return asked


def _keep_input(kept: list[Tensor]) -> Any:
    return lambda part, given: kept.append(given[0].detach())


def _keep_output(kept: list[Tensor]) -> Any:
    return lambda part, given, out: kept.append(out)


def _maps(seen: Seen) -> Tensor:
    with torch.no_grad():
        return seen.maps()  # (B, H, T, S)


def _by_head(model: AnyModel, slopes: dict[nn.Parameter, Tensor | None]) -> list[Tensor]:
    """Each head's gradient as one row, a matrix for each layer: (H, N).

    A gradient has the shape of what it is of: while it stands in its place, heads show their own part of it.
    """
    before = {weight: weight.data for weight in slopes}
    letters = "QKVO" if model.spec.attention.kv_heads == model.spec.attention.heads else "QO"
    try:
        for weight, slope in slopes.items():
            weight.data = torch.zeros_like(weight.data) if slope is None else slope
        rows = {
            head.address: torch.cat([getattr(head, f"W_{c}").detach().flatten() for c in letters])
            for head in model.heads
        }
    finally:
        for weight, data in before.items():
            weight.data = data
    sites = [site for site in model.sites() if len(site.head_ids) > 1]
    if not sites:
        raise HeadwiseError("no layer of this model has two heads whose gradients could be compared.")
    return [torch.stack([rows[address] for address in site.addresses]) for site in sites]


def _moved(maps: Tensor, read: Tensor, slope: Tensor) -> Tensor:
    """The gradient of W_V W_O, a row for each head: Σ over texts of (P x)ᵀ ∂L/∂out, (H, D·D)."""
    gathered = maps @ read[:, None]  # (B, H, T, D)
    return torch.einsum("bhtd,bte->hde", gathered, slope).flatten(1)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def points(lab: Lab) -> list[Point]:
    """The usual model."""
    return [lab.point(seed) for seed in lab.seeds]


def measure(lab: Lab) -> Figures:
    """The usual model at every step that is kept, on the same held-out texts."""
    figures = Figures()
    made = [lab.made(lab.point(seed)) for seed in lab.seeds]
    steps = made[0].point.recipe.steps
    for step in (*made[0].point.watch, None):
        found = [gradients(one.model(step), lab.documents(seed)) for one, seed in zip(made, lab.seeds, strict=True)]
        for name in (OWN, MOVED, CHANCE):
            figures.add(f"cosine {name}", 1.0 if step is None else step / steps, [one[name] for one in found])
    return figures


def on(model: AnyModel, text: Any = None) -> Figures:
    """A model as it is, at the end of its training."""
    figures = Figures()
    for name, value in gradients(model, documents_for(model) if text is None else text).items():
        figures.add(f"cosine {name}", 1.0, value)
    return figures


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    asked = {name: figures.at(f"cosine {name}") for name in (OWN, MOVED)}
    every_one = [figure for some in asked.values() for figure in some.values()]
    if all(figure.below(BAR) for figure in every_one):
        return Verdict("holds")
    if all(figure.above(BAR) for figure in every_one):
        return Verdict("does not hold")
    told = [f"{name} at {sum(f.below(BAR) for f in some.values())}" for name, some in asked.items()]
    unsure = [figure for figure in every_one if not figure.below(BAR) and not figure.above(BAR)]
    on, most = "seed" if unsure else "gradient", max(map(len, asked.values()))
    return Verdict("depends", f"on the {on}: surely different {' and '.join(told)} of {most} steps looked at")


CLAIM = Claim(
    number=20,
    name="gradients",
    says="Heads carry different gradients, so that each learns something else.",
    against="Heads of a layer whose gradients point the same way.",
    setup=f"The gradient of the loss on {TEXTS} held-out texts, before training, after 1/8, 1/4 and 1/2 of it and at its "
    f"end, head by head: of all its weights end to end, and of W_V W_O as one matrix. The second is what it would move "
    f"otherwise, whatever basis the head keeps its channels in: random bases alone make the first differ. Mean |cosine| "
    f"over the pairs of a layer; 1 for copies, about √(2/πN) for random vectors.",
    rule=f"Holds if both mean cosines are surely below {BAR:g} at every step, does not hold if all surely are above it; else "
    "depends, on the seed if any stays open.",
    asks=every(f"cosine {OWN}", f"cosine {MOVED}"),
    measure=measure,
    judge=judge,
    picture=Picture(
        tuple(f"cosine {name}" for name in (OWN, MOVED, CHANCE)), x="share of training done", y="mean |cosine|"
    ),
    points=points,
    on=on,
)
