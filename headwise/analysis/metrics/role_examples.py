"""Cases: for every role some of the places where a head could have done it, drawn by chance, whether it did it or not.

How they are drawn is in example_sampler.py. What is shown for a role comes from the half for reporting: hits and misses as
often as they are in it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from headwise.analysis.metrics.metric import RoleTarget
from headwise.distributed.process_group import ProcessGroup
from headwise.heads.hook_point import AttentionCall

ARC_EXAMPLES, TOKEN_EXAMPLES = 32, 64  # places drawn: of each question about relations; and tokens
EXAMPLES_PER_ROLE = 8  # cases told of a role
CONTEXT_TOKENS = 6  # tokens told before and behind
TOKEN, REPEAT = "", "repeats"  # the questions of tokens
MARK_FORMATS = {"": "{}", "token": "[{}]", "attended": "*{}*", "meant": "{{{}}}"}
MAX_EXAMPLES = {"arcs": ARC_EXAMPLES, "rows": TOKEN_EXAMPLES}
ARRAY_NAMES = {"arcs": ("hit", "weight", "best", "max_weight"), "rows": ("maps", "features", "key_targets")}


@dataclass(frozen=True)
class RoleExample:
    """One place: who looks, at what it should for the role and how hard, at what it does look hardest; the text, marked.

    In the text [x] looks, *y* is looked at hardest, and {z} is what the role means, where that is another.
    """

    hit: bool
    weight: float  # on what the role means
    token: str
    expected: str
    attended: str
    max_weight: float  # on what is looked at hardest
    text: str
    segments: tuple[tuple[str, str], ...]  # the same text, (kind, text): "token", "attended", "meant" or ""


@dataclass(frozen=True)
class ExamplePosition:
    """One place that was drawn: a word with its targets, or a token."""

    relation: str  # `det >`; TOKEN for a token, REPEAT for one of repeated tokens; for one of a prompt the number asked
    key: int
    bucket: int
    sample: int
    source: int
    names: tuple[str, ...]  # the words of the text, or its tokens
    targets: tuple[int, ...] = ()


@dataclass(eq=False)
class ExampleStore:
    """What every head did at the places drawn: arrays with a row for each. Those that were never met have `recorded` 0."""

    heads: int
    arcs: tuple[ExamplePosition, ...] = ()
    rows: tuple[ExamplePosition, ...] = ()
    # names of what tokens are marked as, and of the rules that say where a row should look
    feature_names: tuple[str, ...] = ()
    key_target_names: tuple[str, ...] = ()
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.arrays:
            self.arrays = {name: np.zeros(shape, np.float32) for name, shape in self._shapes().items()}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        A, R, H = len(self.arcs), len(self.rows), self.heads
        max_length = max((len(position.names) for position in self.rows), default=0)
        return {
            "recorded": (A + R,), "hit": (A, H), "weight": (A, H), "best": (A, H), "max_weight": (A, H),
            "maps": (R, H, max_length), "features": (R, max_length, len(self.feature_names)),
            "key_targets": (R, len(self.key_target_names)),  # the place in the text, counted from 1; 0: none
        }  # fmt: skip

    def gather_from_processes(self, process_group: ProcessGroup) -> None:
        """What all processes met, each its own."""
        for name in sorted(self.arrays):
            process_group.all_reduce_array_inplace(self.arrays[name])

    # Afterwards.

    def merge(self, other: "ExampleStore") -> "ExampleStore":
        """The places with the smallest keys of both; one that is in both counts once."""
        selected: list[list[tuple[ExamplePosition, ExampleStore, int]]] = []
        for kind in ("arcs", "rows"):
            by_relation: dict[str, dict[int, tuple[ExamplePosition, ExampleStore, int]]] = {}
            for store in (self, other):
                for index, position in enumerate(getattr(store, kind)):
                    by_relation.setdefault(position.relation, {}).setdefault(position.key, (position, store, index))
            keys = {relation: sorted(entries)[: MAX_EXAMPLES[kind]] for relation, entries in by_relation.items()}
            selected.append([by_relation[relation][key] for relation in sorted(keys) for key in keys[relation]])
        arcs, rows = selected
        first, second = (tuple(position for position, _, _ in entries) for entries in (arcs, rows))
        merged = ExampleStore(self.heads, first, second, self.feature_names, self.key_target_names)
        for new, (_, store, old) in enumerate([*arcs, *rows]):
            row, kind = (new, "arcs") if new < len(arcs) else (new - len(arcs), "rows")
            merged.arrays["recorded"][new] = store.arrays["recorded"][old + (0 if kind == "arcs" else len(store.arcs))]
            for name in ARRAY_NAMES[kind]:
                value, target = store.arrays[name][old], merged.arrays[name][row]
                overlap = tuple(slice(min(sizes)) for sizes in zip(value.shape, target.shape, strict=True))
                target[overlap] = value[overlap]  # a longer text that was driven out left room behind
        return merged

    def examples_for_head(
        self, target: RoleTarget | None, bucket_mask: np.ndarray, head: int, hit_rate: float | None
    ) -> tuple[RoleExample, ...]:
        """Cases of a role for one head, from the buckets of a half: hits and misses as often as they are. `target` is what
        its measure is about; None: what cannot be shown.

        `hit_rate` is how often it hits, where that is known; else it is how often it does at the places drawn.
        """
        candidates = list(self._candidates(target, bucket_mask, head)) if target is not None else []
        if not candidates:
            return ()
        hit_rate = float(np.mean([candidate.hit for candidate in candidates])) if hit_rate is None else hit_rate
        hits, misses = (
            [candidate for candidate in candidates if candidate.hit == expected] for expected in (True, False)
        )
        for count in range(min(EXAMPLES_PER_ROLE, len(candidates)), 0, -1):
            expected = round(count * hit_rate)
            if expected <= len(hits) and count - expected <= len(misses):
                selected = [*hits[:expected], *misses[: count - expected]]
                return tuple(_make_example(candidate) for candidate in candidates if candidate in selected)
        return tuple(_make_example(candidate) for candidate in candidates[:1])

    def _candidates(self, target: RoleTarget, half: np.ndarray, head: int) -> Iterator["_HeadExample"]:
        arrays = self.arrays
        for index, position in enumerate(self.arcs):
            if target == RoleTarget("arc", position.relation) and arrays["recorded"][index] and half[position.bucket]:
                hit, weight, best, max_weight = (
                    float(arrays[name][index, head]) for name in ("hit", "weight", "best", "max_weight")
                )
                yield _HeadExample(position, bool(hit), weight, int(best), max_weight, position.targets[0])
        for index, position in enumerate(self.rows):
            if not arrays["recorded"][len(self.arcs) + index] or not half[position.bucket]:
                continue
            weights = arrays["maps"][index, head, : len(position.names)]
            num_visible = (
                len(position.names) if arrays["maps"][index, :, position.source + 1 :].any() else position.source + 1
            )
            targets = list(self._targets(target, index, num_visible))
            if targets:
                best, expected = int(weights.argmax()), targets[int(weights[targets].argmax())]
                yield _HeadExample(
                    position, best in targets, float(weights[targets].sum()), best, float(weights[best]), expected
                )

    def _targets(self, target: RoleTarget, index: int, num_visible: int) -> Iterable[int]:
        """The tokens that a role is about, for one row that sees so many; none where the row is not asked."""
        position, value = self.rows[index], target.value
        source, visible = position.source, range(1, num_visible)  # the first token is no target
        if position.relation != TOKEN or target.kind in ("repeat", "prompt"):
            if target.kind == "prompt":
                return position.targets if position.relation == value else ()
            return [position.targets[int(value)]] if (position.relation, target.kind) == (REPEAT, "repeat") else ()
        match target.kind:
            case "offset":
                return [j for j in (source - int(value),) if j in visible]
            case "within":
                return [j for j in visible if j != source and abs(source - j) <= int(value)]
            case "beyond":
                return [j for j in visible if abs(source - j) >= int(value)]
            case "feature" if value in self.feature_names:
                values = self.arrays["features"][index, :, self.feature_names.index(str(value))]
                return [j for j in visible if values[j]]
            case "key_target" if value in self.key_target_names:
                return [
                    j
                    for j in (int(self.arrays["key_targets"][index, self.key_target_names.index(str(value))]) - 1,)
                    if j in visible
                ]
        return ()

    def positions_to_dict(self) -> dict[str, Any]:
        """The places, as plain data; the arrays are saved beside them."""
        positions = {
            "arcs": [asdict(position) for position in self.arcs],
            "rows": [asdict(position) for position in self.rows],
        }
        return {**positions, "features": self.feature_names, "key_targets": self.key_target_names}

    @staticmethod
    def of(heads: int, stored: dict[str, Any], arrays: dict[str, np.ndarray]) -> "ExampleStore":
        """What `to_dict` and the arrays gave."""
        arcs, rows = (
            tuple(
                ExamplePosition(**{**entry, "names": tuple(entry["names"]), "targets": tuple(entry["targets"])})
                for entry in stored[kind]
            )
            for kind in ("arcs", "rows")
        )
        store = ExampleStore(heads, arcs, rows, tuple(stored["features"]), tuple(stored["key_targets"]))
        store.arrays = {name: arrays[f"examples/{name}"] for name in store.arrays}
        return store


def repeated_token_examples(tokens: Sequence[Sequence[str]], start: int, length: int) -> list[ExamplePosition]:
    """A token of the second copy in each sequence of repeated ones, those of 16 sequences alike: they are read together."""
    positions = []
    for index, names in enumerate(tokens):  # none where there is no room to repeat anything
        row = start + length + 1 + (5 * (index // 16)) % (length - 1)
        positions.append(
            ExamplePosition(REPEAT, index, index, index, row, tuple(names), (row - length + 1, row - length))
        )
    return positions


def attention_from_position(position: ExamplePosition, call: AttentionCall, example: int, start: int) -> np.ndarray:
    """Where the heads of a site look from a token of one text, which begins at `start`: (H, S)."""
    row = call.map_rows([position.source + start], slice(example, example + 1))  # (1, H, 1, T)
    return row[0, :, 0, start : start + len(position.names)].float().cpu().numpy()


def make_marked_segments(names: Sequence[str], marks: dict[int, str]) -> tuple[tuple[str, str], ...]:
    """A text in parts, (kind, text): marked words with their kind, and what is around them; a long middle is left out.

    >>> make_marked_segments(("the", "cat", "sat"), {2: "token", 1: "attended"})
    (('', 'the '), ('attended', 'cat'), ('', ' '), ('token', 'sat'))
    """
    far = max(marks) - min(marks) > 30
    around = CONTEXT_TOKENS // 2 if far else CONTEXT_TOKENS
    low, high = max(0, min(marks) - around), min(max(marks) + around + 1, len(names))
    segments: list[tuple[str, str]] = []
    for i in range(low, high):
        if far and min(abs(i - index) for index in marks) > around:
            if segments[-1][1] != " … ":
                segments.append(("", " … "))
            continue
        if segments and segments[-1][1] != " … ":
            segments.append(("", " "))
        segments.append((marks.get(i, ""), names[i]))
    joined: list[tuple[str, str]] = []
    for kind, text in segments:
        if joined and not kind and not joined[-1][0]:
            joined[-1] = "", joined[-1][1] + text
        else:
            joined.append((kind, text))
    return tuple(joined)


def render_marks(segments: Iterable[tuple[str, str]]) -> str:
    """Parts as one text: [x] looks, *y* is looked at hardest, {z} is meant.

    >>> render_marks((("attended", "cat"), ("", " "), ("token", "sat")))
    '*cat* [sat]'
    """
    return "".join(MARK_FORMATS[kind].format(text) for kind, text in segments)


class _HeadExample(NamedTuple):
    position: ExamplePosition
    hit: bool
    weight: float
    best: int
    max_weight: float
    expected: int


def _make_example(candidate: _HeadExample) -> RoleExample:
    position, expected = candidate.position, candidate.best if candidate.hit else candidate.expected
    segments = make_marked_segments(
        position.names, {expected: "meant", candidate.best: "attended", position.source: "token"}
    )
    token, expected_name, attended = (position.names[i] for i in (position.source, expected, candidate.best))
    return RoleExample(
        candidate.hit,
        candidate.weight,
        token,
        expected_name,
        attended,
        candidate.max_weight,
        render_marks(segments),
        segments,
    )
