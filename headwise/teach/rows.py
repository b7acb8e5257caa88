"""Distances between two softmaxes over keys, row by row, in blocks that are made again for the gradients: no map is held."""

from collections.abc import Callable

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
    hidden = scores.detach() == -torch.inf
    with torch.no_grad():
        taught = teacher(rows).float().masked_fill(hidden, -torch.inf)  # (B, H, R, S)
        blind = (taught == -torch.inf).all(-1, keepdim=True)  # rows of padding
        log_p = taught.masked_fill(blind, 0).log_softmax(-1)
        p = log_p.exp()
        unseen = p == 0
    log_q = scores.masked_fill(blind, 0).log_softmax(-1)
    apart = (p * (log_p.masked_fill(unseen, 0) - log_q.masked_fill(unseen, 0))).sum(-1)  # (B, H, R)
    counts = real[:, None] & ~blind[..., 0]
    return apart.masked_fill(~counts, 0).sum() / scores.shape[1]
