"""Joint quantization of two heads: equal to a copy of the model with both quantized, and the model is restored."""

import pytest
import torch

from headwise.analysis.ablation import ablated_rerun
from headwise.analysis.ablation.joint_quantization_cost import joint_quantization_costs
from headwise.analysis.ablation.quantization_sensitivity import sensitivity
from headwise.compression.paired_evaluation import PairedEvaluator
from headwise.compression.quantize import quantize
from headwise.errors import HeadwiseError
from tests.analysis.test_sensitivity import TEXTS, _fail_after_clean_passes, copy_state, is_unchanged, loss_difference
from tests.distillation.tiny import make_model


@pytest.mark.parametrize("kv_heads", [0, 2])
def test_joint_costs_pair_equals_quantized_copy(kv_heads: int) -> None:
    model = make_model(rotary=True, kv_heads=kv_heads, bias=True)
    before = copy_state(model)
    sets = [("1.0",), ("0.1",), ("1.0", "0.1"), ("0.0", "0.1")]
    result = joint_quantization_costs(model, TEXTS, sets, bits=2)
    assert is_unchanged(model, before)
    heads = (
        {"0.0": "0.0,0.1", "0.1": "0.2,0.3", "1.0": "1.0,1.1"} if kv_heads else {key: key for key in kv_head_names()}
    )
    total = result.counts.sum()
    for head_set in sets:
        copy = quantize(model, {heads[key]: 2 for key in head_set}, basis="balanced")
        assert result.loss_increase_per_text(*head_set).sum() / total == pytest.approx(
            loss_difference(model, copy), abs=2e-5
        )
    sums = [result.loss_increase_per_text(*head_set).sum() for head_set in (("1.0", "0.1"), ("1.0",), ("0.1",))]
    assert result.pair_interaction("1.0", "0.1").sum() == pytest.approx(sums[0] - sums[1] - sums[2])
    assert (result.kl_sums >= 0).all()


def kv_head_names() -> tuple[str, ...]:
    return ("0.0", "0.1", "1.0")


def test_joint_costs_encoder_decoder_equals_full_pass() -> None:
    model, texts = make_model(kind="encoder-decoder"), [(text, text) for text in TEXTS]
    result = joint_quantization_costs(model, texts, [("cross.1.0", "enc.0.1")], bits=2)
    evaluation = PairedEvaluator.of(model, texts)
    copy = quantize(model, {"cross.1.0": 2, "enc.0.1": 2}, basis="balanced")
    loss_increase = evaluation.difference(evaluation.losses_per_text(copy), evaluation.full_losses_per_text).mean
    assert result.loss_sums.sum() / result.counts.sum() == pytest.approx(loss_increase, abs=2e-5)


def test_joint_costs_single_head_covers_both_matrix_pairs() -> None:
    model = make_model()
    result = joint_quantization_costs(model, TEXTS, [("1.2",)], bits=8)
    parts = sensitivity(model, TEXTS, bits=(8,), heads="1.2")
    assert result.kl_sums.sum() < 4 * parts.kl_sums.sum() + 1e-6


def test_joint_costs_error_restores_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(bias=True)
    before = copy_state(model)
    monkeypatch.setattr(
        ablated_rerun.PartialRerun,
        "hidden_at_targets",
        _fail_after_clean_passes(ablated_rerun.PartialRerun.hidden_at_targets),
    )
    with pytest.raises(RuntimeError, match="no memory"):
        joint_quantization_costs(model, TEXTS, [("0.1",), ("0.1", "1.1")], bits=2)
    assert is_unchanged(model, before)


def test_joint_costs_invalid_input_raises() -> None:
    model = make_model()
    with pytest.raises(HeadwiseError, match=r"unknown KV head '7\.1'"):
        joint_quantization_costs(model, TEXTS, [("7.1",)], bits=3)
    with pytest.raises(HeadwiseError, match="empty"):
        joint_quantization_costs(model, TEXTS, [()], bits=3)
    with pytest.raises(HeadwiseError, match="bits"):
        joint_quantization_costs(model, TEXTS, [("0.1",)], bits=5)
    quantized = quantize(model, 8)
    with pytest.raises(HeadwiseError, match="packed"):
        joint_quantization_costs(quantized, TEXTS, [("0.1",)], bits=3)
    assert torch.is_grad_enabled()
