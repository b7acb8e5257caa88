import pytest

from headwise.experiments.claims.flops import CLAIM, HEADS, SOFTMAX, count, measure, on
from headwise.experiments.engine.store import Store
from headwise.experiments.experiment import Lab, LabSize
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec


def rows(products, softmax):
    return [
        ("most over fewest", "products 64x128", products),
        ("most over fewest", "with softmax 64x128", softmax),
        ("most over fewest", "products, one key head", 1.0),
    ]


CASES = {"true by construction": rows(1.0, 1.02), "depends": rows(1.0, 1.4), "does not hold": rows(1.1, 1.4)}


@pytest.mark.parametrize(("width", "heads", "tokens"), [(48, 1, 7), (48, 6, 7), (48, 48, 7), (96, 8, 31)])
def test_the_closed_form(width, heads, tokens):
    # q, k, v and W_O: 2·n·D² each. Scores and values: 2·n²·d for each of D/d heads.
    work = count(AttentionSpec(width=width, heads=heads), tokens)
    assert work.products == 8 * tokens * width**2 + 4 * tokens**2 * width
    assert work.softmax == SOFTMAX * heads * tokens**2


def test_shared_keys_are_projected_once():
    work = count(AttentionSpec(width=48, heads=6, kv_heads=1), 7)  # keys and values of one head of 8 channels
    assert work.products == 2 * 7 * 48 * (48 + 8 + 8 + 48) + 4 * 7**2 * 48


def test_softmax_moves_the_total_of_a_narrow_layer(tmp_path):
    found = measure(Lab(Store(tmp_path), size=LabSize(width=64, context=128)), [(768, 1024)])
    per_token = [8 * 64**2 + 4 * 128 * 64 + SOFTMAX * heads * 128 for heads in (HEADS[0], HEADS[-1])]
    assert found["most over fewest", "with softmax 64x128"].mean == pytest.approx(per_token[1] / per_token[0])
    assert found["most over fewest", "with softmax 768x1024"].mean < 1.05
    assert found["most over fewest", "products 64x128"].mean == 1
    assert CLAIM.judge(found).word == "depends"


def test_on_a_model():
    model = Transformer(ModelSpec(vocab=11, context=16, layers=1, attention=AttentionSpec(width=12, heads=4)))
    found = on(model)
    assert list(found.at("products")) == [1, 2, 4]
    assert CLAIM.judge(found).word == "depends"  # 16 tokens of width 12: softmax counts
