"""Scan of one text: the prediction, the layers at which it appears, and the heads and MLPs that write for it.

The logit lens (https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru) applies the final norm and the output layer to the residual
stream after each layer. Direct contributions are exact but leave out effects through later layers; the loss without a head
includes them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.attribution.logit_attribution import (
    AttributionTarget,
    CapturedComponents,
    LogitAttribution,
    as_ids,
    attribute_captured_logit,
    capture_residual,
    check_attributable,
    token_id,
)
from headwise.analysis.load_or_measure import find_default_corpus_profile
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.recording.recording import ModelRecording, SingleHeadRecording, record
from headwise.analysis.roles.profile_result import Profile
from headwise.errors import ArgumentError, HeadwiseError, UnsupportedModelError
from headwise.io.json_values import nonfinite_to_none
from headwise.kernels.rounding_tolerance import at_least_float32, to_float64
from headwise.model import ModelProtocol, ResidualStream, eval_mode
from headwise.progress import Progress, ProgressOption, callback_of, shows_progress
from headwise.spec import Address
from headwise.text import Tokenizer

TOP_TOKENS = 5  # most probable tokens listed
TOP_KEYS = 3  # keys listed per head, in addition to the first token
MIN_WEIGHT = 0.02  # smaller attention weights are not listed
BATCH_TOKENS = 2048  # tokens of one forward pass without heads
PROGRESS_LABEL = "loss without a head"


@dataclass(frozen=True)
class CandidateToken:
    """A token of the vocabulary and its probability as the next token.

    Attributes:
        token: Text of the token.
        id: Its id.
        probability: Its probability.
    """

    token: str
    id: int
    probability: float


@dataclass(frozen=True)
class LayerPrediction:
    """Prediction read from the residual stream after a layer (logit lens).

    Attributes:
        layer: Number of the layer. −1 is the embedding.
        top_token: Most probable token.
        top_probability: Its probability.
        probability: Probability of the answer.
        rank: Rank of the answer, 1 for the most probable token.
    """

    layer: int
    top_token: str
    top_probability: float
    probability: float
    rank: int


@dataclass(frozen=True)
class AttendedToken:
    """A token of the text that a head attends to.

    Attributes:
        position: Position of the token.
        token: Text of the token.
        weight: Attention weight.
    """

    position: int
    token: str
    weight: float


@dataclass(frozen=True)
class ScannedHead:
    """One head in a scan.

    Attributes:
        head: Address of the head.
        contribution: Direct contribution to the logit of the answer. None if the logit cannot be attributed.
        loss: Loss of the answer without the head, or 1 − cosine of the hidden states if the model predicts no tokens.
        loss_increase: Change of the loss without the head.
        prediction: Most probable token without the head.
        first_token_weight: Attention weight on the first token. None if the head has no row for the position.
        attended: The largest other attention weights, largest first.
        weights: All attention weights from the position, by position of the key.
        keys: "text", or "source" if the head attends to the source of an encoder-decoder.
        role: Role of the head in the profile, with its evidence level. Empty without a profile or a role.
    """

    head: str
    contribution: float | None
    loss: float = math.nan
    loss_increase: float = math.nan
    prediction: str = ""
    first_token_weight: float | None = None
    attended: tuple[AttendedToken, ...] = ()
    weights: tuple[float, ...] = ()
    keys: str = "text"
    role: str = ""


@dataclass(frozen=True)
class Scan:
    """Scan of one text. `scan.report("scan.html")` writes a page with the same content.

    Attributes:
        text: The text.
        tokens: Tokens of the text.
        source_tokens: Tokens of the source of an encoder-decoder.
        position: Position at which the model predicts.
        predictions: The most probable tokens. Empty if the model predicts no tokens.
        answer: Token that is explained: the most probable one unless another was given. None if the model predicts no tokens.
        loss: Loss of the answer, −log p, in nats.
        layers: Prediction after each layer. Empty if the residual stream cannot be read.
        attribution: Contribution of every head and MLP to the logit of the answer minus the mean logit. None if the logit
            cannot be attributed.
        heads: The heads with the largest contributions, largest first. Without attribution: those with the largest loss
            increase.
        profile_name: Corpus of the profile from which the roles come. Empty without a profile.
        notes: Reasons why a part is missing.
    """

    text: str
    tokens: tuple[str, ...]
    source_tokens: tuple[str, ...]
    position: int
    predictions: tuple[CandidateToken, ...]
    answer: CandidateToken | None
    loss: float
    layers: tuple[LayerPrediction, ...] = ()
    attribution: LogitAttribution | None = None
    heads: tuple[ScannedHead, ...] = ()
    profile_name: str = ""
    notes: tuple[str, ...] = ()

    @property
    def token(self) -> str:
        """Token at the position."""
        return self.tokens[self.position]

    @property
    def answer_layer(self) -> int | None:
        """First layer from which on the answer is the most probable token after every layer. None if there is none."""
        first = None
        for prediction in reversed(self.layers):
            if prediction.rank > 1:
                break
            first = prediction.layer
        return first

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, without numbers that are not finite."""
        data = asdict(replace(self, attribution=None)) | {"answer_layer": self.answer_layer}
        if self.attribution is not None:
            attribution = self.attribution
            data["attribution"] = asdict(attribution) | {"is_complete": attribution.is_complete}
        return nonfinite_to_none(data)

    def report(self, path: str | Path) -> Path:
        """Write the scan as one self-contained HTML page, atomically, and return its path.

        Args:
            path: Path of the page.
        """
        from headwise.ui.scan_page import write_scan_page

        return write_scan_page(self, path)

    def __repr__(self) -> str:
        from headwise.ui.scan_text import scan_text

        return scan_text(self)

    def _repr_html_(self) -> str:
        from headwise.ui.scan_page import scan_html

        return scan_html(self)


@shows_progress
def scan(
    model: ModelProtocol,
    text: str | Sequence[int] | Tensor,
    answer: str | int | None = None,
    *,
    source: str | None = None,
    position: int | None = None,
    max_heads: int = 10,
    profile: Profile | None = None,
    store: bool = True,
    progress: ProgressOption = None,
) -> Scan:
    """Explain the prediction of one text: its layers, the heads and MLPs that write for it, and the loss without them.

    Args:
        model: A headwise model or an attached model that reads text.
        text: A text, or token ids of one text. For an encoder-decoder, the beginning of the target; it may be empty.
        answer: Token to explain, as text of exactly one token or as id. None explains the most probable token.
        source: Source text of an encoder-decoder.
        position: Token position at which the model predicts. Negative values count from the end. None takes the last token,
            or the mask token of a masked language model.
        max_heads: Number of heads to examine: their attention, and the loss without them.
        profile: Profile of the model, for the roles of the heads. None takes the profile in the store on disk, if any.
        store: Whether to search the store. It is only read.
        progress: Called with stage, done and total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        The scan. Parts that the model does not support are left out, with the reason in `notes`.

    Raises:
        ArgumentError: If the text is empty, or if an argument is out of range.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> result = scan(Transformer(preset("nano")), [72, 105], max_heads=3, store=False)
    >>> len(result.layers), len(result.heads), result.attribution.is_complete
    (7, 3, True)
    """
    progress = callback_of(progress)
    *_, result = scan_steps(
        model, text, answer, source=source, position=position, max_heads=max_heads,
        find_profile=lambda: profile or (find_default_corpus_profile(model) if store else None), progress=progress,
    )  # fmt: skip
    return result


def scan_steps(
    model: ModelProtocol,
    text: str | Sequence[int] | Tensor,
    answer: str | int | None = None,
    *,
    source: str | None = None,
    position: int | None = None,
    max_heads: int = 10,
    find_profile: Callable[[], Profile | None] = lambda: None,
    progress: Progress | None = None,
) -> Iterator[Scan]:
    """Yield the scan with its prediction, then with layers and contributions, then complete. Arguments as in `scan`."""
    inputs = TokenizedInput.of(model, text, source, position)
    forward = _run_forward(model, inputs)
    result = _predict(model, inputs, forward, answer)
    yield result
    result = _attribute(model, forward, result)
    yield result
    yield _examine_heads(model, inputs, forward, result, max_heads, find_profile(), progress)


@dataclass(frozen=True)
class TokenizedInput:
    """Tokens of a scan.

    Attributes:
        text: The text.
        ids: Token ids, (1, T).
        source_ids: Token ids of the source, (1, S), or None.
        position: Position at which the model predicts, from 0.
        tokens: Text of each token.
        source_tokens: Text of each token of the source.
    """

    text: str
    ids: Tensor
    source_ids: Tensor | None
    position: int
    tokens: tuple[str, ...]
    source_tokens: tuple[str, ...]

    @staticmethod
    def of(
        model: ModelProtocol, text: str | Sequence[int] | Tensor, source: str | None, position: int | None
    ) -> "TokenizedInput":
        """Tokenize the texts and check the position."""
        if model.image_input is not None:
            raise UnsupportedModelError(
                "model: scan needs a model that reads text. Use hw.attention_maps(model, image)."
            )
        is_pair = model.spec.kind == "encoder-decoder"
        if is_pair != (source is not None):
            needed = "needs a source text" if is_pair else "reads one text"
            raise ArgumentError(
                f"source: a model of kind {model.spec.kind!r} {needed}. Got source={source!r}. "
                f"{'Pass source=…' if is_pair else 'Remove source'}."
            )
        if is_pair and isinstance(text, str):
            prefix = [model.decoder_start_token, *tokenizer_of(model).template_ids[0]]
            text_ids = as_ids(model, [*prefix, *tokenizer_of(model).encode(text, add_special_tokens=False)])
        elif isinstance(text, str) and not text.strip():
            raise ArgumentError(f"text: must have at least one word. Got {text!r}.")
        else:
            text_ids = as_ids(model, text)
        source_ids = None if source is None else as_ids(model, source)
        T = text_ids.shape[1]
        position = _default_position(model, text_ids) if position is None else position
        if not -T <= position < T:
            raise ArgumentError(f"position: out of range for {T} tokens. Got {position}. Use {-T} to {T - 1}.")
        tokens = _token_texts(model, text_ids)
        return TokenizedInput(
            text if isinstance(text, str) else "".join(tokens), text_ids, source_ids, position % T, tokens,
            () if source_ids is None else _token_texts(model, source_ids),
        )  # fmt: skip

    def repeat(self, count: int) -> dict[str, Tensor]:
        """Return the inputs of a batch of equal rows."""
        source = {} if self.source_ids is None else {"source": self.source_ids.expand(count, -1)}
        return {"ids": self.ids.expand(count, -1), **source}


@dataclass(frozen=True, eq=False)
class ForwardActivations:
    """Activations that one forward pass recorded.

    Attributes:
        hidden: Final hidden state at the position, (D,).
        recording: Queries and keys of every head.
        residual: Residual stream of the model, or None.
        components: Captured parts of the residual stream, or None.
        note: Reason why the residual stream is missing. Empty if it was read.
    """

    hidden: Tensor
    recording: ModelRecording
    residual: ResidualStream | None
    components: CapturedComponents | None
    note: str


def _default_position(model: ModelProtocol, ids: Tensor) -> int:
    """Return the position of the mask token of a masked language model, otherwise the last position."""
    if model.spec.output == "mlm" and isinstance(model.tokenizer, Tokenizer):
        mask_id = model.tokenizer.mask
        positions = (ids[0] == mask_id).nonzero().flatten().tolist() if mask_id is not None else []
        if positions:
            return positions[0]
    return ids.shape[1] - 1


def _token_texts(model: ModelProtocol, ids: Tensor) -> tuple[str, ...]:
    return tuple(_token_text(model, token) for token in ids[0].tolist())


def _token_text(model: ModelProtocol, token: int) -> str:
    """Return the text of a token, or its id if the model has no tokenizer or its vocabulary is larger."""
    tokenizer = model.tokenizer
    if not isinstance(tokenizer, Tokenizer) or token >= len(tokenizer):
        return f"#{token}"
    return tokenizer.backend.decode([token], skip_special_tokens=False) or tokenizer.token(token)


def _run_forward(model: ModelProtocol, inputs: TokenizedInput) -> ForwardActivations:
    residual, note = None, ""
    with eval_mode(model), torch.no_grad(), ExitStack() as stack:
        try:
            check_attributable(model)
            residual = model.residual_stream()
        except HeadwiseError as error:
            note = str(error)
        recording = stack.enter_context(record(model, "*", tensors="map"))
        components = (
            None if residual is None else stack.enter_context(capture_residual(model, residual, inputs.position))
        )
        hidden = model(**inputs.repeat(1), hidden=True)[0, inputs.position]
    return ForwardActivations(hidden, recording, residual, components, note)


def _predict(
    model: ModelProtocol, inputs: TokenizedInput, forward: ForwardActivations, answer: str | int | None
) -> Scan:
    common = (inputs.text, inputs.tokens, inputs.source_tokens, inputs.position)
    if model.output is None:
        if answer is not None:
            raise UnsupportedModelError("answer: this model predicts no tokens. Remove answer.")
        note = "This model predicts no tokens: heads are ranked by the change of the hidden state without them."
        return Scan(*common, (), None, math.nan, notes=(note,))
    log_probs = _log_probs(model, forward.hidden[None])[0]  # (V,)
    answer_id = int(log_probs.argmax()) if answer is None else token_id(model, answer, "answer")
    top_ids = log_probs.topk(min(TOP_TOKENS, len(log_probs))).indices.tolist()
    candidates = {
        token: CandidateToken(_token_text(model, token), token, float(log_probs[token].exp()))
        for token in (*top_ids, answer_id)
    }
    top = tuple(candidates[token] for token in top_ids)
    return Scan(*common, top, candidates[answer_id], -float(log_probs[answer_id]))


def _log_probs(model: ModelProtocol, hidden: Tensor) -> Tensor:
    """Compute log-probabilities in float64: (n, D) → (n, V)."""
    assert model.output is not None
    with eval_mode(model), torch.no_grad():
        return to_float64(model.output(hidden[:, None])[:, 0]).log_softmax(-1)


def _attribute(model: ModelProtocol, forward: ForwardActivations, result: Scan) -> Scan:
    """Add the logit lens and the direct contributions."""
    residual, components = forward.residual, forward.components
    if result.answer is None:
        return result
    if residual is None or components is None:
        return replace(result, notes=(*result.notes, forward.note))
    assert model.output is not None
    with eval_mode(model), torch.no_grad():
        logits = to_float64(model.output(forward.hidden[None, None])[0, 0])  # (V,)
        attribution = attribute_captured_logit(
            model, residual, components, logits, AttributionTarget(result.answer.id, relative_to_mean=True)
        )
        layers = _logit_lens(model, residual, components, result.answer.id)
    return replace(result, layers=layers, attribution=attribution)


def _logit_lens(
    model: ModelProtocol, residual: ResidualStream, components: CapturedComponents, answer_id: int
) -> tuple[LayerPrediction, ...]:
    """Predict from the residual stream after the embedding and after every layer."""
    states = _residual_after_each_layer(model, residual, components)  # (layers + 1, D) in float64
    norm = residual.norm
    normed = norm.center_and_apply_gain(states) * norm.scale(states)
    normed = normed if norm.bias is None else normed + to_float64(norm.bias).to(normed.device)
    weight = at_least_float32(residual.vocabulary.weight)  # (V, D)
    logits = to_float64(normed.to(weight) @ weight.mT) * residual.logit_scale  # (layers + 1, V)
    bias = getattr(residual.vocabulary, "bias", None)
    logits = logits if bias is None else logits + to_float64(bias) * residual.logit_scale
    probabilities = logits.softmax(-1)
    top = probabilities.max(-1)
    ranks = (logits > logits[:, answer_id, None]).sum(-1) + 1
    return tuple(
        LayerPrediction(layer, _token_text(model, int(token)), float(top_p), float(p), int(rank))
        for layer, token, top_p, p, rank in zip(
            (-1, *sorted(residual.layers)), top.indices, top.values, probabilities[:, answer_id], ranks, strict=True
        )
    )


def _residual_after_each_layer(
    model: ModelProtocol, residual: ResidualStream, components: CapturedComponents
) -> Tensor:
    """Return the residual stream at the position after the embedding and after every layer, in float64."""
    attention: dict[int, Tensor] = {}
    for layer in model.attention_layers():
        hook_point = layer.hook_point
        output = torch.zeros_like(to_float64(components.embedding))
        if hook_point.head_addresses:
            z, W_O = to_float64(components.z[hook_point]), to_float64(hook_point.W_O_for_listeners)  # (H, e), (H, e, D)
            output = torch.einsum("he,hed->d", z, W_O)
        output = output if layer.b_O is None else output + to_float64(layer.b_O).to(output.device)
        post_norm = residual.layers[hook_point.address.layer].post_norm
        if post_norm is not None:
            output = post_norm.center_and_apply_gain(output) * post_norm.scale(output)
            output = output if post_norm.bias is None else output + to_float64(post_norm.bias).to(output.device)
        attention[hook_point.address.layer] = output
    states = [to_float64(components.embedding)]
    for layer_index in sorted(residual.layers):
        added = to_float64(components.mlps[layer_index]) + attention.get(layer_index, 0.0)
        states.append(states[-1] + added)
    return torch.stack(states)


def _examine_heads(
    model: ModelProtocol, inputs: TokenizedInput, forward: ForwardActivations, result: Scan, max_heads: int,
    profile: Profile | None, progress: Progress | None,
) -> Scan:  # fmt: skip
    """Add the heads: where they attend, the loss without them, and their roles."""
    if max_heads < 0:
        raise ArgumentError(f"max_heads: must be 0 or more. Got {max_heads}.")
    contributions = {} if result.attribution is None else result.attribution.heads
    candidates = sorted(contributions, key=lambda head: -abs(contributions[head]))[:max_heads]
    notes = list(result.notes)
    if result.attribution is None:
        candidates = [str(address) for address in model.spec.head_addresses] if max_heads else []
    try:
        heads = _ablate_each(model, inputs, result, candidates, progress)
    except HeadwiseError as error:  # for example, heads of an attached model that cannot be edited
        heads = [ScannedHead(head, None) for head in candidates[:max_heads]]
        notes.append(f"The loss without heads could not be measured: {error}")
    if result.attribution is None:
        heads = sorted(heads, key=lambda head: -abs(head.loss_increase))[:max_heads]
    rows = [
        replace(
            head, contribution=contributions.get(head.head), role=_role(profile, head.head),
            **_attention_from_position(forward.recording, inputs, head.head),
        )
        for head in heads
    ]  # fmt: skip
    name = "" if profile is None else str(profile.metadata.get("corpus", ""))
    return replace(result, heads=tuple(rows), profile_name=name, notes=tuple(notes))


def _role(profile: Profile | None, head: str) -> str:
    """Return the first role of a head with its evidence level. Empty without a profile or without a role."""
    if profile is None or Address.parse(head) not in profile.addresses:
        return ""
    head_profile = profile[head]
    return f"{head_profile.role_label} ({head_profile.evidence_label})" if head_profile.roles else ""


def _attention_from_position(recording: ModelRecording, inputs: TokenizedInput, head: str) -> dict[str, Any]:
    """Return where a head attends from the position. Empty for heads of the encoder of an encoder-decoder."""
    address = Address.parse(head)
    if address.stack == "enc":
        return {}
    try:
        recorded: SingleHeadRecording = recording[address]
    except HeadwiseError:  # the head was not called
        return {}
    weights = recorded.call(-1).map(rows=inputs.position)[0, 0]  # (S,)
    tokens, keys = (inputs.source_tokens, "source") if address.stack == "cross" else (inputs.tokens, "text")
    weights = weights[: len(tokens)]
    values = weights.tolist()
    order = [key for key in weights.argsort(descending=True, stable=True).tolist() if key]
    attended = tuple(
        AttendedToken(key, tokens[key], values[key]) for key in order[:TOP_KEYS] if values[key] >= MIN_WEIGHT
    )
    return {"first_token_weight": values[0], "attended": attended, "weights": tuple(values), "keys": keys}


def _ablate_each(
    model: ModelProtocol, inputs: TokenizedInput, result: Scan, heads: Sequence[str], progress: Progress | None
) -> list[ScannedHead]:
    """Measure the loss without each head, set to zero one at a time. Each batch also has a row of the full model."""
    size = max(1, BATCH_TOKENS // inputs.ids.shape[1] - 1)
    measured: list[ScannedHead] = []
    for start in range(0, len(heads), size):
        chunk = heads[start : start + size]
        factors = 1.0 - torch.eye(len(chunk) + 1, device=model.device)[1:]  # (heads, rows); row 0 is the full model
        gates = dict(zip(chunk, factors, strict=True))
        with eval_mode(model), torch.no_grad():
            hidden = model(**inputs.repeat(len(chunk) + 1), gates=gates, hidden=True)[:, inputs.position]  # (rows, D)
        measured += _score_ablated_rows(model, hidden, result, chunk)
        if progress is not None:
            progress(PROGRESS_LABEL, len(measured), len(heads))
    return measured


def _score_ablated_rows(model: ModelProtocol, hidden: Tensor, result: Scan, heads: Sequence[str]) -> list[ScannedHead]:
    """Compare the rows without heads with the first row, that of the full model."""
    if result.answer is None:
        states = to_float64(hidden)
        distances = 1 - torch.cosine_similarity(states[1:], states[:1], dim=-1)
        return [ScannedHead(head, None, value, value) for head, value in zip(heads, distances.tolist(), strict=True)]
    log_probs = _log_probs(model, hidden)  # (rows, V)
    losses = -log_probs[:, result.answer.id]
    top = log_probs.argmax(-1).tolist()
    return [
        ScannedHead(head, None, float(loss), float(loss - losses[0]), _token_text(model, token))
        for head, loss, token in zip(heads, losses[1:], top[1:], strict=True)
    ]
