"""Attached models exported to other engines and compared with transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.exporters.llama_cpp_runner import is_available
from tests.exporters.llamas import TEXTS, tokenizer

transformers: Any = pytest.importorskip("transformers")
engine = pytest.mark.skipif(not is_available(), reason="needs xllamacpp, which carries llama.cpp")


def attach_llama(model_class: str = "Llama", **overrides: Any) -> Any:
    torch.manual_seed(1)
    bpe = tokenizer()
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "head_dim": 8,
    }
    sizes |= {"num_key_value_heads": 3, "vocab_size": len(bpe), "max_position_embeddings": 64, "bos_token_id": 0}
    sizes |= {"eos_token_id": 0, "tie_word_embeddings": True} | overrides
    config = getattr(transformers, f"{model_class}Config")(**sizes)
    model = getattr(transformers, f"{model_class}ForCausalLM")(config).eval()
    partial_ids = [i for i in range(len(bpe)) if "\ufffd" in bpe.decode([i])]
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0) if weight.ndim > 1 else None  # so that outputs depend on the tokens
        model.model.embed_tokens.weight[partial_ids] *= 0.01  # llama.cpp reports no candidates for them
        model.lm_head.weight = model.model.embed_tokens.weight
    return hw.attach(model, bpe)


@engine
@pytest.mark.parametrize("heads", ["", "0.1,1.*,2.5"], ids=["full", "pruned, folded"])
@pytest.mark.parametrize("model_class", ["Llama", "Qwen2", "Mistral"])
def test_export_gguf_attached_matches_llama_cpp(model_class: str, heads: str, tmp_path: Path) -> None:
    attached = attach_llama(model_class)
    if heads:
        attached = hw.prune(attached, heads=heads, corpus=TEXTS)
    exported = hw.export(attached, tmp_path / "m.gguf", to="gguf", check=True)
    assert exported.notes[0] == f"architecture {'deci' if heads else 'llama'}"
    assert exported.parity is not None
    assert exported.parity.values > 100
    assert exported.parity.max_difference < 5e-3
    assert exported.parity.agrees


@engine
def test_export_gguf_attached_bfloat16(tmp_path: Path) -> None:
    """The file holds the bfloat16 weights exactly; llama.cpp computes in float32, so the reference does, too."""
    attached = attach_llama()
    attached.model.to(torch.bfloat16)
    pruned = hw.prune(attached, heads="0.1,1.*", corpus=TEXTS)
    hw.export(pruned, tmp_path / "m.gguf", to="gguf")
    from headwise.exporters.engine_parity import compare_generated
    from headwise.exporters.llama_cpp_runner import generate

    prompts = [tokenizer().encode(text) for text in TEXTS]
    answers = generate(tmp_path / "m.gguf", prompts, 8)
    pruned.model.to(torch.float32)
    assert compare_generated(pruned, prompts, answers).max_difference < 5e-3


@pytest.mark.parametrize(("to", "name"), [pytest.param("onnx", "onnx", marks=pytest.mark.slow), ("torch", "model.pt2")])
def test_export_attached_pruned_to_other_engines(to: str, name: str, tmp_path: Path) -> None:
    if to == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    attached = hw.prune(attach_llama(num_hidden_layers=2), heads="0.1", corpus=TEXTS)
    exported = hw.export(attached, tmp_path / name, to=to, check=True)
    assert exported.parity is not None
    assert exported.parity.agrees
    assert exported.parity.max_difference < 1e-3


def test_export_attached_unsupported_family_raises(tmp_path: Path) -> None:
    attached = attach_llama("Granite")
    with pytest.raises(hw.HeadwiseError, match="family 'granite'"):
        hw.export(attached, tmp_path / "m.gguf", to="gguf")
    assert not (tmp_path / "m.gguf").exists()
