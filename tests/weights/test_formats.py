"""Weight formats: shards, torch files, single files, dtypes, Meta's layout, and GGUF of every type."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import headwise as hw
from headwise.kernels.resolve_device import resolve_device
from headwise.weights import open_checkpoint
from headwise.weights.families.llama_meta_and_gguf import spec_from_meta
from tests.weights.checkpoints import (
    LAYERS,
    Kind,
    assert_same_logits,
    assert_same_model,
    deinterleave,
    interleave,
    make_llama,
    write_gguf,
    write_meta,
)

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


# Hugging Face's layout in other files.


def test_load_sharded_safetensors_equals_transformers(tmp_path: Path) -> None:
    hf_model = make_llama()
    hf_model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_logits(hw.load(tmp_path), hf_model)


def test_load_torch_files_equal_safetensors(tmp_path: Path) -> None:
    hf_model = make_llama()
    hf_model.save_pretrained(tmp_path / "whole")
    expected = hw.load(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    for folder in ("one", "old", "nested", "many"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    torch.save(tensors, tmp_path / "one" / "pytorch_model.bin")
    torch.save(tensors, tmp_path / "old" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": tensors, "step": 3}, tmp_path / "nested" / "pytorch_model.bin")
    names = sorted(tensors)
    shards = {"pytorch_model-1-of-2.bin": names[:7], "pytorch_model-2-of-2.bin": names[7:]}
    for file, shard_names in shards.items():
        torch.save({name: tensors[name] for name in shard_names}, tmp_path / "many" / file)
    table = {name: file for file, shard_names in shards.items() for name in shard_names}
    (tmp_path / "many" / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    for folder in ("one", "old", "nested", "many"):
        assert_same_model(hw.load(tmp_path / folder), expected)


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors", "weights.pt", "weights.pth", "w.bin"])
def test_load_single_file_by_path(name: str, tmp_path: Path) -> None:
    make_llama().save_pretrained(tmp_path)
    expected = hw.load(tmp_path)
    if name.endswith(".safetensors"):
        (tmp_path / "model.safetensors").rename(tmp_path / name)
    else:
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / name)
    assert_same_model(hw.load(str(tmp_path / name)), expected)


def test_load_single_native_file(tmp_path: Path) -> None:
    model = hw.Transformer(hw.ModelSpec(17, 8, 1, hw.AttentionSpec(8, 2)))
    model.save(tmp_path / "m")
    assert_same_model(hw.load(tmp_path / "m" / "model.safetensors"), model)


def test_load_prefers_safetensors_over_torch_files(tmp_path: Path) -> None:
    make_llama().save_pretrained(tmp_path)
    expected = hw.load(tmp_path)
    torch.save({"nothing": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert_same_model(hw.load(tmp_path), expected)


def test_load_base_model_without_prefix(tmp_path: Path) -> None:
    """Base models are saved without the prefix."""
    config = transformers.GPT2Config(vocab_size=61, n_positions=16, n_embd=24, n_layer=2, n_head=3)
    torch.manual_seed(0)
    hf_model = transformers.GPT2LMHeadModel(config).eval()
    hf_model.transformer.save_pretrained(tmp_path)
    assert "wte.weight" in load_file(tmp_path / "model.safetensors")
    assert_same_logits(hw.load(tmp_path), hf_model, length=16)


# Dtypes.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_load_dtype_is_kept_or_converted(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_llama().to(dtype).save_pretrained(tmp_path)
    stored_dtype_model = hw.load(tmp_path)
    assert f"the weights are {str(dtype)[6:]}, as in the file" in capsys.readouterr().err
    assert {tensor.dtype for tensor in stored_dtype_model.state_dict().values()} == {dtype}
    float32_model = hw.load(tmp_path, dtype="float32")
    assert not capsys.readouterr().err
    assert {tensor.dtype for tensor in float32_model.state_dict().values()} == {torch.float32}
    assert_same_model(stored_dtype_model.float(), float32_model)
    assert_same_logits(float32_model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


def test_load_float8_gives_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_llama().save_pretrained(tmp_path)
    weights = {
        name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    model = hw.load(tmp_path)
    assert "are float32, because the device does not compute in float8_e4m3fn" in capsys.readouterr().err
    assert torch.equal(model.state_dict()["embed.tokens.weight"], weights["model.embed_tokens.weight"].float())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"dtype": "bf16"}, "did you mean bfloat16"),
        ({"dtype": torch.int8}, "not a data type of weights"),
        ({"device": "cuda:77"}, "not available on this machine"),
        ({"device": "gpu"}, "Available: .*cpu"),
    ],
)
def test_load_unusable_device_or_dtype_raises(arguments: dict[str, Any], problem: str, tmp_path: Path) -> None:
    make_llama().save_pretrained(tmp_path)
    with pytest.raises(hw.HeadwiseError, match=problem):
        hw.load(tmp_path, **arguments)


def test_load_auto_device_takes_the_first_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("mps")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("xpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda")


def test_load_float16_on_request(tmp_path: Path) -> None:
    hf_model = make_llama()
    hf_model.save_pretrained(tmp_path)
    model = hw.load(tmp_path, dtype=torch.float16)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float16}
    assert_same_model(model, hw.load(tmp_path).half())
    assert_same_logits(model.float(), hf_model, atol=0.05)


def test_save_keeps_bfloat16(tmp_path: Path) -> None:
    model = hw.Transformer(hw.ModelSpec(17, 8, 2, hw.AttentionSpec(8, 2))).bfloat16()
    model.save(tmp_path / "m")
    assert_same_model(hw.load(tmp_path / "m", dtype=None), model)


# Meta's layout.


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("tied", [False, True])
def test_load_meta_layout_equals_transformers(suffix: str, tied: bool, tmp_path: Path) -> None:
    hf_model = make_llama(rope_parameters={"rope_type": "default", "rope_theta": 77.0}, tie_word_embeddings=tied)
    write_meta(hf_model, tmp_path, suffix, max_seq_len=48)
    model = hw.load(tmp_path)
    assert model.spec.attention.rotary == hw.Rotary(77.0, "interleaved")
    assert (model.spec.tied, model.spec.context) == (tied, 48)
    assert_same_logits(model, hf_model)


def test_load_meta_scaled_rotary_equals_transformers(tmp_path: Path) -> None:
    hf_model = make_llama(rope_parameters=LLAMA3)
    write_meta(hf_model, tmp_path, use_scaled_rope=True, rope_scaling_factor=8.0)
    assert_same_logits(hw.load(tmp_path), hf_model)


# params.json as published by Meta, and the factor in config.json of the same model on the hub.
META_PARAMS = {
    "Llama 2 7B": ({"dim": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": -1}, 32000, None, 10000.0),
    "Llama 3 8B": ({"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "rope_theta": 5e5}, 128256, None, 5e5),
    "Llama 3.1 8B": (
        {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "rope_theta": 5e5, "use_scaled_rope": True,
         "ffn_dim_multiplier": 1.3, "multiple_of": 1024}, 128256, 8.0, 5e5
    ),
    "Llama 3.2 1B": (
        {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "rope_theta": 5e5, "use_scaled_rope": True,
         "ffn_dim_multiplier": 1.5, "multiple_of": 256}, 128256, 32.0, 5e5
    ),
    "Llama 3.2 3B": (
        {"dim": 3072, "n_layers": 28, "n_heads": 24, "n_kv_heads": 8, "rope_theta": 5e5, "use_scaled_rope": True},
        128256, 32.0, 5e5
    ),
    "Llama 3.3 70B": (
        {"dim": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "rope_theta": 5e5, "use_scaled_rope": True},
        128256, 8.0, 5e5
    ),
    "Mistral 7B v0.1": (
        {"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8,
         "norm_eps": 1e-5, "sliding_window": 4096, "vocab_size": 32000}, 32000, None, 10000.0
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", META_PARAMS)
def test_spec_from_meta_reads_published_params(name: str) -> None:
    params, vocab, factor, theta = META_PARAMS[name]
    shapes = {"tok_embeddings.weight": (vocab, 8), "layers.0.feed_forward.w1.weight": (64, 8), "output.weight": (8, 8)}
    spec = spec_from_meta(params, shapes)
    rotary = spec.attention.rotary
    assert rotary is not None
    assert (rotary.theta, rotary.scaling and rotary.scaling.factor) == (theta, factor)
    assert spec.attention.window == params.get("sliding_window")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"use_scaled_rope": True},
            r"use_scaled_rope without a factor.*width 96 and 2 layers.*Add rope_scaling_factor",
        ),
        ({"vision_chunk_size": 448}, "params.json sets vision_chunk_size"),
        ({"quantization_args": {"scheme": "int4"}}, "params.json sets quantization_args"),
        ({"hidden_dim": 64, "rope_theta": None}, "does not contain rope_theta"),
        ({"use_scaled_rope": 1}, "use_scaled_rope must be true or false"),
    ],
)
def test_load_meta_unsupported_params_raise(params: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(hw.HeadwiseError, match=message):
        hw.load(write_meta(make_llama(), tmp_path, **params))


def test_load_meta_mistral_window_and_head_dim(tmp_path: Path) -> None:
    hf_model = make_llama("MistralForCausalLM", sliding_window=5, head_dim=32)
    assert_same_logits(hw.load(write_meta(hf_model, tmp_path, sliding_window=5, head_dim=32, hidden_dim=64)), hf_model)


def test_export_of_meta_layout_restores_rows(tmp_path: Path) -> None:
    hf_model = make_llama()
    model = hw.load(write_meta(hf_model, tmp_path / "meta"))
    hw.export(model, tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_same_logits(model, back)
    got, want = back.state_dict(), hf_model.state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)  # export restores the original order of rows


# GGUF.


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("tied", [False, True])
def test_load_gguf_equals_stored_tensors(kind: str, tied: bool, tmp_path: Path) -> None:
    hf_model = make_llama(tie_word_embeddings=tied)
    stored = write_gguf(hf_model, tmp_path / "m.gguf", Kind[kind])
    model = hw.load(tmp_path / "m.gguf")
    assert model.family == "llama"
    assert model.spec.tied == tied
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    queries = model.state_dict()["blocks.1.attention.qkv.q.weight"].flatten(0, 1)
    assert torch.equal(queries, stored["blk.1.attn_q.weight"])
    assert isinstance(model, hw.Transformer)
    assert torch.equal(model.state_dict()["embed.tokens.weight"], stored["token_embd.weight"])
    assert_same_logits(model, hf_model)
    assert_same_model(hw.load(tmp_path), model)  # a folder with one GGUF file in it


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_load_gguf_k_quants_equal_stored_tensors(kind: str, tmp_path: Path) -> None:
    """Compare with the gguf package's dequantization. It cannot write these types, so the blocks are random bytes."""
    hf_model = make_llama(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256)
    stored = write_gguf(hf_model, tmp_path / "m.gguf", Kind[kind])
    model = hw.load(tmp_path / "m.gguf")
    assert isinstance(model, hw.Transformer)
    for i in range(LAYERS):
        for name, part in (("ffn_down", "down"), ("ffn_gate", "gate")):
            weight = getattr(model.blocks[i].mlp, part).weight
            assert weight.std() > 0
            assert torch.equal(weight, stored[f"blk.{i}.{name}.weight"])
    assert_same_logits(model, hf_model)


def test_load_gguf_qwen2_equals_transformers(tmp_path: Path) -> None:
    hf_model = make_llama("Qwen2ForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
    write_gguf(hf_model, tmp_path / "m.gguf", Kind.Q8_0, arch="qwen2")
    model = hw.load(tmp_path / "m.gguf")
    assert model.spec.attention.bias
    assert not model.spec.attention.out_bias
    assert_same_logits(model, hf_model)


def test_load_gguf_custom_head_dim(tmp_path: Path) -> None:
    hf_model = make_llama(head_dim=32)
    write_gguf(hf_model, tmp_path / "m.gguf", key_length=32, value_length=32)
    assert_same_logits(hw.load(tmp_path / "m.gguf"), hf_model)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_load_gguf_llama3_rotary(factor: float, tmp_path: Path) -> None:
    rope = LLAMA3 | {"factor": factor}
    hf_model = make_llama(rope_parameters=rope)
    write_gguf(hf_model, tmp_path / "m.gguf")
    model = hw.load(tmp_path / "m.gguf")
    scaling = hw.RotaryScaling("llama3", factor, 1.0, 4.0, 8192)
    assert model.spec.attention.rotary == hw.Rotary(500000.0, "interleaved", scaling=scaling)
    assert_same_logits(model, hf_model)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_dimension_count", 8),
        ("value_length", 8),
        ("attention_scale", 0.5),
        ("expert_count", 4),
        ("logit_scale", 2.0),
    ],
)
def test_load_gguf_unsupported_setting_raises(field: str, value: float, tmp_path: Path) -> None:
    write_gguf(make_llama(), tmp_path / "m.gguf", Kind.F32, "llama", **{field: value})
    with pytest.raises(hw.HeadwiseError, match=rf"llama\.\S+ is {value}, which Headwise does not support"):
        hw.load(tmp_path / "m.gguf")


def test_load_gguf_linear_rotary(tmp_path: Path) -> None:
    hf_model = make_llama(rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0})
    write_gguf(hf_model, tmp_path / "m.gguf", rope_scaling_type=_EnumValue("linear"), rope_scaling_factor=2.0)
    assert_same_logits(hw.load(tmp_path / "m.gguf"), hf_model)


class _EnumValue:
    """Stands for an enum member: the writer reads its `.value`."""

    def __init__(self, value: str) -> None:
        self.value = value


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_load_gguf_stored_dtype_runs(kind: str, tmp_path: Path) -> None:
    hf_model = make_llama()
    write_gguf(hf_model, tmp_path / "m.gguf", Kind[kind])
    model = hw.load(tmp_path / "m.gguf")
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    half_model = hw.load(tmp_path / "m.gguf", dtype="float16")
    assert {tensor.dtype for tensor in half_model.parameters()} == {torch.float16}
    with torch.no_grad():
        assert model(torch.tensor([[1, 2, 3]])).isfinite().all()


def test_export_of_gguf_equals_transformers(tmp_path: Path) -> None:
    hf_model = make_llama()
    write_gguf(hf_model, tmp_path / "m.gguf", Kind.Q8_0)
    model = hw.load(tmp_path / "m.gguf")
    hw.export(model, tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    got, want = back.state_dict(), hf_model.state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert_same_logits(model, back)


def test_open_checkpoint_gguf_reads_spec_without_weights(tmp_path: Path) -> None:
    write_gguf(make_llama(), tmp_path / "m.gguf", Kind.Q4_0)
    opened = open_checkpoint(tmp_path / "m.gguf")
    assert (opened.spec.layers, opened.spec.attention.kv_heads) == (LAYERS, 3)
    assert opened.tokenizer is None
    assert opened.reader.shapes["blk.0.attn_k.weight"] == (48, 96)


def test_interleave_and_deinterleave_round_trip() -> None:
    rows = torch.arange(24.0)[:, None]
    assert torch.equal(deinterleave(interleave(rows, 3), 3), rows)
    assert interleave(rows, 3)[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
