"""The surprise at the tokens asked for, without ever holding all their logits at once."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions
from torch.utils.checkpoint import checkpoint

from headwise.kernels.precision import at_least_float32

if TYPE_CHECKING:
    from headwise.model.layers import VocabularyRows

IGNORE = -100  # a target that is not asked for
WHOLE = 1 << 24  # logits up to so many (64 MB) are computed in one go, more of them in chunks


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, total: int | None = None
) -> Tensor:
    """What a linear layer (V, D) reads, (N, D), and targets (N,) → the mean cross-entropy, or the sum divided by `total`.

    The sum is at least float32: torch's own would be bfloat16 or float16 in a model of that precision.
    """
    if weight.dtype in (torch.float16, torch.bfloat16) and not torch.is_autocast_enabled(hidden.device.type):
        return chunked_cross_entropy(lambda states: F.linear(states, weight, bias), len(weight), hidden, targets, total)
    chunks = None
    if len(targets) * len(weight) > WHOLE:
        # torch's own choice of a chunk, by the shape of the weights, is 4 tokens for SmolLM2: six times as slow.
        size = max(1, WHOLE // len(weight))
        chunks = LinearCrossEntropyOptions(allow_retain_graph=torch.compiler.is_compiling(), batch_chunk_size=size)
        if torch.is_autocast_enabled(hidden.device.type):  # the chunked form is outside autocast's reach
            hidden = hidden.to(weight.dtype)
    summed = F.linear_cross_entropy(
        hidden,
        weight,
        targets,
        linear_bias=bias,
        ignore_index=IGNORE,
        reduction="mean" if total is None else "sum",
        options=chunks,
    )
    return summed if total is None else summed / total


def chunked_cross_entropy(
    output: Callable[[Tensor], Tensor], vocab: int, hidden: Tensor, targets: Tensor, total: int | None = None
) -> Tensor:
    """The same where what makes logits is not ours: those of a chunk at a time, made again in the backward pass."""

    def surprise(states: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(at_least_float32(output(states)), wanted, reduction="sum")

    return _in_chunks(surprise, vocab, hidden, targets, total)


def split_cross_entropy(
    output: Callable[[Tensor], Tensor],
    rows: "VocabularyRows",
    hidden: Tensor,
    targets: Tensor,
    total: int | None = None,
) -> Tensor:
    """The same where processes hold rows of the vocabulary: `output` gives the logits of those that are here.

    Each adds up exp(logit − the largest logit of all) over its own rows; those sums and the one logit asked for are what
    is exchanged, never the logits.
    """

    def surprise(states: Tensor, wanted: Tensor) -> Tensor:
        together = rows.together
        logits = output(together.copy(states))  # (n, v)
        logits = at_least_float32(logits)
        top = together.largest(logits.amax(1))  # (n,)
        mine, places = rows.here(wanted)
        asked_for = logits.gather(1, places[:, None])[:, 0].masked_fill(~mine, 0)
        exponentials, asked_for = together.sum(torch.stack(((logits - top[:, None]).exp().sum(1), asked_for)))
        return (exponentials.log() + top - asked_for).sum()

    return _in_chunks(surprise, max(rows.sizes), hidden, targets, total)


def _in_chunks(
    surprise: Callable[[Tensor, Tensor], Tensor], vocab: int, hidden: Tensor, targets: Tensor, total: int | None
) -> Tensor:
    """The sum of a surprise over chunks, none of which has too many logits; made again in the backward pass."""
    asked = targets != IGNORE
    hidden, targets = hidden[asked], targets[asked]  # (n, D), (n,)
    step = max(1, WHOLE // max(1, vocab))
    parts = list(zip(hidden.split(step), targets.split(step), strict=True))
    if len(parts) > 1:
        summed = torch.stack([checkpoint(surprise, *part, use_reentrant=False) for part in parts]).sum()  # pyright: ignore
    else:
        summed = surprise(hidden, targets)
    return summed / (len(targets) if total is None else total)
