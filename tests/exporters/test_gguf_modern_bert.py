"""ModernBERT in GGUF: written, read back, and run in stock llama.cpp."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors

import headwise as hw
from headwise.errors import FileFormatError, UnsupportedModelError
from headwise.exporters.engine_parity import EncoderParityReport
from headwise.exporters.gguf_tensors import GgufFile
from headwise.exporters.llama_cpp_runner import embeddings, is_available, tokenize
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary, RotaryScaling
from headwise.text.build_tokenizers import bpe_tokenizer
from headwise.weights.families import family_of
from headwise.weights.families.gguf_gpt2_bert import modern_bert_spec_from_gguf

gguf = pytest.importorskip("gguf")
engine = pytest.mark.skipif(not is_available(), reason="needs xllamacpp, which carries llama.cpp")
FULL, LOCAL = Rotary(500.0), Rotary(77.0)
TEXTS = ("The teacher gave 1984's students  their homework.", "Crème brûlée costs 3,14 €… no?", "日本語 и Москва 🙂")


def small_spec(attention: dict[str, Any] | None = None, **fields: Any) -> ModelSpec:
    sizes: dict[str, Any] = {
        "vocab": 50, "context": 64, "layers": 4, "kind": "encoder", "norm": "layer_no_bias", "activation": "geglu",
        "mlp_bias": False, "positions": "none", "embed_norm": True, "first_norm": False, "output": "none",
        "output_activation": "gelu", "transform_bias": False,
    }  # fmt: skip
    heads: dict[str, Any] = {"width": 32, "heads": 4, "bias": False, "out_bias": False, "rotary": FULL}
    return ModelSpec(**(sizes | fields), attention=AttentionSpec(**(heads | (attention or {}))))


@cache
def make_model(spec: ModelSpec) -> Transformer:
    """Return a random model whose windows, positions and form of GELU change the outputs by more than the tolerances."""
    torch.manual_seed(1)
    model = Transformer(spec).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(12.0) if weight.ndim > 1 else weight.add_(torch.randn_like(weight) * 0.1)
    return model


SPECS = {
    "ModernBERT": small_spec(windows=(None, 4, 4), rotaries=(FULL, LOCAL, LOCAL)),
    "swiglu, layers listed": small_spec(
        {"scale": 1.0, "rotary": LOCAL}, activation="swiglu", layers=5, windows=(4, None), rotaries=(LOCAL, FULL)
    ),
    "no windows": small_spec(),
}


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_load_gguf_modern_bert_equals_exported_model(name: str, tmp_path: Path) -> None:
    model, ids = make_model(SPECS[name]), torch.arange(40).reshape(2, 20)
    for exported in (model, hw.prune(model, heads="0.1,1.*", fold_mean=False)):
        hw.export(exported, tmp_path / "m.gguf", to="gguf")
        loaded = hw.load(tmp_path / "m.gguf")
        assert isinstance(loaded, Transformer)
        torch.testing.assert_close(loaded(ids), exported(ids), rtol=1e-5, atol=1e-5)
        expected = replace(model.spec, attention=replace(model.spec.attention, scale=None))  # W_Q contains the scale
        assert replace(loaded.spec, norm_eps=model.spec.norm_eps) == expected  # stored in float32


def test_load_gguf_modern_bert_ignores_masked_lm_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were converted from a masked LM contain a part of its output."""
    model, ids, close = make_model(SPECS["no windows"]), torch.arange(20)[None], GgufFile.close

    def close_with_output(store: GgufFile) -> None:
        store.add_tensor("cls.weight", torch.ones(32, 32))
        store.add_tensor("cls.norm.weight", torch.ones(32), keep_float32=True)
        close(store)

    monkeypatch.setattr(GgufFile, "close", close_with_output)
    hw.export(model, tmp_path / "m.gguf", to="gguf")
    loaded = hw.load(tmp_path / "m.gguf")
    assert isinstance(loaded, Transformer)
    assert "cls.weight" in {tensor.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    torch.testing.assert_close(loaded(ids), model(ids), rtol=1e-5, atol=1e-5)


@engine
@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_export_gguf_modern_bert_matches_llama_cpp(name: str, tmp_path: Path) -> None:
    model = make_model(SPECS[name])
    for exported in (model, hw.prune(model, heads="0.1,1.*", fold_mean=False)):
        result = hw.export(exported, tmp_path / "m.gguf", to="gguf", check=True)
        assert result.notes[0] == "architecture modern-bert"
        assert isinstance(result.parity, EncoderParityReport)
        assert result.parity.values > 1000
        assert result.parity.max_difference < 5e-3, "older releases compute GELU with tanh"
        assert result.parity.min_cosine > 1 - 1e-5


@cache
def encoder_tokenizer() -> hw.Tokenizer:
    """Return byte-level BPE that adds [CLS] and [SEP], as ModernBERT's does, without its normalizer."""
    backend = bpe_tokenizer([document.text for document in hw.Corpus.probe_set().items()], vocab_size=400).backend
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    special: dict[str, int] = {name: backend.get_vocab()[f"[{name.upper()}]"] for name in ("cls", "sep")}
    backend.post_processor = processors.TemplateProcessing(  # pyright: ignore
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", [("[CLS]", special["cls"]), ("[SEP]", special["sep"])]
    )
    return hw.Tokenizer(backend, special)


def with_tokenizer(spec: ModelSpec) -> Transformer:
    tokenizer = encoder_tokenizer()
    model = Transformer(replace(spec, vocab=len(tokenizer))).eval()
    model.tokenizer = tokenizer
    return model


def test_load_gguf_modern_bert_reads_tokenizer(tmp_path: Path) -> None:
    model = with_tokenizer(SPECS["ModernBERT"])
    hw.export(model, tmp_path / "m.gguf", to="gguf")
    loaded = hw.load(tmp_path / "m.gguf").tokenizer
    assert loaded is not None
    assert [loaded.encode(text) for text in TEXTS] == [encoder_tokenizer().encode(text) for text in TEXTS]


@engine
@pytest.mark.slow
def test_export_gguf_modern_bert_embeds_texts_as_llama_cpp(tmp_path: Path) -> None:
    model = with_tokenizer(SPECS["ModernBERT"])
    hw.export(model, tmp_path / "m.gguf", to="gguf")
    assert tokenize(tmp_path / "m.gguf", TEXTS) == [encoder_tokenizer().encode(text) for text in TEXTS]
    actual = torch.tensor(embeddings(tmp_path / "m.gguf", TEXTS, 64))
    assert (actual - hw.embed(model, list(TEXTS), normalize=False)).abs().max() < 3e-3


# Metadata as llama.cpp's converter writes it for ModernBERT-base.
FIELDS = {
    "block_count": 22, "context_length": 8192, "embedding_length": 768, "feed_forward_length": 1152, "vocab_size": 50368,
    "attention.head_count": 12, "attention.layer_norm_epsilon": 1e-5, "attention.causal": False,
    "attention.sliding_window": 128, "attention.sliding_window_pattern": 3,
    "rope.freq_base": 160000.0, "rope.freq_base_swa": 10000.0, "rope.scaling.type": "none",
}  # fmt: skip


def read_spec(**changed: Any) -> ModelSpec:
    fields = FIELDS | {name.replace("__", "."): value for name, value in changed.items()}
    named = {f"modern-bert.{name}": value for name, value in fields.items() if value is not None}
    reader: Any = None  # the metadata contain everything
    return modern_bert_spec_from_gguf({"general.architecture": "modern-bert"} | named, reader)


def test_modern_bert_spec_from_gguf_equals_spec_from_config() -> None:
    config = {
        "model_type": "modernbert", "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152,
        "num_hidden_layers": 22, "num_attention_heads": 12,
    }  # fmt: skip
    expected = family_of("modernbert").spec_from_config(config)
    assert read_spec() == expected
    assert read_spec(attention__sliding_window_pattern=None) == expected
    assert read_spec(attention__sliding_window_pattern=[layer % 3 != 0 for layer in range(22)]) == expected
    assert read_spec(rope__dimension_count=64) == expected
    rotaries = tuple(replace(rotary, dims=32) for rotary in expected.rotaries if rotary is not None)
    assert read_spec(rope__dimension_count=32).rotaries == rotaries
    assert read_spec(hidden_activation="silu") == replace(expected, activation="swiglu")


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"attention__causal": True}, UnsupportedModelError, r"modern-bert\.attention\.causal is True"),
        ({"rope__scaling__type": "linear"}, UnsupportedModelError, r"modern-bert\.rope\.scaling\.type is 'linear'"),
        ({"hidden_activation": "relu"}, UnsupportedModelError, "hidden_activation 'relu' is not supported"),
        ({"attention__sliding_window_pattern": [True]}, FileFormatError, "must list 22 layers"),
    ],
)
def test_modern_bert_spec_from_gguf_other_settings_raise(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_spec(**changed)


def test_export_gguf_unsupported_modern_bert_raises(tmp_path: Path) -> None:
    scaled = Rotary(500.0, scaling=RotaryScaling("linear", 2.0))
    for spec, message in (
        (small_spec(output="mlm"), "output is 'mlm', but must be 'none'"),
        (small_spec(norm="layer"), "norm is 'layer', but must be 'layer_no_bias'"),
        (small_spec({"bias": True}), r"attention\.bias is True"),
        (small_spec(activation="reglu"), "activation is reglu"),
        (small_spec({"kv_heads": 2}), "2 KV heads, but must have 4"),
        (small_spec({"heads": 3, "head_dim": 8}), "3 × 8, but must equal the width 32"),
        (small_spec({"window": 4}), "every layer has a window"),
        (small_spec(windows=(None, 1)), "window is a single token"),
        (small_spec(windows=(None, 4, 5)), "different windows"),
        (small_spec(rotaries=(FULL, None)), "layers without positions"),
        (small_spec(rotaries=(FULL, LOCAL)), "differ in another way than by their windows"),
        (small_spec({"rotary": scaled}), "scaled, interleaved"),
        (small_spec({"rotary": Rotary(500.0, "interleaved")}), "scaled, interleaved"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            hw.export(Transformer(spec), tmp_path / "m.gguf", to="gguf")
    assert not list(tmp_path.iterdir())
