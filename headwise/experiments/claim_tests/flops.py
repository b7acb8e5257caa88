"""At a fixed width, the number of heads does not change the FLOPs of attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from headwise.analysis import TokenizedCorpus
from headwise.errors import UnsupportedModelError
from headwise.experiments.claim import Claim, PlotSpec, Verdict
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.heads import MultiHeadAttention
from headwise.model import ModelProtocol
from headwise.spec import AttentionSpec

HEADS = (1, 2, 4, 8, 16, 32, 64)
SOFTMAX_OPS = 5  # operations per score: row maximum, subtraction, exponential, sum, division
MAX_CHANGE = 0.05  # relative change of the FLOPs that counts as a difference
LARGER_SIZES = (
    (768, 1024),
    (4096, 4096),
)  # (width, tokens) of GPT-2 and of a Llama model, in addition to the default size


@dataclass(frozen=True)
class LayerFlops:
    """Operations of one layer on one text.

    Attributes:
        matmul: Operations of matrix products. A multiply-add counts as two.
        softmax: Operations of the softmax.
    """

    matmul: int
    softmax: int

    @property
    def total(self) -> int:
        """Sum of both."""
        return self.matmul + self.softmax


def count_flops(spec: AttentionSpec, tokens: int) -> LayerFlops:
    """Count the operations of a layer that materializes its maps, by running it on meta tensors.

    >>> count_flops(AttentionSpec(width=64, heads=4), 10) == LayerFlops(8 * 10 * 64**2 + 4 * 10**2 * 64, 5 * 4 * 10**2)
    True
    """
    with torch.device("meta"):
        layer, x = MultiHeadAttention(spec, backend="batched"), torch.empty(1, tokens, spec.width)
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._softmax: _softmax_flops})
    with counter, torch.no_grad():
        layer(x)
    by_name = {str(name): n for name, n in counter.get_flop_counts()["Global"].items()}
    softmax = by_name.pop("aten._softmax", 0)
    return LayerFlops(sum(by_name.values()), softmax)


def _softmax_flops(shape: torch.Size, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return SOFTMAX_OPS * shape.numel()


def flops_by_heads(width: int, tokens: int, heads: Sequence[int] = HEADS, **fields: Any) -> dict[int, LayerFlops]:
    """Count the operations for every head count that divides the width. `fields` are further fields of the spec."""
    return {h: count_flops(AttentionSpec(width=width, heads=h, **fields), tokens) for h in heads if width % h == 0}


def measure(experiment: TrainedModelProvider, larger_sizes: Sequence[tuple[int, int]] = LARGER_SIZES) -> StatisticTable:
    """Measure the default size and larger sizes."""
    return _measure_sizes([(experiment.size.width, experiment.size.context), *larger_sizes])


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """Measure the model's width with other head counts, on its context length or the longest given text."""
    width, tokens = model.spec.width, model.spec.context
    if text is not None:
        tokens = max(len(sample.ids) for sample in TokenizedCorpus.of(model, text))
    if width % 2:
        raise UnsupportedModelError(
            f"model: a width of {width} cannot be divided among several heads. Use a model with an even width."
        )
    return _measure_sizes([(width, tokens)], model.spec.attention.kv_heads < model.spec.attention.heads)


def _measure_sizes(sizes: Sequence[tuple[int, int]], include_shared_kv: bool = True) -> StatisticTable:
    statistics = StatisticTable()
    first = flops_by_heads(*sizes[0])
    for h, flops in first.items():
        statistics.add("products", h, flops.matmul / 1e6).add("softmax", h, flops.softmax / 1e6)
    for width, tokens in sizes:
        counts = flops_by_heads(width, tokens).values()
        statistics.add(
            "most over fewest", f"products {width}x{tokens}", _max_over_min([flops.matmul for flops in counts])
        )
        statistics.add(
            "most over fewest", f"with softmax {width}x{tokens}", _max_over_min([flops.total for flops in counts])
        )
    if include_shared_kv:
        counts = flops_by_heads(*sizes[0], kv_heads=1).values()
        statistics.add("most over fewest", "products, one key head", _max_over_min([flops.matmul for flops in counts]))
    return statistics


def _max_over_min(counts: Sequence[int]) -> float:
    return max(counts) / min(counts)


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    spreads = {
        str(condition): statistic.mean for condition, statistic in statistics.by_condition("most over fewest").items()
    }
    plain = [ratio for condition, ratio in spreads.items() if condition.startswith("products ")]
    moved = {
        condition: ratio
        for condition, ratio in spreads.items()
        if not condition.startswith("products ") and ratio > 1 + MAX_CHANGE
    }
    if any(ratio != 1 for ratio in plain):
        return Verdict("does not hold")
    if moved:
        details = "; ".join(f"{condition} changes it up to {ratio:.3g} times" for condition, ratio in moved.items())
        return Verdict("true by construction", f"for the matrix products of plain layers; exceptions: {details}")
    return Verdict("true by construction")


CLAIM = Claim(
    number=4,
    name="flops",
    statement="At a fixed width, the total work of attention (FLOPs) does not depend on the number of heads.",
    counterevidence="A head count at which a layer of the same width needs more operations on the same text.",
    setup=f"Layers of {HEADS[0]} to {HEADS[-1]} heads at the default width and length and at those of larger models "
    "(width x tokens). Matrix products (projections, scores, weighted sums of values) are counted while the layer runs, "
    f"with two operations per multiply-add. Softmax is counted separately, with {SOFTMAX_OPS} operations for each of the "
    "heads x tokens² scores. Numbers are in millions.",
    rule="Does not hold if the matrix products of a plain layer change at all. Otherwise it is true by construction for "
    f"these products. If counting softmax, or sharing one KV head, changes the total by more than {MAX_CHANGE:.0%} from the "
    "smallest to the largest, this is listed as an exception.",
    identity="the products of a plain layer are heads x head_dim wide, which is the width",
    possible_verdicts=("true by construction", "does not hold"),
    measure=measure,
    judge=judge,
    plot=PlotSpec(("products", "softmax"), x="heads", y="million operations per layer", log_x=True),
    measure_model=measure_model,
)
