"""Checks of pruning on a tiny model of any architecture: attached, detached, with a cache, and saved."""

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
    """Heads can be pruned, but not all heads of a layer."""


def check_prune(model: Any, part: Any, inputs: dict[str, Tensor]) -> None:
    """Check that the pruned model, attached, detached or loaded from a folder, equals the model with silenced heads."""
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
                    raise  # single heads cannot be pruned
                refused = error  # full layers
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
    """Return the sets of heads to prune: single heads, so that KV groups differ in size, and the full first layer."""
    addresses = attached.heads.addresses
    single = tuple(head.address for head in sample_heads(attached))
    layer = tuple(address for address in addresses if address.layer_address == addresses[0].layer_address)
    return [single, layer] if len(layer) < len(addresses) else [single]


def cached_step_outputs(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the outputs of a decoder for one more token with a cache, or nothing for other models."""
    ids = inputs.get("input_ids")
    if ids is None or set(inputs) != {"input_ids"} or not getattr(model, "can_generate", lambda: False)():
        return []
    with torch.no_grad():
        try:
            first = model(input_ids=ids[:, :-1], use_cache=True)
            return flatten_tensors(model(input_ids=ids[:, -1:], past_key_values=first.past_key_values)[0])
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
            return []  # no such cache


def check_save_load(attached: Any, expected: list[Tensor], inputs: dict[str, Tensor]) -> None:
    """Check that the saved and reloaded model gives equal bits."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        attached.save_pretrained(f"{folder}/small")
        again = type(attached).reopen(f"{folder}/small", dtype=None)
        for a, b in zip(outputs(again.model, inputs), expected, strict=True):
            check_same(a, b, "cut, saved and loaded again")
        again.detach()
