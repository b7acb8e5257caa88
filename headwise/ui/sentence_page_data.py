"""One sentence as the page shows it: every head's map in a few bytes, what each head wrote, and the next word.

A weight p is kept as round(255·√p), one byte, and read back as (byte/255)²: it is off by at most √p/255, so by less than
0.004 anywhere and by less where weights are small. Where all maps together are too large, each head keeps a thumbnail and the
strongest weights of every row. Bytes are deflated and written in base64, which a browser reads without help.
"""

import base64
import zlib
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from headwise.analysis.attribution.logit_attribution import logit_attribution
from headwise.analysis.recording.attention_maps import TokenGroups
from headwise.analysis.recording.batching import TextSample, forward_batch, make_batch, tokenizer_of
from headwise.analysis.recording.input_image import InputImage, image_sample, read_image
from headwise.analysis.recording.recording import select_heads
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.errors import HeadwiseError
from headwise.heads.head import HeadPattern
from headwise.heads.hook_point import AttentionCall
from headwise.heads.per_head_output import PerHeadOutput
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import Address

MAX_FULL_WEIGHTS = 1 << 22  # weights of all maps together, up to which they are kept whole: 12 × 12 heads at 170 tokens
THUMBNAIL_SIZE, EDGES_PER_ROW, MIN_EDGE_WEIGHT = (
    32,
    3,
    0.02,
)  # beyond: thumbnails of so many pixels, so many weights a row, none fainter than this
TOP_TOKENS = 10  # next words told


def make_sentence_data(
    model: ModelProtocol, text: Any, *, heads: HeadPattern = "*", max_tokens: int = 512
) -> dict[str, Any]:
    """Run a model once on a text and keep what the page shows of it, ready for JSON. A longer text is cut. Of a model that
    reads pixels `text` is a picture: a path, a Pillow image, or a tensor that is ready for it.

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
        raise HeadwiseError(
            "the page reads one text at a time; an encoder-decoder needs two. Use hw.attention_maps with source=…."
        )
    if not isinstance(text, str) or not text.strip():
        raise HeadwiseError(f"there is no text to look at, got {text!r}; give at least one word.")
    sample = _truncate(model, text, max_tokens)
    selected = select_heads(heads, model.spec.head_addresses)
    with eval_mode(model), torch.no_grad():
        packed_maps = PackedMaps(selected, len(sample.ids))
        hidden = packed_maps.run(model, sample)
        next_tokens = _next_token_data(model, list(sample.ids), hidden)
    num_tokens = len(tokenizer_of(model).encode(text))
    return {
        "text": sample.alignment.text,
        "truncated_from": num_tokens if num_tokens > len(sample.ids) else None,
        **_token_data(sample),
        "heads": [str(address) for address in selected],
        **packed_maps.to_dict(),
        "next": next_tokens,
    }


def _image_data(model: ModelProtocol, image: InputImage, heads: HeadPattern) -> dict[str, Any]:
    """The same of a picture: its tokens are patches, and the picture comes along."""
    grid, selected = image.grid, select_heads(heads, model.spec.head_addresses)
    sample = image_sample(0, image)
    with eval_mode(model), torch.no_grad():
        packed_maps = PackedMaps(
            selected, len(grid), 2 * MAX_FULL_WEIGHTS
        )  # a few strong weights of a row are no picture
        packed_maps.run(model, sample)
    names = list(grid.token_names)
    image_fields = {"png": base64.b64encode(image.png()).decode(), "rows": grid.rows, "columns": grid.columns}
    return {
        "text": image.name, "truncated_from": None, "tokens": names, "words": names, "word_of": list(range(len(names))),
        "special": [patch < 0 for patch in grid.patch_of_token], "heads": [str(address) for address in selected],
        **packed_maps.to_dict(),
        "next": None, "image": {**image_fields, "cells": list(grid.patch_of_token)},
    }  # fmt: skip


def _truncate(model: ModelProtocol, text: str, max_tokens: int) -> TextSample:
    """The text as a unit, what the tokenizer puts around it included; the beginning of it where it is long."""
    max_length = min(max_tokens, model.spec.context) if model.spec.positions == "learned" else max_tokens
    return next(iter(TokenizedCorpus.of(model, [text], max_length)))


def _token_data(sample: TextSample) -> dict[str, Any]:
    by_token, by_word = (TokenGroups.of(sample.alignment, words) for words in (False, True))
    word_of = {token: index for index, token_ids in enumerate(by_word.tokens) for token in token_ids}
    return {
        "tokens": list(by_token.labels),
        "special": list(by_token.special),
        "words": list(by_word.labels),
        "word_of": [word_of[token] for token in range(len(sample.ids))],
    }


class PackedMaps:
    """What some heads did on one text, taken layer by layer and packed into bytes at the end."""

    def __init__(self, selected: tuple[Address, ...], tokens: int, max_weights: int | None = None) -> None:
        self.selected, self.tokens = selected, tokens
        self.is_full = len(selected) * tokens * tokens <= (MAX_FULL_WEIGHTS if max_weights is None else max_weights)
        self.arrays: dict[str, dict[Address, np.ndarray]] = {}

    def run(self, model: ModelProtocol, sample: TextSample) -> Any:
        """One pass of a model; gives the final hidden states, or of pictures its own output."""
        with ExitStack() as stack:
            for hook_point in model.gathered_hook_points():
                stack.enter_context(hook_point.listen(self.on_call))
            return forward_batch(model, make_batch([sample], device=model.device))

    def on_call(self, call: AttentionCall) -> None:
        """One layer's call."""
        indices = [i for i, address in enumerate(call.hook_point.head_addresses) if address in self.selected]
        if not indices:
            return
        v = call.v[0, list(call.params.kv_of_head)][indices].float()  # (h, S, e)
        value_norms = PerHeadOutput(v[None], call.hook_point.W_O[indices].float(), None).head_norms()[
            0
        ]  # ‖v_j W_O‖: (h, S)
        output_norms = PerHeadOutput(call.z.float(), call.hook_point.W_O.float(), None).head_norms()[0]  # (H, T)
        total = output_norms.sum(0)  # (T,)
        fractions = (output_norms / total.where(total > 0, 1.0))[indices]  # (h, T)
        self.add_layer(
            [call.hook_point.head_addresses[i] for i in indices],
            call.maps()[0, indices].float(),
            value_norms,
            fractions,
        )

    def add_layer(self, addresses: list[Address], maps: Tensor, value_norms: Tensor, fractions: Tensor) -> None:
        """Maps (h, T, S), lengths of what is fetched (h, S), shares of what is written (h, T)."""
        arrays = {"norms": value_norms, "shares": fractions}
        if self.is_full:
            arrays["maps"] = maps
        else:
            arrays["thumbs"] = adaptive_max_pool2d(maps[None], min(THUMBNAIL_SIZE, self.tokens))[0]  # (h, 32, 32)
            weights, columns = maps.topk(min(EDGES_PER_ROW, maps.shape[-1]), dim=-1)  # (h, T, k)
            arrays |= {"weights": weights.where(weights >= MIN_EDGE_WEIGHT, 0.0), "columns": columns}
            arrays["totals"] = (maps @ value_norms[..., None])[..., 0]  # Σ_j p_ij ‖v_j W_O‖: (h, T)
        for name, values in arrays.items():
            stored = self.arrays.setdefault(name, {})
            stored.update(zip(addresses, values.cpu().numpy(), strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Every head's bytes in the order of the heads."""
        stacked = {
            name: np.stack([by_address[address] for address in self.selected])
            for name, by_address in self.arrays.items()
        }
        data: dict[str, Any] = {
            "form": "full" if self.is_full else "edges",
            "shares": pack_bytes(np.rint(stacked["shares"].clip(0, 1) * 255).astype(np.uint8)),
            "norms": _scale_by_max(stacked["norms"]),
        }
        if self.is_full:
            return {**data, "maps": pack_bytes(to_sqrt_bytes(stacked["maps"]))}
        return {
            **data,
            "thumb": stacked["thumbs"].shape[-1],
            "thumbs": pack_bytes(to_sqrt_bytes(stacked["thumbs"])),
            "per_row": stacked["columns"].shape[-1],
            "columns": pack_uint16(np.where(stacked["weights"] > 0, stacked["columns"], 0)),
            "weights": pack_bytes(to_sqrt_bytes(stacked["weights"])),
            "totals": _scale_by_max(stacked["totals"]),
        }


def to_sqrt_bytes(weights: np.ndarray) -> np.ndarray:
    """Weights as bytes, on a scale of square roots.

    >>> to_sqrt_bytes(np.array([0.0, 0.25, 1.0])).tolist()
    [0, 128, 255]
    """
    return np.rint(np.sqrt(weights.clip(0, 1)) * 255).astype(np.uint8)


def pack_bytes(values: np.ndarray) -> str:
    """Bytes, deflated, in base64."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(values).tobytes(), 9)).decode()


def pack_uint16(values: np.ndarray) -> str:
    """Whole numbers below 65,536 in two bytes each: all low bytes, then all high ones, which are alike and deflate well.

    >>> list(zlib.decompress(base64.b64decode(pack_uint16(np.array([1, 258])))))
    [1, 2, 0, 1]
    """
    return pack_bytes(values.astype("<u2").reshape(-1, 1).view(np.uint8).T)


def _scale_by_max(values: np.ndarray) -> dict[str, Any]:
    """Lengths in two bytes each, against the largest of their head: (heads, n)."""
    largest = values.max(1)
    scaled = values / np.where(largest > 0, largest, 1.0)[:, None]
    return {"top": [float(f"{x:.6g}") for x in largest], "data": pack_uint16(np.rint(scaled * 65535))}


def _next_token_data(model: ModelProtocol, ids: list[int], hidden: Tensor) -> dict[str, Any] | None:
    """The likeliest next words, and what each head adds to the logit of the first of them, where that can be told."""
    if model.output is None or model.spec.output != "lm":
        return None
    best = torch.softmax(model.output(hidden[:, -1:])[0, -1].double(), -1).topk(min(TOP_TOKENS, model.spec.vocab))
    words = [_token_text(model, i) for i in best.indices.tolist()]
    data: dict[str, Any] = {
        "likely": [list(pair) for pair in zip(words, best.values.tolist(), strict=True)],
        "shares": None,
    }
    try:
        parts = logit_attribution(model, ids, int(best.indices[0]))
    except HeadwiseError:  # a post-norm model, or one whose parts are not known: there is no sum to share out
        return data
    other_parts = {"embedding": parts.embedding, "MLPs": sum(parts.mlps.values()), "biases": parts.biases}
    return {**data, "shares": parts.heads, "other_parts": other_parts, "logit": parts.logit}


def _token_text(model: ModelProtocol, token_id: int) -> str:
    """A token as it would be written, or its number if the vocabulary is longer than the tokenizer."""
    tokenizer = tokenizer_of(model)
    return (
        tokenizer.backend.decode([token_id], skip_special_tokens=False) if token_id < len(tokenizer) else f"#{token_id}"
    )
