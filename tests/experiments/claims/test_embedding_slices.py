import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.experiments.claim_tests.embedding_slices import (
    CLAIM,
    FULL,
    SLICED,
    WIDER,
    input_overlap,
    own_slice_weight_ratio,
)
from headwise.experiments.engine.statistic import StatisticTable
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from tests.experiments.stub_experiment import stub_experiment

OVERLAP = "overlap of what heads read, over chance"
CASES = {
    "holds": [(OVERLAP, FULL, [1.1, 1.2, 1.3]), ("lost by slices", SLICED, 0.2), ("lost by slices", WIDER, 0.1)],
    "depends": [(OVERLAP, FULL, [1.1, 1.2, 1.3]), ("lost by slices", SLICED, 0.2), ("lost by slices", WIDER, 0.0)],
    "does not hold": [(OVERLAP, FULL, 0.1), ("lost by slices", SLICED, 0.2), ("lost by slices", WIDER, 0.1)],
}


@pytest.mark.parametrize(
    ("overlap", "sliced", "wider", "reason"),
    [
        ([0.5, 1.0, 1.8], 0.2, 0.1, "the input subspaces of heads overlap 1.10 times"),
        (1.1, 0.2, [-0.1, 0.1, 0.2], "the input subspaces overlap, but whether slices with wider MLPs"),
        (1.1, 0.0, [-0.1, 0.1, 0.2], "on the criterion: the input subspaces overlap, but slices lose less"),
    ],
)
def test_input_slices_open_interval_depends(overlap, sliced, wider, reason):
    statistics = StatisticTable().add(OVERLAP, FULL, overlap)
    verdict = CLAIM.judge(statistics.add("lost by slices", SLICED, sliced).add("lost by slices", WIDER, wider))
    assert verdict.word == ("depends" if reason.startswith("on ") else "undecided")
    assert verdict.detail.startswith(reason)


def make_model(heads=6, **attention) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelSpec(9, 8, 1, AttentionSpec(width=48, heads=heads, **attention), norm="rms"))


def test_input_slices_one_head_raises():
    assert CLAIM.measure_model is not None
    with pytest.raises(HeadwiseError, match="two heads"):
        CLAIM.measure_model(make_model(heads=1), None)


def test_input_overlap_sliced_zero_random_one():
    assert input_overlap(make_model(head_input="slice")) == pytest.approx(0, abs=1e-6)
    assert own_slice_weight_ratio(make_model(head_input="slice")) == pytest.approx(6)
    assert input_overlap(make_model()) == pytest.approx(1, abs=0.1)
    assert own_slice_weight_ratio(make_model()) == pytest.approx(1, abs=0.1)


@torch.no_grad()
def test_input_overlap_identical_heads_is_maximal():
    copied = make_model()
    for head in copied.heads:
        for projection in "QKV":
            getattr(head, f"W_{projection}").copy_(getattr(copied.heads[0], f"W_{projection}"))
    assert input_overlap(copied) == pytest.approx(6, rel=1e-5)  # chance is d/D = 1/6


def test_input_overlap_ignores_shared_keys():
    assert input_overlap(make_model(kv_heads=1)) == pytest.approx(1, abs=0.15)


def test_input_slices_stub_experiment_and_given_model(tmp_path):
    def stub_results(config):
        loss = 2.0 + (config.spec.attention.head_input == "slice") * 0.5 - (config.spec.mlp_width > 64) * 0.25
        return {"loss": loss, "probe_accuracy": {"surname": loss / 4}}

    experiment = stub_experiment(tmp_path, stub_results, models=True)
    statistics = CLAIM.measure(experiment)
    assert [statistics["lost by slices", name].mean for name in (SLICED, WIDER)] == [0.5, 0.25]
    # LayerNorm centers the input of heads: slices share a direction, whose cos² is 1/(H − 1)², of d; chance is d/D
    assert statistics[OVERLAP, SLICED].mean == pytest.approx((1 / 3**2 / 4) / (4 / 16))
    assert statistics["parameters", WIDER].mean == pytest.approx(statistics["parameters", FULL].mean, rel=0.01)
    assert 0 < statistics["maps apart (JS)", SLICED].mean < 0.7
    assert statistics["right, slices", "surname"].mean == 2.5 / 4
    assert CLAIM.judge(statistics).word == "holds"
    assert CLAIM.measure_model is not None
    given_statistics = CLAIM.measure_model(
        experiment.train_or_load(experiment.make_config(0, head_input="slice")).load_model(), None
    )
    assert CLAIM.judge(given_statistics).word == "does not hold"
    assert set(given_statistics.names) & set(CLAIM.plot.statistics)
