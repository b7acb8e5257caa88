"""The chunked loss against full logits with the cross-entropy of torch."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from headwise.errors import HeadwiseError
from headwise.experiments.engine.peak_process_memory import peak_memory
from headwise.model import Transformer
from headwise.model import chunked_cross_entropy as model_loss
from headwise.model.chunked_cross_entropy import IGNORE_INDEX
from headwise.spec import ModelSpec
from headwise.training.model_with_loss import LanguageLoss
from tests.training.tiny import ODD, PLAIN

SPECS: dict[str, ModelSpec] = {
    "lm": PLAIN,
    "lm, untied": ODD,
    "mlm": replace(PLAIN, kind="encoder", output="mlm"),
    "mlm, untied": replace(PLAIN, kind="encoder", output="mlm", tied=False),
    "encoder with lm output": replace(PLAIN, kind="encoder"),
}


def make_random_model(spec: ModelSpec) -> Transformer:
    """Return a model with random biases and norms, so that they matter."""
    torch.manual_seed(0)
    model = Transformer(spec)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.3)
    return model.eval()


def make_batch(
    vocab: int, rows: int = 5, context: int = 8, target_fraction: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (rows, context), generator=generator)
    targets = torch.randint(vocab, (rows, context), generator=generator)
    targets[torch.rand(rows, context, generator=generator) >= target_fraction] = IGNORE_INDEX
    return ids, targets


def check_against_full_logits(spec: ModelSpec, target_fraction: float, tolerance: float = 2e-5) -> None:
    model = make_random_model(spec)
    plain = deepcopy(model)
    ids, targets = make_batch(spec.vocab, target_fraction=target_fraction)
    got = LanguageLoss(model)(ids, targets)
    expected = F.cross_entropy(plain(ids).flatten(0, 1).double(), targets.flatten(), ignore_index=IGNORE_INDEX)
    assert float(got.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    got.backward()
    expected.backward()
    for (name, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None, name
        scale = max(1e-3, float(b.grad.abs().max()))
        assert float((a.grad - b.grad).abs().max()) < tolerance * scale, name


@pytest.mark.parametrize("target_fraction", [1.0, 0.3])
@pytest.mark.parametrize("name", SPECS)
def test_language_loss_value_and_gradients_equal_full_logits(name: str, target_fraction: float) -> None:
    check_against_full_logits(SPECS[name], target_fraction)


@pytest.mark.parametrize("target_fraction", [1.0, 0.3])
@pytest.mark.parametrize("name", SPECS)
def test_language_loss_chunked_equals_full_logits(
    name: str, target_fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loss, "MAX_LOGITS", 1)
    check_against_full_logits(SPECS[name], target_fraction)


@pytest.mark.parametrize("name", ["lm", "mlm"])
def test_language_loss_large_vocabulary_chunked_equals_full_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loss, "MAX_LOGITS", 1 << 16)
    check_against_full_logits(replace(SPECS[name], vocab=20_011), 0.7)


def test_language_loss_uniform_prediction_is_log_vocab() -> None:
    model = Transformer(PLAIN)
    with torch.no_grad():
        model.embed.tokens.weight.zero_()  # tied weights: all logits are 0
    ids, targets = make_batch(PLAIN.vocab)
    loss = LanguageLoss(model.eval())(ids, targets)
    assert float(loss.detach()) == pytest.approx(torch.tensor(257.0).log().item(), rel=1e-6)


def test_language_loss_unsupported_model_raises() -> None:
    with pytest.raises(HeadwiseError, match="no output"):
        LanguageLoss(Transformer(replace(PLAIN, output="none")))
    with pytest.raises(HeadwiseError, match="source=source_ids"):
        LanguageLoss(Transformer(replace(PLAIN, kind="encoder-decoder")))(*make_batch(PLAIN.vocab))


def test_cross_entropy_large_vocabulary_never_holds_logits() -> None:
    rows, vocab = 3000, 50_000  # 572 MB of logits, and the same for their gradient
    model = Transformer(replace(PLAIN, vocab=vocab))
    hidden = torch.randn(rows, 16, requires_grad=True)
    targets = torch.randint(vocab, (rows,))

    def work() -> None:
        assert model.output is not None
        model.output.cross_entropy(hidden, targets).backward()

    assert peak_memory(work) < 572 / 3
