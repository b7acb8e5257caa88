import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.experiments.claims.parameters import OWN, VARIANTS, count, judge, on, spread
from headwise.heads import MultiHeadAttention
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary

CASES = {
    "true by construction": [("most over fewest", "plain", 1.0), ("most over fewest", "biases", 1.0)],
    "depends": [("most over fewest", "plain", 1.0), ("most over fewest", "gates", 1.01)],
    "does not hold": [("most over fewest", "plain", 1.2), ("most over fewest", "gates", 1.01)],
}


def test_four_square_matrices():
    assert all(count(AttentionSpec(width=48, heads=heads)) == 4 * 48**2 for heads in (1, 3, 16))


def test_shared_keys_make_the_count_move():
    # With one key head, keys and values shrink with head_dim: 2·48² + 2·48·d parameters.
    made = spread(AttentionSpec(width=48, heads=48, kv_heads=1), (2, 48))
    assert made == (2 * 48**2 + 2 * 48 * 24) / (2 * 48**2 + 2 * 48)


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=list(VARIANTS))
def test_without_numbers_there_are_as_many(fields):
    spec = AttentionSpec(width=48, heads=6, **fields)
    assert count(spec) == sum(weight.numel() for weight in MultiHeadAttention(spec).parameters())


def given(width, **attention):
    with torch.device("meta"):
        return Transformer(ModelSpec(9, 8, 1, AttentionSpec(width=width, **attention)))


def test_a_given_model_is_held_against_a_plain_one():
    figures = on(given(48, heads=6, rotary=Rotary()))
    assert list(figures.at("parameters")) == [1, 2, 4, 8, 16]
    assert judge(figures).word == "true by construction"
    gated = on(given(48, heads=6, gated=True))
    assert gated["most over fewest", "plain"].mean == 1
    assert gated["most over fewest", OWN].mean == (4 * 48**2 + 16) / (4 * 48**2 + 1)  # a gate for each head
    assert str(judge(gated)) == "depends: on what else the layer has: the model's own kind moves it"


def test_key_heads_that_do_not_divide_a_head_count():
    # Of 3 key heads 1 is left with 1, 2, 4, 8 or 16 heads: 2·48² + 2·48·d parameters.
    figures = on(given(48, heads=6, kv_heads=3))
    assert figures["most over fewest", OWN].mean == (4 * 48**2) / (2 * 48**2 + 2 * 48 * 3)


def test_a_wide_layer_costs_nothing_to_count():
    assert count(AttentionSpec(width=16384, heads=128)) == 4 * 16384**2


def test_a_width_that_cannot_be_shared_out():
    with pytest.raises(HeadwiseError, match="even width"):
        on(given(9, heads=3))
