"""Attribute an attention score to pairs of parts, one of the residual stream at the query and one at the key.

A score is a bilinear form. With frozen norm scales, the query is a sum over the parts of the residual stream at its token
(embedding, earlier heads, MLPs, biases), and so is the key. The score is therefore exactly a sum over pairs of parts
(https://transformer-circuits.pub/2021/framework). The softmax depends only on differences of scores; `relative_to_mean=True`
subtracts the part that is equal for all keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.analysis.attribution.logit_attribution import as_ids
from headwise.analysis.attribution.qk_norm_rotary import (
    ROUNDINGS,
    QKNormRotaryTransform,
    infer_qk_transform,
    native_qk_transform,
)
from headwise.analysis.attribution.residual_parts import ResidualParts, num_roundings_before_layer
from headwise.analysis.attribution.score_path_trace import AttentionPathStep, trace_part_to_origin
from headwise.analysis.recording.attention_maps import TokenGroups, Word
from headwise.analysis.recording.batching import tokenizer_of
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads import Head, MultiHeadAttention
from headwise.kernels.rounding_tolerance import has_float64, rounding_bound, to_float64, without_autocast
from headwise.kernels.score_params import add_bias_and_mask
from headwise.model import ModelProtocol
from headwise.spec import Address

TOLERANCE = 1e-3  # relative to the largest of the score and the pairs
POSITION_BIAS = "position bias"


class ScoreTerm(NamedTuple):
    """Contribution of one pair of parts to a score.

    Attributes:
        query: Part of the residual stream at the query token.
        key: Part of the residual stream at the key token.
        score: Contribution to the score.
        fraction: `score` divided by the sum of absolute contributions of all pairs.
    """

    query: str
    key: str
    score: float
    fraction: float


@dataclass(frozen=True, eq=False)
class ScoreAttribution:
    """Attribution of one attention score of one head to pairs of parts.

    Attributes:
        text: The input text.
        head: Address of the head.
        query_token: Word or token of the query.
        key_token: Word or token of the key.
        weight: Attention weight of the query on the key.
        score: Score computed by the model.
        pair_scores: Contribution of each pair, (query parts, key parts), float64.
        part_names: Names of the parts, equal on both axes of `pair_scores`.
        position_bias: Contribution of a position bias. 0 for a model without position bias.
        relative_to_mean: Whether all values are relative to the mean over visible keys.
        path: The largest pair, traced back to its source tokens.
        rounding: Bound on the rounding error of `score` in the model's dtype.
    """

    text: str
    head: str
    query_token: str
    key_token: str
    weight: float
    score: float
    pair_scores: Tensor
    part_names: tuple[str, ...]
    position_bias: float
    relative_to_mean: bool
    path: tuple[AttentionPathStep, ...]
    rounding: float = 0.0

    def __repr__(self) -> str:
        from headwise.ui.result_text import score_attribution_table

        return score_attribution_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import score_attribution_table

        return score_attribution_table(self).as_html()

    @property
    def total(self) -> float:
        """Sum of all pairs and the position bias. Equals `score` up to rounding."""
        return float(self.pair_scores.sum()) + self.position_bias

    @property
    def relative_error(self) -> float:
        """|total − score| relative to the largest of |score| and the contributions."""
        return abs(self.total - self.score) / self._largest

    @property
    def is_complete(self) -> bool:
        """Whether the pairs add up to the model's score within its rounding error."""
        return abs(self.total - self.score) <= max(TOLERANCE * self._largest, self.rounding)

    @property
    def _largest(self) -> float:
        return max(abs(self.score), float(self.pair_scores.abs().max()), abs(self.position_bias), 1e-30)

    @cached_property
    def pairs(self) -> tuple[ScoreTerm, ...]:
        """All pairs, largest absolute contribution first."""
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
        """Return the total contribution of each part on one side, largest absolute value first.

        Args:
            side: "query" or "key".
        """
        if side not in ("query", "key"):
            raise ArgumentError(f"side: must be 'query' or 'key'. Got {side!r}.")
        sums = self.pair_scores.sum(1 if side == "query" else 0).tolist()
        return sorted(zip(self.part_names, sums, strict=True), key=lambda part: -abs(part[1]))

    def pair_rank(self, query: str, key: str) -> int:
        """Return the rank of a pair by absolute contribution, from 1."""
        for index, pair in enumerate(self.pairs):
            if (pair.query, pair.key) == (query, key):
                return index + 1
        raise ArgumentError(
            f"query, key: at least one of these parts of the model is unknown. Got query={query!r} and key={key!r}. "
            f"Known parts: {', '.join(self.part_names[:6])}, … The attribute part_names of this object lists all of them."
        )

    def to_dict(self, max_pairs: int = 20) -> dict[str, Any]:
        """Return plain data for JSON, with the `max_pairs` largest pairs."""
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


@without_autocast
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
    """Explain an attention score: attribute it to pairs of parts of the residual stream.

    Args:
        model: A decoder whose residual stream is a sum (pre-norm).
        text: A text, or token ids of one text.
        head: Address of the head, for example `"5.1"`.
        query: The query: a word, a word with its occurrence (`"the#2"`), or its index in the text. The last token of a
            word is used.
        key: The key, given like `query`. The most attended token of a word is used. None uses the most attended word.
        relative_to_mean: Subtract the mean score over all keys visible to the query.
        words: Treat tokens of one word as a unit. False uses single tokens.

    Returns:
        Contribution of each pair of parts, and the largest pair traced back to its source tokens.

    Raises:
        ArgumentError: If the query cannot attend to the key, for example because of the causal mask.
        UnsupportedModelError: If the scores of the model are not a sum over pairs of parts.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> attribution = explain(Transformer(preset("nano")), [72, 105, 33], "2.1", query=2, key=0)
    >>> names = attribution.part_names
    >>> attribution.is_complete, len(names), names[:2], names[-1]
    (True, 16, ('embedding', '0.0'), 'biases')
    """
    address = Address.parse(head) if isinstance(head, str) else head
    head_view = model.heads[address]
    groups = _token_groups(model, text, words=words)
    ids = as_ids(model, text)
    query_position = groups.tokens[groups.find(query)][-1]
    residual_parts = ResidualParts.of(model, ids, address.layer)
    call = residual_parts.recording[address].only_call
    weights = call.map(rows=query_position)[0, 0].float()  # (T,)
    scale, bias, visible = _score_params(call, query_position)
    key_group = groups.find(key) if key is not None else _most_attended_group(groups, weights)
    key_position = max(groups.tokens[key_group], key=lambda token: float(weights[token]))
    if key_position not in visible:
        query_label, key_label = groups.unique_labels[groups.find(query)], groups.unique_labels[key_group]
        raise ArgumentError(
            f"key: hidden from the query by the attention mask of {address}. Got query {query_label!r} and key "
            f"{key_label!r}. Choose a key that the query can attend to."
        )
    keys = visible if relative_to_mean else [key_position]
    transform = _qk_transform(residual_parts, address)
    names, query_parts = _project_parts(residual_parts, transform, head_view, "q", [query_position])  # (P, 1, d)
    _, key_parts = _project_parts(residual_parts, transform, head_view, "k", keys)  # (P, S, d)
    all_scores = scale * torch.einsum("ad,bsd->sab", query_parts[:, 0], key_parts)  # (S, P, P)
    key_index = keys.index(key_position)
    model_score = scale * float(to_float64(call.q[0, query_position]) @ to_float64(call.k[0, key_position])) + float(
        bias[key_position]
    )
    pair_scores, position_bias = all_scores[key_index], float(bias[key_position])
    if relative_to_mean:
        pair_scores = pair_scores - all_scores.mean(0)
        position_bias -= float(bias[visible].mean())
        scores = scale * (to_float64(call.k[0, visible]) @ to_float64(call.q[0, query_position])) + bias[visible]
        model_score -= float(scores.mean())
    best = divmod(int(pair_scores.abs().argmax()), len(names))
    path = _trace_pair_to_sources(
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
    """Return the scale of scores, the bias of a row over all keys, (S,), and the visible keys."""
    (T, S), params = call._call.sizes, call._call.params
    if params.softcap is not None:
        raise UnsupportedModelError(
            "model: its attention scores are soft-capped by a tanh. Such a score is not a sum, so it cannot be attributed to "
            "pairs of parts (embedding, heads, MLPs). Use a model without soft-capping."
        )
    index = call._index
    head_params = params.for_heads(
        range(index, index + 1), range(params.kv_of_head[index], params.kv_of_head[index] + 1)
    )
    device = call.q.device
    blank = torch.zeros(1, 1, 1, S, dtype=torch.double if has_float64(device) else torch.float32, device=device)
    # (S,): −inf at hidden keys
    bias = to_float64(add_bias_and_mask(blank, head_params, range(row, row + 1), range(S), T, S)[0, 0, 0])
    visible = torch.isfinite(bias).nonzero()[:, 0].tolist()
    return params.scale, bias, visible


def _rounding(call: Any, layer: int, query_position: int, keys: list[int]) -> float:
    """Bound the rounding error of q·k, relative to |q||k|, from the number of roundings of query and key."""
    q, k = to_float64(call.q[0, query_position]), to_float64(call.k[0, keys])  # (d,), (n, d)
    return rounding_bound(call.q.dtype, 2 * (num_roundings_before_layer(layer) + ROUNDINGS)) * float(
        q.norm() * k.norm(dim=1).max()
    )


def _qk_transform(residual_parts: ResidualParts, head: Address) -> QKNormRotaryTransform:
    """Infer the transform between W_Q, W_K and the scores of a head's layer in this pass."""
    layer, inputs = residual_parts.layer_of(head), to_float64(residual_parts.read)  # (T, D)
    residual_parts.check_parts_sum(head.layer)
    heads = list(residual_parts.model.heads.select(layer.hook_point.head_addresses))
    reader_of_kv = {head_view.kv_index: head_view for head_view in reversed(heads)}  # one query head per KV head
    kv_readers = [reader_of_kv[i] for i in sorted(reader_of_kv)]
    projected = {
        "q": torch.stack([_project(inputs, head_view.W_Q, head_view.b_Q) for head_view in heads]),  # (H, T, d)
        "k": torch.stack([_project(inputs, head_view.W_K, head_view.b_K) for head_view in kv_readers]),  # (K, T, d)
    }
    score_inputs = {
        "q": to_float64(torch.cat([residual_parts.recording[head_view.address].only_call.q for head_view in heads])),
        "k": to_float64(
            torch.cat([residual_parts.recording[head_view.address].only_call.k for head_view in kv_readers])
        ),
    }
    if isinstance(layer, MultiHeadAttention) and (layer.q_norm is not None or layer.spec.query_scaling is not None):
        return native_qk_transform(layer, projected, residual_parts.read)
    return infer_qk_transform(layer, projected, score_inputs, residual_parts.read.dtype)


def _project(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    projected = inputs @ to_float64(weight)  # (T, d)
    return projected if bias is None else projected + to_float64(bias)


def _project_parts(
    residual_parts: ResidualParts,
    transform: QKNormRotaryTransform,
    head_view: Head,
    projection: str,
    positions: list[int],
) -> tuple[list[str], Tensor]:
    """Return the contribution of each part to a head's query or key at some positions: names, (P, n, d)."""
    names, inputs = residual_parts.layer_input_parts(head_view.address.layer, positions)  # (P, n, D)
    weight, bias = (head_view.W_Q, head_view.b_Q) if projection == "q" else (head_view.W_K, head_view.b_K)
    projected = inputs @ to_float64(weight)  # (P, n, d)
    if bias is not None:
        projected[-1] += to_float64(bias)  # the biases are the last part
    return names, transform.apply(
        projection, head_view.index if projection == "q" else head_view.kv_index, projected, positions
    )


def _trace_pair_to_sources(
    residual_parts: ResidualParts, transform: QKNormRotaryTransform, head_view: Head, names: list[str], best: tuple[int, int],
    query_parts: Tensor, key_parts: Tensor, positions: tuple[int, int], scale: float,
) -> list[AttentionPathStep]:  # fmt: skip
    """Trace the largest pair back on both sides, each along the direction read by the other side."""
    query, key = best
    layer = head_view.address.layer
    steps = []
    for side, projection, name, position, other in (
        ("query", "q", names[query], positions[0], key_parts[key]),
        ("key", "k", names[key], positions[1], query_parts[query, 0]),
    ):
        weight = to_float64(head_view.W_Q if projection == "q" else head_view.W_K)  # (D, d)
        identity = torch.eye(weight.shape[1], dtype=torch.double, device=weight.device)[:, None]  # (d, 1, d)
        index = head_view.index if projection == "q" else head_view.kv_index
        # (d, d): rows are channels before rotation
        rotated = transform.apply(projection, index, identity, [position])[:, 0]
        direction = scale * weight @ (rotated @ other)  # (D,)
        steps += trace_part_to_origin(residual_parts, side, name, layer, position, direction)
    return steps


def _token_groups(model: ModelProtocol, text: str | Sequence[int] | Tensor, *, words: bool) -> TokenGroups:
    """Return the words or tokens of a text. Token ids become one group per token."""
    if isinstance(text, str):
        return TokenGroups.of(tokenizer_of(model).align(text), words)
    ids = as_ids(model, text)[0].tolist()
    tokenizer: Any = model.tokenizer
    labels = tuple(str(i) if tokenizer is None else tokenizer.token(i) for i in ids)
    return TokenGroups(labels, tuple((i,) for i in range(len(ids))), (False,) * len(ids))


def _most_attended_group(groups: TokenGroups, weights: Tensor) -> int:
    return int((weights @ groups.sum_matrix(weights)).argmax())


def _with_token_names(groups: TokenGroups, step: AttentionPathStep) -> AttentionPathStep:
    """Replace token positions in a step with their labels."""

    def name(token: int) -> str:
        return next(groups.unique_labels[i] for i, tokens in enumerate(groups.tokens) if token in tokens)

    source_name = None if step.source_token is None else name(int(step.source_token))
    return step._replace(token=name(int(step.token)), source_token=source_name)
