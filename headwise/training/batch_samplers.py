"""Which tokens a step reads. It follows from the seed and the step alone, so a run can go on from any step."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.model.loss import IGNORE_INDEX


class TrainBatch(NamedTuple):
    """What a pass reads and is asked for."""

    ids: Tensor  # (B, T)
    targets: Tensor  # (B, T)
    attention_mask: Tensor | None = None  # (B, T), where an encoder must not look
    source: Tensor | None = None  # (B, S), what an encoder-decoder reads
    source_attention_mask: Tensor | None = None  # (B, S)

    def select_rows(self, row_slice: slice, device: torch.device) -> "TrainBatch":
        """Some of the rows, on a device."""
        return TrainBatch(*(None if x is None else x[row_slice].to(device, non_blocking=True) for x in self))  # pyright: ignore

    @property
    def model_kwargs(self) -> dict[str, Tensor | None]:
        """What a model is called with beside the ids."""
        source_kwargs = (
            {} if self.source is None else {"source": self.source, "source_attention_mask": self.source_attention_mask}
        )
        return {"attention_mask": self.attention_mask, **source_kwargs}

    @property
    def num_targets(self) -> int:
        """How many targets there are."""
        return int((self.targets != IGNORE_INDEX).sum())


MaskTokens = Callable[..., tuple[Tensor, Tensor]]  # rows (B, T + 1), first → inputs, targets (B, T)


@dataclass(frozen=True)
class ShuffledWindowSampler:
    """A row of tokens cut into windows of `context` tokens, each token once an epoch, shuffled anew in every epoch.

    >>> windows = ShuffledWindowSampler(np.arange(10), context=3, seed=0)
    >>> windows.rows_per_epoch, windows.training_rows(0, 2).shape
    (2, (2, 4))
    """

    tokens: np.ndarray
    context: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.tokens) < self.context + 1:
            raise HeadwiseError(
                f"the text has {len(self.tokens)} tokens to train on, fewer than a context of {self.context} and the one "
                f"behind it; give more text or a shorter context."
            )

    @property
    def rows_per_epoch(self) -> int:
        """Windows in an epoch."""
        return max(1, (len(self.tokens) - self.context) // self.context)

    def training_rows(self, first: int, count: int) -> np.ndarray:
        """Windows first … first + count − 1 of the endless order: (count, context + 1)."""
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
    """The same, but each window begins anywhere, drawn by its own number."""

    def training_rows(self, first: int, count: int) -> np.ndarray:
        """Windows first … first + count − 1: (count, context + 1)."""
        last = len(self.tokens) - self.context
        starts = (int(np.random.default_rng([self.seed, first + i]).integers(last)) for i in range(count))
        return np.stack([self.tokens[start : start + self.context + 1] for start in starts]).astype(np.int64)


@dataclass(frozen=True)
class DocumentSampler:
    """The same, but a row is one text, with what stands before and behind it. Longer ones are cut, shorter ones padded.

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
            raise HeadwiseError("there is no text that ends; rows='texts' is for a corpus of many texts.")

    @cached_property
    def ends(self) -> np.ndarray:
        """Where each text ends."""
        return np.flatnonzero(self.tokens == self.end_id)

    @property
    def rows_per_epoch(self) -> int:
        """Texts in an epoch."""
        return len(self.ends)

    def document(self, index: int) -> np.ndarray:
        """One text in its frame, at most context + 1 tokens."""
        start = int(self.ends[index - 1]) + 1 if index else 0
        token_ids = self.tokens[start : int(self.ends[index])][: self.context + 1]
        return np.array([*self.prefix, *token_ids.tolist(), *self.suffix], dtype=np.int64)[: self.context + 1]

    def training_rows(self, first: int, count: int) -> np.ndarray:
        """Texts first … first + count − 1 of the endless order: (count, the longest), −1 behind the shorter ones."""
        return pad_with_minus_one(
            [self.document(index) for index in _shuffled_indices(self.seed, self.rows_per_epoch, first, count)]
        )

    def evaluation_rows(self, max_tokens: int | None = None) -> Iterator[np.ndarray]:
        """All texts, for evaluation, or some spread evenly: at most about so many tokens."""
        return (self.document(index) for index in _evenly_spaced(self.rows_per_epoch, len(self.tokens), max_tokens))


@dataclass(frozen=True)
class PairSampler:
    """The same for an encoder-decoder: tokens are texts by turns, a source and what belongs to it; a row is one pair.

    `wrap_pair` puts around both what the model expects, from their ids alone. Longer ones are cut, shorter ones padded.

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
        """Sources and texts, by turns."""
        return DocumentSampler(self.tokens, len(self.tokens), self.seed, self.end_id, (), ())

    @property
    def rows_per_epoch(self) -> int:
        """Pairs in an epoch."""
        return self.interleaved_document_sampler.rows_per_epoch // 2

    def target_and_source_ids(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The text of a pair, at most context + 1 tokens, and its source, at most context."""
        source, text = (self.interleaved_document_sampler.document(2 * index + i).tolist() for i in range(2))
        source, text = self.wrap_pair(source, text)
        return np.array(text[: self.context + 1]), np.array(source[: self.context])

    def training_rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Pairs first … first + count − 1 of the endless order: texts, sources, −1 behind the shorter ones."""
        pairs = map(self.target_and_source_ids, _shuffled_indices(self.seed, self.rows_per_epoch, first, count))
        texts, sources = zip(*pairs, strict=True)
        return pad_with_minus_one(texts), pad_with_minus_one(sources)

    def evaluation_rows(self, max_tokens: int | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All pairs, for evaluation, or some spread evenly: at most about so many tokens."""
        return (
            self.target_and_source_ids(index)
            for index in _evenly_spaced(self.rows_per_epoch, len(self.tokens), max_tokens)
        )


def _shuffled_indices(seed: int, size: int, first: int, count: int) -> Iterator[int]:
    """Which texts are numbers first … first + count − 1 of an endless order, each once an epoch."""
    for epoch, index in (divmod(first + i, size) for i in range(count)):
        yield int(_epoch_order(seed, epoch, size, 0)[1][index])


def _evenly_spaced(count: int, num_tokens: int, max_tokens: int | None) -> range:
    """All texts, or some spread evenly: those of about so many tokens."""
    return range(0, count, 1 if max_tokens is None else max(1, math.ceil(max(1, num_tokens) / max_tokens)))


def pad_with_minus_one(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of different lengths as one array, −1 behind the shorter ones."""
    padded = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int64)
    for row, tokens in zip(padded, rows, strict=True):
        row[: len(tokens)] = tokens
    return padded


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, num_windows: int, leftover_tokens: int) -> tuple[int, np.ndarray]:
    """Where the windows of an epoch begin, and the order they are read in."""
    rng = np.random.default_rng([seed, epoch])
    return int(rng.integers(leftover_tokens + 1)), rng.permutation(num_windows)


def sequential_windows(tokens: np.ndarray, context: int, max_tokens: int | None = None) -> Iterator[np.ndarray]:
    """Windows side by side, for evaluation, each token asked for once: (≤ context + 1,) each; at most so many tokens."""
    starts = range(0, max(0, len(tokens) - 1), context)
    max_windows = max(1, len(starts) if max_tokens is None else max_tokens // context)
    step = max(1, -(-len(starts) // max_windows))
    for start in starts[::step]:
        yield tokens[start : start + context + 1].astype(np.int64)


def make_train_batch(
    texts: np.ndarray, sources: np.ndarray | None, mask_tokens: MaskTokens | None, first: int
) -> TrainBatch:
    """Texts with one token more than is read, −1 where there is none, as a pass reads them; `first` is their number."""
    rows = torch.from_numpy(texts)  # (B, T + 1)
    ids, targets = causal_targets(rows) if mask_tokens is None else mask_tokens(rows, first=first)
    if sources is not None:
        source = torch.from_numpy(sources)  # (B, S)
        return TrainBatch(ids, targets, None, source.clamp(min=0), _attention_mask(source))
    return TrainBatch(ids, targets, None if mask_tokens is None else _attention_mask(rows[:, :-1]))


def _attention_mask(ids: Tensor) -> Tensor | None:
    attention_mask = ids >= 0
    return None if bool(attention_mask.all()) else attention_mask


def causal_targets(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each token asks for the next: (B, T + 1), −1 where there is none → inputs and targets (B, T)."""
    return rows[:, :-1].clamp(min=0), rows[:, 1:].masked_fill(rows[:, 1:] < 0, IGNORE_INDEX)


def masked_targets(
    rows: Tensor, fraction: float, mask_id: int, vocab: int, seed: list[int], first: int = 0
) -> tuple[Tensor, Tensor]:
    """Hide some tokens and ask for them (https://arxiv.org/abs/1810.04805): (B, T + 1) → inputs and targets (B, T).

    Of the chosen, 80 % become the mask, 10 % another token, 10 % stay. Each row draws by its own number, `first` and on, so
    that it matters not with which others it is read.
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
