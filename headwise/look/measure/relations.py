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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from headwise.look.measure.call import Call
from headwise.look.measure.draw import Ask, Draw
from headwise.look.measure.measure import Measure, Number, Taker
from headwise.look.measure.questions import (
    COMPARED,
    CONTROLS,
    COUNTED,
    HITS,
    KINDS,
    MASS,
    MATCHED,
    OTHERS,
    SETS,
    SHAPES,
    VALUED,
    Question,
    questions_of,
)
from headwise.look.measure.rows import RowBlock
from headwise.look.measure.scene import NORM
from headwise.look.measure.tally import Tally
from headwise.look.record.buckets import BUCKETS
from headwise.look.record.units import Batch, Unit
from headwise.text.documents import Document

NEAREST = range(-5, 6)  # the fixed offsets that are tried as a baseline
_EXACT, _STEPS, _SIGHT = 16, 3, 10  # offsets told apart one by one; bins beyond; bins of visible words


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
    others: np.ndarray = field(
        init=False
    )  # (A,): how many pairs of the same stratum are no arcs under the same question
    fit: np.ndarray = field(init=False)  # (R,): whether there are some for each of its arcs

    def __post_init__(self) -> None:
        rows, row = np.unique(np.stack((self.question, self.source), 1), axis=0, return_inverse=True)
        row = row.reshape(-1)
        arcs = self.question * (self.pairs[:, 2].max(initial=0) + 1) + self.stratum  # (A,): question and stratum as one
        others = np.bincount(self.pairs[:, 2])[self.stratum] - np.bincount(arcs)[arcs]
        fit = np.bincount(row[others == 0], minlength=len(rows)) == 0
        for name, value in (("row", row), ("asks", rows[:, 0]), ("others", others), ("fit", fit)):
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

    def measured(self, plain: Tensor, valued: Tensor) -> dict[str, Tensor]:
        """What two maps, (H, W, W) each, give every row, by kind: (H, R) each. NaN where a map is."""
        row, fit = torch.from_numpy(self.row), torch.from_numpy(self.fit)
        made = {kind: torch.zeros(len(plain), len(self.asks)) for kind in KINDS}
        for words, hits, mass, matched in ((plain, HITS, MASS, MATCHED), (valued, *VALUED)):
            hit, weight = self.followed(words)  # (H, A)
            hit = hit.float().masked_fill(weight.isnan(), torch.nan)
            made[hits].index_add_(1, row, hit).clamp_(max=1)  # of targets that share a token both are hit
            made[mass].index_add_(1, row, weight)
            made[matched] = made[mass] * fit
        made[OTHERS] = made[OTHERS].index_add_(1, row, self.expected(plain)) * fit
        return made

    def expected(self, words: Tensor) -> Tensor:
        """The mean weight of the pairs an arc is compared with: (H, W, W) → (H, A); 0 where there are none."""
        source, target, stratum = (torch.from_numpy(self.pairs[:, i]) for i in range(3))
        arcs = torch.from_numpy(self.question * (int(stratum.max()) + 1) + self.stratum)  # (A,)
        weight = words[:, torch.from_numpy(self.source), torch.from_numpy(self.target)].double()  # (H, A)
        every = weight.new_zeros(len(words), int(stratum.max()) + 1).index_add_(
            1, stratum, words[:, source, target].double()
        )
        own = weight.new_zeros(len(words), int(arcs.max()) + 1).index_add_(1, arcs, weight)
        rest = (every[:, torch.from_numpy(self.stratum)] - own[:, arcs]).clamp(min=0)
        return (rest / torch.from_numpy(self.others).clamp(min=1)).to(words)

    def followed(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Which arcs a map (H, W, W) hits, and the weight it gives them: (H, A) each."""
        source, target = torch.from_numpy(self.source), torch.from_numpy(self.target)
        weight = words[:, source, target]
        index = torch.arange(words.shape[-1])
        beside = self.rivals[target] & (index != source[:, None])  # (A, W)
        others = words[:, source]  # (H, A, W)
        before = others.masked_fill(~(beside & (index < target[:, None])), -1.0).amax(-1)
        behind = others.masked_fill(~(beside & (index > target[:, None])), -1.0).amax(-1)
        return (weight > before) & (weight >= behind) & (weight > 0), weight  # of equals the first is the one looked at

    def without_self(self, words: Tensor) -> Tensor:
        """A map (H, W, W + shared) as (H, W, W): what a word gives its own tokens goes to no other that shares them."""
        W = len(self.from_word)
        made = words[..., :W].clone()
        for number, (one, other) in enumerate(self.shared.tolist()):
            for s, t in ((one, other), (other, one)):
                made[:, s, t] = (made[:, s, t] - words[:, s, W + number]).clamp(min=0)
        return made


@dataclass(eq=False)
class Relations(Measure):
    """Numbers of every question: `det >` looks from dependent to head, `det <` from head to dependent."""

    tally: Tally
    questions: tuple[Question, ...]
    causal: bool
    offsets: np.ndarray = field(init=False)  # (buckets, questions, offsets): how many rows each fixed offset hits
    arcs: np.ndarray = field(init=False)  # (buckets, questions): those that are eligible
    left_out: np.ndarray = field(
        init=False
    )  # (buckets, questions): those whose words cannot be told apart by their tokens
    draw: Draw | None = None  # takes down what heads do at some places
    _prepared: dict[int, ArcPairs] = field(default_factory=dict)

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
        self._prepared = {}
        for unit in batch.units:
            if unit.document is None:
                continue
            asked = self._ask(unit)
            self._prepared[unit.number] = asked
            bucket = unit.bucket
            np.add.at(self.arcs[bucket], asked.question, 1)
            self.left_out[bucket] += asked.left_out
            np.add.at(self.offsets[bucket], asked.asks, asked.near())

    def at(self, call: Call) -> "WordMaps":
        """One call at one site."""
        return WordMaps(self, call, [self._prepared.get(unit.number) for unit in call.scene.batch.units])

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


class WordMaps(Taker):
    """Word-by-word attention of each unit of a call, plain and weighted by what is fetched, put together from blocks."""

    def __init__(self, relations: Relations, call: Call, pairs: list[ArcPairs | None]) -> None:
        self.relations, self.call, self.pairs = relations, call, pairs
        self.H, self.norm = call.seen.q.shape[1], call.scene.layout.place[NORM]
        sizes = [(0, 0) if one is None else (len(one.from_word), one.to_word.shape[1]) for one in pairs]
        self.plain = [torch.zeros(self.H, *size) for size in sizes]  # (H, W, W + shared) each
        self.valued = [torch.zeros(self.H, *size) for size in sizes]

    def see(self, block: RowBlock) -> None:
        """One block of rows."""
        p = block.share(block.e)
        weighted = block.e * self.call.norms[:, block.heads, None, block.cols.start : block.cols.stop]
        weighted = weighted / block.features[..., self.norm].clamp(min=1e-30)[..., None]
        for row, (one, start) in enumerate(zip(self.pairs, self.call.scene.batch.first.tolist(), strict=True)):
            if one is None:
                continue
            rows, cols = (
                range(max(r.start - start, 0), min(r.stop - start, len(one.to_word))) for r in (block.rows, block.cols)
            )
            if not len(rows) or not len(cols):
                continue
            low, left = rows.start + start - block.rows.start, cols.start + start - block.cols.start
            part = (row, slice(None), slice(low, low + len(rows)), slice(left, left + len(cols)))
            into, out = one.from_word[:, rows.start : rows.stop], one.to_word[cols.start : cols.stop]
            self.plain[row][block.heads] += into @ (p[part].float().cpu() @ out)
            self.valued[row][block.heads] += into @ (weighted[part].float().cpu() @ out)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Sums over rows, by question and kind, (B, H, numbers), and how many rows there are, (B, 1, numbers)."""
        relations, units = self.relations, self.call.scene.batch.units
        if not relations.numbers:
            return None
        Q = len(relations.questions)
        sums = torch.zeros(len(units), self.H, len(relations.numbers))
        counts = torch.zeros(len(units), 1, len(relations.numbers))
        for row, (unit, pairs) in enumerate(zip(units, self.pairs, strict=True)):
            if pairs is None or not len(pairs.question):
                continue
            asks = torch.from_numpy(pairs.asks)
            plain, valued = (pairs.without_self(maps[row]) for maps in (self.plain, self.valued))
            made = pairs.measured(plain, valued)
            stacked = torch.stack([made[kind] for kind in KINDS], -1)  # (H, R, kinds)
            sums[row] = torch.zeros(self.H, Q, len(KINDS)).index_add_(1, asks, stacked).flatten(1)
            rows, fit = (
                torch.bincount(some, minlength=Q)[:, None] for some in (asks, asks[torch.from_numpy(pairs.fit)])
            )
            counts[row, 0] = torch.cat((rows.expand(-1, len(COUNTED)), fit.expand(-1, len(COMPARED))), 1).flatten()
            if relations.draw is not None:
                find = partial(pairs.find, relations.questions)
                relations.draw.see_words(unit, find, made[HITS], made[MASS], plain, self.call.heads)
        return sums, counts


def _wrong_pairs(document: Document, control: str) -> list[tuple[int, int]]:
    """Words that have the shape of a pair and are none, the later one first; in texts that have such a pair, so that what is
    asked of a text does not depend on what else is read."""
    if not any(control in CONTROLS.get(arc.name, ()) for arc in document.relations):
        return []
    shapes, words = SHAPES[control], document.words
    pairs = {frozenset((arc.source, arc.target)) for arc in document.relations}
    shaped = [(s, shapes[word]) for s, word in enumerate(words) if word in shapes]
    return [(s, t) for s, wanted in shaped for t in range(s) if words[t] == wanted and frozenset((s, t)) not in pairs]
