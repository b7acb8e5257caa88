"""The loss beside the plain one: full logits, then torch's cross-entropy."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from headwise.errors import HeadwiseError
from headwise.experiments.engine.memory import rise
from headwise.model import Transformer
from headwise.model import loss as room
from headwise.model.loss import IGNORE
from headwise.spec import ModelSpec
from headwise.training.loss import LanguageLoss
from tests.training.tiny import ODD, PLAIN

SPECS: dict[str, ModelSpec] = {
    "lm": PLAIN,
    "lm, untied": ODD,
    "mlm": replace(PLAIN, kind="encoder", output="mlm"),
    "mlm, untied": replace(PLAIN, kind="encoder", output="mlm", tied=False),
    "encoder with lm output": replace(PLAIN, kind="encoder"),
}


def shaken(spec: ModelSpec) -> Transformer:
    """Weights away from where they begin, so that biases and norms count."""
    torch.manual_seed(0)
    model = Transformer(spec)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.3)
    return model.eval()


def batch(vocab: int, rows: int = 5, context: int = 8, asked: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (rows, context), generator=dice)
    targets = torch.randint(vocab, (rows, context), generator=dice)
    targets[torch.rand(rows, context, generator=dice) >= asked] = IGNORE
    return ids, targets


def compare(spec: ModelSpec, asked: float, tolerance: float = 2e-5) -> None:
    ours = shaken(spec)
    plain = deepcopy(ours)
    ids, targets = batch(spec.vocab, asked=asked)
    got = LanguageLoss(ours)(ids, targets)
    expected = F.cross_entropy(plain(ids).flatten(0, 1).double(), targets.flatten(), ignore_index=IGNORE)
    assert float(got.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    got.backward()
    expected.backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None, name
        scale = max(1e-3, float(b.grad.abs().max()))
        assert float((a.grad - b.grad).abs().max()) < tolerance * scale, name


@pytest.mark.parametrize("asked", [1.0, 0.3])
@pytest.mark.parametrize("name", SPECS)
def test_value_and_gradients_are_those_of_full_logits(name: str, asked: float) -> None:
    compare(SPECS[name], asked)


@pytest.mark.parametrize("asked", [1.0, 0.3])
@pytest.mark.parametrize("name", SPECS)
def test_in_chunks_too(name: str, asked: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "WHOLE", 1)
    compare(SPECS[name], asked)


@pytest.mark.parametrize("name", ["lm", "mlm"])
def test_a_large_vocabulary_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "WHOLE", 1 << 16)
    compare(replace(SPECS[name], vocab=20_011), 0.7)


def test_a_uniform_guess_costs_the_logarithm_of_the_vocabulary() -> None:
    model = Transformer(PLAIN)
    with torch.no_grad():
        model.embed.tokens.weight.zero_()  # tied: all logits are 0
    ids, targets = batch(PLAIN.vocab)
    loss = LanguageLoss(model.eval())(ids, targets)
    assert float(loss.detach()) == pytest.approx(torch.tensor(257.0).log().item(), rel=1e-6)


def test_models_that_cannot_be_trained_so_are_told() -> None:
    with pytest.raises(HeadwiseError, match="no output"):
        LanguageLoss(Transformer(replace(PLAIN, output="none")))
    with pytest.raises(HeadwiseError, match="needs what it reads"):
        LanguageLoss(Transformer(replace(PLAIN, kind="encoder-decoder")))(*batch(PLAIN.vocab))


def test_logits_of_a_large_vocabulary_are_never_held() -> None:
    rows, vocab = 3000, 50_000  # 572 MB of logits, and as much again for their gradient
    model = Transformer(replace(PLAIN, vocab=vocab))
    hidden = torch.randn(rows, 16, requires_grad=True)
    targets = torch.randint(vocab, (rows,))

    def work() -> None:
        assert model.output is not None
        model.output.cross_entropy(hidden, targets).backward()

    assert rise(work) < 572 / 3
