"""Arcs between words: those of one text, and those of a batch as one list, so that a layer is measured in few operations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.relation_metrics import COMPARED, COUNTED, HITS, KINDS, MASS, MATCHED, OTHERS, VALUED
from headwise.analysis.recording.batching import Batch

NEAREST = range(-5, 6)  # the fixed offsets that are tried as a baseline
CELLS = 1 << 22  # weights that are compared with each other at once


@dataclass(frozen=True, eq=False)
class ArcPairs:
    """The pairs of one unit that are asked about, by words: who looks at whom, under which question."""

    question: np.ndarray  # (A,)
    source: np.ndarray  # (A,)
    target: np.ndarray  # (A,)
    pairs: np.ndarray  # (P, 3): every visible pair of words, and its stratum, of S in this text
    stratum: np.ndarray  # (A,)
    to_word: (
        Tensor  # (T, W + pairs that share tokens): 1 where a token belongs to a word, or to both words of such a pair
    )
    from_word: Tensor  # (W, T): the mean over a word's tokens
    shared: np.ndarray  # (pairs that share tokens, 2): the words
    rivals: Tensor  # (W, W): 1 where two words have no token in common
    left_out: np.ndarray  # (questions,): arcs that are not eligible
    row: np.ndarray = field(init=False)  # (A,): the row of each arc, of R
    asks: np.ndarray = field(init=False)  # (R,): the question of each row
    arcs: np.ndarray = field(init=False)  # (A,): question and stratum as one number
    others: np.ndarray = field(
        init=False
    )  # (A,): how many pairs of the same stratum are no arcs under the same question
    fit: np.ndarray = field(init=False)  # (R,): whether there are some for each of its arcs

    def __post_init__(self) -> None:
        rows, row = np.unique(np.stack((self.question, self.source), 1), axis=0, return_inverse=True)
        row = row.reshape(-1)
        arcs = self.question * (self.pairs[:, 2].max(initial=0) + 1) + self.stratum
        others = np.bincount(self.pairs[:, 2])[self.stratum] - np.bincount(arcs)[arcs]
        fit = np.bincount(row[others == 0], minlength=len(rows)) == 0
        made = {"row": row, "asks": rows[:, 0], "arcs": arcs, "others": others, "fit": fit}
        for name, value in made.items():
            object.__setattr__(self, name, value)

    def find(self, questions: Sequence[str], question: str, source: int) -> int | None:
        """The row of a word under a question; None where it is not asked."""
        rows = self.row[(self.question == questions.index(question)) & (self.source == source)]
        return int(rows[0]) if len(rows) else None

    def near(self) -> np.ndarray:
        """Which rows each fixed offset hits, (R, offsets): the word there is a target, or shares a token with one."""
        there = self.source[:, None] + np.array(NEAREST)  # (A, offsets)
        inside = (there >= 0) & (there < len(self.rivals))
        hits = inside & ~self.rivals.numpy()[self.target[:, None], np.where(inside, there, 0)]
        made = np.zeros((len(self.asks), len(NEAREST)), dtype=bool)
        np.logical_or.at(made, self.row, hits)
        return made


@dataclass(frozen=True, eq=False)
class Places:
    """Pairs of words of a batch, one after another."""

    text: Tensor  # (n,): the text, of those that are asked about
    source: Tensor  # (n,)
    target: Tensor  # (n,)

    def of(self, words: Tensor) -> Tensor:
        """Their weights: (N, H, W, W) → (n, H)."""
        return words[self.text, :, self.source, self.target]


class BatchArcs:
    """The arcs of all texts of a batch that have some, N of them: texts, rows and strata are counted on from text to text."""

    def __init__(self, batch: Batch, found: Sequence[ArcPairs | None], questions: int) -> None:
        there = [(place, one) for place, one in enumerate(found) if one is not None and len(one.question)]
        self.examples, self.own = [place for place, _ in there], [one for _, one in there]
        self.batch, self.questions = batch, questions
        self.words = max((len(one.from_word) for one in self.own), default=0)  # W
        self.starts = np.cumsum([0, *(len(one.asks) for one in self.own)]).tolist()  # where each text's rows begin
        self.arcs = self._places([np.stack((one.source, one.target), 1) for one in self.own])
        self.pairs = self._places([one.pairs for one in self.own])
        self.row, self.rows = _counted([one.row for one in self.own], [len(one.asks) for one in self.own])
        strata = [int(one.pairs[:, 2].max(initial=0)) + 1 for one in self.own]
        self.stratum, self.strata = _counted([one.stratum for one in self.own], strata)
        self.stratum_of_pair, _ = _counted([one.pairs[:, 2] for one in self.own], strata)
        self.alike, self.kinds_of_arcs = _counted(
            [one.arcs for one in self.own], [one.arcs.max() + 1 for one in self.own]
        )
        self.others, self.fit, self.asks = (
            _joined([getattr(one, name) for one in self.own]) for name in ("others", "fit", "asks")
        )
        of_row = _joined([np.full(len(one.asks), example) for example, one in there])
        self.place_of_row = of_row * questions + self.asks  # (R,): example and question

    @cached_property
    def to_word(self) -> Tensor:
        """(N, S, W + pairs that share tokens), in the places of the batch: nothing at its padding."""
        W, most = self.words, max((len(one.shared) for one in self.own), default=0)
        made = torch.zeros(len(self.own), self.batch.ids.shape[1], W + most)
        for text, (one, tokens) in enumerate(self._tokens()):
            own = len(one.from_word)
            made[text, tokens, :own] = one.to_word[:, :own]
            made[text, tokens, W : W + len(one.shared)] = one.to_word[:, own:]
        return made

    @cached_property
    def from_word(self) -> Tensor:
        """(N, W, S), in the places of the batch."""
        made = torch.zeros(len(self.own), self.words, self.batch.ids.shape[1])
        for text, (one, tokens) in enumerate(self._tokens()):
            made[text, : len(one.from_word), tokens] = one.from_word
        return made

    @cached_property
    def counts(self) -> Tensor:
        """How many rows are asked about in each text of the batch, by question and kind: (B, 1, questions · kinds)."""
        size = len(self.batch.units) * self.questions
        rows, fit = (torch.bincount(some, minlength=size) for some in (self.place_of_row, self.place_of_row[self.fit]))
        parts = rows[:, None].expand(-1, len(COUNTED)), fit[:, None].expand(-1, len(COMPARED))
        return torch.cat(parts, 1).reshape(len(self.batch.units), 1, -1).float()

    def without_self(self, words: Tensor) -> Tensor:
        """Maps (N, H, W, W + shared) as (N, H, W, W), in place: what a word gives its own tokens goes to no other that shares
        them."""
        pairs, number = self._shared
        for one, other in ((pairs.source, pairs.target), (pairs.target, pairs.source)):
            own = words[pairs.text, :, one, self.words + number]  # (pairs, H)
            words[pairs.text, :, one, other] = (words[pairs.text, :, one, other] - own).clamp(min=0)
        return words[..., : self.words]

    def measured(self, plain: Tensor, valued: Tensor) -> dict[str, Tensor]:
        """What two maps, (N, H, W, W) each, give every row, by kind: (R, H) each. NaN where a map is."""
        made = {kind: torch.zeros(self.rows, plain.shape[1]) for kind in KINDS}
        fit = self.fit[:, None]
        for words, hits, mass, matched in ((plain, HITS, MASS, MATCHED), (valued, *VALUED)):
            hit, weight = self._followed(words)  # (A, H)
            made[hits].index_add_(0, self.row, hit).clamp_(max=1)  # of targets that share a token both are hit
            made[mass].index_add_(0, self.row, weight)
            made[matched] = made[mass] * fit
        made[OTHERS] = made[OTHERS].index_add_(0, self.row, self._expected(plain)) * fit
        return made

    def sums(self, made: dict[str, Tensor]) -> Tensor:
        """The same, summed over the rows of each text of the batch: (B, H, questions · kinds)."""
        stacked = torch.stack([made[kind] for kind in KINDS], -1)  # (R, H, kinds)
        B, (_, H, kinds) = len(self.batch.units), stacked.shape
        summed = torch.zeros(B * self.questions, H, kinds).index_add_(0, self.place_of_row, stacked)
        return summed.unflatten(0, (B, self.questions)).transpose(1, 2).flatten(2)

    def _followed(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Which arcs maps (N, H, W, W) hit, 1 or 0, and the weight they give them: (A, H) each."""
        weight, hits = self.arcs.of(words), []
        step = max(1, CELLS // max(1, words.shape[1] * self.words))
        for some in (slice(first, first + step) for first in range(0, len(weight), step)):
            others = words[self.arcs.text[some], :, self.arcs.source[some]]  # (a, H, W)
            before, behind = (others.masked_fill(hide[some, None], -1.0).amax(-1) for hide in self._hidden)
            hits.append((weight[some] > before) & (weight[some] >= behind) & (weight[some] > 0))
        # Of equals the first is the one looked at.
        hit = torch.cat(hits) if hits else torch.zeros_like(weight, dtype=torch.bool)
        return hit.float().masked_fill(weight.isnan(), torch.nan), weight

    def _expected(self, words: Tensor) -> Tensor:
        """The mean weight of the pairs an arc is compared with: (N, H, W, W) → (A, H); 0 where there are none."""
        weight, H = self.arcs.of(words).double(), words.shape[1]
        every = weight.new_zeros(self.strata, H).index_add_(0, self.stratum_of_pair, self.pairs.of(words).double())
        own = weight.new_zeros(self.kinds_of_arcs, H).index_add_(0, self.alike, weight)
        rest = (every[self.stratum] - own[self.alike]).clamp(min=0)
        return (rest / self.others.clamp(min=1)[:, None]).to(words)

    @cached_property
    def _hidden(self) -> tuple[Tensor, Tensor]:
        """Words that are no rivals of each arc's target before it, and behind it: (A, W) each."""
        rivals = torch.zeros(len(self.own), self.words, self.words, dtype=torch.bool)
        for text, one in enumerate(self.own):
            W = len(one.rivals)
            rivals[text, :W, :W] = one.rivals
        index = torch.arange(self.words)
        source, target = self.arcs.source[:, None], self.arcs.target[:, None]
        beside = rivals[self.arcs.text, self.arcs.target] & (index != source)  # (A, W)
        return ~(beside & (index < target)), ~(beside & (index > target))

    @cached_property
    def _shared(self) -> tuple[Places, Tensor]:
        """Words that share tokens, and the number of each such pair in its text."""
        numbers = [np.arange(len(one.shared)) for one in self.own]
        return self._places([one.shared for one in self.own]), _joined(numbers)

    def _tokens(self) -> Iterator[tuple[ArcPairs, slice]]:
        """Each text, and where its tokens stand in the batch."""
        for example, one in zip(self.examples, self.own, strict=True):
            first = int(self.batch.first[example])
            yield one, slice(first, first + len(one.to_word))

    @staticmethod
    def _places(several: Sequence[np.ndarray]) -> Places:
        """Pairs of words, (n, 2 or more) for each text."""
        text = _joined([np.full(len(some), number) for number, some in enumerate(several)])
        return Places(text, *(_joined([some[:, side] for some in several]) for side in (0, 1)))


def _joined(parts: Sequence[np.ndarray]) -> Tensor:
    """Numbers of all texts, one after another."""
    return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, np.int64))


def _counted(parts: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[Tensor, int]:
    """Numbers of each text, counted on from text to text, of which there are so many; and how many there are of all.

    >>> _counted([np.array([0, 1]), np.array([0, 2])], [2, 3])
    (tensor([0, 1, 2, 4]), 5)
    """
    starts = np.cumsum([0, *sizes])
    return _joined([part + start for part, start in zip(parts, starts, strict=False)]), int(starts[-1])
