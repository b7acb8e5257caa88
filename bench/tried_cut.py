"""Heads cut out of a tiny model of any architecture: attached, detached, writing on, and from a folder."""

import contextlib
import io
import tempfile
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from bench.tried_with import check_same, outputs, sample_heads
from headwise.attached.prune_in_place import flatten_tensors


class LayerPruneUnsupported(Exception):  # noqa: N818 (a finding, not an error)
    """Heads can be cut, but no whole layer."""


def check_prune(model: Any, part: Any, inputs: dict[str, Tensor]) -> None:
    """Without heads, attached, detached and from a folder, it is what it was with them silenced."""
    if part is not model:
        return
    refused: hw.HeadwiseError | None = None
    with hw.attach(model) as attached:
        for heads in head_sets_to_prune(attached):
            with attached.heads.select(heads).silenced():
                silent, written = outputs(model, inputs), cached_step_outputs(model, inputs)
            try:
                small = attached.prune(heads)
            except hw.HeadwiseError as error:
                if len({address.layer_address for address in heads}) > 1:
                    raise  # not even single heads
                refused = error  # whole layers
                continue
            for state in ("cut", "detached"):
                inner = small.model if state == "cut" else small.detach()
                label = f"{state} {', '.join(map(str, heads))}, beside silence"
                for a, b in zip(outputs(inner, inputs), silent, strict=True):
                    check_same(a, b, label)
                for a, b in zip(cached_step_outputs(inner, inputs), written, strict=True):
                    check_same(a, b, f"{label}, writing on")
            check_save_load(small, outputs(small.model, inputs), inputs)
    if refused is not None:
        raise LayerPruneUnsupported(str(refused))


def head_sets_to_prune(attached: Any) -> list[tuple[Any, ...]]:
    """What is cut: single heads here and there, so that groups differ in size; and a whole layer, the first of a stack."""
    addresses = attached.heads.addresses
    single = tuple(head.address for head in sample_heads(attached))
    layer = tuple(address for address in addresses if address.layer_address == addresses[0].layer_address)
    return [single, layer] if len(layer) < len(addresses) else [single]


def cached_step_outputs(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What a decoder says to a next token, keys and values of those before it in a cache; nothing of other models."""
    ids = inputs.get("input_ids")
    if ids is None or set(inputs) != {"input_ids"} or not getattr(model, "can_generate", lambda: False)():
        return []
    with torch.no_grad():
        try:
            first = model(input_ids=ids[:, :-1], use_cache=True)
            return flatten_tensors(model(input_ids=ids[:, -1:], past_key_values=first.past_key_values)[0])
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
            return []  # it keeps no such cache


def check_save_load(attached: Any, expected: list[Tensor], inputs: dict[str, Tensor]) -> None:
    """Saved and loaded again it gives the same bits."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        attached.save_pretrained(f"{folder}/small")
        again = type(attached).reopen(f"{folder}/small", dtype=None)
        for a, b in zip(outputs(again.model, inputs), expected, strict=True):
            check_same(a, b, "cut, saved and loaded again")
        again.detach()
