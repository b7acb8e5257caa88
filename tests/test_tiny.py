"""The first gate: two seconds, one pass through every room but attach/, since importing transformers alone takes longer."""

import re
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.experiments.engine.statistic import StatisticTable
from headwise.text.build_tokenizers import make_tokenizer
from headwise.text.corpus import Corpus
from headwise.training.model_with_loss import LanguageLoss
from tests.runner import run_command

TEXT = "the dog sees the cat . the cat sees the dog . " * 8


def test_transformer_silenced_head_changes_output() -> None:
    """spec, heads, model"""
    torch.manual_seed(0)
    spec = hw.ModelSpec(
        vocab=17, context=16, layers=2, attention=hw.AttentionSpec(width=12, heads=3, rotary=hw.Rotary())
    )
    model = hw.Transformer(spec).eval()
    ids = torch.randint(0, 17, (2, 7))
    plain = model(ids)
    assert plain.shape == (2, 7, 17)

    calls = []
    with model.hook_points()[0].listen(calls.append):
        assert torch.equal(model(ids), plain)
    assert calls[0].z.shape == (2, 3, 7, 4)

    with model.heads["1.2"].silenced():
        silent = model(ids)
    assert not torch.equal(silent, plain)
    assert torch.equal(silent, model(ids, gates={"1.2": 0.0}))
    assert model.generate(ids, max_new_tokens=4).shape == (2, 11)


def test_kernels_all_backends_agree() -> None:
    """kernels"""
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64).unbind()
    outs = [hw.attention(q, k, v, mask=hw.causal(), backend=b) for b in ("reference", "batched", "fused", "blockwise")]
    assert all(torch.allclose(out, outs[0], atol=1e-12) for out in outs)


def test_model_trains_saves_records_and_prunes(tmp_path: Path) -> None:
    """text, train, weights, look, change; cli and show tell of it. By parts: an optimizer and scipy are slow to import."""
    tokenizer = make_tokenizer("word", Corpus.of([TEXT]))
    attention = hw.AttentionSpec(width=12, heads=3, rotary=hw.Rotary())
    trained = hw.Transformer(hw.ModelSpec(vocab=len(tokenizer), context=16, layers=2, attention=attention)).eval()
    trained.tokenizer = tokenizer
    ids = torch.tensor([tokenizer.encode("the dog sees the cat .")])
    loss = LanguageLoss(trained)
    before = loss(ids[:, :-1], ids[:, 1:])
    before.backward()
    with torch.no_grad():
        for weight in trained.parameters():
            assert weight.grad is not None
            weight -= 0.1 * weight.grad
    assert loss(ids[:, :-1], ids[:, 1:]) < before

    trained.save(tmp_path / "whole")
    model = hw.load(tmp_path / "whole")
    assert isinstance(model, hw.Transformer)
    assert torch.equal(model(ids), trained(ids))

    view = hw.attention_maps(model, "the dog sees the cat", heads="1.2")
    assert sum(weight for _, weight in view.attention_from_word("sees", head="1.2")) == pytest.approx(1, abs=1e-6)

    small = model.prune("1.2,0.0")
    with model.heads["1.2,0.0"].silenced():
        torch.testing.assert_close(small(ids), model(ids))
    small.save(tmp_path / "small")
    assert re.search(r"(?m)^ *heads +4 *$", run_command("info", tmp_path / "small").output)


def test_statistic_table_add_computes_mean() -> None:
    """lab"""
    assert StatisticTable().add("loss", "4 heads", [1.0, 2.0, 3.0])["loss", "4 heads"].mean == 2
