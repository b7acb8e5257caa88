"""Cases: for every role some of the places where a head could have done it, drawn by chance, whether it did it or not.

How they are drawn is in draw.py. What is shown for a role comes from the half for reporting: hits and misses as often as they
are in it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from headwise.analysis.metrics.metric import Target
from headwise.distributed.process_group import Team
from headwise.heads.hook_point import Seen

ARCS, ROWS = 32, 64  # places drawn: of each question about relations; and tokens
SHOWN = 8  # cases told of a role
AROUND = 6  # tokens told before and behind
ROW, ECHO = "", "repeats"  # the questions of tokens
MARKS = {"": "{}", "token": "[{}]", "attended": "*{}*", "meant": "{{{}}}"}
MOST = {"arcs": ARCS, "rows": ROWS}
NAMES = {"arcs": ("hit", "weight", "best", "most"), "rows": ("maps", "marks", "aims")}


@dataclass(frozen=True)
class Example:
    """One place: who looks, at what it should for the role and how hard, at what it does look hardest; the text, marked.

    In the text [x] looks, *y* is looked at hardest, and {z} is what the role means, where that is another.
    """

    hit: bool
    weight: float  # on what the role means
    token: str
    meant: str
    attended: str
    most: float  # on what is looked at hardest
    text: str
    parts: tuple[tuple[str, str], ...]  # the same text, (kind, text): "token", "attended", "meant" or ""


@dataclass(frozen=True)
class Place:
    """One place that was drawn: a word with its targets, or a token."""

    question: str  # `det >`; ROW for a token, ECHO for one of repeated tokens; for one of a prompt the number asked
    key: int
    bucket: int
    unit: int
    source: int
    names: tuple[str, ...]  # the words of the text, or its tokens
    targets: tuple[int, ...] = ()


@dataclass(eq=False)
class Cases:
    """What every head did at the places drawn: arrays with a row for each. Those that were never met have `met` 0."""

    heads: int
    arcs: tuple[Place, ...] = ()
    rows: tuple[Place, ...] = ()
    marks: tuple[str, ...] = ()  # names of what tokens are marked as, and of the rules that say where a row should look
    aims: tuple[str, ...] = ()
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.arrays:
            self.arrays = {name: np.zeros(shape, np.float32) for name, shape in self._shapes().items()}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        A, R, H = len(self.arcs), len(self.rows), self.heads
        longest = max((len(place.names) for place in self.rows), default=0)
        return {
            "met": (A + R,), "hit": (A, H), "weight": (A, H), "best": (A, H), "most": (A, H),
            "maps": (R, H, longest), "marks": (R, longest, len(self.marks)),
            "aims": (R, len(self.aims)),  # the place in the text, counted from 1; 0: none
        }  # fmt: skip

    def gather(self, team: Team) -> None:
        """What all processes met, each its own."""
        for name in sorted(self.arrays):
            team.add_up(self.arrays[name])

    # Afterwards.

    def merge(self, other: "Cases") -> "Cases":
        """The places with the smallest keys of both; one that is in both counts once."""
        chosen: list[list[tuple[Place, Cases, int]]] = []
        for kind in ("arcs", "rows"):
            found: dict[str, dict[int, tuple[Place, Cases, int]]] = {}
            for made in (self, other):
                for number, place in enumerate(getattr(made, kind)):
                    found.setdefault(place.question, {}).setdefault(place.key, (place, made, number))
            kept = {question: sorted(some)[: MOST[kind]] for question, some in found.items()}
            chosen.append([found[question][key] for question in sorted(kept) for key in kept[question]])
        arcs, rows = chosen
        first, second = (tuple(place for place, _, _ in some) for some in (arcs, rows))
        merged = Cases(self.heads, first, second, self.marks, self.aims)
        for new, (_, made, old) in enumerate([*arcs, *rows]):
            at, kind = (new, "arcs") if new < len(arcs) else (new - len(arcs), "rows")
            merged.arrays["met"][new] = made.arrays["met"][old + (0 if kind == "arcs" else len(made.arcs))]
            for name in NAMES[kind]:
                value, into = made.arrays[name][old], merged.arrays[name][at]
                both = tuple(slice(min(sizes)) for sizes in zip(value.shape, into.shape, strict=True))
                into[both] = value[both]  # a longer text that was driven out left room behind
        return merged

    def examples(self, target: Target | None, half: np.ndarray, head: int, share: float | None) -> tuple[Example, ...]:
        """Cases of a role for one head, from the buckets of a half: hits and misses as often as they are. `target` is what
        its measure is about; None: what cannot be shown.

        `share` is how often it hits, where that is known; else it is how often it does at the places drawn.
        """
        looks = list(self._looks(target, half, head)) if target is not None else []
        if not looks:
            return ()
        share = float(np.mean([look.hit for look in looks])) if share is None else share
        hits, misses = ([look for look in looks if look.hit == wanted] for wanted in (True, False))
        for count in range(min(SHOWN, len(looks)), 0, -1):
            wanted = round(count * share)
            if wanted <= len(hits) and count - wanted <= len(misses):
                shown = [*hits[:wanted], *misses[: count - wanted]]
                return tuple(_example(look) for look in looks if look in shown)
        return tuple(_example(look) for look in looks[:1])

    def _looks(self, target: Target, half: np.ndarray, head: int) -> Iterator["_Look"]:
        arrays = self.arrays
        for number, place in enumerate(self.arcs):
            if target == Target("arc", place.question) and arrays["met"][number] and half[place.bucket]:
                hit, weight, best, most = (
                    float(arrays[name][number, head]) for name in ("hit", "weight", "best", "most")
                )
                yield _Look(place, bool(hit), weight, int(best), most, place.targets[0])
        for number, place in enumerate(self.rows):
            if not arrays["met"][len(self.arcs) + number] or not half[place.bucket]:
                continue
            weights = arrays["maps"][number, head, : len(place.names)]
            sees = len(place.names) if arrays["maps"][number, :, place.source + 1 :].any() else place.source + 1
            targets = list(self._targets(target, number, sees))
            if targets:
                best, meant = int(weights.argmax()), targets[int(weights[targets].argmax())]
                yield _Look(place, best in targets, float(weights[targets].sum()), best, float(weights[best]), meant)

    def _targets(self, target: Target, number: int, sees: int) -> Iterable[int]:
        """The tokens that a role is about, for one row that sees so many; none where the row is not asked."""
        place, value = self.rows[number], target.value
        source, seen = place.source, range(1, sees)  # the first token is no target
        if place.question != ROW or target.kind in ("echo", "prompt"):
            if target.kind == "prompt":
                return place.targets if place.question == value else ()
            return [place.targets[int(value)]] if (place.question, target.kind) == (ECHO, "echo") else ()
        match target.kind:
            case "offset":
                return [j for j in (source - int(value),) if j in seen]
            case "within":
                return [j for j in seen if j != source and abs(source - j) <= int(value)]
            case "beyond":
                return [j for j in seen if abs(source - j) >= int(value)]
            case "marked" if value in self.marks:
                column = self.arrays["marks"][number, :, self.marks.index(str(value))]
                return [j for j in seen if column[j]]
            case "aim" if value in self.aims:
                return [j for j in (int(self.arrays["aims"][number, self.aims.index(str(value))]) - 1,) if j in seen]
        return ()

    def to_dict(self) -> dict[str, Any]:
        """The places, as plain data; the arrays are saved beside them."""
        places = {"arcs": [asdict(place) for place in self.arcs], "rows": [asdict(place) for place in self.rows]}
        return {**places, "marks": self.marks, "aims": self.aims}

    @staticmethod
    def of(heads: int, stored: dict[str, Any], arrays: dict[str, np.ndarray]) -> "Cases":
        """What `to_dict` and the arrays gave."""
        arcs, rows = (
            tuple(
                Place(**{**one, "names": tuple(one["names"]), "targets": tuple(one["targets"])}) for one in stored[kind]
            )
            for kind in ("arcs", "rows")
        )
        made = Cases(heads, arcs, rows, tuple(stored["marks"]), tuple(stored["aims"]))
        made.arrays = {name: arrays[f"cases/{name}"] for name in made.arrays}
        return made


def echo_places(tokens: Sequence[Sequence[str]], start: int, length: int) -> list[Place]:
    """A token of the second copy in each sequence of repeated ones, those of 16 sequences alike: they are read together."""
    made = []
    for number, names in enumerate(tokens):  # none where there is no room to repeat anything
        row = start + length + 1 + (5 * (number // 16)) % (length - 1)
        made.append(Place(ECHO, number, number, number, row, tuple(names), (row - length + 1, row - length)))
    return made


def weights_at(place: Place, seen: Seen, example: int, start: int) -> np.ndarray:
    """Where the heads of a site look from a token of one text, which begins at `start`: (H, S)."""
    row = seen.rows([place.source + start], slice(example, example + 1))  # (1, H, 1, T)
    return row[0, :, 0, start : start + len(place.names)].float().cpu().numpy()


def marked(names: Sequence[str], marks: dict[int, str]) -> tuple[tuple[str, str], ...]:
    """A text in parts, (kind, text): marked words with their kind, and what is around them; a long middle is left out.

    >>> marked(("the", "cat", "sat"), {2: "token", 1: "attended"})
    (('', 'the '), ('attended', 'cat'), ('', ' '), ('token', 'sat'))
    """
    far = max(marks) - min(marks) > 30
    around = AROUND // 2 if far else AROUND
    low, high = max(0, min(marks) - around), min(max(marks) + around + 1, len(names))
    parts: list[tuple[str, str]] = []
    for i in range(low, high):
        if far and min(abs(i - place) for place in marks) > around:
            if parts[-1][1] != " … ":
                parts.append(("", " … "))
            continue
        if parts and parts[-1][1] != " … ":
            parts.append(("", " "))
        parts.append((marks.get(i, ""), names[i]))
    joined: list[tuple[str, str]] = []
    for kind, text in parts:
        if joined and not kind and not joined[-1][0]:
            joined[-1] = "", joined[-1][1] + text
        else:
            joined.append((kind, text))
    return tuple(joined)


def written(parts: Iterable[tuple[str, str]]) -> str:
    """Parts as one text: [x] looks, *y* is looked at hardest, {z} is meant.

    >>> written((("attended", "cat"), ("", " "), ("token", "sat")))
    '*cat* [sat]'
    """
    return "".join(MARKS[kind].format(text) for kind, text in parts)


class _Look(NamedTuple):
    place: Place
    hit: bool
    weight: float
    best: int
    most: float
    meant: int


def _example(look: _Look) -> Example:
    place, meant = look.place, look.best if look.hit else look.meant
    parts = marked(place.names, {meant: "meant", look.best: "attended", place.source: "token"})
    token, named, attended = (place.names[i] for i in (place.source, meant, look.best))
    return Example(look.hit, look.weight, token, named, attended, look.most, written(parts), parts)
