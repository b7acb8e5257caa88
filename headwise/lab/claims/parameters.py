"""At a fixed width, the number of heads does not change the number of parameters."""

from dataclasses import replace
from typing import Any

from headwise.heads import MultiHeadAttention
from headwise.lab.claim import Claim, Picture, Verdict
from headwise.lab.figure import Figures
from headwise.lab.lab import Lab
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


def count(spec: AttentionSpec) -> int:
    """The parameters of a layer, by building it.

    >>> count(AttentionSpec(width=64, heads=4))
    16384
    """
    return sum(weight.numel() for weight in MultiHeadAttention(spec).parameters())


def spread(spec: AttentionSpec, heads: tuple[int, ...]) -> float:
    """The most parameters of a layer over its fewest, when only the number of heads changes."""
    counts = [count(replace(spec, heads=h, head_dim=0, value_dim=0, kv_heads=min(h, spec.kv_heads))) for h in heads]
    return max(counts) / min(counts)


def measure(lab: Lab) -> Figures:
    """Layers of every head count that divides the width, plain and otherwise."""
    width = lab.size.width
    heads = tuple(h for h in range(1, width + 1) if width % h == 0)
    figures = Figures()
    for h in heads:
        figures.add("parameters", h, count(AttentionSpec(width=width, heads=h)))
    for name, fields in VARIANTS.items():
        shared = 1 if name == "one key head" else width
        spec = AttentionSpec(width=width, heads=width, **{"kv_heads": shared, **fields})
        figures.add("most over fewest", name, spread(spec, heads))
    return figures


def on(model: AnyModel, text: Any = None) -> Figures:
    """The model's own kind of layer, with other head counts."""
    spec = replace(model.spec.attention, kept=None, rotary=None)
    heads = tuple(h for h in (1, 2, 4, 8, 16, 32, 64) if spec.width % h == 0 and h <= spec.width)
    figures = Figures()
    own = replace(spec, head_dim=0, value_dim=0, heads=1, kv_heads=1)
    for h in heads:
        figures.add("parameters", h, count(replace(own, heads=h, head_dim=0, value_dim=0, kv_heads=h)))
    grouped = spec.kv_heads < spec.heads
    figures.add(
        "most over fewest", "plain", spread(replace(own, heads=64, kv_heads=64, head_dim=1, value_dim=1), heads)
    )
    if grouped:
        kinds = replace(own, heads=64, kv_heads=1, head_dim=1, value_dim=1)
        figures.add("most over fewest", "one key head", spread(kinds, heads))
    return figures


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    spreads = figures.at("most over fewest")
    moving = [str(name) for name, figure in spreads.items() if figure.mean != 1]
    if spreads["plain"].mean != 1:
        return Verdict("does not hold")
    return (
        Verdict("depends", f"on what else the layer has: {', '.join(moving)} move it") if moving else Verdict("holds")
    )


CLAIM = Claim(
    number=3,
    name="parameters",
    says="At a fixed width, the number of heads does not change the number of parameters.",
    against="A layer whose parameter count moves when only its head count does.",
    setup="Layers of one width with every head count that divides it, plain and with biases, gates, sinks, shared keys or "
    "sliced inputs; parameters are counted by building each.",
    rule="Does not hold if a plain layer's count moves at all; depends if only another kind's does; else holds.",
    measure=measure,
    judge=judge,
    picture=Picture(("parameters",), x="heads", y="parameters of a layer", log=True),
    on=on,
)
