"""Attached models under torch.compile: edits, pruning and contexts give the numbers of the eager model."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.attached.models import BY_NAME, first

each_family = pytest.mark.parametrize(
    "name", ["llama", "gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma3", "gpt2"))]
)


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


def assert_close(actual: Tensor, expected: Tensor, edit: str = "") -> None:
    """Up to the rounding of float32 in another order of the same operations."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{edit}: {text}")


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
            assert_close(call(compiled, given), want, edit)
        assert torch.equal(want, plain) == edit.startswith("plain"), edit


@each_family
def test_compiled_model_pruned_equals_eager(name: str) -> None:
    model, given = BY_NAME[name].build(), BY_NAME[name].inputs("left")
    theirs = hw.attach(model).without("0.1,1.0-2")
    compiled = torch.compile(theirs.model, backend="eager")
    for heads in ("", "2.1"):
        with silenced(theirs, heads) if heads else nullcontext():
            assert_close(call(compiled, given), call(theirs.model, given), heads)


def test_compiled_model_with_a_listener_shows_every_layer() -> None:
    """Listeners run outside the compiled region: the model gives the same numbers, and each layer shows its own call."""
    model, given = BY_NAME["llama"].build(), BY_NAME["llama"].inputs("left")
    theirs = hw.attach(model)
    compiled = torch.compile(model, backend="eager")
    call(compiled, given)
    shown: dict[str, Tensor] = {}
    for layer in theirs.sites():
        with layer.listen(lambda seen: shown.__setitem__(str(seen.site.address), seen.z)):
            call(compiled, given)
    expected: dict[str, Tensor] = {}
    for layer in theirs.sites():
        with layer.listen(lambda seen: expected.__setitem__(str(seen.site.address), seen.z)):
            call(model, given)
    assert shown.keys() == expected.keys()
    for address, z in expected.items():
        assert_close(shown[address], z, address)


def test_compiled_full_graph_with_a_listener_raises() -> None:
    model, given = BY_NAME["llama"].build(), BY_NAME["llama"].inputs("left")
    theirs = hw.attach(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with theirs.sites()[0].listen(lambda seen: None), pytest.raises(Exception, match="listener is open"):
        call(compiled, given)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gpt2"))])
def test_generate_with_a_compiled_static_cache_equals_the_dynamic_cache(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an accelerator transformers compiles `generate` with a static cache; here its condition is forced to hold."""
    from transformers import CompileConfig

    compile_config: Any = CompileConfig
    model = BY_NAME[name].build()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    theirs = hw.attach(model)
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *arguments, **named: True)
    options: Any = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    options["pad_token_id"] = 0
    static = {
        "cache_implementation": "static",
        "compile_config": compile_config(backend="eager", fullgraph=False, mode=None),
    }
    for heads in ("", "1.1", "0.0"):
        with silenced(theirs, heads) if heads else nullcontext():
            expected = model.generate(ids, **options)
            actual = model.generate(ids, **options, **static)
        assert_close(torch.stack(actual.logits), torch.stack(expected.logits), heads)
    assert model._compiled_call is not None, "transformers compiled the model"


@pytest.mark.slow
def test_compiled_by_inductor_edited_equals_eager() -> None:
    model, given = BY_NAME["llama"].build(), BY_NAME["llama"].inputs("left")
    theirs = hw.attach(model)
    compiled = torch.compile(model)
    for edit, opened in EDITS.items():
        with opened(theirs):
            assert_close(call(compiled, given), call(model, given), edit)
