"""Dummy inputs (tokens, pixels or audio) for test calls of a transformers model whose input format is unknown."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.attached.discover import CROSS_ATTENTION_NAMES

BATCH_SIZE, SEQUENCE_LENGTH = 2, 6
NUM_ENCODER_STATES = 5  # number of encoder states for the cross-attention of a standalone decoder
# Configuration fields that give the width of the encoder states.
ENCODER_WIDTH_FIELDS = ("cross_attention_hidden_size", "encoder_hidden_size", "d_model", "hidden_size")
AUDIO_FRAMES = 64  # number of frames; waveforms have 64 samples per frame
PATCH_VARIANTS = 4  # number of formats for images given as rows of patches
DEFAULT_IMAGE_SIZE = 32  # height and width in pixels if the configuration gives none


def dummy_input_candidates(model: Any) -> Iterator[dict[str, Tensor]]:
    """Yield keyword arguments for test calls: first the model's main input, then required and other inputs."""
    parameters = inspect.signature(model.forward).parameters
    main_input = getattr(model, "main_input_name", None)
    main_input = main_input if isinstance(main_input, str) and main_input else "input_ids"
    supported = [
        name for name in dict.fromkeys((main_input, *INPUT_MAKERS)) if name in parameters and name in INPUT_MAKERS
    ]
    required = [name for name in supported if parameters[name].default is inspect.Parameter.empty]
    guesses = [(name,) for name in supported] + [(supported[0], other) for other in supported[1:]]
    guesses += [("input_ids", "pixel_values")] if {"input_ids", "pixel_values"} <= set(supported) else []
    has_cross_attention = "encoder_hidden_states" in parameters and _has_cross_attention(model)
    attempts = list(dict.fromkeys(tuple(dict.fromkeys((*names, *required))) for names in guesses))
    for names, with_encoder_states in [
        (names, with_encoder_states)
        for with_encoder_states in (True, False)[1 - has_cross_attention :]
        for names in attempts
    ]:
        for variant in range(
            PATCH_VARIANTS if "grid_thw" in parameters else max(len(INPUT_MAKERS[name]) for name in names)
        ):
            try:
                yield _make_inputs(model, names, parameters, variant, with_encoder_states=with_encoder_states)
            except (AttributeError, NotImplementedError, TypeError, KeyError):
                continue  # the configuration lacks a size


def _has_cross_attention(model: Any) -> bool:
    """Return whether the model is a standalone decoder with cross-attention to external states."""
    return any(name.rpartition(".")[2] in CROSS_ATTENTION_NAMES for name, _ in model.named_modules())


def _make_inputs(
    model: Any, names: tuple[str, ...], parameters: Any, variant: int, *, with_encoder_states: bool
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = {name: INPUT_MAKERS[name][variant % len(INPUT_MAKERS[name])](model, generator) for name in names}
    if "decoder_input_ids" in parameters and getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = _token_ids(model, generator)
    if with_encoder_states:
        inputs["encoder_hidden_states"] = torch.randn(
            BATCH_SIZE, NUM_ENCODER_STATES, _encoder_width(model.config), generator=generator, device="cpu"
        )
    if "bbox" in parameters:
        inputs["bbox"] = torch.zeros(BATCH_SIZE, SEQUENCE_LENGTH, 4, dtype=torch.long, device="cpu")
    for name in MASK_NAMES:
        masked_input = next((inputs[input_name] for input_name in MASKED_INPUT_NAMES if input_name in inputs), None)
        if (
            name in parameters
            and masked_input is not None
            and (name != "attention_mask" or parameters[name].default is not None)
        ):
            frames = (
                max(masked_input.shape[1:])
                if masked_input.ndim == 3 and "features" in name
                else masked_input.shape[1]
                if masked_input.ndim > 1
                else 1
            )
            inputs[name] = torch.ones(BATCH_SIZE, frames, dtype=torch.long, device="cpu")
    if "grid_thw" in parameters or "spatial_shapes" in parameters:
        inputs |= {
            name: value for name, value in _patches(model, generator, parameters, variant).items() if name in parameters
        }
    reference = next(model.parameters())
    return {
        name: value.to(reference.device, reference.dtype) if value.is_floating_point() else value.to(reference.device)
        for name, value in inputs.items()
    }


def _encoder_width(config: Any) -> int:
    """Return the width of the encoder states that a decoder reads. GPT-2 has `hidden_size` only as an alias of `n_embd`."""
    fields = dict(reversed(_config_items(config)))
    for name in ENCODER_WIDTH_FIELDS:
        width = fields.get(name, getattr(config, name, None))
        if isinstance(width, int):
            return width
    raise KeyError(", ".join(ENCODER_WIDTH_FIELDS))


def _patches(model: Any, generator: torch.Generator, parameters: Any, variant: int) -> dict[str, Tensor]:
    """Return images as rows of 4 × 4 patches, and the tensors that describe the grid."""
    config_values = dict(reversed(_config_items(model.config)))
    size = config_values["patch_size"]
    channels = next(
        (config_values[name] for name in ("in_channels", "num_channels", "in_chans") if name in config_values), 3
    )
    temporal_size = config_values.get("temporal_patch_size", 1) if variant == 0 else 2 if variant == 3 else 1
    patch_values = channels * temporal_size * size * size
    shapes = torch.tensor([[4, 4]] * BATCH_SIZE, device="cpu")
    if "spatial_shapes" in parameters:
        mask = torch.ones(BATCH_SIZE, 16, dtype=torch.long, device="cpu")
        rows = torch.randn(BATCH_SIZE, 16, patch_values, generator=generator, device="cpu")
        return {"pixel_values": rows, "spatial_shapes": shapes, "pixel_attention_mask": mask}
    rows = torch.randn(BATCH_SIZE * 16, patch_values, generator=generator, device="cpu")
    if variant == 2:
        rows = rows.reshape(BATCH_SIZE * 16, channels, size, size)
    names = [name for name in ("hidden_states", "pixel_values", "pixel_values_videos") if name in parameters]
    if not names:
        raise KeyError(
            "model: it has no input hidden_states, pixel_values or pixel_values_videos, so patches cannot be passed to it"
        )
    grid = torch.cat((torch.ones(BATCH_SIZE, 1, dtype=torch.long, device="cpu"), shapes), 1)
    return {names[0]: rows, "grid_thw": grid, "merge_sizes": torch.full((BATCH_SIZE,), 2, device="cpu")}


def _token_ids(model: Any, generator: torch.Generator) -> Tensor:
    """Return token ids (B, T) without the special tokens named in the configuration."""
    config = model.config.get_text_config(decoder=True)
    config_vocab = getattr(config, "vocab_size", None)
    vocab = config_vocab if isinstance(config_vocab, int) else len(model.get_input_embeddings().weight)
    special = {value for name, value in _config_items(model.config) if "token_i" in name and isinstance(value, int)}
    ordinary_ids = torch.tensor([token for token in range(min(vocab, 4096)) if token not in special], device="cpu")
    return ordinary_ids[
        torch.randint(len(ordinary_ids), (BATCH_SIZE, SEQUENCE_LENGTH), generator=generator, device="cpu")
    ]


def _config_items(config: Any) -> list[tuple[str, Any]]:
    """Return the names and values of a configuration and its sub-configurations."""
    items = []
    for name, value in vars(config).items():
        items += _config_items(value) if hasattr(value, "to_dict") else [(name, value)]
    return items


def _pixels(model: Any, generator: torch.Generator, frames: bool = False, pair: bool = False) -> Tensor:
    """Return pixels (B, C, height, width), video (B, frames, C, height, width), or pairs of images."""
    config_values = dict(reversed(_config_items(model.config)))
    size = config_values.get("image_size") or config_values.get("input_size") or DEFAULT_IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = config_values.get("num_channels", config_values.get("in_channels", 3))
    shape = (BATCH_SIZE, channels if isinstance(channels, int) else 3, height, width)
    num_frames = 2 if pair else config_values.get("num_frames", config_values.get("frames_per_clip", 4))
    return torch.randn((BATCH_SIZE, num_frames, *shape[1:]) if frames else shape, generator=generator, device="cpu")


def _features(model: Any, generator: torch.Generator, transposed: bool = False, bins_index: int = 0) -> Tensor:
    """Return audio features (B, bins, frames), as for Whisper, or (B, frames, bins)."""
    config_values = dict(reversed(_config_items(model.config)))
    names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_size", "input_dim", "num_features",
             "feature_projection_input_dim", "in_channels")  # fmt: skip
    bin_counts = list(
        dict.fromkeys(config_values[name] for name in names if isinstance(config_values.get(name), int))
    ) or [80]
    bins = bin_counts[min(bins_index, len(bin_counts) - 1)]
    max_positions = config_values.get("max_source_positions")
    frames = 2 * max_positions if isinstance(max_positions, int) else AUDIO_FRAMES
    is_whisper_like = isinstance(max_positions, int) and any(
        isinstance(module, torch.nn.Conv1d) for module in model.modules()
    )
    if is_whisper_like != transposed:
        return torch.randn(BATCH_SIZE, bins, frames, generator=generator, device="cpu")
    return torch.randn(BATCH_SIZE, frames if is_whisper_like else AUDIO_FRAMES, bins, generator=generator, device="cpu")


def _spectrogram_image(model: Any, generator: torch.Generator) -> Tensor:
    """Return a spectrogram (B, 1, frames, bins)."""
    return _features(model, generator)[:, None]


def _spectrogram(model: Any, generator: torch.Generator) -> Tensor:
    """Return a spectrogram (B, frames, bins) of the configured length."""
    config_values = dict(reversed(_config_items(model.config)))
    return torch.randn(
        BATCH_SIZE,
        int(config_values["max_length"]),
        int(config_values["num_mel_bins"]),
        generator=generator,
        device="cpu",
    )


def _waveform(model: Any, generator: torch.Generator, channel: bool = False) -> Tensor:
    """Return a waveform (B, samples) or (B, 1, samples)."""
    waveform = torch.randn(BATCH_SIZE, AUDIO_FRAMES * 64, generator=generator, device="cpu")
    return waveform[:, None] if channel else waveform


def _states(model: Any, generator: torch.Generator, frames: int = SEQUENCE_LENGTH) -> Tensor:
    """Return hidden states (B, T, D)."""
    return torch.randn(BATCH_SIZE, frames, int(model.config.hidden_size), generator=generator, device="cpu")


def _past_time_series(model: Any, generator: torch.Generator) -> Tensor:
    """Return a time series (B, T, channels)."""
    config_values = dict(reversed(_config_items(model.config)))
    channels = config_values.get("num_input_channels", 1)
    return torch.randn(
        BATCH_SIZE,
        int(config_values.get("context_length", AUDIO_FRAMES)),
        int(channels),
        generator=generator,
        device="cpu",
    )


# Functions that create each input, the most common format first.
INPUT_MAKERS: dict[str, tuple[Callable[[Any, torch.Generator], Tensor], ...]] = {
    "input_ids": (_token_ids,),
    "pixel_values": (_pixels, partial(_pixels, frames=True), partial(_pixels, frames=True, pair=True)),
    "pixel_values_videos": (partial(_pixels, frames=True),),
    "input_features": (_features, partial(_features, transposed=True), partial(_features, bins_index=1),
                       partial(_features, bins_index=1, transposed=True), _spectrogram_image),
    "input_values": (_waveform, partial(_waveform, channel=True), _spectrogram),
    "audio_values": (_waveform, partial(_waveform, channel=True)),
    "inputs_embeds": (_states,), "hidden_states": (_states,), "query_embeds": (_states,), "past_values": (_past_time_series,),
    "decoder_input_ids": (_token_ids,), "qformer_input_ids": (_token_ids,),
}  # fmt: skip
# Masks of inputs; dummy masks are all ones.
MASK_NAMES = ("input_features_mask", "attention_mask")
MASKED_INPUT_NAMES = ("input_features", "input_values", "input_ids")
