"""At a fixed width, the number of heads does not change the number of parameters."""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import torch

from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, Picture, Verdict
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.experiment import Lab
from headwise.experiments.head_counts import head_counts
from headwise.heads import MultiHeadAttention
from headwise.model import AnyModel
from headwise.spec import AttentionSpec

VARIANTS: dict[str, dict[str, Any]] = {  # what a layer may have beside plain projections
    "plain": {},
    "biases": {"bias": True, "out_bias": True},
    "gates": {"gated": True},
    "learned sinks": {"softmax": "sink"},
    "one key head": {"kv_heads": 1},
    "sliced input": {"input": "slice"},
}
OWN = "the model's own kind"


def count(spec: AttentionSpec) -> int:
    """The parameters of a layer, by building it of tensors without numbers.

    >>> count(AttentionSpec(width=64, heads=4))
    16384
    """
    with torch.device("meta"):
        layer = MultiHeadAttention(spec)
    return sum(weight.numel() for weight in layer.parameters())


def with_heads(spec: AttentionSpec, heads: int) -> AttentionSpec:
    """The same kind of layer with another head count, and as many key heads as can be shared out over it.

    >>> with_heads(AttentionSpec(width=96, heads=12, kv_heads=3), 16).kv_heads
    1
    """
    shared = heads if spec.kv_heads == spec.heads else gcd(heads, spec.kv_heads)
    # rotary needs an even head_dim, and has no parameters
    return replace(spec, heads=heads, head_dim=0, value_dim=0, kv_heads=shared, kept=None, rotary=None)


def spread(spec: AttentionSpec, heads: Sequence[int]) -> float:
    """The most parameters of a layer over its fewest, when only the number of heads changes."""
    counts = [count(with_heads(spec, h)) for h in heads]
    return max(counts) / min(counts)


def measure(lab: Lab) -> Figures:
    """Layers of every head count that divides the width, plain and otherwise."""
    width = lab.size.width
    heads = tuple(h for h in range(1, width + 1) if width % h == 0)
    figures = Figures()
    for h in heads:
        figures.add("parameters", h, count(AttentionSpec(width=width, heads=h)))
    for name, fields in VARIANTS.items():
        figures.add("most over fewest", name, spread(AttentionSpec(width=width, heads=width, **fields), heads))
    return figures


def on(model: AnyModel, text: Any = None) -> Figures:
    """A plain layer of the model's width and the model's own kind, with other head counts."""
    spec = model.spec.attention
    heads = head_counts(spec.width)
    if len(heads) < 2:
        raise HeadwiseError(
            f"a width of {spec.width} cannot be shared out over several heads; take a model of an even width."
        )
    figures = Figures()
    for h in heads:
        figures.add("parameters", h, count(with_heads(spec, h)))
    figures.add("most over fewest", "plain", spread(AttentionSpec(width=spec.width, heads=1), heads))
    return figures.add("most over fewest", OWN, spread(spec, heads))


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    spreads = figures.at("most over fewest")
    moving = [str(name) for name, figure in spreads.items() if figure.mean != 1]
    if spreads["plain"].mean != 1:
        return Verdict("does not hold")
    if moving:
        moves = "move" if len(moving) > 1 else "moves"
        return Verdict("depends", f"on what else the layer has: {', '.join(moving)} {moves} it")
    return Verdict("true by construction")


CLAIM = Claim(
    number=3,
    name="parameters",
    says="At a fixed width, the number of heads does not change the number of parameters.",
    against="A layer whose parameter count moves when only its head count does.",
    setup="Layers of one width with every head count that divides it, plain and with biases, gates, sinks, shared keys or "
    "sliced inputs; parameters are counted by building each. Of a given model, a plain layer of its width and its own kind.",
    rule="Does not hold if a plain layer's count moves at all; depends if only another kind's does; else it is true by "
    "construction.",
    identity="a plain layer has four matrices of width x width, however they are shared out over heads",
    words=("true by construction", "does not hold", "depends"),
    measure=measure,
    judge=judge,
    picture=Picture(("parameters",), x="heads", y="parameters of a layer", log=True),
    on=on,
)
