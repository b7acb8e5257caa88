import math

import pytest
import torch

from headwise.experiments.claim import VERDICTS
from headwise.experiments.claim_tests.narrow_heads_saturate_less import (
    CLAIM,
    KEYS,
    TRAINED,
    UNSCALED,
    judge,
    measure,
    model_std_and_entropy,
    random_std_and_entropy,
    score_std_and_entropy,
)
from headwise.experiments.compared_head_counts import fit_log2_slopes, head_counts
from headwise.experiments.engine.statistic import StatisticTable
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import make_tokenizer
from headwise.text.corpus import Corpus
from tests.experiments.tiny import tiny_experiment

NAME = "entropy gained by a doubling of head_dim"
WHERE = (TRAINED, UNSCALED)


def make_rows(*slopes):
    return [(NAME, setting, slope) for setting, slope in zip(WHERE, slopes, strict=True)]


CASES = {
    "holds": make_rows([-0.05, -0.05, -0.051], [-0.03, -0.031, -0.03]),
    "depends": make_rows([0.0, 0.001, 0.0], [-0.1, -0.11, -0.1]),
    "does not hold": make_rows([-0.001], [0.02]),
}


@pytest.mark.parametrize(
    ("scaled", "unscaled", "reason"),
    [
        ([0.0, 0.001, 0.0], [-0.1, -0.11, -0.1], "on the scale; so: trained, unscaled; not so: trained, by 1/√d"),
        ([0.0, 0.001, 0.0], [-0.05, 0.02, 0.0], "not so: trained, by 1/√d; open: trained, unscaled"),
    ],
)
def test_saturation_open_interval_depends(scaled, unscaled, reason):
    statistics = StatisticTable()
    for row in make_rows(scaled, unscaled):
        statistics.add(*row)
    assert judge(statistics).detail == reason
    statistics.add("slope of random q and k", "unscaled", -0.2)  # is not judged
    assert judge(statistics).detail == reason


@pytest.mark.parametrize("d", [1, 4, 64])
def test_of_random_spread_is_root_of_head_dim(d):
    # The spread over a row of n keys is, on average, 1 − 1/n of the variance; ROWS rows leave a few per cent of noise.
    fraction = math.sqrt(1 - 1 / KEYS)
    assert random_std_and_entropy(d, scaled=False)[0] == pytest.approx(math.sqrt(d) * fraction, rel=0.12)
    assert random_std_and_entropy(d, scaled=True)[0] == pytest.approx(fraction, rel=0.12)


def test_saturation_entropy_of_normal_scores():
    # Softmax weights of N(0, s²) scores are log-normal: the entropy is ln n − s²/2 for many keys.
    scores = 0.5 * torch.randn(20, 20_000, generator=torch.Generator().manual_seed(0))
    _, entropy = score_std_and_entropy(scores)
    assert entropy.mean().item() * math.log(20_000) == pytest.approx(math.log(20_000) - 0.125, abs=2e-3)


def test_saturation_masked_keys_are_ignored():
    sd, entropy = score_std_and_entropy(torch.tensor([[1.0, 3.0, -torch.inf], [2.0, -torch.inf, -torch.inf]]))
    assert sd.tolist() == [1.0, 0.0]
    assert entropy[1].item() == 0


def test_of_model_equal_keys_is_not_saturated():
    spec = ModelSpec(vocab=257, context=32, layers=1, attention=AttentionSpec(width=16, heads=4))
    model = Transformer(spec)
    model.tokenizer = make_tokenizer("byte", Corpus.of("a"))
    with torch.no_grad():
        for head in model.heads:
            head.W_K.zero_()
    result = model_std_and_entropy(model, "to be or not to be")
    assert result["sd"] == result["raw sd"] == 0
    assert result["entropy"] == pytest.approx(1, abs=1e-5)


def test_saturation_scaled_and_raw_differ_by_scale(tmp_path):
    experiment = tiny_experiment(tmp_path)
    statistics = measure(experiment)
    for heads in head_counts(experiment.size.width):
        d = experiment.size.width // heads
        raw, scaled = statistics["sd: trained, before the scale", d].mean, statistics["sd: trained, by 1/√d", d].mean
        assert raw == pytest.approx(scaled * math.sqrt(d), rel=1e-4)
    assert tuple(statistics.by_condition(NAME)) == WHERE
    assert set(CLAIM.plot.statistics) <= set(statistics.names)
    assert judge(statistics).word in VERDICTS


def test_saturation_unscaled_models_are_included(tmp_path):
    experiment = tiny_experiment(tmp_path)
    scales = {(p.spec.attention.heads, p.spec.attention.scale) for p in CLAIM.training_configs(experiment)}
    assert scales == {*((heads, None) for heads in (1, 2, 4, 8, 16)), (1, 1.0), (8, 1.0)}
    statistics = measure(experiment)
    for name in ("sd", "entropy"):  # heads of one channel: 1/√1 = 1
        assert list(statistics.by_condition(f"{name}: {UNSCALED}")) == [1, 2, 16]
        assert statistics[f"{name}: {UNSCALED}", 1] == statistics[f"{name}: {TRAINED}", 1]
    # the untrained models have equal weights with and without scale, so only the scale differs
    assert statistics[f"sd: {UNSCALED}", 16].mean > statistics[f"sd: {TRAINED}", 16].mean
    slope = fit_log2_slopes({d: statistics[f"entropy: {UNSCALED}", d].values for d in (1, 2, 16)})
    assert statistics[NAME, UNSCALED].values == pytest.approx(slope)
    assert list(statistics.by_condition("slope of random q and k")) == ["unscaled", "by 1/√d"]
