"""Similarity of heads by their attention rows, values and outputs, on sampled query positions.

Only the sampled rows of attention maps are computed, and only one group of texts is in memory at a time.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.attention_call import AttentionCallContext, AttentionObserver
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.recording.batching import TextSample, make_batch
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.similarity.weight_similarity import (
    copy_rows_to_host,
    pairwise_gram_squared_norms,
    pairwise_product_squared_norms,
)
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.hook_point import AttentionCall, HookPoint
from headwise.kernels.rounding_tolerance import at_least_float32, to_float64
from headwise.kernels.score_params import add_bias_and_mask, raw_scores, repeat_kv, softmax_weights
from headwise.model import ModelProtocol
from headwise.spec import Address

TEXT_POOL = 2048  # texts are sampled from this many texts at the start of the corpus
GROUP_TEXTS = 8  # texts per forward pass
ROWS_PER_TEXT = 16  # rows sampled per text; more if the corpus has few texts
MAX_WEIGHTS = 1 << 25  # attention weights in memory: heads × rows × keys
CHUNK_WEIGHTS = 1 << 11  # attention weights compared at once, to fit in the CPU cache


def sample_texts_and_query_positions(
    model: ModelProtocol, corpus: Any, rows: int, max_length: int, heads: int, seed: int
) -> Iterator[tuple[list[TextSample], list[int]]]:
    """Yield groups of texts of similar length, with the query positions to sample in each text of the group."""
    rng = np.random.default_rng(seed)
    first = 0 if model.spec.kind == "encoder" else 1  # the first row of a causal map is equal in all heads
    max_length = min(max_length, model.spec.context) if model.spec.positions == "learned" else max_length
    pool = [
        sample
        for sample in islice(TokenizedCorpus.of(model, corpus, max_length), TEXT_POOL)
        if first < len(sample.ids) <= max_length
    ]
    if not pool:
        raise ArgumentError(
            f"corpus: no text has {first + 1} to {max_length} tokens. Pass other texts, or increase max_length=."
        )
    pool.sort(key=lambda sample: len(sample.ids))
    groups = [pool[start : start + GROUP_TEXTS] for start in range(0, len(pool), GROUP_TEXTS)]
    rows_per_text = max(ROWS_PER_TEXT, -(-rows // len(pool)))
    for index in rng.permutation(len(groups)):
        if rows < 1:
            return
        group = groups[index][:rows]
        eligible = np.arange(first, len(group[0].ids))  # the shortest text is first
        max_rows = max(1, MAX_WEIGHTS // (heads * len(group) * len(group[-1].ids)))
        num_rows = min(rows_per_text, len(eligible), rows // len(group), max_rows)
        yield group, sorted(rng.choice(eligible, num_rows, replace=False).tolist())
        rows -= num_rows * len(group)


class SampledRows(NamedTuple):
    """Attention rows, values and outputs of the heads at sampled positions.

    Attributes:
        maps: Attention rows, (H, B·r, S + 1). The last column is the weight of the learned sink.
        v: Values, (H, B·r, e).
        z: Head outputs before W_O, (H, B·r, e).
        texts: Number of texts, B.
    """

    maps: Tensor
    v: Tensor
    z: Tensor
    texts: int


class AttentionRowRecorder(AttentionObserver):
    """Record sampled rows of selected heads during a forward pass."""

    def __init__(self, positions: list[int], selected: set[Address]) -> None:
        self.positions, self.selected = positions, selected
        self.maps: list[Tensor] = []
        self.v: list[Tensor] = []
        self.z: list[Tensor] = []
        self._called_hook_points: set[HookPoint] = set()

    def on_call(self, call: AttentionCallContext) -> None:
        """Record the rows of one attention call."""
        attention_call, positions = call.attention_call, self.positions
        head_indices = [
            i for i, address in enumerate(attention_call.hook_point.head_addresses) if address in self.selected
        ]
        if head_indices and attention_call.hook_point in self._called_hook_points:
            raise UnsupportedModelError(
                f"layer {attention_call.hook_point.address}: called several times in one forward pass, so its heads have "
                f"more than one attention map and cannot be compared. Exclude the layer with heads=, or record one call: "
                f"hw.record(model), then recording[head].call(0)."
            )
        self._called_hook_points.add(attention_call.hook_point)
        if head_indices:
            first = call.batch_context.batch.first_token_positions
            self.maps.append(_by_head(_attention_rows_by_text(attention_call, positions, first)[:, head_indices]))
            self.v.append(
                _by_head(
                    _select_positions(
                        repeat_kv(attention_call.v, attention_call.params.kv_of_head)[:, head_indices], positions, first
                    )
                )
            )
            self.z.append(_by_head(_select_positions(attention_call.z[:, head_indices], positions, first)))


def record_rows(
    model: ModelProtocol, samples: list[TextSample], positions: list[int], selected: set[Address]
) -> SampledRows:
    """Run a group of texts and record the rows at the sampled positions."""
    sampler = AttentionRowRecorder(positions, selected)
    MetricRunner(Accumulator(len(selected)), observers=[sampler]).run(model, [make_batch(samples, device=model.device)])
    return SampledRows(torch.cat(sampler.maps), torch.cat(sampler.v), torch.cat(sampler.z), len(samples))


def _by_head(x: Tensor) -> Tensor:
    """Move heads first and flatten texts, in at least float32: (B, h, r, ·) → (h, B·r, ·)."""
    return at_least_float32(x.transpose(0, 1).flatten(1, 2))


def _select_positions(x: Tensor, positions: list[int], first: Tensor) -> Tensor:
    """Select positions of each text, counted from its first token: (B, h, T, e) → (B, h, r, e)."""
    if not bool(first.any()):
        return x[:, :, positions]
    rows = first[:, None] + torch.tensor(positions, device=first.device)  # (B, r)
    return x.gather(2, rows[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


def _attention_rows_by_text(call: AttentionCall, positions: list[int], first: Tensor) -> Tensor:
    """Compute `attention_rows` at positions counted from each text's first token, whose key is column 0."""
    starts = first.tolist()
    if not any(starts):
        return attention_rows(call, positions)
    rows = sorted({start + position for start in starts for position in positions})
    all_rows = attention_rows(call, rows)  # (B, H, n, S + 1)
    texts = []
    for text, start in zip(all_rows, starts, strict=True):
        text_rows = text[:, [rows.index(start + position) for position in positions]]  # (H, r, S + 1)
        texts.append(torch.cat((text_rows[..., :-1].roll(-start, -1), text_rows[..., -1:]), -1))
    return torch.stack(texts)


def attention_rows(call: AttentionCall, positions: list[int]) -> Tensor:
    """Compute rows of every head's map, with the weight of the learned sink as last column: (B, H, r, S + 1)."""
    params, q = call.params, at_least_float32(call.q[:, :, positions])
    k = repeat_kv(call.k, params.kv_of_head).to(q)
    T, S = call.q.shape[2], k.shape[2]
    scores = raw_scores(q, k, params)  # (B, H, r, S)
    rows = [
        add_bias_and_mask(scores[:, :, n : n + 1], params, range(i, i + 1), range(S), T, S)
        for n, i in enumerate(positions)
    ]
    attention = softmax_weights(torch.cat(rows, 2), params, may_have_empty_rows=params.may_have_empty_rows(T, S))
    sink_weight = (
        (1 - attention.sum(-1, keepdim=True)).clamp(min=0)
        if params.sink is not None
        else torch.zeros_like(attention[..., :1])
    )
    return torch.cat((attention, sink_weight), -1)


class PairwiseAccumulator:
    """Sums over rows for all pairs of heads, (H, H), on the same text and, as baseline, on different texts."""

    def __init__(self, W_O: Tensor) -> None:
        self.W_O = W_O  # (H, e, D)
        self.rows, self.other_rows = 0, 0
        self.same_text = {
            name: np.zeros((len(W_O),) * 2) for name in ("js", "map_cosine", "position", "subspace", "output")
        }
        self.other_text = {name: np.zeros_like(sums) for name, sums in self.same_text.items()}
        self.squares = np.zeros(len(W_O))  # ‖P‖² of the rows with a baseline text

    def add(self, rows: SampledRows) -> None:
        """Add a group of texts. The neighboring text of the group is the baseline."""
        n, texts = rows.maps.shape[1], rows.texts
        keys = rows.maps[..., :-1]
        self.rows += n
        self.same_text["js"] += js_sums(rows.maps.flatten(1))
        pairs = [("map_cosine", keys), ("position", _normalize(keys)), ("subspace", _normalize(rows.v))]
        for name, x in pairs:
            self._add_products(name, x, texts)
        # Head outputs after W_O have D channels, so they are computed for a few rows of every text at a time.
        z = rows.z.unflatten(1, (texts, -1))  # (H, B, r, e)
        for chunk in z.split(max(1, GROUP_TEXTS // texts), 2):
            self._add_products("output", _normalize(chunk.flatten(1, 2) @ self.W_O.to(z)), texts)
        if texts > 1:
            self.other_rows += n
            self.squares += to_float64(keys).square().sum((1, 2)).cpu().numpy()
            self.other_text["js"] += np.diag(_js_per_head(rows.maps, _roll_texts_by_one(rows.maps, texts)))

    def _add_products(self, name: str, x: Tensor, texts: int) -> None:
        flat = x.flatten(1)
        self.same_text[name] += to_float64(flat @ flat.mT).cpu().numpy()
        if texts > 1:
            self.other_text[name] += to_float64(flat @ _roll_texts_by_one(x, texts).flatten(1).mT).cpu().numpy()

    def matrices(self) -> dict[str, np.ndarray]:
        """Return means over rows; cosines of full maps for "map_cosine"."""
        result = {name: sums / self.rows for name, sums in self.same_text.items()}
        result["map_cosine"] = _cosines(self.same_text["map_cosine"], np.diag(self.same_text["map_cosine"]))
        return result

    def baselines(self) -> dict[str, np.ndarray]:
        """Return the values with the second head on another text. NaN for a single text. "js" has one value per head."""
        if not self.other_rows:
            return {name: np.array(np.nan) for name in self.other_text}
        result = {name: (sums + sums.T) / 2 / self.other_rows for name, sums in self.other_text.items()}
        result["map_cosine"] = _cosines(
            (self.other_text["map_cosine"] + self.other_text["map_cosine"].T) / 2, self.squares
        )
        return result | {"js": np.diag(result["js"])[:, None]}


def js_sums(rows: Tensor) -> np.ndarray:
    """Sum the Jensen–Shannon divergence in nats of every pair over concatenated rows: (H, N) → (H, H)."""
    H = len(rows)
    rows = rows[:, (rows > 0).any(0)]  # keys that no head attends to contribute nothing
    own, mixed = np.zeros(H), np.zeros((H, H))
    for part in rows.split(CHUNK_WEIGHTS, 1):
        pairs = [_sum_p_log_p((part[a] + part[a + 1 :]) * 0.5) for a in range(H - 1)]
        own_part, *mixed_parts = copy_rows_to_host([_sum_p_log_p(part), *pairs])
        own += own_part
        for a, sums in enumerate(mixed_parts):
            mixed[a, a + 1 :] += sums
    upper = np.triu((own[:, None] + own) / 2 - mixed, 1).clip(min=0)  # negative only by rounding
    return upper + upper.T


def js_sums_of_head(rows: Tensor, head: int) -> np.ndarray:
    """Sum the Jensen–Shannon divergence in nats of one head and every head over concatenated rows: (H, N) → (H,)."""
    rows = rows[:, (rows > 0).any(0)]
    own, mixed = np.zeros(len(rows)), np.zeros(len(rows))
    for part in rows.split(CHUNK_WEIGHTS, 1):
        own_part, mixed_part = copy_rows_to_host([_sum_p_log_p(part), _sum_p_log_p((part + part[head]) * 0.5)])
        own += own_part
        mixed += mixed_part
    return ((own + own[head]) / 2 - mixed).clip(min=0)


def _js_per_head(rows: Tensor, others: Tensor) -> np.ndarray:
    """Sum the Jensen–Shannon divergence of each head's rows with other rows: (H, n, S), (H, n, S) → (H,)."""
    terms = [
        part
        for p, q in zip(rows, others, strict=True)
        for part in (_sum_p_log_p(p), _sum_p_log_p(q), _sum_p_log_p((p + q) * 0.5))
    ]
    sums = np.array([part.sum() for part in copy_rows_to_host(terms)]).reshape(-1, 3)
    return ((sums[:, 0] + sums[:, 1]) / 2 - sums[:, 2]).clip(min=0)


def _sum_p_log_p(p: Tensor) -> Tensor:
    """Return Σ p log p over the last axis, in the dtype of p."""
    logs = p.clamp(min=torch.finfo(p.dtype).tiny).log_()
    return logs.mul_(p).sum(-1)


def cka(X: Tensor, Y: Tensor, *, debiased: bool = True) -> float:
    """Compute linear CKA of two feature matrices, invariant to rotation and scale.

    https://arxiv.org/abs/1905.00414, debiased as in https://arxiv.org/abs/2010.15327

    Args:
        X: Features, (n, p).
        Y: Features of the same rows, (n, q).
        debiased: Use the estimator with expected value 0 for independent features.

    Returns:
        1 for equal features up to rotation and scale.

    >>> X = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    >>> round(cka(X, X.flip(1)), 4)
    1.0
    """
    return float(_pairwise_cka(X[None], Y[None], debiased=debiased)[0, 0])


def cka_matrix(features: Tensor) -> np.ndarray:
    """Compute debiased CKA of all pairs, without an n×n matrix: (H, n, e) → (H, H)."""
    return _pairwise_cka(features, features)


def permuted_cka_threshold(features: Tensor, seed: int, heads: int = 32, draws: int = 4) -> np.ndarray:
    """Return the 95th percentile of CKA if the rows of one head are permuted, on a sample of heads."""
    rng = np.random.default_rng(seed)
    subset = features[torch.from_numpy(rng.permutation(len(features))[:heads])]
    values = [
        _pairwise_cka(subset, subset[:, torch.from_numpy(rng.permutation(subset.shape[1]))]) for _ in range(draws)
    ]
    return np.array(np.nanquantile(values, 0.95) if not np.isnan(values).all() else np.nan)


def _pairwise_cka(X: Tensor, Y: Tensor, *, debiased: bool = True) -> np.ndarray:
    n = X.shape[1]
    if debiased and n < 4:
        return np.full((len(X), len(Y)), np.nan)
    same = X is Y
    X = X - X.mean(1, keepdim=True)
    Y = X if same else Y - Y.mean(1, keepdim=True)

    def independence(A: Tensor, B: Tensor) -> np.ndarray:
        """HSIC. The debiased version excludes products of a row with itself. Sums over centered rows vanish."""
        cross = pairwise_gram_squared_norms(A) if A is B else pairwise_product_squared_norms(A.mT, B)
        if not debiased:
            return cross
        a, b = (to_float64(x).square().sum(-1).cpu().numpy() for x in (A, B))  # (H, n): each row with itself
        return cross - n / (n - 2) * a @ b.T + np.outer(a.sum(1), b.sum(1)) / (n - 1) / (n - 2)

    return _cosines(independence(X, Y), *(_own_independence(side, debiased=debiased) for side in (X, Y)))


def _own_independence(X: Tensor, *, debiased: bool) -> np.ndarray:
    """HSIC of each centered feature matrix with itself: (H, n, e) → (H,)."""
    n = X.shape[1]
    cross = np.concatenate(copy_rows_to_host([to_float64(x.mT @ x).square().sum()[None] for x in X]))
    if not debiased:
        return cross
    rows = to_float64(X).square().sum(-1).cpu().numpy()  # (H, n)
    return cross - n / (n - 2) * (rows**2).sum(1) + rows.sum(1) ** 2 / (n - 1) / (n - 2)


def _cosines(products: np.ndarray, squares: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
    # A debiased squared norm can be negative if the features are nearly zero; the cosine is then NaN.
    sizes = squares.clip(min=0)[:, None] * (squares if others is None else others).clip(min=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(sizes > 0, products / np.sqrt(sizes), np.nan)


def _normalize(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1, eps=torch.finfo(x.dtype).tiny)


def _roll_texts_by_one(x: Tensor, texts: int) -> Tensor:
    """Replace every text with its neighbor in the group: (H, B·r, ·)."""
    return x.unflatten(1, (texts, -1)).roll(1, 1).flatten(1, 2)
