"""Arcs between words: those of one text, and those of a batch as one list, so that a layer is measured in few operations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.directed_relations import (
    COMPARED,
    COUNTED,
    HITS,
    KINDS,
    MASS,
    MATCHED,
    OTHERS,
    VALUE_WEIGHTED,
)
from headwise.analysis.recording.batching import TokenBatch

BASELINE_OFFSETS = range(-5, 6)  # the fixed offsets that are tried as a baseline
MAX_CELLS = 1 << 22  # weights that are compared with each other at once


@dataclass(frozen=True, eq=False)
class WordArcs:
    """The pairs of one unit that are asked about, by words: who looks at whom, under which question."""

    relation: np.ndarray  # (A,)
    source: np.ndarray  # (A,)
    target: np.ndarray  # (A,)
    pairs: np.ndarray  # (P, 3): every visible pair of words, and its stratum, of S in this text
    stratum: np.ndarray  # (A,)
    # (T, W + pairs that share tokens): 1 where a token belongs to a word, or to both words of such a pair
    key_to_word_matrix: Tensor
    query_to_word_matrix: Tensor  # (W, T): the mean over a word's tokens
    shared_pairs: np.ndarray  # (pairs that share tokens, 2): the words
    rivals: Tensor  # (W, W): 1 where two words have no token in common
    left_out: np.ndarray  # (questions,): arcs that are not eligible
    row: np.ndarray = field(init=False)  # (A,): the row of each arc, of R
    row_relations: np.ndarray = field(init=False)  # (R,): the question of each row
    arcs: np.ndarray = field(init=False)  # (A,): question and stratum as one number
    # (A,): how many pairs of the same stratum are no arcs under the same question
    others: np.ndarray = field(init=False)
    fit: np.ndarray = field(init=False)  # (R,): whether there are some for each of its arcs

    def __post_init__(self) -> None:
        rows, row = np.unique(np.stack((self.relation, self.source), 1), axis=0, return_inverse=True)
        row = row.reshape(-1)
        arcs = self.relation * (self.pairs[:, 2].max(initial=0) + 1) + self.stratum
        others = np.bincount(self.pairs[:, 2])[self.stratum] - np.bincount(arcs)[arcs]
        fit = np.bincount(row[others == 0], minlength=len(rows)) == 0
        derived = {"row": row, "row_relations": rows[:, 0], "arcs": arcs, "others": others, "fit": fit}
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def find_row(self, relations: Sequence[str], relation: str, source: int) -> int | None:
        """The row of a word under a question; None where it is not asked."""
        rows = self.row[(self.relation == relations.index(relation)) & (self.source == source)]
        return int(rows[0]) if len(rows) else None

    def offset_hits(self) -> np.ndarray:
        """Which rows each fixed offset hits, (R, offsets): the word there is a target, or shares a token with one."""
        positions = self.source[:, None] + np.array(BASELINE_OFFSETS)  # (A, offsets)
        inside = (positions >= 0) & (positions < len(self.rivals))
        hits = inside & ~self.rivals.numpy()[self.target[:, None], np.where(inside, positions, 0)]
        row_hits = np.zeros((len(self.row_relations), len(BASELINE_OFFSETS)), dtype=bool)
        np.logical_or.at(row_hits, self.row, hits)
        return row_hits


@dataclass(frozen=True, eq=False)
class WordPairIndex:
    """Pairs of words of a batch, one after another."""

    text: Tensor  # (n,): the text, of those that are asked about
    source: Tensor  # (n,)
    target: Tensor  # (n,)

    def gather_pair_weights(self, weights: Tensor) -> Tensor:
        """Their weights: (N, H, W, W) → (n, H)."""
        return weights[self.text, :, self.source, self.target]


class BatchWordArcs:
    """The arcs of all texts of a batch that have some, N of them: texts, rows and strata are counted on from text to text."""

    def __init__(self, batch: TokenBatch, arcs_by_sample: Sequence[WordArcs | None], num_relations: int) -> None:
        present = [
            (index, text_arcs)
            for index, text_arcs in enumerate(arcs_by_sample)
            if text_arcs is not None and len(text_arcs.relation)
        ]
        self.batch_rows, self.per_text = [index for index, _ in present], [text_arcs for _, text_arcs in present]
        self.batch, self.num_relations = batch, num_relations
        self.words = max((len(text_arcs.query_to_word_matrix) for text_arcs in self.per_text), default=0)  # W
        # where each text's rows begin
        self.starts = np.cumsum([0, *(len(text_arcs.row_relations) for text_arcs in self.per_text)]).tolist()
        self.arcs = self._pair_index([np.stack((text_arcs.source, text_arcs.target), 1) for text_arcs in self.per_text])
        self.pairs = self._pair_index([text_arcs.pairs for text_arcs in self.per_text])
        self.row, self.rows = _with_offsets(
            [text_arcs.row for text_arcs in self.per_text],
            [len(text_arcs.row_relations) for text_arcs in self.per_text],
        )
        strata = [int(text_arcs.pairs[:, 2].max(initial=0)) + 1 for text_arcs in self.per_text]
        self.stratum, self.strata = _with_offsets([text_arcs.stratum for text_arcs in self.per_text], strata)
        self.stratum_of_pair, _ = _with_offsets([text_arcs.pairs[:, 2] for text_arcs in self.per_text], strata)
        self.arc_kind, self.num_arc_kinds = _with_offsets(
            [text_arcs.arcs for text_arcs in self.per_text], [text_arcs.arcs.max() + 1 for text_arcs in self.per_text]
        )
        self.others, self.fit, self.row_relations = (
            _concat([getattr(text_arcs, name) for text_arcs in self.per_text])
            for name in ("others", "fit", "row_relations")
        )
        of_row = _concat([np.full(len(text_arcs.row_relations), example) for example, text_arcs in present])
        self.row_slot = of_row * num_relations + self.row_relations  # (R,): example and question

    @cached_property
    def key_to_word_matrix(self) -> Tensor:
        """(N, S, W + pairs that share tokens), in the places of the batch: nothing at its padding."""
        W, max_shared = self.words, max((len(text_arcs.shared_pairs) for text_arcs in self.per_text), default=0)
        matrix = torch.zeros(len(self.per_text), self.batch.ids.shape[1], W + max_shared)
        for text, (text_arcs, tokens) in enumerate(self._tokens()):
            num_words = len(text_arcs.query_to_word_matrix)
            matrix[text, tokens, :num_words] = text_arcs.key_to_word_matrix[:, :num_words]
            matrix[text, tokens, W : W + len(text_arcs.shared_pairs)] = text_arcs.key_to_word_matrix[:, num_words:]
        return matrix

    @cached_property
    def query_to_word_matrix(self) -> Tensor:
        """(N, W, S), in the places of the batch."""
        matrix = torch.zeros(len(self.per_text), self.words, self.batch.ids.shape[1])
        for text, (text_arcs, tokens) in enumerate(self._tokens()):
            matrix[text, : len(text_arcs.query_to_word_matrix), tokens] = text_arcs.query_to_word_matrix
        return matrix

    @cached_property
    def row_counts_by_text(self) -> Tensor:
        """How many rows are asked about in each text of the batch, by question and kind: (B, 1, questions · kinds)."""
        size = len(self.batch.samples) * self.num_relations
        rows, fit = (torch.bincount(slots, minlength=size) for slots in (self.row_slot, self.row_slot[self.fit]))
        parts = rows[:, None].expand(-1, len(COUNTED)), fit[:, None].expand(-1, len(COMPARED))
        return torch.cat(parts, 1).reshape(len(self.batch.samples), 1, -1).float()

    def remove_shared_token_attention(self, maps: Tensor) -> Tensor:
        """Maps (N, H, W, W + shared) as (N, H, W, W), in place: what a word gives its own tokens goes to no other that shares
        them."""
        pairs, shared_index = self._shared
        for source, other in ((pairs.source, pairs.target), (pairs.target, pairs.source)):
            own_weight = maps[pairs.text, :, source, self.words + shared_index]  # (pairs, H)
            maps[pairs.text, :, source, other] = (maps[pairs.text, :, source, other] - own_weight).clamp(min=0)
        return maps[..., : self.words]

    def measure_rows(self, plain: Tensor, value_weighted: Tensor) -> dict[str, Tensor]:
        """What two maps, (N, H, W, W) each, give every row, by kind: (R, H) each. NaN where a map is."""
        results = {kind: torch.zeros(self.rows, plain.shape[1]) for kind in KINDS}
        fit = self.fit[:, None]
        for maps, hits, mass, matched in ((plain, HITS, MASS, MATCHED), (value_weighted, *VALUE_WEIGHTED)):
            hit, weight = self._hits(maps)  # (A, H)
            results[hits].index_add_(0, self.row, hit).clamp_(max=1)  # of targets that share a token both are hit
            results[mass].index_add_(0, self.row, weight)
            results[matched] = results[mass] * fit
        results[OTHERS] = results[OTHERS].index_add_(0, self.row, self._expected(plain)) * fit
        return results

    def sum_by_text(self, results: dict[str, Tensor]) -> Tensor:
        """The same, summed over the rows of each text of the batch: (B, H, questions · kinds)."""
        stacked = torch.stack([results[kind] for kind in KINDS], -1)  # (R, H, kinds)
        B, (_, H, kinds) = len(self.batch.samples), stacked.shape
        summed = torch.zeros(B * self.num_relations, H, kinds).index_add_(0, self.row_slot, stacked)
        return summed.unflatten(0, (B, self.num_relations)).transpose(1, 2).flatten(2)

    def _hits(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Which arcs maps (N, H, W, W) hit, 1 or 0, and the weight they give them: (A, H) each."""
        weight, hits = self.arcs.gather_pair_weights(maps), []
        step = max(1, MAX_CELLS // max(1, maps.shape[1] * self.words))
        for chunk in (slice(first, first + step) for first in range(0, len(weight), step)):
            others = maps[self.arcs.text[chunk], :, self.arcs.source[chunk]]  # (a, H, W)
            before, after = (others.masked_fill(hide[chunk, None], -1.0).amax(-1) for hide in self._non_rivals)
            hits.append((weight[chunk] > before) & (weight[chunk] >= after) & (weight[chunk] > 0))
        # Of equals the first is the one looked at.
        hit = torch.cat(hits) if hits else torch.zeros_like(weight, dtype=torch.bool)
        return hit.float().masked_fill(weight.isnan(), torch.nan), weight

    def _expected(self, maps: Tensor) -> Tensor:
        """The mean weight of the pairs an arc is compared with: (N, H, W, W) → (A, H); 0 where there are none."""
        weight, H = self.arcs.gather_pair_weights(maps).double(), maps.shape[1]
        stratum_sums = weight.new_zeros(self.strata, H).index_add_(
            0, self.stratum_of_pair, self.pairs.gather_pair_weights(maps).double()
        )
        arc_sums = weight.new_zeros(self.num_arc_kinds, H).index_add_(0, self.arc_kind, weight)
        other_sums = (stratum_sums[self.stratum] - arc_sums[self.arc_kind]).clamp(min=0)
        return (other_sums / self.others.clamp(min=1)[:, None]).to(maps)

    @cached_property
    def _non_rivals(self) -> tuple[Tensor, Tensor]:
        """Words that are no rivals of each arc's target before it, and behind it: (A, W) each."""
        rivals = torch.zeros(len(self.per_text), self.words, self.words, dtype=torch.bool)
        for text, text_arcs in enumerate(self.per_text):
            W = len(text_arcs.rivals)
            rivals[text, :W, :W] = text_arcs.rivals
        index = torch.arange(self.words)
        source, target = self.arcs.source[:, None], self.arcs.target[:, None]
        rivals_of_target = rivals[self.arcs.text, self.arcs.target] & (index != source)  # (A, W)
        return ~(rivals_of_target & (index < target)), ~(rivals_of_target & (index > target))

    @cached_property
    def _shared(self) -> tuple[WordPairIndex, Tensor]:
        """Words that share tokens, and the number of each such pair in its text."""
        indices = [np.arange(len(text_arcs.shared_pairs)) for text_arcs in self.per_text]
        return self._pair_index([text_arcs.shared_pairs for text_arcs in self.per_text]), _concat(indices)

    def _tokens(self) -> Iterator[tuple[WordArcs, slice]]:
        """Each text, and where its tokens stand in the batch."""
        for example, text_arcs in zip(self.batch_rows, self.per_text, strict=True):
            first = int(self.batch.first_token_positions[example])
            yield text_arcs, slice(first, first + len(text_arcs.key_to_word_matrix))

    @staticmethod
    def _pair_index(pairs_by_text: Sequence[np.ndarray]) -> WordPairIndex:
        """Pairs of words, (n, 2 or more) for each text."""
        text = _concat([np.full(len(pairs), index) for index, pairs in enumerate(pairs_by_text)])
        return WordPairIndex(text, *(_concat([pairs[:, side] for pairs in pairs_by_text]) for side in (0, 1)))


def _concat(arrays: Sequence[np.ndarray]) -> Tensor:
    """Numbers of all texts, one after another."""
    return torch.from_numpy(np.concatenate(arrays) if arrays else np.zeros(0, np.int64))


def _with_offsets(arrays: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[Tensor, int]:
    """Numbers of each text, counted on from text to text, of which there are so many; and how many there are of all.

    >>> _with_offsets([np.array([0, 1]), np.array([0, 2])], [2, 3])
    (tensor([0, 1, 2, 4]), 5)
    """
    starts = np.cumsum([0, *sizes])
    return _concat([array + start for array, start in zip(arrays, starts, strict=False)]), int(starts[-1])
