"""Training of models in half precision: float32 during the run, the own dtype afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.compression.recovery_finetune import recover
from headwise.training import Recipe
from tests.attached.models import BY_NAME
from tests.contract.attached_models import TOKENIZER

SPEC = hw.ModelSpec(vocab=257, context=16, layers=2, attention=hw.AttentionSpec(width=16, heads=4))
RECIPE = Recipe(steps=8, batch_size=4, warmup=2, learning_rate=1e-4, weight_decay=0.0)
TEXT = "to be or not to be that is the question " * 30


def make_model(dtype: torch.dtype) -> hw.Transformer:
    torch.manual_seed(0)
    return hw.Transformer(SPEC).bfloat16().to(dtype)  # equal weights in every dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_train_half_model_equals_rounded_float32_run(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = hw.train(make_model(torch.float32), TEXT, RECIPE, tokenizer="byte", progress=False).model
    model = make_model(dtype)
    result = hw.train(model, TEXT, RECIPE, tokenizer="byte", out=tmp_path / "run", progress=False)
    assert result.model is model
    expected = {name: weight.to(dtype) for name, weight in reference.state_dict().items()}
    for state in (model.state_dict(), hw.load(tmp_path / "run" / "model").state_dict()):
        assert all(torch.equal(state[name], weight) for name, weight in expected.items())
    assert all(weight.grad is None for weight in model.parameters())


def test_train_half_model_moves_weights_that_half_precision_steps_would_not() -> None:
    """A step of 1e-4 is below half a unit in the last place of bfloat16 for weights above 0.05."""
    before, model = make_model(torch.bfloat16), make_model(torch.bfloat16)
    hw.train(model, TEXT, Recipe(**{**vars(RECIPE), "steps": 40}), tokenizer="byte", progress=False)
    old, new = (item.state_dict()["blocks.0.mlp.up.weight"] for item in (before, model))
    large = old.abs() > 0.05
    assert large.any()
    assert old.ne(new)[large].float().mean() > 0.3


def test_resume_half_model_gives_half_model(tmp_path: Path) -> None:
    from headwise.training import resume

    recipe = Recipe(**{**vars(RECIPE), "save_every": 4})
    hw.train(make_model(torch.bfloat16), TEXT, recipe, tokenizer="byte", out=tmp_path / "run", progress=False)
    again = resume(tmp_path / "run", progress=False)
    assert {weight.dtype for weight in again.model.parameters()} == {torch.bfloat16}


def test_recover_attached_half_model_keeps_dtypes() -> None:
    model: Any = BY_NAME["llama"].build().bfloat16()
    dtypes = {name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    attached = hw.attach(model, TOKENIZER).prune("1.1", in_place=True)
    recover(attached, TEXT, steps=3, batch_size=2, context=16, progress=False)
    assert {name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()]} == dtypes
