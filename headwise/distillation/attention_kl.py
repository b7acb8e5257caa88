"""Distances between two softmaxes over keys, row by row, in blocks that are made again for the gradients: no map is held."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ROWS = 128  # queries in a block
Scores = Callable[[range], Tensor]  # rows → scores (B, H, R, S), −inf where nothing is seen


def kl_of_rows(student: Scores, teacher: Scores, real: Tensor) -> Tensor:
    """The mean over real rows and heads of KL(teacher's row ‖ student's row), in nats: real (B, T) → ().

    Both are distributions over the keys that the student sees.
    """
    T = real.shape[1]
    total = torch.zeros((), device=real.device)
    for start in range(0, T, ROWS):
        rows = range(start, min(start + ROWS, T))
        given = (student, teacher, rows, real[:, rows.start : rows.stop])
        if torch.is_grad_enabled() and T > ROWS:
            total = total + checkpoint(_block, *given, use_reentrant=False)  # pyright: ignore[reportOperatorIssue]
        else:
            total = total + _block(*given)
    return total / real.sum().clamp(min=1)


def _block(student: Scores, teacher: Scores, rows: range, real: Tensor) -> Tensor:
    """The sum over some rows, (B, R), of the mean over heads."""
    scores = student(rows).float()  # (B, H, R, S)
    with torch.no_grad():
        taught = teacher(rows).float()
    return _RowKL.apply(scores, taught, real)  # pyright: ignore[reportReturnType]


class _RowKL(torch.autograd.Function):
    """The divergence of softmaxes; its slope by the student's scores is q − p, the only block of weights that is kept."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, taught: Tensor, real: Tensor) -> Tensor:
        """scores, taught (B, H, R, S), −inf where nothing is seen; real (B, R) → ()"""
        taught = taught.masked_fill(scores == -torch.inf, -torch.inf)
        blind = taught.amax(-1, keepdim=True) == -torch.inf  # (B, H, R, 1): rows of padding
        log_p, log_q = (one.masked_fill(blind, 0).log_softmax(-1) for one in (taught, scores))
        p = log_p.exp()
        apart = (p * (log_p - log_q).masked_fill(p == 0, 0)).sum(-1, keepdim=True)
        weight = (real[:, None, :, None] & ~blind) / scores.shape[1]
        ctx.save_for_backward(log_q.exp().sub_(p).mul_(weight))
        return (apart * weight).sum()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(B, H, R, S), by the scores alone."""
        return ctx.saved_tensors[0] * slope, None, None
