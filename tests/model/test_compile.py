"""Native models under torch.compile: one graph, no recompilation per layer, and the outputs of the eager model."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw

NANO = hw.preset("nano").resized(layers=2, width=32, heads=4)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8, 1]])


class GraphCounter:
    """A backend that runs graphs eagerly and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Reset compiled code between tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_model(spec: hw.ModelSpec = NANO) -> hw.Transformer:
    torch.manual_seed(0)
    return hw.Transformer(spec).eval()


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


attention = NANO.attention
VARIANTS: dict[str, hw.ModelSpec] = {
    "nano": NANO,
    "gqa": hw.preset("llama2-7b").resized(layers=2, width=32, heads=4),
    "gpt2": hw.preset("gpt2").resized(layers=2, width=32, heads=4, context=16),
    "bert": hw.preset("bert-base").resized(layers=2, width=32, heads=4, context=16),
    "window": replace(NANO, windows=(4,)),
    "softcap": replace(NANO, attention=replace(attention, softcap=3.0)),
    "sink": replace(NANO, attention=replace(attention, softmax="sink")),
    "alibi": replace(NANO, positions="none", attention=replace(attention, rotary=None, alibi=True)),
    "T5 buckets": replace(NANO, positions="none", attention=replace(attention, rotary=None, t5_buckets=8)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "nano" else pytest.mark.slow) for name in VARIANTS]
)
def test_compiled_forward_and_training_step_are_one_graph(name: str) -> None:
    model, backend = make_model(VARIANTS[name]), GraphCounter()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        assert_close(compiled(IDS), model(IDS))
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
        assert_close(compiled(IDS, attention_mask=mask), model(IDS, attention_mask=mask))
    assert backend.graphs == 2
    model.train()
    token_loss(model(IDS), IDS).backward()
    expected = {key: weight.grad.clone() for key, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    token_loss(compiled(IDS), IDS).backward()
    assert backend.graphs == 3
    assert len(expected) > 10
    for key, weight in model.named_parameters():
        if key in expected:
            assert weight.grad is not None
            assert_close(weight.grad, expected[key])


def test_compiled_training_step_with_checkpointing_is_one_graph() -> None:
    model, backend = make_model().train(), GraphCounter()
    model.checkpointing = True
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    token_loss(compiled(IDS), IDS).backward()
    weight = model.embed.tokens.weight
    assert backend.graphs == 1
    assert isinstance(weight.grad, Tensor)
    compiled_grad, weight.grad = weight.grad, None
    token_loss(model(IDS), IDS).backward()
    assert isinstance(weight.grad, Tensor)
    assert_close(compiled_grad, weight.grad)


@pytest.mark.parametrize("pruned", ["", pytest.param("0.1,1.*", marks=pytest.mark.slow)])
def test_compiled_decode_with_static_cache_compiles_twice(pruned: str) -> None:
    """Once for the first length and once for all others."""
    model, backend = make_model(), GraphCounter()
    model = model.prune(pruned) if pruned else model
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    cache = model.cache("static", 32)
    with torch.no_grad():
        model(IDS, cache=cache)
        steps = [compiled(torch.full((2, 1), token), cache=cache) for token in range(8)]
        full = torch.cat([IDS, torch.arange(8).expand(2, 8)], 1)
        assert_close(torch.cat(steps, 1), model(full)[:, 7:])
    assert backend.graphs == 2


def test_generate_of_compiled_model_equals_eager() -> None:
    model = make_model()
    expected = model.generate(IDS[:1], max_new_tokens=12)
    backend = GraphCounter()
    model.compile(backend=backend, fullgraph=True)
    result = model.generate(IDS[:1], max_new_tokens=12, cache=model.cache("static", 32))
    assert torch.equal(torch.as_tensor(result), torch.as_tensor(expected))
    assert 0 < backend.graphs <= 3  # the prompt, the first step, and the other steps


# Run in a new process: which guards a compiled block has depends on the state of its process, such as open edits.
BLOCKS = """
from dataclasses import replace
import torch
import headwise as hw
from tests.model.test_compile import IDS, NANO, GraphCounter, make_model

model, backend = make_model(replace(NANO, layers=10)), GraphCounter()
with torch.no_grad():
    expected = model(IDS)
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    torch.testing.assert_close(model(IDS), expected, rtol=1e-4, atol=1e-5)
print(backend.graphs)
"""


def test_blocks_compiled_one_by_one_share_their_graphs() -> None:
    """If it fails, standard error names the guard that made a block compile again."""
    environment = os.environ | {"TORCH_LOGS": "recompiles"}
    done = subprocess.run([sys.executable, "-c", BLOCKS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2"], done.stderr  # the first block creates the mask that the others read


@pytest.mark.slow
def test_blocks_compiled_while_an_edit_of_another_model_is_open_compile_once_each() -> None:
    """Compiled code then looks up each layer among the open edits."""
    model, other, backend = make_model(replace(NANO, layers=4)), make_model(), GraphCounter()
    with torch.no_grad():
        expected = model(IDS)
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        with other.heads["0.1"].silenced():
            assert_close(model(IDS), expected)
    assert backend.graphs == 4


@pytest.mark.slow
def test_compiled_quantized_model_is_one_graph() -> None:
    model, backend = hw.quantize(make_model(), 8), GraphCounter()
    with torch.no_grad():
        assert_close(torch.compile(model, backend=backend, fullgraph=True)(IDS), model(IDS))
    assert backend.graphs == 1


def test_compiled_model_heeds_edits_and_shows_calls_to_listeners() -> None:
    """An edit adds a graph. With listeners open, each layer is a graph break, and outputs are equal."""
    model = make_model()
    compiled: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        plain = compiled(IDS)
        with model.heads["1.2"].silenced():
            assert_close(compiled(IDS), model(IDS))
            assert not torch.allclose(compiled(IDS), plain)
        calls_seen: list[Tensor] = []
        with model.hook_points()[1].listen(lambda call: calls_seen.append(call.z)):
            assert_close(compiled(IDS), plain)
            model(IDS)
    assert len(calls_seen) == 2
    assert_close(calls_seen[0], calls_seen[1])


def test_compiled_full_graph_with_a_listener_raises() -> None:
    model = make_model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with model.hook_points()[0].listen(lambda call: None), pytest.raises(Exception, match="listener is open"):
        compiled(IDS)
