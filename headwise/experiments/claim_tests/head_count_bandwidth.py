"""More heads at the same width cost bandwidth: the same products, but more maps to write and read."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, PlotSpec, Verdict
from headwise.experiments.engine.paired_timing import interleaved_timing
from headwise.experiments.engine.single_thread import one_thread
from headwise.experiments.engine.statistic import Condition, Statistic, StatisticTable
from headwise.experiments.experiment_context import ExperimentContext
from headwise.heads import MultiHeadAttention
from headwise.kernels import causal
from headwise.model import ModelProtocol

HEADS = (1, 2, 4, 8, 16, 32, 64)
BASE_HEADS = 8
MIN_SLOWDOWN = 1.1  # times as long: less is not worth a word
BACKENDS = ("batched", "fused")
PASSES = ("forward", "with backward")
ROUNDS = 15


def relative_times(
    width: int,
    tokens: int,
    heads: Sequence[int] = HEADS,
    *,
    backend: str = "fused",
    backward: bool = False,
    rounds: int = ROUNDS,
) -> dict[int, Statistic]:
    """How long a causal layer of each head count takes, one of 8 heads being 1.

    >>> list(relative_times(16, 8, (8, 16), rounds=3))
    [8, 16]
    """
    if BASE_HEADS not in heads or any(width % h for h in heads):
        raise HeadwiseError(
            f"head counts {tuple(heads)} must divide the width {width} and have {BASE_HEADS} among them."
        )
    torch.manual_seed(0)
    x = torch.randn(1, tokens, width)
    calls = {str(h): _step(MultiHeadAttention(width=width, heads=h, backend=backend), x, backward) for h in heads}
    with one_thread():
        ratios = interleaved_timing(calls, str(BASE_HEADS), rounds, min_seconds=0.01)
    return {h: ratios[str(h)] for h in heads}


def _step(layer: MultiHeadAttention, x: Tensor, backward: bool) -> Callable[[], None]:
    mask = causal()

    def forward() -> None:
        with torch.inference_mode():
            layer(x, mask=mask)

    def forward_backward() -> None:
        layer.zero_grad()
        layer(x, mask=mask).sum().backward()

    return forward_backward if backward else forward


def measure(experiment: ExperimentContext, rounds: int = ROUNDS) -> StatisticTable:
    """Layers of four times the lab's width, on four times its context: for the usual size 256 and 512."""
    return _measure_sizes(4 * experiment.size.width, 4 * experiment.size.context, rounds)


def measure_model(model: ModelProtocol, text: Any = None, rounds: int = ROUNDS) -> StatisticTable:
    """Layers of the model's width on as many tokens as it reads, at most 512."""
    return _measure_sizes(model.spec.width, min(512, model.spec.context), rounds)


def _measure_sizes(width: int, tokens: int, rounds: int) -> StatisticTable:
    heads = tuple(h for h in HEADS if width % h == 0)
    statistics = StatisticTable()
    for backend in BACKENDS:
        for pass_name in PASSES:
            ratios = relative_times(
                width, tokens, heads, backend=backend, backward=pass_name != "forward", rounds=rounds
            )
            for h, ratio in ratios.items():
                statistics.add(f"{backend} {pass_name}", h, ratio)
    return statistics


def judge(statistics: StatisticTable) -> Verdict:
    """By `rule`."""
    max_heads = max(int(h) for h in statistics.by_condition(statistics.names[0]) if h is not None)
    names = statistics.names
    rising = [name for name in names if statistics[name, max_heads].is_interval_above(MIN_SLOWDOWN)]
    cheap = [name for name in names if statistics[name, 1].is_interval_below(1 / MIN_SLOWDOWN)]
    if all(statistics[name, max_heads].is_interval_below(MIN_SLOWDOWN) for name in names):
        return Verdict("does not hold")
    if len(rising) == len(cheap) == len(names):
        return Verdict("holds")
    if not rising:
        return Verdict(
            "depends", f"on the turn of the clock: whether {max_heads} heads take longer than {BASE_HEADS} stays open"
        )
    details = []
    if len(rising) < len(statistics.names):
        details.append(f"from {BASE_HEADS} to {max_heads} heads it surely costs only {', '.join(rising)}")
    if len(cheap) < len(statistics.names):
        details.append(
            f"from 1 to {BASE_HEADS} heads it surely costs {'only ' + ', '.join(cheap) if cheap else 'nothing'}"
        )
    return Verdict("depends", f"on the head count and the form: {'; '.join(details)}")


def _judged_statistics(statistics: StatisticTable) -> Iterator[tuple[str, Condition]]:
    """The fewest and the most heads of every form and pass."""
    for name in statistics.names:
        counts = [h for h in statistics.by_condition(name) if isinstance(h, int)]
        yield from ((name, h) for h in {1, max(counts)})


CLAIM = Claim(
    number=22,
    name="bandwidth",
    statement="More heads at the same width cost bandwidth: the products stay the same, but the layer takes longer.",
    counterevidence="A layer of many heads that takes no longer than one of few.",
    setup=f"Causal layers of {HEADS[0]} to {HEADS[-1]} heads at one width (four times the lab's) on one thread of this "
    "machine, with materialised maps (batched) and without (fused), forward and with the backward pass, in turns. "
    f"Figures are times over that of {BASE_HEADS} heads, medians over turns with intervals by ranks; the products are "
    "as many, as the claim on FLOPs shows. Time alone is measured, not its cause: that bandwidth is what costs it is "
    "not tested.",
    rule=f"Holds if in every form and pass the most heads surely take more than {MIN_SLOWDOWN:g} times as long as "
    f"{BASE_HEADS}, and 1 head surely less than 1/{MIN_SLOWDOWN:g} of it. Does not hold if the most heads surely take "
    f"less than {MIN_SLOWDOWN:g} times as long everywhere. Else depends: on the turn of the clock if they surely take "
    "more nowhere, or on the head count and the form.",
    judged=_judged_statistics,
    measure=measure,
    judge=judge,
    plot=PlotSpec(
        tuple(f"{backend} {pass_name}" for backend in BACKENDS for pass_name in PASSES),
        x="heads",
        y=f"time, {BASE_HEADS} heads = 1",
        log_x=True,
    ),
    timed=True,
    measure_model=measure_model,
)
