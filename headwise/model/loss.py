"""The surprise at the tokens asked for, without ever holding all their logits at once."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions
from torch.utils.checkpoint import checkpoint

from headwise.kernels.rounding_tolerance import at_least_float32

IGNORE_INDEX = -100  # a target that is not asked for
MAX_LOGITS = 1 << 24  # logits up to so many (64 MB) are computed in one go, more of them in chunks


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, total: int | None = None
) -> Tensor:
    """What a linear layer (V, D) reads, (N, D), and targets (N,) → the mean cross-entropy, or the sum divided by `total`.

    The sum is at least float32: torch's own would be bfloat16 or float16 in a model of that precision.
    """
    if weight.dtype in (torch.float16, torch.bfloat16) and not torch.is_autocast_enabled(hidden.device.type):
        return chunked_cross_entropy(lambda states: F.linear(states, weight, bias), len(weight), hidden, targets, total)
    options = None
    if len(targets) * len(weight) > MAX_LOGITS:
        # torch's own choice of a chunk, by the shape of the weights, is 4 tokens for SmolLM2: six times as slow.
        size = max(1, MAX_LOGITS // len(weight))
        options = LinearCrossEntropyOptions(allow_retain_graph=torch.compiler.is_compiling(), batch_chunk_size=size)
        if torch.is_autocast_enabled(hidden.device.type):  # the chunked form is outside autocast's reach
            hidden = hidden.to(weight.dtype)
    loss = F.linear_cross_entropy(
        hidden,
        weight,
        targets,
        linear_bias=bias,
        ignore_index=IGNORE_INDEX,
        reduction="mean" if total is None else "sum",
        options=options,
    )
    return loss if total is None else loss / total


def chunked_cross_entropy(
    output: Callable[[Tensor], Tensor], vocab: int, hidden: Tensor, targets: Tensor, total: int | None = None
) -> Tensor:
    """The same where what makes logits is not ours: those of a chunk at a time, made again in the backward pass."""

    def nll(states: Tensor, chunk_targets: Tensor) -> Tensor:
        return F.cross_entropy(at_least_float32(output(states)), chunk_targets, reduction="sum")

    return sum_over_chunks(nll, vocab, hidden, targets, total)


def sum_over_chunks(
    nll: Callable[[Tensor, Tensor], Tensor], vocab: int, hidden: Tensor, targets: Tensor, total: int | None
) -> Tensor:
    """Sum a loss over chunks, so that logits fit in memory; the backward pass computes them again."""
    is_target = targets != IGNORE_INDEX
    hidden, targets = hidden[is_target], targets[is_target]  # (n, D), (n,)
    chunk_size = max(1, MAX_LOGITS // max(1, vocab))
    chunks = list(zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True))
    if len(chunks) > 1:
        total_nll = torch.stack([checkpoint(nll, *chunk, use_reentrant=False) for chunk in chunks]).sum()  # pyright: ignore
    else:
        total_nll = nll(hidden, targets)
    return total_nll / (len(targets) if total is None else total)
