"""DeepSeek-V2 with dense MLPs in GGUF: run in llama.cpp, read back, and read as llama.cpp's converter writes it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.errors import HeadwiseError, UnsupportedModelError
from headwise.exporters.gguf_tensors import GgufFile
from headwise.exporters.llama_cpp_runner import is_available
from headwise.spec import Latent, ModelSpec, Rotary, RotaryScaling
from headwise.weights.families import family_of
from headwise.weights.families.gguf_deepseek import deepseek_spec_from_gguf
from tests.exporters.llamas import tokenizer
from tests.exporters.test_gguf_decoders import LAYERS, make_model, spec_of

gguf = pytest.importorskip("gguf")
engine = pytest.mark.skipif(not is_available(), reason="needs xllamacpp, which carries llama.cpp")
YARN = RotaryScaling("yarn", 4.0, original_context=16, beta_fast=4.0, attention_factor=1.0)


def deepseek_spec(
    scaling: RotaryScaling | None = None, query_rank: int = 0, layers: int = 3, **attention: Any
) -> ModelSpec:
    sizes: dict[str, Any] = {
        "head_dim": 10, "value_dim": 7, "kv_heads": 4, "latent": Latent(12, 4, query_rank),
        "rotary": Rotary(500.0, "interleaved", dims=4, scaling=scaling),
    }  # fmt: skip
    return spec_of(LAYERS | {"layers": layers, "norm_eps": 1e-6, "tied": query_rank > 0}, **sizes | attention)


SPECS = {
    "direct queries": deepseek_spec(),
    "query rank, tied": deepseek_spec(query_rank=9),
    "yarn, scaled scores": deepseek_spec(YARN, query_rank=9, scale=0.4),
    "yarn, scores and cosines": deepseek_spec(replace(YARN, attention_factor=1.3), scale=0.4),
    "yarn, cosines only": deepseek_spec(replace(YARN, attention_factor=None)),
    "custom scale": deepseek_spec(scale=0.5),
    "26 layers": deepseek_spec(layers=26),
}
FAST = ("yarn, scaled scores",)
KEPT = ("direct queries", "query rank, tied", "yarn, scaled scores", "26 layers")  # factors that the file stores


@engine
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SPECS])
def test_export_gguf_deepseek_matches_llama_cpp_and_reads_back(name: str, tmp_path: Path) -> None:
    full, path = make_model(SPECS[name]), tmp_path / "m.gguf"
    again: Any = None
    for model in (full, full.prune("0.1,2.0-1")):
        exported = hw.export(model, path, to="gguf", check=True)
        assert exported.parity is not None
        assert exported.parity.values > 100
        assert exported.parity.max_difference < 2e-5
        assert exported.parity.agrees
        assert exported.notes[0] == "architecture deepseek2"
        assert any("3 pruned heads are stored as zeros" in note for note in exported.notes) == (model is not full)
        again = hw.load(path)
        ids = torch.randint(full.spec.vocab, (2, 200), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            torch.testing.assert_close(again(ids), model(ids), rtol=0, atol=1e-5 if full.spec.layers < 9 else 1e-4)
        assert again.family == "deepseek-v2"
    if name in KEPT:
        scale = full.spec.attention.scale
        assert again.spec.attention.scale == (None if scale is None else pytest.approx(scale))
        assert replace(again.spec, attention=replace(again.spec.attention, scale=scale)) == full.spec


def test_load_gguf_deepseek_equals_exported_model(tmp_path: Path) -> None:
    model = make_model(SPECS["yarn, scores and cosines"]).prune("1.*,2.3")
    hw.export(model, tmp_path / "m.gguf", to="gguf")
    again: Any = hw.load(tmp_path / "m.gguf")
    ids = torch.randint(model.spec.vocab, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(again(ids), model(ids), rtol=0, atol=1e-5)
    hw.export(again, tmp_path / "folder")


@pytest.mark.parametrize(("heads", "stored"), [("0-2.1", 3), ("0.1,1.0-2,2.0-1", 3), ("0-1.*,2.1-3", 1)])
def test_export_gguf_deepseek_with_fewer_heads_in_all_layers_is_smaller(
    heads: str, stored: int, tmp_path: Path
) -> None:
    model = make_model(SPECS["yarn, scaled scores"]).prune(heads)
    exported = hw.export(model, tmp_path / "m.gguf", to="gguf", check=is_available())
    assert exported.parity is None or (exported.parity.agrees and exported.parity.max_difference < 2e-5)
    assert any(note.startswith(f"{stored} of 4 heads per layer") for note in exported.notes)
    again: Any = hw.load(tmp_path / "m.gguf")
    assert again.spec.attention.heads == stored
    ids = torch.randint(model.spec.vocab, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(again(ids), model(ids), rtol=0, atol=1e-5)


def test_load_gguf_deepseek_older_file_has_one_up_projection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files before the split of the up-projection have its rows in the order of the checkpoint, and other lengths."""
    model = make_model(SPECS["yarn, scaled scores"])
    add_tensor = GgufFile.add_tensor

    def add_joined(store: GgufFile, name: str, tensor: torch.Tensor, **options: Any) -> None:
        if "attn_k_b" in name:
            rows = model.state_dict()[f"blocks.{name.split('.')[1]}.attention.qkv.kv.weight"]
            add_tensor(store, name.replace("k_b", "kv_b"), rows.flatten(0, 1))
        elif "attn_v_b" not in name:
            add_tensor(store, name, tensor, **options)

    monkeypatch.setattr(GgufFile, "add_tensor", add_joined)
    writer: Any = gguf.GGUFWriter
    monkeypatch.setattr(writer, "add_key_length", lambda self, _: self.add_uint32("deepseek2.attention.key_length", 10))
    monkeypatch.setattr(
        writer, "add_value_length", lambda self, _: self.add_uint32("deepseek2.attention.value_length", 7)
    )
    for length in ("key", "value"):
        monkeypatch.setattr(writer, f"add_{length}_length_mla", lambda self, _: None)
    hw.export(model, tmp_path / "m.gguf", to="gguf")
    again: Any = hw.load(tmp_path / "m.gguf")
    ids = torch.randint(model.spec.vocab, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(again(ids), model(ids), rtol=0, atol=1e-5)


def test_load_gguf_deepseek_unequal_up_projections_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_tensor = GgufFile.add_tensor

    def add_damaged(store: GgufFile, name: str, tensor: torch.Tensor, **options: Any) -> None:
        add_tensor(store, name, tensor[:2] if "attn_v_b" in name else tensor, **options)

    monkeypatch.setattr(GgufFile, "add_tensor", add_damaged)
    hw.export(make_model(SPECS["direct queries"]), tmp_path / "m.gguf", to="gguf")
    with pytest.raises(HeadwiseError, match="does not match the values"):
        hw.load(tmp_path / "m.gguf")


@engine
@pytest.mark.slow
def test_llama_cpp_reads_lite_sizes_without_query_rank_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on the number of layers that the exporter names is llama.cpp's."""
    model = make_model(deepseek_spec(query_rank=9, layers=26))
    with pytest.raises(UnsupportedModelError, match="26 layers and a latent of the queries"):
        hw.export(model, tmp_path / "m.gguf", to="gguf")
    monkeypatch.setattr("headwise.exporters.gguf_deepseek.LITE_LAYERS", ())
    with pytest.raises(HeadwiseError, match="could not run this file"):
        hw.export(model, tmp_path / "m.gguf", to="gguf", check=True)


REFUSED = [
    (deepseek_spec(bias=True), r"attention\.bias is True"),
    (deepseek_spec(out_bias=True), "fold_mean=False"),
    (deepseek_spec(RotaryScaling("linear", 2.0)), "rotary scaling is linear"),
    (deepseek_spec(replace(YARN, truncate=False)), "truncate=False"),
    (deepseek_spec(latent=Latent(12, 4, norm_eps=1e-3)), "epsilon 0.001"),
    (deepseek_spec(window=5), "window is shorter"),
]


@pytest.mark.parametrize(("spec", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_export_gguf_unsupported_deepseek_raises(spec: ModelSpec, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        hw.export(hw.Transformer(spec), tmp_path / "m.gguf", to="gguf")
    assert not list(tmp_path.iterdir())


# Metadata as llama.cpp's converter writes it for a DeepSeek-V2-Lite, whose MLPs would all be dense.
FIELDS = {
    "block_count": 27, "context_length": 163840, "embedding_length": 2048, "feed_forward_length": 10944, "vocab_size": 102400,
    "attention.head_count": 16, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "attention.kv_lora_rank": 512, "attention.key_length": 576, "attention.value_length": 512,
    "attention.key_length_mla": 192, "attention.value_length_mla": 128, "leading_dense_block_count": 27,
    "expert_feed_forward_length": 1408, "expert_count": 64, "expert_used_count": 6, "expert_shared_count": 2,
    "expert_weights_scale": 1.0, "rope.dimension_count": 64, "rope.freq_base": 10000.0, "rope.scaling.type": "yarn",
    "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 4096,
    "rope.scaling.yarn_log_multiplier": 0.07069999724626541,
}  # fmt: skip


def read_spec(**changed: Any) -> ModelSpec:
    fields = FIELDS | {name.replace("__", "."): value for name, value in changed.items()}
    named = {f"deepseek2.{name}": value for name, value in fields.items() if value is not None}

    reader: Any = SimpleNamespace(shapes={"output.weight": (102400, 2048)})
    return deepseek_spec_from_gguf({"general.architecture": "deepseek2"} | named, reader)


CONFIG = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 163840,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 27, "rope_theta": 10000, "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.707, "mscale_all_dim": 0.707,
    },
}  # fmt: skip


def test_deepseek_spec_from_gguf_equals_spec_from_config() -> None:
    expected = family_of("deepseek_v2").spec_from_config(CONFIG)
    assert expected.attention.scale == pytest.approx(192**-0.5 * 1.5896261651)  # (1 + 0.0707 · ln 40)²
    assert read_spec() == expected
    without = CONFIG["rope_scaling"] | {"mscale": None, "mscale_all_dim": None}
    plain = family_of("deepseek_v2").spec_from_config(CONFIG | {"rope_scaling": without})
    assert read_spec(rope__scaling__yarn_log_multiplier=None) == plain
    ranked = family_of("deepseek_v2").spec_from_config(CONFIG | {"q_lora_rank": 1536})
    assert read_spec(attention__q_lora_rank=1536) == ranked


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"leading_dense_block_count": 1}, r"mixture-of-experts MLPs \(64 experts\) in layers 1 to 26"),
        ({"rope__scaling__type": "linear"}, "rotary scaling 'linear'"),
        ({"rope__scaling__attn_factor": 2.0}, r"deepseek2\.rope\.scaling\.attn_factor is 2\.0"),
        ({"attention__temperature_scale": 0.1}, "temperature_scale is 0.1"),
    ],
)
def test_deepseek_spec_from_gguf_other_settings_raise(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_spec(**changed)


def test_load_gguf_deepseek_reads_tokenizer(tmp_path: Path) -> None:
    hw.export(make_model(SPECS["direct queries"]), tmp_path / "m.gguf", to="gguf")
    loaded = hw.load(tmp_path / "m.gguf").tokenizer
    assert loaded is not None
    assert loaded.encode("The teacher's 1984 homework") == tokenizer().encode("The teacher's 1984 homework")


@engine
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_export_gguf_deepseek_in_fewer_bits_runs_in_llama_cpp(dtype: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"width": 64, "head_dim": 64, "value_dim": 32, "latent": Latent(32, 32, 32)}
    rotary = Rotary(500.0, "interleaved", dims=32, scaling=YARN)
    model = make_model(deepseek_spec(None, 32, **sizes, rotary=rotary, scale=0.15))
    exported = hw.export(model, tmp_path / "m.gguf", to="gguf", dtype=dtype, check=True)
    assert exported.parity is not None
    assert exported.parity.values > 100
    assert exported.parity.max_difference < {"f16": 1e-2, "q8_0": 0.2}[dtype]
    types = {tensor.name: tensor.tensor_type.name.lower() for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert types["blk.0.attn_k_b.weight"] == types["blk.0.attn_q_b.weight"] == dtype
    assert types["blk.0.attn_kv_a_norm.weight"] == types["blk.0.attn_q_a_norm.weight"] == "f32"
