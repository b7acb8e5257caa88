"""Whisper: ggml files against transformers, damaged files, examples from audio, and alignment heads in generation_config."""

import json
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headwise as hw
from headwise.attached.whisper_io import (
    RENAMES,
    audio_example,
    convert_audio_example,
    read_audio,
    write_alignment_heads,
)
from headwise.errors import HeadwiseError
from headwise.io.ggml_whisper import read_ggml_whisper
from headwise.text.build_tokenizers import word_tokenizer

SIZES = {"n_vocab": 31, "n_audio_ctx": 20, "n_audio_state": 16, "n_audio_head": 2, "n_audio_layer": 2, "n_text_ctx": 12}
SIZES |= {"n_text_state": 16, "n_text_head": 2, "n_text_layer": 2, "n_mels": 4, "ftype": 0}
OPENAI_NAMES = {
    "layers.": "blocks.", "encoder_attn_layer_norm.": "cross_attn_ln.", "self_attn_layer_norm.": "attn_ln.",
    "final_layer_norm.": "mlp_ln.", "encoder_attn.": "cross_attn.", "self_attn.": "attn.", "q_proj.": "query.",
    "k_proj.": "key.", "v_proj.": "value.", "out_proj.": "out.", "fc1.": "mlp.0.", "fc2.": "mlp.2.",
    "embed_tokens.": "token_embedding.", "embed_positions.weight": "positional_embedding",
    "encoder.layer_norm.": "encoder.ln_post.", "decoder.layer_norm.": "decoder.ln.",
}  # fmt: skip


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=31, num_mel_bins=4, d_model=16, encoder_layers=2, encoder_attention_heads=2, decoder_layers=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=20,
        max_target_positions=12, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config).eval()


def write_ggml(model: Any, path: Path, half: bool = False, sizes: dict[str, int] = SIZES) -> Path:
    """Write a model as whisper.cpp's converter does: OpenAI's names, fastest dimension first, conv biases as columns."""
    data = b"lmgg" + struct.pack("<11i", *(sizes | {"ftype": int(half)}).values())
    data += (
        struct.pack("<2i", 4, 3)
        + bytes(4 * 12)
        + struct.pack("<i", 2)
        + struct.pack("<i", 1)
        + b"a"
        + struct.pack("<i", 2)
        + b"bc"
    )
    for full_name, tensor in model.model.state_dict().items():
        name = full_name
        for own_name, openai_name in OPENAI_NAMES.items():
            name = name.replace(own_name, openai_name)
        tensor = tensor[:, None] if name.startswith("encoder.conv") and tensor.ndim == 1 else tensor
        is_half = half and tensor.ndim > 1 and "embedding" not in name and "conv" not in name
        array = tensor.to(torch.float16 if is_half else torch.float32).numpy()
        data += struct.pack("<3i", array.ndim, len(name), int(is_half)) + struct.pack(
            f"<{array.ndim}i", *array.shape[::-1]
        )
        data += name.encode() + array.tobytes()
    path.write_bytes(data)
    return path


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_features": torch.randn(1, 4, 40, generator=generator),
        "decoder_input_ids": torch.randint(3, 31, (1, 8), generator=generator),
    }


def test_ggml_whisper_gives_the_logits_of_transformers(reference: Any, tmp_path: Path) -> None:
    model: Any = hw.load(write_ggml(reference, tmp_path / "whisper.bin"))
    with torch.no_grad():
        assert torch.equal(model(**inputs()).logits, reference(**inputs()).logits)
    assert model.family == "whisper"
    assert {str(head) for head in model.spec.head_addresses} >= {"cross.1.1", "enc.0.0", "dec.1.0"}


def test_ggml_whisper_half_precision_rounds_weights_only(reference: Any, tmp_path: Path) -> None:
    model: Any = hw.load(write_ggml(reference, tmp_path / "whisper.bin", half=True))
    weight = model.model.model.decoder.layers[1].encoder_attn.q_proj.weight
    expected = reference.model.decoder.layers[1].encoder_attn.q_proj.weight
    assert torch.equal(weight, expected.half().float())


def test_every_rename_is_used(reference: Any, tmp_path: Path) -> None:
    names = set(read_ggml_whisper(write_ggml(reference, tmp_path / "whisper.bin")).tensors)
    assert len(RENAMES) == len(OPENAI_NAMES)
    assert "decoder.blocks.0.cross_attn.query.weight" in names


def test_ggml_whisper_damaged_files_raise_clear_errors(reference: Any, tmp_path: Path) -> None:
    file = write_ggml(reference, tmp_path / "whisper.bin")
    data = file.read_bytes()
    for size in (3, 20, 60, 130, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.bin").write_bytes(data[:size])
        with pytest.raises(HeadwiseError):
            read_ggml_whisper(tmp_path / "cut.bin")
    header = data[:4] + struct.pack("<i", 1 << 30) + data[8:]
    (tmp_path / "huge.bin").write_bytes(header)
    with pytest.raises(HeadwiseError, match="invalid sizes"):
        hw.load(tmp_path / "huge.bin")
    (tmp_path / "quantized.bin").write_bytes(data[:44] + struct.pack("<i", 8) + data[48:])
    with pytest.raises(HeadwiseError, match="quantized"):
        hw.load(tmp_path / "quantized.bin")
    write_ggml(reference, tmp_path / "sizes.bin", sizes=SIZES | {"n_text_layer": 3})
    with pytest.raises(HeadwiseError, match="do not match"):
        hw.load(tmp_path / "sizes.bin")


def test_find_heads_frames_score_a_uniform_head_by_the_length_of_the_gold_span(reference: Any, tmp_path: Path) -> None:
    """Without query weights all frames tie: a head hits gold frames / candidates."""
    model: Any = hw.load(write_ggml(reference, tmp_path / "whisper.bin"))
    layer = model.model.model.decoder.layers[1].encoder_attn
    with torch.no_grad():
        layer.q_proj.weight.zero_()
        layer.q_proj.bias.zero_()
    rows = [
        {"inputs": inputs(seed), "unit": "frame", "pairs": [[3, [0, 1, 2]], [5, [9]]], "candidates": list(range(12))}
        for seed in range(12)
    ]
    result = hw.find_heads(model, rows, job="alignment")
    assert result["cross.1.0"].score == pytest.approx((3 / 12 + 1 / 12) / 2)
    assert result["cross.1.0"].weight == pytest.approx((3 / 20 + 1 / 20) / 2, abs=1e-6)
    assert {str(head) for head in result.metadata["addresses"]} == {"cross.0.0", "cross.0.1", "cross.1.0", "cross.1.1"}
    rows[3]["inputs"]["input_features"][0, 0, 0] = float("nan")
    with pytest.raises(HeadwiseError, match="NaN"):
        hw.find_heads(model, rows, job="alignment")
    outside = {"pairs": [[3, [25]]], "candidates": None}
    rows = [row | {"inputs": inputs(50 + index)} | outside for index, row in enumerate(rows)]
    with pytest.raises(HeadwiseError, match="outside the input, which has 20 keys"):
        hw.find_heads(model, rows, job="alignment")


def test_audio_examples_check_their_audio_and_times(reference: Any, tmp_path: Path) -> None:
    model: Any = hw.load(write_ggml(reference, tmp_path / "whisper.bin"))
    second = np.full(16_000, 0.25, np.float32)
    with pytest.raises(HeadwiseError, match="with its tokenizer"):
        audio_example(model, second, [("hello", 0.0, 0.5)])
    special = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>", "<|endoftext|>"]
    model.tokenizer = word_tokenizer(["hello", "you", *special])
    example = audio_example(model, second, [("hello", 0.1, 0.5), ("dear", None, None), ("you", 0.7, 1.0)])
    assert example["pairs"] == [[3, list(range(5, 25))], [5, list(range(35, 50))]]
    assert example["candidates"] == list(range(50))
    for samples, words, message in (
        (second * np.nan, [("a", 0.0, 0.5)], "NaN"),
        (second[:0], [("a", 0.0, 0.5)], "at least one sample"),
        (second * 0, [("a", 0.0, 0.5)], "is silent"),
        (np.zeros(500_000), [("a", 0.0, 0.5)], "longer than 30 s"),
        (second, [("a", 0.6, 0.5)], "in order"),
        (second, [("a", 0.0, 2.5)], "in order"),
        (second, [], "in order"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            audio_example(model, samples, words)
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((2, 2, 8000, 0, "NONE", ""))
        file.writeframes(np.full(8000, 99, "<i2").tobytes())
    assert len(read_audio(tmp_path / "a.wav")) == 8000
    row = {"audio": str(tmp_path / "a.wav"), "times": [["hello", 0.1, 0.4]], "name": "first"}
    assert convert_audio_example(model, row, "line 1")["pairs"] == [[3, list(range(5, 20))]]
    with pytest.raises(HeadwiseError, match="times="):
        convert_audio_example(model, {"audio": str(tmp_path / "a.wav")}, "line 1")
    with pytest.raises(HeadwiseError, match="seconds or null"):
        convert_audio_example(model, row | {"times": [["hello", "0.1", 0.4]]}, "line 1")
    with pytest.raises(HeadwiseError, match="path of a wav"):
        convert_audio_example(model, row | {"audio": 5}, "line 1")
    with wave.open(str(tmp_path / "c.wav"), "wb") as file:  # 8 bits, unsigned
        file.setparams((1, 1, 16000, 0, "NONE", ""))
        file.writeframes(bytes([128, 0, 192, 128]))
    assert read_audio(tmp_path / "c.wav").tolist() == [0.0, -1.0, 0.5, 0.0]
    (tmp_path / "b.wav").write_bytes(b"RIFF")
    with pytest.raises(HeadwiseError, match="not a readable wav"):
        read_audio(tmp_path / "b.wav")


def test_write_alignment_heads_keeps_other_settings(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_length": 448, "alignment_heads": [[0, 0]]}))
    write_alignment_heads(["cross.3.1", "cross.2.0"], tmp_path)
    config = json.loads((tmp_path / "generation_config.json").read_text())
    assert config == {"max_length": 448, "alignment_heads": [[3, 1], [2, 0]]}
    with pytest.raises(HeadwiseError, match="cross-attention heads"):
        write_alignment_heads(["3.1"], tmp_path)
    with pytest.raises(HeadwiseError, match="not a folder"):
        write_alignment_heads(["cross.3.1"], tmp_path / "typo")
