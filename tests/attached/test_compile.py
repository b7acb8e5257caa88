"""Attached models under torch.compile: edits, pruning and contexts give the outputs of the eager model."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.attached.models import BY_NAME, main_output

each_family = pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "qwen3", "gemma3", "gpt2"))]
)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Reset compiled code between tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def silenced(attached: Any, heads: str) -> AbstractContextManager[None]:
    return attached.heads.select(heads).silenced()


def mean_ablated(attached: Any, layer: int) -> AbstractContextManager[None]:
    return attached.hook_points()[layer].replaced(lambda z: z.mean(2, keepdim=True).expand_as(z))


def patched(attached: Any, layer: int) -> AbstractContextManager[None]:
    hook_point = attached.hook_points()[layer]
    return hook_point.replaced(torch.full((1, len(hook_point.head_ids), 1, 1), 0.3))


EDITS: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "plain": lambda attached: nullcontext(),
    "silenced in layer 1": lambda attached: silenced(attached, "1.2"),
    "silenced in layer 0": lambda attached: silenced(attached, "0.1"),
    "silenced in two layers": lambda attached: silenced(attached, "0.1,2.0-1"),
    "scaled": lambda attached: attached.heads.select("2.*").scaled(0.5),
    "scaled by another number": lambda attached: attached.heads.select("2.*").scaled(-2.0),
    "mean-ablated": lambda attached: mean_ablated(attached, 1),
    "replaced by a tensor": lambda attached: patched(attached, 2),
    "plain again": lambda attached: nullcontext(),
}


def assert_close(actual: Tensor, expected: Tensor, edit: str = "") -> None:
    """Compare up to float32 rounding in another order of operations."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{edit}: {text}")


def call(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return main_output(model(**inputs))


@each_family
def test_compiled_model_edited_equals_eager(name: str) -> None:
    model, inputs = BY_NAME[name].build(), BY_NAME[name].inputs("left")
    attached = hw.attach(model)
    compiled = torch.compile(model, backend="eager", fullgraph=name != "gpt_oss", dynamic=False)
    plain = call(model, inputs)
    for edit, opened in EDITS.items():
        with opened(attached):
            want = call(model, inputs)
            assert_close(call(compiled, inputs), want, edit)
        assert torch.equal(want, plain) == edit.startswith("plain"), edit


@each_family
def test_compiled_model_pruned_equals_eager(name: str) -> None:
    model, inputs = BY_NAME[name].build(), BY_NAME[name].inputs("left")
    attached = hw.attach(model).prune("0.1,1.0-2")
    compiled = torch.compile(attached.model, backend="eager")
    for heads in ("", "2.1"):
        with silenced(attached, heads) if heads else nullcontext():
            assert_close(call(compiled, inputs), call(attached.model, inputs), heads)


def test_compiled_model_with_a_listener_shows_every_layer() -> None:
    """Listeners run outside the compiled region: outputs are equal, and each layer reports its own call."""
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].inputs("left")
    attached = hw.attach(model)
    compiled = torch.compile(model, backend="eager")
    call(compiled, inputs)
    recorded: dict[str, Tensor] = {}
    for layer in attached.hook_points():
        with layer.listen(
            lambda attention_call: recorded.__setitem__(str(attention_call.hook_point.address), attention_call.z)
        ):
            call(compiled, inputs)
    expected: dict[str, Tensor] = {}
    for layer in attached.hook_points():
        with layer.listen(
            lambda attention_call: expected.__setitem__(str(attention_call.hook_point.address), attention_call.z)
        ):
            call(model, inputs)
    assert recorded.keys() == expected.keys()
    for address, z in expected.items():
        assert_close(recorded[address], z, address)


def test_compiled_full_graph_with_a_listener_raises() -> None:
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].inputs("left")
    attached = hw.attach(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with (
        attached.hook_points()[0].listen(lambda attention_call: None),
        pytest.raises(Exception, match="listener is open"),
    ):
        call(compiled, inputs)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gpt2"))])
def test_generate_with_a_compiled_static_cache_equals_the_dynamic_cache(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an accelerator transformers compiles `generate` with a static cache; here its condition is forced to be true."""
    from transformers import CompileConfig

    compile_config: Any = CompileConfig
    model = BY_NAME[name].build()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    attached = hw.attach(model)
    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", lambda *arguments, **named: True)
    options: Any = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    options["pad_token_id"] = 0
    static = {
        "cache_implementation": "static",
        "compile_config": compile_config(backend="eager", fullgraph=False, mode=None),
    }
    for heads in ("", "1.1"):
        with silenced(attached, heads) if heads else nullcontext():
            expected = model.generate(ids, **options)
            actual = model.generate(ids, **options, **static)
        assert_close(torch.stack(actual.logits), torch.stack(expected.logits), heads)
    assert model._compiled_call is not None, "transformers compiled the model"


@pytest.mark.slow
def test_compiled_by_inductor_edited_equals_eager() -> None:
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].inputs("left")
    attached = hw.attach(model)
    compiled = torch.compile(model)
    for edit, opened in EDITS.items():
        with opened(attached):
            assert_close(call(compiled, inputs), call(model, inputs), edit)
