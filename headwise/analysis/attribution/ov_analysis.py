"""What heads write: OV eigenvalue score, promoted words, the share of each head in its layer's output."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.analysis.attribution.logit_attribution import LogitAttribution, capture_layer_inputs, logit_attribution
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.recording.attention_maps import attention_maps
from headwise.analysis.recording.batching import forward_batch, make_batches, reachable_hook_points, tokenizer_of
from headwise.analysis.recording.recording import record, select_heads
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.head_profile import HeadProfile
from headwise.errors import HeadwiseError
from headwise.heads.head import Circuit, Head, HeadPattern
from headwise.heads.hook_point import AttentionCall
from headwise.heads.per_head_output import PerHeadOutput
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.model import ModelProtocol, ResidualLayer, ResidualStream, eval_mode
from headwise.spec import Address

__all__ = [
    "LayerOutputFraction",
    "LogitAttribution",
    "TokenEffects",
    "ValueWeightedMap",
    "copying_scores",
    "logit_attribution",
    "output_shares",
    "token_effects",
    "top_context_token_effects",
    "value_weighted_map",
]


def copying_scores(model: ModelProtocol, heads: HeadPattern = "*") -> dict[str, float]:
    """OV eigenvalue score of each head: ReΣλ / Σ|λ| over the eigenvalues of W_V W_O, from −1 to 1.

    The score is 1 if W_V W_O maps every eigenvector to a positive multiple of itself, −1 if to a negative one
    (https://transformer-circuits.pub/2021/framework). Random weights give 0 with a standard deviation of about
    1.5 / head_dim. The eigenvectors are directions of the residual stream, not tokens: the score does not say what the head
    writes for the token it attends to. `direct_effects` measures that. Norms are left out. NaN if all eigenvalues are 0.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> -1 <= copying_scores(Transformer(preset("nano")), "5.1")["5.1"] <= 1
    True
    """
    scores = {}
    for head in model.heads.select(select_heads(heads, model.spec.head_addresses)):
        values = Circuit(head.W_V.detach().double(), head.W_O.detach().double()).eigenvalues()  # (e,), complex
        size = values.abs().sum()
        scores[str(head.address)] = float(values.real.sum() / size) if size > 0 else float("nan")
    return scores


class TokenEffects(NamedTuple):
    """What a head does with one token it looks at: the words it makes likelier and less likely, with their scores."""

    token: str
    promotes: list[tuple[str, float]]
    suppresses: list[tuple[str, float]]


def token_effects(
    model: ModelProtocol, head: str | Address, tokens: str | Sequence[int], k: int = 10, *, typical: bool = False,
    corpus: Any = None,
) -> list[TokenEffects]:  # fmt: skip
    """The words a head promotes and suppresses when it looks at nothing but a token, for each token given.

    The token's vector goes through the norm before the layer, W_V, W_O, the final norm's weight and the output layer (and
    where a norm stands behind attention, as in Gemma 3, through its weight). Two things are approximate. The vector: by
    default the bare embedding, which is what the first layer reads (positions left out) and less and less what later ones
    do; with `typical` the mean of what this layer reads where the token stands in a corpus. And the scale of norms behind
    the head, which depends on everything else: scores are right up to a positive factor.
    """
    head_view = _decoder_head(model, head)
    ids = (
        tokenizer_of(model).encode(tokens, add_special_tokens=False)
        if isinstance(tokens, str)
        else [int(i) for i in tokens]
    )
    if not ids:
        raise HeadwiseError("there is no token to look at; give a text or token ids.")
    with eval_mode(model), torch.no_grad():
        residual = model.residual_stream()
        residual_layer = residual.layers[head_view.address.layer]
        if residual_layer.unsupported_reason:
            raise HeadwiseError(
                f"what {head_view.address} promotes cannot be read off: {residual_layer.unsupported_reason}"
            )
        # (n, D)
        inputs = (
            _typical_inputs(model, head_view, ids, corpus)
            if typical
            else _bare_inputs(model, residual, residual_layer, ids)
        )
        inputs = at_least_float32(inputs)
        value = inputs @ head_view.W_V.to(inputs)
        value = value if head_view.b_V is None else value + head_view.b_V  # (n, e)
        scores = _to_logits(residual, residual_layer, value @ head_view.W_O.to(inputs))  # (n, V)
        k = min(k, scores.shape[1])
        up, down = scores.topk(k), scores.topk(k, largest=False)
    return [
        TokenEffects(
            _token_text(model, i),
            _with_token_texts(model, *_topk_row(up, row)),
            _with_token_texts(model, *_topk_row(down, row)),
        )
        for row, i in enumerate(ids)
    ]


def top_context_token_effects(
    model: ModelProtocol, head_profile: HeadProfile, k: int = 6, *, max_tokens: int = 3
) -> list[TokenEffects]:
    """The same for the first tokens of the words it was seen looking at hardest, so many of them; none if none was seen."""
    words = dict.fromkeys(context.attended for context in head_profile.top_contexts)
    first = (tokenizer_of(model).encode(f" {word}", add_special_tokens=False)[:1] for word in words)
    ids = list(dict.fromkeys(i for token_ids in first for i in token_ids))[:max_tokens]
    return token_effects(model, head_profile.address, ids, k) if ids else []


@dataclass(frozen=True, eq=False)
class ValueWeightedMap:
    """A head's map before and after weighing what is looked at by how much it brings: (words, words)."""

    query_words: tuple[str, ...]  # that look
    key_words: tuple[str, ...]  # that are looked at: others where a head looks across to a source
    attention: Tensor
    weighted: Tensor


def value_weighted_map(
    model: ModelProtocol, text: str, head: str | Address, *, words: bool = True, source: str | None = None
) -> ValueWeightedMap:
    """Attention times the length of what is brought, p_ij ‖v_j W_O‖, each row scaled to sum to 1.

    A look at a token whose value is next to nothing moves nothing (https://arxiv.org/abs/2004.10102). v_j holds its bias.
    `source` is what an encoder-decoder reads.
    """
    address = Address.parse(head) if isinstance(head, str) else head
    with record(model, address, tensors=("v", "map")) as recording:
        view = attention_maps(model, text, address, words=words, source=source)
    (query_groups, key_groups), head_recording = view.query_key_groups(address), recording[address]
    with torch.no_grad():
        v = at_least_float32(head_recording.v[0])
        lengths = (v @ model.heads[address].W_O.to(v)).norm(dim=-1)  # (S,): ‖v_j W_O‖
        weights = head_recording.map()[0] * lengths  # (T, S)
        total = weights.sum(-1, keepdim=True)
        weights = (weights / total.where(total > 0, 1.0)).float()
    by_words = query_groups.mean_matrix(weights) @ (weights @ key_groups.sum_matrix(weights))
    return ValueWeightedMap(query_groups.labels, key_groups.labels, view.map(address), by_words)


class LayerOutputFraction(NamedTuple):
    """A head's part in its layer's output: along the output, and by length. Each sums to 1 over the heads of a layer."""

    fraction: float  # mean of ⟨o_h, Σo⟩ / ‖Σo‖²; below 0 where a head writes against the others
    norm_fraction: float  # mean of ‖o_h‖ / Σ‖o‖
    rows: int


def output_shares(
    model: ModelProtocol, corpus: Any = None, *, max_length: int | None = None, batch_tokens: int = 4096
) -> dict[str, LayerOutputFraction]:
    """How much of its layer's output each head carries through W_O, mean over the tokens of a corpus.

    The bias b_O is nobody's. One streaming pass; nothing of the shape (B, T, H, D) is built.
    """
    hook_points = reachable_hook_points(model)
    starts = dict(zip(hook_points, _offsets([len(hook_point.head_ids) for hook_point in hook_points]), strict=True))
    accumulator = Accumulator(sum(len(hook_point.head_ids) for hook_point in hook_points))
    with eval_mode(model), torch.no_grad():
        for batch in make_batches(TokenizedCorpus.of(model, corpus, max_length), batch_tokens, device=model.device):
            buckets = [sample.bucket for sample in batch.samples]

            def on_call(
                call: AttentionCall, real_tokens: Tensor = batch.real_tokens, buckets: list[int] = buckets
            ) -> None:
                if call.z.shape[1]:
                    fractions, row_counts = _sum_output_shares(call, real_tokens)
                    heads = slice(starts[call.hook_point], starts[call.hook_point] + call.z.shape[1])
                    accumulator.add(("fraction", "norm_fraction"), heads, buckets, fractions, row_counts[:, None, None])

            with ExitStack() as stack:
                for hook_point in hook_points:
                    stack.enter_context(hook_point.listen(on_call))
                forward_batch(model, batch)
    addresses = [address for hook_point in hook_points for address in hook_point.head_addresses]
    if not addresses:
        return {}
    along, lengths = accumulator.mean("fraction"), accumulator.mean("norm_fraction")
    rows = accumulator.bucket_sums_and_counts("fraction")[1].sum(0)
    return {
        str(a): LayerOutputFraction(float(along[i]), float(lengths[i]), int(rows[i])) for i, a in enumerate(addresses)
    }


def _sum_output_shares(call: AttentionCall, real_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the rows of each text, (B, H, 2), and how many rows counted, (B,)."""
    z, W_O = at_least_float32(call.z), at_least_float32(call.hook_point.W_O)
    per_head = PerHeadOutput(z, W_O, None)
    layer_output = torch.einsum("bhte,hed->btd", z, W_O)  # (B, T, D)
    along = (torch.einsum("btd,hed->bhte", layer_output, W_O) * z).sum(-1)  # ⟨o_h, Σo⟩: (B, H, T)
    size = layer_output.square().sum(-1)  # (B, T)
    counts = real_tokens & (size > 0)  # a row to which nobody wrote has no shares
    lengths = per_head.head_norms()  # (B, H, T)
    along = along / size.where(counts, 1.0)[:, None]
    lengths = lengths / lengths.sum(1, keepdim=True).where(counts[:, None], 1.0)
    stacked = torch.stack((along, lengths), -1) * counts[:, None, :, None]  # (B, H, T, 2)
    return stacked.sum(2), counts.sum(1)


def _decoder_head(model: ModelProtocol, head: str | Address) -> Head:
    head_view = model.heads[head if isinstance(head, Address) else Address.parse(head)]
    if model.spec.norm_placement == "post" or model.spec.output != "lm" or head_view.address.stack in ("enc", "cross"):
        raise HeadwiseError(
            f"what {head_view.address} promotes cannot be read off: that takes a pre-norm decoder with a "
            f"language-model output, "
            f"and a head that reads its stream."
        )
    return head_view


def _bare_inputs(
    model: ModelProtocol, residual: ResidualStream, residual_layer: ResidualLayer, ids: list[int]
) -> Tensor:
    """The embeddings as the first layer reads them, positions left out: (n, D)."""
    if residual.embed is None:
        raise HeadwiseError(
            "between this model's table of tokens and its first layer stands more than positions that are added, so bare "
            "embeddings are not what is read; give typical=True."
        )
    x = residual.embed(torch.tensor(ids, device=model.device))  # (n, D)
    return x if residual_layer.norm is None else residual_layer.norm(x)


def _typical_inputs(model: ModelProtocol, head_view: Head, ids: list[int], corpus: Any) -> Tensor:
    """The mean of what the layer reads where each token stands in a corpus: (n, D)."""
    token_ids = torch.tensor(ids, device=model.device)
    sums, counts = torch.zeros(len(ids), model.spec.width, dtype=torch.double), torch.zeros(len(ids))
    layer = next(
        layer for layer in model.attention_layers() if layer.hook_point.address == head_view.address.layer_address
    )
    for batch in make_batches(TokenizedCorpus.of(model, corpus), device=model.device):
        with capture_layer_inputs(layer) as captured:
            forward_batch(model, batch)
        is_token = (batch.ids[..., None] == token_ids) & batch.real_tokens[..., None]  # (B, T, n)
        sums += torch.einsum("btn,btd->nd", is_token.double(), captured[0].double()).cpu()
        counts += is_token.sum((0, 1)).cpu()
    missing = [_token_text(model, i) for i, count in zip(ids, counts.tolist(), strict=True) if not count]
    if missing:
        raise HeadwiseError(
            f"{', '.join(map(repr, missing))} does not stand in the corpus; give corpus=… where it does, or typical=False."
        )
    return at_least_float32((sums / counts[:, None]).to(head_view.W_V))


def _to_logits(residual: ResidualStream, residual_layer: ResidualLayer, output: Tensor) -> Tensor:
    """Scores of all words, up to the scale of norms on the way: (n, D) → (n, V)"""
    output = output if residual_layer.post_norm is None else residual_layer.post_norm.center_and_apply_gain(output)
    return residual.unembed(residual.norm.center_and_apply_gain(output))


def _topk_row(topk: Any, row: int) -> tuple[list[int], list[float]]:
    return topk.indices[row].tolist(), topk.values[row].tolist()


def _with_token_texts(model: ModelProtocol, ids: list[int], scores: list[float]) -> list[tuple[str, float]]:
    return [(_token_text(model, i), score) for i, score in zip(ids, scores, strict=True)]


def _token_text(model: ModelProtocol, id: int) -> str:
    """A token as it would be written, or its number if the vocabulary is longer than the tokenizer."""
    tokenizer = tokenizer_of(model)
    return tokenizer.backend.decode([id], skip_special_tokens=False) if id < len(tokenizer) else f"#{id}"


def _offsets(sizes: list[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]
