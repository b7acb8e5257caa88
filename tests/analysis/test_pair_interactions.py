"""Heads at few bits together: as a copy of the model with both rounded says, and nothing stays changed."""

import pytest
import torch

from headwise.analysis.ablation import rerun
from headwise.analysis.ablation.pair_interactions import together
from headwise.analysis.ablation.sensitivity import sensitivity
from headwise.compression.evaluation import PairedEvaluation
from headwise.compression.quantize import quantise
from headwise.errors import HeadwiseError
from tests.analysis.test_sensitivity import TEXTS, _fails_later, gained, state_of, unchanged
from tests.distillation.tiny import make


@pytest.mark.parametrize("kv_heads", [0, 2])
def test_a_pair_is_what_a_copy_with_both_rounded_loses(kv_heads: int) -> None:
    model = make(rotary=True, kv_heads=kv_heads, bias=True)
    before = state_of(model)
    sets = [("1.0",), ("0.1",), ("1.0", "0.1"), ("0.0", "0.1")]
    found = together(model, TEXTS, sets, bits=2)
    assert unchanged(model, before)
    heads = {"0.0": "0.0,0.1", "0.1": "0.2,0.3", "1.0": "1.0,1.1"} if kv_heads else {key: key for key in before_keys()}
    total = found.counts.sum()
    for some in sets:
        copy = quantise(model, {heads[key]: 2 for key in some}, basis="balanced")
        assert found.of(*some).sum() / total == pytest.approx(gained(model, copy), abs=2e-5)
    both = [found.of(*some).sum() for some in (("1.0", "0.1"), ("1.0",), ("0.1",))]
    assert found.coupling("1.0", "0.1").sum() == pytest.approx(both[0] - both[1] - both[2])
    assert (found.drifts >= 0).all()


def before_keys() -> tuple[str, ...]:
    return ("0.0", "0.1", "1.0")


def test_an_encoder_decoder_and_a_whole_pass_agree() -> None:
    model, texts = make(kind="encoder-decoder"), [(one, one) for one in TEXTS]
    found = together(model, texts, [("cross.1.0", "enc.0.1")], bits=2)
    trial = PairedEvaluation.of(model, texts)
    copy = quantise(model, {"cross.1.0": 2, "enc.0.1": 2}, basis="balanced")
    more = trial.difference(trial.losses(copy), trial.full).mean
    assert found.sums.sum() / found.counts.sum() == pytest.approx(more, abs=2e-5)


def test_one_head_alone_is_both_of_its_pairs_of_matrices() -> None:
    model = make()
    found = together(model, TEXTS, [("1.2",)], bits=8)
    parts = sensitivity(model, TEXTS, bits=(8,), heads="1.2")
    assert found.drifts.sum() < 4 * parts.drifts.sum() + 1e-6


def test_weights_are_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(bias=True)
    before = state_of(model)
    monkeypatch.setattr(rerun.FromLayer, "run", _fails_later(rerun.FromLayer.run))
    with pytest.raises(RuntimeError, match="no memory"):
        together(model, TEXTS, [("0.1",), ("0.1", "1.1")], bits=2)
    assert unchanged(model, before)


def test_bad_input() -> None:
    model = make()
    with pytest.raises(HeadwiseError, match=r"no key head 7\.1"):
        together(model, TEXTS, [("7.1",)], bits=3)
    with pytest.raises(HeadwiseError, match="empty"):
        together(model, TEXTS, [()], bits=3)
    with pytest.raises(HeadwiseError, match="bits"):
        together(model, TEXTS, [("0.1",)], bits=5)
    packed = quantise(model, 8)
    with pytest.raises(HeadwiseError, match="packed"):
        together(packed, TEXTS, [("0.1",)], bits=3)
    assert torch.is_grad_enabled()
