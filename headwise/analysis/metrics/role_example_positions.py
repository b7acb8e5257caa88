"""Examples of roles: random positions at which a head could show its role, both hits and misses.

`example_sampler.py` draws the positions. The examples of a role come from the reporting half of the corpus, with hits and
misses in their true proportion.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from headwise.analysis.metrics.metric import RoleTarget
from headwise.distributed.process_group import ProcessGroup
from headwise.heads.hook_point import AttentionCall

ARC_EXAMPLES, TOKEN_EXAMPLES = 32, 64  # positions drawn for each relation, and for all tokens
EXAMPLES_PER_ROLE = 8  # examples shown per role
CONTEXT_TOKENS = 6  # tokens shown before and after a marked token
TOKEN, REPEAT = "", "repeats"  # values of ExamplePosition.relation for tokens
MARK_FORMATS = {"": "{}", "token": "[{}]", "attended": "*{}*", "meant": "{{{}}}"}
MAX_EXAMPLES = {"arcs": ARC_EXAMPLES, "rows": TOKEN_EXAMPLES}
ARRAY_NAMES = {"arcs": ("hit", "weight", "best", "max_weight"), "rows": ("maps", "features", "key_targets")}
HEAD_ARRAYS = (*ARRAY_NAMES["arcs"], "maps")  # arrays whose second axis are heads


@dataclass(frozen=True)
class ObservedAttentionExample:
    """Attention of one head at one position, compared with the target of a role.

    Attributes:
        hit: Whether the largest weight is on a target.
        weight: Weight on the targets.
        token: Query token or word.
        expected: Target token or word.
        attended: Token or word with the largest weight.
        max_weight: The largest weight.
        text: Text with marks: [query], *largest weight*, {target} if it is another token.
        segments: The same text as (kind, text), with kind "token" (query), "attended" (largest weight), "meant" (target)
            or "".
    """

    hit: bool
    weight: float
    token: str
    expected: str
    attended: str
    max_weight: float
    text: str
    segments: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ExamplePosition:
    """One sampled position: a word with its targets, or a token.

    Attributes:
        relation: Relation of a word such as `det >`, TOKEN for a token, REPEAT for a token in a repeated sequence, or the
            name of a prompt metric.
        key: Sampling key. The positions with the smallest keys are selected.
        bucket: Bucket of the text.
        sample: Number of the text in the corpus.
        source: Position of the query.
        names: Words or tokens of the text.
        targets: Positions of the targets.
    """

    relation: str
    key: int
    bucket: int
    sample: int
    source: int
    names: tuple[str, ...]
    targets: tuple[int, ...] = ()


@dataclass(eq=False)
class ExampleStore:
    """Attention of every head at the sampled positions.

    Attributes:
        heads: Number of heads.
        arcs: Positions of words with relations.
        rows: Positions of tokens.
        feature_names: Names of the token features.
        key_target_names: Names of the key targets.
        arrays: Arrays with one row per position. `recorded` is 0 for positions whose text was not read.
    """

    heads: int
    arcs: tuple[ExamplePosition, ...] = ()
    rows: tuple[ExamplePosition, ...] = ()
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
            "key_targets": (R, len(self.key_target_names)),  # position in the text, counted from 1; 0 means no target
        }  # fmt: skip

    def gather_from_processes(self, process_group: ProcessGroup) -> None:
        """Add the arrays of all processes. Each position was recorded by one process."""
        for name in sorted(self.arrays):
            process_group.all_reduce_array_inplace(self.arrays[name])

    def merge(self, other: "ExampleStore") -> "ExampleStore":
        """Return the positions with the smallest keys of both stores. A position in both stores counts once."""
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
                target[overlap] = value[overlap]  # the longest text may have been displaced, so lengths can differ
        return merged

    def examples_for_head(
        self, target: RoleTarget | None, bucket_mask: np.ndarray, head: int, hit_rate: float | None
    ) -> tuple[ObservedAttentionExample, ...]:
        """Return examples of a role for one head, with hits and misses in their true proportion.

        Args:
            target: Target of the role. None returns no examples.
            bucket_mask: Buckets to take examples from.
            head: Index of the head.
            hit_rate: Fraction of hits, if known. None uses the fraction at the sampled positions.
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
        """Return the target positions of a role for one row with `num_visible` visible keys. Empty if the row does not
        count for the role."""
        position, value = self.rows[index], target.value
        source, visible = position.source, range(1, num_visible)  # the first token is never a target
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
        """Return the positions as JSON-serializable data. The arrays are stored separately."""
        positions = {
            "arcs": [asdict(position) for position in self.arcs],
            "rows": [asdict(position) for position in self.rows],
        }
        return {**positions, "features": self.feature_names, "key_targets": self.key_target_names}

    @staticmethod
    def of(heads: int, stored: dict[str, Any], arrays: dict[str, np.ndarray]) -> "ExampleStore":
        """Create a store from the result of `positions_to_dict` and the stored arrays."""
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
    """Return one position in the second copy of each repeated sequence. 16 sequences, which share a batch, have the same."""
    positions = []
    for index, names in enumerate(tokens):  # empty if the context is too short to repeat tokens
        row = start + length + 1 + (5 * (index // 16)) % (length - 1)
        positions.append(
            ExamplePosition(REPEAT, index, index, index, row, tuple(names), (row - length + 1, row - length))
        )
    return positions


def attention_from_position(position: ExamplePosition, call: AttentionCall, example: int, start: int) -> Tensor:
    """Return the attention of the heads of a call from one token, (H, S). The text begins at column `start`."""
    row = call.map_rows([position.source + start], slice(example, example + 1))  # (1, H, 1, T)
    return row[0, :, 0, start : start + len(position.names)].float()


def split_text_at_marks(names: Sequence[str], marks: dict[int, str]) -> tuple[tuple[str, str], ...]:
    """Split a text into segments (kind, text): marked words with their kind, and unmarked text around them.

    A long gap between marked words is replaced by an ellipsis.

    >>> split_text_at_marks(("the", "cat", "sat"), {2: "token", 1: "attended"})
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
    """Join segments to one text with marks: [query], *largest weight*, {target}.

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


def _make_example(candidate: _HeadExample) -> ObservedAttentionExample:
    position, expected = candidate.position, candidate.best if candidate.hit else candidate.expected
    segments = split_text_at_marks(
        position.names, {expected: "meant", candidate.best: "attended", position.source: "token"}
    )
    token, expected_name, attended = (position.names[i] for i in (position.source, expected, candidate.best))
    return ObservedAttentionExample(
        candidate.hit,
        candidate.weight,
        token,
        expected_name,
        attended,
        candidate.max_weight,
        render_marks(segments),
        segments,
    )
