"""At a fixed width, the number of heads does not change the number of parameters."""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import torch

from headwise.errors import UnsupportedModelError
from headwise.experiments.claim import Claim, PlotSpec, Verdict
from headwise.experiments.compared_head_counts import head_counts
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.heads import MultiHeadAttention
from headwise.model import ModelProtocol
from headwise.spec import AttentionSpec

VARIANTS: dict[str, dict[str, Any]] = {  # parts of a layer in addition to plain projections
    "plain": {},
    "biases": {"bias": True, "out_bias": True},
    "gates": {"gated": True},
    "learned sinks": {"softmax": "sink"},
    "one key head": {"kv_heads": 1},
    "sliced input": {"head_input": "slice"},
}
OWN_KIND = "the model's own kind"


def count_parameters(spec: AttentionSpec) -> int:
    """Count the parameters of a layer by building it on meta tensors.

    >>> count_parameters(AttentionSpec(width=64, heads=4))
    16384
    """
    with torch.device("meta"):
        layer = MultiHeadAttention(spec)
    return sum(weight.numel() for weight in layer.parameters())


def with_heads(spec: AttentionSpec, heads: int) -> AttentionSpec:
    """Change the head count of a layer spec. The number of KV heads becomes the largest one that divides both.

    >>> with_heads(AttentionSpec(width=96, heads=12, kv_heads=3), 16).kv_heads
    1
    """
    kv_heads = heads if spec.kv_heads == spec.heads else gcd(heads, spec.kv_heads)
    # rotary positions need an even head_dim, and have no parameters
    return replace(spec, heads=heads, head_dim=0, value_dim=0, kv_heads=kv_heads, kept_heads=None, rotary=None)


def max_min_parameter_ratio(spec: AttentionSpec, heads: Sequence[int]) -> float:
    """Return the largest over the smallest parameter count of a layer when only the number of heads changes."""
    counts = [count_parameters(with_heads(spec, h)) for h in heads]
    return max(counts) / min(counts)


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure plain and other layers of every head count that divides the width."""
    width = experiment.size.width
    heads = tuple(h for h in range(1, width + 1) if width % h == 0)
    statistics = StatisticTable()
    for h in heads:
        statistics.add("parameters", h, count_parameters(AttentionSpec(width=width, heads=h)))
    for name, fields in VARIANTS.items():
        statistics.add(
            "most over fewest", name, max_min_parameter_ratio(AttentionSpec(width=width, heads=width, **fields), heads)
        )
    return statistics


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """Measure a plain layer of the model's width and the model's own kind of layer, with other head counts."""
    spec = model.spec.attention
    heads = head_counts(spec.width)
    if len(heads) < 2:
        raise UnsupportedModelError(
            f"model: a width of {spec.width} cannot be divided among several heads. Use a model with an even width."
        )
    statistics = StatisticTable()
    for h in heads:
        statistics.add("parameters", h, count_parameters(with_heads(spec, h)))
    statistics.add(
        "most over fewest", "plain", max_min_parameter_ratio(AttentionSpec(width=spec.width, heads=1), heads)
    )
    return statistics.add("most over fewest", OWN_KIND, max_min_parameter_ratio(spec, heads))


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    spreads = statistics.by_condition("most over fewest")
    moving = [str(name) for name, statistic in spreads.items() if statistic.mean != 1]
    if spreads["plain"].mean != 1:
        return Verdict("does not hold")
    if moving:
        moves = "change" if len(moving) > 1 else "changes"
        return Verdict("true by construction", f"for plain layers; exceptions: {', '.join(moving)} {moves} the number")
    return Verdict("true by construction")


CLAIM = Claim(
    number=3,
    name="parameters",
    statement="At a fixed width, the number of heads does not change the number of parameters.",
    counterevidence="A layer whose parameter count changes when only its head count changes.",
    setup="Layers of one width with every head count that divides it, plain and with biases, gates, sinks, shared keys or "
    "sliced inputs. Each layer is built and its parameters are counted. For a given model: a plain layer of its width, and "
    "its own kind of layer.",
    rule="Does not hold if the count of a plain layer changes at all. Otherwise it is true by construction for plain layers. "
    "Other kinds of layers whose count changes are listed as exceptions.",
    identity="a plain layer has four matrices of width x width, however they are divided among heads",
    possible_verdicts=("true by construction", "does not hold"),
    measure=measure,
    judge=judge,
    plot=PlotSpec(("parameters",), x="heads", y="parameters of a layer", log_x=True),
    measure_model=measure_model,
)
