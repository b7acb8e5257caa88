"""T5, mT5 and their encoders in GGUF: run in llama.cpp, read by transformers, and read back."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import headwise as hw
from headwise.errors import UnsupportedModelError
from headwise.exporters.engine_parity import EncoderParityReport
from headwise.exporters.gguf_tensors import GgufFile
from headwise.exporters.llama_cpp_runner import is_available
from headwise.spec import AttentionSpec, ModelSpec
from headwise.weights.families import family_of
from headwise.weights.families.gguf_t5 import t5_spec_from_gguf
from tests.exporters.encode_decode import logits_of_engine
from tests.parity.cases import VOCAB
from tests.weights.test_t5 import T5Case

gguf = pytest.importorskip("gguf")
engine = pytest.mark.skipif(not is_available(), reason="needs xllamacpp, which carries llama.cpp")
# llama.cpp's buckets end at 128; its feed-forward layers have ReLU, or a gate with GELU
SIZES = {"relative_attention_max_distance": 128}
GATED = {"feed_forward_proj": "gated-gelu"}
CASES = {
    "t5": T5Case("tied and scaled", config=SIZES),
    "flan-t5": T5Case("own output, gated", config=SIZES | GATED | {"tie_word_embeddings": False}, own_output=True),
    "mt5": T5Case("mt5", "MT5ForConditionalGeneration", SIZES, own_output=True),
    "mt5, tied": T5Case("mt5, tied", "MT5ForConditionalGeneration", SIZES),
    "encoder": T5Case("encoder", "T5EncoderModel", SIZES),
    "gated encoder": T5Case("gated encoder", "T5EncoderModel", SIZES | GATED),
}
FAST = ("flan-t5", "encoder")
each_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES]
)


def load_case(name: str, folder: Path) -> hw.Transformer:
    model = hw.load(CASES[name].save(folder))
    assert isinstance(model, hw.Transformer)
    return model


def pruned_variants(model: hw.Transformer) -> list[hw.Transformer]:
    return [model, model.prune("0.1,1.*" if model.spec.kind == "encoder" else "enc.0.1,dec.1.*,cross.0.2")]


def inputs_of(model: hw.Transformer, rows: int = 2) -> dict[str, torch.Tensor]:
    """Return source and target ids that are longer than the distance of the last bucket."""
    generator = torch.Generator().manual_seed(3)
    ids, source = (torch.randint(VOCAB, (rows, length), generator=generator) for length in (150, 140))
    return {"ids": ids} if model.spec.kind == "encoder" else {"ids": ids, "source": source}


@each_case
@torch.no_grad()
def test_load_gguf_t5_equals_exported_model(name: str, tmp_path: Path) -> None:
    full = again = load_case(name, tmp_path / "theirs")
    for model in pruned_variants(full):
        result = hw.export(model, tmp_path / "m.gguf", to="gguf")
        assert result.notes[0] == ("architecture t5encoder" if full.spec.kind == "encoder" else "architecture t5")
        again = hw.load(tmp_path / "m.gguf")
        assert isinstance(again, hw.Transformer)
        torch.testing.assert_close(again(**inputs_of(full)), model(**inputs_of(full)), rtol=0, atol=1e-5)
    own_output = {"tied": False, "logit_scale": 1.0} if full.spec.kind != "encoder" else {}
    assert again.spec == replace(full.spec, **own_output)
    hw.export(again, tmp_path / "again")  # the family of the file can represent the model


@each_case
@torch.no_grad()
def test_transformers_reads_exported_gguf_t5(name: str, tmp_path: Path) -> None:
    """transformers takes every file for a Flan-T5 with as many decoder layers, so it gets the configuration of the model."""
    full = load_case(name, tmp_path / "theirs")
    kind: Any = getattr(transformers, CASES[name].model.removeprefix("M"))  # it reads an mT5 as a T5
    settings = json.loads((tmp_path / "theirs" / "config.json").read_text())
    config = transformers.T5Config(**{key: value for key, value in settings.items() if key != "model_type"})
    config.scale_decoder_outputs = False  # a scaled output is stored as weights of its own
    config.tie_word_embeddings = True  # of encoder and decoder
    for model in pruned_variants(full):
        hw.export(model, tmp_path / "m.gguf", to="gguf")
        reference = kind.from_pretrained(tmp_path, gguf_file="m.gguf", config=config, dtype=torch.float32).eval()
        inputs = inputs_of(full)
        if full.spec.kind == "encoder":
            expected = reference(inputs["ids"]).last_hidden_state
        else:
            expected = reference(input_ids=inputs["source"], decoder_input_ids=inputs["ids"]).logits
        torch.testing.assert_close(model(**inputs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("heads", "tables", "stored", "zeros"),
    [
        ("enc.0-2.1,dec.0-1.1,cross.0-1.1", 2, 3, 0),  # the same head: both stacks have one table
        ("enc.0.1,enc.1.2-3,enc.2.0,dec.0-1.3,cross.0-1.0-1", 4, 3, 3),
        ("enc.*,dec.*,cross.0.*,cross.1.1-3", 2, 1, 6),
    ],
)
@torch.no_grad()
def test_export_gguf_t5_with_fewer_heads_in_all_layers_is_smaller(
    heads: str, tables: int, stored: int, zeros: int, tmp_path: Path
) -> None:
    full = load_case("t5", tmp_path / "theirs")
    model = full.prune(heads)
    result = hw.export(model, tmp_path / "m.gguf", to="gguf")
    note = next(note for note in result.notes if "heads per layer" in note)
    assert note.startswith(f"{stored} of 4 heads per layer are stored and renumbered")
    assert (f"; {zeros} zero heads" in note) == (zeros > 0)
    names = [tensor.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors]
    assert sum("rel_b" in name for name in names) == tables
    again = hw.load(tmp_path / "m.gguf")
    assert isinstance(again, hw.Transformer)
    assert again.spec.attention.heads == stored
    torch.testing.assert_close(again(**inputs_of(full)), model(**inputs_of(full)), rtol=0, atol=1e-5)
    if is_available():
        inputs = inputs_of(model, rows=1)
        rows = logits_of_engine(tmp_path / "m.gguf", *(inputs[key][0].tolist() for key in ("source", "ids")))
        if rows is not None:
            torch.testing.assert_close(torch.tensor(rows), model(**inputs)[0], rtol=0, atol=4e-3)


@engine
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if "encoder" in name])
def test_export_gguf_t5_encoder_matches_llama_cpp(name: str, tmp_path: Path) -> None:
    for model in pruned_variants(load_case(name, tmp_path / "theirs")):
        result = hw.export(model, tmp_path / "m.gguf", to="gguf", check=True)
        assert isinstance(result.parity, EncoderParityReport)
        assert result.parity.values > 1000
        assert result.parity.max_difference < (2e-2 if "gated" in name else 1e-5), "GELU is a table of 16-bit numbers"


@engine
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if "encoder" not in name])
@torch.no_grad()
def test_export_gguf_t5_matches_llama_cpp(name: str, tmp_path: Path) -> None:
    """llama.cpp rounds keys and values of cross-attention to 16 bits. Without its heads only GELU differs."""
    full = load_case(name, tmp_path / "theirs")
    for model in (*pruned_variants(full), full.prune("cross.*")):
        hw.export(model, tmp_path / "m.gguf", to="gguf")
        inputs = inputs_of(full, rows=1)
        source, target = (inputs[key][0].tolist() for key in ("source", "ids"))
        rows = logits_of_engine(tmp_path / "m.gguf", source, target)
        if rows is None:
            pytest.skip("the installed build of llama.cpp has another layout of parameters")
        has_cross = any(str(address).startswith("cross") for address in model.spec.head_addresses)
        limit = (2e-2 if name != "t5" else 4e-3) if has_cross or name != "t5" else 1e-5
        torch.testing.assert_close(torch.tensor(rows), model(**inputs)[0], rtol=0, atol=limit)


@torch.no_grad()
def test_export_gguf_t5_trained_position_biases_are_stored_per_layer(tmp_path: Path) -> None:
    model = load_case("flan-t5", tmp_path / "theirs")
    for layer in model.attention_layers():
        if layer.position_bias is not None:
            layer.position_bias.add_(torch.randn_like(layer.position_bias))
    result = hw.export(model, tmp_path / "m.gguf", to="gguf")
    assert any("different position biases" in note for note in result.notes)
    names = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert {name for name in names if "rel_b" in name} == {
        *(f"enc.blk.{i}.attn_rel_b.weight" for i in range(3)), *(f"dec.blk.{i}.attn_rel_b.weight" for i in range(2)),
    }  # fmt: skip
    again = hw.load(tmp_path / "m.gguf")
    assert isinstance(again, hw.Transformer)
    torch.testing.assert_close(again(**inputs_of(model)), model(**inputs_of(model)), rtol=0, atol=1e-5)
    if is_available():
        inputs = inputs_of(model, rows=1)
        rows = logits_of_engine(tmp_path / "m.gguf", *(inputs[key][0].tolist() for key in ("source", "ids")))
        if rows is not None:
            torch.testing.assert_close(torch.tensor(rows), model(**inputs)[0], rtol=0, atol=2e-2)


def t5_spec(attention: dict[str, Any] | None = None, **fields: Any) -> ModelSpec:
    sizes: dict[str, Any] = {
        "vocab": VOCAB, "context": 64, "layers": 2, "kind": "encoder-decoder", "norm": "rms", "activation": "relu",
        "mlp_bias": False, "positions": "none", "causal_t5_buckets": True, "decoder_start_id": 0, "mlp_width": 40,
    }  # fmt: skip
    heads: dict[str, Any] = {"width": 24, "heads": 4, "head_dim": 5, "scale": 1.0, "t5_buckets": 8}
    return ModelSpec(**(sizes | fields), attention=AttentionSpec(**(heads | (attention or {}))))


@torch.no_grad()
def test_export_gguf_t5_scale_of_scores_is_stored_in_queries(tmp_path: Path) -> None:
    model = hw.Transformer(t5_spec({"scale": None})).eval()
    hw.export(model, tmp_path / "m.gguf", to="gguf")
    again = hw.load(tmp_path / "m.gguf")
    assert isinstance(again, hw.Transformer)
    torch.testing.assert_close(again(**inputs_of(model)), model(**inputs_of(model)), rtol=0, atol=1e-5)


def test_load_gguf_t5_file_of_the_converter_is_tied_and_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The converter stores no output of a tied model, and a table of cross-attention that no model uses."""
    model, add_tensor = load_case("t5", tmp_path / "theirs"), GgufFile.add_tensor

    def add_as_converter(store: GgufFile, name: str, tensor: torch.Tensor, **options: Any) -> None:
        if name == "output.weight":
            name, tensor = "dec.blk.0.cross_attn_rel_b.weight", torch.ones(8, 4)
        add_tensor(store, name, tensor, **options)

    monkeypatch.setattr(GgufFile, "add_tensor", add_as_converter)
    hw.export(model, tmp_path / "m.gguf", to="gguf")
    again = hw.load(tmp_path / "m.gguf")
    assert isinstance(again, hw.Transformer)
    assert again.spec == model.spec
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs_of(model)), model(**inputs_of(model)), rtol=0, atol=1e-5)


REFUSED = [
    (t5_spec(activation="swiglu"), "activation is swiglu"),
    (t5_spec(output="none"), "output is 'none'"),
    (t5_spec({"t5_max_distance": 20}), "end at distance 20"),
    (t5_spec({"t5_buckets": 0}), "no T5 position biases"),
    (t5_spec({"kv_heads": 2}), "2 KV heads"),
    (t5_spec({"out_bias": True}), "fold_mean=False"),
    (t5_spec({"value_dim": 7}), "value_dim differs"),
    (t5_spec(causal_t5_buckets=False), "buckets for later keys"),
    (t5_spec(norm_placement="sandwich"), "norm_placement"),
]


@pytest.mark.parametrize(("spec", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_export_gguf_unsupported_t5_raises(spec: ModelSpec, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        hw.export(hw.Transformer(spec), tmp_path / "m.gguf", to="gguf")
    assert not list(tmp_path.iterdir())


def test_export_gguf_t5_pooling_applies_only_to_encoders(tmp_path: Path) -> None:
    with pytest.raises(hw.HeadwiseError, match=r"only to encoders\. Got kind='encoder-decoder'"):
        hw.export(hw.Transformer(t5_spec()), tmp_path / "m.gguf", to="gguf", pooling="mean")


# Metadata as llama.cpp's converter writes it for Flan-T5 small.
FIELDS = {
    "context_length": 512, "embedding_length": 512, "feed_forward_length": 1024, "block_count": 8, "decoder_block_count": 8,
    "attention.head_count": 6, "attention.key_length": 64, "attention.value_length": 64,
    "attention.layer_norm_epsilon": 9.999999974752427e-07, "attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "attention.relative_buckets_count": 32, "decoder_start_token_id": 0,
}  # fmt: skip
CONFIG = {
    "model_type": "t5", "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8,
    "num_decoder_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
}  # fmt: skip


def read_spec(architecture: str = "t5", names: tuple[str, ...] = (), **changed: Any) -> ModelSpec:
    fields = FIELDS | {name.replace("__", "."): value for name, value in changed.items()}
    named = {f"{architecture}.{name}": value for name, value in fields.items() if value is not None}

    reader: Any = SimpleNamespace(shapes={"token_embd.weight": (32128, 512)} | dict.fromkeys(names, (1,)))
    return t5_spec_from_gguf({"general.architecture": architecture} | named, reader)


def test_t5_spec_from_gguf_equals_spec_from_config() -> None:
    to_spec, gate = family_of("t5").spec_from_config, "enc.blk.0.ffn_gate.weight"
    own_output = replace(to_spec(CONFIG | {"tie_word_embeddings": False}), tied=False)
    assert read_spec(names=(gate, "output.weight")) == own_output
    assert read_spec(names=(gate,)) == to_spec(CONFIG)
    assert read_spec() == to_spec(CONFIG | {"feed_forward_proj": "relu"})
    assert read_spec(decoder_block_count=3).layers == 3
    assert read_spec(decoder_block_count=None) == read_spec()
    encoder = read_spec("t5encoder", decoder_block_count=None, decoder_start_token_id=None)
    expected = family_of("t5").adjust(to_spec(CONFIG | {"feed_forward_proj": "relu"}), set(), {})
    assert encoder == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attention__value_length": 32}, r"t5\.attention\.value_length is 32"),
        ({"attention__head_count_kv": 2}, r"t5\.attention\.head_count_kv is 2"),
        ({"attention__head_count": [6, 5]}, r"head_count differs between layers"),
    ],
)
def test_t5_spec_from_gguf_other_settings_raise(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_spec(**changed)


@engine
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "limit"), [("f16", 3e-2), ("q8_0", 0.5)])
@torch.no_grad()
def test_export_gguf_t5_in_fewer_bits_runs_in_llama_cpp(dtype: str, limit: float, tmp_path: Path) -> None:
    """llama.cpp and Headwise read the same rounded weights; with 8 bits, the engine also rounds activations."""
    torch.manual_seed(0)
    model = hw.Transformer(t5_spec({"width": 64, "heads": 2, "head_dim": 32}, mlp_width=64)).eval()
    for weight in model.parameters():
        weight.mul_(5.0 if weight.ndim > 1 else 1.0)
    hw.export(model, tmp_path / "m.gguf", to="gguf", dtype=dtype)
    types = {tensor.name: tensor.tensor_type.name.lower() for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert types["dec.blk.0.cross_attn_q.weight"] == types["enc.blk.1.ffn_up.weight"] == dtype
    assert types["dec.blk.0.attn_rel_b.weight"] == types["enc.output_norm.weight"] == "f32"
    again = hw.load(tmp_path / "m.gguf")
    assert isinstance(again, hw.Transformer)
    inputs = inputs_of(model, rows=1)
    rows = logits_of_engine(tmp_path / "m.gguf", *(inputs[key][0].tolist() for key in ("source", "ids")))
    if rows is None:
        pytest.skip("the installed build of llama.cpp has another layout of parameters")
    expected = again(**inputs)[0]
    assert expected.std() > 0.5
    torch.testing.assert_close(torch.tensor(rows), expected, rtol=0, atol=limit)
