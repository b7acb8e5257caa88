"""The blockwise form: rows of queries at a time, so that memory grows with n and not with n². Exact, any mask.

A block is a whole softmax row, so nothing has to be rescaled between blocks; with gradients each block is recomputed in
the backward pass instead of stored (https://arxiv.org/abs/2112.05682 describes the idea).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise.kernels.batched import batched_rows
from headwise.kernels.positions import Alibi
from headwise.kernels.terms import Terms, spread

BUDGET = 2**22  # scores held at a time; 16 MB in float32, about what stays in cache

Rows = Callable[[Tensor, Tensor, Tensor, Terms, range, range, int, int], Tensor]


def blockwise(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, *, row_block: int | None = None, head_block: int | None = None
) -> Tensor:
    """(B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, H, T, e)"""
    B, H, S = q.shape[0], q.shape[1], k.shape[2]
    head_block = min(H, head_block or H)
    row_block = row_block or max(64, BUDGET // max(1, B * head_block * S))
    if head_block == H:
        return by_rows(batched_rows, q, spread(k, terms.groups), spread(v, terms.groups), terms, row_block)
    parts = []
    for start in range(0, H, head_block):
        heads = range(start, min(start + head_block, H))
        some = narrow_heads(terms, heads)
        parts.append(
            by_rows(
                batched_rows, q[:, start : heads.stop], spread(k, some.groups), spread(v, some.groups), some, row_block
            )
        )
    return torch.cat(parts, 1)


def by_rows(inner: Rows, q: Tensor, k: Tensor, v: Tensor, terms: Terms, row_block: int) -> Tensor:
    """Run a kernel for blocks of queries, each on the keys that block can see, and put the rows together."""
    T, S = q.shape[2], k.shape[2]
    recompute = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)) and row_block < T
    parts = []
    for start in range(0, T, row_block):
        rows = range(start, min(start + row_block, T))
        cols = terms.keys(rows, T, S)
        block = (q[:, :, rows.start : rows.stop], k[:, :, cols.start : cols.stop], v[:, :, cols.start : cols.stop])
        if recompute:
            parts.append(checkpoint(inner, *block, terms, rows, cols, T, S, use_reentrant=False))
        else:
            parts.append(inner(*block, terms, rows, cols, T, S))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def narrow_heads(terms: Terms, heads: range) -> Terms:
    """The same terms for a run of heads only."""
    pick = slice(heads.start, heads.stop)
    bias, mask, sink = terms.bias, terms.mask, terms.sink
    if isinstance(bias, Alibi):
        bias = Alibi(bias.slopes[pick])
    elif bias is not None and bias.shape[1] > 1:
        bias = bias[:, pick]
    return replace(
        terms,
        groups=terms.groups[pick],
        bias=bias,
        mask=None if mask is None else mask.for_heads(pick),
        sink=None if sink is None else sink[pick],
    )
