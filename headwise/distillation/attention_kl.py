"""KL divergence between attention rows, in blocks that are recomputed in the backward pass, so that no full map is stored."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BLOCK_ROWS = 128  # queries per block
RowScores = Callable[[range], Tensor]  # rows → scores (B, H, R, S), −inf at masked keys


def attention_kl(student_scores_fn: RowScores, teacher_scores_fn: RowScores, row_mask: Tensor) -> Tensor:
    """Return the mean KL(teacher row ‖ student row) over real rows and heads, in nats: row_mask (B, T) → ().

    Teacher rows are renormalized over the keys that are visible to the student.
    """
    T = row_mask.shape[1]
    total = torch.zeros((), device=row_mask.device)
    for start in range(0, T, BLOCK_ROWS):
        rows = range(start, min(start + BLOCK_ROWS, T))
        arguments = (student_scores_fn, teacher_scores_fn, rows, row_mask[:, rows.start : rows.stop])
        if torch.is_grad_enabled() and T > BLOCK_ROWS:
            total = total + checkpoint(_block_kl, *arguments, use_reentrant=False)  # pyright: ignore[reportOperatorIssue]
        else:
            total = total + _block_kl(*arguments)
    return total / row_mask.sum().clamp(min=1)


def _block_kl(student: RowScores, teacher: RowScores, rows: range, row_mask: Tensor) -> Tensor:
    """Return the sum over some rows, (B, R), of the mean over heads."""
    scores = student(rows).float()  # (B, H, R, S)
    with torch.no_grad():
        teacher_scores = teacher(rows).float()
    return _RowKL.apply(scores, teacher_scores, row_mask)  # pyright: ignore[reportReturnType]


class _RowKL(torch.autograd.Function):
    """KL divergence of two softmaxes. Its gradient by the student scores is q − p, the only saved tensor."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, teacher_scores: Tensor, row_mask: Tensor) -> Tensor:
        """scores, teacher_scores (B, H, R, S), −inf at masked keys; row_mask (B, R) → ()"""
        teacher_scores = teacher_scores.masked_fill(scores == -torch.inf, -torch.inf)
        empty_rows = teacher_scores.amax(-1, keepdim=True) == -torch.inf  # (B, H, R, 1): rows of padding
        log_p, log_q = (
            row_scores.masked_fill(empty_rows, 0).log_softmax(-1) for row_scores in (teacher_scores, scores)
        )
        p = log_p.exp()
        divergence = (p * (log_p - log_q).masked_fill(p == 0, 0)).sum(-1, keepdim=True)
        weight = (row_mask[:, None, :, None] & ~empty_rows) / scores.shape[1]
        ctx.save_for_backward(log_q.exp().sub_(p).mul_(weight))
        return (divergence * weight).sum()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient by the student scores, (B, H, R, S)."""
        return ctx.saved_tensors[0] * grad_output, None, None
