"""Why a token looked there: a score shared out among pairs of parts, one in the stream at the query, one at the key.

A score is a bilinear form. With the norm's scale frozen at what it was, the query is a sum over what had been written into
the stream at its token (the embedding, every earlier head, every MLP, biases), and so is the key; so the score is a sum over
pairs of parts, exactly (https://transformer-circuits.pub/2021/framework). Softmax sees differences of scores alone: what is
the same for every key moves nothing, and `relative_to_mean=True` leaves it out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.analysis.attribution.backward_path_trace import AttentionPathStep, trace_path
from headwise.analysis.attribution.logit_attribution import as_ids
from headwise.analysis.attribution.qk_norm_rotary import ROUNDINGS, QKNormRotaryTransform, infer_qk_transform
from headwise.analysis.attribution.residual_parts import ResidualParts, num_roundings_before_layer
from headwise.analysis.recording.attention_maps import TokenGroups, Word
from headwise.analysis.recording.batching import tokenizer_of
from headwise.errors import HeadwiseError
from headwise.heads import Head
from headwise.kernels.rounding_tolerance import rounding_bound
from headwise.kernels.score_params import masked_scores
from headwise.model import ModelProtocol
from headwise.spec import Address

TOLERANCE = 1e-3  # relative to the largest of the score and the pairs
POSITION_BIAS = "position bias"


class ScoreTerm(NamedTuple):
    """What a part of the stream at the query and one at the key add to the score; `fraction` is of the sum of all sizes."""

    query: str
    key: str
    score: float
    fraction: float


@dataclass(frozen=True, eq=False)
class ScoreAttribution:
    """One score of one head, shared out. `total` is the sum of all pairs, `score` what the model itself computed."""

    text: str
    head: str
    query_token: str
    key_token: str
    weight: float  # the attention there
    score: float
    pair_scores: Tensor  # (parts at the query, parts at the key), float64
    part_names: tuple[str, ...]  # of the parts, the same on both sides
    position_bias: float  # what a bias by distance adds; 0 where there is none
    relative_to_mean: bool  # whether all of it is above the mean over the visible keys
    path: tuple[AttentionPathStep, ...]  # the strongest pair, followed back to the tokens it began at
    rounding: float = 0.0  # bound on the rounding error of `score` in the model's dtype

    @property
    def total(self) -> float:
        """The sum of all pairs."""
        return float(self.pair_scores.sum()) + self.position_bias

    @property
    def relative_error(self) -> float:
        """How far the sum is from the model's own score, beside the largest of the score and the pairs."""
        return abs(self.total - self.score) / self._largest

    @property
    def is_complete(self) -> bool:
        """Whether the pairs add up to the model's score, within its rounding."""
        return abs(self.total - self.score) <= max(TOLERANCE * self._largest, self.rounding)

    @property
    def _largest(self) -> float:
        return max(abs(self.score), float(self.pair_scores.abs().max()), abs(self.position_bias), 1e-30)

    @cached_property
    def pairs(self) -> tuple[ScoreTerm, ...]:
        """All pairs, the largest first, for or against."""
        size = max(float(self.pair_scores.abs().sum()) + abs(self.position_bias), 1e-30)
        score_terms = (
            [ScoreTerm(POSITION_BIAS, POSITION_BIAS, self.position_bias, self.position_bias / size)]
            if self.position_bias
            else []
        )
        scores = self.pair_scores.tolist()
        score_terms += [
            ScoreTerm(query, key, score, score / size)
            for query, row in zip(self.part_names, scores, strict=True)
            for key, score in zip(self.part_names, row, strict=True)
        ]
        return tuple(sorted(score_terms, key=lambda pair: -abs(pair.score)))

    def side_totals(self, side: str) -> list[tuple[str, float]]:
        """What each part at the query adds, whatever it meets, or each part at the key: the largest first."""
        if side not in ("query", "key"):
            raise HeadwiseError(f"a side is 'query' or 'key', got {side!r}.")
        sums = self.pair_scores.sum(1 if side == "query" else 0).tolist()
        return sorted(zip(self.part_names, sums, strict=True), key=lambda part: -abs(part[1]))

    def pair_rank(self, query: str, key: str) -> int:
        """At which place a pair stands, from 1."""
        for index, pair in enumerate(self.pairs):
            if (pair.query, pair.key) == (query, key):
                return index + 1
        raise HeadwiseError(f"there is no pair of {query!r} and {key!r}; parts are {', '.join(self.part_names[:6])}, …")

    def to_dict(self, max_pairs: int = 20) -> dict[str, Any]:
        """As plain data, with so many of its pairs."""
        data = {
            name: getattr(self, name)
            for name in ("text", "head", "query_token", "key_token", "weight", "score", "total", "relative_error")
        }
        path = [step._asdict() for step in self.path]
        return {
            **data,
            "relative_to_mean": self.relative_to_mean,
            "pairs": [pair._asdict() for pair in self.pairs[:max_pairs]],
            "path": path,
        }


@torch.no_grad()
def explain(
    model: ModelProtocol,
    text: str | Sequence[int] | Tensor,
    head: str | Address,
    query: Word,
    key: Word | None = None,
    *,
    relative_to_mean: bool = False,
    words: bool = True,
) -> ScoreAttribution:
    """Share out the score with which `query` looks at `key` in a head: a word each, "the#2", or its place in the text.

    Of a word of several tokens the last one looks, and the most attended one is looked at; without `key` it is the most
    attended word; words=False keeps tokens apart. With `relative_to_mean` it is the lead of that score over the mean of all
    that the token sees. For decoders whose stream is a sum; others are refused, with the reason.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> attribution = explain(Transformer(preset("nano")), [72, 105, 33], "2.1", query=2, key=0)
    >>> names = attribution.part_names
    >>> attribution.is_complete, len(names), names[:2], names[-1]
    (True, 16, ('embedding', '0.0'), 'biases')
    """
    address = Address.parse(head) if isinstance(head, str) else head
    head_view = model.heads[address]
    groups = _token_groups(model, text, words)
    ids = as_ids(model, text)
    query_position = groups.tokens[groups.find(query)][-1]
    residual_parts = ResidualParts.of(model, ids, address.layer)
    call = residual_parts.recording[address].only_call
    weights = call.map(rows=query_position)[0, 0].float()  # (T,)
    scale, bias, visible = _score_params(call, query_position)
    key_group = groups.find(key) if key is not None else _most_attended(groups, weights)
    key_position = max(groups.tokens[key_group], key=lambda token: float(weights[token]))
    if key_position not in visible:
        raise HeadwiseError(
            f"{groups.unique_labels[groups.find(query)]!r} cannot see {groups.unique_labels[key_group]!r} in {address}."
        )
    keys = visible if relative_to_mean else [key_position]
    transform = _qk_transform(residual_parts, address)
    names, query_parts = _project_parts(residual_parts, transform, head_view, "q", [query_position])  # (P, 1, d)
    _, key_parts = _project_parts(residual_parts, transform, head_view, "k", keys)  # (P, S, d)
    all_scores = scale * torch.einsum("ad,bsd->sab", query_parts[:, 0], key_parts)  # (S, P, P)
    key_index = keys.index(key_position)
    model_score = scale * float(call.q[0, query_position].double() @ call.k[0, key_position].double()) + float(
        bias[key_position]
    )
    pair_scores, position_bias = all_scores[key_index], float(bias[key_position])
    if relative_to_mean:
        pair_scores = pair_scores - all_scores.mean(0)
        position_bias -= float(bias[visible].mean())
        scores = scale * (call.k[0, visible].double() @ call.q[0, query_position].double()) + bias[visible]
        model_score -= float(scores.mean())
    best = divmod(int(pair_scores.abs().argmax()), len(names))
    path = _trace_pair(
        residual_parts,
        transform,
        head_view,
        names,
        best,
        query_parts,
        key_parts[:, key_index],
        (query_position, key_position),
        scale,
    )
    named_path = tuple(_with_token_names(groups, step) for step in path)
    label_text = text if isinstance(text, str) else " ".join(groups.labels)
    query_name, key_name = groups.unique_labels[groups.find(query)], groups.unique_labels[key_group]
    return ScoreAttribution(
        label_text, str(address), query_name, key_name, float(weights[key_position]), model_score, pair_scores,
        tuple(names), position_bias, relative_to_mean, named_path,
        _rounding(call, address.layer, query_position, keys) * abs(scale),
    )  # fmt: skip


def _score_params(call: Any, row: int) -> tuple[float, Tensor, list[int]]:
    """The scale of scores, the bias of a row over all keys, (S,), and which keys it sees; capped scores are no sum."""
    (T, S), params = call._call.sizes, call._call.params
    if params.softcap is not None:
        raise HeadwiseError("scores of this model are capped by a tanh, so they are no sum over pairs of parts.")
    index = call._index
    head_params = params.for_heads(
        range(index, index + 1), range(params.kv_of_head[index], params.kv_of_head[index] + 1)
    )
    blank = torch.zeros(1, 1, 1, S, dtype=torch.double, device=call.q.device)
    # (S,): −inf where nothing is seen
    bias = masked_scores(blank, head_params, range(row, row + 1), range(S), T, S)[0, 0, 0]
    visible = torch.isfinite(bias).nonzero()[:, 0].tolist()
    return params.scale, bias, visible


def _rounding(call: Any, layer: int, query_position: int, keys: list[int]) -> float:
    """Bound the rounding error of q·k: relative to |q||k|, over the roundings that the query and the key went through."""
    q, k = call.q[0, query_position].double(), call.k[0, keys].double()  # (d,), (n, d)
    return rounding_bound(call.q.dtype, 2 * (num_roundings_before_layer(layer) + ROUNDINGS)) * float(
        q.norm() * k.norm(dim=1).max()
    )


def _qk_transform(residual_parts: ResidualParts, head: Address) -> QKNormRotaryTransform:
    """What stood between W_Q, W_K and the scores of a head's layer in this pass."""
    layer, inputs = residual_parts.layer_of(head), residual_parts.read.double()  # (T, D)
    residual_parts.check_parts_sum(head.layer)
    heads = list(residual_parts.model.heads.select(layer.hook_point.head_addresses))
    reader_of_kv = {head_view.kv_index: head_view for head_view in reversed(heads)}  # one head for each key head
    kv_readers = [reader_of_kv[i] for i in sorted(reader_of_kv)]
    projected = {
        "q": torch.stack([_project(inputs, head_view.W_Q, head_view.b_Q) for head_view in heads]),  # (H, T, d)
        "k": torch.stack([_project(inputs, head_view.W_K, head_view.b_K) for head_view in kv_readers]),  # (K, T, d)
    }
    score_inputs = {
        "q": torch.cat([residual_parts.recording[head_view.address].only_call.q for head_view in heads]).double(),
        "k": torch.cat([residual_parts.recording[head_view.address].only_call.k for head_view in kv_readers]).double(),
    }
    return infer_qk_transform(layer, projected, score_inputs, residual_parts.read.dtype)


def _project(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    projected = inputs @ weight.double()  # (T, d)
    return projected if bias is None else projected + bias.double()


def _project_parts(
    residual_parts: ResidualParts,
    transform: QKNormRotaryTransform,
    head_view: Head,
    projection: str,
    positions: list[int],
) -> tuple[list[str], Tensor]:
    """What each part brings to one head's query, or key, at some positions: names, (P, n, d)."""
    names, inputs = residual_parts.layer_input_parts(head_view.address.layer, positions)  # (P, n, D)
    weight, bias = (head_view.W_Q, head_view.b_Q) if projection == "q" else (head_view.W_K, head_view.b_K)
    projected = inputs @ weight.double()  # (P, n, d)
    if bias is not None:
        projected[-1] += bias.double()  # the biases come last
    return names, transform.apply(
        projection, head_view.index if projection == "q" else head_view.kv_index, projected, positions
    )


def _trace_pair(
    residual_parts: ResidualParts, transform: QKNormRotaryTransform, head_view: Head, names: list[str], best: tuple[int, int],
    query_parts: Tensor, key_parts: Tensor, positions: tuple[int, int], scale: float,
) -> list[AttentionPathStep]:  # fmt: skip
    """The strongest pair followed back on both sides: each side's part by the direction that the other side reads."""
    query, key = best
    layer = head_view.address.layer
    steps = []
    for side, projection, name, position, other in (
        ("query", "q", names[query], positions[0], key_parts[key]),
        ("key", "k", names[key], positions[1], query_parts[query, 0]),
    ):
        weight = (head_view.W_Q if projection == "q" else head_view.W_K).double()  # (D, d)
        identity = torch.eye(weight.shape[1], dtype=torch.double, device=weight.device)[:, None]  # (d, 1, d)
        index = head_view.index if projection == "q" else head_view.kv_index
        # (d, d): rows are channels before turning
        rotated = transform.apply(projection, index, identity, [position])[:, 0]
        direction = scale * weight @ (rotated @ other)  # (D,)
        steps += trace_path(residual_parts, side, name, layer, position, direction)
    return steps


def _token_groups(model: ModelProtocol, text: str | Sequence[int] | Tensor, words: bool) -> TokenGroups:
    """What is named in a text: its words or tokens; of ids, every token by its place."""
    if isinstance(text, str):
        return TokenGroups.of(tokenizer_of(model).align(text), words)
    ids = as_ids(model, text)[0].tolist()
    tokenizer: Any = model.tokenizer
    labels = tuple(str(i) if tokenizer is None else tokenizer.token(i) for i in ids)
    return TokenGroups(labels, tuple((i,) for i in range(len(ids))), (False,) * len(ids))


def _most_attended(groups: TokenGroups, weights: Tensor) -> int:
    return int((weights @ groups.sum_matrix(weights)).argmax())


def _with_token_names(groups: TokenGroups, step: AttentionPathStep) -> AttentionPathStep:
    """The same with tokens as a person reads them."""

    def name(token: int) -> str:
        return next(groups.unique_labels[i] for i, tokens in enumerate(groups.tokens) if token in tokens)

    source_name = None if step.source_token is None else name(int(step.source_token))
    return step._replace(token=name(int(step.token)), source_token=source_name)
