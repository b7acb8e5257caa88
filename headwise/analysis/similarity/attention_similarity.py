"""Heads beside each other by what they do, on sampled rows: maps, values and outputs, summed over all pairs.

Only the sampled rows of a map are ever made, and only a group of texts is held at a time.
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
from headwise.analysis.similarity.weight_similarity import pairwise_gram_squared_norms, pairwise_product_squared_norms
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import AttentionCall, HookPoint
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.kernels.score_params import masked_scores, raw_scores, repeat_kv, softmax_weights
from headwise.model import ModelProtocol
from headwise.spec import Address

TEXT_POOL = 2048  # texts at the beginning of a corpus, among which those that are read are drawn
GROUP_TEXTS = 8  # texts read side by side
ROWS_PER_TEXT = 16  # rows taken from a text, unless texts are few
MAX_WEIGHTS = 1 << 25  # attention weights held at once: heads × rows × keys
CHUNK_WEIGHTS = 1 << 11  # of them compared at once, so that they stay in the cache


def sample_row_positions(
    model: ModelProtocol, corpus: Any, rows: int, max_length: int, heads: int, seed: int
) -> Iterator[tuple[list[TextSample], list[int]]]:
    """Groups of texts of about one length, and the places whose rows are taken from each of them."""
    rng = np.random.default_rng(seed)
    first = 0 if model.spec.kind == "encoder" else 1  # the first row of a causal map is the same in every head
    max_length = min(max_length, model.spec.context) if model.spec.positions == "learned" else max_length
    pool = [
        sample
        for sample in islice(TokenizedCorpus.of(model, corpus, max_length), TEXT_POOL)
        if first < len(sample.ids) <= max_length
    ]
    if not pool:
        raise HeadwiseError(
            f"no text of {first + 1} to {max_length} tokens to compare heads on; give others, or max_length=…."
        )
    pool.sort(key=lambda sample: len(sample.ids))
    groups = [pool[start : start + GROUP_TEXTS] for start in range(0, len(pool), GROUP_TEXTS)]
    rows_per_text = max(ROWS_PER_TEXT, -(-rows // len(pool)))
    for index in rng.permutation(len(groups)):
        if rows < 1:
            return
        group = groups[index][:rows]
        eligible = np.arange(first, len(group[0].ids))  # the shortest stands first
        max_rows = max(1, MAX_WEIGHTS // (heads * len(group) * len(group[-1].ids)))
        num_rows = min(rows_per_text, len(eligible), rows // len(group), max_rows)
        yield group, sorted(rng.choice(eligible, num_rows, replace=False).tolist())
        rows -= num_rows * len(group)


class SampledRows(NamedTuple):
    """What the heads did at some places of some texts."""

    maps: Tensor  # (H, B·r, S + 1): the last column is the sink's share
    v: Tensor  # (H, B·r, e)
    z: Tensor  # (H, B·r, e)
    texts: int  # B


class RowSampler(AttentionObserver):
    """Keeps some rows of some heads while a group of texts is read: it has no numbers of its own, for it is pairs of heads
    that are compared."""

    def __init__(self, positions: list[int], selected: set[Address]) -> None:
        self.positions, self.selected = positions, selected
        self.maps: list[Tensor] = []
        self.v: list[Tensor] = []
        self.z: list[Tensor] = []
        self._called_hook_points: set[HookPoint] = set()

    def on_call(self, call: AttentionCallContext) -> None:
        """One call at one site."""
        attention_call, positions = call.attention_call, self.positions
        head_indices = [
            i for i, address in enumerate(attention_call.hook_point.head_addresses) if address in self.selected
        ]
        if head_indices and attention_call.hook_point in self._called_hook_points:
            raise HeadwiseError(
                f"layer {attention_call.hook_point.address} is called several times in one pass, so its heads have no "
                f"one map to compare; "
                f"record them, and take a call: hw.record(model), recording[…].call(0)."
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
    """One pass over a group of texts, these rows alone kept."""
    sampler = RowSampler(positions, selected)
    MetricRunner(Accumulator(len(selected)), observers=[sampler]).run(model, [make_batch(samples, device=model.device)])
    return SampledRows(torch.cat(sampler.maps), torch.cat(sampler.v), torch.cat(sampler.z), len(samples))


def _by_head(x: Tensor) -> Tensor:
    """Texts one after the other, heads first, in at least float32: (B, h, r, ·) → (h, B·r, ·)."""
    return at_least_float32(x.transpose(0, 1).flatten(1, 2))


def _select_positions(x: Tensor, positions: list[int], first: Tensor) -> Tensor:
    """What stands at some places of each text, counted from its first token: (B, h, T, e) → (B, h, r, e)."""
    if not bool(first.any()):
        return x[:, :, positions]
    rows = first[:, None] + torch.tensor(positions, device=first.device)  # (B, r)
    return x.gather(2, rows[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


def _attention_rows_by_text(call: AttentionCall, positions: list[int], first: Tensor) -> Tensor:
    """`attention_rows` at places counted from each text's first token, whose key has column 0."""
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
    """Some rows of every head's map, and what the sink took of each: (B, H, r, S + 1)."""
    params, q = call.params, at_least_float32(call.q[:, :, positions])
    k = repeat_kv(call.k, params.kv_of_head).to(q)
    T, S = call.q.shape[2], k.shape[2]
    scores = raw_scores(q, k, params)  # (B, H, r, S)
    rows = [
        masked_scores(scores[:, :, n : n + 1], params, range(i, i + 1), range(S), T, S) for n, i in enumerate(positions)
    ]
    attention = softmax_weights(torch.cat(rows, 2), params, params.may_have_empty_rows(T, S))
    sink_weight = (
        (1 - attention.sum(-1, keepdim=True)).clamp(min=0)
        if params.sink is not None
        else torch.zeros_like(attention[..., :1])
    )
    return torch.cat((attention, sink_weight), -1)


class PairwiseAccumulator:
    """Sums over rows for all pairs of heads, (H, H), and the same for each head beside the others on another text."""

    def __init__(self, W_O: Tensor) -> None:
        self.W_O = W_O  # (H, e, D)
        self.rows, self.other_rows = 0, 0
        self.same_text = {
            name: np.zeros((len(W_O),) * 2) for name in ("js", "map_cosine", "position", "subspace", "output")
        }
        self.other_text = {name: np.zeros_like(sums) for name, sums in self.same_text.items()}
        self.squares = np.zeros(len(W_O))  # ‖P‖² of the rows that have another text

    def add(self, rows: SampledRows) -> None:
        """A group of texts. The next text of the group is the other one."""
        n, texts = rows.maps.shape[1], rows.texts
        keys = rows.maps[..., :-1]
        self.rows += n
        self.same_text["js"] += js_sums(rows.maps.flatten(1))
        pairs = [("map_cosine", keys), ("position", _normalize(keys)), ("subspace", _normalize(rows.v))]
        for name, x in pairs:
            self._add_products(name, x, texts)
        # What is written has D channels: a few rows at a time, the same of every text.
        z = rows.z.unflatten(1, (texts, -1))  # (H, B, r, e)
        for chunk in z.split(max(1, GROUP_TEXTS // texts), 2):
            self._add_products("output", _normalize(chunk.flatten(1, 2) @ self.W_O.to(z)), texts)
        if texts > 1:
            self.other_rows += n
            self.squares += keys.double().square().sum((1, 2)).cpu().numpy()
            self.other_text["js"] += np.diag(_js_per_head(rows.maps, _next_text(rows.maps, texts)))

    def _add_products(self, name: str, x: Tensor, texts: int) -> None:
        flat = x.flatten(1)
        self.same_text[name] += (flat @ flat.mT).double().cpu().numpy()
        if texts > 1:
            self.other_text[name] += (flat @ _next_text(x, texts).flatten(1).mT).double().cpu().numpy()

    def matrices(self) -> dict[str, np.ndarray]:
        """Means over rows; for whole maps, cosines."""
        result = {name: sums / self.rows for name, sums in self.same_text.items()}
        result["map_cosine"] = _cosines(self.same_text["map_cosine"], np.diag(self.same_text["map_cosine"]))
        return result

    def baselines(self) -> dict[str, np.ndarray]:
        """The same beside another text; NaN if there was only one. For js one number per head, as [a, b] of a alone."""
        if not self.other_rows:
            return {name: np.array(np.nan) for name in self.other_text}
        result = {name: (sums + sums.T) / 2 / self.other_rows for name, sums in self.other_text.items()}
        result["map_cosine"] = _cosines(
            (self.other_text["map_cosine"] + self.other_text["map_cosine"].T) / 2, self.squares
        )
        return result | {"js": np.diag(result["js"])[:, None]}


def js_sums(rows: Tensor) -> np.ndarray:
    """Σ over rows of the Jensen–Shannon divergence of every pair, in nats; rows laid end to end: (H, N) → (H, H)."""
    H = len(rows)
    rows = rows[:, (rows > 0).any(0)]  # places that no head looks at add nothing
    own, mixed = np.zeros(H), np.zeros((H, H))
    for part in rows.split(CHUNK_WEIGHTS, 1):
        own += _p_log_p(part)
        for a in range(H - 1):
            mixed[a, a + 1 :] += _p_log_p((part[a] + part[a + 1 :]) * 0.5)
    upper = np.triu((own[:, None] + own) / 2 - mixed, 1).clip(min=0)  # below 0 by rounding alone
    return upper + upper.T


def _js_per_head(rows: Tensor, others: Tensor) -> np.ndarray:
    """The same of each head's rows and others', head by head: (H, n, S) twice → (H,)."""
    divergences = [(_p_log_p(p) + _p_log_p(q)) / 2 - _p_log_p((p + q) * 0.5) for p, q in zip(rows, others, strict=True)]
    return np.array([row.sum() for row in divergences]).clip(min=0)


def _p_log_p(p: Tensor) -> np.ndarray:
    logs = p.clamp(min=torch.finfo(p.dtype).tiny).log_()
    return logs.mul_(p).sum(-1).double().cpu().numpy()


def cka(X: Tensor, Y: Tensor, debiased: bool = True) -> float:
    """How alike two sets of vectors are up to rotation and scale, (n, p) and (n, q): 1 the same; debiased, 0 by chance.

    https://arxiv.org/abs/1905.00414, debiased as in https://arxiv.org/abs/2010.15327

    >>> X = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    >>> round(cka(X, X.flip(1)), 4)
    1.0
    """
    return float(_pairwise_cka(X[None], Y[None], debiased)[0, 0])


def cka_matrix(features: Tensor) -> np.ndarray:
    """Debiased CKA of all pairs, without any n×n matrix: (H, n, e) → (H, H)."""
    return _pairwise_cka(features, features)


def permuted_cka_threshold(features: Tensor, seed: int, heads: int = 32, draws: int = 4) -> np.ndarray:
    """What 95 % of pairs stay below when the rows of one head are permuted; on some of the heads."""
    rng = np.random.default_rng(seed)
    subset = features[torch.from_numpy(rng.permutation(len(features))[:heads])]
    values = [
        _pairwise_cka(subset, subset[:, torch.from_numpy(rng.permutation(subset.shape[1]))]) for _ in range(draws)
    ]
    return np.array(np.nanquantile(values, 0.95) if not np.isnan(values).all() else np.nan)


def _pairwise_cka(X: Tensor, Y: Tensor, debiased: bool = True) -> np.ndarray:
    n = X.shape[1]
    if debiased and n < 4:
        return np.full((len(X), len(Y)), np.nan)
    same = X is Y
    X = X - X.mean(1, keepdim=True)
    Y = X if same else Y - Y.mean(1, keepdim=True)

    def independence(A: Tensor, B: Tensor) -> np.ndarray:
        """HSIC; debiased, of rows against *other* rows only. Of centred rows the sums over rows vanish."""
        cross = pairwise_gram_squared_norms(A) if A is B else pairwise_product_squared_norms(A.mT, B)
        if not debiased:
            return cross
        a, b = (x.double().square().sum(-1).cpu().numpy() for x in (A, B))  # (H, n): each row with itself
        return cross - n / (n - 2) * a @ b.T + np.outer(a.sum(1), b.sum(1)) / (n - 1) / (n - 2)

    own = [np.array([independence(x[None], x[None])[0, 0] for x in side]) for side in (X, Y)]
    return _cosines(independence(X, Y), *own)


def _cosines(products: np.ndarray, squares: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
    # A debiased square may fall below 0 where there is next to nothing: that has no direction.
    sizes = squares.clip(min=0)[:, None] * (squares if others is None else others).clip(min=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(sizes > 0, products / np.sqrt(sizes), np.nan)


def _normalize(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1, eps=torch.finfo(x.dtype).tiny)


def _next_text(x: Tensor, texts: int) -> Tensor:
    """Every text replaced by the next: (H, B·r, ·)."""
    return x.unflatten(1, (texts, -1)).roll(1, 1).flatten(1, 2)
