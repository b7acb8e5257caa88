"""Batched kernel: all heads in one matrix product, all attention maps in memory (n²). Fast for short inputs."""

import torch
from torch import Tensor

from headwise.kernels.score_params import ScoreParams, masked_scores, raw_scores, repeat_kv, softmax_weights
from headwise.kernels.symbolic_sizes import full_range


def batched(q: Tensor, k: Tensor, v: Tensor, params: ScoreParams) -> Tensor:
    """Attend with all queries at once: (B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, H, T, e)."""
    T, S = q.shape[2], k.shape[2]
    return batched_rows(q, k, v, params, full_range(T), full_range(S), T, S)


def batched_rows(
    q: Tensor, k: Tensor, v: Tensor, params: ScoreParams, rows: range, cols: range, T: int, S: int
) -> Tensor:
    """Attend with one block of queries to the keys that are visible to it: (B, H, R, e)."""
    scores = raw_scores(q, repeat_kv(k, params.kv_of_head), params)  # (B, H, R, C)
    probs = softmax_weights(masked_scores(scores, params, rows, cols, T, S), params, params.may_have_empty_rows(T, S))
    return torch.nn.functional.dropout(probs, params.dropout) @ repeat_kv(v, params.kv_of_head)


def attention_weights(q: Tensor, k: Tensor, params: ScoreParams) -> Tensor:
    """Return the attention weights without dropout, (B, H, T, S)."""
    return attention_weight_rows(q, k, params, range(q.shape[2]))


def attention_weight_rows(
    q: Tensor, k: Tensor, params: ScoreParams, rows: range, batch_slice: slice = slice(None)
) -> Tensor:
    """Return the attention weights of some queries, (B, H, R, S), for the examples of `batch_slice`."""
    T, S = q.shape[2], k.shape[2]
    scores = raw_scores(q[batch_slice, :, rows.start : rows.stop], repeat_kv(k[batch_slice], params.kv_of_head), params)
    return softmax_weights(
        masked_scores(scores, params, rows, range(S), T, S, batch_slice), params, params.may_have_empty_rows(T, S)
    )
