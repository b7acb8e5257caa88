import math

import pytest
import torch

from headwise.experiments.claim import WORDS
from headwise.experiments.claims.saturation import (
    CLAIM,
    KEYS,
    TRAINED,
    UNSCALED,
    judge,
    measure,
    of_model,
    of_random,
    saturation,
)
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.head_counts import head_counts, trends
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import make_tokenizer
from headwise.text.corpus import Corpus
from tests.experiments.tiny import tiny_lab

NAME = "entropy gained by a doubling of head_dim"
WHERE = (TRAINED, UNSCALED)


def gained(*slopes):
    return [(NAME, where, slope) for where, slope in zip(WHERE, slopes, strict=True)]


CASES = {
    "holds": gained([-0.05, -0.05, -0.051], [-0.03, -0.031, -0.03]),
    "depends": gained([0.0, 0.001, 0.0], [-0.1, -0.11, -0.1]),
    "does not hold": gained([-0.001], [0.02]),
}


@pytest.mark.parametrize(
    ("scaled", "unscaled", "on"),
    [
        ([0.0, 0.001, 0.0], [-0.1, -0.11, -0.1], "on the scale; so: trained, unscaled; not so: trained, by 1/√d"),
        ([0.0, 0.001, 0.0], [-0.05, 0.02, 0.0], "on the seed; not so: trained, by 1/√d; open: trained, unscaled"),
    ],
)
def test_an_open_question_is_not_answered(scaled, unscaled, on):
    figures = Figures()
    for row in gained(scaled, unscaled):
        figures.add(*row)
    assert judge(figures).on == on
    figures.add("slope of random q and k", "unscaled", -0.2)  # is not judged
    assert judge(figures).on == on


@pytest.mark.parametrize("d", [1, 4, 64])
def test_random_scores_spread_as_the_root_of_head_dim(d):
    # The spread over a row of n keys is, on average, 1 − 1/n of the variance; ROWS rows leave a few per cent of noise.
    share = math.sqrt(1 - 1 / KEYS)
    assert of_random(d, scaled=False)[0] == pytest.approx(math.sqrt(d) * share, rel=0.12)
    assert of_random(d, scaled=True)[0] == pytest.approx(share, rel=0.12)


def test_entropy_of_normal_scores():
    # Softmax weights of N(0, s²) scores are log-normal: the entropy is ln n − s²/2 for many keys.
    scores = 0.5 * torch.randn(20, 20_000, generator=torch.Generator().manual_seed(0))
    _, entropy = saturation(scores)
    assert entropy.mean().item() * math.log(20_000) == pytest.approx(math.log(20_000) - 0.125, abs=2e-3)


def test_hidden_keys_do_not_count():
    sd, entropy = saturation(torch.tensor([[1.0, 3.0, -torch.inf], [2.0, -torch.inf, -torch.inf]]))
    assert sd.tolist() == [1.0, 0.0]
    assert entropy[1].item() == 0


def test_a_model_of_equal_keys_is_not_saturated():
    spec = ModelSpec(vocab=257, context=32, layers=1, attention=AttentionSpec(width=16, heads=4))
    model = Transformer(spec)
    model.tokenizer = make_tokenizer("byte", Corpus.of("a"))
    with torch.no_grad():
        for head in model.heads:
            head.W_K.zero_()
    found = of_model(model, "to be or not to be")
    assert found["sd"] == found["raw sd"] == 0
    assert found["entropy"] == pytest.approx(1, abs=1e-5)


def test_the_scale_is_what_stands_between(tmp_path):
    lab = tiny_lab(tmp_path)
    figures = measure(lab)
    for heads in head_counts(lab.size.width):
        d = lab.size.width // heads
        raw, scaled = figures["sd: trained, before the scale", d].mean, figures["sd: trained, by 1/√d", d].mean
        assert raw == pytest.approx(scaled * math.sqrt(d), rel=1e-4)
    assert tuple(figures.at(NAME)) == WHERE
    assert set(CLAIM.picture.figures) <= set(figures.names)
    assert judge(figures).word in WORDS


def test_models_trained_without_the_scale(tmp_path):
    lab = tiny_lab(tmp_path)
    scales = {(p.spec.attention.heads, p.spec.attention.scale) for p in CLAIM.points(lab)}
    assert scales == {*((heads, None) for heads in (1, 2, 4, 8, 16)), (1, 1.0), (8, 1.0)}
    figures = measure(lab)
    for name in ("sd", "entropy"):  # heads of one channel: 1/√1 is no scale
        assert list(figures.at(f"{name}: {UNSCALED}")) == [1, 2, 16]
        assert figures[f"{name}: {UNSCALED}", 1] == figures[f"{name}: {TRAINED}", 1]
    # the tiny lab draws the same weights with and without: what differs is the scale alone
    assert figures[f"sd: {UNSCALED}", 16].mean > figures[f"sd: {TRAINED}", 16].mean
    slope = trends({d: figures[f"entropy: {UNSCALED}", d].values for d in (1, 2, 16)})
    assert figures[NAME, UNSCALED].values == pytest.approx(slope)
    assert list(figures.at("slope of random q and k")) == ["unscaled", "by 1/√d"]
