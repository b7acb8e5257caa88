"""Data of one sentence for the page: compressed attention maps, output shares of the heads, and next-token predictions.

A weight p is stored as the byte round(255·√p) and decoded as (byte/255)²; the error is at most √p/255 < 0.004. Bytes are
deflated and base64-encoded, which a browser decodes natively.
"""

import base64
import zlib
from typing import Any

import numpy as np
import torch

from headwise.analysis.recording.attention_maps import TokenGroups
from headwise.analysis.recording.batching import TextSample, tokenizer_of
from headwise.analysis.recording.read_images import InputImage, image_sample, read_image
from headwise.analysis.recording.recording import select_heads
from headwise.analysis.sentence_recording import (
    MAX_FULL_WEIGHTS,
    NextTokenPrediction,
    SentenceRecorder,
    predict_next_token,
    truncated_sample,
)
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.head import HeadPattern
from headwise.model import ModelProtocol, eval_mode


def make_sentence_data(
    model: ModelProtocol, text: Any, *, heads: HeadPattern = "*", max_tokens: int = 512
) -> dict[str, Any]:
    """Run a model on a text and return the data that the page shows, ready for JSON.

    Args:
        model: The model.
        text: A text. For a model with image input: a path, a Pillow image, or a preprocessed tensor.
        heads: Heads to include.
        max_tokens: Maximum number of tokens. A longer text is truncated.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text import Tokenizer
    >>> model = Transformer(preset("nano"))
    >>> model.tokenizer = Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "sat"])
    >>> data = make_sentence_data(model, "The cats sat")
    >>> data["tokens"], data["words"], data["word_of"]
    (['[CLS]', 'The', 'cat', 's', 'sat', '[SEP]'], ['[CLS]', 'The', 'cats', 'sat', '[SEP]'], [0, 1, 2, 2, 3, 4])
    """
    if model.image_input is not None:
        return _image_data(model, read_image(model, text), heads)
    if model.spec.kind == "encoder-decoder":
        raise UnsupportedModelError(
            "model: the page shows one text at a time, an encoder-decoder needs two. Use hw.attention_maps with source=…."
        )
    if not isinstance(text, str) or not text.strip():
        raise ArgumentError(f"text: no text to show. Got {text!r}. Pass at least one word.")
    sample = truncated_sample(model, text, max_tokens)
    selected = select_heads(heads, model.spec.head_addresses)
    with eval_mode(model), torch.no_grad():
        recorder = SentenceRecorder(selected, len(sample.ids))
        hidden = recorder.run(model, sample)
        next_token = predict_next_token(model, sample.ids, hidden)
    num_tokens = len(tokenizer_of(model).encode(text))
    return {
        "text": sample.alignment.text,
        "truncated_from": num_tokens if num_tokens > len(sample.ids) else None,
        **_token_data(sample),
        "heads": [str(address) for address in selected],
        **pack_maps(recorder),
        "next": _next_token_data(next_token),
    }


def _image_data(model: ModelProtocol, image: InputImage, heads: HeadPattern) -> dict[str, Any]:
    """Return the data of an image: its tokens are patches, and the image is included as PNG."""
    grid, selected = image.grid, select_heads(heads, model.spec.head_addresses)
    sample = image_sample(0, image)
    with eval_mode(model), torch.no_grad():
        recorder = SentenceRecorder(
            selected, len(grid), 2 * MAX_FULL_WEIGHTS
        )  # full maps: the largest weights of each row are not enough to draw over an image
        recorder.run(model, sample)
    names = list(grid.token_names)
    image_fields = {"png": base64.b64encode(image.png()).decode(), "rows": grid.rows, "columns": grid.columns}
    return {
        "text": image.name, "truncated_from": None, "tokens": names, "words": names, "word_of": list(range(len(names))),
        "special": [patch < 0 for patch in grid.patch_of_token], "heads": [str(address) for address in selected],
        **pack_maps(recorder),
        "next": None, "image": {**image_fields, "cells": list(grid.patch_of_token)},
    }  # fmt: skip


def _token_data(sample: TextSample) -> dict[str, Any]:
    by_token, by_word = (TokenGroups.of(sample.alignment, words) for words in (False, True))
    word_of = {token: index for index, token_ids in enumerate(by_word.tokens) for token in token_ids}
    return {
        "tokens": list(by_token.labels),
        "special": list(by_token.special),
        "words": list(by_word.labels),
        "word_of": [word_of[token] for token in range(len(sample.ids))],
    }


def pack_maps(recorder: SentenceRecorder) -> dict[str, Any]:
    """Pack the recorded arrays as bytes, in the order of the heads."""
    stacked = recorder.stacked()
    data: dict[str, Any] = {
        "form": "full" if recorder.is_full else "edges",
        "shares": compress_to_base64(np.rint(stacked["shares"].clip(0, 1) * 255).astype(np.uint8)),
        "norms": _pack_relative_to_max(stacked["norms"]),
    }
    if recorder.is_full:
        return {**data, "maps": compress_to_base64(to_sqrt_bytes(stacked["maps"]))}
    return {
        **data,
        "thumb": stacked["thumbs"].shape[-1],
        "thumbs": compress_to_base64(to_sqrt_bytes(stacked["thumbs"])),
        "per_row": stacked["columns"].shape[-1],
        "columns": pack_uint16(np.where(stacked["weights"] > 0, stacked["columns"], 0)),
        "weights": compress_to_base64(to_sqrt_bytes(stacked["weights"])),
        "totals": _pack_relative_to_max(stacked["totals"]),
    }


def to_sqrt_bytes(weights: np.ndarray) -> np.ndarray:
    """Encode weights as bytes on a square-root scale.

    >>> to_sqrt_bytes(np.array([0.0, 0.25, 1.0])).tolist()
    [0, 128, 255]
    """
    return np.rint(np.sqrt(weights.clip(0, 1)) * 255).astype(np.uint8)


def compress_to_base64(values: np.ndarray) -> str:
    """Deflate bytes and encode them in base64."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(values).tobytes(), 9)).decode()


def pack_uint16(values: np.ndarray) -> str:
    """Pack integers below 65,536 as two bytes each: all low bytes, then all high bytes, which compress well.

    >>> list(zlib.decompress(base64.b64decode(pack_uint16(np.array([1, 258])))))
    [1, 2, 0, 1]
    """
    return compress_to_base64(values.astype("<u2").reshape(-1, 1).view(np.uint8).T)


def _pack_relative_to_max(values: np.ndarray) -> dict[str, Any]:
    """Encode norms, (heads, n), as two bytes each, relative to the largest norm of the head."""
    largest = values.max(1)
    scaled = values / np.where(largest > 0, largest, 1.0)[:, None]
    return {"top": [float(f"{x:.6g}") for x in largest], "data": pack_uint16(np.rint(scaled * 65535))}


def _next_token_data(next_token: NextTokenPrediction | None) -> dict[str, Any] | None:
    """Return the most probable next tokens, and the direct contribution of each head to the logit of the first, if known."""
    if next_token is None:
        return None
    data: dict[str, Any] = {"likely": [list(pair) for pair in next_token.probable], "shares": None}
    parts = next_token.parts
    if parts is None:
        return data
    other_parts = {"embedding": parts.embedding, "MLPs": sum(parts.mlps.values()), "biases": parts.biases}
    return {**data, "shares": parts.heads, "other_parts": other_parts, "logit": parts.logit}
