from dataclasses import replace

import numpy as np
import pytest
import torch

from headwise.compression.plan import prune
from headwise.errors import HeadwiseError
from headwise.experiments import pretrained_claim_model
from headwise.experiments.claim import VERDICTS
from headwise.experiments.claim_tests import early_late_layers
from headwise.experiments.claim_tests.early_late_layers import (
    CLAIM,
    GAP,
    THIRDS,
    LayerThirdMeans,
    judge,
    measure,
    measure_model,
    metrics_by_layer_third,
)
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.layers_or_heads_specs import make_deep_experiment
from headwise.io.resolve_path import BUNDLES
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.annotated_document import Document, Relation
from headwise.text.build_tokenizers import byte_tokenizer, make_tokenizer
from tests.experiments.tiny import tiny_experiment

DIRECTIONS = ("local early", "syntactic early", "long range late", "semantic late")


def gaps(*values):
    return [(GAP, f"{direction} (trained)", value) for direction, value in zip(DIRECTIONS, values, strict=True)]


CASES = {
    "holds": gaps([0.2, 0.21, 0.2], [0.1, 0.11, 0.1], [0.2, 0.21, 0.2], [0.1, 0.11, 0.1]),
    "does not hold": gaps([0.2, 0.21, 0.2], [0.0, 0.01, 0.0], [-0.2, -0.21, -0.2], [-0.1, -0.11, -0.1]),
    "depends": gaps([0.2, 0.21, 0.2], [0.1, 0.11, 0.1], [0.0, 0.01, 0.0], [-0.1, -0.11, -0.1]),
}


def test_early_late_verdict_names_supported_parts():
    statistics = StatisticTable()
    for name, position, values in CASES["depends"]:
        statistics.add(name, position, values)
    supported, unsupported = judge(statistics).detail.split("not so")
    assert "local early" in supported
    assert "semantic late" in unsupported


CLEARLY_ABOVE, NEAR_ZERO, WIDE_INTERVAL = [0.2, 0.21, 0.2], [0.0, 0.01, 0.0], [-0.1, 0.1, 0.2]


@pytest.mark.parametrize(
    ("values", "word", "reason"),
    [
        (
            (CLEARLY_ABOVE, WIDE_INTERVAL, WIDE_INTERVAL, WIDE_INTERVAL),
            "undecided",
            "shown: local early (trained); open: syn",
        ),
        (
            (NEAR_ZERO, NEAR_ZERO, WIDE_INTERVAL, WIDE_INTERVAL),
            "depends",
            "on the property and the model; not so: local early",
        ),
        ((NEAR_ZERO, NEAR_ZERO, NEAR_ZERO, WIDE_INTERVAL), "does not hold", "open: semantic late"),
        ((NEAR_ZERO, NEAR_ZERO, NEAR_ZERO, NEAR_ZERO), "does not hold", ""),
    ],
)
def test_early_late_open_interval_depends(values, word, reason):
    statistics = StatisticTable()
    for row in gaps(*values):
        statistics.add(*row)
    verdict = judge(statistics)
    assert verdict.word == word
    assert verdict.detail.startswith(reason)


def test_by_depth_long_range_equals_closed_form(experiment):
    # Uniform heads over n tokens: row i has i/(i+1) off the first token, and i − 32 of its i + 1 keys, the first left out,
    # lie 32 or more back.
    tokenizer = byte_tokenizer()
    model = Transformer(replace(_make_spec(experiment, layers=3), vocab=len(tokenizer)))
    model.tokenizer = tokenizer
    with torch.no_grad():
        for head in model.heads:
            head.W_K.zero_()
    n = 90
    text = "".join(map(chr, range(33, 33 + n)))  # all different, because repeated tokens do not count as long-range
    far_weight, active_weight = (
        sum(weight_of(i) for i in range(n)) for weight_of in (lambda i: max(0, i - 32) / (i + 1), lambda i: i / (i + 1))
    )
    values = metrics_by_layer_third(model, [text, text[::-1]])["long range"].means_by_third
    assert values == pytest.approx([far_weight / active_weight] * 3, rel=1e-4)
    assert "and 32 or more away" in CLAIM.setup


def test_early_late_damaged_bundle_raises(tmp_path, monkeypatch):
    # A folder that can be imported, and has nothing in it.
    monkeypatch.setitem(BUNDLES, pretrained_claim_model.PRETRAINED, ("damaged==0", "damaged_bundle", "model.gguf"))
    assert early_late_layers.load_pretrained_if_installed() is None
    assert CLAIM.extra_key() == ""
    (tmp_path / "damaged_bundle").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert CLAIM.extra_key() == pretrained_claim_model.PRETRAINED
    with pytest.raises(HeadwiseError):
        early_late_layers.load_pretrained_if_installed()


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    return tiny_experiment(tmp_path_factory.mktemp("lab"))


def test_by_depth_uniform_heads_are_equal(experiment):
    # Keys of zero: every head attends uniformly in every layer; none follows a relation better than an offset.
    model = Transformer(_make_spec(experiment, layers=3))
    model.tokenizer = make_tokenizer("word", experiment.held_out_corpus())
    with torch.no_grad():
        for head in model.heads:
            head.W_K.zero_()
    for name, trend in metrics_by_layer_third(model, experiment.held_out_corpus()).items():
        assert np.ptp(trend.means_by_third) < 1e-5, name


def test_by_depth_windowed_first_layer_is_local(experiment):
    # a query of layer 0 sees 0, 1 and 2 back
    model = Transformer(_make_spec(experiment, layers=3, windows=(3, None, None)))
    model.tokenizer = make_tokenizer("word", experiment.held_out_corpus())
    with torch.no_grad():
        for head in model.heads:
            head.W_K.zero_()
    trends = metrics_by_layer_third(model, experiment.held_out_corpus())
    local, far = trends["local"], trends["long range"]
    # Two of three tokens seen are not the query's own; of the second and third of a text fewer, when its first is left out.
    assert local.means_by_third[0] == pytest.approx(2 / 3, abs=0.02)
    assert far.means_by_third[0] == pytest.approx(0, abs=1e-6)
    assert local.gap(0, 2).mean == pytest.approx(local.means_by_third[0] - local.means_by_third[2])
    assert local.gap(0, 2).is_interval_above(0.3)
    assert far.gap(0, 2).is_interval_below(0)


def test_early_late_tiny_experiment_gives_verdict(experiment, monkeypatch):
    monkeypatch.setattr(early_late_layers, "load_pretrained_if_installed", lambda: None)
    statistics = measure(experiment)
    for name in CLAIM.plot.statistics:
        assert list(statistics.by_condition(name)) == [f"trained: {third}" for third in THIRDS]
    assert [str(position) for position in statistics.by_condition(GAP)] == [
        f"{direction} (trained)" for direction in DIRECTIONS
    ]
    first, last = (statistics["local", f"trained: {THIRDS[third_index]}"].mean for third_index in (0, 2))
    assert statistics[GAP, "local early (trained)"].mean == pytest.approx(first - last)
    assert judge(statistics).word in VERDICTS


def test_early_late_given_model_or_raises(experiment):
    model = experiment.train_or_load(make_deep_experiment(experiment).make_config(0)).load_model()
    statistics = measure_model(model, experiment.held_out_corpus())
    assert len(statistics.by_condition(GAP)) == 4
    assert judge(statistics).word in VERDICTS
    with pytest.raises(HeadwiseError, match="three layers"):
        metrics_by_layer_third(experiment.train_or_load(experiment.make_config(0)).load_model())
    with pytest.raises(HeadwiseError, match="no heads left"):
        metrics_by_layer_third(
            prune(model, heads="0-1.*", ranking="random", fold_mean=False), experiment.held_out_corpus()
        )
    with pytest.raises(HeadwiseError, match="longer texts"):
        metrics_by_layer_third(model, [Document.of(["the", "dog", "sees"], [Relation("determiner-noun", 0, 1)])])


def test_depth_trend_one_text_has_no_interval():
    trend = LayerThirdMeans(np.array([[1.0, 2.0, 3.0]]), np.array([[4.0, 4.0, 4.0]]))
    assert trend.means_by_third == [0.25, 0.5, 0.75]
    assert trend.gap(2, 0) == Statistic.mean_of(0.5)


def test_early_late_short_documents_are_concatenated():
    model = Transformer(ModelSpec(300, 256, 3, AttentionSpec(width=8, heads=2)))
    model.tokenizer = byte_tokenizer()
    texts, related = early_late_layers._default_texts(model)
    assert len(texts) == early_late_layers.TEXTS
    assert len(related) == 668
    halves = [{arc.name for document in related[half::2] for arc in document.relations} for half in (0, 1)]
    assert halves[0] == halves[1] >= {"related", "unrelated"}
    assert min(len(text.split()) for text in texts) > 100


def _make_spec(experiment, **fields):
    vocab = len(make_tokenizer("word", experiment.held_out_corpus()))
    size = experiment.size
    return ModelSpec(
        **{"vocab": vocab, "context": 128, "attention": AttentionSpec(width=size.width, heads=size.heads), **fields}
    )
