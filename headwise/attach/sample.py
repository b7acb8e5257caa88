"""A few tokens, pixels or sounds: what somebody else's model is called with to find out how it is put together."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

TEXTS, TOKENS = 2, 6
SOUND = 64  # frames, or 64 times as many samples
PICTURE = 32  # pixels a side, where a configuration does not say


def samples(model: Any) -> Iterator[dict[str, Tensor]]:
    """Keyword arguments of a call, one guess after another: what the model says it reads first, alone or with another."""
    takes = inspect.signature(model.forward).parameters
    told = getattr(model, "main_input_name", None) or "input_ids"
    there = [name for name in dict.fromkeys((told, *MAKERS)) if name in takes and name in MAKERS]
    for names in [(name,) for name in there] + [(there[0], other) for other in there[1:]]:
        try:
            yield _together(model, names, takes)
        except (AttributeError, NotImplementedError, TypeError):  # the configuration does not say how large
            continue


def _together(model: Any, names: tuple[str, ...], takes: Any) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(0)
    given = {name: MAKERS[name](model, dice) for name in names}
    if "decoder_input_ids" in takes and getattr(model.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = _ids(model, dice)
    if "bbox" in takes:
        given["bbox"] = torch.zeros(TEXTS, TOKENS, 4, dtype=torch.long)
    like = next(model.parameters())
    return {
        name: value.to(like.device, like.dtype) if value.is_floating_point() else value.to(like.device)
        for name, value in given.items()
    }


def _ids(model: Any, dice: torch.Generator) -> Tensor:
    """(B, T): no special tokens, as far as the configuration names them."""
    config = model.config.get_text_config(decoder=True)
    told = getattr(config, "vocab_size", None)
    vocab = told if isinstance(told, int) else len(model.get_input_embeddings().weight)
    special = {value for name, value in _fields(model.config) if "token_i" in name and isinstance(value, int)}
    usual = torch.tensor([token for token in range(min(vocab, 4096)) if token not in special])
    return usual[torch.randint(len(usual), (TEXTS, TOKENS), generator=dice)]


def _fields(config: Any) -> list[tuple[str, Any]]:
    """Names and values of a configuration, and of those inside it."""
    found = []
    for name, value in vars(config).items():
        found += _fields(value) if hasattr(value, "to_dict") else [(name, value)]
    return found


def _pixels(model: Any, dice: torch.Generator, frames: bool = False) -> Tensor:
    """(B, C, height, width), or (B, frames, C, height, width)."""
    told = dict(reversed(_fields(model.config)))
    size = told.get("image_size", told.get("input_size", PICTURE))
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = told.get("num_channels", told.get("in_channels", 3))
    shape = (TEXTS, channels if isinstance(channels, int) else 3, height, width)
    many = told.get("num_frames", told.get("frames_per_clip", 4))
    return torch.randn((TEXTS, many, *shape[1:]) if frames else shape, generator=dice)


def _features(model: Any, dice: torch.Generator) -> Tensor:
    """(B, bins, frames), as Whisper reads them, or (B, frames, bins)."""
    told = dict(reversed(_fields(model.config)))
    names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_size", "input_dim", "num_features")
    bins = next((told[name] for name in names if isinstance(told.get(name), int)), 80)
    long = told.get("max_source_positions")
    if isinstance(long, int) and any(isinstance(part, torch.nn.Conv1d) for part in model.modules()):
        return torch.randn(TEXTS, bins, 2 * long, generator=dice)
    return torch.randn(TEXTS, SOUND, bins, generator=dice)


def _samples_of_sound(model: Any, dice: torch.Generator) -> Tensor:
    """(B, samples)"""
    return torch.randn(TEXTS, SOUND * 64, generator=dice)


def _states(model: Any, dice: torch.Generator) -> Tensor:
    """(B, T, D)"""
    return torch.randn(TEXTS, TOKENS, int(model.config.hidden_size), generator=dice)


MAKERS: dict[str, Callable[[Any, torch.Generator], Tensor]] = {
    "input_ids": _ids, "pixel_values": _pixels, "pixel_values_videos": partial(_pixels, frames=True),
    "input_features": _features, "input_values": _samples_of_sound, "audio_values": _samples_of_sound,
    "inputs_embeds": _states, "hidden_states": _states, "decoder_input_ids": _ids,
}  # fmt: skip
