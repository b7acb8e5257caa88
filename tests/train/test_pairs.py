"""Training on pairs: what a step reads and loses against the same by hand, one pair at a time; and that sources are read."""

import math
import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.text import Corpus, Tokenizer
from headwise.text.make import byte_tokenizer, character_tokenizer
from headwise.train import Recipe
from headwise.train.batches import IGNORE, Pairs, make_rows, stack
from headwise.train.loss import LanguageLoss
from headwise.train.tokens import read_tokens, write_tokens
from tests.contract.variants import FIXED
from tests.train.tiny import PLAIN, broken, run, same_run, timeless

END = 256  # of bytes
# Sources and texts of very different lengths, the long source beside the short text and the other way round.
PAIRS = [("ab", "to be or not"), ("who goes there, and when?", "I"), ("x", "y"), ("seven", "nine or ten"), ("?", "so it is")]
SPECS: dict[str, ModelSpec] = {
    "learned": replace(PLAIN, kind="encoder-decoder", context=32),
    "rotary, grouped": ModelSpec(
        vocab=257,
        context=32,
        layers=2,
        encoder_layers=1,
        attention=AttentionSpec(width=16, heads=4, kv_heads=2, rotary=Rotary()),
        kind="encoder-decoder",
        positions="none",
        norm="rms",
        activation="swiglu",
        tied=False,
    ),
    "post, sinks": ModelSpec(
        vocab=257,
        context=32,
        layers=1,
        encoder_layers=2,
        attention=AttentionSpec(width=16, heads=2, bias=True, out_bias=True, softmax="sink"),
        kind="encoder-decoder",
        form="post",
        positions="sinusoidal",
    ),
}
NOISY = replace(
    SPECS["learned"],
    dropout=0.1,
    attention=AttentionSpec(width=16, heads=4, dropout=0.1, head_dropout=0.3, head_dropout_schedule="v"),
)
ONE = Recipe(steps=1, batch=len(PAIRS), warmup=0, holdout=0, log_every=1)

each_spec = pytest.mark.parametrize("name", SPECS)


def dressed(source: str, text: str) -> tuple[Tensor, Tensor]:
    """A pair of bytes as a model reads it: the source with its end (1, S), the text between two ends (1, T)."""
    return torch.tensor([[*source.encode(), END]]), torch.tensor([[END, *text.encode(), END]])


def surprise(model: Transformer, pairs: list[tuple[str, str]], context: int = 99) -> tuple[Tensor, int]:
    """The summed −log p of all texts from all the logits, one pair at a time, and how many tokens are asked for."""
    total, count = torch.zeros(()), 0
    for pair in pairs:
        source, text = dressed(*pair)
        source, text = source[:, :context], text[:, : context + 1]
        logits = model(text[:, :-1], source=source)  # (1, T − 1, V)
        total = total + F.cross_entropy(logits[0], text[0, 1:], reduction="sum")
        count += text.shape[1] - 1
    return total, count


# The tokens: sources and texts by turns, and no pair torn apart.


def in_turns(tokens: np.ndarray, end: int) -> Iterator[tuple[list[int], list[int]]]:
    """The pairs of a row of tokens, by a plain walk."""
    texts: list[list[int]] = [[]]
    for token in tokens.tolist():
        texts.append([]) if token == end else texts[-1].append(token)
    assert texts.pop() == [], "the row ends in the middle of a text"
    assert len(texts) % 2 == 0, "a source has lost its text"
    return zip(texts[::2], texts[1::2], strict=True)


@FIXED
@given(
    st.lists(st.tuples(*[st.integers(1, 30)] * 2), min_size=1, max_size=12),
    st.floats(0, 0.9, allow_nan=False),
)
def test_no_pair_is_torn_apart(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]], holdout: float
) -> None:
    pairs = [("s" * a + str(i), "t" * b + str(i)) for i, (a, b) in enumerate(lengths)]
    tokens = write_tokens(tmp_path_factory.mktemp("tokens"), Corpus.of(pairs), None, byte_tokenizer(), holdout)
    parts = [list(in_turns(part, END)) for part in (tokens.train, tokens.valid)]
    told = [(bytes(source).decode(), bytes(text).decode()) for part in parts for source, text in part]
    assert told == pairs
    # What is held out is all pairs that lie wholly behind the cut, so no more than was asked for, and by less than a pair.
    ends = np.cumsum([len(source) + len(text) + 2 for source, text in pairs])
    cut = int(ends[-1]) - int(int(ends[-1]) * holdout)
    assert len(parts[1]) == sum(int(end) > cut for end in [0, *ends[:-1].tolist()][1:]) + _whole(ends, cut)
    assert parts[0]


def _whole(ends: np.ndarray, cut: int) -> int:
    """1 if the cut falls exactly between two pairs: then the pair that begins there is held out too."""
    return int(cut in ends[:-1].tolist())
