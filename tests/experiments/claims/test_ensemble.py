import math

import pytest
import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.experiments.claim_tests.ensemble import CLAIM, NARROW, WIDE, ProbabilityEnsemble, ensemble_loss
from headwise.experiments.engine.statistic import StatisticTable
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import add_bos_eos, make_tokenizer
from headwise.text.corpus import Corpus
from tests.experiments.stub_experiment import stub_experiment

GAP = "above the ensemble"
CASES = {
    "holds": [(GAP, WIDE, [0.01, 0.011, 0.009]), (GAP, NARROW, [-0.01, -0.011, -0.012])],
    "depends": [(GAP, WIDE, [0.05, 0.051, 0.049]), (GAP, NARROW, [-0.01, -0.011, -0.012])],
    "does not hold": [(GAP, WIDE, [0.05, 0.051, 0.049]), (GAP, NARROW, 0.1)],
}


def test_ensemble_heads_better_than_both_does_not_hold():
    verdict = CLAIM.judge(StatisticTable().add(GAP, WIDE, -0.1).add(GAP, NARROW, -0.2))
    assert str(verdict) == (
        "does not hold: the heads are better than wide members averaged; better than narrow members averaged"
    )


def test_ensemble_seed_variation_depends_on_seed():
    statistics = StatisticTable().add(GAP, WIDE, [0.1, -0.1, 0.0]).add(GAP, NARROW, [0.1, -0.1, 0.05])
    assert str(CLAIM.judge(statistics)).startswith("undecided: the heads are possibly better or worse than")
    statistics = StatisticTable().add(GAP, WIDE, 0.1).add(GAP, NARROW, -0.1)
    assert str(CLAIM.judge(statistics)).startswith("depends: on the members: the heads are worse than wide members")


def test_ensemble_members_use_requested_seeds(tmp_path):
    experiment = stub_experiment(tmp_path, lambda config: {}, (100, 101))
    assert {config.recipe.seed for config in CLAIM.training_configs(experiment)} == {100, 101, 102, 103}


WORD_TOKENIZER = add_bos_eos(make_tokenizer("word", Corpus.of(["the dog ."])))  # as training leaves it
A, B, C = WORD_TOKENIZER.encode("the dog .", add_special_tokens=False)


@torch.no_grad()
def make_constant_model(token_id: int, probability: float) -> Transformer:
    """A model that says one word with this probability whatever it reads, and shares out the rest evenly; in float64."""
    vocab = len(WORD_TOKENIZER)
    model = Transformer(ModelSpec(vocab, 8, 1, AttentionSpec(width=4, heads=1), tied=False)).double().eval()
    for weight in model.parameters():
        weight.zero_()
    assert isinstance(model.norm, nn.LayerNorm)
    assert model.output is not None
    model.norm.bias.fill_(0.25)  # all that reaches the output: four times 1/4
    probabilities = torch.full((vocab,), (1 - probability) / (vocab - 1), dtype=torch.float64)
    probabilities[token_id] = probability
    model.output.vocabulary.weight.copy_(probabilities.log()[:, None])
    model.tokenizer = WORD_TOKENIZER
    return model


def test_logit_ensemble_averages_probabilities():
    log_probs = ProbabilityEnsemble([make_constant_model(A, 0.8).double(), make_constant_model(B, 0.6).double()])(
        torch.zeros(1, 2, dtype=torch.long)
    )
    other_probability = (0.2 / (len(WORD_TOKENIZER) - 1), 0.4 / (len(WORD_TOKENIZER) - 1))
    expected = [(0.8 + other_probability[1]) / 2, (other_probability[0] + 0.6) / 2, sum(other_probability) / 2]
    assert log_probs[0, 1].exp()[[A, B, C]].tolist() == pytest.approx(expected, rel=1e-12)


def test_average_loss_below_mean_of_losses():
    models, other_probability = (
        [make_constant_model(A, 0.8), make_constant_model(B, 0.6)],
        (0.2 / (len(WORD_TOKENIZER) - 1), 0.4 / (len(WORD_TOKENIZER) - 1)),
    )
    single_losses = [ensemble_loss([model], ["the dog"]) for model in models]
    assert single_losses[0] == pytest.approx(-(math.log(0.8) + math.log(other_probability[0])) / 2, rel=1e-12)
    expected = -(math.log((0.8 + other_probability[1]) / 2) + math.log((other_probability[0] + 0.6) / 2)) / 2
    assert ensemble_loss(models, ["the dog"]) == pytest.approx(expected, rel=1e-12)
    assert expected < sum(single_losses) / 2


def test_logit_ensemble_different_vocabulary_raises():
    other = Transformer(ModelSpec(3, 8, 1, AttentionSpec(width=4, heads=1)))
    with pytest.raises(HeadwiseError, match="same vocabulary"):
        ProbabilityEnsemble([make_constant_model(A, 0.8), other])


def test_ensemble_tiny_experiment_gives_statistics(tmp_path, monkeypatch):
    monkeypatch.setattr("headwise.experiments.claim_tests.ensemble.EVAL_DOCUMENTS", 20)
    experiment = stub_experiment(tmp_path, lambda config: {"probe_accuracy": {"surname": 0.5}}, models=True)
    statistics = CLAIM.measure(experiment)
    ensemble_loss, single_loss = (statistics["loss", f"{WIDE}, {variant}"] for variant in ("averaged", "each alone"))
    assert ensemble_loss.mean < single_loss.mean
    assert statistics[GAP, WIDE].mean == pytest.approx(statistics["loss", "4 heads"].mean - ensemble_loss.mean)
    assert statistics["parameters, of the heads' model 1", WIDE].mean == 4
    assert set(statistics.by_condition(f"right, {NARROW} averaged")) == {"bracket", "surname", "agreement", "referent"}
    assert CLAIM.judge(statistics).word
    assert len(set(CLAIM.training_configs(experiment))) == 1 + 4 + 4
