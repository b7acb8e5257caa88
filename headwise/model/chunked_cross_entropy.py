"""Cross-entropy of target tokens, computed in chunks so that the logits fit into memory."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions
from torch.utils.checkpoint import checkpoint

from headwise.kernels.rounding_tolerance import at_least_float32

IGNORE_INDEX = -100  # tokens with this target are ignored
MAX_LOGITS = 1 << 24  # maximum number of logits in memory at once (64 MB in float32)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, total: int | None = None
) -> Tensor:
    """Return the mean cross-entropy of the logits of a linear layer, or the sum divided by `total`.

    Sums are computed in at least float32. torch's own function would sum in half precision for half-precision models.

    Args:
        hidden: Inputs of the linear layer, (N, D).
        weight: Weight of the linear layer, (V, D).
        bias: Bias of the linear layer, (V,).
        targets: Target tokens, (N,).
        total: Divisor of the sum. None means the number of targets.
    """
    if weight.dtype in (torch.float16, torch.bfloat16) and not torch.is_autocast_enabled(hidden.device.type):
        return chunked_cross_entropy(lambda states: F.linear(states, weight, bias), len(weight), hidden, targets, total)
    options = None
    if len(targets) * len(weight) > MAX_LOGITS:
        # torch's default chunk size depends on the shape of the weight. For SmolLM2 it is 4 tokens, six times as slow.
        size = max(1, MAX_LOGITS // len(weight))
        options = LinearCrossEntropyOptions(allow_retain_graph=torch.compiler.is_compiling(), batch_chunk_size=size)
        if torch.is_autocast_enabled(hidden.device.type):  # autocast does not apply to the chunked form
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
    output: Callable[[Tensor], Tensor],
    vocab: int,
    hidden: Tensor,
    targets: Tensor,
    total: int | None = None,
    max_logits: int = MAX_LOGITS,
) -> Tensor:
    """Return the mean cross-entropy for any function that computes logits, or the sum divided by `total`.

    Logits are computed one chunk of at most `max_logits` at a time, and again in the backward pass.
    """

    def nll(states: Tensor, chunk_targets: Tensor) -> Tensor:
        return F.cross_entropy(at_least_float32(output(states)), chunk_targets, reduction="sum")

    return sum_over_chunks(nll, vocab, hidden, targets, total, max_logits)


def sum_over_chunks(
    nll: Callable[[Tensor, Tensor], Tensor],
    vocab: int,
    hidden: Tensor,
    targets: Tensor,
    total: int | None,
    max_logits: int = MAX_LOGITS,
) -> Tensor:
    """Sum a loss over chunks, so that the logits fit into memory. The backward pass computes them again."""
    is_target = targets != IGNORE_INDEX
    hidden, targets = hidden[is_target], targets[is_target]  # (n, D), (n,)
    chunk_size = max(1, max_logits // max(1, vocab))
    chunks = list(zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True))
    if len(chunks) > 1:
        total_nll = torch.stack([checkpoint(nll, *chunk, use_reentrant=False) for chunk in chunks]).sum()  # pyright: ignore
    else:
        total_nll = nll(hidden, targets)
    return total_nll / (len(targets) if total is None else total)
