"""The balanced basis: heads compute the same function, and the basis has the documented properties."""

import copy
from collections.abc import Callable

import pytest
import torch

from headwise.heads import MultiHeadAttention
from headwise.heads.balanced_basis import (
    LayerHeadMatrices,
    balance_rotary_pair,
    balanced_basis,
    random_basis,
    rebalance_factor_pair,
)
from tests.contract.layers import LAYERS, assert_equal, call_layer, make_layer, random_tensor


def with_matrices(layer: MultiHeadAttention, matrices: LayerHeadMatrices) -> MultiHeadAttention:
    """Return a copy of a layer with these weights."""
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for projection in "qkv":
            other.qkv.weight_by_head(projection).copy_(getattr(matrices, projection))
            bias = other.qkv.bias_by_head(projection)
            if bias is not None:
                bias.copy_(getattr(matrices, f"b_{projection}"))
        other.output_projection.head_output_weights.copy_(matrices.o)
    return other


@pytest.mark.parametrize("change", [balanced_basis, random_basis])
@pytest.mark.parametrize("name", [name for name, spec in LAYERS.items() if spec.latent is None])
def test_basis_change_keeps_heads(name: str, change: Callable[..., LayerHeadMatrices]) -> None:
    layer = make_layer(LAYERS[name])
    matrices = change(LayerHeadMatrices.from_layer(layer), layer.spec)
    other = with_matrices(layer, matrices)
    assert_equal(call_layer(other), call_layer(layer), 1e-9)
    for head, same in zip(layer.heads, other.heads, strict=True):
        assert_equal(same.OV.dense(), head.OV.dense(), 1e-10)
    if layer.spec.head_ids:  # the basis changed, unless a norm or a gate acts on the channels
        assert torch.equal(matrices.q, layer.qkv.weight_by_head("q")) == (layer.spec.qk_norm is not None)
        is_fixed = layer.spec.output_gate == "channel"
        assert torch.allclose(matrices.v, layer.qkv.weight_by_head("v"), atol=1e-12) == is_fixed


def test_balanced_values_and_outputs_share_singular_values() -> None:
    """W_V = U√Σ and W_O = √ΣVᵀ, so both Gram matrices are Σ, the singular values of the product."""
    layer = make_layer(LAYERS["plain"])
    matrices = balanced_basis(LayerHeadMatrices.from_layer(layer), layer.spec)
    for head in layer.heads:
        sizes = torch.diag(torch.linalg.svdvals(head.OV.dense())[: layer.spec.value_dim])
        assert_equal(matrices.v[head.index] @ matrices.v[head.index].mT, sizes, 1e-9)
        assert_equal(matrices.o[head.index] @ matrices.o[head.index].mT, sizes, 1e-9)


def test_balanced_pair_any_basis_gives_same_result() -> None:
    """W_V G and G⁻¹ W_O are the same head, so balancing gives the same matrices for any G."""
    left, right, G = random_tensor(13, 5), random_tensor(5, 17, seed=2), random_tensor(5, 5, seed=3)
    first = rebalance_factor_pair(left, right)
    second = rebalance_factor_pair(left @ G, torch.linalg.solve(G, right))
    for expected, actual in zip(first, second, strict=True):
        assert_equal(expected, actual, 1e-9)


def test_balance_rotary_pair_any_rotation_gives_same_result() -> None:
    queries, keys = random_tensor(13, 2), random_tensor(11, 2, seed=2)
    angle = torch.tensor(0.7, dtype=torch.float64)
    rotation = torch.stack((torch.stack((angle.cos(), -angle.sin())), torch.stack((angle.sin(), angle.cos()))))
    first, second = balance_rotary_pair(queries, keys), balance_rotary_pair(3 * queries @ rotation, keys @ rotation / 3)
    for expected, actual in zip(first, second, strict=True):
        assert_equal(expected.abs(), actual.abs(), 1e-9)  # equal up to signs
    assert_equal(first[0].norm(), first[1].norm(), 1e-9)
    gram = first[0].mT @ first[0] + first[1].mT @ first[1]
    assert_equal(gram[0, 1], torch.zeros((), dtype=torch.float64), 1e-9)
    assert gram[0, 0] > gram[1, 1]


def test_balanced_pair_zero_output_stays_zero() -> None:
    first, second = rebalance_factor_pair(random_tensor(7, 3), torch.zeros(3, 5, dtype=torch.float64))
    assert first.isfinite().all()
    assert not (first @ second).any()
