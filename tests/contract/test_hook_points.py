"""Contracts 2, 3 and 5 for layers and models: looking changes nothing; silent = zeroed = cut; saved = loaded."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention, Seen, Site
from headwise.kernels import maps
from headwise.model import Transformer
from headwise.spec import SiteAddress
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
    call,
    cut_layer,
    cut_model,
    make_layer,
    make_model,
    numbers,
    run,
)

each_layer = pytest.mark.parametrize("name", LAYERS)
each_layer_with_heads = pytest.mark.parametrize("name", [name for name, spec in LAYERS.items() if spec.head_ids])
each_model = pytest.mark.parametrize("name", MODELS)
each_backend = pytest.mark.parametrize(
    ("name", "backend"), [(name, backend) for name, spec in LAYERS.items() for backend in backends_for(spec)]
)


@contextmanager
def listening(sites: list[Site]) -> Iterator[list[Seen]]:
    """Listen at many sites at once and keep what they show."""
    shown: list[Seen] = []
    with ExitStack() as stack:
        for site in sites:
            stack.enter_context(site.listen(shown.append))
        yield shown


# Looking changes nothing, and what is shown is what happened.


def assert_tells_the_truth(seen: Seen, layer: MultiHeadAttention, out: Tensor) -> None:
    """From q, k, v and terms one gets z, and from z what the layer returned, as a sum over heads."""
    groups = list(seen.terms.groups)
    z = maps(seen.q, seen.k, seen.terms) @ seen.v[:, groups]
    if layer.gate is not None:
        z = z * layer.gate[:, None, None]
    assert_equal(seen.z, z)
    total = torch.zeros_like(out) if layer.b_O is None else layer.b_O.expand_as(out)
    for index in range(len(layer.spec.head_ids)):
        total = total + seen.z[:, index] @ seen.site.W_O[index]
    assert_equal(out, total)


@each_backend
@torch.no_grad()
def test_listening_to_a_layer_changes_no_bit_and_shows_all_of_it(name: str, backend: str) -> None:
    layer = make_layer(LAYERS[name], backend=backend)
    before = call(layer)
    with listening([layer.site]) as shown:
        during = call(layer)
    assert torch.equal(before, during)
    assert torch.equal(before, call(layer))
    (seen,) = shown
    assert seen.site is layer.site
    assert seen.site.head_ids == layer.spec.head_ids
    assert_tells_the_truth(seen, layer, before)


@each_model
@torch.no_grad()
def test_listening_to_a_model_changes_no_bit_and_shows_every_site_in_order(name: str) -> None:
    model = make_model(MODELS[name])
    before, outputs = run(model), []
    hooks = [layer.register_forward_hook(lambda *io: outputs.append(io[2])) for layer in model.attention_layers()]
    with listening(model.sites()) as shown:
        during = run(model)
    for hook in hooks:
        hook.remove()
    assert torch.equal(before, during)
    assert tuple(seen.site.address for seen in shown) == model.spec.sites
    for seen, layer, out in zip(shown, model.attention_layers(), outputs, strict=True):
        assert_tells_the_truth(seen, layer, out)


def test_listening_changes_no_gradient() -> None:
    layer = make_layer(LAYERS["grouped-query"])
    plain = torch.autograd.grad(call(layer).square().sum(), list(layer.parameters()))
    with listening([layer.site]):
        heard = torch.autograd.grad(call(layer).square().sum(), list(layer.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(plain, heard, strict=True))


def test_q_and_k_are_shown_after_positions() -> None:
    layer = make_layer(LAYERS["rotary, half"])
    x, (head, *_) = numbers(B, T, WIDTH), layer.heads
    with listening([layer.site]) as shown:
        layer(x)
    unturned = x @ head.W_Q
    assert_equal(shown[0].q[:, 0, 0], unturned[:, 0])
    assert not torch.allclose(shown[0].q[:, 0, 1:], unturned[:, 1:]), "position 0 is not turned, all others are"


# Silent = zeroed = cut.


def silenced_three_ways(layer: MultiHeadAttention, number: int) -> Iterator[Tensor]:
    index = layer.spec.head_ids.index(number)
    with layer.heads[number].silenced():
        yield call(layer)
    gate = torch.ones(len(layer.spec.head_ids))
    gate[index] = 0
    yield call(layer, gate=gate)
    yield call(layer, gate=gate.expand(B, -1))


@each_layer_with_heads
@torch.no_grad()
def test_a_silent_head_of_a_layer_is_a_zeroed_one_is_a_cut_one(name: str) -> None:
    spec = LAYERS[name]
    for number in spec.head_ids:
        layer = make_layer(spec)
        whole, silent = call(layer), list(silenced_three_ways(layer, number))

        state, after = layer.state_dict(), spec.keep(tuple(n for n in spec.head_ids if n != number))
        cut_layer(state, spec, after)
        smaller = MultiHeadAttention(after).double().eval()
        smaller.load_state_dict(state)

        layer.heads[number].W_O.zero_()
        for out in (*silent, call(smaller)):
            assert_equal(out, call(layer))
        assert not torch.allclose(whole, silent[0]), "the head did write something"


CUTS = {
    "decoder": ("0.1", "0.1,1.*", "*"),
    "decoder, rotary": ("0.1", "0.0-1", "1.2,0.*"),
    "decoder, parallel": ("1.3",),
    "decoder, windows": ("1.0,0.3",),
    "decoder, cut": ("0.3", "0.*"),
    "encoder": ("0.1", "*.2"),
    "encoder-decoder": ("enc.0.1", "dec.1.2", "cross.0.*", "enc.1.*,dec.0.3,cross.1.0-1"),
}


@pytest.mark.parametrize(("name", "pattern"), [(name, pattern) for name, some in CUTS.items() for pattern in some])
@torch.no_grad()
def test_silent_heads_of_a_model_are_zeroed_ones_are_cut_ones(name: str, pattern: str) -> None:
    model = make_model(MODELS[name])
    with model.heads[pattern].silenced():
        in_context = run(model)
    per_call, per_site = run(model, gates={pattern: 0.0}), run(model, gates=model.heads.select(pattern).gates(0.0))
    smaller = run(cut_model(model, pattern))
    assert not torch.allclose(run(model), in_context), "they did write something"
    for head in model.heads.select(pattern):
        head.W_O.zero_()
    for out in (in_context, per_call, per_site, smaller):
        assert_equal(out, run(model))


@torch.no_grad()
def test_gates_of_a_call_multiply() -> None:
    model = make_model(MODELS["decoder"])
    both = run(model, gates={"0.*": 0.5, "0.1": 0.5, "1.2": torch.tensor([0.0, 3.0])})
    with model.heads["0.0,0.2-3"].scaled(0.5), model.heads["0.1"].scaled(0.25):
        first, second = run(model, gates={"1.2": 0.0}), run(model, gates={"1.2": 3.0})
    assert_equal(both[0], first[0])
    assert_equal(both[1], second[1])


# Contexts nest, restore, and scale or replace as asked.


@torch.no_grad()
def test_contexts_nest_and_restore() -> None:
    model = make_model(MODELS["decoder"])
    plain, one, two = run(model), run(model, gates={"0.1": 0.0}), run(model, gates={"0.1": 0.0, "1.3": 0.5})
    with model.heads["0.1"].silenced():
        with model.heads["1.3"].scaled(0.5):
            assert torch.equal(run(model), two)
            with model.heads["0.1"].silenced():
                assert torch.equal(run(model), two)
        assert torch.equal(run(model), one)
    assert torch.equal(run(model), plain)


@torch.no_grad()
def test_contexts_restore_when_something_goes_wrong() -> None:
    model = make_model(MODELS["decoder"])
    plain, shown = run(model), []
    site = model.sites()[0]
    with (
        pytest.raises(KeyError),
        model.heads["0.1,1.*"].silenced(),
        site.listen(shown.append),
        site.replaced(torch.zeros_like),
    ):
        raise KeyError
    assert torch.equal(run(model), plain)
    assert not shown


@torch.no_grad()
def test_a_context_may_be_left_out_of_turn_and_entered_twice() -> None:
    layer = make_layer(PLAIN)
    shown: list[Seen] = []
    first, second, halved = layer.site.listen(shown.append), layer.site.listen(shown.append), layer.heads[1].scaled(0.5)
    for context in (first, second, halved):
        context.__enter__()
    first.__exit__(None, None, None)
    call(layer)
    assert len(shown) == 1
    halved.__exit__(None, None, None)
    call(layer)
    second.__exit__(None, None, None)
    call(layer)
    assert len(shown) == 2


@torch.no_grad()
def test_a_head_is_scaled_example_by_example() -> None:
    layer = make_layer(LAYERS["grouped-query"])
    written = layer.per_head(numbers(B, T, WIDTH)).write(2)
    with layer.heads[2].scaled(torch.tensor([0.0, 3.0])):
        scaled = layer(numbers(B, T, WIDTH))
    change = torch.tensor([-1.0, 2.0], dtype=torch.float64)[:, None, None] * written
    assert_equal(scaled, layer(numbers(B, T, WIDTH)) + change)


@torch.no_grad()
def test_z_is_replaced_by_a_tensor_or_a_function() -> None:
    layer, z = make_layer(LAYERS["biases"]), numbers(B, HEADS, T, HEAD_DIM, seed=8)
    mean = z.mean((0, 2), keepdim=True)  # (1, H, 1, e): one mean for all places
    bias = layer.b_O
    assert bias is not None
    for value in (z, mean):
        with layer.site.replaced(value):
            assert_equal(call(layer), torch.einsum("bhte,hed->btd", value.expand_as(z), layer.site.W_O) + bias)
    with layer.site.replaced(lambda z: -z):
        flipped = call(layer)
    assert_equal(flipped, 2 * bias - call(layer))


@torch.no_grad()
def test_edits_act_in_the_order_they_were_made_and_listeners_see_the_last() -> None:
    layer = make_layer(PLAIN)
    with layer.site.replaced(torch.ones_like), layer.heads[1].scaled(3.0), listening([layer.site]) as shown:
        call(layer)
    want = torch.tensor([1.0, 3.0, 1.0, 1.0], dtype=torch.float64)[:, None, None].expand_as(shown[0].z)
    assert torch.equal(shown[0].z, want)


MISFITS: dict[str, tuple[Any, str]] = {
    "scaled, too few": (lambda layer: layer.site.scaled(torch.ones(3)), r"the gate is \(3,\) but must be \(4,\)"),
    "scaled, other batch": (
        lambda layer: layer.heads[0].scaled(torch.ones(3)),
        r"the gate is \(3, 4\) but must be \(4,\) or \(2, 4\)",
    ),
    "replaced, function": (
        lambda layer: layer.site.replaced(lambda z: z[..., :-1]),
        r"z at 0 is \(2, 4, 5, 6\) but was replaced by \(2, 4, 5, 5\); keep the shape",
    ),
    "replaced, tensor": (
        lambda layer: layer.site.replaced(torch.zeros(B, HEADS, T, HEAD_DIM + 1)),
        r"z at 0 is \(2, 4, 5, 6\) but was replaced by \(2, 4, 5, 7\); keep the shape",
    ),
}


@pytest.mark.parametrize(("context", "message"), MISFITS.values(), ids=MISFITS)
def test_an_edit_of_the_wrong_shape_is_refused(context: Any, message: str) -> None:
    layer = make_layer(PLAIN)
    with context(layer), pytest.raises(HeadwiseError, match=message):
        call(layer)


def test_gates_that_do_not_fit_are_refused() -> None:
    layer, model = make_layer(PLAIN), make_model(MODELS["decoder"])
    with pytest.raises(HeadwiseError, match=r"the gate is \(5,\) but must be \(4,\) or \(2, 4\): one number per head"):
        call(layer, gate=torch.ones(5))
    with pytest.raises(HeadwiseError, match=r"one number per example \(B,\); got \(2, 4\)"):
        layer.heads[0].scaled(torch.ones(2, 4)).__enter__()
    with pytest.raises(HeadwiseError, match=r"'0\.9' names no head here"):
        run(model, gates={"0.9": 0.0})
    with pytest.raises(HeadwiseError, match="9"):
        run(model, gates={SiteAddress("", 9): torch.zeros(4)})


# Nobody is in the way of anybody else.


@torch.no_grad()
def test_gates_of_two_threads_do_not_disturb_each_other() -> None:
    model = make_model(MODELS["decoder"])
    asked: dict[str, Any] = {"plain": None, "silent": {"0.1": 0.0}, "doubled": {"1.*": 2.0}}
    alone = {name: run(model, gates=gates) for name, gates in asked.items()}
    wrong: list[str] = []

    def keep_asking(name: str) -> None:
        with torch.no_grad():
            wrong.extend(name for _ in range(25) if not torch.equal(run(model, gates=asked[name]), alone[name]))

    threads = [Thread(target=keep_asking, args=(name,)) for name in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@each_model
@torch.no_grad()
def test_a_copy_has_sites_of_its_own(name: str) -> None:
    model = make_model(MODELS[name])
    twin, plain = copy.deepcopy(model), run(model)
    for site, own in zip(model.sites(), twin.sites(), strict=True):
        assert own is not site
        assert own.W_O.data_ptr() != site.W_O.data_ptr() or site.W_O.numel() == 0
    with twin.heads["*" if "-" not in name else "enc.*"].silenced(), listening(model.sites()) as shown:
        assert not torch.allclose(run(twin), plain)
        assert not shown
        assert torch.equal(run(model), plain)
    for parameter in twin.parameters():
        parameter.zero_()
    assert torch.equal(run(model), plain)
    assert all(bool((site.W_O == 0).all()) for site in twin.sites())


# Checkpointing: memory saved, nothing else changed.


def losses_and_gradients(model: Transformer, **options: Any) -> list[Tensor]:
    out = run(model, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(model.parameters()), materialize_grads=True)]


@each_model
def test_checkpointing_changes_neither_outputs_nor_gradients_and_listeners_hear_once(name: str) -> None:
    model = make_model(MODELS[name])
    plain = losses_and_gradients(model)
    model.checkpointing = True
    with listening(model.sites()) as shown:
        saved = losses_and_gradients(model)
    assert tuple(seen.site.address for seen in shown) == model.spec.sites, "each once, though blocks ran twice"
    for one, other in zip(plain, saved, strict=True):
        assert_equal(other, one)


def test_checkpointing_repeats_the_same_dropout() -> None:
    model = make_model(MODELS["decoder"]).train()
    for block in model.blocks:
        block.dropout.p = 0.3  # pyright: ignore
        block.attention.head_dropout.rate = 0.5  # pyright: ignore
    torch.manual_seed(0)
    plain = losses_and_gradients(model)
    model.checkpointing = True
    torch.manual_seed(0)
    for one, other in zip(plain, losses_and_gradients(model), strict=True):
        assert_equal(other, one)


def test_checkpointing_remembers_which_heads_were_silent() -> None:
    """The backward pass may come after the context has closed; blocks are then repeated as they were."""
    model = make_model(MODELS["decoder"])
    want = losses_and_gradients(model, gates={"0.1": 0.0})[1:]
    model.checkpointing = True
    with model.heads["0.1"].silenced():
        loss = run(model).square().sum()
    for one, other in zip(want, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        assert_equal(other, one)
