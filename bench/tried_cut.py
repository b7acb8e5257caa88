"""Heads cut out of a tiny model of any architecture: attached, detached, writing on, and from a folder."""

import contextlib
import io
import tempfile
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from bench.tried_with import check_same, outputs, some_heads
from headwise.attached.verify_prune import tensors


class HalfRefused(Exception):  # noqa: N818 (a finding, not an error)
    """Heads can be cut, but no whole layer."""


def check_cut(model: Any, part: Any, given: dict[str, Tensor]) -> None:
    """Without heads, attached, detached and from a folder, it is what it was with them silenced."""
    if part is not model:
        return
    refused: hw.HeadwiseError | None = None
    with hw.attach(model) as theirs:
        for which in cuts_of(theirs):
            with theirs.heads.select(which).silenced():
                silent, written = outputs(model, given), next_tokens(model, given)
            try:
                small = theirs.without(which)
            except hw.HeadwiseError as error:
                if len({address.site for address in which}) > 1:
                    raise  # not even single heads
                refused = error  # whole layers
                continue
            for state in ("cut", "detached"):
                inner = small.model if state == "cut" else small.detach()
                told = f"{state} {', '.join(map(str, which))}, beside silence"
                for a, b in zip(outputs(inner, given), silent, strict=True):
                    check_same(a, b, told)
                for a, b in zip(next_tokens(inner, given), written, strict=True):
                    check_same(a, b, f"{told}, writing on")
            check_folder(small, outputs(small.model, given), given)
    if refused is not None:
        raise HalfRefused(str(refused))


def cuts_of(theirs: Any) -> list[tuple[Any, ...]]:
    """What is cut: single heads here and there, so that groups differ in size; and a whole layer, the first of a stack."""
    there = theirs.heads.addresses
    single = tuple(head.address for head in some_heads(theirs))
    layer = tuple(address for address in there if address.site == there[0].site)
    return [single, layer] if len(layer) < len(there) else [single]


def next_tokens(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """What a decoder says to a next token, keys and values of those before it in a cache; nothing of other models."""
    ids = given.get("input_ids")
    if ids is None or set(given) != {"input_ids"} or not getattr(model, "can_generate", lambda: False)():
        return []
    with torch.no_grad():
        try:
            first = model(input_ids=ids[:, :-1], use_cache=True)
            return tensors(model(input_ids=ids[:, -1:], past_key_values=first.past_key_values)[0])
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
            return []  # it keeps no such cache


def check_folder(theirs: Any, want: list[Tensor], given: dict[str, Tensor]) -> None:
    """Saved and loaded again it gives the same bits."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        theirs.save_pretrained(f"{folder}/small")
        again = type(theirs).reopen(f"{folder}/small", dtype=None)
        for a, b in zip(outputs(again.model, given), want, strict=True):
            check_same(a, b, "cut, saved and loaded again")
        again.detach()
