"""The blockwise form: the batched kernel on a few heads and rows at a time. Exact, any mask, memory linear in n."""

from torch import Tensor

from headwise.kernels.batched import batched_rows
from headwise.kernels.block_loop import HeadRowBlockShape, run_blocks
from headwise.kernels.score_params import ScoreParams

SCORE_BUDGET = 2**20  # scores held at a time: 4 MB in float32, which stays in cache
TARGET_ROWS = 128  # rows a block should have before more heads join it


def blockwise(
    q: Tensor, k: Tensor, v: Tensor, params: ScoreParams, *, row_block: int | None = None, head_block: int | None = None
) -> Tensor:
    """(B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, H, T, e)"""
    B, H, S = q.shape[0], q.shape[1], max(1, k.shape[2])
    heads = head_block or min(max(1, H), max(1, SCORE_BUDGET // (B * S * (row_block or TARGET_ROWS) or 1)))
    rows = row_block or max(TARGET_ROWS // 2, SCORE_BUDGET // (B * S * heads or 1))
    return run_blocks(batched_rows, q, k, v, params, HeadRowBlockShape(rows, heads))
