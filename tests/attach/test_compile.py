"""Attached models under torch.compile: edits, pruning and contexts give the numbers of the eager model."""

import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.attach.models import BY_NAME, first

FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "gpt_oss")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # rounding of float32 in another order of the same operations
each_family = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No test inherits the compiled code of another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def silenced(theirs: Any, heads: str) -> AbstractContextManager[None]:
    return theirs.heads.select(heads).silenced()


def mean_ablated(theirs: Any, layer: int) -> AbstractContextManager[None]:
    return theirs.sites()[layer].replaced(lambda z: z.mean(2, keepdim=True).expand_as(z))


def patched(theirs: Any, layer: int) -> AbstractContextManager[None]:
    site = theirs.sites()[layer]
    return site.replaced(torch.full((1, len(site.head_ids), 1, 1), 0.3))


EDITS: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "plain": lambda theirs: nullcontext(),
    "silenced in layer 1": lambda theirs: silenced(theirs, "1.2"),
    "silenced in layer 0": lambda theirs: silenced(theirs, "0.1"),
    "silenced in two layers": lambda theirs: silenced(theirs, "0.1,2.0-1"),
    "scaled": lambda theirs: theirs.heads.select("2.*").scaled(0.5),
    "scaled by another number": lambda theirs: theirs.heads.select("2.*").scaled(-2.0),
    "mean-ablated": lambda theirs: mean_ablated(theirs, 1),
    "replaced by a tensor": lambda theirs: patched(theirs, 2),
    "plain again": lambda theirs: nullcontext(),
}


def call(model: Any, given: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return first(model(**given))


@each_family
def test_compiled_model_edited_equals_eager(name: str) -> None:
    model, given = BY_NAME[name].build(), BY_NAME[name].inputs("left")
    theirs = hw.attach(model)
    compiled = torch.compile(model, backend="eager", fullgraph=name != "gpt_oss", dynamic=False)
    plain = call(model, given)
    for edit, opened in EDITS.items():
        with opened(theirs):
            want = call(model, given)
            torch.testing.assert_close(call(compiled, given), want, **CLOSE, msg=lambda text, edit=edit: f"{edit}: {text}")
        assert torch.equal(want, plain) == edit.startswith("plain"), edit


@each_family
def test_compiled_model_pruned_equals_eager(name: str) -> None:
    model, given = BY_NAME[name].build(), BY_NAME[name].inputs("left")
    theirs = hw.attach(model).without("0.1,1.0-2")
    compiled = torch.compile(theirs.model, backend="eager")
    for heads in ("", "2.1"):
        with silenced(theirs, heads) if heads else nullcontext():
            torch.testing.assert_close(call(compiled, given), call(theirs.model, given), **CLOSE)
