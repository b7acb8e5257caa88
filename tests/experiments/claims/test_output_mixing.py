import pytest
import torch

import headwise as hw
from headwise.analysis.ablation.importance import importance
from headwise.experiments.claim import WORDS
from headwise.experiments.claims.output_mixing import CLAIM, LEARNED, NONE, interaction, judge, measure, within_layer
from headwise.experiments.engine.statistic import Figures
from headwise.heads import MultiHeadAttention
from tests.attached.test_analysis import build, documents
from tests.experiments.tiny import tiny_lab

LOSS, LAYER, LEFT = "interaction in the loss", "interaction within the layer", "interaction left without mixing"


def told(none, left):
    return [(LAYER, NONE, 1e-7), (LOSS, LEARNED, [0.5, 0.52, 0.5]), (LOSS, NONE, none), (LEFT, None, left)]


CASES = {
    "holds": told([0.01, 0.012, 0.01], [0.02, 0.02, 0.02]),
    "depends": told([0.2, 0.21, 0.2], [0.4, 0.4, 0.41]),
    "does not hold": told([0.5, 0.51, 0.5], [1.0, 0.98, 1.0]),
}


@pytest.mark.parametrize(
    ("none", "left", "layer", "word"),
    [
        ([0.2, 0.21, 0.2], [0.3, 0.6, 0.7], 1e-7, "depends"),  # more than half, or less: open
        ([0.0, 0.06, 0.2], [1.0, 0.98, 1.0], 1e-7, "depends"),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 0.1, "does not hold"),
    ],
)
def test_an_open_question_is_not_answered(none, left, layer, word):
    figures = Figures().add(LOSS, NONE, none).add(LEFT, None, left).add(LAYER, NONE, layer)
    verdict = judge(figures)
    assert verdict.word == word
    assert "seed" in verdict.on or word != "depends"


def test_a_given_model_mixes_and_is_not_asked():
    assert CLAIM.on is None


def test_heads_of_a_layer_add_up():
    torch.manual_seed(0)
    layer = MultiHeadAttention(width=12, heads=3, out_bias=True)
    assert within_layer(layer, torch.randn(2, 7, 12), 0, 2) < 1e-6


def test_heads_that_nobody_reads_do_not_interact(tmp_path):
    # Two heads that write nothing cost nothing, singly or together.
    lab = tiny_lab(tmp_path)
    model = lab.made(lab.point(0)).model()
    with torch.no_grad():
        for layer in model.attention_layers():
            layer.write.weight.zero_()
    assert interaction(model, lab.documents(), texts=4) == 0


def test_a_head_and_its_opposite(tmp_path):
    # Head 1 undoes head 0, so taking both away costs nothing, and they are as far off as their single costs a and b sum to.
    lab = tiny_lab(tmp_path)
    model = lab.made(lab.point(0, heads=2)).model()
    with torch.no_grad():
        for layer in model.attention_layers():
            one, other = layer.heads
            for letter in "QKV":
                getattr(other, f"W_{letter}").copy_(getattr(one, f"W_{letter}"))
            other.W_O.copy_(-one.W_O)
    costs = importance(model, lab.documents(), how="zero").mean.reshape(2, 2)  # two layers of two heads
    wanted = abs(costs.sum(1)).sum() / abs(costs).sum()
    assert interaction(model, lab.documents()) == pytest.approx(wanted, rel=1e-3)


def test_figures_of_the_lab(tmp_path):
    figures = measure(tiny_lab(tmp_path))
    assert judge(figures).word in WORDS
    assert figures["overlap of write subspaces", NONE].mean == 0
    assert figures["cosine of writes", NONE].mean == 0
    assert figures["overlap of write subspaces", "chance"].mean == 0.25
    assert figures[LEFT].mean == pytest.approx(figures[LOSS, NONE].mean / figures[LOSS, LEARNED].mean)


def test_interaction_in_an_attached_model():
    model = hw.attach(*build("llama"))
    some = interaction(model, documents(24), pairs=2, texts=4)
    assert some == interaction(model, documents(24), pairs=2, texts=4) > 0
