import pytest
import torch

import headwise as hw
from headwise.analysis.ablation.eval_targets import ask
from headwise.analysis.recording.batching import make_batch
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.experiments.claim import WORDS
from headwise.experiments.claims.gradients import CHANCE, MOVED, OWN, cosines, gradients, judge, measure, on
from headwise.experiments.engine.statistic import Figures
from tests.attached.test_analysis import build, documents
from tests.experiments.tiny import make_copies, tiny_lab

STEPS = (0.0, 0.5, 1.0)


def told(own, moved):
    return [(f"cosine {OWN}", at, own) for at in STEPS] + [(f"cosine {MOVED}", at, moved) for at in STEPS]


CASES = {
    "holds": told([0.02, 0.03, 0.02], [0.1, 0.11, 0.1]),
    "depends": told([0.02, 0.03, 0.02], [0.9, 0.91, 0.9]),
    "does not hold": told([0.5, 0.51, 0.5], [0.9, 0.91, 0.9]),
}


def test_what_stays_open_is_the_seeds():
    figures = Figures()
    for row in told([0.02, 0.03, 0.02], [0.1, 0.3, 0.5]):
        figures.add(*row)
    assert judge(figures).on.startswith("on the seed: surely different of its weights at 3 and of what it moves at 0")


def test_copies_and_random_vectors():
    assert cosines(torch.ones(3, 5)) == pytest.approx(1)
    drawn = torch.randn(40, 2000, generator=torch.Generator().manual_seed(0))
    assert cosines(drawn) == pytest.approx((2 / torch.pi / 2000) ** 0.5, rel=0.1)


def test_copies_of_a_head_have_one_gradient_and_weights_stay(tmp_path):
    lab = tiny_lab(tmp_path)
    model = lab.made(lab.point(0)).model()
    make_copies(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = gradients(model, lab.documents())
    assert found[OWN] == pytest.approx(1, abs=1e-5)
    assert found[MOVED] == pytest.approx(1, abs=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_heads_that_look_alike_move_alike_whatever_their_basis(tmp_path):
    # With W_K = 0 all heads have the same map, so ∂L/∂(W_V W_O) is one matrix for all, though weights differ.
    lab = tiny_lab(tmp_path)
    model = lab.made(lab.point(0)).model()
    with torch.no_grad():
        for head in model.heads:
            head.W_K.zero_()
    found = gradients(model, lab.documents())
    assert found[MOVED] == pytest.approx(1, abs=1e-5)
    assert found[OWN] < 0.6


def test_the_gradient_of_what_is_moved_by_the_chain_rule(tmp_path):
    # ∂L/∂W_O = W_Vᵀ ∂L/∂(W_V W_O), so the first follows from the second.
    from headwise.experiments.claims import gradients as module

    lab = tiny_lab(tmp_path)
    model = lab.made(lab.point(0)).model()
    (layer, *_) = model.attention_layers()
    kept = []
    moved, module._moved = module._moved, lambda *parts: kept.append(moved(*parts)) or kept[-1]
    try:
        gradients(model, lab.documents(), texts=4)
    finally:
        module._moved = moved
    units = [unit for unit, _ in zip(Reading.of(model, lab.documents(), 128), range(4), strict=False)]
    asked = ask(model, make_batch(units))
    assert asked.targets is not None
    loss = torch.nn.functional.cross_entropy(model(asked.ids).flatten(0, 1), asked.targets.flatten(), ignore_index=-100)
    (slope,) = torch.autograd.grad(loss, layer.write.weight)  # (D, H·e)
    for number, head in enumerate(layer.heads):
        wanted = slope.unflatten(1, (4, -1))[:, number].T  # (e, D)
        assert torch.allclose(head.W_V.mT @ kept[0][number].view(16, 16), wanted, atol=1e-5)


def test_figures_of_the_lab(tmp_path):
    figures = measure(tiny_lab(tmp_path))
    assert judge(figures).word in WORDS
    assert list(figures.at(f"cosine {OWN}")) == [0, 0.125, 0.25, 0.5, 1]
    assert figures[f"cosine {CHANCE}", 0].mean == pytest.approx((2 / torch.pi / (4 * 16 * 4)) ** 0.5)


def test_on_a_given_model(tmp_path):
    lab = tiny_lab(tmp_path)
    assert judge(on(lab.made(lab.point(0)).model(), lab.documents())).word in WORDS


def test_on_an_attached_model():
    model = hw.attach(*build("llama"))
    assert judge(on(model, documents(24))).word in WORDS
