"""Batched kernel: all heads in one matrix product, all attention maps in memory (n²). Fast for short inputs."""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.kernels.score_params import ScoreParams, add_bias_and_mask, raw_scores, repeat_kv, softmax_weights
from headwise.kernels.symbolic_sizes import full_range

MAX_ENTRIES = 2**20  # larger maps are computed in blocks on a CPU, which stay in its cache until they are done
BLOCK_ROWS = 64  # rows per block if a mask hides keys, which the block skips
BLOCK_ENTRIES = 2**20  # approximate number of weights per block without a mask; a quarter of it with a mask
ALIGNMENT = 64  # bytes; the last bit of a product can depend on the alignment of its inputs
BlockIndex = tuple[slice, slice, slice]  # example, heads and rows


def batched(q: Tensor, k: Tensor, v: Tensor, params: ScoreParams) -> Tensor:
    """Attend with all queries at once: (B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, H, T, e)."""
    T, S = q.shape[2], k.shape[2]
    return batched_rows(q, k, v, params, full_range(T), full_range(S), T, S)


def batched_rows(
    q: Tensor, k: Tensor, v: Tensor, params: ScoreParams, rows: range, cols: range, T: int, S: int
) -> Tensor:
    """Attend with one block of queries to the keys that are visible to it: (B, H, R, e)."""
    scores = raw_scores(q, repeat_kv(k, params.kv_of_head), params)  # (B, H, R, C)
    probs = softmax_weights(
        add_bias_and_mask(scores, params, rows, cols, T, S),
        params,
        may_have_empty_rows=params.may_have_empty_rows(T, S),
    )
    return torch.nn.functional.dropout(probs, params.dropout) @ repeat_kv(v, params.kv_of_head)


def attention_weights(q: Tensor, k: Tensor, params: ScoreParams) -> Tensor:
    """Return the attention weights without dropout, (B, H, T, S).

    Large maps on a CPU are computed in blocks of rows. Each block is written once, and keys that a mask hides from all
    rows of a block are skipped.
    """
    if torch.compiler.is_compiling() or torch.compiler.is_exporting() or q.device.type != "cpu":
        return attention_weight_rows(q, k, params, full_range(q.shape[2]))
    if q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= MAX_ENTRIES:
        return attention_weight_rows(q, k, params, range(q.shape[2]))
    k = repeat_kv(k, params.kv_of_head)
    if not torch.is_grad_enabled():
        return _weights_in_blocks(q, k, params)
    if params.softcap is not None or any(tensor.requires_grad for tensor in params.learnable_tensors()):
        return _weight_block(q, k, params, range(q.shape[2]), range(k.shape[2]), slice(None))
    return _AttentionWeightsFunction.apply(params, q, k)  # pyright: ignore[reportReturnType]


def attention_weight_rows(
    q: Tensor, k: Tensor, params: ScoreParams, rows: range, batch_slice: slice = slice(None)
) -> Tensor:
    """Return the attention weights of some queries, (B, H, R, S), for the examples of `batch_slice`."""
    k = repeat_kv(k[batch_slice], params.kv_of_head)
    return _weight_block(q[batch_slice], k, params, rows, full_range(k.shape[2]), batch_slice)


def _weight_block(q: Tensor, k: Tensor, params: ScoreParams, rows: range, cols: range, batch_slice: slice) -> Tensor:
    """Return the weights of some queries and keys of the examples in q, (B, H, R, C). k has a copy of each head's keys."""
    T, S = q.shape[2], k.shape[2]
    scores = raw_scores(q[:, :, rows.start : rows.stop], k[:, :, cols.start : cols.stop], params)
    scores = add_bias_and_mask(scores, params, rows, cols, T, S, batch_slice, in_place=not torch.is_grad_enabled())
    return softmax_weights(scores, params, may_have_empty_rows=params.may_have_empty_rows(T, S))


def attend_with_weights(
    q: Tensor, k: Tensor, v: Tensor, params: ScoreParams, *, keep_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend in blocks without dropout and gradients: z, (B, H, T, e), and the weights, (B, H, T, S), or None.

    z has the same bits with and without `keep_weights`, because both run the same operations on the same blocks.
    """
    (B, H, T, _), S = q.shape, k.shape[2]
    k, v = repeat_kv(k, params.kv_of_head), repeat_kv(v, params.kv_of_head)
    z = q.new_empty(B, T, H, v.shape[-1]).transpose(1, 2)  # so that concatenating heads needs no copy
    weights = q.new_empty(B, H, T, S) if keep_weights else None
    for index, cols, block in _iter_weight_blocks(q, k, params, weights):
        z[index] = block @ v[index[:2]][:, :, cols.start : cols.stop]
    return z, weights


def _weights_in_blocks(q: Tensor, k: Tensor, params: ScoreParams) -> Tensor:
    """Return the weights of all queries, (B, H, T, S), computed in blocks."""
    weights = q.new_empty(*q.shape[:3], k.shape[2])
    for _ in _iter_weight_blocks(q, k, params, weights):
        pass
    return weights


def _iter_weight_blocks(
    q: Tensor, k: Tensor, params: ScoreParams, out: Tensor | None
) -> Iterator[tuple[BlockIndex, range, Tensor]]:
    """Yield the index, the keys and the weights, (1, h, R, C), of each block, and write them to `out`, (B, H, T, S), or None.

    k has a copy of each head's keys. The memory of a block may be reused by the next. A block is computed in `out` if its
    memory there has the layout and alignment of the scratch memory, so `out` does not change the bits of its products.
    """
    (B, H, T, _), S = q.shape, k.shape[2]
    in_place = params.bias is None and params.softcap is None and params.sink is None
    in_place = in_place and not params.may_have_empty_rows(T, S)
    num_rows = min(T, BLOCK_ROWS if params.mask is not None else max(BLOCK_ROWS, BLOCK_ENTRIES // S))
    num_heads = max(1, BLOCK_ENTRIES // (num_rows * S * (1 if params.mask is None else 4)))
    head_groups = [slice(first, min(first + num_heads, H)) for first in range(0, H, num_heads)]
    params_by_group = [params.select_heads(heads, params.kv_of_head[heads]) for heads in head_groups]
    scratch = q.new_empty(min(num_heads, H) * num_rows * S if in_place else 0)
    q = q * params.scale if in_place else q
    for example in range(B):
        batch_slice = slice(example, example + 1)
        for start in range(0, T, num_rows):
            rows = range(start, min(start + num_rows, T))
            cols = params.key_range(rows, T, S)
            for heads, group_params in zip(head_groups, params_by_group, strict=True):
                inputs = (q[batch_slice, heads], k[batch_slice, heads], group_params, rows, cols, batch_slice)
                target = None if out is None else out[batch_slice, heads, rows.start : rows.stop]  # (1, h, R, S)
                if not in_place:
                    block = _weight_block(*inputs)
                elif target is not None and len(cols) == S and _has_layout_of(target, scratch):
                    block = _weight_block_in_place(target.view(-1), *inputs)
                else:
                    block = _weight_block_in_place(scratch, *inputs)
                if target is not None and block.data_ptr() != target.data_ptr():
                    _write_weights(target, cols, block)
                yield (batch_slice, heads, slice(rows.start, rows.stop)), cols, block


def _has_layout_of(target: Tensor, scratch: Tensor) -> bool:
    """Whether a block is contiguous and aligned like the scratch memory."""
    return target.is_contiguous() and (target.data_ptr() - scratch.data_ptr()) % ALIGNMENT == 0


def _weight_block_in_place(
    scratch: Tensor, q: Tensor, k: Tensor, params: ScoreParams, rows: range, cols: range, batch_slice: slice
) -> Tensor:
    """Compute a block like `_weight_block` in the memory of `scratch`. q is scaled, and every row has a visible key."""
    shape = (*q.shape[:2], len(rows), len(cols))
    block = scratch[: prod(shape)].view(shape)  # (1, h, R, C)
    torch.matmul(q[:, :, rows.start : rows.stop], k[:, :, cols.start : cols.stop].mT, out=block)
    add_bias_and_mask(block, params, rows, cols, q.shape[2], k.shape[2], batch_slice, in_place=True)
    return torch.softmax(block, -1, out=block)


def _write_weights(out: Tensor, cols: range, block: Tensor) -> None:
    """Write a block, (1, h, R, C), into its rows of all keys, (1, h, R, S). The weights of other keys are 0."""
    out[..., : cols.start] = 0
    out[..., cols.stop :] = 0
    out[..., cols.start : cols.stop] = block


class _AttentionWeightsFunction(torch.autograd.Function):
    """Attention weights in blocks of rows, with gradients of q and k. A second derivative recomputes them at once."""

    @staticmethod
    def forward(ctx: Any, params: ScoreParams, q: Tensor, k: Tensor) -> Tensor:
        weights = _weights_in_blocks(q, k, params)
        ctx.save_for_backward(q, k, weights)
        ctx.params = params
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, weights = ctx.saved_tensors
        if torch.is_grad_enabled():
            weights = _weight_block(q, k, ctx.params, range(q.shape[2]), range(k.shape[2]), slice(None))
            d_scores = weights * (grad - (weights * grad).sum(-1, keepdim=True))
            return None, d_scores @ k * ctx.params.scale, d_scores.mT @ (q * ctx.params.scale)
        dq, dk = torch.empty_like(q), at_least_float32(torch.zeros_like(k))  # dk is a sum over many blocks
        for example in range(len(q)):
            for start in range(0, q.shape[2], BLOCK_ROWS):
                index = (slice(example, example + 1), slice(None), slice(start, start + BLOCK_ROWS))
                d_scores = torch._softmax_backward_data(  # pyright: ignore[reportPrivateImportUsage]
                    grad[index], weights[index], -1, q.dtype
                )  # (1, H, R, S)
                dq[index] = (d_scores @ k[index[0]]).mul_(ctx.params.scale)
                dk[index[0]] += d_scores.mT @ (q[index] * ctx.params.scale)
        return None, dq, dk.to(k.dtype)
