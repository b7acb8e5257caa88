"""Select the tokens of a training step from the seed and the step alone, so that a run can resume at any step."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.model.chunked_cross_entropy import IGNORE_INDEX


class TrainBatch(NamedTuple):
    """Inputs and targets of a forward pass.

    Attributes:
        ids: Token ids, (B, T).
        targets: Target ids, (B, T).
        attention_mask: True at real tokens, (B, T). None without padding.
        source: Source ids of an encoder-decoder, (B, S).
        source_attention_mask: True at real source tokens, (B, S).
    """

    ids: Tensor
    targets: Tensor
    attention_mask: Tensor | None = None
    source: Tensor | None = None
    source_attention_mask: Tensor | None = None

    def select_rows(self, row_slice: slice, device: torch.device) -> "TrainBatch":
        """Return some rows on a device."""
        return TrainBatch(*(None if x is None else x[row_slice].to(device, non_blocking=True) for x in self))  # pyright: ignore

    @property
    def model_kwargs(self) -> dict[str, Tensor | None]:
        """Keyword arguments of the model besides the ids."""
        source_kwargs = (
            {} if self.source is None else {"source": self.source, "source_attention_mask": self.source_attention_mask}
        )
        return {"attention_mask": self.attention_mask, **source_kwargs}

    @property
    def num_targets(self) -> int:
        """Number of targets that are not ignored."""
        return int((self.targets != IGNORE_INDEX).sum())


MaskTokens = Callable[..., tuple[Tensor, Tensor]]  # rows (B, T + 1), first → inputs, targets (B, T)


@dataclass(frozen=True)
class ShuffledWindowSampler:
    """Splits tokens into windows of `context` tokens. Each epoch has every token once, in a new random order.

    >>> windows = ShuffledWindowSampler(np.arange(10), context=3, seed=0)
    >>> windows.rows_per_epoch, windows.training_rows(0, 2).shape
    (2, (2, 4))
    """

    tokens: np.ndarray
    context: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.tokens) < self.context + 1:
            raise ArgumentError(
                f"corpus: it has {len(self.tokens)} tokens to train on, and a context of {self.context} tokens needs at "
                f"least {self.context + 1}. Give more text, or set a shorter context in the recipe."
            )

    @property
    def rows_per_epoch(self) -> int:
        """Number of windows per epoch."""
        return max(1, (len(self.tokens) - self.context) // self.context)

    def training_rows(self, first: int, count: int) -> np.ndarray:
        """Return windows first … first + count − 1 of the infinite sequence of epochs: (count, context + 1)."""
        rows = np.empty((count, self.context + 1), dtype=np.int64)
        for i in range(count):
            epoch, index = divmod(first + i, self.rows_per_epoch)
            start_offset, order = _epoch_order(
                self.seed, epoch, self.rows_per_epoch, len(self.tokens) - 1 - self.rows_per_epoch * self.context
            )
            start = start_offset + int(order[index]) * self.context
            rows[i] = self.tokens[start : start + self.context + 1]
        return rows


class RandomWindowSampler(ShuffledWindowSampler):
    """Samples windows that start at random positions, each from its own seed."""

    def training_rows(self, first: int, count: int) -> np.ndarray:
        """Return windows first … first + count − 1: (count, context + 1)."""
        last = len(self.tokens) - self.context
        starts = (int(np.random.default_rng([self.seed, first + i]).integers(last)) for i in range(count))
        return np.stack([self.tokens[start : start + self.context + 1] for start in starts]).astype(np.int64)


@dataclass(frozen=True)
class DocumentSampler:
    """Samples one text per row, with prefix and suffix tokens. Long texts are truncated, short ones padded.

    >>> texts = DocumentSampler(np.array([5, 6, 0, 7, 0]), context=4, seed=0, end_id=0, prefix=(1,), suffix=(0,))
    >>> sorted(texts.training_rows(0, 2).tolist())
    [[1, 5, 6, 0], [1, 7, 0, -1]]
    """

    tokens: np.ndarray
    context: int
    seed: int
    end_id: int
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.rows_per_epoch == 0:
            raise ArgumentError(
                "rows='texts': the corpus has no complete text, because it contains no token that marks the end of a text. "
                "Use a corpus of several texts, or rows='windows'."
            )

    @cached_property
    def ends(self) -> np.ndarray:
        """Position of the end token of each text."""
        return np.flatnonzero(self.tokens == self.end_id)

    @property
    def rows_per_epoch(self) -> int:
        """Number of texts per epoch."""
        return len(self.ends)

    def document(self, index: int) -> np.ndarray:
        """Return one text with prefix and suffix, at most context + 1 tokens."""
        start = int(self.ends[index - 1]) + 1 if index else 0
        token_ids = self.tokens[start : int(self.ends[index])][: self.context + 1]
        return np.array([*self.prefix, *token_ids.tolist(), *self.suffix], dtype=np.int64)[: self.context + 1]

    def training_rows(self, first: int, count: int) -> np.ndarray:
        """Return texts first … first + count − 1 of the infinite sequence of epochs: (count, length), padded with −1."""
        return pad_with_minus_one(
            [self.document(index) for index in _shuffled_indices(self.seed, self.rows_per_epoch, first, count)]
        )

    def evaluation_rows(self, max_tokens: int | None = None) -> Iterator[np.ndarray]:
        """Return all texts for evaluation, or evenly spaced ones with about `max_tokens` tokens."""
        return (
            self.document(index)
            for index in _evenly_spaced_text_indices(self.rows_per_epoch, len(self.tokens), max_tokens)
        )


@dataclass(frozen=True)
class PairSampler:
    """Samples pairs for an encoder-decoder. Tokens alternate between a source and its text; a row is one pair.

    `wrap_pair` adds the special tokens of the model to source and text. Long texts are truncated, short ones padded.

    >>> pairs = PairSampler(np.array([5, 6, 0, 7, 0]), context=4, seed=0, end_id=0, wrap_pair=lambda s, t: (s, [0, *t, 0]))
    >>> [rows.tolist() for rows in pairs.training_rows(0, 1)]
    [[[0, 7, 0]], [[5, 6]]]
    """

    tokens: np.ndarray
    context: int
    seed: int
    end_id: int
    wrap_pair: Callable[[list[int], list[int]], tuple[list[int], list[int]]]

    @cached_property
    def interleaved_document_sampler(self) -> DocumentSampler:
        """Sampler of sources and texts in alternation."""
        return DocumentSampler(self.tokens, len(self.tokens), self.seed, self.end_id, (), ())

    @property
    def rows_per_epoch(self) -> int:
        """Number of pairs per epoch."""
        return self.interleaved_document_sampler.rows_per_epoch // 2

    def target_and_source_ids(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the text of a pair, at most context + 1 tokens, and its source, at most context tokens."""
        source, text = (self.interleaved_document_sampler.document(2 * index + i).tolist() for i in range(2))
        source, text = self.wrap_pair(source, text)
        return np.array(text[: self.context + 1]), np.array(source[: self.context])

    def training_rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return pairs first … first + count − 1 of the infinite sequence of epochs: texts and sources, padded with −1."""
        pairs = map(self.target_and_source_ids, _shuffled_indices(self.seed, self.rows_per_epoch, first, count))
        texts, sources = zip(*pairs, strict=True)
        return pad_with_minus_one(texts), pad_with_minus_one(sources)

    def evaluation_rows(self, max_tokens: int | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Return all pairs for evaluation, or evenly spaced ones with about `max_tokens` tokens."""
        return (
            self.target_and_source_ids(index)
            for index in _evenly_spaced_text_indices(self.rows_per_epoch, len(self.tokens), max_tokens)
        )


def _shuffled_indices(seed: int, size: int, first: int, count: int) -> Iterator[int]:
    """Yield the indices first … first + count − 1 of an infinite sequence of shuffled epochs."""
    for epoch, index in (divmod(first + i, size) for i in range(count)):
        yield int(_epoch_order(seed, epoch, size, 0)[1][index])


def _evenly_spaced_text_indices(count: int, num_tokens: int, max_tokens: int | None) -> range:
    """Return the indices of all texts, or of evenly spaced texts with about `max_tokens` tokens."""
    return range(0, count, 1 if max_tokens is None else max(1, math.ceil(max(1, num_tokens) / max_tokens)))


def pad_with_minus_one(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Stack rows of different lengths into one array, padded with −1."""
    padded = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int64)
    for row, tokens in zip(padded, rows, strict=True):
        row[: len(tokens)] = tokens
    return padded


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, num_windows: int, leftover_tokens: int) -> tuple[int, np.ndarray]:
    """Return the start offset of the windows of an epoch, and their order."""
    rng = np.random.default_rng([seed, epoch])
    return int(rng.integers(leftover_tokens + 1)), rng.permutation(num_windows)


def sequential_windows(tokens: np.ndarray, context: int, max_tokens: int | None = None) -> Iterator[np.ndarray]:
    """Yield consecutive windows for evaluation, (≤ context + 1,) each, in which each token is a target once.

    With `max_tokens`, evenly spaced windows are selected.
    """
    starts = range(0, max(0, len(tokens) - 1), context)
    max_windows = max(1, len(starts) if max_tokens is None else max_tokens // context)
    step = max(1, -(-len(starts) // max_windows))
    for start in starts[::step]:
        yield tokens[start : start + context + 1].astype(np.int64)


def make_train_batch(
    texts: np.ndarray, sources: np.ndarray | None, mask_tokens: MaskTokens | None, first: int
) -> TrainBatch:
    """Make a batch from texts with one token more than the inputs, padded with −1. `first` is the index of the first row."""
    rows = torch.from_numpy(texts)  # (B, T + 1)
    ids, targets = causal_inputs_and_targets(rows) if mask_tokens is None else mask_tokens(rows, first=first)
    if sources is not None:
        source = torch.from_numpy(sources)  # (B, S)
        return TrainBatch(ids, targets, None, source.clamp(min=0), _attention_mask(source))
    return TrainBatch(ids, targets, None if mask_tokens is None else _attention_mask(rows[:, :-1]))


def _attention_mask(ids: Tensor) -> Tensor | None:
    attention_mask = ids >= 0
    return None if bool(attention_mask.all()) else attention_mask


def causal_inputs_and_targets(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and next-token targets: (B, T + 1), padded with −1 → (B, T) each."""
    return rows[:, :-1].clamp(min=0), rows[:, 1:].masked_fill(rows[:, 1:] < 0, IGNORE_INDEX)


def masked_targets(
    rows: Tensor, fraction: float, mask_id: int, vocab: int, seed: list[int], first: int = 0
) -> tuple[Tensor, Tensor]:
    """Mask random tokens as targets (https://arxiv.org/abs/1810.04805): (B, T + 1) → inputs and targets (B, T).

    80% of the selected tokens become the mask token, 10% a random token, and 10% stay. The random numbers of a row depend
    only on the seed and its index, `first` + row, not on the other rows of the batch.
    """
    inputs = rows[:, :-1].clamp(min=0)  # (B, T)
    targets = torch.full_like(inputs, IGNORE_INDEX)
    for row, length in enumerate((rows[:, :-1] >= 0).sum(1).tolist()):
        rng = np.random.default_rng([*seed, first + row])
        num_masked = max(1, round(fraction * length))
        positions = torch.from_numpy(rng.permutation(length)[:num_masked])
        uniform, random_ids = (
            torch.from_numpy(rng.random(num_masked)),
            torch.from_numpy(rng.integers(vocab, size=num_masked)),
        )
        original_ids = inputs[row, positions]
        targets[row, positions] = original_ids
        inputs[row, positions] = torch.where(
            uniform < 0.8, mask_id, torch.where(uniform < 0.9, random_ids, original_ids)
        )
    return inputs, targets
