"""Relation scores: agreement of attention with gold arcs between words, compared with fixed offsets and similar word pairs.

Attention is measured between words: the weight on a word is the sum over its tokens, the weight from a word the mean over its
tokens. Each relation is measured in both directions. Besides the annotated arcs there are two derived relations: words of the
same phrase, and words of the same class.

A row is a source word with one or more target words under a relation. It is a hit if its largest weight is on a target. Its
weight is the sum over all targets, so a perfect head scores 1 for any number of targets. The weight is compared with other
word pairs of the same text at the same distance whose source sees about as many words. A row counts in this comparison if
each of its targets has such pairs. The fraction of rows that count is reported as coverage.

A token can belong to several words, such as `,"`. It counts in the sum of each word, but the weight of a word on its own
tokens is not attributed to other words that share them. So an arc is not eligible if the target has no token of its own, or
if one of the words has no token. Such arcs are counted as left out. Words that share a token do not compete with each other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import torch

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.attention_call import AttentionCallContext
from headwise.analysis.metrics.directed_relations import (
    CONTROL_SHAPES,
    CONTROLS,
    HITS,
    KINDS,
    MATCHED,
    WORD_SETS,
    DirectedRelation,
    both_directions,
)
from headwise.analysis.metrics.example_sampler import ExampleSampler, RelationTargets
from headwise.analysis.metrics.gold_arc_data import BASELINE_OFFSETS, BatchWordArcs, WordArcs
from headwise.analysis.metrics.metric import Metric, MetricSpec
from headwise.analysis.metrics.word_maps import WordMapAccumulator
from headwise.analysis.recording.batching import TextSample, TokenBatch
from headwise.analysis.recording.text_hash_split import BUCKETS
from headwise.text.annotated_document import Document

# strata: exact offsets, bins of larger offsets, bins of the number of visible words
_EXACT_OFFSETS, _FAR_BINS, _VISIBLE_BINS = (16, 3, 10)


@dataclass(eq=False)
class RelationMetric(Metric):
    """Scores of every relation in both directions.

    `det >` is attention from the first word of an arc to the second, `det <` from the second to the first.

    Attributes:
        accumulator: Sums and counts of the scores.
        relations: Relations to measure.
        causal: Whether words can attend to earlier words only.
        sampler: Records the attention at some positions as examples.
        offsets: Number of rows that each fixed offset hits, (buckets, relations, offsets).
        arcs: Number of eligible arcs, (buckets, relations).
        left_out: Number of arcs whose words cannot be distinguished by their tokens, (buckets, relations).
    """

    accumulator: Accumulator
    relations: tuple[DirectedRelation, ...]
    causal: bool
    sampler: ExampleSampler | None = None
    offsets: np.ndarray = field(init=False)
    arcs: np.ndarray = field(init=False)
    left_out: np.ndarray = field(init=False)
    _batch_arcs: BatchWordArcs | None = None  # arcs of the current batch

    def __post_init__(self) -> None:
        Q = len(self.relations)
        self.offsets = np.zeros((BUCKETS, Q, len(BASELINE_OFFSETS)))
        self.arcs, self.left_out = np.zeros((2, BUCKETS, Q))
        self.metric_specs: tuple[MetricSpec, ...] = tuple(
            q.metric_specs[kind] for q in self.relations for kind in KINDS
        )

    @staticmethod
    def of(
        accumulator: Accumulator, documents: Iterable[Document], causal: bool, sampler: ExampleSampler | None = None
    ) -> "RelationMetric":
        """Create a metric for all relations that occur in the documents."""
        names: set[str] = set()
        phrases = classes = False
        for document in documents:
            names |= {arc.name for arc in document.relations}
            phrases, classes = phrases or bool(document.phrases), classes or bool(document.classes)
        sets = [name for name, present in zip(WORD_SETS, (phrases, classes), strict=True) if present]
        derived = {control for name in names for control in CONTROLS.get(name, ()) if control in CONTROL_SHAPES}
        relations = both_directions([*sorted(names), *sorted(derived), *sets])
        return RelationMetric(accumulator, relations, causal, sampler)

    def draw_examples(self, sample: TextSample) -> None:
        """Draw examples of the relations of a text, before the model reads it."""
        if self.sampler is not None:
            self.sampler.draw_relation_examples(self.relation_targets(sample))

    def relation_targets(self, sample: TextSample) -> Iterator[RelationTargets]:
        """Iterate over the rows of a text: relation, text, source word and target words."""
        targets: dict[tuple[str, int], list[int]] = {}
        pairs = {} if sample.document is None else self._pairs_of(sample.document)
        for relation in self.relations:
            for s, t in pairs.get(relation.relation, ()):
                s, t = (s, t) if relation.direction == ">" else (t, s)
                if s != t and (t < s or not self.causal):
                    targets.setdefault((relation, s), []).append(t)
        return ((relation, sample, source, tuple(target_words)) for (relation, source), target_words in targets.items())

    def begin_batch(self, batch: TokenBatch) -> None:
        """Count the arcs and the rows that each fixed offset hits, which do not depend on heads."""
        arcs_by_sample = [None if sample.document is None else self._word_arcs(sample) for sample in batch.samples]
        self._batch_arcs = BatchWordArcs(batch, arcs_by_sample, len(self.relations))
        for sample, arcs in zip(batch.samples, arcs_by_sample, strict=True):
            if arcs is not None:
                np.add.at(self.arcs[sample.bucket], arcs.relation, 1)
                self.left_out[sample.bucket] += arcs.left_out
                np.add.at(self.offsets[sample.bucket], arcs.row_relations, arcs.offset_hits())

    def make_accumulator(self, call: AttentionCallContext) -> WordMapAccumulator:
        """Return an accumulator for the blocks of one attention call."""
        assert self._batch_arcs is not None
        return WordMapAccumulator(self._batch_arcs, call, self.relations, self.sampler)

    def _word_arcs(self, sample: TextSample) -> WordArcs:
        document, aligned = sample.document, sample.alignment
        assert document is not None
        W, T = len(document.words), len(sample.ids)
        token_sets = [frozenset(tokens) for tokens in aligned.tokens_of_word]
        shared = sorted({pair for words in aligned.words_of_token for pair in combinations(words, 2)})
        to_word, rivals = (
            torch.zeros(T, W + len(shared), device="cpu", dtype=torch.float32),
            torch.ones(W, W, dtype=torch.bool, device="cpu").fill_diagonal_(False),
        )
        ones = [(token, word) for word, tokens in enumerate(token_sets) for token in tokens]
        to_word[tuple(torch.tensor(ones, dtype=torch.long, device="cpu").reshape(-1, 2).T)] = 1
        for index, (item, other) in enumerate(shared):
            to_word[list(token_sets[item] & token_sets[other]), W + index] = 1
            rivals[[item, other], [other, item]] = False
        from_word = to_word[:, :W].T / to_word[:, :W].sum(0).clamp(min=1)[:, None]
        first_words = aligned.words_of_token[0]  # words of the first token, an attention sink; empty for a BOS token
        word_tokens = to_word[:, :W]
        # whether the target has a token that the source does not have
        separable = ((word_tokens.sum(0) > word_tokens.T @ word_tokens) & (word_tokens.sum(0) > 0)[:, None]).numpy()
        relation_ids, source, target, left_out = [], [], [], np.zeros(len(self.relations))
        pairs = self._pairs_of(document)
        for index, item in enumerate(self.relations):
            for s, t in pairs.get(item.relation, ()):
                s, t = (s, t) if item.direction == ">" else (t, s)
                if s == t or t in first_words or (t > s and self.causal):
                    continue
                if not separable[s, t]:
                    left_out[index] += 1
                    continue
                relation_ids.append(index)
                source.append(s)
                target.append(t)
        q, s, t = (np.array(x, dtype=np.int64) for x in (relation_ids, source, target))
        word_pairs = np.stack(np.meshgrid(np.arange(W), np.arange(W), indexing="ij"), -1).reshape(-1, 2)
        visible = separable[word_pairs[:, 0], word_pairs[:, 1]] & (
            (word_pairs[:, 1] < word_pairs[:, 0]) | (not self.causal)
        )
        word_pairs = word_pairs[visible & ~np.isin(word_pairs[:, 1], first_words)]
        strata, stratum_index = np.unique(self._stratum(word_pairs[:, 0], word_pairs[:, 1], W), return_inverse=True)
        pairs = np.concatenate((word_pairs, stratum_index.reshape(-1, 1)), 1)
        stratum = np.searchsorted(strata, self._stratum(s, t, W))
        shared_pairs = np.array(shared, dtype=np.int64).reshape(-1, 2)
        return WordArcs(q, s, t, pairs, stratum, to_word, from_word, shared_pairs, rivals, left_out)

    def _pairs_of(self, document: Document) -> dict[str, list[tuple[int, int]]]:
        """Return the word pairs of every measured relation, sorted and without duplicates."""
        pairs_by_name: dict[str, set[tuple[int, int]]] = {}
        for arc in document.relations:
            pairs_by_name.setdefault(arc.name, set()).add((arc.source, arc.target))
        for name in {relation.relation for relation in self.relations}:
            if name == "same phrase":
                short_phrases = [range(first, end) for first, end in document.phrases if end - first <= 8]
                pairs_by_name[name] = {pair for phrase in short_phrases for pair in combinations(phrase, 2)}
            elif name == "same class":
                words_by_class: dict[str, list[int]] = {}
                for index, kind in enumerate(document.classes):
                    words_by_class.setdefault(kind, []).append(index)
                pairs_by_name[name] = {pair for words in words_by_class.values() for pair in combinations(words, 2)}
            elif name in CONTROL_SHAPES:
                pairs_by_name[name] = {*_wrong_pairs(document, name)}
        return {name: sorted(pairs) for name, pairs in pairs_by_name.items()}

    def _stratum(self, source: np.ndarray, target: np.ndarray, words: int) -> np.ndarray:
        """Return the stratum of word pairs, which depends on the offset and on the number of visible words."""
        offset = target - source
        beyond = np.minimum(
            _EXACT_OFFSETS
            + 1
            + np.log2(np.maximum(np.abs(offset), _EXACT_OFFSETS + 1) / (_EXACT_OFFSETS + 1)).astype(int),
            _EXACT_OFFSETS + _FAR_BINS,
        )
        size = np.where(np.abs(offset) <= _EXACT_OFFSETS, np.abs(offset), beyond)
        offset_bin = np.sign(offset) * size + _EXACT_OFFSETS + _FAR_BINS
        visible = source if self.causal else np.full_like(source, words - 1)
        return offset_bin * _VISIBLE_BINS + np.minimum(np.log2(np.maximum(visible, 1)).astype(int), _VISIBLE_BINS - 1)

    def arc_count_arrays(self) -> dict[str, np.ndarray]:
        """Return the arc counts by name. They are stored in the profile file and added when profiles are merged."""
        return {name: getattr(self, name) for name in ("offsets", "arcs", "left_out")}

    def comparable_row_fraction(self) -> np.ndarray:
        """Return the fraction of rows that could be compared with other pairs, (relations,). NaN without rows."""
        fractions = []
        for relation in self.relations:
            counts_by_kind = (
                self.accumulator.bucket_sums_and_counts(relation.metric_specs[kind].name)[1] for kind in (MATCHED, HITS)
            )
            matched, rows = (counts.max(1).sum() for counts in counts_by_kind)
            fractions.append(matched / rows if rows else np.nan)
        return np.array(fractions)


def _wrong_pairs(document: Document, control: str) -> list[tuple[int, int]]:
    """Return word pairs that have the form of a pair but are not one, later word first.

    They are taken only from texts that contain a real pair, so that the pairs of a text do not depend on other texts.
    """
    if not any(control in CONTROLS.get(arc.name, ()) for arc in document.relations):
        return []
    shapes, words = CONTROL_SHAPES[control], document.words
    pairs = {frozenset((arc.source, arc.target)) for arc in document.relations}
    shaped = [(s, shapes[word]) for s, word in enumerate(words) if word in shapes]
    return [(s, t) for s, partner in shaped for t in range(s) if words[t] == partner and frozenset((s, t)) not in pairs]
