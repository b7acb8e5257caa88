"""Heads or depth: as many parameters either way, counted by building the models."""

import pytest

from headwise.errors import HeadwiseError
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.layers_or_heads_specs import LAYERS, make_deep_experiment, reduce_layers_or_heads
from headwise.experiments.trained_model_provider import ExperimentSize, TrainedModelProvider
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec


def make_spec(layers: int = 6, heads: int = 8, **attention) -> ModelSpec:
    return ModelSpec(
        vocab=50, context=16, layers=layers, attention=AttentionSpec(width=48, heads=heads, head_dim=6, **attention)
    )


def num_parameters(spec: ModelSpec) -> int:
    return sum(weight.numel() for weight in Transformer(spec).parameters())


def test_equal_parameter_specs_half_heads_equal_one_block():
    full = make_spec()
    shallow, narrow = reduce_layers_or_heads(full)
    assert (shallow.layers, shallow.attention) == (5, full.attention)
    assert (narrow.layers, narrow.attention.heads, narrow.attention.head_dim) == (6, 4, 6)
    # 5 biases of the MLP's and 4 of two norms, each D
    assert num_parameters(full) - num_parameters(shallow) == 12 * 48**2 + 9 * 48
    assert num_parameters(full) - num_parameters(narrow) == 12 * 48**2


@pytest.mark.parametrize(("layers", "remaining"), [(4, 2), (5, 3), (12, 6)])
def test_equal_parameter_specs_takes_closest_head_count(layers, remaining):
    # A head of every layer has 4·D·d parameters, L·4·D·d in all; a block has about 12·D². With D = 8d: 24/L heads go.
    assert reduce_layers_or_heads(make_spec(layers))[1].attention.heads == remaining == 8 - round(24 / layers)


def test_equal_parameter_specs_keeps_kv_sharing():
    narrow = reduce_layers_or_heads(make_spec(layers=8, kv_heads=4))[1].attention
    assert narrow.heads == 2 * narrow.kv_heads
    assert reduce_layers_or_heads(make_spec(layers=8, kv_heads=1))[1].attention.kv_heads == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (make_spec(layers=2), "more layers"),
        (make_spec(layers=1), "at least 2"),
        (make_spec(heads=1), "at least 2"),
        (make_spec().without("0.1"), "pruned heads"),
        (ModelSpec(50, 16, 6, AttentionSpec(width=48, heads=8), kind="encoder-decoder"), "two kinds"),
    ],
)
def test_equal_parameter_specs_unsupported_raises(spec, message):
    with pytest.raises(HeadwiseError, match=message):
        reduce_layers_or_heads(spec)


def test_deep_experiment_has_more_layers(tmp_path):
    experiment = make_deep_experiment(
        TrainedModelProvider(ExperimentStore(tmp_path), (0, 1), ExperimentSize(steps=100))
    )
    assert (experiment.size.layers, experiment.size.steps, experiment.seeds) == (LAYERS, 60, (0, 1))
    assert experiment.make_config(0).spec.layers == LAYERS
