"""Which places are shown as cases: drawn while texts stream by, whatever heads do there.

Places are drawn by a hash of the text and the place: the smallest so many of each relation, and of all tokens. So what is
drawn depends neither on heads nor on batches, and the smallest of two profiles are those of the whole. A text is looked
through before it is read; what a later text drives out is forgotten, so that a corpus of any size takes the same room.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from torch import Tensor

from headwise.analysis.metrics.attention_call import Call
from headwise.analysis.metrics.batch_context import ColumnLayout
from headwise.analysis.metrics.metric import Measure
from headwise.analysis.metrics.role_examples import ARCS, AROUND, ECHO, NAMES, ROW, ROWS, Cases, Place, weights_at
from headwise.analysis.recording.batching import Unit

REACH = 128  # tokens are drawn among the first so many of a text

Ask = tuple[str, Unit, int, tuple[int, ...]]  # a question, a text, the word that looks, what it should look at


@dataclass(eq=False)
class Drawn:
    """A place, and what every head did there, as far as its text was read."""

    place: Place
    arrays: dict[str, np.ndarray]
    met: bool = False


@dataclass(eq=False)
class Smallest:
    """The places with the so many smallest keys.

    >>> two = Smallest(2)
    >>> for key in (5, 3, 9, 3, 1):
    ...     _ = two.takes(key) and two.add(Drawn(Place("", key, 0, 0, 0, ()), {}))
    >>> sorted(two.drawn)
    [1, 3]
    """

    most: int
    drawn: dict[int, Drawn] = field(default_factory=dict)  # by key
    _heap: list[int] = field(default_factory=list)  # the largest first, by its negative

    def takes(self, key: int) -> bool:
        """Whether a place with this key would be kept; one that is there already is not taken twice."""
        return (len(self._heap) < self.most or key < -self._heap[0]) and key not in self.drawn

    def add(self, one: Drawn) -> Drawn | None:
        """Keep a place, and give back the one it drives out."""
        self.drawn[one.place.key] = one
        heappush(self._heap, -one.place.key)
        return self.drawn.pop(-heappop(self._heap)) if len(self._heap) > self.most else None


class Draw(Measure):
    """Looks through texts, draws places, and takes down what heads do there; `finish` gives the cases.

    `ahead`: whether any head may look at what comes after a token. Where none does, the rest of a text is not kept."""

    def __init__(self, heads: int, echoes: Iterable[Place], layout: ColumnLayout, ahead: bool = True) -> None:
        self.heads, self.echoes, self.marks, self.ahead = heads, tuple(echoes), layout.marks, ahead
        self.rules = tuple(aim.name for aim in layout.aims)  # that say where a row should look
        self._words: dict[str, Smallest] = {}
        self._tokens = Smallest(ROWS)
        self._words_of: dict[int, list[Drawn]] = {}  # by the number of their text
        self._tokens_of: dict[int, list[Drawn]] = {}

    # Before a text is read.

    def tokens(self, unit: Unit) -> None:
        """Draw among the tokens of a text."""
        keys = np.random.default_rng(_hashed(repr(unit.ids))).integers(1, 1 << 53, REACH).tolist()
        for row in range(1, min(len(unit.ids), REACH)):
            if self._tokens.takes(keys[row]):
                names = unit.pieces if self.ahead else unit.pieces[: row + AROUND + 1]
                place, n = Place(ROW, keys[row], unit.bucket, unit.number, row, names), len(names)
                sizes = {"maps": (self.heads, n), "marks": (n, len(self.marks)), "aims": (len(self.rules),)}
                self._take(self._tokens, self._tokens_of, place, sizes)

    def words(self, pairs: Iterable[Ask]) -> None:
        """Draw among what is asked about the relations of a text."""
        last, ids = None, ""
        for question, unit, source, targets in pairs:
            if unit is not last:
                last, ids = unit, str(unit.ids)
            key = _hashed(f"{question}|{source}|{ids}")
            some = self._words.setdefault(question, Smallest(ARCS))
            if some.takes(key):
                names = unit.document.words if unit.document else ()
                place = Place(question, key, unit.bucket, unit.number, source, names, targets)
                sizes: dict[str, tuple[int, ...]] = dict.fromkeys(NAMES["arcs"], (self.heads,))
                self._take(some, self._words_of, place, sizes)

    def _take(
        self, some: Smallest, by_text: dict[int, list[Drawn]], place: Place, sizes: dict[str, tuple[int, ...]]
    ) -> None:
        made = Drawn(place, {name: np.zeros(size, np.float32) for name, size in sizes.items()})
        by_text.setdefault(place.unit, []).append(made)
        gone = some.add(made)
        if gone is not None:
            there = by_text[gone.place.unit]
            there.remove(gone)
            if not there:
                del by_text[gone.place.unit]

    # While it is read.

    def see_words(
        self,
        unit: Unit,
        find: Callable[[str, int], int | None],
        hit: Tensor,
        weight: Tensor,
        maps: Tensor,
        heads: slice,
    ) -> None:
        """One unit at one site: what every row asked about hits, and the weight on its targets, (H, R) each; and the map of
        its words, (H, W, W). `find` gives the row of a question and a word, if it was asked.
        """
        for drawn in self._words_of.get(unit.number, ()):
            place = drawn.place
            row = find(place.question, place.source)
            if row is None:
                continue
            looks = maps[:, place.source].clone()  # (H, W)
            looks[:, place.source] = -1.0
            most, best = looks.max(-1)
            for name, value in (("hit", hit[:, row]), ("weight", weight[:, row]), ("best", best), ("most", most)):
                drawn.arrays[name][heads] = value.cpu().numpy()
            drawn.met = True

    def at(self, call: Call) -> None:
        """One call at one site, for the tokens drawn that are in this batch."""
        scene, batch = call.scene, call.scene.batch
        for example, unit in enumerate(batch.units):
            for drawn in self._tokens_of.get(unit.number, ()):
                place, start = drawn.place, int(batch.first[example])
                weights = weights_at(place, call.seen, example, start)  # (H, S)
                drawn.arrays["maps"][call.heads, : weights.shape[1]] = weights
                drawn.arrays["marks"][:] = scene.marks[example, start : start + len(place.names)].cpu().numpy()
                aims = [int(scene.aims[name][example, start + place.source]) - start + 1 for name in self.rules]
                drawn.arrays["aims"][:] = np.maximum(aims, 0)
                drawn.met = True

    # Afterwards.

    def finish(self) -> Cases:
        """The places that stayed, in the order of their questions and keys, with what every head did there."""
        arcs, rows = (
            [some.drawn[key] for some in several for key in sorted(some.drawn)]
            for several in ([self._words[question] for question in sorted(self._words)], [self._tokens])
        )
        places = tuple(drawn.place for drawn in arcs), (*(drawn.place for drawn in rows), *self.echoes)
        made = Cases(self.heads, *places, self.marks, self.rules)
        for number, drawn in enumerate([*arcs, *rows]):
            made.arrays["met"][number] = drawn.met
            own = number if number < len(arcs) else number - len(arcs)
            for name, array in drawn.arrays.items():
                if name == "maps":
                    made.arrays[name][own, :, : array.shape[1]] = array
                elif name == "marks":
                    made.arrays[name][own, : len(array)] = array
                else:
                    made.arrays[name][own] = array
        return made


class ShownPlaces(Measure):
    """Takes down what heads do at the places that are shown of repeated tokens, or of other texts read apart."""

    @property
    def across(self) -> bool:
        """It is not asked of cross-attention."""
        return False

    def __init__(self, cases: Cases, question: str = ECHO) -> None:
        self.cases = cases
        self.places = [(row, place) for row, place in enumerate(cases.rows) if place.question == question]

    def at(self, call: Call) -> None:
        """One call at one site."""
        batch, cases = call.scene.batch, self.cases
        numbers = [unit.number for unit in batch.units]
        for row, place in self.places:
            if place.unit in numbers:
                example = numbers.index(place.unit)
                weights = weights_at(place, call.seen, example, int(batch.first[example]))  # (H, S)
                cases.arrays["maps"][row, call.heads, : weights.shape[1]] = weights
                cases.arrays["met"][len(cases.arcs) + row] = 1


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).digest())
