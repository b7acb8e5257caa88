"""`MultiHeadAttention` against torch.nn.MultiheadAttention: forward, backward and conversion in both directions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention, from_torch, to_torch
from headwise.kernels import Mask, causal
from headwise.kernels.torch_mask_conversion import from_mha, from_mha_padding
from tests.contract.layers import HEADS, WIDTH, B, S, T, assert_equal, random_tensor

SOURCE_WIDTH = 13
HIDDEN = torch.tensor([[False] * 5 + [True] * 2, [False] * 7])  # True at padding
AHEAD = torch.ones(T, S, dtype=torch.bool).triu(3)  # True at hidden keys
FLOAT_MASK = random_tensor(T, S, seed=5)
EACH_HEAD = (torch.rand(B * HEADS, T, S, generator=torch.Generator().manual_seed(6)) < 0.3) & (torch.arange(S) > 0)

TORCH_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "bool mask": ({"attn_mask": AHEAD}, {"mask": from_mha(AHEAD, HEADS)}),
    "bool mask for each head": ({"attn_mask": EACH_HEAD}, {"mask": from_mha(EACH_HEAD, HEADS)}),
    "float mask": ({"attn_mask": FLOAT_MASK}, {"bias": from_mha(FLOAT_MASK, HEADS)}),
    "padding": ({"key_padding_mask": HIDDEN}, {"mask": from_mha_padding(HIDDEN)}),
    "both": (
        {"key_padding_mask": HIDDEN, "attn_mask": AHEAD},
        {"mask": Mask.of(~AHEAD) & from_mha_padding(HIDDEN)},
    ),
}
TORCH_LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "zero key": {"add_zero_attn": True},
    "source": {"kdim": SOURCE_WIDTH, "vdim": SOURCE_WIDTH},
    "source, no bias, zero key": {"kdim": SOURCE_WIDTH, "vdim": SOURCE_WIDTH, "bias": False, "add_zero_attn": True},
}
each_torch_layer = pytest.mark.parametrize("options", TORCH_LAYERS.values(), ids=TORCH_LAYERS)


def torch_layer(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64, **options)
    for name, parameter in layer.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return layer


def native_gradients(native: MultiHeadAttention) -> dict[str, Tensor]:
    """Return the gradients of a native layer under the names of torch."""
    read, write = native.qkv, native.output_projection
    gradients = {id(p): p.grad for p in native.parameters()}
    slabs = {name.split("_")[0]: (name, p) for name, p in read.named_parameters() if name.endswith("weight")}
    weight = torch.cat([gradients[id(p)].flatten() for _, p in slabs.values()])  # pyright: ignore
    by_name = {"in": weight, "out_proj.weight": write.weight.grad}
    if write.bias is not None:
        by_name["out_proj.bias"] = write.bias.grad
        by_name["in_proj_bias"] = torch.cat([p.grad for n, p in read.named_parameters() if n.endswith("bias")])  # pyright: ignore
    return by_name  # pyright: ignore[reportReturnType]


def torch_gradients(reference: nn.MultiheadAttention) -> dict[str, Tensor]:
    by_name = {name: p.grad for name, p in reference.named_parameters()}
    names = (
        ("in_proj_weight",)
        if reference.in_proj_weight is not None
        else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    )
    by_name["in"] = torch.cat([by_name.pop(name).flatten() for name in names])  # pyright: ignore
    return by_name  # pyright: ignore[reportReturnType]


@each_torch_layer
@pytest.mark.parametrize(("theirs_takes", "ours_takes"), TORCH_CALLS.values(), ids=TORCH_CALLS)
def test_from_torch_forward_and_backward_equal_torch(options: dict, theirs_takes: dict, ours_takes: dict) -> None:
    reference = torch_layer(**options)
    native = from_torch(reference)
    x, source = (
        random_tensor(B, T, WIDTH).requires_grad_(),
        random_tensor(B, S, reference.kdim, seed=2).requires_grad_(),
    )
    x2, source2 = x.detach().requires_grad_(), source.detach().requires_grad_()
    output_grad = random_tensor(B, T, WIDTH, seed=3)

    want, _ = reference(x, source, source, need_weights=False, **theirs_takes)
    got = native(x2, source2, **ours_takes)
    want.backward(output_grad)
    got.backward(output_grad)

    assert_equal(got, want, 1e-12)
    assert_equal((x2.grad, source2.grad), (x.grad, source.grad), 1e-12)
    assert_equal(native_gradients(native), torch_gradients(reference), 1e-12)


@torch.no_grad()
def test_from_torch_self_attention_equals_torch() -> None:
    reference = torch_layer().eval()
    x = random_tensor(B, T, WIDTH)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    want, _ = reference(x, x, x, attn_mask=future, need_weights=False)
    assert_equal(from_torch(reference)(x, mask=causal()), want, 1e-12)


@each_torch_layer
@pytest.mark.parametrize("training", [True, False])
def test_from_torch_to_torch_round_trip_is_exact(options: dict, training: bool) -> None:
    reference = torch_layer(dropout=0.25, **options).train(training)
    native = from_torch(reference)
    back = to_torch(native)
    assert native.training == back.training == training
    assert (back.dropout, back.add_zero_attn, back.batch_first) == (0.25, reference.add_zero_attn, True)
    reference_state, back_state = reference.state_dict(), back.state_dict()
    assert reference_state.keys() == back_state.keys()
    assert all(torch.equal(reference_state[key], back_state[key]) for key in reference_state)
    again = from_torch(back).state_dict()
    assert all(torch.equal(again[key], value) for key, value in native.state_dict().items())


def test_from_torch_unsupported_layer_raises() -> None:
    with pytest.raises(HeadwiseError, match="add_bias_kv=True is not supported"):
        from_torch(torch_layer(add_bias_kv=True))
    with pytest.raises(HeadwiseError, match="kdim=13 differs from vdim=7"):
        from_torch(torch_layer(kdim=13, vdim=7))


BEYOND_TORCH: dict[str, tuple[dict[str, Any], str]] = {
    "groups": ({"kv_heads": 2}, "grouped KV heads"),
    "cut": ({"kept_heads": (0, 3)}, "pruned heads"),
    "head_dim": ({"head_dim": 6}, "head_dim other than width / heads"),
    "value_dim": ({"value_dim": 3}, "value_dim other than head_dim"),
    "bias": ({"bias": True}, "a bias on q, k and v but not on the output"),
    "scale": ({"scale": 1.0}, "a custom scale"),
    "alibi": ({"alibi": True}, "a position bias"),
    "buckets": ({"t5_buckets": 8}, "a position bias"),
    "window": ({"window": 3}, "a window"),
    "softcap": ({"softcap": 3.0}, "a softcap"),
    "sink": ({"softmax": "sink"}, "a learned sink"),
    "slice": ({"head_input": "slice"}, "head_input='slice'"),
    "gated": ({"gated": True}, "gates"),
    "head dropout": ({"head_dropout": 0.1}, "head dropout"),
}


@pytest.mark.parametrize(("fields", "feature"), BEYOND_TORCH.values(), ids=BEYOND_TORCH)
def test_to_torch_unsupported_field_raises(fields: dict[str, Any], feature: str) -> None:
    with pytest.raises(HeadwiseError, match=f"nn.MultiheadAttention does not support {feature}"):
        to_torch(MultiHeadAttention(width=WIDTH, heads=HEADS, **fields))
