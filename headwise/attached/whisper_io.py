"""Whisper: load ggml files into transformers, turn audio with gold word times into examples, and write alignment heads.

`audio_example` makes an example of the job `alignment` from audio and the start and end of its words. The query of a word is
the decoder row that predicts its first token; the gold keys are the encoder frames of the word.
"""

import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.attached.api import attach
from headwise.attached.attached_model import AttachedModel
from headwise.errors import ArgumentError, FileFormatError, MissingDependencyError, UnsupportedModelError
from headwise.io.atomic_write import write_atomic
from headwise.io.ggml_whisper import read_ggml_whisper
from headwise.io.resolve_path import read_json
from headwise.spec import Address
from headwise.text import Tokenizer

SAMPLE_RATE, FRAMES_PER_SECOND, MAX_SECONDS = 16_000, 50, 30.0
PROMPT = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
# OpenAI's names in ggml files, and those of transformers
RENAMES = (
    (r"\.blocks\.", ".layers."),
    (r"\.cross_attn_ln\.", ".encoder_attn_layer_norm."),
    (r"\.attn_ln\.", ".self_attn_layer_norm."),
    (r"\.mlp_ln\.", ".final_layer_norm."),
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"\.attn\.", ".self_attn."),
    (r"\.query\.", ".q_proj."),
    (r"\.key\.", ".k_proj."),
    (r"\.value\.", ".v_proj."),
    (r"\.out\.", ".out_proj."),
    (r"\.mlp\.0\.", ".fc1."),
    (r"\.mlp\.2\.", ".fc2."),
    (r"^decoder\.token_embedding\.", "decoder.embed_tokens."),
    (r"\.positional_embedding$", ".embed_positions.weight"),
    (r"^encoder\.ln_post\.", "encoder.layer_norm."),
    (r"^decoder\.ln\.", "decoder.layer_norm."),
)


def load_ggml_whisper(path: Path, dtype: torch.dtype | None = None, device: Any = "cpu") -> AttachedModel:
    """Load a ggml Whisper file as an attached transformers model, with the tokenizer next to the file if there is one.

    The default dtype is float32.
    """
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError(
            f"{path}: a Whisper model runs in transformers. Run: pip install 'headwise[attach]'"
        ) from None
    content = read_ggml_whisper(path)
    sizes = content.sizes
    end_of_text = min(
        50257 if sizes["n_vocab"] >= 51865 else 50256, sizes["n_vocab"] - 2
    )  # English models have one less
    config = transformers.WhisperConfig(
        vocab_size=sizes["n_vocab"], num_mel_bins=sizes["n_mels"], d_model=sizes["n_audio_state"],
        encoder_layers=sizes["n_audio_layer"], encoder_attention_heads=sizes["n_audio_head"],
        decoder_layers=sizes["n_text_layer"], decoder_attention_heads=sizes["n_text_head"],
        encoder_ffn_dim=4 * sizes["n_audio_state"], decoder_ffn_dim=4 * sizes["n_text_state"],
        max_source_positions=sizes["n_audio_ctx"], max_target_positions=sizes["n_text_ctx"], pad_token_id=end_of_text,
        bos_token_id=end_of_text, eos_token_id=end_of_text, decoder_start_token_id=end_of_text + 1,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = transformers.WhisperForConditionalGeneration(config)
    state = {f"model.{_hugging_face_name(name)}": tensor for name, tensor in content.tensors.items()}
    state["proj_out.weight"] = state.get("model.decoder.embed_tokens.weight", torch.empty(0, device="cpu"))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    state = {
        name: _convert_tensor(tensor, expected.get(name), dtype or torch.float32) for name, tensor in state.items()
    }
    wrong = [
        name for name in {*state, *expected} if name not in state or tuple(state[name].shape) != expected.get(name)
    ]
    if wrong:
        raise FileFormatError(
            f"{path}: the tensors do not match the sizes of the file: {', '.join(sorted(wrong)[:5])}. Download it again."
        )
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.to(device).eval()
    folder = path.parent
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return attach(model, Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None)


def _hugging_face_name(name: str) -> str:
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _convert_tensor(tensor: Tensor, shape: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
    """Convert a tensor, and drop the second axis of biases of convolutions, which ggml stores as columns."""
    if shape is not None and tensor.ndim == len(shape) + 1 and tensor.shape[-1] == 1:
        tensor = tensor.squeeze(-1)
    return tensor.to(dtype)


def read_audio(path: str | Path, where: str = "audio") -> np.ndarray:
    """Read a wav file as float32 mono at 16 kHz, at most 30 seconds long."""
    from scipy.io import wavfile
    from scipy.signal import resample_poly

    try:
        rate, samples = wavfile.read(path)
    except (OSError, ValueError, struct.error) as error:
        raise FileFormatError(
            f"{where}: {path} is not a readable wav file: {error}. Convert it to 16-bit wav."
        ) from None
    if samples.dtype == np.uint8:
        samples = (samples.astype(np.float32) - 128) / 128  # 8-bit wav is unsigned: 128 is silence
    elif np.issubdtype(samples.dtype, np.integer):
        samples = samples / np.iinfo(samples.dtype).max
    samples = samples if samples.ndim == 1 else samples.mean(1)
    return check_audio(resample_poly(samples, SAMPLE_RATE, rate) if rate != SAMPLE_RATE else samples, where)


def check_audio(samples: np.ndarray, where: str = "audio") -> np.ndarray:
    """Raise if samples are empty, too long, NaN or silent. Return them as float32."""
    samples = np.asarray(samples, np.float32)
    if samples.ndim != 1 or not len(samples):
        raise ArgumentError(f"{where}: must be one channel with at least one sample. Got shape {samples.shape}.")
    if not np.isfinite(samples).all():
        raise ArgumentError(f"{where}: contains NaN or infinite samples. Convert the audio again.")
    if len(samples) > MAX_SECONDS * SAMPLE_RATE:
        raise ArgumentError(f"{where}: {len(samples) / SAMPLE_RATE:.1f} s is longer than 30 s. Split the audio.")
    if not samples.any():
        raise ArgumentError(f"{where}: is silent, every sample is 0. Record the audio again.")
    return samples


def audio_example(
    model: AttachedModel,
    samples: np.ndarray,
    words: Sequence[tuple[str, float | None, float | None]],
    where: str = "example",
) -> dict[str, Any]:
    """Return an example for `hw.find_heads(model, …, job="alignment")` from audio and its words with start and end.

    Args:
        model: An attached Whisper with a tokenizer.
        samples: Mono audio at 16 kHz.
        words: Each word with its start and end in seconds, in order. None: the times of the word are unknown.
        where: Name of the example, for errors.
    """
    samples = check_audio(samples, where)
    tokenizer = model.tokenizer
    if not isinstance(tokenizer, Tokenizer) or model.family != "whisper":
        raise UnsupportedModelError(
            f"{where}: audio needs an attached Whisper with its tokenizer. Put tokenizer.json into the folder of the model."
        )
    duration = len(samples) / SAMPLE_RATE
    word_times = [(start, end) for _, start, end in words if start is not None and end is not None]
    starts = [start for start, _ in word_times]
    if (
        not starts
        or starts != sorted(starts)
        or any(not 0 <= start < end <= duration + 0.1 for start, end in word_times)
    ):
        raise ArgumentError(
            f"{where}: words must be [word, start, end] in seconds, in order and inside the audio of {duration:.2f} s. "
            f"Got {list(words)[:3]!r:.80}."
        )
    ids = [_special_id(tokenizer, name) for name in PROMPT]
    last_frame, pairs = int(duration * FRAMES_PER_SECOND), []
    for word, start, end in words:
        if start is not None and end is not None:
            first = min(int(start * FRAMES_PER_SECOND), last_frame - 1)
            pairs.append(
                [len(ids) - 1, list(range(first, max(first + 1, min(int(end * FRAMES_PER_SECOND), last_frame))))]
            )
        ids += tokenizer.encode(f" {word}", add_special_tokens=False)
    ids.append(_special_id(tokenizer, "<|endoftext|>"))
    inputs = {"input_features": log_mel(samples, model), "decoder_input_ids": torch.tensor([ids], device="cpu")}
    return {"inputs": inputs, "unit": "frame", "pairs": pairs, "candidates": list(range(last_frame))}


def log_mel(samples: np.ndarray, model: AttachedModel) -> Tensor:
    """Return the log-mel features of audio, (1, mels, frames)."""
    from transformers import WhisperFeatureExtractor

    extractor: Any = WhisperFeatureExtractor(feature_size=model.model.config.num_mel_bins)
    return extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features


def _special_id(tokenizer: Tokenizer, name: str) -> int:
    token_id = tokenizer.backend.token_to_id(name)
    if token_id is None:
        raise UnsupportedModelError(f"the tokenizer has no token {name}. Use the tokenizer of a multilingual Whisper.")
    return token_id


def write_alignment_heads(heads: Sequence[str], folder: str | Path) -> Path:
    """Write heads as `alignment_heads` into generation_config.json of a folder, so that transformers uses them for times.

    Args:
        heads: Cross-attention heads such as "cross.3.1".
        folder: Folder of the model. Other settings of the file stay.
    """
    addresses = [Address.parse(head) for head in heads]
    if not addresses or any(address.stack != "cross" for address in addresses):
        raise ArgumentError(f"heads: must be cross-attention heads such as cross.3.1. Got {list(heads)!r:.80}.")
    check_generation_config_folder(folder)
    path = Path(folder) / "generation_config.json"
    config = read_json(path) if path.is_file() else {}
    config["alignment_heads"] = [[address.layer, address.head] for address in addresses]
    return write_atomic(path, (json.dumps(config, indent=2) + "\n").encode())


def check_generation_config_folder(folder: str | Path) -> None:
    """Raise if `folder` is not a folder whose generation_config.json can be read."""
    path = Path(folder)
    if not path.is_dir():
        raise ArgumentError(
            f"alignment_heads: {path} is not a folder. Give the folder of the model, with generation_config.json."
        )
    if (path / "generation_config.json").is_file():
        read_json(path / "generation_config.json")


def convert_audio_example(model: Any, item: dict[str, Any], where: str) -> dict[str, Any]:
    """Return an example with the fields `audio` (a wav file) and `times` ([word, start, end], …) as decoder inputs."""
    times = item.get("times")
    if not isinstance(times, list) or not all(isinstance(entry, list) and len(entry) == 3 for entry in times):
        raise ArgumentError(f"{where}: audio needs times=[[word, start, end], …] in seconds. Got {times!r:.60}.")
    for _, *limits in times:
        if any(isinstance(limit, bool) or not isinstance(limit, int | float | None) for limit in limits):
            raise ArgumentError(f"{where}: start and end of a word must be seconds or null. Got {limits!r:.60}.")
    if not isinstance(item["audio"], str | Path):
        raise ArgumentError(f"{where}: audio must be the path of a wav file. Got {item['audio']!r:.60}.")
    words = [(str(word), start, end) for word, start, end in times]
    own_fields = {name: value for name, value in item.items() if name not in ("audio", "times")}
    return own_fields | audio_example(model, read_audio(item["audio"], where), words, where)
