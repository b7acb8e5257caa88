"""Attention maps cost n² memory, unless attention is computed in blocks."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.distributed import run_in_subprocess
from headwise.experiments.claim import Claim, PlotSpec, Verdict
from headwise.experiments.engine.peak_process_memory import peak_memory
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.kernels import attention, causal
from headwise.model import ModelProtocol

LENGTHS = (256, 512, 1024, 2048)
BACKENDS = ("batched", "blockwise", "fused")
MIN_QUADRATIC, MAX_LINEAR = (
    1.7,
    1.3,
)  # exponents above which growth counts as quadratic, and below which it counts as linear


def attention_memory(backend: str, tokens: int, heads: int, head_dim: int, batch_size: int = 2) -> float:
    """Return the peak memory of causal attention in megabytes, forward and backward, above its inputs. In a fresh process."""
    return run_in_subprocess(_measure_memory, backend, tokens, heads, head_dim, batch_size)


def _measure_memory(backend: str, tokens: int, heads: int, head_dim: int, batch_size: int) -> float:
    torch.manual_seed(0)
    qkv = [torch.randn(batch_size, heads, tokens, head_dim, requires_grad=True) for _ in "qkv"]  # (B, H, T, d)
    small_qkv = [x[:, :, :32].detach().requires_grad_() for x in qkv]  # (B, H, 32, d)
    return peak_memory(partial(_step, backend, qkv), partial(_step, backend, small_qkv))


def _step(backend: str, qkv: Sequence[Tensor]) -> None:
    attention(*qkv, mask=causal(), backend=backend).sum().backward()


def growth_exponent(by_length: Mapping[int, float]) -> float:
    """Return the exponent of the growth with n: the least-squares slope of the logarithms.

    >>> round(growth_exponent({256: 3 * 256**2, 512: 3 * 512**2, 2048: 3 * 2048**2}), 6)
    2.0
    """
    x, y = (np.log(np.maximum(1e-3, list(values))) for values in (by_length.keys(), by_length.values()))
    return float(np.polyfit(x, y, 1)[0])


def measure(experiment: TrainedModelProvider, lengths: Sequence[int] = LENGTHS) -> StatisticTable:
    """Measure heads of the default model."""
    return _measure_lengths(experiment.size.heads, experiment.size.width // experiment.size.heads, lengths)


def measure_model(model: ModelProtocol, text: Any = None, lengths: Sequence[int] = LENGTHS) -> StatisticTable:
    """Measure heads of the sizes of a given model."""
    return _measure_lengths(model.spec.attention.heads, model.spec.attention.head_dim, lengths)


def _measure_lengths(heads: int, head_dim: int, lengths: Sequence[int]) -> StatisticTable:
    statistics = StatisticTable()
    for backend in BACKENDS:
        memory_by_length = {tokens: attention_memory(backend, tokens, heads, head_dim) for tokens in lengths}
        for tokens, megabytes in memory_by_length.items():
            statistics.add(backend, tokens, megabytes)
        statistics.add("exponent", backend, growth_exponent(memory_by_length))
    return statistics


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    exponents = {str(backend): statistic for backend, statistic in statistics.by_condition("exponent").items()}
    blockwise_backends = [backend for backend in exponents if backend != "batched"]
    linear = [backend for backend in blockwise_backends if exponents[backend].is_interval_below(MAX_LINEAR)]
    if not exponents["batched"].is_interval_above(MIN_QUADRATIC) or not linear:
        return Verdict("does not hold")
    if linear == blockwise_backends:
        return Verdict("holds")
    return Verdict("depends", f"on the kernel: only the memory of {', '.join(linear)} grows like n")


CLAIM = Claim(
    number=17,
    name="map-memory",
    statement="Attention maps cost memory that grows with the square of the length, unless attention is computed in blocks.",
    counterevidence="Materialized maps whose memory grows more slowly, or attention in blocks whose memory grows as fast.",
    setup=f"Causal attention on two texts of {LENGTHS[0]} to {LENGTHS[-1]} tokens, forward and backward, with the heads of "
    "the default model, each time in a fresh process: peak memory above q, k and v (megabytes), and the exponent of its "
    "growth with the length, fitted to the logarithms by least squares.",
    rule=f"Holds if the exponent is above {MIN_QUADRATIC:g} for the batched kernel and below {MAX_LINEAR:g} for both the "
    "blockwise and the fused kernel. Depends if only one of the two is below. Does not hold if neither is, or if the "
    "batched kernel is not above.",
    possible_verdicts=("holds", "does not hold", "depends"),
    measure=measure,
    judge=judge,
    plot=PlotSpec(BACKENDS, x="tokens", y="MB above the inputs", log_x=True),
    timed=True,
    measure_model=measure_model,
)
