import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.experiments.claim_tests.parameter_count import (
    OWN_KIND,
    VARIANTS,
    count_parameters,
    judge,
    max_min_parameter_ratio,
    measure_model,
)
from headwise.heads import MultiHeadAttention
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary

CASES = {
    "true by construction": [("most over fewest", "plain", 1.0), ("most over fewest", "biases", 1.0)],
    "does not hold": [("most over fewest", "plain", 1.2), ("most over fewest", "gates", 1.01)],
}


def test_parameter_count_equals_four_square_matrices():
    assert all(count_parameters(AttentionSpec(width=48, heads=heads)) == 4 * 48**2 for heads in (1, 3, 16))


def test_parameter_spread_shared_keys_equals_closed_form():
    # With one KV head, keys and values shrink with head_dim: 2·48² + 2·48·d parameters.
    ratio = max_min_parameter_ratio(AttentionSpec(width=48, heads=48, kv_heads=1), (2, 48))
    assert ratio == (2 * 48**2 + 2 * 48 * 24) / (2 * 48**2 + 2 * 48)


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=list(VARIANTS))
def test_parameter_count_equals_layer_parameters(fields):
    spec = AttentionSpec(width=48, heads=6, **fields)
    assert count_parameters(spec) == sum(weight.numel() for weight in MultiHeadAttention(spec).parameters())


def make_model(width, **attention):
    with torch.device("meta"):
        return Transformer(ModelSpec(9, 8, 1, AttentionSpec(width=width, **attention)))


def test_parameters_given_model_compared_with_plain():
    statistics = measure_model(make_model(48, heads=6, rotary=Rotary()))
    assert list(statistics.by_condition("parameters")) == [1, 2, 4, 8, 16]
    assert judge(statistics).word == "true by construction"
    gated_statistics = measure_model(make_model(48, heads=6, gated=True))
    assert gated_statistics["most over fewest", "plain"].mean == 1
    # a gate for each head
    assert gated_statistics["most over fewest", OWN_KIND].mean == (4 * 48**2 + 16) / (4 * 48**2 + 1)
    assert str(judge(gated_statistics)) == (
        "true by construction: for plain layers; exceptions: the model's own kind changes the number"
    )


def test_parameters_kv_heads_not_dividing_head_count():
    # 1 of 3 KV heads remains with 1, 2, 4, 8 or 16 heads: 2·48² + 2·48·d parameters.
    statistics = measure_model(make_model(48, heads=6, kv_heads=3))
    assert statistics["most over fewest", OWN_KIND].mean == (4 * 48**2) / (2 * 48**2 + 2 * 48 * 3)


def test_parameter_count_wide_layer():
    assert count_parameters(AttentionSpec(width=16384, heads=128)) == 4 * 16384**2


def test_parameters_odd_width_raises():
    with pytest.raises(HeadwiseError, match="even width"):
        measure_model(make_model(9, heads=3))
