"""The batched form: all heads in one matrix product, every map materialised. Quick for short inputs, n² in memory."""

import torch
from torch import Tensor

from headwise.kernels.score_params import Terms, raw_scores, spread, visible_scores, weights
from headwise.kernels.symbolic_sizes import whole


def batched(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    """(B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, H, T, e)"""
    T, S = q.shape[2], k.shape[2]
    return batched_rows(q, k, v, terms, whole(T), whole(S), T, S)


def batched_rows(q: Tensor, k: Tensor, v: Tensor, terms: Terms, rows: range, cols: range, T: int, S: int) -> Tensor:
    """The same for one block of queries and the keys they see. (B, H, R, e)"""
    scores = raw_scores(q, spread(k, terms.groups), terms)  # (B, H, R, C)
    share = weights(visible_scores(scores, terms, rows, cols, T, S), terms, terms.may_be_empty(T, S))
    return torch.nn.functional.dropout(share, terms.dropout) @ spread(v, terms.groups)


def maps(q: Tensor, k: Tensor, terms: Terms) -> Tensor:
    """The attention weights themselves, dropout aside. (B, H, T, S)"""
    return maps_of_rows(q, k, terms, range(q.shape[2]))


def maps_of_rows(q: Tensor, k: Tensor, terms: Terms, rows: range, some: slice = slice(None)) -> Tensor:
    """The same for some queries. (B, H, R, S), or of `some` of the batch."""
    T, S = q.shape[2], k.shape[2]
    scores = raw_scores(q[some, :, rows.start : rows.stop], spread(k[some], terms.groups), terms)
    return weights(visible_scores(scores, terms, rows, range(S), T, S, some), terms, terms.may_be_empty(T, S))
