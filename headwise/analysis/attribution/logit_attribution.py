"""Direct logit attribution: the contribution of each head, each MLP and the embedding to a logit.

The residual stream is a sum of outputs, and the logit is linear in it if the scale of the final norm is frozen. So the
contributions add up to the logit exactly (https://transformer-circuits.pub/2021/framework). Effects through later layers
are not included.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.recording.batching import tokenizer_of
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.hook_point import AttentionCall
from headwise.kernels.rounding_tolerance import at_least_float32, rounding_bound, to_float64
from headwise.model import ModelProtocol, ResidualStream, eval_mode

TOLERANCE = 1e-5  # relative, for logits computed in float32 or float64


@dataclass(frozen=True)
class LogitAttribution:
    """Contribution of each part of the model to a logit or to the difference of two logits.

    Attributes:
        logit: The logit, or logit difference, computed by the model.
        heads: Contribution of each head, by address.
        mlps: Contribution of each MLP, by layer.
        embedding: Contribution of the embedding.
        biases: Contribution of the biases of attention outputs, norms and the output layer.
        tolerance: Largest `relative_error` explained by rounding. Larger in half precision.
    """

    logit: float
    heads: dict[str, float]
    mlps: dict[str, float]
    embedding: float
    biases: float
    tolerance: float = TOLERANCE

    @property
    def parts(self) -> dict[str, float]:
        """All contributions by name: embedding, heads, MLPs, biases."""
        mlps = {f"mlp.{layer}": contribution for layer, contribution in self.mlps.items()}
        return {"embedding": self.embedding, **self.heads, **mlps, "biases": self.biases}

    @property
    def total(self) -> float:
        """Sum of all contributions. Equals the logit up to rounding."""
        return sum(self.parts.values())

    @property
    def relative_error(self) -> float:
        """|total − logit| relative to the largest of |logit| and the contributions, which can be large and cancel."""
        return abs(self.total - self.logit) / max(abs(self.logit), *map(abs, self.parts.values()), 1e-30)

    @property
    def is_complete(self) -> bool:
        """Whether the contributions add up to the logit within the tolerance."""
        return self.relative_error <= self.tolerance

    def top_parts(self, k: int = 10) -> list[tuple[str, float]]:
        """Return the k largest contributions by absolute value."""
        return sorted(self.parts.items(), key=lambda part: -abs(part[1]))[:k]


def logit_attribution(
    model: ModelProtocol, text: str | Sequence[int] | Tensor, answer: str | int, wrong: str | int | None = None,
    *, position: int = -1, relative_to_mean: bool = False,
) -> LogitAttribution:  # fmt: skip
    """Attribute a logit to heads, MLPs, embedding and biases.

    Args:
        model: A pre-norm decoder with an output layer.
        text: A text, or token ids of one text.
        answer: Token whose logit is attributed, as text of exactly one token or as id.
        wrong: Token whose logit is subtracted. None attributes the logit of `answer` alone.
        position: Token position at which the logit is computed. Negative values count from the end.
        relative_to_mean: Whether to attribute the logit minus the mean logit of the vocabulary. Softmax depends only on this
            difference. Cannot be combined with `wrong`.

    Returns:
        Contribution of each part.

    Raises:
        ArgumentError: If `position`, `answer` or `wrong` is invalid.
        UnsupportedModelError: If the residual stream of the model is not a sum.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> attribution = logit_attribution(Transformer(preset("nano")), [72, 105], answer=33, wrong=34)
    >>> attribution.is_complete, len(attribution.heads), len(attribution.mlps)
    (True, 36, 6)
    """
    check_attributable(model)
    ids = as_ids(model, text)
    T = ids.shape[1]
    if not -T <= position < T:
        raise ArgumentError(f"position: out of range for a text of {T} tokens. Got {position}. Use {-T} to {T - 1}.")
    answer_id = token_id(model, answer, "answer")
    wrong_id = None if wrong is None else token_id(model, wrong, "wrong")
    if relative_to_mean and wrong_id is not None:
        raise ArgumentError("relative_to_mean: cannot be combined with wrong. Got both. Remove one of them.")
    with eval_mode(model), torch.no_grad():
        residual = model.residual_stream()
        with capture_residual(model, residual, position) as capture:
            logits = to_float64(model(ids)[0, position])  # (V,)
        target = AttributionTarget(answer_id, wrong_id, relative_to_mean=relative_to_mean)
        return attribute_captured_logit(model, residual, capture, logits, target)


@dataclass(frozen=True)
class AttributionTarget:
    """The logit, or difference of logits, that is attributed.

    Attributes:
        answer_id: Token whose logit is attributed.
        wrong_id: Token whose logit is subtracted, or None.
        relative_to_mean: Whether the mean logit of the vocabulary is subtracted.
    """

    answer_id: int
    wrong_id: int | None = None
    relative_to_mean: bool = False

    def select(self, by_token: Tensor) -> Tensor:
        """Select from values by token, (V, …): the value of the answer minus that of the wrong token, or minus the mean."""
        value = to_float64(by_token[self.answer_id])
        if self.relative_to_mean:
            return value - to_float64(at_least_float32(by_token).mean(0))
        return value if self.wrong_id is None else value - to_float64(by_token[self.wrong_id])


def attribute_captured_logit(
    model: ModelProtocol,
    residual: ResidualStream,
    capture: "CapturedComponents",
    logits: Tensor,
    target: AttributionTarget,
) -> LogitAttribution:
    """Attribute a logit of a captured forward pass.

    Args:
        model: The model, in eval mode.
        residual: Its residual stream.
        capture: Parts of the residual stream at one position.
        logits: Logits at this position, (V,).
        target: Logit to attribute.
    """
    with torch.no_grad():
        direction, biases = _logit_direction(residual, capture.final_state, target)  # (D,)
        heads: dict[str, float] = {}
        for layer in model.attention_layers():
            # (D,)
            layer_direction, bias_part = _direction_before_post_norm(
                residual, capture, layer.hook_point.address.layer, direction
            )
            biases += bias_part + (
                0.0 if layer.b_O is None else float(to_float64(layer.b_O).to(layer_direction.device) @ layer_direction)
            )
            for i, address in enumerate(layer.hook_point.head_addresses):
                z, W_O = capture.z[layer.hook_point][i], layer.hook_point.W_O_for_listeners[i]  # (e,), (e, D)
                heads[str(address)] = float(to_float64(z) @ (to_float64(W_O) @ layer_direction))
        mlps = {str(layer): float(to_float64(output) @ direction) for layer, output in capture.mlps.items()}
        embedding = float(to_float64(capture.embedding) @ direction)
    return LogitAttribution(
        float(target.select(logits)), heads, mlps, embedding, biases,
        _tolerance(capture.final_state.dtype, len(residual.layers)),
    )  # fmt: skip


def _tolerance(dtype: torch.dtype, layers: int) -> float:
    """Tolerance of a logit: 3 roundings per layer (attention, its addition, that of the MLP), 3 in the last norm, 1 in the
    logit."""
    return max(TOLERANCE, rounding_bound(dtype, 3 * layers + 4))


class CapturedComponents:
    """Tensors of one forward pass over one text, at one position or, with an additional token axis, at all positions."""

    def __init__(self) -> None:
        self.z: dict[Any, Tensor] = {}  # by hook point: (H, e), or (H, T, e)
        self.mlps: dict[int, Tensor] = {}  # (D,), or (T, D)
        # attention output before its post-norm, if the layer has one: (D,)
        self.attention_outputs: dict[int, Tensor] = {}
        # (D,): first and last state of the residual stream, before the final norm
        self.embedding = self.final_state = torch.empty(0, device="cpu")


@contextmanager
def capture_residual(
    model: ModelProtocol, residual: ResidualStream, position: int | slice
) -> Iterator[CapturedComponents]:
    """Record the parts of the residual stream at one position or at all positions. The forward pass is not changed."""
    capture = CapturedComponents()

    def on_call(call: AttentionCall) -> None:
        capture.z[call.hook_point] = call.z[0, :, position].clone()

    def at_position(value: Any) -> Tensor:
        states = value[0] if isinstance(value, tuple) else value
        rows = states.reshape(-1, states.shape[-1])  # (T, D): some models drop the batch axis on the way
        return rows[position].clone().to(model.device)  # (D,)

    def keep_first(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        capture.embedding = at_position(args or kwargs["hidden_states"])

    def keep_last(module: nn.Module, args: tuple[Tensor]) -> None:
        capture.final_state = at_position(args)

    def keep_attention_output(module: nn.Module, args: tuple[Tensor], layer: int) -> None:
        capture.attention_outputs[layer] = at_position(args)

    def keep_mlp(module: nn.Module, args: Any, output: Any, layer: int) -> None:
        capture.mlps[layer] = at_position(output)

    with ExitStack() as stack:
        for hook_point in model.gathered_hook_points():
            stack.enter_context(hook_point.listen(on_call))
        for layer, residual_layer in residual.layers.items():
            stack.callback(residual_layer.mlp.register_forward_hook(partial(keep_mlp, layer=layer)).remove)
            if residual_layer.post_norm is not None:
                norm = residual_layer.post_norm.module
                stack.callback(norm.register_forward_pre_hook(partial(keep_attention_output, layer=layer)).remove)
        stack.callback(residual.first_module.register_forward_pre_hook(keep_first, with_kwargs=True).remove)
        stack.callback(residual.norm.module.register_forward_pre_hook(keep_last).remove)
        yield capture


@contextmanager
def capture_layer_inputs(layer: Any) -> Iterator[list[Tensor]]:
    """Collect the inputs of an attention layer while the context is open."""
    inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    try:
        yield inputs
    finally:
        hook.remove()


def _logit_direction(residual: ResidualStream, final_state: Tensor, target: AttributionTarget) -> tuple[Tensor, float]:
    """Return the direction in the residual stream that the logit reads, with frozen norm, (D,), and the bias part."""
    unembedding, bias = residual.vocabulary.weight, getattr(residual.vocabulary, "bias", None)
    direction = target.select(unembedding) * residual.logit_scale  # (D,)
    bias_part = (
        0.0 if residual.norm.bias is None else float(to_float64(residual.norm.bias).to(direction.device) @ direction)
    )
    bias_part += 0.0 if bias is None else float(target.select(bias) * residual.logit_scale)
    return residual.norm.pull_back(direction, final_state), bias_part


def _direction_before_post_norm(
    residual: ResidualStream, capture: CapturedComponents, layer: int, direction: Tensor
) -> tuple[Tensor, float]:
    """Map a direction in the residual stream to a layer's attention output, (D,), and return the post-norm's bias part."""
    post_norm = residual.layers[layer].post_norm
    if post_norm is None:
        return direction, 0.0
    bias_part = 0.0 if post_norm.bias is None else float(to_float64(post_norm.bias).to(direction.device) @ direction)
    return post_norm.pull_back(direction, capture.attention_outputs[layer]), bias_part


def check_attributable(model: ModelProtocol) -> None:
    """Raise if the logits of a model are not a sum over its parts."""
    if model.spec.norm_placement == "post":
        raise UnsupportedModelError(
            "model: logit attribution is not supported for post-norm models, because each layer ends in a norm and the "
            "residual stream is not a sum. Ablate heads instead, for example with model.heads['5.1'].silenced()."
        )
    if model.spec.kind != "decoder" or model.output is None:
        raise UnsupportedModelError(
            f"model: logit attribution needs a decoder with an output layer. Got kind {model.spec.kind!r} with output "
            f"{model.spec.output!r}."
        )


def as_ids(model: ModelProtocol, text: str | Sequence[int] | Tensor) -> Tensor:
    """Return the token ids of one text as a tensor (1, T)."""
    ids = tokenizer_of(model).encode(text) if isinstance(text, str) else text
    try:
        ids = torch.as_tensor(ids, device=model.device)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # for example, a list of texts
        raise _one_text_error(f"Got {_shorten(text)}") from None
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise _one_text_error(f"Got values of type {ids.dtype}")
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise _one_text_error(f"Got token ids of shape {tuple(ids.shape)}")
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < 0 or largest >= model.spec.vocab:
        raise ArgumentError(
            f"text: token ids must be from 0 to {model.spec.vocab - 1}. Got {smallest if smallest < 0 else largest}. Use the "
            f"tokenizer of the model."
        )
    return ids


def _one_text_error(received: str) -> ArgumentError:
    return ArgumentError(
        f"text: must be one text with at least one token, as a string or as token ids. {received}. Pass one text at a time."
    )


def _shorten(value: object) -> str:
    """Return the representation of a value, at most 60 characters of it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def token_id(model: ModelProtocol, token: str | int, name: str) -> int:
    """Return a token id, from an id or from a text of exactly one token."""
    if isinstance(token, str):
        tokenizer = tokenizer_of(model)
        ids = tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1:
            token_texts = " ".join(repr(tokenizer.token(i)) for i in ids) or "an empty list"
            raise ArgumentError(
                f"{name}: must be exactly one token. Got {token!r}, which is tokenized as {token_texts}. Pass one of these "
                f"tokens or a token id. A word inside a sentence often starts with a space."
            )
        return ids[0]
    if not 0 <= token < model.spec.vocab:
        raise ArgumentError(f"{name}: must be a token id from 0 to {model.spec.vocab - 1}. Got {token}.")
    return token
