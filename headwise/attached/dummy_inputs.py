"""A few tokens, pixels or sounds: what somebody else's model is called with to find out how it is put together."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.attached.discover import CROSS

TEXTS, TOKENS = 2, 6
ACROSS = 5  # states that a decoder by itself looks across at
WIDTHS = ("cross_attention_hidden_size", "encoder_hidden_size", "d_model", "hidden_size")  # of these, as it is told
SOUND = 64  # frames, or 64 times as many samples
PATCHES = 4  # ways in which pictures are read as rows of patches
PICTURE = 32  # pixels a side, where a configuration does not say


def samples(model: Any) -> Iterator[dict[str, Tensor]]:
    """Keyword arguments of a call, one guess after another: what the model says it reads, what it must be given, others."""
    takes = inspect.signature(model.forward).parameters
    told = getattr(model, "main_input_name", None)
    told = told if isinstance(told, str) and told else "input_ids"
    there = [name for name in dict.fromkeys((told, *MAKERS)) if name in takes and name in MAKERS]
    needed = [name for name in there if takes[name].default is inspect.Parameter.empty]
    guesses = [(name,) for name in there] + [(there[0], other) for other in there[1:]]
    guesses += [("input_ids", "pixel_values")] if {"input_ids", "pixel_values"} <= set(there) else []
    across = "encoder_hidden_states" in takes and _looks_across(model)
    tries = list(dict.fromkeys(tuple(dict.fromkeys((*names, *needed))) for names in guesses))
    for names, states in [(names, states) for states in (True, False)[1 - across :] for names in tries]:
        for way in range(PATCHES if "grid_thw" in takes else max(len(MAKERS[name]) for name in names)):
            try:
                yield _together(model, names, takes, way, states)
            except (
                AttributeError,
                NotImplementedError,
                TypeError,
                KeyError,
            ):  # the configuration does not say how large
                continue


def _looks_across(model: Any) -> bool:
    """Whether it is a decoder by itself, which looks across at what it is given from outside."""
    return any(name.rpartition(".")[2] in CROSS for name, _ in model.named_modules())


def _together(model: Any, names: tuple[str, ...], takes: Any, way: int, across: bool) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(0)
    given = {name: MAKERS[name][way % len(MAKERS[name])](model, dice) for name in names}
    if "decoder_input_ids" in takes and getattr(model.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = _ids(model, dice)
    if across:
        given["encoder_hidden_states"] = torch.randn(TEXTS, ACROSS, _encoder_width(model.config), generator=dice)
    if "bbox" in takes:
        given["bbox"] = torch.zeros(TEXTS, TOKENS, 4, dtype=torch.long)
    for name in MASKS:
        of = next((given[read] for read in INPUTS if read in given), None)
        if name in takes and of is not None and (name != "attention_mask" or takes[name].default is not None):
            frames = max(of.shape[1:]) if of.ndim == 3 and "features" in name else of.shape[1] if of.ndim > 1 else 1
            given[name] = torch.ones(TEXTS, frames, dtype=torch.long)
    if "grid_thw" in takes or "spatial_shapes" in takes:
        given |= {name: value for name, value in _patches(model, dice, takes, way).items() if name in takes}
    like = next(model.parameters())
    return {
        name: value.to(like.device, like.dtype) if value.is_floating_point() else value.to(like.device)
        for name, value in given.items()
    }


def _encoder_width(config: Any) -> int:
    """Width of the encoder states that a decoder reads; GPT-2 knows `hidden_size` only as another name of `n_embd`."""
    fields = dict(reversed(_fields(config)))
    for name in WIDTHS:
        width = fields.get(name, getattr(config, name, None))
        if isinstance(width, int):
            return width
    raise KeyError(", ".join(WIDTHS))


def _patches(model: Any, dice: torch.Generator, takes: Any, way: int) -> dict[str, Tensor]:
    """Pictures as rows of patches, four by four of them, and what says how they lie."""
    told = dict(reversed(_fields(model.config)))
    size = told["patch_size"]
    channels = next((told[name] for name in ("in_channels", "num_channels", "in_chans") if name in told), 3)
    long = told.get("temporal_patch_size", 1) if way == 0 else 2 if way == 3 else 1
    numbers = channels * long * size * size
    shapes = torch.tensor([[4, 4]] * TEXTS)
    if "spatial_shapes" in takes:
        mask = torch.ones(TEXTS, 16, dtype=torch.long)
        rows = torch.randn(TEXTS, 16, numbers, generator=dice)
        return {"pixel_values": rows, "spatial_shapes": shapes, "pixel_attention_mask": mask}
    rows = torch.randn(TEXTS * 16, numbers, generator=dice)
    if way == 2:
        rows = rows.reshape(TEXTS * 16, channels, size, size)
    names = [name for name in ("hidden_states", "pixel_values", "pixel_values_videos") if name in takes]
    if not names:
        raise KeyError("the input that holds rows of patches")
    grid = torch.cat((torch.ones(TEXTS, 1, dtype=torch.long), shapes), 1)
    return {names[0]: rows, "grid_thw": grid, "merge_sizes": torch.full((TEXTS,), 2)}


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


def _pixels(model: Any, dice: torch.Generator, frames: bool = False, pair: bool = False) -> Tensor:
    """(B, C, height, width), or (B, frames, C, height, width), or two pictures at a time."""
    told = dict(reversed(_fields(model.config)))
    size = told.get("image_size") or told.get("input_size") or PICTURE
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = told.get("num_channels", told.get("in_channels", 3))
    shape = (TEXTS, channels if isinstance(channels, int) else 3, height, width)
    many = 2 if pair else told.get("num_frames", told.get("frames_per_clip", 4))
    return torch.randn((TEXTS, many, *shape[1:]) if frames else shape, generator=dice)


def _features(model: Any, dice: torch.Generator, turned: bool = False, place: int = 0) -> Tensor:
    """(B, bins, frames), as Whisper reads them, or (B, frames, bins)."""
    told = dict(reversed(_fields(model.config)))
    names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_size", "input_dim", "num_features",
             "feature_projection_input_dim", "in_channels")  # fmt: skip
    there = list(dict.fromkeys(told[name] for name in names if isinstance(told.get(name), int))) or [80]
    bins = there[min(place, len(there) - 1)]
    long = told.get("max_source_positions")
    frames = 2 * long if isinstance(long, int) else SOUND
    whispers = isinstance(long, int) and any(isinstance(part, torch.nn.Conv1d) for part in model.modules())
    if whispers != turned:
        return torch.randn(TEXTS, bins, frames, generator=dice)
    return torch.randn(TEXTS, frames if whispers else SOUND, bins, generator=dice)


def _picture_of_sound(model: Any, dice: torch.Generator) -> Tensor:
    """(B, 1, frames, bins)"""
    return _features(model, dice)[:, None]


def _spectrum(model: Any, dice: torch.Generator) -> Tensor:
    """(B, frames, bins), as long as the configuration says."""
    told = dict(reversed(_fields(model.config)))
    return torch.randn(TEXTS, int(told["max_length"]), int(told["num_mel_bins"]), generator=dice)


def _samples_of_sound(model: Any, dice: torch.Generator, channel: bool = False) -> Tensor:
    """(B, samples), or (B, 1, samples)"""
    sound = torch.randn(TEXTS, SOUND * 64, generator=dice)
    return sound[:, None] if channel else sound


def _states(model: Any, dice: torch.Generator, frames: int = TOKENS) -> Tensor:
    """(B, T, D)"""
    return torch.randn(TEXTS, frames, int(model.config.hidden_size), generator=dice)


def _past(model: Any, dice: torch.Generator) -> Tensor:
    """(B, T, channels): what was measured so far."""
    told = dict(reversed(_fields(model.config)))
    channels = told.get("num_input_channels", 1)
    return torch.randn(TEXTS, int(told.get("context_length", SOUND)), int(channels), generator=dice)


# Ways to make what a model reads, the usual one first.
MAKERS: dict[str, tuple[Callable[[Any, torch.Generator], Tensor], ...]] = {
    "input_ids": (_ids,),
    "pixel_values": (_pixels, partial(_pixels, frames=True), partial(_pixels, frames=True, pair=True)),
    "pixel_values_videos": (partial(_pixels, frames=True),),
    "input_features": (_features, partial(_features, turned=True), partial(_features, place=1),
                       partial(_features, place=1, turned=True), _picture_of_sound),
    "input_values": (_samples_of_sound, partial(_samples_of_sound, channel=True), _spectrum),
    "audio_values": (_samples_of_sound, partial(_samples_of_sound, channel=True)),
    "inputs_embeds": (_states,), "hidden_states": (_states,), "query_embeds": (_states,), "past_values": (_past,),
    "decoder_input_ids": (_ids,), "qformer_input_ids": (_ids,),
}  # fmt: skip
# What says how much of it counts, where a model asks for it: all does.
MASKS = ("input_features_mask", "attention_mask")
INPUTS = ("input_features", "input_values", "input_ids")
