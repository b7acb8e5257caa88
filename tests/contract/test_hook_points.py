"""Contracts 2, 3 and 5 of layers and models: recording changes nothing; silenced = zeroed = pruned; saved = loaded."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads import AttentionCall, HookPoint, MultiHeadAttention
from headwise.kernels import attention_weights
from headwise.model import Transformer
from headwise.spec import LayerAddress
from tests.contract.layers import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    MODELS,
    PLAIN,
    WIDTH,
    B,
    T,
    assert_equal,
    backends_for,
    call_layer,
    make_layer,
    make_model,
    prune_by_slicing,
    prune_layer_state,
    random_tensor,
    run_model,
)

each_layer = pytest.mark.parametrize("name", LAYERS)
each_layer_with_heads = pytest.mark.parametrize("name", [name for name, spec in LAYERS.items() if spec.head_ids])
each_model = pytest.mark.parametrize("name", MODELS)
each_backend = pytest.mark.parametrize(
    ("name", "backend"), [(name, backend) for name, spec in LAYERS.items() for backend in backends_for(spec)]
)


@contextmanager
def recorded_calls(hook_points: list[HookPoint]) -> Iterator[list[AttentionCall]]:
    """Record the calls at several hook points at once."""
    calls: list[AttentionCall] = []
    with ExitStack() as stack:
        for hook_point in hook_points:
            stack.enter_context(hook_point.listen(calls.append))
        yield calls


# Recording changes nothing, and recorded calls are exact.


def assert_call_reproduces_output(attention_call: AttentionCall, layer: MultiHeadAttention, out: Tensor) -> None:
    """Check that q, k, v and score params give z, and that z gives the output of the layer as a sum over heads."""
    kv_of_head = list(attention_call.params.kv_of_head)
    z = attention_weights(attention_call.q, attention_call.k, attention_call.params) @ attention_call.v[:, kv_of_head]
    if layer.gate is not None:
        z = z * layer.gate[:, None, None]
    if layer.output_gate is not None:
        assert attention_call.token_gate is not None
        z = z * attention_call.token_gate
    assert_equal(attention_call.z, z)
    total = torch.zeros_like(out) if layer.b_O is None else layer.b_O.expand_as(out)
    for index in range(len(layer.spec.head_ids)):
        total = total + attention_call.z[:, index] @ attention_call.hook_point.W_O[index]
    assert_equal(out, total)


@each_backend
@torch.no_grad()
def test_listener_on_layer_keeps_outputs_and_sees_call(name: str, backend: str) -> None:
    layer = make_layer(LAYERS[name], backend=backend)
    before = call_layer(layer)
    with recorded_calls([layer.hook_point]) as calls:
        during = call_layer(layer)
    assert torch.equal(before, during)
    assert torch.equal(before, call_layer(layer))
    (attention_call,) = calls
    assert attention_call.hook_point is layer.hook_point
    assert attention_call.hook_point.head_ids == layer.spec.head_ids
    assert_call_reproduces_output(attention_call, layer, before)


@each_model
@torch.no_grad()
def test_listener_on_model_keeps_outputs_and_sees_all_hook_points(name: str) -> None:
    model = make_model(MODELS[name])
    before, outputs = run_model(model), []
    hooks = [layer.register_forward_hook(lambda *io: outputs.append(io[2])) for layer in model.attention_layers()]
    with recorded_calls(model.hook_points()) as calls:
        during = run_model(model)
    for hook in hooks:
        hook.remove()
    assert torch.equal(before, during)
    assert tuple(attention_call.hook_point.address for attention_call in calls) == model.spec.layer_addresses
    for attention_call, layer, out in zip(calls, model.attention_layers(), outputs, strict=True):
        assert_call_reproduces_output(attention_call, layer, out)


def test_listener_on_layer_keeps_gradients() -> None:
    layer = make_layer(LAYERS["grouped-query"])
    plain = torch.autograd.grad(call_layer(layer).square().sum(), list(layer.parameters()))
    with recorded_calls([layer.hook_point]):
        listened = torch.autograd.grad(call_layer(layer).square().sum(), list(layer.parameters()))
    assert all(torch.equal(expected, actual) for expected, actual in zip(plain, listened, strict=True))


def test_listener_rotary_layer_sees_rotated_q() -> None:
    layer = make_layer(LAYERS["rotary, half"])
    x, (head, *_) = random_tensor(B, T, WIDTH), layer.heads
    with recorded_calls([layer.hook_point]) as calls:
        layer(x)
    unrotated = x @ head.W_Q
    assert_equal(calls[0].q[:, 0, 0], unrotated[:, 0])
    assert not torch.allclose(calls[0].q[:, 0, 1:], unrotated[:, 1:]), "position 0 is not turned, all others are"


# Silenced = zeroed = pruned.


def silenced_outputs(layer: MultiHeadAttention, head_id: int) -> Iterator[Tensor]:
    index = layer.spec.head_ids.index(head_id)
    with layer.heads[head_id].silenced():
        yield call_layer(layer)
    gate = torch.ones(len(layer.spec.head_ids))
    gate[index] = 0
    yield call_layer(layer, gate=gate)
    yield call_layer(layer, gate=gate.expand(B, -1))


@each_layer_with_heads
@torch.no_grad()
def test_silenced_layer_head_equals_zeroed_and_pruned(name: str) -> None:
    spec = LAYERS[name]
    for head_id in spec.head_ids:
        layer = make_layer(spec)
        full, silent = call_layer(layer), list(silenced_outputs(layer, head_id))

        state, after = layer.state_dict(), spec.keep_heads(tuple(n for n in spec.head_ids if n != head_id))
        prune_layer_state(state, spec, after)
        smaller = MultiHeadAttention(after).double().eval()
        smaller.load_state_dict(state)

        layer.heads[head_id].W_O.zero_()
        for out in (*silent, call_layer(smaller)):
            assert_equal(out, call_layer(layer))
        assert not torch.allclose(full, silent[0]), "the head did write something"


PRUNED_HEADS = {
    "decoder": ("0.1", "0.1,1.*", "*"),
    "decoder, rotary": ("0.1", "0.0-1", "1.2,0.*"),
    "decoder, parallel": ("1.3",),
    "decoder, windows": ("1.0,0.3",),
    "decoder, cut": ("0.3", "0.*"),
    "decoder, QK norm": ("0.1", "0.0-1,1.2"),
    "decoder, gates": ("0.1", "0.0-1,1.2"),
    "encoder": ("0.1", "*.2"),
    "encoder-decoder": ("enc.0.1", "dec.1.2", "cross.0.*", "enc.1.*,dec.0.3,cross.1.0-1"),
}


@pytest.mark.parametrize(
    ("name", "pattern"), [(name, pattern) for name, patterns in PRUNED_HEADS.items() for pattern in patterns]
)
@torch.no_grad()
def test_silenced_model_heads_equal_zeroed_and_pruned(name: str, pattern: str) -> None:
    model = make_model(MODELS[name])
    with model.heads[pattern].silenced():
        in_context = run_model(model)
    per_call, per_site = (
        run_model(model, gates={pattern: 0.0}),
        run_model(model, gates=model.heads.select(pattern).gates(0.0)),
    )
    smaller = run_model(prune_by_slicing(model, pattern))
    assert not torch.allclose(run_model(model), in_context), "they did write something"
    for head in model.heads.select(pattern):
        head.W_O.zero_()
    for out in (in_context, per_call, per_site, smaller):
        assert_equal(out, run_model(model))


@torch.no_grad()
def test_gates_overlapping_selections_multiply() -> None:
    model = make_model(MODELS["decoder"])
    combined = run_model(model, gates={"0.*": 0.5, "0.1": 0.5, "1.2": torch.tensor([0.0, 3.0])})
    with model.heads["0.0,0.2-3"].scaled(0.5), model.heads["0.1"].scaled(0.25):
        first, second = run_model(model, gates={"1.2": 0.0}), run_model(model, gates={"1.2": 3.0})
    assert_equal(combined[0], first[0])
    assert_equal(combined[1], second[1])


# Contexts nest, restore, and scale or replace z.


@torch.no_grad()
def test_head_contexts_nested_are_restored() -> None:
    model = make_model(MODELS["decoder"])
    plain, single, double = (
        run_model(model),
        run_model(model, gates={"0.1": 0.0}),
        run_model(model, gates={"0.1": 0.0, "1.3": 0.5}),
    )
    with model.heads["0.1"].silenced():
        with model.heads["1.3"].scaled(0.5):
            assert torch.equal(run_model(model), double)
            with model.heads["0.1"].silenced():
                assert torch.equal(run_model(model), double)
        assert torch.equal(run_model(model), single)
    assert torch.equal(run_model(model), plain)


@torch.no_grad()
def test_head_contexts_exception_restores_model() -> None:
    model = make_model(MODELS["decoder"])
    plain, calls = run_model(model), []
    hook_point = model.hook_points()[0]
    with (
        pytest.raises(KeyError),
        model.heads["0.1,1.*"].silenced(),
        hook_point.listen(calls.append),
        hook_point.replaced(torch.zeros_like),
    ):
        raise KeyError
    assert torch.equal(run_model(model), plain)
    assert not calls


@torch.no_grad()
def test_head_contexts_exit_in_any_order() -> None:
    layer = make_layer(PLAIN)
    calls: list[AttentionCall] = []
    first, second, halved = (
        layer.hook_point.listen(calls.append),
        layer.hook_point.listen(calls.append),
        layer.heads[1].scaled(0.5),
    )
    for context in (first, second, halved):
        context.__enter__()
    first.__exit__(None, None, None)
    call_layer(layer)
    assert len(calls) == 1
    halved.__exit__(None, None, None)
    call_layer(layer)
    second.__exit__(None, None, None)
    call_layer(layer)
    assert len(calls) == 2


@torch.no_grad()
def test_scaled_per_example_tensor_scales_each_row() -> None:
    layer = make_layer(LAYERS["grouped-query"])
    written = layer.per_head_output(random_tensor(B, T, WIDTH)).head_output(2)
    with layer.heads[2].scaled(torch.tensor([0.0, 3.0])):
        scaled = layer(random_tensor(B, T, WIDTH))
    change = torch.tensor([-1.0, 2.0], dtype=torch.float64)[:, None, None] * written
    assert_equal(scaled, layer(random_tensor(B, T, WIDTH)) + change)


@torch.no_grad()
def test_replaced_tensor_or_function_sets_z() -> None:
    layer, z = make_layer(LAYERS["biases"]), random_tensor(B, HEADS, T, HEAD_DIM, seed=8)
    mean = z.mean((0, 2), keepdim=True)  # (1, H, 1, e): mean over all positions
    bias = layer.b_O
    assert bias is not None
    for value in (z, mean):
        with layer.hook_point.replaced(value):
            assert_equal(
                call_layer(layer), torch.einsum("bhte,hed->btd", value.expand_as(z), layer.hook_point.W_O) + bias
            )
    with layer.hook_point.replaced(lambda z: -z):
        flipped = call_layer(layer)
    assert_equal(flipped, 2 * bias - call_layer(layer))


@torch.no_grad()
def test_hook_point_edits_apply_in_order_before_listeners() -> None:
    layer = make_layer(PLAIN)
    with (
        layer.hook_point.replaced(torch.ones_like),
        layer.heads[1].scaled(3.0),
        recorded_calls([layer.hook_point]) as calls,
    ):
        call_layer(layer)
    want = torch.tensor([1.0, 3.0, 1.0, 1.0], dtype=torch.float64)[:, None, None].expand_as(calls[0].z)
    assert torch.equal(calls[0].z, want)


MISFITS: dict[str, tuple[Any, str]] = {
    "scaled, too few": (lambda layer: layer.hook_point.scaled(torch.ones(3)), r"shape \(4,\) .*Got shape \(3,\)"),
    "scaled, other batch": (
        lambda layer: layer.heads[0].scaled(torch.ones(3)),
        r"shape \(4,\) or \(2, 4\)\. Got shape \(3, 4\)",
    ),
    "replaced, function": (
        lambda layer: layer.hook_point.replaced(lambda z: z[..., :-1]),
        r"has shape \(2, 4, 5, 5\), but z has \(2, 4, 5, 6\)",
    ),
    "replaced, tensor": (
        lambda layer: layer.hook_point.replaced(torch.zeros(B, HEADS, T, HEAD_DIM + 1)),
        r"has shape \(2, 4, 5, 7\), but z has \(2, 4, 5, 6\)",
    ),
}


@pytest.mark.parametrize(("context", "message"), MISFITS.values(), ids=MISFITS)
def test_hook_point_edit_wrong_shape_raises(context: Any, message: str) -> None:
    layer = make_layer(PLAIN)
    with context(layer), pytest.raises(HeadwiseError, match=message):
        call_layer(layer)


def test_gates_wrong_shape_raises() -> None:
    layer, model = make_layer(PLAIN), make_model(MODELS["decoder"])
    with pytest.raises(HeadwiseError, match=r"shape \(4,\) or \(2, 4\)\. Got shape \(5,\)"):
        call_layer(layer, gate=torch.ones(5))
    with pytest.raises(HeadwiseError, match=r"one number per example, \(B,\)\. Got \(2, 4\)"):
        layer.heads[0].scaled(torch.ones(2, 4)).__enter__()
    with pytest.raises(HeadwiseError, match=r"'0\.9': the model has no such head"):
        run_model(model, gates={"0.9": 0.0})
    with pytest.raises(HeadwiseError, match="9"):
        run_model(model, gates={LayerAddress("", 9): torch.zeros(4)})


# Contexts do not affect each other.


@torch.no_grad()
def test_gates_two_threads_are_independent() -> None:
    model = make_model(MODELS["decoder"])
    gates_by_name: dict[str, Any] = {"plain": None, "silent": {"0.1": 0.0}, "doubled": {"1.*": 2.0}}
    alone = {name: run_model(model, gates=gates) for name, gates in gates_by_name.items()}
    wrong: list[str] = []

    def run_repeatedly(name: str) -> None:
        with torch.no_grad():
            wrong.extend(
                name for _ in range(25) if not torch.equal(run_model(model, gates=gates_by_name[name]), alone[name])
            )

    threads = [Thread(target=run_repeatedly, args=(name,)) for name in gates_by_name]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@each_model
@torch.no_grad()
def test_deepcopy_model_has_own_hook_points(name: str) -> None:
    model = make_model(MODELS[name])
    twin, plain = copy.deepcopy(model), run_model(model)
    for hook_point, copied in zip(model.hook_points(), twin.hook_points(), strict=True):
        assert copied is not hook_point
        assert copied.W_O.data_ptr() != hook_point.W_O.data_ptr() or hook_point.W_O.numel() == 0
    with twin.heads["*" if "-" not in name else "enc.*"].silenced(), recorded_calls(model.hook_points()) as calls:
        assert not torch.allclose(run_model(twin), plain)
        assert not calls
        assert torch.equal(run_model(model), plain)
    for parameter in twin.parameters():
        parameter.zero_()
    assert torch.equal(run_model(model), plain)
    assert all(bool((hook_point.W_O == 0).all()) for hook_point in twin.hook_points())


# Checkpointing saves memory and changes nothing else.


def losses_and_gradients(model: Transformer, **options: Any) -> list[Tensor]:
    out = run_model(model, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(model.parameters()), materialize_grads=True)]


@each_model
def test_checkpointing_keeps_outputs_and_gradients_listens_once(name: str) -> None:
    model = make_model(MODELS[name])
    plain = losses_and_gradients(model)
    model.checkpointing = True
    with recorded_calls(model.hook_points()) as calls:
        saved = losses_and_gradients(model)
    assert tuple(attention_call.hook_point.address for attention_call in calls) == model.spec.layer_addresses, (
        "each once, though blocks ran twice"
    )
    for expected, actual in zip(plain, saved, strict=True):
        assert_equal(actual, expected)


def test_checkpointing_dropout_repeats_same_mask() -> None:
    model = make_model(MODELS["decoder"]).train()
    for block in model.blocks:
        block.dropout.p = 0.3  # pyright: ignore
        block.attention.head_dropout.rate = 0.5  # pyright: ignore
    torch.manual_seed(0)
    plain = losses_and_gradients(model)
    model.checkpointing = True
    torch.manual_seed(0)
    for expected, actual in zip(plain, losses_and_gradients(model), strict=True):
        assert_equal(actual, expected)


def test_checkpointing_silenced_heads_stay_silenced_in_backward() -> None:
    """The backward pass may run after the context has closed. Blocks are then repeated with the original edits."""
    model = make_model(MODELS["decoder"])
    want = losses_and_gradients(model, gates={"0.1": 0.0})[1:]
    model.checkpointing = True
    with model.heads["0.1"].silenced():
        loss = run_model(model).square().sum()
    for expected, actual in zip(want, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        assert_equal(actual, expected)
