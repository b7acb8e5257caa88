import pytest
import torch

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.experiments.claim import WORDS
from headwise.experiments.claims.low_rank import first_half, forms, judge, measure, numerical_rank, on
from headwise.heads.head import Circuit
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.text.build_tokenizers import make_tokenizer
from headwise.text.corpus import Corpus
from tests.attached.test_analysis import build, documents
from tests.experiments.tiny import tiny_lab

RANK, REST = "largest rank over head_dim", "unexplained by one form"
CASES = {
    "true by construction": [(RANK, 8, [1.0, 1.0, 0.875]), (REST, 8, [1e-6, 1e-6, 2e-6])],
    "depends": [(RANK, 64, 1.0), (REST, 64, 0.7)],
    "does not hold": [(RANK, 8, [1.0, 1.0, 1.5]), (REST, 8, [1e-6, 1e-6, 2e-6])],
}
TEXT = "the teacher gave the students their homework and went home"


def small(**attention):
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


def test_scores_have_the_rank_of_head_dim_and_are_a_form():
    for form in forms(small(), TEXT):
        assert (form.head_dim, form.rank, form.tokens) == (8, 8, len(TEXT))
        assert form.unexplained < 1e-5


def test_rotary_positions_turn_the_form_but_keep_the_rank():
    for form in forms(small(rotary=Rotary()), TEXT):
        assert form.rank == 8
        assert form.unexplained > 0.1


def test_capped_scores_have_a_higher_rank():
    # tanh of every entry is no longer a product of thin matrices.
    assert max(form.rank for form in forms(small(softcap=0.05), TEXT)) > 8


def test_fewer_directions_show():
    model = small()
    with torch.no_grad():
        for head in model.heads:
            head.W_K[:, 3:] = 0
    assert {form.rank for form in forms(model, TEXT)} == {3}


def test_a_short_text_shows_nothing():
    with pytest.raises(HeadwiseError, match="more tokens than head_dim, 8; there are 3"):
        forms(small(), "abc")


def test_energy_and_rank():
    sigma = torch.tensor([3.0, 2.0, 1.0, 0.0])
    assert first_half(Circuit(torch.eye(6)[:, :4] * sigma, torch.eye(6)[:4])) == pytest.approx(13 / 14)
    assert numerical_rank(torch.diag(sigma).double()) == 3


def test_figures_of_the_lab(tmp_path):
    figures = measure(tiny_lab(tmp_path))
    assert judge(figures).word in WORDS
    ranks = {d: figure.mean for d, figure in figures.at("rank of the scores").items()}
    assert ranks == {1: 1, 2: 2, 4: 4, 8: 8, 16: 15}  # LayerNorm centres what is read: of 16 dimensions 15 are left
    assert figures["effective rank of W_QK", 1].mean == pytest.approx(1)


def test_on_a_given_model(tmp_path):
    lab = tiny_lab(tmp_path)
    assert judge(on(lab.made(lab.point(0)).model(), lab.documents())).word == "true by construction"


@pytest.mark.parametrize(
    ("name", "word"), [("gpt2", "true by construction"), ("llama", "depends")]
)  # learned, rotary positions
def test_on_an_attached_model(name, word):
    assert judge(on(hw.attach(*build(name)), documents(24))).word == word
