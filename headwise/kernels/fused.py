"""Fused kernel: torch's scaled_dot_product_attention, with inputs rewritten so that torch selects its flash kernel.

A sink becomes an additional key with an additional channel. If d and e differ, the smaller one is padded with zeros. A mask
without a flag in the flash kernel is passed in blocks of rows, so that the mask never needs n² memory.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.kernels.masks import CausalMask
from headwise.kernels.run_in_blocks import HeadRowBlockShape, run_blocks, zero_output
from headwise.kernels.score_params import ScoreParams, repeat_kv
from headwise.kernels.symbolic_sizes import full_range

MASK_BUDGET = 2**23  # mask or bias entries in memory at a time
NARROW_ROW_BLOCK = 256  # rows per block if a window hides most keys


def fused(q: Tensor, k: Tensor, v: Tensor, params: ScoreParams) -> Tensor:
    """Attend with torch's kernel: (B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, H, T, e)."""
    if params.softcap is not None:
        raise ArgumentError(
            f"backend='fused': the fused kernel does not support softcap={params.softcap}. "
            f"Use backend='blockwise', 'batched' or 'auto'."
        )
    T, S, mask = q.shape[2], k.shape[2], params.mask
    if q.numel() == 0 or S == 0:  # no heads, queries or keys
        return zero_output(q, k, v)
    if params.bias is None and (mask is None or mask.is_full(T, S)):
        return _sdpa(q, k, v, params)
    if params.bias is None and isinstance(mask, CausalMask) and mask.resolve_offset(T, S) == 0:
        return _sdpa(q, k, v, params, is_causal=True)
    if torch.compiler.is_exporting():  # sizes may be symbolic, so the number of blocks is unknown
        return _masked_rows(q, k, v, params, full_range(T), full_range(S), T, S)
    return run_blocks(_masked_rows, q, k, v, params, HeadRowBlockShape(rows_per_block(params, T, S), q.shape[1]))


def bind_single_query(
    params: ScoreParams, K: int, head_dim: int, value_dim: int
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return `fused` for a single query that sees all keys, or None if the inputs of torch's kernel must be rewritten.

    Args:
        params: Score params without mask, bias and dropout.
        K: Number of KV heads.
        head_dim: Channels of queries and keys.
        value_dim: Channels of values.
    """
    H = len(params.kv_of_head)
    needs_rewrite = params.sink is not None or params.softcap is not None or head_dim != value_dim or not H
    if needs_rewrite or not _has_even_groups(params.kv_of_head, K):
        return None
    return partial(F.scaled_dot_product_attention, scale=params.scale, enable_gqa=K != H)


def rows_per_block(params: ScoreParams, T: int, S: int) -> int:
    """Return the number of mask and bias rows per block: few if a window hides most keys, otherwise as many as fit."""
    last = range(max(0, T - NARROW_ROW_BLOCK), T)
    if 4 * len(params.key_range(last, T, S)) < S:
        return NARROW_ROW_BLOCK
    return max(64, MASK_BUDGET // (S * params.num_mask_bias_planes()))


def _masked_rows(
    q: Tensor, k: Tensor, v: Tensor, params: ScoreParams, rows: range, cols: range, T: int, S: int
) -> Tensor:
    """Attend with one block of rows. A row without visible keys attends to all keys and is then set to zero."""
    if cols.start == cols.stop:
        return zero_output(q, k, v)
    allowed = params.mask_block(rows, cols, T, S, q.device)  # (1 or B, 1 or H, 1 or R, C)
    bias = params.bias_block(rows, cols, T, S)
    if bias is None:
        attn_mask = allowed
    else:
        attn_mask = bias.to(q.dtype)
        attn_mask = attn_mask if allowed is None else attn_mask.masked_fill(~allowed, -torch.inf)
    if attn_mask is None or not params.may_have_empty_rows(T, S):
        return _sdpa(q, k, v, params, attn_mask)
    empty = (~attn_mask if bias is None else attn_mask == -torch.inf).all(
        -1, keepdim=True
    )  # (1 or B, 1 or H, 1 or R, 1)
    attn_mask = attn_mask | empty if bias is None else attn_mask.masked_fill(empty, 0)
    return _sdpa(q, k, v, params, attn_mask).masked_fill(empty, 0)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, params: ScoreParams, mask: Tensor | None = None, *, is_causal: bool = False
) -> Tensor:
    """Call torch's kernel with inputs in a shape for which it selects the flash kernel."""
    H, K, d, e = q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]
    if mask is not None:
        mask = mask.expand(*mask.shape[:2], q.shape[2], k.shape[2])
    # torch.compile would warn about a function with a cache
    has_even_groups = _has_even_groups.__wrapped__ if torch.compiler.is_compiling() else _has_even_groups
    if params.sink is not None or not has_even_groups(params.kv_of_head, K):
        k, v = repeat_kv(k, params.kv_of_head), repeat_kv(v, params.kv_of_head)  # SDPA supports even groups only
    if params.sink is not None:
        q, k, v, mask = _add_sink(q, k, v, params, mask, is_causal=is_causal)
        d = d + 1
    if d > e:
        v = F.pad(v, (0, d - e))
    elif d < e:
        q, k = F.pad(q, (0, e - d)), F.pad(k, (0, e - d))
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:  # otherwise SDPA materializes the maps
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    z = F.scaled_dot_product_attention(
        q, k, v, mask, params.dropout, is_causal, scale=params.scale, enable_gqa=k.shape[1] != H
    )
    z = z[:, :, 1:] if params.sink is not None and is_causal else z
    return z if z.shape[-1] == e else z[..., :e]


@lru_cache
def _has_even_groups(kv_of_head: tuple[int, ...], K: int) -> bool:
    """Return True if consecutive heads share KV heads in groups of equal size."""
    H = len(kv_of_head)
    return H % K == 0 and kv_of_head == tuple(head * K // H for head in range(H))


def _add_sink(
    q: Tensor, k: Tensor, v: Tensor, params: ScoreParams, mask: Tensor | None, *, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Prepend a key that has the score `sink[h]` for every query and a value of zero. An additional channel has the score.

    A causal call also gets an additional first query, so that the diagonal does not move.
    """
    assert params.sink is not None
    q = F.pad(q, (0, 1), value=1 / params.scale)  # (B, H, T, d+1)
    logit = params.sink.to(q.dtype)[None, :, None, None].expand(*k.shape[:2], 1, 1)
    k = torch.cat((F.pad(logit, (k.shape[-1], 0)), F.pad(k, (0, 1))), 2)  # (B, H, 1+S, d+1)
    v = F.pad(v, (0, 0, 1, 0))  # (B, H, 1+S, e)
    if is_causal:
        q = F.pad(q, (0, 0, 1, 0))  # (B, H, 1+T, d+1)
    if mask is not None:
        mask = F.pad(mask, (1, 0), value=True if mask.dtype == torch.bool else 0.0)  # (…, T, 1+S)
    return q, k, v, mask
