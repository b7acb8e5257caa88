"""Analysis of head outputs: OV eigenvalue score, promoted tokens, and the fraction of each head in its layer's output."""

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
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.head import Circuit, Head, HeadPattern
from headwise.heads.hook_point import AttentionCall
from headwise.heads.per_head_output import PerHeadOutput
from headwise.kernels.rounding_tolerance import at_least_float32, to_float64
from headwise.model import ModelProtocol, ResidualLayerModules, ResidualStream, eval_mode
from headwise.spec import Address

__all__ = [
    "LayerOutputFraction",
    "LogitAttribution",
    "TokenEffects",
    "ValueWeightedMap",
    "logit_attribution",
    "output_shares",
    "ov_eigenvalue_scores",
    "token_effects",
    "top_context_token_effects",
    "value_weighted_map",
]


def ov_eigenvalue_scores(model: ModelProtocol, heads: HeadPattern = "*") -> dict[str, float]:
    """Compute the OV eigenvalue score of each head: ReΣλ / Σ|λ| over the eigenvalues of W_V W_O, from −1 to 1.

    The score is 1 if W_V W_O maps every eigenvector to a positive multiple of itself, −1 if to a negative one
    (https://transformer-circuits.pub/2021/framework). Random weights give 0 with a standard deviation of about
    1.5 / head_dim. The eigenvectors are directions of the residual stream, not tokens, so the score does not measure the
    effect on the attended token; use `direct_effects` for that. Norms are ignored.

    Args:
        model: The model.
        heads: Head pattern. "*" selects all heads.

    Returns:
        Score of each head, by address. NaN if all eigenvalues are 0.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> -1 <= ov_eigenvalue_scores(Transformer(preset("nano")), "5.1")["5.1"] <= 1
    True
    """
    scores = {}
    for head in model.heads.select(select_heads(heads, model.spec.head_addresses)):
        read_width, written_width = head.W_V.shape[0], head.W_O.shape[1]
        if read_width != written_width:  # Zamba reads two vectors per token, and cross-attention may read another width
            raise UnsupportedModelError(
                f"model: the eigenvalues of W_V W_O of {head.address} are not defined, because its values are made from "
                f"vectors of width {read_width} and its output has width {written_width}. Ablate the head instead, for "
                f"example with hw.importance(model, corpus, heads='{head.address}')."
            )
        values = Circuit(to_float64(head.W_V.detach()), to_float64(head.W_O.detach())).eigenvalues()  # (e,), complex
        size = values.abs().sum()
        scores[str(head.address)] = float(values.real.sum() / size) if size > 0 else float("nan")
    return scores


class TokenEffects(NamedTuple):
    """Tokens that a head promotes and suppresses if it attends to one token.

    Attributes:
        token: The attended token.
        promotes: Tokens with the largest scores, with their scores.
        suppresses: Tokens with the smallest scores, with their scores.
    """

    token: str
    promotes: list[tuple[str, float]]
    suppresses: list[tuple[str, float]]


def token_effects(
    model: ModelProtocol, head: str | Address, tokens: str | Sequence[int], k: int = 10, *, typical: bool = False,
    corpus: Any = None,
) -> list[TokenEffects]:  # fmt: skip
    """List the tokens that a head promotes and suppresses if it attends only to a given token.

    The vector of the token passes through the norm before the layer, W_V, W_O, the gain of a norm after attention (as in
    Gemma 3), the gain of the final norm and the output layer.

    Limitations: the bare embedding approximates the input of later layers less well than that of the first layer. The
    scale of norms after the head depends on the rest of the residual stream, so scores are correct up to a positive factor.

    Args:
        model: A pre-norm decoder with a language-model output.
        head: Address of the head.
        tokens: Attended tokens, as text or token ids.
        k: Number of tokens to list in each direction.
        typical: Use the mean input of the layer at the token's occurrences in `corpus`, instead of the bare embedding
            without position.
        corpus: Texts for `typical`. None uses the default corpus of the model.

    Returns:
        Promoted and suppressed tokens for each token in `tokens`.
    """
    head_view = _decoder_head(model, head)
    ids = (
        tokenizer_of(model).encode(tokens, add_special_tokens=False)
        if isinstance(tokens, str)
        else [int(i) for i in tokens]
    )
    if not ids:
        raise ArgumentError(f"tokens: no tokens. Got {tokens!r}. Pass a non-empty text or token ids.")
    with eval_mode(model), torch.no_grad():
        residual = model.residual_stream()
        residual_layer = residual.layers[head_view.address.layer]
        if residual_layer.unsupported_reason:
            raise UnsupportedModelError(
                f"head {head_view.address}: promoted tokens cannot be computed: {residual_layer.unsupported_reason}"
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
    """List token effects for the first tokens of the words that the head attended to most in its profile.

    Args:
        model: A pre-norm decoder with a language-model output.
        head_profile: Profile of the head, with top contexts.
        k: Number of tokens to list in each direction.
        max_tokens: Maximum number of attended tokens.

    Returns:
        Token effects. Empty if the profile has no top contexts.
    """
    words = dict.fromkeys(context.attended for context in head_profile.top_contexts)
    first = (tokenizer_of(model).encode(f" {word}", add_special_tokens=False)[:1] for word in words)
    ids = list(dict.fromkeys(i for token_ids in first for i in token_ids))[:max_tokens]
    return token_effects(model, head_profile.address, ids, k) if ids else []


@dataclass(frozen=True, eq=False)
class ValueWeightedMap:
    """Attention map of a head, and the map weighted by the norm of the values: (words, words).

    Attributes:
        query_words: Words of the queries.
        key_words: Words of the keys. They differ from `query_words` in cross-attention.
        attention: Attention weights.
        weighted: Attention weights times ‖v_j W_O‖, rows normalized to 1.
    """

    query_words: tuple[str, ...]
    key_words: tuple[str, ...]
    attention: Tensor
    weighted: Tensor


def value_weighted_map(
    model: ModelProtocol, text: str, head: str | Address, *, words: bool = True, source: str | None = None
) -> ValueWeightedMap:
    """Compute attention weighted by value norms: p_ij ‖v_j W_O‖, each row normalized to 1.

    Attention to a token with a near-zero value has no effect on the output (https://arxiv.org/abs/2004.10102). v_j
    includes its bias.

    Args:
        model: The model to run.
        text: Input text.
        head: Address of the head.
        words: Sum tokens into words. False uses single tokens.
        source: Source text of an encoder-decoder.

    Returns:
        The attention map and the weighted map.
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
    """Fraction of a head in its layer's output. Each fraction sums to 1 over the heads of a layer.

    Attributes:
        fraction: Mean of ⟨o_h, Σo⟩ / ‖Σo‖². Negative if the head writes against the other heads.
        norm_fraction: Mean of ‖o_h‖ / Σ‖o‖.
        rows: Number of tokens.
    """

    fraction: float
    norm_fraction: float
    rows: int


def output_shares(
    model: ModelProtocol, corpus: Any = None, *, max_length: int | None = None, batch_tokens: int = 4096
) -> dict[str, LayerOutputFraction]:
    """Compute the fraction of each head in its layer's output, averaged over the tokens of a corpus.

    The bias b_O is assigned to no head. One streaming pass; no tensor of shape (B, T, H, D) is allocated.

    Args:
        model: The model to run.
        corpus: Texts. None uses the default corpus of the model.
        max_length: Plain text is split into chunks of this many tokens.
        batch_tokens: Maximum number of tokens per batch.

    Returns:
        Fractions of each head, by address.
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
    """Sum the fractions over the rows of each text, (B, H, 2), and count the rows, (B,)."""
    z, W_O = at_least_float32(call.z), at_least_float32(call.hook_point.W_O_for_listeners)
    per_head = PerHeadOutput(z, W_O, None)
    layer_output = torch.einsum("bhte,hed->btd", z, W_O)  # (B, T, D)
    along = (torch.einsum("btd,hed->bhte", layer_output, W_O) * z).sum(-1)  # ⟨o_h, Σo⟩: (B, H, T)
    size = layer_output.square().sum(-1)  # (B, T)
    counts = real_tokens & (size > 0)  # fractions are undefined for rows with zero output
    lengths = per_head.head_norms()  # (B, H, T)
    along = along / size.where(counts, 1.0)[:, None]
    lengths = lengths / lengths.sum(1, keepdim=True).where(counts[:, None], 1.0)
    stacked = torch.stack((along, lengths), -1) * counts[:, None, :, None]  # (B, H, T, 2)
    return stacked.sum(2), counts.sum(1)


def _decoder_head(model: ModelProtocol, head: str | Address) -> Head:
    head_view = model.heads[head if isinstance(head, Address) else Address.parse(head)]
    if model.spec.norm_placement == "post" or model.spec.output != "lm" or head_view.address.stack in ("enc", "cross"):
        raise UnsupportedModelError(
            f"head {head_view.address}: promoted tokens can only be computed for self-attention heads of a pre-norm decoder "
            f"with a language-model output. Got norm_placement={model.spec.norm_placement!r}, "
            f"output={model.spec.output!r}."
        )
    return head_view


def _bare_inputs(
    model: ModelProtocol, residual: ResidualStream, residual_layer: ResidualLayerModules, ids: list[int]
) -> Tensor:
    """Return the embeddings as the first layer reads them, without positions: (n, D)."""
    if residual.embed is None:
        raise UnsupportedModelError(
            "typical=False: this model changes embeddings before the first layer by more than adding positions, so the bare "
            "embedding is not the input of the layer. Use typical=True."
        )
    x = residual.embed(torch.tensor(ids, device=model.device))  # (n, D)
    return x if residual_layer.norm is None else residual_layer.norm(x)


def _typical_inputs(model: ModelProtocol, head_view: Head, ids: list[int], corpus: Any) -> Tensor:
    """Return the mean input of the layer at the occurrences of each token in a corpus: (n, D)."""
    token_ids = torch.tensor(ids, device=model.device)
    sums, counts = (
        torch.zeros(len(ids), model.spec.width, dtype=torch.double, device="cpu"),
        torch.zeros(len(ids), device="cpu", dtype=torch.float32),
    )
    layer = next(
        layer for layer in model.attention_layers() if layer.hook_point.address == head_view.address.layer_address
    )
    for batch in make_batches(TokenizedCorpus.of(model, corpus), device=model.device):
        with capture_layer_inputs(layer) as captured:
            forward_batch(model, batch)
        is_token = (batch.ids[..., None] == token_ids) & batch.real_tokens[..., None]  # (B, T, n)
        sums += torch.einsum("btn,btd->nd", to_float64(is_token), to_float64(captured[0])).cpu()
        counts += is_token.sum((0, 1)).cpu()
    missing = [_token_text(model, i) for i, count in zip(ids, counts.tolist(), strict=True) if not count]
    if missing:
        raise ArgumentError(
            f"corpus: does not contain the token {', '.join(map(repr, missing))}. Pass a corpus= that contains it, or use "
            f"typical=False."
        )
    return at_least_float32((sums / counts[:, None]).to(head_view.W_V))


def _to_logits(residual: ResidualStream, residual_layer: ResidualLayerModules, output: Tensor) -> Tensor:
    """Return the scores of all tokens, up to the scale of the norms after the head: (n, D) → (n, V)."""
    output = output if residual_layer.post_norm is None else residual_layer.post_norm.center_and_apply_gain(output)
    return residual.unembed(residual.norm.center_and_apply_gain(output))


def _topk_row(topk: Any, row: int) -> tuple[list[int], list[float]]:
    return topk.indices[row].tolist(), topk.values[row].tolist()


def _with_token_texts(model: ModelProtocol, ids: list[int], scores: list[float]) -> list[tuple[str, float]]:
    return [(_token_text(model, i), score) for i, score in zip(ids, scores, strict=True)]


def _token_text(model: ModelProtocol, id: int) -> str:
    """Return a token's text, or #id if the vocabulary is larger than the tokenizer."""
    tokenizer = tokenizer_of(model)
    return tokenizer.backend.decode([id], skip_special_tokens=False) if id < len(tokenizer) else f"#{id}"


def _offsets(sizes: list[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]
