"""Calling a transformers model as ours are called: ids and an attention mask in, hidden states or logits out."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.model.loss import chunked_cross_entropy
from headwise.spec import ModelSpec


def validate_ids(model: Any, ids: Any, attention_mask: Tensor | None) -> Tensor:
    """Token ids as they are; refuse what is not a batch of token ids, and models that read something else."""
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise HeadwiseError(
            f"{type(model).__name__} reads {model.main_input_name}, not token ids; call the model itself, inside "
            f"hw.record(attached) or attached.heads[…].silenced()."
        )
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise HeadwiseError(f"token ids are a tensor of whole numbers, (batch, tokens); got {got}.")
    if attention_mask is not None and attention_mask.shape != ids.shape:
        raise HeadwiseError(
            f"attention_mask is {tuple(attention_mask.shape)} but ids are {tuple(ids.shape)}; True at real tokens."
        )
    return ids


def forward_tokens(
    model: Any,
    spec: ModelSpec,
    ids: Tensor,
    attention_mask: Tensor | None,
    source: Tensor | None,
    source_attention_mask: Tensor | None,
    hidden: bool,
) -> Tensor:
    """One pass: hidden states (B, T, D) after the last norm, or logits (B, T, V)."""
    if spec.kind == "encoder-decoder":
        if source is None:
            raise HeadwiseError("an encoder-decoder needs what it reads: attached(ids, source=source_ids).")
        _check_padding_side(model, spec, attention_mask, source_attention_mask)
        inputs = {
            "input_ids": _fill_padding(model, source, source_attention_mask),
            "attention_mask": _long_mask(source_attention_mask),
            "decoder_input_ids": _fill_padding(model, ids, attention_mask),
            "decoder_attention_mask": _long_mask(attention_mask),
        }
        with _captured_outputs(model.get_decoder()) as states, _explain_call_errors(model):
            output = model(**_drop_none(inputs), use_cache=False)
        return states[-1] if hidden else output.logits
    if source is not None:
        raise HeadwiseError(f"this model is of kind {spec.kind} and reads no source; leave source out.")
    body = model.base_model if hidden else model
    # Whether its body has no name of its own.
    body_is_inline = hidden and body is model and model.get_output_embeddings() is not None
    inputs = {"input_ids": _fill_padding(model, ids, attention_mask), "attention_mask": _long_mask(attention_mask)}
    inputs["position_ids"] = _position_ids(body, spec, attention_mask)
    inputs |= {"use_cache": False} if spec.kind == "decoder" else {}
    with (
        _captured_inputs(model.get_output_embeddings()) if body_is_inline else nullcontext([]) as head_inputs,
        _explain_call_errors(body),
    ):
        output = body(**_drop_none(inputs))
    if not hidden:
        return output.logits
    states = (
        head_inputs[-1]
        if head_inputs
        else output.last_hidden_state
        if hasattr(output, "last_hidden_state")
        else output[0]
    )
    if not isinstance(states, Tensor) or states.shape[:2] != ids.shape:
        raise HeadwiseError(f"{type(body).__name__} gives no hidden state for every token; call the model itself.")
    return states


def _check_padding_side(model: Any, spec: ModelSpec, *attention_masks: Tensor | None) -> None:
    """Such models take no positions, and count places from the first column: there, padding on the left moves a text."""
    is_left_padded = any(
        attention_mask is not None and not bool(attention_mask[:, 0].all()) for attention_mask in attention_masks
    )
    if is_left_padded and spec.positions != "none":
        raise HeadwiseError(f"{type(model).__name__} counts positions from the first column; put padding on the right.")


@contextmanager
def _explain_call_errors(model: nn.Module) -> Iterator[None]:
    """Say so where a model needs more than token ids, or other ones."""
    try:
        yield
    except (HeadwiseError, torch.OutOfMemoryError):
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        # Shapes that do not fit, or None where more is needed.
        message = " ".join(str(error).split())
        raise HeadwiseError(
            f"{type(model).__name__} cannot be called with token ids alone ({message}); call the model itself, inside "
            f"hw.record(attached) or attached.heads[…].silenced()."
        ) from error


def call_transformers_model(
    model: Any,
    ids: Tensor | None,
    attention_mask: Tensor | None,
    source: Tensor | None,
    source_attention_mask: Tensor | None,
    hidden: bool,
    model_kwargs: dict[str, Any],
) -> Any:
    """One pass by what the model itself takes: its own output, whatever that is. Our words stand for theirs.

    Without `ids` and `source` the call is the model's own, and so is its `attention_mask`.
    """
    if hidden:
        raise HeadwiseError(
            f"hidden=True gives states and {', '.join(model_kwargs)} the model's own output; leave one of them out, or ask "
            f"for output_hidden_states=True."
        )
    input_name = getattr(model, "main_input_name", "input_ids")
    inputs = {input_name: ids, "attention_mask": attention_mask if ids is None else _long_mask(attention_mask)}
    if source is not None:
        inputs = {input_name: source, "attention_mask": _long_mask(source_attention_mask), "decoder_input_ids": ids}
        inputs["decoder_attention_mask"] = _long_mask(attention_mask)
    inputs = _drop_none(inputs)
    for name in inputs.keys() & model_kwargs.keys():
        raise HeadwiseError(f"{name} is given twice, in our words and in the model's; say it once.")
    return model(**inputs, **model_kwargs)


class AttachedLMHead:
    """From final hidden states to logits by the model's own head, whatever it does besides multiplying."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, hidden: Tensor) -> Tensor:
        """(…, D) → (…, V)"""
        model, states = self._model, hidden.reshape(1, -1, hidden.shape[-1])
        if not _submodels(model):
            raise HeadwiseError(
                f"{type(model).__name__} does not tell its head from its body; ask the model for logits."
            )
        ids = torch.zeros(1, 1, dtype=torch.long, device=hidden.device)
        with _fixed_body_output(model, states):
            logits = model(input_ids=ids).logits  # (1, n, V)
        return logits.reshape(*hidden.shape[:-1], -1)

    def cross_entropy(self, hidden: Tensor, targets: Tensor, total: int | None = None) -> Tensor:
        """(N, D), (N,) → the mean surprise at targets, or the sum divided by `total`."""
        vocab = self._model.get_output_embeddings().weight.shape[0]
        return chunked_cross_entropy(self, vocab, hidden, targets, total)


@contextmanager
def _fixed_body_output(model: nn.Module, states: Tensor) -> Iterator[None]:
    """While open, the body of a model is not run, whichever part of it the head calls: these states are what it gives."""
    from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

    class FixedBodyOutput(BaseModelOutputWithPoolingAndCrossAttentions):
        """What a body gave, as far as a head reads it: states, and nothing besides."""

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
    """The parts of a model that are models themselves: one body, or the two stacks of an encoder-decoder."""
    from transformers import PreTrainedModel

    return [submodel for submodel in model.modules() if isinstance(submodel, PreTrainedModel) and submodel is not model]


@contextmanager
def _captured_outputs(submodule: nn.Module) -> Iterator[list[Tensor]]:
    """What a part of the model gave, call by call."""
    states: list[Tensor] = []
    hook = submodule.register_forward_hook(lambda module, inputs, output: states.append(output[0]))
    try:
        yield states
    finally:
        hook.remove()


@contextmanager
def _captured_inputs(submodule: nn.Module) -> Iterator[list[Tensor]]:
    """What a part of the model was given, call by call."""
    states: list[Tensor] = []
    hook = submodule.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
    try:
        yield states
    finally:
        hook.remove()


def _fill_padding(model: Any, ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Where nothing stands there is the padding token: some models count positions by it."""
    padding_idx = position_padding_idx(model)
    pad = getattr(model.config, "pad_token_id", None) if padding_idx is None else padding_idx
    if attention_mask is None or not isinstance(pad, int) or pad < 0:
        return ids
    return ids.masked_fill(~attention_mask.bool(), pad)


def _long_mask(attention_mask: Tensor | None) -> Tensor | None:
    return None if attention_mask is None else attention_mask.long()


def _position_ids(body: nn.Module, spec: ModelSpec, attention_mask: Tensor | None) -> Tensor | None:
    """Where tokens stand, if padding comes before them and the model does not count for itself: (B, T)."""
    if (
        attention_mask is None
        or bool(attention_mask[:, 0].all())
        or "position_ids" not in inspect.signature(body.forward).parameters
    ):
        return None
    return None if position_padding_idx(body) is not None else (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def position_padding_idx(model: nn.Module) -> int | None:
    """The padding token by which a model counts positions, as RoBERTa does, beginning behind that token's number; or None."""
    name = "create_position_ids_from_input_ids"  # a function of a part's class, or of its file
    for module in model.modules():
        token = getattr(module, "padding_idx", None)
        if isinstance(token, int) and (
            hasattr(module, name) or hasattr(sys.modules.get(type(module).__module__), name)
        ):
            return token  # which may be another than the configuration says
    return None


def _drop_none(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if value is not None}
