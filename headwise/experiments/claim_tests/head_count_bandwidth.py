"""More heads at the same width cost bandwidth: equal matrix products, but more maps to write and read."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.experiments.claim import Claim, PlotSpec, Verdict
from headwise.experiments.engine.paired_timing import interleaved_timing
from headwise.experiments.engine.single_thread import one_thread
from headwise.experiments.engine.statistic import Condition, Statistic, StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.heads import MultiHeadAttention
from headwise.kernels import causal
from headwise.model import ModelProtocol

HEADS = (1, 2, 4, 8, 16, 32, 64)
BASE_HEADS = 8
MIN_SLOWDOWN = 1.1  # smallest time ratio that counts
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
    """Return the time of a causal layer for each head count, relative to 8 heads.

    >>> list(relative_times(16, 8, (8, 16), rounds=3))
    [8, 16]
    """
    if BASE_HEADS not in heads or any(width % h for h in heads):
        raise ArgumentError(
            f"heads: each head count must divide the width {width}, and the list must contain {BASE_HEADS}, because times "
            f"are relative to {BASE_HEADS} heads. Got {tuple(heads)}."
        )
    torch.manual_seed(0)
    x = torch.randn(1, tokens, width)
    calls = {
        str(h): _make_timed_step(MultiHeadAttention(width=width, heads=h, backend=backend), x, backward) for h in heads
    }
    with one_thread():
        ratios = interleaved_timing(calls, str(BASE_HEADS), rounds, min_seconds=0.01)
    return {h: ratios[str(h)] for h in heads}


def _make_timed_step(layer: MultiHeadAttention, x: Tensor, backward: bool) -> Callable[[], None]:
    mask = causal()

    def forward() -> None:
        with torch.inference_mode():
            layer(x, mask=mask)

    def forward_backward() -> None:
        layer.zero_grad()
        layer(x, mask=mask).sum().backward()

    return forward_backward if backward else forward


def measure(experiment: TrainedModelProvider, rounds: int = ROUNDS) -> StatisticTable:
    """Measure layers of four times the default width and context, 256 and 512 for the default size."""
    return _measure_sizes(4 * experiment.size.width, 4 * experiment.size.context, rounds)


def time_layers_of_model_width(model: ModelProtocol, text: Any = None, rounds: int = ROUNDS) -> StatisticTable:
    """Measure layers of the model's width on its context length, at most 512 tokens."""
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
    """Apply the rule of CLAIM."""
    max_heads = max(int(h) for h in statistics.by_condition(statistics.names[0]) if h is not None)
    names = statistics.names
    rising = [name for name in names if statistics[name, max_heads].is_interval_above(MIN_SLOWDOWN)]
    cheap = [name for name in names if statistics[name, 1].is_interval_below(1 / MIN_SLOWDOWN)]
    if all(statistics[name, max_heads].is_interval_below(MIN_SLOWDOWN) for name in names):
        return Verdict("does not hold")
    if len(rising) == len(cheap) == len(names):
        return Verdict("holds")
    if not rising:
        return Verdict("undecided", f"whether {max_heads} heads take longer than {BASE_HEADS} is inconclusive")
    details = []
    if len(rising) < len(statistics.names):
        details.append(f"from {BASE_HEADS} to {max_heads} heads only {', '.join(rising)} takes significantly longer")
    if len(cheap) < len(statistics.names):
        details.append(
            f"from 1 to {BASE_HEADS} heads {'only ' + ', '.join(cheap) if cheap else 'nothing'} takes significantly longer"
        )
    return Verdict("depends", f"on the head count and the kernel: {'; '.join(details)}")


def _judged_statistics(statistics: StatisticTable) -> Iterator[tuple[str, Condition]]:
    """Select the smallest and the largest head count of every kernel and pass."""
    for name in statistics.names:
        counts = [h for h in statistics.by_condition(name) if isinstance(h, int)]
        yield from ((name, h) for h in {1, max(counts)})


CLAIM = Claim(
    number=22,
    name="bandwidth",
    statement="More heads at the same width cost bandwidth: the matrix products stay the same, but the layer takes longer.",
    counterevidence="A layer with many heads that takes no longer than a layer with few.",
    setup=f"Causal layers of {HEADS[0]} to {HEADS[-1]} heads at one width (four times the default) on one thread of this "
    "machine, with materialized maps (batched) and without (fused), forward and with the backward pass, in interleaved "
    f"runs. Numbers are times relative to {BASE_HEADS} heads, medians over rounds with intervals by ranks. The number of "
    "matrix products is equal, as the claim on FLOPs shows. Only time is measured. Whether bandwidth is the cause is not "
    "tested.",
    rule="Holds if for every kernel and pass the largest head count takes significantly more than "
    f"{MIN_SLOWDOWN:g} times as long as {BASE_HEADS} heads, and 1 head takes significantly less than 1/{MIN_SLOWDOWN:g} of "
    "that time. Does not hold if the largest head count takes significantly less than "
    f"{MIN_SLOWDOWN:g} times as long everywhere. Otherwise depends: undecided if it takes significantly more "
    "nowhere, else on the head count and the kernel.",
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
    measure_model=time_layers_of_model_width,
)
