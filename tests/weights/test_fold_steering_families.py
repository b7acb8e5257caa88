"""Every family: a folded steering equals the hooked one, native and attached, pruned or not, and in exported folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import headwise as hw
from headwise.errors import HeadwiseError
from tests.weights.test_attached_equals_native import MODELS, Row, random_ids

EDITS: dict[str, dict[str, Any]] = {
    "shift": {"strength": 1.7},
    "project_out": {"edit": "project_out"},
    "clamp": {"edit": "clamp", "low": 0.3, "high": 0.3},
}
WITHOUT_OUTPUT_BIAS = {"mistral", "qwen2", "phi3", "ministral3", "t5", "mt5"}  # no setting of transformers for it
each_row = pytest.mark.parametrize(
    ("name", "row"),
    [pytest.param(name, row, id=name, marks=pytest.mark.slow if row.slow else ()) for name, row in MODELS.items()],
)
LATENT_QUERIES = Row("DeepseekV2ForCausalLM", MODELS["deepseek_v2"].config | {"q_lora_rank": 7})


def make_steering(model: Any, **options: Any) -> hw.Steering:
    """Return a steering of the second and the last head."""
    heads = list(model.heads)
    generator = torch.Generator().manual_seed(5)
    vectors = {
        str(head.address): torch.randn(head.layer.spec.value_dim, generator=generator, dtype=torch.float64)
        for head in (heads[1], heads[-1])
    }
    return hw.Steering(vectors, **options).for_model(model)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        if model.spec.kind == "encoder-decoder":
            return model(random_ids(2, 6), source=random_ids(2, 9))
        return model(random_ids(2, 11))


@each_row
def test_fold_equals_hook_and_pruned(name: str, row: Row, tmp_path: Path) -> None:
    folder = row.save(tmp_path)
    kind = getattr(transformers, row.model)
    models = [hw.load(folder, dtype=torch.float64), hw.attach(kind.from_pretrained(folder, dtype=torch.float64).eval())]
    for full in models:
        if full.spec.shared_layers:
            with pytest.raises(HeadwiseError, match="share one output projection"):
                hw.fold_steering(full, make_steering(full))
            continue
        for model in (full, full.prune(str(list(full.heads)[2].address))):
            for options in EDITS.values():
                steering, plain = make_steering(model, **options), logits(model)
                with steering.applied(model):
                    hooked = logits(model)
                assert (hooked - plain).abs().max() > 1e-6
                torch.testing.assert_close(logits(hw.fold_steering(model, steering)), hooked, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        pytest.param(name, row, id=name, marks=pytest.mark.slow if row.slow else ())
        for name, row in (*MODELS.items(), ("latent queries", LATENT_QUERIES))
        if not row.shared_layers
    ],
)
def test_folded_native_model_exports_to_transformers_or_says_why(name: str, row: Row, tmp_path: Path) -> None:
    model: Any = hw.load(row.save(tmp_path / "model"))
    folded = hw.fold_steering(model, make_steering(model, strength=1.7))
    if name in WITHOUT_OUTPUT_BIAS:
        with pytest.raises(HeadwiseError, match="cannot represent"):
            hw.export(folded, tmp_path / "exported")
    else:
        hw.export(folded, tmp_path / "exported")
        kind = getattr(transformers, row.model)
        plain: Any = hw.attach(kind.from_pretrained(tmp_path / "exported", dtype=torch.float32).eval())
        torch.testing.assert_close(logits(plain), logits(folded), rtol=0, atol=1e-4)
    folded.save(tmp_path / "saved")
    assert torch.equal(logits(hw.load(tmp_path / "saved")), logits(folded))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "phi3", "qwen3", "olmo2", "gemma3_text"])
@pytest.mark.parametrize("pruned", [False, True], ids=["full", "pruned"])
def test_folded_model_computes_its_logits_in_llama_cpp_or_says_why(name: str, pruned: bool, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    model: Any = hw.load(MODELS[name].save(tmp_path / "model"))
    model = model.prune(str(list(model.heads)[2].address)) if pruned else model
    folded = hw.fold_steering(model, make_steering(model, strength=1.7))
    if name in ("gpt2", "llama", "phi3"):  # llama.cpp reads attn_output.bias
        result = hw.export(folded, tmp_path / "model.gguf", to="gguf", check=True, tokenizer=False)
        assert result.parity is not None
        assert result.parity.max_difference < 1e-3
    else:
        with pytest.raises(HeadwiseError, match="folded steering"):
            hw.export(folded, tmp_path / "model.gguf", to="gguf", tokenizer=False)
