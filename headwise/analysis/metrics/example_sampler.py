"""Sample positions to be shown as examples of roles, while the corpus is streamed.

Each position has a key, a hash of the text and the position. The sample is the positions with the smallest keys, for each
relation and for all tokens. So it depends neither on the heads nor on the batches, and the samples of two profiles can be
merged. Positions are drawn before the forward pass. A position that a later text displaces is discarded, so memory does not
depend on the size of the corpus.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

import numpy as np
from torch import Tensor

from headwise.analysis.metrics.attention_call import AttentionCallContext, AttentionObserver
from headwise.analysis.metrics.batch_context import TokenFeatureColumns
from headwise.analysis.metrics.role_example_positions import (
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

MAX_POSITION = 128  # tokens after this position are not drawn

# relation, text, source word, target words
RelationTargets = tuple[str, TextSample, int, tuple[int, ...]]


@dataclass(eq=False)
class SampledPositionAttention:
    """A sampled position and the attention of every head there. `recorded` is set after the forward pass of its text."""

    position: ExamplePosition
    arrays: dict[str, np.ndarray]
    recorded: bool = False


@dataclass(eq=False)
class BottomKSample:
    """The `k` positions with the smallest keys.

    >>> bottom = BottomKSample(2)
    >>> for key in (5, 3, 9, 3, 1):
    ...     _ = bottom.accepts(key) and bottom.add(SampledPositionAttention(ExamplePosition("", key, 0, 0, 0, ()), {}))
    >>> sorted(bottom.examples)
    [1, 3]
    """

    k: int
    examples: dict[int, SampledPositionAttention] = field(default_factory=dict)  # by key
    _heap: list[int] = field(default_factory=list)  # negative keys, so that the largest key comes first

    def accepts(self, key: int) -> bool:
        """Whether a position with this key would be added. A key that is present already is not."""
        return (len(self._heap) < self.k or key < -self._heap[0]) and key not in self.examples

    def add(self, example: SampledPositionAttention) -> SampledPositionAttention | None:
        """Add a position. Return the position that it displaces, if any."""
        self.examples[example.position.key] = example
        heappush(self._heap, -example.position.key)
        return self.examples.pop(-heappop(self._heap)) if len(self._heap) > self.k else None


class ExampleSampler(AttentionObserver):
    """Draw positions of texts and record the attention of heads there. `build_example_store` returns the examples.

    Args:
        heads: Number of heads of the model.
        repeat_examples: Positions in sequences of repeated tokens, which are added to the result.
        layout: Token features and key targets of the metrics.
        ahead: Whether a head can attend to later tokens. If not, the tokens after a position are not stored.
    """

    def __init__(
        self, heads: int, repeat_examples: Iterable[ExamplePosition], layout: TokenFeatureColumns, *, ahead: bool = True
    ) -> None:
        self.heads, self.repeat_examples, self.feature_names, self.ahead = (
            heads,
            tuple(repeat_examples),
            layout.feature_names,
            ahead,
        )
        self.key_target_names = tuple(key_target.name for key_target in layout.key_targets)
        self._relation_examples: dict[str, BottomKSample] = {}
        self._token_examples = BottomKSample(TOKEN_EXAMPLES)
        self._relation_examples_by_sample: dict[int, list[SampledPositionAttention]] = {}  # by the number of their text
        self._token_examples_by_sample: dict[int, list[SampledPositionAttention]] = {}

    # Called before the forward pass of a text.

    def draw_token_examples(self, sample: TextSample) -> None:
        """Draw positions from the tokens of a text."""
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
        """Draw positions from the words of a text that are sources of relations."""
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
        by_sample: dict[int, list[SampledPositionAttention]],
        position: ExamplePosition,
        sizes: dict[str, tuple[int, ...]],
    ) -> None:
        example = SampledPositionAttention(position, {name: np.zeros(size, np.float32) for name, size in sizes.items()})
        by_sample.setdefault(position.sample, []).append(example)
        evicted = bottom_k.add(example)
        if evicted is not None:
            remaining = by_sample[evicted.position.sample]
            remaining.remove(evicted)
            if not remaining:
                del by_sample[evicted.position.sample]

    # Called during the forward pass.

    def record_relation_examples(
        self,
        sample: TextSample,
        find_row: Callable[[str, int], int | None],
        hit: Tensor,
        weight: Tensor,
        maps: Tensor,
        heads: slice,
    ) -> None:
        """Record the relation examples of one text in one attention layer.

        Args:
            sample: The text.
            find_row: Function that returns the row of a relation and a source word, or None if there is none.
            hit: Whether each row has its largest weight on a target, (H, R).
            weight: Weight on the targets of each row, (H, R).
            maps: Attention between words, (H, W, W).
            heads: Heads of the layer, counted over all hook points.
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
        """Record the sampled tokens of the batch in one attention call."""
        batch_context, batch = call.batch_context, call.batch_context.batch
        for example, sample in enumerate(batch.samples):
            for sampled in self._token_examples_by_sample.get(sample.index, ()):
                position, start = sampled.position, batch.first_columns[example]
                weights = attention_from_position(position, call.attention_call, example, start)  # (H, S)
                batch_context.host_copies.copy_then_call(
                    [weights], partial(_store_map, sampled.arrays["maps"], call.head_slice)
                )
                features = batch_context.feature_values_on_host[example, start : start + len(position.names)]
                sampled.arrays["features"][:] = features.numpy()
                columns = batch_context.key_targets_on_host[:, example, start + position.source].numpy()
                sampled.arrays["key_targets"][:] = np.maximum(columns - start + 1, 0)
                sampled.recorded = True

    # Called after the last text.

    def build_example_store(self) -> ExampleStore:
        """Return the sampled positions, ordered by relation and key, with the attention of every head."""
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


class ExampleAttentionRecorder(AttentionObserver):
    """Record the attention of heads at fixed positions: in sequences of repeated tokens, or in the prompts of a task."""

    supports_cross_attention = False

    def __init__(self, examples: ExampleStore, relation: str = REPEAT) -> None:
        self.examples = examples
        self.positions = [
            (row, position) for row, position in enumerate(examples.rows) if position.relation == relation
        ]

    def on_call(self, call: AttentionCallContext) -> None:
        """Record the positions of the batch in one attention call."""
        batch, examples = call.batch_context.batch, self.examples
        sample_ids = [sample.index for sample in batch.samples]
        for row, position in self.positions:
            if position.sample in sample_ids:
                example = sample_ids.index(position.sample)
                start = batch.first_columns[example]
                weights = attention_from_position(position, call.attention_call, example, start)  # (H, S)
                store = partial(_store_map, examples.arrays["maps"][row], call.head_slice)
                call.batch_context.host_copies.copy_then_call([weights], store)
                examples.arrays["recorded"][len(examples.arcs) + row] = 1


def _store_map(maps: np.ndarray, heads: slice, weights: Tensor) -> None:
    """Write the attention of some heads from one token, (H, S), into the array of its position."""
    maps[heads, : weights.shape[1]] = weights.numpy()


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).digest())
