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
from headwise.model.loss import IGNORE


class TokenRows(NamedTuple):
    """What a pass reads and is asked for."""

    ids: Tensor  # (B, T)
    targets: Tensor  # (B, T)
    padding: Tensor | None = None  # (B, T), where an encoder must not look
    source: Tensor | None = None  # (B, S), what an encoder-decoder reads
    source_padding: Tensor | None = None  # (B, S)

    def part(self, some: slice, device: torch.device) -> "TokenRows":
        """Some of the rows, on a device."""
        return TokenRows(*(None if x is None else x[some].to(device, non_blocking=True) for x in self))  # pyright: ignore

    @property
    def context(self) -> dict[str, Tensor | None]:
        """What a model is called with beside the ids."""
        both = {} if self.source is None else {"source": self.source, "source_padding": self.source_padding}
        return {"padding": self.padding, **both}

    @property
    def target_count(self) -> int:
        """How many targets there are."""
        return int((self.targets != IGNORE).sum())


Hide = Callable[..., tuple[Tensor, Tensor]]  # rows (B, T + 1), first → inputs, targets (B, T)


@dataclass(frozen=True)
class Windows:
    """A row of tokens cut into windows of `context` tokens, each token once an epoch, shuffled anew in every epoch.

    >>> windows = Windows(np.arange(10), context=3, seed=0)
    >>> windows.count, windows.rows(0, 2).shape
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
    def count(self) -> int:
        """Windows in an epoch."""
        return max(1, (len(self.tokens) - self.context) // self.context)

    def rows(self, first: int, count: int) -> np.ndarray:
        """Windows first … first + count − 1 of the endless order: (count, context + 1)."""
        rows = np.empty((count, self.context + 1), dtype=np.int64)
        for i in range(count):
            epoch, place = divmod(first + i, self.count)
            phase, order = _epoch(self.seed, epoch, self.count, len(self.tokens) - 1 - self.count * self.context)
            start = phase + int(order[place]) * self.context
            rows[i] = self.tokens[start : start + self.context + 1]
        return rows


class Anywhere(Windows):
    """The same, but each window begins anywhere, drawn by its own number."""

    def rows(self, first: int, count: int) -> np.ndarray:
        """Windows first … first + count − 1: (count, context + 1)."""
        last = len(self.tokens) - self.context
        starts = (int(np.random.default_rng([self.seed, first + i]).integers(last)) for i in range(count))
        return np.stack([self.tokens[start : start + self.context + 1] for start in starts]).astype(np.int64)


@dataclass(frozen=True)
class Texts:
    """The same, but a row is one text, with what stands before and behind it. Longer ones are cut, shorter ones padded.

    >>> texts = Texts(np.array([5, 6, 0, 7, 0]), context=4, seed=0, end=0, before=(1,), behind=(0,))
    >>> sorted(texts.rows(0, 2).tolist())
    [[1, 5, 6, 0], [1, 7, 0, -1]]
    """

    tokens: np.ndarray
    context: int
    seed: int
    end: int
    before: tuple[int, ...]
    behind: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.count == 0:
            raise HeadwiseError("there is no text that ends; rows='texts' is for a corpus of many texts.")

    @cached_property
    def ends(self) -> np.ndarray:
        """Where each text ends."""
        return np.flatnonzero(self.tokens == self.end)

    @property
    def count(self) -> int:
        """Texts in an epoch."""
        return len(self.ends)

    def text(self, number: int) -> np.ndarray:
        """One text in its frame, at most context + 1 tokens."""
        start = int(self.ends[number - 1]) + 1 if number else 0
        bare = self.tokens[start : int(self.ends[number])][: self.context + 1]
        return np.array([*self.before, *bare.tolist(), *self.behind], dtype=np.int64)[: self.context + 1]

    def rows(self, first: int, count: int) -> np.ndarray:
        """Texts first … first + count − 1 of the endless order: (count, the longest), −1 behind the shorter ones."""
        return stack([self.text(number) for number in _shuffled(self.seed, self.count, first, count)])

    def in_order(self, most: int | None = None) -> Iterator[np.ndarray]:
        """All texts, for evaluation, or some spread evenly: at most about so many tokens."""
        return (self.text(number) for number in _spread(self.count, len(self.tokens), most))


@dataclass(frozen=True)
class Pairs:
    """The same for an encoder-decoder: tokens are texts by turns, a source and what belongs to it; a row is one pair.

    `dress` puts around both what the model expects, from their ids alone. Longer ones are cut, shorter ones padded.

    >>> pairs = Pairs(np.array([5, 6, 0, 7, 0]), context=4, seed=0, end=0, dress=lambda s, t: (s, [0, *t, 0]))
    >>> [rows.tolist() for rows in pairs.rows(0, 1)]
    [[[0, 7, 0]], [[5, 6]]]
    """

    tokens: np.ndarray
    context: int
    seed: int
    end: int
    dress: Callable[[list[int], list[int]], tuple[list[int], list[int]]]

    @cached_property
    def texts(self) -> Texts:
        """Sources and texts, by turns."""
        return Texts(self.tokens, len(self.tokens), self.seed, self.end, (), ())

    @property
    def count(self) -> int:
        """Pairs in an epoch."""
        return self.texts.count // 2

    def pair(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The text of a pair, at most context + 1 tokens, and its source, at most context."""
        source, text = (self.texts.text(2 * number + i).tolist() for i in range(2))
        source, text = self.dress(source, text)
        return np.array(text[: self.context + 1]), np.array(source[: self.context])

    def rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Pairs first … first + count − 1 of the endless order: texts, sources, −1 behind the shorter ones."""
        chosen = map(self.pair, _shuffled(self.seed, self.count, first, count))
        texts, sources = zip(*chosen, strict=True)
        return stack(texts), stack(sources)

    def in_order(self, most: int | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All pairs, for evaluation, or some spread evenly: at most about so many tokens."""
        return (self.pair(number) for number in _spread(self.count, len(self.tokens), most))


def _shuffled(seed: int, of: int, first: int, count: int) -> Iterator[int]:
    """Which texts are numbers first … first + count − 1 of an endless order, each once an epoch."""
    for epoch, place in (divmod(first + i, of) for i in range(count)):
        yield int(_epoch(seed, epoch, of, 0)[1][place])


def _spread(count: int, tokens: int, most: int | None) -> range:
    """All texts, or some spread evenly: those of about so many tokens."""
    return range(0, count, 1 if most is None else max(1, math.ceil(max(1, tokens) / most)))


def stack(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of different lengths as one array, −1 behind the shorter ones."""
    made = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int64)
    for row, tokens in zip(made, rows, strict=True):
        row[: len(tokens)] = tokens
    return made


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, windows: int, spare: int) -> tuple[int, np.ndarray]:
    """Where the windows of an epoch begin, and the order they are read in."""
    dice = np.random.default_rng([seed, epoch])
    return int(dice.integers(spare + 1)), dice.permutation(windows)


def in_order(tokens: np.ndarray, context: int, most: int | None = None) -> Iterator[np.ndarray]:
    """Windows side by side, for evaluation, each token asked for once: (≤ context + 1,) each; at most so many tokens."""
    starts = range(0, max(0, len(tokens) - 1), context)
    wanted = max(1, len(starts) if most is None else most // context)
    step = max(1, -(-len(starts) // wanted))
    for start in starts[::step]:
        yield tokens[start : start + context + 1].astype(np.int64)


def make_rows(texts: np.ndarray, sources: np.ndarray | None, hide: Hide | None, first: int) -> TokenRows:
    """Texts with one token more than is read, −1 where there is none, as a pass reads them; `first` is their number."""
    read = torch.from_numpy(texts)  # (B, T + 1)
    ids, targets = causal(read) if hide is None else hide(read, first=first)
    if sources is not None:
        source = torch.from_numpy(sources)  # (B, S)
        return TokenRows(ids, targets, None, source.clamp(min=0), _padding(source))
    return TokenRows(ids, targets, None if hide is None else _padding(read[:, :-1]))


def _padding(ids: Tensor) -> Tensor | None:
    real = ids >= 0
    return None if bool(real.all()) else real


def causal(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each token asks for the next: (B, T + 1), −1 where there is none → inputs and targets (B, T)."""
    return rows[:, :-1].clamp(min=0), rows[:, 1:].masked_fill(rows[:, 1:] < 0, IGNORE)


def masked(rows: Tensor, share: float, mask: int, vocab: int, seed: list[int], first: int = 0) -> tuple[Tensor, Tensor]:
    """Hide some tokens and ask for them (https://arxiv.org/abs/1810.04805): (B, T + 1) → inputs and targets (B, T).

    Of the chosen, 80 % become the mask, 10 % another token, 10 % stay. Each row draws by its own number, `first` and on, so
    that it matters not with which others it is read.
    """
    inputs = rows[:, :-1].clamp(min=0)  # (B, T)
    targets = torch.full_like(inputs, IGNORE)
    for row, real in enumerate((rows[:, :-1] >= 0).sum(1).tolist()):
        dice = np.random.default_rng([*seed, first + row])
        hidden = max(1, round(share * real))
        where = torch.from_numpy(dice.permutation(real)[:hidden])
        chance, others = torch.from_numpy(dice.random(hidden)), torch.from_numpy(dice.integers(vocab, size=hidden))
        asked = inputs[row, where]
        targets[row, where] = asked
        inputs[row, where] = torch.where(chance < 0.8, mask, torch.where(chance < 0.9, others, asked))
    return inputs, targets
