import pytest
import torch

import headwise as hw
from headwise.analysis.ablation.eval_targets import make_target_batch
from headwise.analysis.recording.batching import make_batch
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.experiments.claim import VERDICTS
from headwise.experiments.claim_tests.head_gradients_differ import (
    OV_MATRIX,
    OWN_WEIGHTS,
    RANDOM,
    judge,
    mean_abs_cosine,
    measure,
    measure_model,
    weight_and_ov_gradient_similarity,
)
from headwise.experiments.engine.statistic import StatisticTable
from tests.attached.test_analysis import build, documents
from tests.experiments.tiny import copy_first_head, tiny_experiment

STEPS = (0.0, 0.5, 1.0)


def make_rows(own, moved):
    return [(f"cosine {OWN_WEIGHTS}", step, own) for step in STEPS] + [
        (f"cosine {OV_MATRIX}", step, moved) for step in STEPS
    ]


CASES = {
    "holds": make_rows([0.02, 0.03, 0.02], [0.1, 0.11, 0.1]),
    "depends": make_rows([0.02, 0.03, 0.02], [0.9, 0.91, 0.9]),
    "does not hold": make_rows([0.5, 0.51, 0.5], [0.9, 0.91, 0.9]),
}


def test_gradients_open_interval_depends_on_seed():
    statistics = StatisticTable()
    for row in make_rows([0.02, 0.03, 0.02], [0.1, 0.3, 0.5]):
        statistics.add(*row)
    assert judge(statistics).detail.startswith("significantly different of its weights at 3 and of what it moves at 0")


def test_cosines_identical_and_random_vectors():
    assert mean_abs_cosine(torch.ones(3, 5)) == pytest.approx(1)
    vectors = torch.randn(40, 2000, generator=torch.Generator().manual_seed(0))
    assert mean_abs_cosine(vectors) == pytest.approx((2 / torch.pi / 2000) ** 0.5, rel=0.1)


def test_gradients_identical_heads_equal_weights_unchanged(tmp_path):
    experiment = tiny_experiment(tmp_path)
    model = experiment.train_or_load(experiment.make_config(0)).load_model()
    copy_first_head(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cosine_by_kind = weight_and_ov_gradient_similarity(model, experiment.held_out_corpus())
    assert cosine_by_kind[OWN_WEIGHTS] == pytest.approx(1, abs=1e-5)
    assert cosine_by_kind[OV_MATRIX] == pytest.approx(1, abs=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_gradients_equal_maps_give_equal_ov_gradients(tmp_path):
    # With W_K = 0 all heads have the same map, so ∂L/∂(W_V W_O) is one matrix for all, though weights differ.
    experiment = tiny_experiment(tmp_path)
    model = experiment.train_or_load(experiment.make_config(0)).load_model()
    with torch.no_grad():
        for head in model.heads:
            head.W_K.zero_()
    cosine_by_kind = weight_and_ov_gradient_similarity(model, experiment.held_out_corpus())
    assert cosine_by_kind[OV_MATRIX] == pytest.approx(1, abs=1e-5)
    assert cosine_by_kind[OWN_WEIGHTS] < 0.6


def test_gradients_ov_gradient_satisfies_chain_rule(tmp_path):
    # ∂L/∂W_O = W_Vᵀ ∂L/∂(W_V W_O), so the first follows from the second.
    from headwise.experiments.claim_tests import head_gradients_differ as module

    experiment = tiny_experiment(tmp_path)
    model = experiment.train_or_load(experiment.make_config(0)).load_model()
    (layer, *_) = model.attention_layers()
    results = []
    original_function, module._ov_gradient = (
        module._ov_gradient,
        lambda *args: results.append(original_function(*args)) or results[-1],
    )
    try:
        weight_and_ov_gradient_similarity(model, experiment.held_out_corpus(), texts=4)
    finally:
        module._ov_gradient = original_function
    samples = [
        sample
        for sample, _ in zip(TokenizedCorpus.of(model, experiment.held_out_corpus(), 128), range(4), strict=False)
    ]
    batch_targets = make_target_batch(model, make_batch(samples))
    assert batch_targets.targets is not None
    loss = torch.nn.functional.cross_entropy(
        model(batch_targets.ids).flatten(0, 1), batch_targets.targets.flatten(), ignore_index=-100
    )
    (grad,) = torch.autograd.grad(loss, layer.output_projection.weight)  # (D, H·e)
    for index, head in enumerate(layer.heads):
        expected = grad.unflatten(1, (4, -1))[:, index].T  # (e, D)
        assert torch.allclose(head.W_V.mT @ results[0][index].view(16, 16), expected, atol=1e-5)


def test_gradients_tiny_experiment_gives_statistics(tmp_path):
    statistics = measure(tiny_experiment(tmp_path))
    assert judge(statistics).word in VERDICTS
    assert list(statistics.by_condition(f"cosine {OWN_WEIGHTS}")) == [0, 0.125, 0.25, 0.5, 1]
    assert statistics[f"cosine {RANDOM}", 0].mean == pytest.approx((2 / torch.pi / (4 * 16 * 4)) ** 0.5)


def test_gradients_given_model_gives_verdict(tmp_path):
    experiment = tiny_experiment(tmp_path)
    assert (
        judge(
            measure_model(
                experiment.train_or_load(experiment.make_config(0)).load_model(), experiment.held_out_corpus()
            )
        ).word
        in VERDICTS
    )


def test_gradients_attached_model_gives_verdict():
    model = hw.attach(*build("llama"))
    assert judge(measure_model(model, documents(24))).word in VERDICTS
