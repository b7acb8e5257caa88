"""The balanced basis: the same heads, and the basis that it says it is."""

import copy
from collections.abc import Callable

import pytest
import torch

from headwise.heads import MultiHeadAttention
from headwise.heads.balanced_basis import Matrices, balanced, balanced_pair, shuffled, turned_pair
from tests.contract.layers import LAYERS, assert_equal, call, make_layer, numbers


def with_matrices(layer: MultiHeadAttention, made: Matrices) -> MultiHeadAttention:
    """A copy of a layer with these weights."""
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for letter in "qkv":
            other.read.weight(letter).copy_(getattr(made, letter))
            bias = other.read.bias(letter)
            if bias is not None:
                bias.copy_(getattr(made, f"b_{letter}"))
        other.write.slices.copy_(made.o)
    return other


@pytest.mark.parametrize("change", [balanced, shuffled])
@pytest.mark.parametrize("name", LAYERS)
def test_the_heads_are_the_same(name: str, change: Callable[..., Matrices]) -> None:
    layer = make_layer(LAYERS[name])
    made = change(Matrices.of(layer), layer.spec)
    other = with_matrices(layer, made)
    assert_equal(call(other), call(layer), 1e-9)
    for head, same in zip(layer.heads, other.heads, strict=True):
        assert_equal(same.OV.dense(), head.OV.dense(), 1e-10)
    if layer.spec.head_ids:
        assert not torch.equal(made.q, layer.read.weight("q"))  # it did something


def test_values_and_writes_share_singular_values() -> None:
    """W_V = U√Σ, W_O = √ΣVᵀ: both Gram matrices between them are Σ, of the product's singular values."""
    layer = make_layer(LAYERS["plain"])
    made = balanced(Matrices.of(layer), layer.spec)
    for head in layer.heads:
        sizes = torch.diag(torch.linalg.svdvals(head.OV.dense())[: layer.spec.value_dim])
        assert_equal(made.v[head.index] @ made.v[head.index].mT, sizes, 1e-9)
        assert_equal(made.o[head.index] @ made.o[head.index].mT, sizes, 1e-9)


def test_any_basis_comes_to_the_same() -> None:
    """W_V G and G⁻¹ W_O are the same head, so what they are balanced to is the same numbers."""
    left, right, G = numbers(13, 5), numbers(5, 17, seed=2), numbers(5, 5, seed=3)
    one = balanced_pair(left, right)
    other = balanced_pair(left @ G, torch.linalg.solve(G, right))
    for mine, theirs in zip(one, other, strict=True):
        assert_equal(mine, theirs, 1e-9)


def test_any_turn_and_stretch_of_a_pair_comes_to_the_same() -> None:
    queries, keys = numbers(13, 2), numbers(11, 2, seed=2)
    angle = torch.tensor(0.7, dtype=torch.float64)
    turn = torch.stack((torch.stack((angle.cos(), -angle.sin())), torch.stack((angle.sin(), angle.cos()))))
    one, other = turned_pair(queries, keys), turned_pair(3 * queries @ turn, keys @ turn / 3)
    for mine, theirs in zip(one, other, strict=True):
        assert_equal(mine.abs(), theirs.abs(), 1e-9)  # up to half a turn
    assert_equal(one[0].norm(), one[1].norm(), 1e-9)
    gram = one[0].mT @ one[0] + one[1].mT @ one[1]
    assert_equal(gram[0, 1], torch.zeros((), dtype=torch.float64), 1e-9)
    assert gram[0, 0] > gram[1, 1]


def test_a_head_that_writes_nothing_stays_one() -> None:
    one, other = balanced_pair(numbers(7, 3), torch.zeros(3, 5, dtype=torch.float64))
    assert one.isfinite().all()
    assert not (one @ other).any()
