"""Relations: does a head's attention follow gold arcs, beyond what a fixed offset would?

Word by word: attention to a split word is the sum over its tokens, from it the mean over its tokens. Both directions. Besides
the arcs of the documents two sets are taken: words of the same phrase, and words of the same class.

What counts is rows: a word that has one target or several under a question. It hits if it looks hardest at one of them, and
its weight is what all of them get, so a perfect head scores 1 however many there are. That weight is held against what other
pairs of the same text get, at the same distance, from words that see about as many. A row counts there if each of its targets
has such pairs; what has none is left out, and the share of rows that stayed is told as the coverage.

A token may belong to several words, as `,"` does. Sums take it in each. What a word gives to its own tokens is given to
itself, and to no word that shares them; so an arc whose target has no other token is not eligible, nor is one to or from a
word without a token: such arcs are counted apart, as left out. Words that share a token are no rivals of each other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import torch

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.attention_call import Call
from headwise.analysis.metrics.example_sampler import Ask, Draw
from headwise.analysis.metrics.metric import Measure, Number
from headwise.analysis.metrics.relation_metrics import (
    CONTROLS,
    HITS,
    KINDS,
    MATCHED,
    SETS,
    SHAPES,
    Question,
    questions_of,
)
from headwise.analysis.metrics.word_arcs import NEAREST, ArcPairs, BatchArcs
from headwise.analysis.metrics.word_maps import WordMaps
from headwise.analysis.recording.batching import Batch, Unit
from headwise.analysis.recording.text_buckets import BUCKETS
from headwise.text.documents import Document

_EXACT, _STEPS, _SIGHT = 16, 3, 10  # offsets told apart one by one; bins beyond; bins of visible words


@dataclass(eq=False)
class Relations(Measure):
    """Numbers of every question: `det >` is attention from the first word of an arc to the second, `det <` from the second to
    the first."""

    tally: Tally
    questions: tuple[Question, ...]
    causal: bool
    offsets: np.ndarray = field(init=False)  # (buckets, questions, offsets): how many rows each fixed offset hits
    arcs: np.ndarray = field(init=False)  # (buckets, questions): those that are eligible
    left_out: np.ndarray = field(
        init=False
    )  # (buckets, questions): those whose words cannot be told apart by their tokens
    draw: Draw | None = None  # takes down what heads do at some places
    _of_batch: BatchArcs | None = None  # of the batch that is read

    def __post_init__(self) -> None:
        Q = len(self.questions)
        self.offsets = np.zeros((BUCKETS, Q, len(NEAREST)))
        self.arcs, self.left_out = np.zeros((2, BUCKETS, Q))
        self.numbers: tuple[Number, ...] = tuple(q.numbers[kind] for q in self.questions for kind in KINDS)

    @staticmethod
    def of(tally: Tally, documents: Iterable[Document], causal: bool) -> "Relations":
        """For all relations that occur in these documents."""
        found: set[str] = set()
        phrases = classes = False
        for document in documents:
            found |= {arc.name for arc in document.relations}
            phrases, classes = phrases or bool(document.phrases), classes or bool(document.classes)
        sets = [name for name, there in zip(SETS, (phrases, classes), strict=True) if there]
        derived = {control for name in found for control in CONTROLS.get(name, ()) if control in SHAPES}
        return Relations(tally, questions_of([*sorted(found), *sorted(derived), *sets]), causal)

    def rows_of(self, unit: Unit) -> Iterator[Ask]:
        """What is asked about a text: each question, who looks, and the words it should look at."""
        targets: dict[tuple[str, int], list[int]] = {}
        pairs = {} if unit.document is None else self._pairs_of(unit.document)
        for question in self.questions:
            for s, t in pairs.get(question.relation, ()):
                s, t = (s, t) if question.way == ">" else (t, s)
                if s != t and (t < s or not self.causal):
                    targets.setdefault((question, s), []).append(t)
        return ((question, unit, source, tuple(some)) for (question, source), some in targets.items())

    def begin(self, batch: Batch) -> None:
        """Count what does not depend on heads: the arcs, and the rows that lie at each offset."""
        found = [None if unit.document is None else self._ask(unit) for unit in batch.units]
        self._of_batch = BatchArcs(batch, found, len(self.questions))
        for unit, asked in zip(batch.units, found, strict=True):
            if asked is not None:
                np.add.at(self.arcs[unit.bucket], asked.question, 1)
                self.left_out[unit.bucket] += asked.left_out
                np.add.at(self.offsets[unit.bucket], asked.asks, asked.near())

    def at(self, call: Call) -> WordMaps:
        """One call at one site."""
        assert self._of_batch is not None
        return WordMaps(self._of_batch, call, self.questions, self.draw)

    def _ask(self, unit: Unit) -> ArcPairs:
        document, aligned = unit.document, unit.alignment
        assert document is not None
        W, T = len(document.words), len(unit.ids)
        places = [frozenset(tokens) for tokens in aligned.tokens_of_word]
        shared = sorted({pair for words in aligned.words_of_token for pair in combinations(words, 2)})
        to_word, rivals = torch.zeros(T, W + len(shared)), torch.ones(W, W, dtype=torch.bool).fill_diagonal_(False)
        ones = [(token, word) for word, tokens in enumerate(places) for token in tokens]
        to_word[tuple(torch.tensor(ones, dtype=torch.long).reshape(-1, 2).T)] = 1
        for number, (one, other) in enumerate(shared):
            to_word[list(places[one] & places[other]), W + number] = 1
            rivals[[one, other], [other, one]] = False
        from_word = to_word[:, :W].T / to_word[:, :W].sum(0).clamp(min=1)[:, None]
        first = aligned.words_of_token[0]  # the words where heads rest; none behind a start token
        own = to_word[:, :W]
        apart = (
            (own.sum(0) > own.T @ own) & (own.sum(0) > 0)[:, None]
        ).numpy()  # the target has a token the source has not
        question, source, target, left_out = [], [], [], np.zeros(len(self.questions))
        pairs = self._pairs_of(document)
        for number, one in enumerate(self.questions):
            for s, t in pairs.get(one.relation, ()):
                s, t = (s, t) if one.way == ">" else (t, s)
                if s == t or t in first or (t > s and self.causal):
                    continue
                if not apart[s, t]:
                    left_out[number] += 1
                    continue
                question.append(number)
                source.append(s)
                target.append(t)
        q, s, t = (np.array(x, dtype=np.int64) for x in (question, source, target))
        every = np.stack(np.meshgrid(np.arange(W), np.arange(W), indexing="ij"), -1).reshape(-1, 2)
        seen = apart[every[:, 0], every[:, 1]] & ((every[:, 1] < every[:, 0]) | (not self.causal))
        every = every[seen & ~np.isin(every[:, 1], first)]
        strata, place = np.unique(self._stratum(every[:, 0], every[:, 1], W), return_inverse=True)
        pairs = np.concatenate((every, place.reshape(-1, 1)), 1)
        stratum = np.searchsorted(strata, self._stratum(s, t, W))
        both = np.array(shared, dtype=np.int64).reshape(-1, 2)
        return ArcPairs(q, s, t, pairs, stratum, to_word, from_word, both, rivals, left_out)

    def _pairs_of(self, document: Document) -> dict[str, list[tuple[int, int]]]:
        """The pairs of every relation that is asked about, each once and in order."""
        found: dict[str, set[tuple[int, int]]] = {}
        for arc in document.relations:
            found.setdefault(arc.name, set()).add((arc.source, arc.target))
        for name in {question.relation for question in self.questions}:
            if name == "same phrase":
                short = [range(first, end) for first, end in document.phrases if end - first <= 8]
                found[name] = {pair for phrase in short for pair in combinations(phrase, 2)}
            elif name == "same class":
                places: dict[str, list[int]] = {}
                for place, kind in enumerate(document.classes):
                    places.setdefault(kind, []).append(place)
                found[name] = {pair for some in places.values() for pair in combinations(some, 2)}
            elif name in SHAPES:
                found[name] = {*_wrong_pairs(document, name)}
        return {name: sorted(pairs) for name, pairs in found.items()}

    def _stratum(self, source: np.ndarray, target: np.ndarray, words: int) -> np.ndarray:
        """Pairs at the same offset whose rows see about as many words."""
        offset = target - source
        beyond = np.minimum(
            _EXACT + 1 + np.log2(np.maximum(np.abs(offset), _EXACT + 1) / (_EXACT + 1)).astype(int), _EXACT + _STEPS
        )
        size = np.where(np.abs(offset) <= _EXACT, np.abs(offset), beyond)
        place = np.sign(offset) * size + _EXACT + _STEPS
        sight = source if self.causal else np.full_like(source, words - 1)
        return place * _SIGHT + np.minimum(np.log2(np.maximum(sight, 1)).astype(int), _SIGHT - 1)

    def arrays(self) -> dict[str, np.ndarray]:
        """All that was counted, by name: what is saved, and what adds up."""
        return {name: getattr(self, name) for name in ("offsets", "arcs", "left_out")}

    def coverage(self) -> np.ndarray:
        """The share of rows that could be compared with other pairs of their text, (questions,); NaN: none was asked."""
        made = []
        for question in self.questions:
            both = (self.tally.per_bucket(question.numbers[kind].name)[1] for kind in (MATCHED, HITS))
            fit, rows = (counts.max(1).sum() for counts in both)
            made.append(fit / rows if rows else np.nan)
        return np.array(made)


def _wrong_pairs(document: Document, control: str) -> list[tuple[int, int]]:
    """Words that have the shape of a pair and are none, the later one first; in texts that have such a pair, so that what is
    asked of a text does not depend on what else is read."""
    if not any(control in CONTROLS.get(arc.name, ()) for arc in document.relations):
        return []
    shapes, words = SHAPES[control], document.words
    pairs = {frozenset((arc.source, arc.target)) for arc in document.relations}
    shaped = [(s, shapes[word]) for s, word in enumerate(words) if word in shapes]
    return [(s, t) for s, wanted in shaped for t in range(s) if words[t] == wanted and frozenset((s, t)) not in pairs]
