"""Contract 5, in memory: state dicts are split for every storage and load bitwise; shape errors name the tensor."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention
from headwise.model import Transformer
from headwise.spec import AttentionSpec
from tests.contract.layers import LAYERS, MODELS, assert_equal, call_layer, make_layer, make_model, run_model

STORAGES = ("qkv", "q,kv", "q,k,v")

each_layer = pytest.mark.parametrize("name", LAYERS)
each_model = pytest.mark.parametrize("name", MODELS)
each_storage = pytest.mark.parametrize("storage", STORAGES)


@each_layer
@pytest.mark.parametrize("start", STORAGES)
@torch.no_grad()
def test_load_state_dict_any_storage_restores_layer(name: str, start: str) -> None:
    layer = make_layer(LAYERS[name], storage=start)
    state = layer.state_dict()
    for storage in STORAGES:
        other = make_layer(LAYERS[name], seed=9, storage=storage)
        other.load_state_dict(state)
        again = other.state_dict()
        assert again.keys() == state.keys()
        assert all(torch.equal(again[key], state[key]) for key in state)
        assert_equal(call_layer(other), call_layer(layer), 1e-12)


@each_model
@torch.no_grad()
def test_load_state_dict_model_restores_outputs(name: str) -> None:
    model, other = make_model(MODELS[name]), make_model(MODELS[name], seed=9)
    other.load_state_dict(model.state_dict())
    assert torch.equal(run_model(other), run_model(model))


def latent_shapes(spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the projections of a layer with latents, by hand: rank 7, 2 rotary channels, query rank 0 or 3."""
    H, D = len(spec.head_ids), spec.width
    shapes: dict[str, tuple[int, ...]] = {
        "qkv.q.weight": (H, 6, D),
        "qkv.kv.weight": (H, 4 + 5, 7),
        "qkv.kv_down.weight": (7 + 2, D),
        "qkv.kv_norm.weight": (7,),
    }
    if spec.latent is not None and spec.latent.query_rank:
        shapes |= {"qkv.q.weight": (H, 6, 3), "qkv.q_down.weight": (3, D), "qkv.q_norm.weight": (3,)}
        shapes |= {"qkv.q_down.bias": (3,), "qkv.kv_down.bias": (9,)}
    return shapes


@each_layer
@each_storage
def test_state_dict_any_storage_has_head_axis(name: str, storage: str) -> None:
    spec = LAYERS[name]
    H, K, d, e = len(spec.head_ids), len(spec.kv_head_ids), spec.head_dim, spec.value_dim
    input_slices = spec.heads if spec.head_input == "slice" else 1
    want: dict[str, tuple[int, ...]] = {
        "qkv.q.weight": (H, d, spec.width // input_slices),
        "qkv.k.weight": (K, d, spec.kv_width // input_slices),
        "qkv.v.weight": (K, e, spec.kv_width // input_slices),
        "output_projection.weight": (spec.width, H, e),
    }
    if spec.bias:
        want |= {"qkv.q.bias": (H, d), "qkv.k.bias": (K, d), "qkv.v.bias": (K, e)}
    if spec.out_bias:
        want |= {"output_projection.bias": (spec.width,)}
    if spec.softmax == "sink":
        want |= {"sink": (H,)}
    if spec.gated:
        want |= {"gate": (H,)}
    if spec.t5_buckets:
        want |= {"position_bias": (H, spec.t5_buckets)}
    if spec.output_gate is not None:
        channels = e if spec.output_gate == "channel" else 1
        want |= {"output_gate.weight": (H, channels, spec.width)}
        want |= {"output_gate.bias": (H, channels)} if spec.bias else {}
    if spec.qk_norm is not None:
        want |= norm_shapes(spec)
    if spec.latent is not None:
        want = {key: shape for key, shape in want.items() if not key.startswith("qkv.")} | latent_shapes(spec)
    state = make_layer(spec, storage=storage).state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == want


def norm_shapes(spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of gains and biases, and of the rows of pruned heads that a norm over the full width reads."""
    norm, shapes = spec.qk_norm, {}
    assert norm is not None
    for projection, present, total in (("q", spec.head_ids, spec.heads), ("k", spec.kv_head_ids, spec.kv_heads)):
        gains = (len(present), spec.head_dim) if norm.weights == "per_head" else (spec.head_dim,)
        shapes |= {} if norm.weights == "none" else {f"{projection}_norm.weight": gains}
        shapes |= {f"{projection}_norm.bias": gains} if norm.bias else {}
        pruned = (total - len(present), spec.head_dim)
        if norm.over == "width" and pruned[0]:
            shapes |= {f"{projection}_norm.pruned_weight": (*pruned, spec.width)}
            shapes |= {f"{projection}_norm.pruned_bias": pruned} if spec.bias else {}
    return shapes


@torch.no_grad()
def test_state_dict_entries_equal_head_weights() -> None:
    layer = make_layer(LAYERS["grouped-query"])
    state = layer.state_dict()
    for head in layer.heads:
        assert torch.equal(state["qkv.q.weight"][head.index], head.W_Q.mT)
        assert torch.equal(state["qkv.k.weight"][head.kv_index], head.W_K.mT)
        assert torch.equal(state["qkv.v.weight"][head.kv_index], head.W_V.mT)
        assert torch.equal(state["output_projection.weight"][:, head.index], head.W_O.mT)


@each_storage
def test_load_state_dict_leaves_state_unchanged(storage: str) -> None:
    state = make_layer(LAYERS["biases"]).state_dict()
    before = {key: value.clone() for key, value in state.items()}
    make_layer(LAYERS["biases"], seed=9, storage=storage).load_state_dict(state)
    assert state.keys() == before.keys()
    assert all(torch.equal(state[key], before[key]) for key in before)


# Shape errors name the saved tensors.


def delete_key(key: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.__delitem__(key)


def set_zeros(key: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.__setitem__(key, torch.zeros(shape))


MISFITS = {
    "missing weight": (delete_key("qkv.k.weight"), r'Missing key\(s\) in state_dict: "qkv.k.weight"\.'),
    "missing bias": (delete_key("qkv.v.bias"), r'Missing key\(s\) in state_dict: "qkv.v.bias"\.'),
    "missing output": (
        delete_key("output_projection.weight"),
        r'Missing key\(s\) in state_dict: "output_projection.weight"\.',
    ),
    "unexpected": (set_zeros("qkv.r.weight", 4, 6, 20), r'Unexpected key\(s\) in state_dict: "qkv.r.weight"\.'),
    "unexpected gate": (set_zeros("gate", 4), r'Unexpected key\(s\) in state_dict: "gate"\.'),
    "weight": (
        set_zeros("qkv.q.weight", 4, 20, 6),
        r"size mismatch for qkv.q.weight: the shape is \(4, 20, 6\), expected \(4, 6, 20\)\.",
    ),
    "fused weight": (
        set_zeros("qkv.k.weight", 24, 20),
        r"size mismatch for qkv.k.weight: the shape is \(24, 20\), expected",
    ),
    "bias": (set_zeros("qkv.v.bias", 24), r"size mismatch for qkv.v.bias: the shape is \(24,\), expected \(4, 6\)\."),
    "output": (set_zeros("output_projection.weight", 20, 4, 5), "size mismatch for output_projection.weight"),
    "output, heads behind channels": (
        set_zeros("output_projection.weight", 20, 6, 4),
        "size mismatch for output_projection.weight",
    ),
}


@each_storage
@pytest.mark.parametrize(("spoil", "message"), MISFITS.values(), ids=MISFITS)
def test_load_state_dict_misfit_error_names_split_key(
    storage: str, spoil: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    layer = make_layer(LAYERS["biases"], storage=storage)
    state = dict(layer.state_dict())
    spoil(state)
    with pytest.raises(RuntimeError, match=message) as error_info:
        layer.load_state_dict(state)
    assert "qkv_" not in str(error_info.value), "how it is stored is nobody's business"


@torch.no_grad()
def test_load_state_dict_not_strict_returns_split_keys() -> None:
    layer = make_layer(LAYERS["biases"])
    state = dict(make_layer(LAYERS["biases"], seed=9).state_dict())
    del state["qkv.k.weight"]
    state["qkv.r.weight"] = torch.zeros(1)
    result = layer.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["qkv.k.weight"], ["qkv.r.weight"])


def test_load_state_dict_extra_biases_raise() -> None:
    state = make_layer(LAYERS["biases"]).state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*qkv.q.bias"):
        make_layer(LAYERS["plain"]).load_state_dict(state)


def test_attention_unknown_storage_raises() -> None:
    with pytest.raises(HeadwiseError, match=r"storage 'kqv' is unknown; use one of qkv | q,kv | q,k,v"):
        MultiHeadAttention(width=8, heads=2, storage="kqv")


# Loading with assign=True, as for a model on the meta device.


@each_model
@each_storage
@torch.no_grad()
def test_load_state_dict_assign_meta_model_equals_source(name: str, storage: str) -> None:
    model = make_model(MODELS[name])
    empty = Transformer(MODELS[name], device="meta", storage=storage).eval()
    empty.load_state_dict(model.state_dict(), assign=True)
    assert_equal(run_model(empty), run_model(model), 1e-12)
    assert all(parameter.requires_grad for parameter in empty.parameters())


def test_load_state_dict_assign_keeps_tied_weights() -> None:
    spec = MODELS["decoder"]
    empty = Transformer(spec, device="meta")
    empty.load_state_dict(make_model(spec).state_dict(), assign=True)
    assert sum(parameter.numel() for parameter in empty.parameters()) == spec.num_parameters
