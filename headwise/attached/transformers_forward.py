"""Call a transformers model like one of ours: token ids and an attention mask in, hidden states or logits out."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import ArgumentError, HeadwiseError, UnsupportedModelError
from headwise.model.chunked_cross_entropy import chunked_cross_entropy
from headwise.spec import ModelSpec


def validate_ids(model: Any, ids: Any, attention_mask: Tensor | None) -> Tensor:
    """Return the token ids. Raise an error if they are not a batch of token ids, or if the model takes another input."""
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise UnsupportedModelError(
            f"{type(model).__name__} takes {model.main_input_name}, not token ids. Call the model itself inside "
            f"hw.record(attached) or attached.heads[…].silenced()."
        )
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ArgumentError(f"ids: must be an integer tensor of shape (batch, tokens). Got {got}.")
    if attention_mask is not None and attention_mask.shape != ids.shape:
        raise ArgumentError(
            f"attention_mask: must have the shape of ids, {tuple(ids.shape)}, and be True at real tokens. Got shape "
            f"{tuple(attention_mask.shape)}."
        )
    _check_device(model, ids)
    return ids


def _check_device(model: nn.Module, ids: Tensor) -> None:
    """Raise an error if token ids are on another device than the model, unless hooks of accelerate move them."""
    device = next((weight.device for weight in model.parameters()), ids.device)
    if ids.device == device or "meta" in (ids.device.type, device.type):
        return
    if not any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ArgumentError(
            f"ids: the tensor is on {ids.device}, the model on {device}. Use ids.to(attached.device), or model.to(...)."
        )


def forward_tokens(
    model: Any,
    spec: ModelSpec,
    ids: Tensor,
    attention_mask: Tensor | None,
    source: Tensor | None,
    source_attention_mask: Tensor | None,
    *,
    hidden: bool,
    cache: Any = None,
) -> Tensor:
    """Run one forward pass. Returns hidden states (B, T, D) after the last norm, or logits (B, T, V).

    A decoder may have a transformers cache with earlier tokens.
    """
    if spec.kind == "encoder-decoder":
        if source is None:
            raise ArgumentError(
                "source: an encoder-decoder needs token ids for its encoder. Call attached(ids, source=source_ids)."
            )
        _check_padding_side(model, spec, attention_mask, source_attention_mask)
        inputs = {
            "input_ids": _fill_padding(model, source, source_attention_mask),
            "attention_mask": _long_mask(source_attention_mask),
            "decoder_input_ids": _fill_padding(model, ids, attention_mask),
            "decoder_attention_mask": _long_mask(attention_mask),
        }
        with _captured_outputs(model.get_decoder()) as states, _explain_call_errors(model):
            output = model(**_drop_none(inputs), use_cache=False)
        return (states[-1] if hidden else output.logits).to(ids.device)  # layers may be on several devices
    if source is not None:
        raise ArgumentError(
            f"source: only encoder-decoders take a source, and this model is of kind {spec.kind}. Remove it."
        )
    body = model.base_model if hidden else model
    # The body has no submodule of its own.
    body_is_inline = hidden and body is model and model.get_output_embeddings() is not None
    inputs = {"input_ids": _fill_padding(model, ids, attention_mask), "attention_mask": _long_mask(attention_mask)}
    inputs["position_ids"] = _position_ids(body, spec, attention_mask)
    if spec.kind == "decoder":
        inputs |= {"use_cache": cache is not None, "past_key_values": cache}
    with (
        _captured_inputs(model.get_output_embeddings()) if body_is_inline else nullcontext([]) as head_inputs,
        _explain_call_errors(body),
    ):
        output = body(**_drop_none(inputs))
    if not hidden:
        return output.logits.to(ids.device)
    states = (
        head_inputs[-1]
        if head_inputs
        else output.last_hidden_state
        if hasattr(output, "last_hidden_state")
        else output[0]
    )
    if not isinstance(states, Tensor) or states.shape[:2] != ids.shape:
        raise UnsupportedModelError(
            f"hidden=True: {type(body).__name__} does not return one hidden state per token. Call the transformers model "
            f"itself: attached.model(…)."
        )
    return states.to(ids.device)


def _check_padding_side(model: Any, spec: ModelSpec, *attention_masks: Tensor | None) -> None:
    """Raise an error for left padding: these models count positions from the first column and take no position_ids."""
    is_left_padded = any(
        attention_mask is not None and not bool(attention_mask[:, 0].all()) for attention_mask in attention_masks
    )
    if is_left_padded and spec.positions != "none":
        raise ArgumentError(
            f"attention_mask: {type(model).__name__} does not support left padding, because it counts positions from the "
            f"first column. Pad on the right."
        )


@contextmanager
def _explain_call_errors(model: nn.Module) -> Iterator[None]:
    """Convert errors of a model that needs other inputs than token ids."""
    try:
        yield
    except (HeadwiseError, torch.OutOfMemoryError):
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        # For example shapes that do not match, or None for a required input.
        message = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be called with token ids alone ({message}). Call the model itself inside "
            f"hw.record(attached) or attached.heads[…].silenced()."
        ) from error


def call_transformers_model(
    model: Any,
    ids: Tensor | None,
    attention_mask: Tensor | None,
    source: Tensor | None,
    source_attention_mask: Tensor | None,
    *,
    hidden: bool,
    model_kwargs: dict[str, Any],
) -> Any:
    """Call the model with its own arguments and return its own output. Our argument names are translated.

    Without `ids` and `source`, `attention_mask` is passed unchanged.
    """
    if hidden:
        raise ArgumentError(
            f"hidden=True: cannot be combined with arguments of the transformers model, because with them the call returns "
            f"the output of that model. Got {', '.join(model_kwargs)}. Remove these arguments, or pass "
            f"output_hidden_states=True instead of hidden=True."
        )
    input_name = getattr(model, "main_input_name", "input_ids")
    inputs = {input_name: ids, "attention_mask": attention_mask if ids is None else _long_mask(attention_mask)}
    if source is not None:
        inputs = {input_name: source, "attention_mask": _long_mask(source_attention_mask), "decoder_input_ids": ids}
        inputs["decoder_attention_mask"] = _long_mask(attention_mask)
    inputs = _drop_none(inputs)
    for name in inputs.keys() & model_kwargs.keys():
        raise ArgumentError(
            f"{name}: given twice, as an argument of Headwise and of the transformers model. Pass it once."
        )
    return model(**inputs, **model_kwargs)


class AttachedLMHead:
    """LM head: final hidden states to logits, computed by the model's own head with all its extra operations."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute logits: (…, D) → (…, V)."""
        model, states = self._model, hidden.reshape(1, -1, hidden.shape[-1])
        if not _submodels(model):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no separate body, so its LM head cannot be called alone. Compute logits with "
                f"the full model."
            )
        ids = torch.zeros(1, 1, dtype=torch.long, device=hidden.device)
        with _body_output_replaced(model, states):
            logits = model(input_ids=ids).logits  # (1, n, V)
        return logits.reshape(*hidden.shape[:-1], -1).to(hidden.device)

    def cross_entropy(self, hidden: Tensor, targets: Tensor, total: int | None = None) -> Tensor:
        """Return the mean cross-entropy of targets, or the sum divided by `total`: (N, D), (N,) → scalar."""
        vocab = self._model.get_output_embeddings().weight.shape[0]
        return chunked_cross_entropy(self, vocab, hidden, targets, total)


@contextmanager
def _body_output_replaced(model: nn.Module, states: Tensor) -> Iterator[None]:
    """Replace the forward of all submodels by a function that returns these states, while the context is open."""
    from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

    class FixedBodyOutput(BaseModelOutputWithPoolingAndCrossAttentions):
        """Body output that contains the hidden states; all other attributes are None."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    output = FixedBodyOutput(last_hidden_state=states)  # pyright: ignore[reportArgumentType]
    bodies = _submodels(model)
    own_forwards = [body.__dict__.get("forward") for body in bodies]
    for body in bodies:
        body.__dict__["forward"] = lambda *args, **kwargs: output
    try:
        yield
    finally:
        for body, own_forward in zip(bodies, own_forwards, strict=True):
            body.__dict__.pop("forward")
            if own_forward is not None:
                body.__dict__["forward"] = own_forward


def _submodels(model: nn.Module) -> list[nn.Module]:
    """Return the submodels of a model: its body, or the two stacks of an encoder-decoder."""
    from transformers import PreTrainedModel

    return [submodel for submodel in model.modules() if isinstance(submodel, PreTrainedModel) and submodel is not model]


@contextmanager
def _captured_outputs(submodule: nn.Module) -> Iterator[list[Tensor]]:
    """Record the outputs of a submodule, one per call."""
    states: list[Tensor] = []
    hook = submodule.register_forward_hook(lambda module, inputs, output: states.append(output[0]))
    try:
        yield states
    finally:
        hook.remove()


@contextmanager
def _captured_inputs(submodule: nn.Module) -> Iterator[list[Tensor]]:
    """Record the inputs of a submodule, one per call."""
    states: list[Tensor] = []
    hook = submodule.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
    try:
        yield states
    finally:
        hook.remove()


def _fill_padding(model: Any, ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Set padded positions to the padding token, because some models derive positions from it."""
    padding_idx = position_padding_idx(model)
    pad = getattr(model.config, "pad_token_id", None) if padding_idx is None else padding_idx
    if attention_mask is None or not isinstance(pad, int) or pad < 0:
        return ids
    return ids.masked_fill(~attention_mask.bool(), pad)


def _long_mask(attention_mask: Tensor | None) -> Tensor | None:
    return None if attention_mask is None else attention_mask.long()


def _position_ids(body: nn.Module, spec: ModelSpec, attention_mask: Tensor | None) -> Tensor | None:
    """Return position ids (B, T) if there is left padding and the model does not compute positions itself."""
    if (
        attention_mask is None
        or bool(attention_mask[:, 0].all())
        or "position_ids" not in inspect.signature(body.forward).parameters
    ):
        return None
    return None if position_padding_idx(body) is not None else (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def position_padding_idx(model: nn.Module) -> int | None:
    """Return the padding token from which a model counts positions, as RoBERTa does, or None."""
    name = "create_position_ids_from_input_ids"  # a method of a module, or a function in its file
    for module in model.modules():
        token = getattr(module, "padding_idx", None)
        if isinstance(token, int) and (
            hasattr(module, name) or hasattr(sys.modules.get(type(module).__module__), name)
        ):
            return token  # may differ from the configuration
    return None


def _drop_none(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if value is not None}
