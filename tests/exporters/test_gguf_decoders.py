"""GGUF files of Qwen3, Gemma 2 and 3, OLMo 2 and 3, Phi-3, SmolLM3 and Ministral 3: run in llama.cpp, and read back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.errors import UnsupportedModelError
from headwise.exporters.llama_cpp_runner import is_available
from headwise.spec import AttentionSpec, ModelSpec, QKNorm, QueryScaling, Rotary, RotaryScaling
from tests.exporters.llamas import tokenizer

gguf = pytest.importorskip("gguf")
engine = pytest.mark.skipif(not is_available(), reason="needs xllamacpp, which carries llama.cpp")

LIMIT, GELU_LIMIT = 1e-5, 5e-3  # nats; llama.cpp computes GELU from a table of 16-bit numbers
YARN = RotaryScaling("yarn", 4.0, original_context=16)
LONGROPE = RotaryScaling(
    "longrope", 2.0, original_context=2048, short_factors=(1, 1.1, 1.2, 1.3), long_factors=(2, 3, 4, 5)
)
LAYERS: dict[str, Any] = {
    "context": 256, "layers": 4, "mlp_width": 64, "norm": "rms", "activation": "swiglu", "mlp_bias": False,
    "positions": "none", "tied": False,
}  # fmt: skip
GEMMA = LAYERS | {
    "norm": "rms_plus_one", "norm_placement": "sandwich", "activation": "geglu_tanh", "tied": True, "embed_scale": 32**0.5,
}  # fmt: skip
OLMO = LAYERS | {"norm_placement": "output"}
HEAD_NORM, GEMMA_NORM, WIDTH_NORM = QKNorm(eps=1e-5), QKNorm("rms_plus_one", eps=1e-5), QKNorm(over="width", eps=1e-5)
OLMO3_ROTARIES = (*[Rotary(500.0)] * 3, Rotary(500.0, scaling=YARN))


def spec_of(fields: dict[str, Any], **attention: Any) -> ModelSpec:
    sizes: dict[str, Any] = {"width": 32, "heads": 4, "head_dim": 8, "kv_heads": 2, "rotary": Rotary(500.0)}
    return ModelSpec(vocab=len(tokenizer()), attention=AttentionSpec(**sizes | attention), **fields)


# name: (spec, architecture of llama.cpp, family read back)
SPECS = {
    "qwen3": (spec_of(LAYERS, qk_norm=HEAD_NORM, head_dim=10), "qwen3", "qwen3"),
    "qwen3, yarn, interleaved, tied, scale": (
        spec_of(LAYERS | {"tied": True}, qk_norm=HEAD_NORM, rotary=Rotary(500.0, "interleaved", scaling=YARN), scale=0.2),
        "qwen3", "qwen3",
    ),
    "gemma2": (
        spec_of(GEMMA | {"windows": (5, None), "logit_softcap": 3.0}, softcap=5.0, scale=0.2, head_dim=16),
        "gemma2", "gemma2",
    ),
    "gemma2, no window": (spec_of(GEMMA | {"logit_softcap": 3.0}, softcap=5.0), "gemma2", "gemma2"),
    "gemma3": (
        spec_of(
            GEMMA | {
                "windows": (5, 5, None),
                "rotaries": (Rotary(77.0), Rotary(77.0), Rotary(500.0, scaling=RotaryScaling("linear", 4.0))),
            },
            qk_norm=GEMMA_NORM, scale=0.2,
        ),
        "gemma3", "gemma3",
    ),
    "gemma3, default layers": (
        spec_of(
            GEMMA | {"layers": 7, "windows": (*[5] * 5, None), "rotaries": (*[Rotary(77.0)] * 5, Rotary(500.0))},
            qk_norm=GEMMA_NORM,
        ),
        "gemma3", "gemma3",
    ),
    "olmo2, tied": (spec_of(OLMO | {"tied": True}, qk_norm=WIDTH_NORM), "olmo2", "olmo2"),
    "olmo3": (
        spec_of(OLMO | {"windows": (5, 5, 5, None), "rotaries": OLMO3_ROTARIES}, qk_norm=WIDTH_NORM), "olmo2", "olmo2",
    ),
    "phi3, part of the channels": (spec_of(LAYERS, rotary=Rotary(500.0, dims=4)), "phi3", "phi3"),
    "phi3, longrope": (spec_of(LAYERS | {"context": 4096}, rotary=Rotary(500.0, scaling=LONGROPE)), "phi3", "phi3"),
    "smollm3": (spec_of(LAYERS | {"rotaries": (*[Rotary(500.0)] * 3, None)}), "smollm3", "smollm3"),
    "mistral3": (
        spec_of(
            LAYERS, query_scaling=QueryScaling(0.3, 16), rotary=Rotary(500.0, scaling=replace(YARN, attention_factor=1.0))
        ),
        "mistral3", "ministral3",
    ),
    "llama, yarn": (spec_of(LAYERS, rotary=Rotary(500.0, scaling=YARN)), "llama", "llama"),
    "llama, yarn, another factor": (
        spec_of(LAYERS, rotary=Rotary(500.0, scaling=replace(YARN, attention_factor=1.3))), "llama", "llama",
    ),
}  # fmt: skip
FAST = ("qwen3", "gemma3", "smollm3")


def make_model(spec: ModelSpec) -> hw.Transformer:
    """Return a random model whose outputs depend on the tokens, and whose norms are not trivial."""
    torch.manual_seed(0)
    model, bpe = hw.Transformer(spec), tokenizer()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn(weight.shape))
            elif weight.ndim > 1:
                weight.mul_(4.0)
        partial_ids = [i for i in range(len(bpe)) if "\ufffd" in bpe.decode([i])]  # llama.cpp reports none for them
        tables: list[Any] = [
            model.embed.tokens,
            *([] if spec.tied or model.output is None else [model.output.vocabulary]),
        ]
        for table in tables:
            table.weight[partial_ids] *= 0.01
    model.tokenizer = bpe
    return model.eval()


@engine
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SPECS])
@pytest.mark.parametrize("pruned", ["", "0.1,2.0-1"], ids=["full", "pruned"])
def test_export_gguf_decoder_matches_llama_cpp_and_reads_back(name: str, pruned: str, tmp_path: Path) -> None:
    spec, architecture, family = SPECS[name]
    model = make_model(spec)
    model = model.prune(pruned) if pruned else model
    exported = hw.export(model, tmp_path / "m.gguf", to="gguf", check=True)
    assert exported.parity is not None
    assert exported.parity.max_difference < (GELU_LIMIT if spec.activation == "geglu_tanh" else LIMIT)
    assert exported.parity.values > 100
    assert exported.parity.agrees
    assert exported.notes[0] == f"architecture {'deci' if architecture == 'llama' and pruned else architecture}"
    if architecture == "llama" and pruned:
        return  # deci is written, but not read
    again: Any = hw.load(tmp_path / "m.gguf")
    ids = torch.randint(spec.vocab, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(again(ids), model(ids), rtol=0, atol=1e-5)
    assert again.family == family
    if not pruned:
        hw.export(again, tmp_path / "theirs")  # the family of the file can represent the model


REFUSED = [
    (spec_of(LAYERS | {"windows": (5, None)}, qk_norm=HEAD_NORM), "window is shorter than its context"),
    (spec_of(LAYERS, qk_norm=replace(HEAD_NORM, after_rotary=True)), "the norm of q and k is"),
    (spec_of(LAYERS, qk_norm=HEAD_NORM, output_gate="head"), "attention.output_gate is 'head'"),
    (spec_of(LAYERS, qk_norm=HEAD_NORM, out_bias=True), "fold_mean=False"),
    (spec_of(GEMMA | {"windows": (5, None), "logit_softcap": 3.0}), "softcap is None, but must be a number"),
    (spec_of(GEMMA | {"embed_scale": 2.0}, qk_norm=GEMMA_NORM), "embedding scale is 2.0"),
    (spec_of(OLMO | {"windows": (5, 6)}, qk_norm=WIDTH_NORM), "layers have different windows"),
    (spec_of(OLMO, qk_norm=WIDTH_NORM, head_dim=10), "must equal the width"),
    (spec_of(LAYERS | {"rotaries": (Rotary(500.0), None)}), "not every fourth layer"),
    (spec_of(LAYERS, rotary=Rotary(500.0, scaling=replace(YARN, kind="dynamic"))), "rotary scaling is dynamic"),
    (spec_of(LAYERS, qk_norm=HEAD_NORM, rotary=Rotary(500.0, scaling=replace(YARN, truncate=False))), "truncate=False"),
    (spec_of(LAYERS, rotary=Rotary(500.0, scaling=replace(YARN, truncate=False))), "truncate=False"),
    (spec_of(LAYERS | {"rotaries": (Rotary(500.0), Rotary(77.0))}, qk_norm=HEAD_NORM), "differ in another way"),
]


@pytest.mark.parametrize(("spec", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_export_gguf_unsupported_part_raises_error_with_reason(spec: ModelSpec, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=reason.replace("(", r"\(")):
        hw.export(hw.Transformer(spec), tmp_path / "m.gguf", to="gguf")
    assert not (tmp_path / "m.gguf").exists()


def write_metadata(path: Path, architecture: str, settings: dict[str, Any]) -> Path:
    writer: Any = gguf.GGUFWriter(path, architecture)
    for key, value in settings.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_load_gguf_with_experts_names_them(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"mixture-of-experts MLPs \(128 experts\)"):
        hw.load(write_metadata(tmp_path / "m.gguf", "qwen3moe", {"expert_count": 128}))


def test_load_gguf_of_family_without_gguf_names_readable_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="read only for llama, qwen2, qwen3, gemma2"):
        hw.load(write_metadata(tmp_path / "m.gguf", "albert", {}))
