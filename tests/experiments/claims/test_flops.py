import pytest

from headwise.experiments.claim_tests.flops import CLAIM, HEADS, SOFTMAX_OPS, count_flops, measure, measure_model
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.trained_model_provider import ExperimentSize, TrainedModelProvider
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec


def rows(products, softmax):
    return [
        ("most over fewest", "products 64x128", products),
        ("most over fewest", "with softmax 64x128", softmax),
        ("most over fewest", "products, one key head", 1.0),
    ]


CASES = {"true by construction": rows(1.0, 1.02), "does not hold": rows(1.1, 1.4)}


@pytest.mark.parametrize(("width", "heads", "tokens"), [(48, 1, 7), (48, 6, 7), (48, 48, 7), (96, 8, 31)])
def test_layer_flops_equal_closed_form(width, heads, tokens):
    # q, k, v and W_O: 2·n·D² each. Scores and values: 2·n²·d for each of D/d heads.
    flops = count_flops(AttentionSpec(width=width, heads=heads), tokens)
    assert flops.matmul == 8 * tokens * width**2 + 4 * tokens**2 * width
    assert flops.softmax == SOFTMAX_OPS * heads * tokens**2


def test_layer_flops_shared_kv_projected_once():
    flops = count_flops(AttentionSpec(width=48, heads=6, kv_heads=1), 7)  # keys and values of one head of 8 channels
    assert flops.matmul == 2 * 7 * 48 * (48 + 8 + 8 + 48) + 4 * 7**2 * 48


def test_flops_softmax_matters_for_narrow_layer(tmp_path):
    statistics = measure(
        TrainedModelProvider(ExperimentStore(tmp_path), size=ExperimentSize(width=64, context=128)), [(768, 1024)]
    )
    per_token = [8 * 64**2 + 4 * 128 * 64 + SOFTMAX_OPS * heads * 128 for heads in (HEADS[0], HEADS[-1])]
    assert statistics["most over fewest", "with softmax 64x128"].mean == pytest.approx(per_token[1] / per_token[0])
    assert statistics["most over fewest", "with softmax 768x1024"].mean < 1.05
    assert statistics["most over fewest", "products 64x128"].mean == 1
    assert "exceptions" in CLAIM.judge(statistics).detail


def test_flops_given_model_gives_verdict():
    model = Transformer(ModelSpec(vocab=11, context=16, layers=1, attention=AttentionSpec(width=12, heads=4)))
    statistics = measure_model(model)
    assert list(statistics.by_condition("products")) == [1, 2, 4]
    assert "exceptions" in CLAIM.judge(statistics).detail  # 16 tokens of width 12: softmax counts
