"""Calling a transformers model as ours are called: ids and padding in, hidden states or logits out."""

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


def takes_ids(model: Any, ids: Any, padding: Tensor | None) -> Tensor:
    """Token ids as they are; refuse what is not a batch of token ids, and models that read something else."""
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise HeadwiseError(
            f"{type(model).__name__} reads {model.main_input_name}, not token ids; call the model itself, inside "
            f"hw.record(theirs) or theirs.heads[…].silenced()."
        )
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise HeadwiseError(f"token ids are a tensor of whole numbers, (batch, tokens); got {got}.")
    if padding is not None and padding.shape != ids.shape:
        raise HeadwiseError(f"padding is {tuple(padding.shape)} but ids are {tuple(ids.shape)}; True at real tokens.")
    return ids


def hidden_states(
    model: Any,
    spec: ModelSpec,
    ids: Tensor,
    padding: Tensor | None,
    source: Tensor | None,
    source_padding: Tensor | None,
    hidden: bool,
) -> Tensor:
    """One pass: hidden states (B, T, D) after the last norm, or logits (B, T, V)."""
    if spec.kind == "encoder-decoder":
        if source is None:
            raise HeadwiseError("an encoder-decoder needs what it reads: theirs(ids, source=source_ids).")
        _check_sides(model, spec, padding, source_padding)
        given = {
            "input_ids": _padded(model, source, source_padding), "attention_mask": _mask(source_padding),
            "decoder_input_ids": _padded(model, ids, padding), "decoder_attention_mask": _mask(padding),
        }  # fmt: skip
        with _heard(model.get_decoder()) as states, _needs_no_more(model):
            made = model(**_said(given), use_cache=False)
        return states[-1] if hidden else made.logits
    if source is not None:
        raise HeadwiseError(f"this model is of kind {spec.kind} and reads no source; leave source out.")
    body = model.base_model if hidden else model
    inside = hidden and body is model and model.get_output_embeddings() is not None  # its body has no name of its own
    given = {"input_ids": _padded(model, ids, padding), "attention_mask": _mask(padding)}
    given["position_ids"] = _positions(body, spec, padding)
    given |= {"use_cache": False} if spec.kind == "decoder" else {}
    with _inputs_of(model.get_output_embeddings()) if inside else nullcontext([]) as read, _needs_no_more(body):
        made = body(**_said(given))
    if not hidden:
        return made.logits
    states = read[-1] if read else made.last_hidden_state if hasattr(made, "last_hidden_state") else made[0]
    if not isinstance(states, Tensor) or states.shape[:2] != ids.shape:
        raise HeadwiseError(f"{type(body).__name__} gives no hidden state for every token; call the model itself.")
    return states


def _check_sides(model: Any, spec: ModelSpec, *paddings: Tensor | None) -> None:
    """Such models take no positions, and count places from the first column: there, padding on the left moves a text."""
    left = any(padding is not None and not bool(padding[:, 0].all()) for padding in paddings)
    if left and spec.positions != "none":
        raise HeadwiseError(f"{type(model).__name__} counts positions from the first column; put padding on the right.")


@contextmanager
def _needs_no_more(model: nn.Module) -> Iterator[None]:
    """Say so where a model needs more than token ids, or other ones."""
    try:
        yield
    except (HeadwiseError, torch.OutOfMemoryError):
        raise
    except (
        TypeError,
        ValueError,
        RuntimeError,
        AttributeError,
    ) as error:  # shapes that do not fit; None where more is needed
        words = " ".join(str(error).split())
        raise HeadwiseError(
            f"{type(model).__name__} cannot be called with token ids alone ({words}); call the model itself, inside "
            f"hw.record(theirs) or theirs.heads[…].silenced()."
        ) from error


def own_output(
    model: Any,
    ids: Tensor | None,
    padding: Tensor | None,
    source: Tensor | None,
    source_padding: Tensor | None,
    hidden: bool,
    theirs: dict[str, Any],
) -> Any:
    """One pass by what the model itself takes: its own output, whatever that is. Our words stand for theirs."""
    if hidden:
        raise HeadwiseError(
            f"hidden=True gives states and {', '.join(theirs)} the model's own output; leave one of them out, or ask for "
            f"output_hidden_states=True."
        )
    reads = getattr(model, "main_input_name", "input_ids")
    ours = {reads: ids, "attention_mask": _mask(padding)}
    if source is not None:
        ours = {reads: source, "attention_mask": _mask(source_padding), "decoder_input_ids": ids}
        ours["decoder_attention_mask"] = _mask(padding)
    ours = _said(ours)
    for name in ours.keys() & theirs.keys():
        raise HeadwiseError(f"{name} is given twice, in our words and in the model's; say it once.")
    return model(**ours, **theirs)


class OutputHead:
    """From final hidden states to logits by the model's own head, whatever it does besides multiplying."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, hidden: Tensor) -> Tensor:
        """(…, D) → (…, V)"""
        model, states = self._model, hidden.reshape(1, -1, hidden.shape[-1])
        if not _bodies(model):
            raise HeadwiseError(
                f"{type(model).__name__} does not tell its head from its body; ask the model for logits."
            )
        ids = torch.zeros(1, 1, dtype=torch.long, device=hidden.device)
        with _stands_for(model, states):
            logits = model(input_ids=ids).logits  # (1, n, V)
        return logits.reshape(*hidden.shape[:-1], -1)

    def cross_entropy(self, hidden: Tensor, targets: Tensor, total: int | None = None) -> Tensor:
        """(N, D), (N,) → the mean surprise at targets, or the sum divided by `total`."""
        vocab = self._model.get_output_embeddings().weight.shape[0]
        return chunked_cross_entropy(self, vocab, hidden, targets, total)


@contextmanager
def _stands_for(model: nn.Module, states: Tensor) -> Iterator[None]:
    """While open, the body of a model is not run, whichever part of it the head calls: these states are what it gives."""
    from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

    class Given(BaseModelOutputWithPoolingAndCrossAttentions):
        """What a body gave, as far as a head reads it: states, and nothing besides."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    given = Given(last_hidden_state=states)  # pyright: ignore[reportArgumentType]
    bodies = _bodies(model)
    before = [body.__dict__.get("forward") for body in bodies]
    for body in bodies:
        body.__dict__["forward"] = lambda *arguments, **kwargs: given
    try:
        yield
    finally:
        for body, own in zip(bodies, before, strict=True):
            body.__dict__.pop("forward")
            if own is not None:
                body.__dict__["forward"] = own


def _bodies(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that are models themselves: one body, or the two stacks of an encoder-decoder."""
    from transformers import PreTrainedModel

    return [part for part in model.modules() if isinstance(part, PreTrainedModel) and part is not model]


@contextmanager
def _heard(part: nn.Module) -> Iterator[list[Tensor]]:
    """What a part of the model gave, call by call."""
    states: list[Tensor] = []
    hook = part.register_forward_hook(lambda module, given, made: states.append(made[0]))
    try:
        yield states
    finally:
        hook.remove()


@contextmanager
def _inputs_of(part: nn.Module) -> Iterator[list[Tensor]]:
    """What a part of the model was given, call by call."""
    states: list[Tensor] = []
    hook = part.register_forward_pre_hook(lambda module, given: states.append(given[0]))
    try:
        yield states
    finally:
        hook.remove()


def _padded(model: Any, ids: Tensor, padding: Tensor | None) -> Tensor:
    """Where nothing stands there is the padding token: some models count positions by it."""
    by = counted_by(model)
    pad = getattr(model.config, "pad_token_id", None) if by is None else by
    if padding is None or not isinstance(pad, int) or pad < 0:
        return ids
    return ids.masked_fill(~padding.bool(), pad)


def _mask(padding: Tensor | None) -> Tensor | None:
    return None if padding is None else padding.long()


def _positions(body: nn.Module, spec: ModelSpec, padding: Tensor | None) -> Tensor | None:
    """Where tokens stand, if padding comes before them and the model does not count for itself: (B, T)."""
    if padding is None or bool(padding[:, 0].all()) or "position_ids" not in inspect.signature(body.forward).parameters:
        return None
    return None if counted_by(body) is not None else (padding.long().cumsum(1) - 1).clamp(min=0)


def counted_by(model: nn.Module) -> int | None:
    """The padding token by which a model counts positions, as RoBERTa does, beginning behind that token's number; or None."""
    name = "create_position_ids_from_input_ids"  # a function of a part's class, or of its file
    for part in model.modules():
        token = getattr(part, "padding_idx", None)
        if isinstance(token, int) and (hasattr(part, name) or hasattr(sys.modules.get(type(part).__module__), name)):
            return token  # which may be another than the configuration says
    return None


def _said(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
