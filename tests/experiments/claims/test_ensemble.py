import math

import pytest
import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.experiments.claims.ensemble import CLAIM, NARROW, WIDE, Average, average_loss
from headwise.experiments.engine.statistic import Figures
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import add_frame, make_tokenizer
from headwise.text.corpus import Corpus
from tests.experiments.stub_experiment import told_lab

GAP = "above the ensemble"
CASES = {
    "holds": [(GAP, WIDE, [0.01, 0.011, 0.009]), (GAP, NARROW, [-0.01, -0.011, -0.012])],
    "depends": [(GAP, WIDE, [0.05, 0.051, 0.049]), (GAP, NARROW, [-0.01, -0.011, -0.012])],
    "does not hold": [(GAP, WIDE, [0.05, 0.051, 0.049]), (GAP, NARROW, 0.1)],
}


def test_better_than_both_is_no_ensemble_either():
    verdict = CLAIM.judge(Figures().add(GAP, WIDE, -0.1).add(GAP, NARROW, -0.2))
    assert str(verdict) == (
        "does not hold: the heads are better than wide members averaged; better than narrow members averaged"
    )


def test_what_the_seed_decides_is_not_put_on_the_members():
    figures = Figures().add(GAP, WIDE, [0.1, -0.1, 0.0]).add(GAP, NARROW, [0.1, -0.1, 0.05])
    assert str(CLAIM.judge(figures)).startswith("depends: on the seed: the heads are by the seed better or worse than")
    figures = Figures().add(GAP, WIDE, 0.1).add(GAP, NARROW, -0.1)
    assert str(CLAIM.judge(figures)).startswith("depends: on the members: the heads are worse than wide members")


def test_members_are_of_the_seeds_that_were_asked_for(tmp_path):
    lab = told_lab(tmp_path, lambda point: {}, (100, 101))
    assert {point.recipe.seed for point in CLAIM.points(lab)} == {100, 101, 102, 103}


WORDS = add_frame(make_tokenizer("word", Corpus.of(["the dog ."])))  # as training leaves it
A, B, C = WORDS.encode("the dog .", special=False)


@torch.no_grad()
def sure(word: int, share: float) -> Transformer:
    """A model that says one word with this probability whatever it reads, and shares out the rest evenly; in float64."""
    vocab = len(WORDS)
    model = Transformer(ModelSpec(vocab, 8, 1, AttentionSpec(width=4, heads=1), tied=False)).double().eval()
    for weight in model.parameters():
        weight.zero_()
    assert isinstance(model.norm, nn.LayerNorm)
    assert model.output is not None
    model.norm.bias.fill_(0.25)  # all that reaches the output: four times 1/4
    told = torch.full((vocab,), (1 - share) / (vocab - 1), dtype=torch.float64)
    told[word] = share
    model.output.vocabulary.weight.copy_(told.log()[:, None])
    model.tokenizer = WORDS
    return model


def test_probabilities_are_averaged():
    made = Average([sure(A, 0.8).double(), sure(B, 0.6).double()])(torch.zeros(1, 2, dtype=torch.long))
    rest = (0.2 / (len(WORDS) - 1), 0.4 / (len(WORDS) - 1))
    wanted = [(0.8 + rest[1]) / 2, (rest[0] + 0.6) / 2, sum(rest) / 2]
    assert made[0, 1].exp()[[A, B, C]].tolist() == pytest.approx(wanted, rel=1e-12)


def test_the_loss_of_an_average_is_less_than_the_average_loss():
    models, rest = [sure(A, 0.8), sure(B, 0.6)], (0.2 / (len(WORDS) - 1), 0.4 / (len(WORDS) - 1))
    alone = [average_loss([model], ["the dog"]) for model in models]
    assert alone[0] == pytest.approx(-(math.log(0.8) + math.log(rest[0])) / 2, rel=1e-12)
    wanted = -(math.log((0.8 + rest[1]) / 2) + math.log((rest[0] + 0.6) / 2)) / 2
    assert average_loss(models, ["the dog"]) == pytest.approx(wanted, rel=1e-12)
    assert wanted < sum(alone) / 2


def test_members_must_speak_one_language():
    other = Transformer(ModelSpec(3, 8, 1, AttentionSpec(width=4, heads=1)))
    with pytest.raises(HeadwiseError, match="same vocabulary"):
        Average([sure(A, 0.8), other])


def test_measured_on_a_small_lab(tmp_path, monkeypatch):
    monkeypatch.setattr("headwise.experiments.claims.ensemble.EXAMINED", 20)
    lab = told_lab(tmp_path, lambda point: {"marks": {"surname": 0.5}}, models=True)
    figures = CLAIM.measure(lab)
    together, alone = (figures["loss", f"{WIDE}, {how}"] for how in ("averaged", "each alone"))
    assert together.mean < alone.mean
    assert figures[GAP, WIDE].mean == pytest.approx(figures["loss", "4 heads"].mean - together.mean)
    assert figures["parameters, of the heads' model 1", WIDE].mean == 4
    assert set(figures.at(f"right, {NARROW} averaged")) == {"bracket", "surname", "agreement", "referent"}
    assert CLAIM.judge(figures).word
    assert len(set(CLAIM.points(lab))) == 1 + 4 + 4
