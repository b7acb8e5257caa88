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

from headwise.analysis.metrics.attention_call import AttentionCallContext, AttentionObserver
from headwise.analysis.metrics.batch_context import FeatureLayout
from headwise.analysis.metrics.role_examples import (
    ARC_EXAMPLES,
    ARRAY_NAMES,
    CONTEXT_TOKENS,
    REPEAT,
    TOKEN,
    TOKEN_EXAMPLES,
    ExamplePosition,
    ExampleStore,
    attention_from_position,
)
from headwise.analysis.recording.batching import TextSample

MAX_POSITION = 128  # tokens are drawn among the first so many of a text

# a question, a text, the word that looks, what it should look at
RelationTargets = tuple[str, TextSample, int, tuple[int, ...]]


@dataclass(eq=False)
class SampledExample:
    """A place, and what every head did there, as far as its text was read."""

    position: ExamplePosition
    arrays: dict[str, np.ndarray]
    recorded: bool = False


@dataclass(eq=False)
class BottomKSample:
    """The places with the so many smallest keys.

    >>> bottom = BottomKSample(2)
    >>> for key in (5, 3, 9, 3, 1):
    ...     _ = bottom.accepts(key) and bottom.add(SampledExample(ExamplePosition("", key, 0, 0, 0, ()), {}))
    >>> sorted(bottom.examples)
    [1, 3]
    """

    k: int
    examples: dict[int, SampledExample] = field(default_factory=dict)  # by key
    _heap: list[int] = field(default_factory=list)  # the largest first, by its negative

    def accepts(self, key: int) -> bool:
        """Whether a place with this key would be kept; one that is there already is not taken twice."""
        return (len(self._heap) < self.k or key < -self._heap[0]) and key not in self.examples

    def add(self, example: SampledExample) -> SampledExample | None:
        """Keep a place, and give back the one it drives out."""
        self.examples[example.position.key] = example
        heappush(self._heap, -example.position.key)
        return self.examples.pop(-heappop(self._heap)) if len(self._heap) > self.k else None


class ExampleSampler(AttentionObserver):
    """Looks through texts, draws places, and takes down what heads do there; `finish` gives the cases.

    `ahead`: whether any head may look at what comes after a token. Where none does, the rest of a text is not kept."""

    def __init__(
        self, heads: int, repeat_examples: Iterable[ExamplePosition], layout: FeatureLayout, *, ahead: bool = True
    ) -> None:
        self.heads, self.repeat_examples, self.feature_names, self.ahead = (
            heads,
            tuple(repeat_examples),
            layout.feature_names,
            ahead,
        )
        # that say where a row should look
        self.key_target_names = tuple(key_target.name for key_target in layout.key_targets)
        self._relation_examples: dict[str, BottomKSample] = {}
        self._token_examples = BottomKSample(TOKEN_EXAMPLES)
        self._relation_examples_by_sample: dict[int, list[SampledExample]] = {}  # by the number of their text
        self._token_examples_by_sample: dict[int, list[SampledExample]] = {}

    # Before a text is read.

    def draw_token_examples(self, sample: TextSample) -> None:
        """Draw among the tokens of a text."""
        keys = np.random.default_rng(_hash(repr(sample.ids))).integers(1, 1 << 53, MAX_POSITION).tolist()
        for row in range(1, min(len(sample.ids), MAX_POSITION)):
            if self._token_examples.accepts(keys[row]):
                names = sample.token_texts if self.ahead else sample.token_texts[: row + CONTEXT_TOKENS + 1]
                position, n = ExamplePosition(TOKEN, keys[row], sample.bucket, sample.index, row, names), len(names)
                sizes = {
                    "maps": (self.heads, n),
                    "features": (n, len(self.feature_names)),
                    "key_targets": (len(self.key_target_names),),
                }
                self._store(self._token_examples, self._token_examples_by_sample, position, sizes)

    def draw_relation_examples(self, pairs: Iterable[RelationTargets]) -> None:
        """Draw among what is asked about the relations of a text."""
        last, ids = None, ""
        for relation, sample, source, targets in pairs:
            if sample is not last:
                last, ids = sample, str(sample.ids)
            key = _hash(f"{relation}|{source}|{ids}")
            bottom_k = self._relation_examples.setdefault(relation, BottomKSample(ARC_EXAMPLES))
            if bottom_k.accepts(key):
                names = sample.document.words if sample.document else ()
                position = ExamplePosition(relation, key, sample.bucket, sample.index, source, names, targets)
                sizes: dict[str, tuple[int, ...]] = dict.fromkeys(ARRAY_NAMES["arcs"], (self.heads,))
                self._store(bottom_k, self._relation_examples_by_sample, position, sizes)

    def _store(
        self,
        bottom_k: BottomKSample,
        by_sample: dict[int, list[SampledExample]],
        position: ExamplePosition,
        sizes: dict[str, tuple[int, ...]],
    ) -> None:
        example = SampledExample(position, {name: np.zeros(size, np.float32) for name, size in sizes.items()})
        by_sample.setdefault(position.sample, []).append(example)
        evicted = bottom_k.add(example)
        if evicted is not None:
            remaining = by_sample[evicted.position.sample]
            remaining.remove(evicted)
            if not remaining:
                del by_sample[evicted.position.sample]

    # While it is read.

    def record_relation_examples(
        self,
        sample: TextSample,
        find_row: Callable[[str, int], int | None],
        hit: Tensor,
        weight: Tensor,
        maps: Tensor,
        heads: slice,
    ) -> None:
        """One unit at one site: what every row asked about hits, and the weight on its targets, (H, R) each; and the map of
        its words, (H, W, W). `find_row` gives the row of a question and a word, if it was asked.
        """
        for sampled in self._relation_examples_by_sample.get(sample.index, ()):
            position = sampled.position
            row = find_row(position.relation, position.source)
            if row is None:
                continue
            word_weights = maps[:, position.source].clone()  # (H, W)
            word_weights[:, position.source] = -1.0
            max_weight, best = word_weights.max(-1)
            for name, value in (
                ("hit", hit[:, row]),
                ("weight", weight[:, row]),
                ("best", best),
                ("max_weight", max_weight),
            ):
                sampled.arrays[name][heads] = value.cpu().numpy()
            sampled.recorded = True

    def on_call(self, call: AttentionCallContext) -> None:
        """One call at one site, for the tokens drawn that are in this batch."""
        batch_context, batch = call.batch_context, call.batch_context.batch
        for example, sample in enumerate(batch.samples):
            for sampled in self._token_examples_by_sample.get(sample.index, ()):
                position, start = sampled.position, int(batch.first_token_positions[example])
                weights = attention_from_position(position, call.attention_call, example, start)  # (H, S)
                sampled.arrays["maps"][call.head_slice, : weights.shape[1]] = weights
                sampled.arrays["features"][:] = (
                    batch_context.feature_values[example, start : start + len(position.names)].cpu().numpy()
                )
                target_positions = [
                    int(batch_context.key_targets[name][example, start + position.source]) - start + 1
                    for name in self.key_target_names
                ]
                sampled.arrays["key_targets"][:] = np.maximum(target_positions, 0)
                sampled.recorded = True

    # Afterwards.

    def build_example_store(self) -> ExampleStore:
        """The places that stayed, in the order of their questions and keys, with what every head did there."""
        arcs, rows = (
            [bottom_k.examples[key] for bottom_k in groups for key in sorted(bottom_k.examples)]
            for groups in (
                [self._relation_examples[relation] for relation in sorted(self._relation_examples)],
                [self._token_examples],
            )
        )
        positions = (
            tuple(sampled.position for sampled in arcs),
            (*(sampled.position for sampled in rows), *self.repeat_examples),
        )
        examples = ExampleStore(self.heads, *positions, self.feature_names, self.key_target_names)
        for row, sampled in enumerate([*arcs, *rows]):
            examples.arrays["recorded"][row] = sampled.recorded
            index = row if row < len(arcs) else row - len(arcs)
            for name, array in sampled.arrays.items():
                if name == "maps":
                    examples.arrays[name][index, :, : array.shape[1]] = array
                elif name == "features":
                    examples.arrays[name][index, : len(array)] = array
                else:
                    examples.arrays[name][index] = array
        return examples


class ExampleRecorder(AttentionObserver):
    """Takes down what heads do at the places that are shown of repeated tokens, or of other texts read apart."""

    supports_cross_attention = False

    def __init__(self, examples: ExampleStore, relation: str = REPEAT) -> None:
        self.examples = examples
        self.positions = [
            (row, position) for row, position in enumerate(examples.rows) if position.relation == relation
        ]

    def on_call(self, call: AttentionCallContext) -> None:
        """One call at one site."""
        batch, examples = call.batch_context.batch, self.examples
        sample_ids = [sample.index for sample in batch.samples]
        for row, position in self.positions:
            if position.sample in sample_ids:
                example = sample_ids.index(position.sample)
                weights = attention_from_position(
                    position, call.attention_call, example, int(batch.first_token_positions[example])
                )  # (H, S)
                examples.arrays["maps"][row, call.head_slice, : weights.shape[1]] = weights
                examples.arrays["recorded"][len(examples.arcs) + row] = 1


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).digest())
