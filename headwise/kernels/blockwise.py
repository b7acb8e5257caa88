"""The blockwise form: the batched kernel on a few heads and rows at a time. Exact, any mask, memory linear in n."""

from torch import Tensor

from headwise.kernels.batched import batched_rows
from headwise.kernels.blocks import Blocks, by_blocks
from headwise.kernels.score_params import Terms

BUDGET = 2**20  # scores held at a time: 4 MB in float32, which stays in cache
ROWS = 128  # rows a block should have before more heads join it


def blockwise(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, *, row_block: int | None = None, head_block: int | None = None
) -> Tensor:
    """(B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, H, T, e)"""
    B, H, S = q.shape[0], q.shape[1], max(1, k.shape[2])
    heads = head_block or min(max(1, H), max(1, BUDGET // (B * S * (row_block or ROWS) or 1)))
    rows = row_block or max(ROWS // 2, BUDGET // (B * S * heads or 1))
    return by_blocks(batched_rows, q, k, v, terms, Blocks(rows, heads))
