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
from headwise.analysis.recording.attention_maps import Parts
from headwise.analysis.recording.batching import Unit, make_batch, run, tokenizer_of
from headwise.analysis.recording.image import InputPicture, picture_unit, read_picture
from headwise.analysis.recording.recording import pick
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.errors import HeadwiseError
from headwise.heads.head import Pattern
from headwise.heads.hook_point import Seen
from headwise.heads.per_head_output import PerHead
from headwise.model import AnyModel, quiet
from headwise.spec import Address

WHOLE = 1 << 22  # weights of all maps together, up to which they are kept whole: 12 × 12 heads at 170 tokens
THUMB, EDGES, FAINT = 32, 3, 0.02  # beyond: thumbnails of so many pixels, so many weights a row, none fainter than this
LIKELY = 10  # next words told


def make_sentence(model: AnyModel, text: Any, *, heads: Pattern = "*", most_tokens: int = 512) -> dict[str, Any]:
    """Run a model once on a text and keep what the page shows of it, ready for JSON. A longer text is cut. Of a model that
    reads pixels `text` is a picture: a path, a Pillow image, or a tensor that is ready for it.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> from headwise.text import Tokenizer
    >>> model = Transformer(preset("nano"))
    >>> model.tokenizer = Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "sat"])
    >>> made = make_sentence(model, "The cats sat")
    >>> made["tokens"], made["words"], made["word_of"]
    (['[CLS]', 'The', 'cat', 's', 'sat', '[SEP]'], ['[CLS]', 'The', 'cats', 'sat', '[SEP]'], [0, 1, 2, 2, 3, 4])
    """
    if model.pictures is not None:
        return _make_picture(model, read_picture(model, text), heads)
    if model.spec.kind == "encoder-decoder":
        raise HeadwiseError(
            "the page reads one text at a time; an encoder-decoder needs two. Use hw.attend with source=…."
        )
    if not isinstance(text, str) or not text.strip():
        raise HeadwiseError(f"there is no text to look at, got {text!r}; give at least one word.")
    unit = _cut(model, text, most_tokens)
    chosen = pick(heads, model.spec.addresses)
    with quiet(model), torch.no_grad():
        seen = Sights(chosen, len(unit.ids))
        hidden = seen.run(model, unit)
        following = _next(model, list(unit.ids), hidden)
    whole = len(tokenizer_of(model).encode(text))
    return {
        "text": unit.alignment.text,
        "cut_from": whole if whole > len(unit.ids) else None,
        **_tokens(unit),
        "heads": [str(address) for address in chosen],
        **seen.packed(),
        "next": following,
    }


def _make_picture(model: AnyModel, picture: InputPicture, heads: Pattern) -> dict[str, Any]:
    """The same of a picture: its tokens are patches, and the picture comes along."""
    grid, chosen = picture.grid, pick(heads, model.spec.addresses)
    unit = picture_unit(0, picture)
    with quiet(model), torch.no_grad():
        seen = Sights(chosen, len(grid), 2 * WHOLE)  # a few strong weights of a row are no picture
        seen.run(model, unit)
    names = list(grid.names)
    shown = {"png": base64.b64encode(picture.png()).decode(), "rows": grid.rows, "columns": grid.columns}
    return {
        "text": picture.name, "cut_from": None, "tokens": names, "words": names, "word_of": list(range(len(names))),
        "special": [cell < 0 for cell in grid.cells], "heads": [str(address) for address in chosen], **seen.packed(),
        "next": None, "picture": {**shown, "cells": list(grid.cells)},
    }  # fmt: skip


def _cut(model: AnyModel, text: str, most: int) -> Unit:
    """The text as a unit, what the tokenizer puts around it included; the beginning of it where it is long."""
    room = min(most, model.spec.context) if model.spec.positions == "learned" else most
    return next(iter(Reading.of(model, [text], room)))


def _tokens(unit: Unit) -> dict[str, Any]:
    by_token, by_word = (Parts.of(unit.alignment, words) for words in (False, True))
    word_of = {token: number for number, places in enumerate(by_word.tokens) for token in places}
    return {
        "tokens": list(by_token.labels),
        "special": list(by_token.special),
        "words": list(by_word.labels),
        "word_of": [word_of[token] for token in range(len(unit.ids))],
    }


class Sights:
    """What some heads did on one text, taken layer by layer and packed into bytes at the end."""

    def __init__(self, chosen: tuple[Address, ...], tokens: int, most: int | None = None) -> None:
        self.chosen, self.tokens = chosen, tokens
        self.whole = len(chosen) * tokens * tokens <= (WHOLE if most is None else most)
        self.parts: dict[str, dict[Address, np.ndarray]] = {}

    def run(self, model: AnyModel, unit: Unit) -> Any:
        """One pass of a model; gives the final hidden states, or of pictures its own output."""
        with ExitStack() as listening:
            for site in model.all_sites():
                listening.enter_context(site.listen(self.hear))
            return run(model, make_batch([unit], device=model.device))

    def hear(self, seen: Seen) -> None:
        """One layer's call."""
        here = [i for i, address in enumerate(seen.site.addresses) if address in self.chosen]
        if not here:
            return
        v = seen.v[0, list(seen.terms.groups)][here].float()  # (h, S, e)
        lengths = PerHead(v[None], seen.site.W_O[here].float(), None).norms()[0]  # ‖v_j W_O‖: (h, S)
        wrote = PerHead(seen.z.float(), seen.site.W_O.float(), None).norms()[0]  # (H, T)
        total = wrote.sum(0)  # (T,)
        shares = (wrote / total.where(total > 0, 1.0))[here]  # (h, T)
        self.keep([seen.site.addresses[i] for i in here], seen.maps()[0, here].float(), lengths, shares)

    def keep(self, addresses: list[Address], maps: Tensor, lengths: Tensor, shares: Tensor) -> None:
        """Maps (h, T, S), lengths of what is fetched (h, S), shares of what is written (h, T)."""
        made = {"norms": lengths, "shares": shares}
        if self.whole:
            made["maps"] = maps
        else:
            made["thumbs"] = adaptive_max_pool2d(maps[None], min(THUMB, self.tokens))[0]  # (h, 32, 32)
            weights, columns = maps.topk(min(EDGES, maps.shape[-1]), dim=-1)  # (h, T, k)
            made |= {"weights": weights.where(weights >= FAINT, 0.0), "columns": columns}
            made["totals"] = (maps @ lengths[..., None])[..., 0]  # Σ_j p_ij ‖v_j W_O‖: (h, T)
        for name, values in made.items():
            kept = self.parts.setdefault(name, {})
            kept.update(zip(addresses, values.cpu().numpy(), strict=True))

    def packed(self) -> dict[str, Any]:
        """Every head's bytes in the order of the heads."""
        made = {name: np.stack([part[address] for address in self.chosen]) for name, part in self.parts.items()}
        told: dict[str, Any] = {
            "form": "whole" if self.whole else "edges",
            "shares": pack(np.rint(made["shares"].clip(0, 1) * 255).astype(np.uint8)),
            "norms": _against_largest(made["norms"]),
        }
        if self.whole:
            return {**told, "maps": pack(as_bytes(made["maps"]))}
        return {
            **told,
            "thumb": made["thumbs"].shape[-1],
            "thumbs": pack(as_bytes(made["thumbs"])),
            "per_row": made["columns"].shape[-1],
            "columns": pack_pairs(np.where(made["weights"] > 0, made["columns"], 0)),
            "weights": pack(as_bytes(made["weights"])),
            "totals": _against_largest(made["totals"]),
        }


def as_bytes(weights: np.ndarray) -> np.ndarray:
    """Weights as bytes, on a scale of square roots.

    >>> as_bytes(np.array([0.0, 0.25, 1.0])).tolist()
    [0, 128, 255]
    """
    return np.rint(np.sqrt(weights.clip(0, 1)) * 255).astype(np.uint8)


def pack(values: np.ndarray) -> str:
    """Bytes, deflated, in base64."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(values).tobytes(), 9)).decode()


def pack_pairs(values: np.ndarray) -> str:
    """Whole numbers below 65,536 in two bytes each: all low bytes, then all high ones, which are alike and deflate well.

    >>> list(zlib.decompress(base64.b64decode(pack_pairs(np.array([1, 258])))))
    [1, 2, 0, 1]
    """
    return pack(values.astype("<u2").reshape(-1, 1).view(np.uint8).T)


def _against_largest(values: np.ndarray) -> dict[str, Any]:
    """Lengths in two bytes each, against the largest of their head: (heads, n)."""
    largest = values.max(1)
    scaled = values / np.where(largest > 0, largest, 1.0)[:, None]
    return {"top": [float(f"{x:.6g}") for x in largest], "data": pack_pairs(np.rint(scaled * 65535))}


def _next(model: AnyModel, ids: list[int], hidden: Tensor) -> dict[str, Any] | None:
    """The likeliest next words, and what each head adds to the logit of the first of them, where that can be told."""
    if model.output is None or model.spec.output != "lm":
        return None
    best = torch.softmax(model.output(hidden[:, -1:])[0, -1].double(), -1).topk(min(LIKELY, model.spec.vocab))
    words = [_word(model, i) for i in best.indices.tolist()]
    told: dict[str, Any] = {
        "likely": [list(pair) for pair in zip(words, best.values.tolist(), strict=True)],
        "shares": None,
    }
    try:
        parts = logit_attribution(model, ids, int(best.indices[0]))
    except HeadwiseError:  # a post-norm model, or one whose parts are not known: there is no sum to share out
        return told
    rest = {"embedding": parts.embedding, "MLPs": sum(parts.mlps.values()), "biases": parts.biases}
    return {**told, "shares": parts.heads, "rest": rest, "logit": parts.logit}


def _word(model: AnyModel, id: int) -> str:
    """A token as it would be written, or its number if the vocabulary is longer than the tokenizer."""
    tokenizer = tokenizer_of(model)
    return tokenizer.backend.decode([id], skip_special_tokens=False) if id < len(tokenizer) else f"#{id}"
