"""Heads or depth: as many parameters either way, counted by building the models."""

import pytest

from headwise.errors import HeadwiseError
from headwise.experiments.depth import LAYERS, deep, same_cut
from headwise.experiments.engine.store import Store
from headwise.experiments.experiment import Lab, LabSize
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec


def spec_of(layers: int = 6, heads: int = 8, **attention) -> ModelSpec:
    return ModelSpec(
        vocab=50, context=16, layers=layers, attention=AttentionSpec(width=48, heads=heads, head_dim=6, **attention)
    )


def held(spec: ModelSpec) -> int:
    return sum(weight.numel() for weight in Transformer(spec).parameters())


def test_half_of_the_heads_of_six_layers_weigh_a_block():
    full = spec_of()
    shallow, narrow = same_cut(full)
    assert (shallow.layers, shallow.attention) == (5, full.attention)
    assert (narrow.layers, narrow.attention.heads, narrow.attention.head_dim) == (6, 4, 6)
    assert held(full) - held(shallow) == 12 * 48**2 + 9 * 48  # 5 biases of the MLP's and 4 of two norms, each D
    assert held(full) - held(narrow) == 12 * 48**2


@pytest.mark.parametrize(("layers", "left"), [(4, 2), (5, 3), (12, 6)])
def test_the_closest_count_is_taken(layers, left):
    # A head of every layer has 4·D·d parameters, L·4·D·d in all; a block has about 12·D². With D = 8d: 24/L heads go.
    assert same_cut(spec_of(layers))[1].attention.heads == left == 8 - round(24 / layers)


def test_shared_keys_stay_shared_as_they_were():
    narrow = same_cut(spec_of(layers=8, kv_heads=4))[1].attention
    assert narrow.heads == 2 * narrow.kv_heads
    assert same_cut(spec_of(layers=8, kv_heads=1))[1].attention.kv_heads == 1


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (spec_of(layers=2), "more layers"),
        (spec_of(layers=1), "none to spare"),
        (spec_of(heads=1), "none to spare"),
        (spec_of().without("0.1"), "cut already"),
        (ModelSpec(50, 16, 6, AttentionSpec(width=48, heads=8), kind="encoder-decoder"), "two kinds"),
    ],
)
def test_what_cannot_be_is_said(spec, said):
    with pytest.raises(HeadwiseError, match=said):
        same_cut(spec)


def test_the_deeper_lab(tmp_path):
    lab = deep(Lab(Store(tmp_path), (0, 1), LabSize(steps=100)))
    assert (lab.size.layers, lab.size.steps, lab.seeds) == (LAYERS, 60, (0, 1))
    assert lab.point(0).spec.layers == LAYERS
