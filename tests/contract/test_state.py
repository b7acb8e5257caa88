"""Contract 5, in memory: what is saved is split, whatever the storage, and comes back bit for bit; misfits are named."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention
from headwise.model import Transformer
from tests.contract.layers import LAYERS, MODELS, assert_equal, call, make_layer, make_model, run

STORAGES = ("qkv", "q,kv", "q,k,v")

each_layer = pytest.mark.parametrize("name", LAYERS)
each_model = pytest.mark.parametrize("name", MODELS)
each_storage = pytest.mark.parametrize("storage", STORAGES)


@each_layer
@pytest.mark.parametrize("start", STORAGES)
@torch.no_grad()
def test_a_layer_comes_back_bit_for_bit_in_any_storage(name: str, start: str) -> None:
    layer = make_layer(LAYERS[name], storage=start)
    state = layer.state_dict()
    for storage in STORAGES:
        other = make_layer(LAYERS[name], seed=9, storage=storage)
        other.load_state_dict(state)
        again = other.state_dict()
        assert again.keys() == state.keys()
        assert all(torch.equal(again[key], state[key]) for key in state)
        assert_equal(call(other), call(layer), 1e-12)


@each_model
@torch.no_grad()
def test_a_model_comes_back_bit_for_bit(name: str) -> None:
    model, other = make_model(MODELS[name]), make_model(MODELS[name], seed=9)
    other.load_state_dict(model.state_dict())
    assert torch.equal(run(other), run(model))


@each_layer
@each_storage
def test_what_is_saved_has_a_head_axis(name: str, storage: str) -> None:
    spec = LAYERS[name]
    H, K, d, e = len(spec.head_ids), len(spec.kv_ids), spec.head_dim, spec.value_dim
    share = spec.heads if spec.input == "slice" else 1
    want: dict[str, tuple[int, ...]] = {
        "read.q.weight": (H, d, spec.width // share),
        "read.k.weight": (K, d, spec.kv_width // share),
        "read.v.weight": (K, e, spec.kv_width // share),
        "write.weight": (spec.width, H, e),
    }
    if spec.bias:
        want |= {"read.q.bias": (H, d), "read.k.bias": (K, d), "read.v.bias": (K, e)}
    if spec.out_bias:
        want |= {"write.bias": (spec.width,)}
    if spec.softmax == "sink":
        want |= {"sink": (H,)}
    if spec.gated:
        want |= {"gate": (H,)}
    if spec.buckets:
        want |= {"position": (H, spec.buckets)}
    state = make_layer(spec, storage=storage).state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == want


@torch.no_grad()
def test_what_is_saved_are_the_heads() -> None:
    layer = make_layer(LAYERS["grouped-query"])
    state = layer.state_dict()
    for head in layer.heads:
        assert torch.equal(state["read.q.weight"][head.index], head.W_Q.mT)
        assert torch.equal(state["read.k.weight"][head.kv_index], head.W_K.mT)
        assert torch.equal(state["read.v.weight"][head.kv_index], head.W_V.mT)
        assert torch.equal(state["write.weight"][:, head.index], head.W_O.mT)


@each_storage
def test_loading_leaves_the_given_state_as_it_was(storage: str) -> None:
    given = make_layer(LAYERS["biases"]).state_dict()
    before = {key: value.clone() for key, value in given.items()}
    make_layer(LAYERS["biases"], seed=9, storage=storage).load_state_dict(given)
    assert given.keys() == before.keys()
    assert all(torch.equal(given[key], before[key]) for key in before)


# Misfits, told by the names a person reads.


def without(key: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.__delitem__(key)


def put(key: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.__setitem__(key, torch.zeros(shape))


MISFITS = {
    "missing weight": (without("read.k.weight"), r'Missing key\(s\) in state_dict: "read.k.weight"\.'),
    "missing bias": (without("read.v.bias"), r'Missing key\(s\) in state_dict: "read.v.bias"\.'),
    "missing output": (without("write.weight"), r'Missing key\(s\) in state_dict: "write.weight"\.'),
    "unexpected": (put("read.r.weight", 4, 6, 20), r'Unexpected key\(s\) in state_dict: "read.r.weight"\.'),
    "unexpected gate": (put("gate", 4), r'Unexpected key\(s\) in state_dict: "gate"\.'),
    "weight": (
        put("read.q.weight", 4, 20, 6),
        r"size mismatch for read.q.weight: it is \(4, 20, 6\), expected \(4, 6, 20\)\.",
    ),
    "fused weight": (put("read.k.weight", 24, 20), r"size mismatch for read.k.weight: it is \(24, 20\), expected"),
    "bias": (put("read.v.bias", 24), r"size mismatch for read.v.bias: it is \(24,\), expected \(4, 6\)\."),
    "output": (put("write.weight", 20, 4, 5), "size mismatch for write.weight"),
    "output, heads behind channels": (put("write.weight", 20, 6, 4), "size mismatch for write.weight"),
}


@each_storage
@pytest.mark.parametrize(("spoil", "message"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_told_by_its_split_name(
    storage: str, spoil: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    layer = make_layer(LAYERS["biases"], storage=storage)
    state = dict(layer.state_dict())
    spoil(state)
    with pytest.raises(RuntimeError, match=message) as told:
        layer.load_state_dict(state)
    assert "qkv_" not in str(told.value), "how it is stored is nobody's business"


@torch.no_grad()
def test_a_misfit_loaded_leniently_is_returned_by_its_split_name() -> None:
    layer = make_layer(LAYERS["biases"])
    state = dict(make_layer(LAYERS["biases"], seed=9).state_dict())
    del state["read.k.weight"]
    state["read.r.weight"] = torch.zeros(1)
    told = layer.load_state_dict(state, strict=False)
    assert (told.missing_keys, told.unexpected_keys) == (["read.k.weight"], ["read.r.weight"])


def test_biases_of_a_layer_that_has_none_are_unexpected() -> None:
    state = make_layer(LAYERS["biases"]).state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*read.q.bias"):
        make_layer(LAYERS["plain"]).load_state_dict(state)


def test_an_unknown_storage_is_refused() -> None:
    with pytest.raises(HeadwiseError, match=r"storage 'kqv' is unknown; use one of qkv | q,kv | q,k,v"):
        MultiHeadAttention(width=8, heads=2, storage="kqv")


# Taking the given tensors over: how a model without memory gets its weights.


@each_model
@each_storage
@torch.no_grad()
def test_a_model_without_memory_takes_given_tensors_over(name: str, storage: str) -> None:
    model = make_model(MODELS[name])
    empty = Transformer(MODELS[name], device="meta", storage=storage).eval()
    empty.load_state_dict(model.state_dict(), assign=True)
    assert_equal(run(empty), run(model), 1e-12)
    assert all(parameter.requires_grad for parameter in empty.parameters())


def test_tied_weights_stay_tied_when_taken_over() -> None:
    spec = MODELS["decoder"]
    empty = Transformer(spec, device="meta")
    empty.load_state_dict(make_model(spec).state_dict(), assign=True)
    assert sum(parameter.numel() for parameter in empty.parameters()) == spec.parameters
