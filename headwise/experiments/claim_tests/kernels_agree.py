"""The naive loop, the batched kernel and the fused kernel compute the same numbers."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.analysis import forward_ids
from headwise.experiments.claim import Claim, PlotSpec, Verdict
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.heads import AttentionCall, MultiHeadAttention
from headwise.kernels import BACKENDS, blockwise, causal
from headwise.model import ModelProtocol, eval_mode

COMPARED_BACKENDS = ("batched", "fused", "blockwise")
# Block sizes. By default the blockwise kernel would process a small call in one block, which equals the batched kernel.
ROW_BLOCK, HEAD_BLOCK = (13, 2)
TOKENS = 32  # tokens for a given model
TOLERANCE = 1e-5  # relative, for float32: sums are computed in a different order


def max_relative_error_by_backend(layer: MultiHeadAttention, x: Tensor) -> dict[str, float]:
    """Return the largest relative error of each kernel against the loop over heads, in z and the gradients of q, k, v.

    >>> deviations = max_relative_error_by_backend(MultiHeadAttention(width=8, heads=2), torch.randn(1, 5, 8))
    >>> max(deviations.values()) < 1e-5
    True
    """
    calls: list[AttentionCall] = []
    with torch.no_grad(), layer.hook_point.listen(calls.append):
        layer(x, mask=causal())
    return _kernel_errors_on_call(calls[0])


def _kernel_errors_on_call(call: AttentionCall) -> dict[str, float]:
    """Return the largest relative error of each kernel for one attention call."""
    kernels = {**BACKENDS, "blockwise": partial(blockwise, row_block=ROW_BLOCK, head_block=HEAD_BLOCK)}

    def outputs_and_grads(backend: str) -> list[Tensor]:
        qkv = [tensor.detach().clone().requires_grad_() for tensor in (call.q, call.k, call.v)]  # (B, H or K, ·, ·)
        z = kernels[backend](*qkv, call.params)  # (B, H, T, e)
        return [z.detach(), *torch.autograd.grad(z.square().sum(), qkv)]

    expected = outputs_and_grads("reference")
    return {
        form: max(
            float((actual - reference).norm() / reference.norm())
            for actual, reference in zip(outputs_and_grads(form), expected, strict=True)
        )
        for form in COMPARED_BACKENDS
    }


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure random layers of several sizes in float32: the worst error for each kernel and seed."""
    statistics = StatisticTable()
    worst: dict[str, list[float]] = {backend: [] for backend in COMPARED_BACKENDS}
    for seed in experiment.seeds:
        torch.manual_seed(seed)
        shapes = ((64, 1, 64), (64, 8, 96), (64, 64, 32), (128, 4, 128))  # width, heads, tokens
        deviations = [
            max_relative_error_by_backend(MultiHeadAttention(width=D, heads=H), torch.randn(2, T, D))
            for D, H, T in shapes
        ]
        for backend in COMPARED_BACKENDS:
            worst[backend].append(max(deviation[backend] for deviation in deviations))
    for backend in COMPARED_BACKENDS:
        statistics.add("relative difference", backend, worst[backend])
    return statistics


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """Measure the attention calls of a given model on random tokens."""
    ids = torch.randint(
        model.spec.vocab, (1, min(TOKENS, model.spec.context)), generator=torch.Generator().manual_seed(0), device="cpu"
    )
    calls: list[AttentionCall] = []
    with eval_mode(model), torch.no_grad(), ExitStack() as stack:
        for hook_point in model.hook_points():
            stack.enter_context(hook_point.listen(calls.append))
        forward_ids(model, ids.to(model.device))
    deviations = [_kernel_errors_on_call(call) for call in calls]
    statistics = StatisticTable()
    for backend in COMPARED_BACKENDS:
        statistics.add("relative difference", backend, max(deviation[backend] for deviation in deviations))
    return statistics


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    deviating = [
        str(backend)
        for backend, statistic in statistics.by_condition("relative difference").items()
        if max(statistic.values) > TOLERANCE
    ]
    if not deviating:
        return Verdict("holds")
    if len(deviating) < len(COMPARED_BACKENDS):
        return Verdict("depends", f"on the kernel: {', '.join(deviating)} deviates")
    return Verdict("does not hold")


CLAIM = Claim(
    number=1,
    name="same-numbers",
    statement="The naive loop over heads, the batched kernel and the fused kernel compute the same numbers.",
    counterevidence="A kernel whose output or gradient differs from the loop by more than rounding.",
    setup="Random causal layers of 1, 4, 8 and 64 heads in float32: the output of each head (z) and the gradients of q, k "
    f"and v, compared with a loop over heads. The blockwise kernel runs in blocks of {ROW_BLOCK} rows and {HEAD_BLOCK} "
    "heads, at least three blocks.",
    rule=f"Holds if every kernel stays within {TOLERANCE:g} (relative, worst seed). Depends if only some do.",
    possible_verdicts=("holds", "does not hold", "depends"),
    measure=measure,
    judge=judge,
    plot=PlotSpec(("relative difference",), y="relative difference"),
    measure_model=measure_model,
)
