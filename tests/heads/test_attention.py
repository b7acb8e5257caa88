"""The attention layer: slice inputs, heads as objects, edge cases and errors. test_torch_mha.py compares it with torch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from headwise.cache import DynamicCache
from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention
from headwise.kernels import BACKENDS, Mask, causal, padding_mask, per_head
from headwise.spec import AttentionSpec
from tests.contract.layers import (
    HEADS,
    LAYERS,
    PLAIN,
    WIDTH,
    B,
    S,
    T,
    assert_equal,
    call_layer,
    make_layer,
    random_tensor,
)

# Layers in which each head reads its own slice of the residual stream.


@torch.no_grad()
def test_qkv_projection_slice_input_equals_grouped_convolution() -> None:
    layer = make_layer(LAYERS["slice"])
    x = random_tensor(B, T, WIDTH)
    for projection, projected in zip("qkv", layer.qkv(x), strict=True):
        weight, bias = layer.qkv.weight_by_head(projection), layer.qkv.bias_by_head(projection)
        assert bias is not None
        conv = nn.Conv1d(WIDTH, weight.shape[:2].numel(), 1, groups=HEADS, dtype=torch.float64)
        conv.weight.copy_(weight.flatten(0, 1)[:, :, None])
        assert conv.bias is not None
        conv.bias.copy_(bias.flatten())
        want = conv(x.mT).unflatten(1, weight.shape[:2]).mT  # (B, H, T, d)
        assert_equal(projected, want, 1e-12)


@pytest.mark.parametrize("name", ["slice", "cut, slice"])
@torch.no_grad()
def test_slice_layer_equals_block_diagonal_weights(name: str) -> None:
    layer, spec = make_layer(LAYERS[name]), LAYERS[name]
    full = make_layer(AttentionSpec(WIDTH, HEADS, spec.head_dim, kept_heads=spec.kept_heads, bias=spec.bias))
    full.output_projection.load_state_dict(layer.output_projection.state_dict())
    for projection in "qkv":
        full.qkv.weight_by_head(projection).zero_()
        for index, head_id in enumerate(spec.head_ids):
            own = slice(head_id * WIDTH // HEADS, (head_id + 1) * WIDTH // HEADS)
            full.qkv.weight_by_head(projection)[index, :, own] = layer.qkv.weight_by_head(projection)[index]
        if spec.bias:
            full.qkv.bias_by_head(projection).copy_(layer.qkv.bias_by_head(projection))  # pyright: ignore
    assert_equal(call_layer(layer), call_layer(full), 1e-12)
    for slice_head, full_head in zip(layer.heads, full.heads, strict=True):
        for weight in ("W_Q", "W_K", "W_V", "W_O"):
            assert torch.equal(getattr(slice_head, weight), getattr(full_head, weight)), (
                "a view shows where the head is blind"
            )


# Heads as objects.


@pytest.mark.parametrize("name", ["biases", "grouped-query", "wide values", "cut, uneven groups"])
@torch.no_grad()
def test_head_alone_equals_formula(name: str) -> None:
    layer, spec = make_layer(LAYERS[name]), LAYERS[name]
    x = random_tensor(B, T, WIDTH)
    outputs = layer.per_head_output(x)
    assert [head.address.head for head in layer.heads] == list(spec.head_ids)
    for head in layer.heads:
        assert head.W_Q.shape == head.W_K.shape == (WIDTH, spec.head_dim)
        assert (head.W_V.shape, head.W_O.shape) == ((WIDTH, spec.value_dim), (spec.value_dim, WIDTH))
        q, k, v = x @ head.W_Q, x @ head.W_K, x @ head.W_V
        if spec.bias:
            q, k, v = q + head.b_Q, k + head.b_K, v + head.b_V  # pyright: ignore
        probs = (q @ k.mT / spec.head_dim**0.5).softmax(-1)
        assert_equal(outputs.head_output(head.index), probs @ v @ head.W_O, 1e-12)


@torch.no_grad()
def test_head_weights_edited_in_place_change_layer() -> None:
    layer = make_layer(LAYERS["biases"])
    head, twin = layer.heads[2], make_layer(LAYERS["biases"])
    for name, rows in (("W_Q", "q"), ("W_K", "k"), ("W_V", "v")):
        getattr(head, name).mul_(2)
        twin.qkv.weight_by_head(rows)[2].mul_(2)
        getattr(head, "b" + name[1:]).add_(1)
        twin.qkv.bias_by_head(rows)[2].add_(1)  # pyright: ignore
    head.W_O.mul_(3)
    twin.output_projection.weight[:, 2 * 6 : 3 * 6].mul_(3)
    assert torch.equal(call_layer(layer), call_layer(twin))


def test_head_missing_parts_are_none() -> None:
    head = make_layer(PLAIN).heads[0]
    assert (head.b_Q, head.b_K, head.b_V, head.gate) == (None, None, None, None)
    gated = make_layer(LAYERS["gated"])
    assert torch.equal(gated.heads[2].gate, gated.gate[2])  # pyright: ignore
    text = repr(make_layer(LAYERS["grouped-query"]).heads[2])
    assert text.startswith("Head(0.2, head_dim=6, KV head shared by heads [2, 3]; ")


@pytest.mark.parametrize("name", ["plain", "grouped-query", "narrow values", "slice"])
@torch.no_grad()
def test_circuit_spectrum_equals_dense_matrix(name: str) -> None:
    for head in make_layer(LAYERS[name]).heads:
        W_Q, W_K, W_V, W_O = (x.numpy() for x in (head.W_Q, head.W_K, head.W_V, head.W_O))
        for circuit, dense in ((head.QK, W_Q @ W_K.T), (head.OV, W_V @ W_O)):
            rank = circuit.left.shape[1]
            np.testing.assert_allclose(circuit.dense().numpy(), dense, rtol=0, atol=1e-12)
            singular = np.linalg.svd(dense, compute_uv=False)[:rank]
            np.testing.assert_allclose(circuit.singular_values().numpy()[:rank], singular, rtol=0, atol=1e-10)
            largest = sorted(np.linalg.eigvals(dense), key=lambda value: (-abs(value), value.imag))[:rank]
            eigenvalues = sorted(circuit.eigenvalues().numpy(), key=lambda value: (-abs(value), value.imag))
            np.testing.assert_allclose(np.abs(eigenvalues), np.abs(largest), rtol=0, atol=1e-8)
            np.testing.assert_allclose(np.sum(eigenvalues), np.trace(dense), rtol=0, atol=1e-10)


def test_heads_index_by_number_address_or_pattern() -> None:
    layer = make_layer(LAYERS["cut"])
    assert [str(address) for address in layer.heads.addresses] == ["0.0", "0.3"]
    assert layer.heads[3].index == 1
    assert layer.heads["0.3"].address == layer.heads[layer.heads.addresses[1]].address  # pyright: ignore
    assert len(layer.heads.select("*")) == 2
    for head_id in (1, 4, -1):
        with pytest.raises(HeadwiseError, match=rf"not have head 0\.{head_id}\. Layer 0 has heads 0,3"):
            layer.heads[head_id]


# Output of each head.


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "cross"])
@torch.no_grad()
def test_per_head_outputs_sum_to_layer_output(name: str) -> None:
    layer, x = make_layer(LAYERS[name]), random_tensor(B, T, WIDTH)
    outputs = layer.per_head_output(x, mask=causal())
    assert_equal(outputs.layer_output(), call_layer(layer), 1e-12)
    head_outputs = list(outputs.head_outputs())
    assert len(head_outputs) == len(layer.spec.head_ids)
    for index, head_output in enumerate(head_outputs):
        assert torch.equal(head_output, outputs.head_output(index))
        torch.testing.assert_close(outputs.head_norms()[:, index], head_output.norm(dim=-1), rtol=0, atol=1e-9)
    side_by_side = outputs.concatenated() @ outputs.W_O.flatten(0, 1)
    assert_equal(side_by_side + (0 if layer.b_O is None else layer.b_O), call_layer(layer), 1e-12)


def test_per_head_norms_silenced_head_has_finite_gradient() -> None:
    layer, x = make_layer(PLAIN), random_tensor(B, T, WIDTH).requires_grad_()
    with layer.heads[1].silenced():
        layer.per_head_output(x).head_norms().sum().backward()
    assert bool(x.grad.isfinite().all())  # pyright: ignore


# Choice of the kernel.

KERNEL_CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "plain": ({}, {}, "fused", "every query attends to every key"),
    "causal": ({}, {"mask": causal()}, "fused", "causal flag of the kernel"),
    "padding": ({}, {"mask": padding_mask(torch.ones(1, 16, dtype=torch.bool))}, "fused", "passed in blocks of rows"),
    "sink": ({"softmax": "sink"}, {}, "fused", "additional key"),
    "alibi": ({"alibi": True}, {}, "fused", "the bias is added"),
    "softcap": ({"softcap": 3.0}, {}, "batched", "scores have a softcap"),
    "softcap, long": ({"softcap": 3.0}, {"T": 2**14}, "blockwise", "do not fit into memory at once"),
    "dropout": ({"dropout": 0.1}, {}, "batched", "attention weights have dropout"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "arguments", "backend", "because"), KERNEL_CHOICES.values(), ids=KERNEL_CHOICES)
def test_kernel_choice_each_layer_names_backend_and_reason(
    fields: dict, arguments: dict, backend: str, because: str
) -> None:
    arguments = {"T": 16} | arguments
    choice = MultiHeadAttention(width=WIDTH, heads=HEADS, **fields).kernel_choice(**arguments)
    assert choice.backend == backend
    assert because in choice.reason
    assert str(choice).startswith(f"{backend}: ")


def test_kernel_choice_explicit_backend_is_reported() -> None:
    layer = MultiHeadAttention(width=WIDTH, heads=HEADS, backend="reference")
    assert layer.kernel_choice(16).reason == "the layer sets this backend"
    with pytest.raises(HeadwiseError, match="backend='fusd': unknown; did you mean fused"):
        MultiHeadAttention(width=WIDTH, heads=HEADS, backend="fusd")(torch.zeros(1, 2, WIDTH))


# Edge cases: no heads, and queries without visible keys.


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "fields", [{"heads": 0}, {"heads": 4, "kept_heads": ()}, {"heads": 4, "kept_heads": (), "alibi": True}], ids=str
)
def test_layer_without_heads_outputs_bias_and_trains_it(backend: str, training: bool, fields: dict) -> None:
    layer = MultiHeadAttention(width=8, out_bias=True, bias=True, backend=backend, **fields).train(training)
    nn.init.normal_(layer.output_projection.bias)  # pyright: ignore
    out = layer(torch.randn(2, 3, 8), mask=causal())
    assert torch.equal(out, layer.b_O.expand_as(out))  # pyright: ignore
    out.sum().backward()
    moved = {name for name, p in layer.named_parameters() if p.grad is not None and p.grad.numel() and p.grad.any()}
    assert moved == {"output_projection.bias"}
    assert torch.equal(layer.b_O.grad, torch.full((8,), 6.0))  # pyright: ignore
    torch.optim.SGD(layer.parameters(), 0.1).step()
    assert layer.per_head_output(torch.randn(2, 3, 8)).head_norms().shape == (2, 0, 3)
    assert len(layer.heads) == 0


def test_layer_zero_heads_alibi_outputs_zeros() -> None:
    layer = MultiHeadAttention(width=8, heads=0, alibi=True)
    assert torch.equal(layer(torch.randn(2, 3, 8)), torch.zeros(2, 3, 8))


EMPTY_MASKS = {
    "a row": Mask.of(torch.tensor([[True] * 4, [False] * 4, [True] * 4, [True] * 4])),
    "a head": per_head([causal(), Mask.of(torch.zeros(4, 4, dtype=torch.bool)), causal(), causal()]),
    "an example": padding_mask(torch.tensor([[True] * 4, [False] * 4])),
    "everything": Mask.of(torch.zeros(1, 1, dtype=torch.bool)),
}


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("where", EMPTY_MASKS)
def test_attend_fully_masked_rows_give_zeros(backend: str, training: bool, where: str) -> None:
    layer = MultiHeadAttention(width=WIDTH, heads=HEADS, bias=True, out_bias=True, backend=backend).train(training)
    x, mask = torch.randn(2, 4, WIDTH, requires_grad=True), EMPTY_MASKS[where]
    z = layer.compute_z(x, mask=mask)
    blind = ~mask.dense(4, 4).expand(2, HEADS, 4, 4).any(-1)  # (B, H, T)
    assert bool(blind.any())
    assert bool((z[blind] == 0).all())
    assert bool((z[~blind] != 0).any(-1).all())
    layer.output_projection(z).square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in (x, *layer.parameters()) if p.grad is not None)


# Errors.

CALL_ERRORS: dict[str, tuple[Any, str]] = {
    "width": (lambda layer: layer(torch.zeros(2, 3, 9)), r"shape \(batch, tokens, 8\)\. Got \(2, 3, 9\)"),
    "axes": (lambda layer: layer(torch.zeros(3, 8)), r"shape \(batch, tokens, 8\)\. Got \(3, 8\)"),
    "source": (lambda layer: layer(torch.zeros(2, 3, 8), torch.zeros(2, 5, 7)), r"source: must have shape"),
    "source batch": (lambda layer: layer(torch.zeros(2, 3, 8), torch.zeros(1, 5, 8)), "shapes do not match"),
    "tensor mask": (
        lambda layer: layer(torch.zeros(2, 3, 8), mask=torch.ones(3, 3).bool()),
        r"must be a Mask\. Got Tensor\. Convert a tensor with hw\.Mask\.of",
    ),
    "mask shape": (
        lambda layer: layer(torch.zeros(2, 3, 8), mask=Mask.of(torch.ones(4, 3).bool())),
        r"\(2, 2, 3, 3\)\. Got shape \(1, 1, 4, 3\)",
    ),
    "padding shape": (
        lambda layer: layer(torch.zeros(2, 3, 8), mask=padding_mask(torch.ones(2, 4).bool())),
        r"\(2, 3\), True at real tokens\. Got shape \(2, 4\)",
    ),
    "masks per head": (
        lambda layer: layer(torch.zeros(2, 3, 8), mask=per_head([causal()])),
        "1 masks for 2 heads",
    ),
    "bias": (lambda layer: layer(torch.zeros(2, 3, 8), bias=torch.ones(3, 3)), r"Got shape \(3, 3\)"),
    "cache": (
        lambda layer: layer(torch.zeros(2, 3, 8), torch.zeros(2, 5, 8), cache=DynamicCache()),
        r"needs a CrossAttentionCache\. Got DynamicCache",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("act", "message"), CALL_ERRORS.values(), ids=CALL_ERRORS)
def test_layer_call_wrong_argument_raises(act: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        act(MultiHeadAttention(width=8, heads=2))


FIELD_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "indivisible": ({"width": 770, "heads": 12}, "width=770: not divisible by heads=12"),
    "unknown": ({"width": 8, "heads": 2, "kv_head": 1}, "unknown argument 'kv_head'; did you mean kv_heads"),
    "no heads": ({"width": 8}, "heads: required argument"),
    "both": ({"spec": PLAIN, "heads": 2}, "Got a spec and also heads"),
}


@pytest.mark.parametrize(("fields", "message"), FIELD_ERRORS.values(), ids=FIELD_ERRORS)
def test_layer_invalid_fields_raise(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        MultiHeadAttention(**fields)


def test_layer_missing_source_or_extra_bias_raises() -> None:
    with pytest.raises(HeadwiseError, match="source of width 13"):
        make_layer(LAYERS["cross"])(random_tensor(B, T, WIDTH))
    with pytest.raises(HeadwiseError, match="not supported with rotary positions"):
        make_layer(LAYERS["rotary, half"])(random_tensor(B, T, WIDTH), random_tensor(B, S, WIDTH))
    with pytest.raises(HeadwiseError, match="already has a position bias"):
        make_layer(LAYERS["alibi"])(random_tensor(B, T, WIDTH), bias=torch.zeros(1, 1, 1, 1))


def test_layer_attention_mask_argument_error_suggests_mask() -> None:
    with pytest.raises(HeadwiseError, match=r"use mask=hw\.padding_mask\(attention_mask\.bool\(\)\)"):
        make_layer(LAYERS["plain"])(random_tensor(B, T, WIDTH), attention_mask=torch.ones(B, T))
