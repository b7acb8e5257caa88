import pytest
import torch

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.experiments.claim import VERDICTS
from headwise.experiments.claim_tests.low_rank import (
    energy_in_first_half,
    head_score_ranks,
    judge,
    measure,
    measure_model,
    numerical_rank,
)
from headwise.heads.head import Circuit
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.text.build_tokenizers import make_tokenizer
from headwise.text.corpus import Corpus
from tests.attached.test_analysis import build, documents
from tests.experiments.tiny import tiny_experiment

RANK, REST = "largest rank over head_dim", "unexplained by one form"
CASES = {
    "true by construction": [(RANK, 8, [1.0, 1.0, 0.875]), (REST, 8, [1e-6, 1e-6, 2e-6])],
    "depends": [(RANK, 64, 1.0), (REST, 64, 0.7)],
    "does not hold": [(RANK, 8, [1.0, 1.0, 1.5]), (REST, 8, [1e-6, 1e-6, 2e-6])],
}
TEXT = "the teacher gave the students their homework and went home"


def make_model(**attention):
    torch.manual_seed(0)
    spec = ModelSpec(
        vocab=257, context=64, layers=1, positions="none" if attention else "learned",
        attention=AttentionSpec(width=16, heads=2, **attention),
    )  # fmt: skip
    model = Transformer(spec).eval()
    model.tokenizer = make_tokenizer("byte", Corpus.of("a"))
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(10 if value.ndim > 1 else 1)
    return model


def test_head_ranks_scores_are_bilinear_of_rank_head_dim():
    for head_rank in head_score_ranks(make_model(), TEXT):
        assert (head_rank.head_dim, head_rank.rank, head_rank.tokens) == (8, 8, len(TEXT))
        assert head_rank.unexplained < 1e-5


def test_head_ranks_rotary_keeps_rank_not_bilinear_form():
    for head_rank in head_score_ranks(make_model(rotary=Rotary()), TEXT):
        assert head_rank.rank == 8
        assert head_rank.unexplained > 0.1


def test_head_ranks_softcap_increases_rank():
    # tanh of every entry is no longer a product of thin matrices.
    assert max(head_rank.rank for head_rank in head_score_ranks(make_model(softcap=0.05), TEXT)) > 8


def test_head_ranks_zeroed_directions_reduce_rank():
    model = make_model()
    with torch.no_grad():
        for head in model.heads:
            head.W_K[:, 3:] = 0
    assert {head_rank.rank for head_rank in head_score_ranks(model, TEXT)} == {3}


def test_head_ranks_short_text_raises():
    with pytest.raises(HeadwiseError, match="more tokens than head_dim=8"):
        head_score_ranks(make_model(), "abc")


def test_energy_and_numerical_rank_known_values():
    sigma = torch.tensor([3.0, 2.0, 1.0, 0.0])
    assert energy_in_first_half(Circuit(torch.eye(6)[:, :4] * sigma, torch.eye(6)[:4])) == pytest.approx(13 / 14)
    assert numerical_rank(torch.diag(sigma).double()) == 3


def test_low_rank_tiny_experiment_gives_statistics(tmp_path):
    statistics = measure(tiny_experiment(tmp_path))
    assert judge(statistics).word in VERDICTS
    ranks = {d: statistic.mean for d, statistic in statistics.by_condition("rank of the scores").items()}
    assert ranks == {1: 1, 2: 2, 4: 4, 8: 8, 16: 15}  # LayerNorm centers the input, so 15 of 16 dimensions remain
    assert statistics["effective rank of W_QK", 1].mean == pytest.approx(1)


def test_low_rank_given_model_gives_verdict(tmp_path):
    experiment = tiny_experiment(tmp_path)
    assert (
        judge(
            measure_model(
                experiment.train_or_load(experiment.make_config(0)).load_model(), experiment.held_out_corpus()
            )
        ).word
        == "true by construction"
    )


@pytest.mark.parametrize(
    ("name", "word"), [("gpt2", "true by construction"), ("llama", "depends")]
)  # learned, rotary positions
def test_low_rank_attached_model_gives_verdict(name, word):
    assert judge(measure_model(hw.attach(*build(name)), documents(24))).word == word
