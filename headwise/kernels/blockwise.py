"""Blockwise kernel: the batched kernel on a few heads and rows at a time. Exact, for any mask, with memory linear in n."""

from torch import Tensor

from headwise.kernels.batched import batched_rows
from headwise.kernels.run_in_blocks import HeadRowBlockShape, run_blocks
from headwise.kernels.score_params import ScoreParams

SCORE_BUDGET = 2**20  # scores in memory at a time: 4 MB in float32, which fit into the CPU cache
TARGET_ROWS = 128  # minimum number of rows before a block contains several heads


def blockwise(
    q: Tensor, k: Tensor, v: Tensor, params: ScoreParams, *, row_block: int | None = None, head_block: int | None = None
) -> Tensor:
    """Attend block by block: (B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, H, T, e).

    `row_block` and `head_block` set the block size. By default it follows from `SCORE_BUDGET`.
    """
    B, H, S = q.shape[0], q.shape[1], max(1, k.shape[2])
    heads = head_block or min(max(1, H), max(1, SCORE_BUDGET // (B * S * (row_block or TARGET_ROWS) or 1)))
    rows = row_block or max(TARGET_ROWS // 2, SCORE_BUDGET // (B * S * heads or 1))
    return run_blocks(batched_rows, q, k, v, params, HeadRowBlockShape(rows, heads))
