"""Batched kernel: all heads in one matrix product, all attention maps in memory (n²). Fast for short inputs."""

from typing import Any

import torch
from torch import Tensor

from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.kernels.score_params import ScoreParams, masked_scores, raw_scores, repeat_kv, softmax_weights
from headwise.kernels.symbolic_sizes import full_range

MAX_ENTRIES = 2**20  # larger maps are computed in blocks of rows on a CPU, which stay in its cache until they are done
BLOCK_ROWS = 64


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
        masked_scores(scores, params, rows, cols, T, S), params, may_have_empty_rows=params.may_have_empty_rows(T, S)
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
    scores = masked_scores(scores, params, rows, cols, T, S, batch_slice, in_place=not torch.is_grad_enabled())
    return softmax_weights(scores, params, may_have_empty_rows=params.may_have_empty_rows(T, S))


def _weights_in_blocks(q: Tensor, k: Tensor, params: ScoreParams) -> Tensor:
    """Return the weights of all queries, (B, H, T, S), one block of rows of one example at a time."""
    (B, H, T, _), S = q.shape, k.shape[2]
    weights = q.new_empty(B, H, T, S)
    for example in range(B):
        batch_slice = slice(example, example + 1)
        for start in range(0, T, BLOCK_ROWS):
            rows = range(start, min(start + BLOCK_ROWS, T))
            cols = params.key_range(rows, T, S)
            block = weights[batch_slice, :, rows.start : rows.stop]  # (1, H, R, S)
            block[..., : cols.start] = 0
            block[..., cols.stop :] = 0
            block[..., cols.start : cols.stop] = _weight_block(
                q[batch_slice], k[batch_slice], params, rows, cols, batch_slice
            )
    return weights


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
