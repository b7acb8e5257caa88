"""Gold arcs between words: of one text, and of a batch in flat arrays, so that a layer needs few tensor operations."""

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
from headwise.kernels.rounding_tolerance import to_float64

BASELINE_OFFSETS = range(-5, 6)  # fixed offsets that are tried as a baseline
MAX_CELLS = 1 << 22  # maximum number of weights that are compared at once


@dataclass(frozen=True, eq=False)
class WordArcs:
    """Arcs of one text, A in total. A row is a source word under one relation; it can have several arcs. Pairs of words at
    the same offset that see about as many words form a stratum."""

    relation: np.ndarray  # (A,): index of the relation
    source: np.ndarray  # (A,): word
    target: np.ndarray  # (A,): word
    pairs: np.ndarray  # (P, 3): source, target and stratum of every visible pair of words
    stratum: np.ndarray  # (A,): stratum of each arc
    # (T, W + pairs that share tokens): 1 if a token belongs to the word, or to both words of the pair
    key_to_word_matrix: Tensor
    query_to_word_matrix: Tensor  # (W, T): mean over the tokens of a word
    shared_pairs: np.ndarray  # (pairs that share tokens, 2): the two words
    rivals: Tensor  # (W, W): 1 if two words have no token in common
    left_out: np.ndarray  # (relations,): number of arcs that are not eligible
    row: np.ndarray = field(init=False)  # (A,): row of each arc
    row_relations: np.ndarray = field(init=False)  # (R,): relation of each row
    arcs: np.ndarray = field(init=False)  # (A,): relation and stratum as one number
    # (A,): number of pairs of the same stratum that are not arcs of the relation
    others: np.ndarray = field(init=False)
    fit: np.ndarray = field(init=False)  # (R,): whether every arc of the row has such pairs

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
        """Return the row of a source word under a relation, or None if the word has no arc."""
        rows = self.row[(self.relation == relations.index(relation)) & (self.source == source)]
        return int(rows[0]) if len(rows) else None

    def offset_hits(self) -> np.ndarray:
        """Return whether each fixed offset hits each row, (R, offsets). The word there is a target or shares a token with
        one."""
        positions = self.source[:, None] + np.array(BASELINE_OFFSETS)  # (A, offsets)
        inside = (positions >= 0) & (positions < len(self.rivals))
        hits = inside & ~self.rivals.numpy()[self.target[:, None], np.where(inside, positions, 0)]
        row_hits = np.zeros((len(self.row_relations), len(BASELINE_OFFSETS)), dtype=bool)
        np.logical_or.at(row_hits, self.row, hits)
        return row_hits


@dataclass(frozen=True, eq=False)
class WordPairIndex:
    """Word pairs of all texts of a batch."""

    text: Tensor  # (n,): index among the texts with arcs
    source: Tensor  # (n,)
    target: Tensor  # (n,)

    def gather_pair_weights(self, weights: Tensor) -> Tensor:
        """Return the weights of the pairs: (N, H, W, W) → (n, H)."""
        return weights[self.text, :, self.source, self.target]


class BatchWordArcs:
    """Arcs of all N texts of a batch that have arcs. Texts, rows and strata are numbered through the batch."""

    def __init__(self, batch: TokenBatch, arcs_by_sample: Sequence[WordArcs | None], num_relations: int) -> None:
        present = [
            (index, text_arcs)
            for index, text_arcs in enumerate(arcs_by_sample)
            if text_arcs is not None and len(text_arcs.relation)
        ]
        self.batch_rows, self.per_text = [index for index, _ in present], [text_arcs for _, text_arcs in present]
        self.batch, self.num_relations = batch, num_relations
        self.words = max((len(text_arcs.query_to_word_matrix) for text_arcs in self.per_text), default=0)  # W
        # first row of each text
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
        self.row_slot = of_row * num_relations + self.row_relations  # (R,): batch row and relation as one number

    @cached_property
    def key_to_word_matrix(self) -> Tensor:
        """Matrix from tokens to words at the positions of the batch, (N, S, W + pairs that share tokens). 0 at padding."""
        W, max_shared = self.words, max((len(text_arcs.shared_pairs) for text_arcs in self.per_text), default=0)
        matrix = torch.zeros(
            len(self.per_text), self.batch.ids.shape[1], W + max_shared, device="cpu", dtype=torch.float32
        )
        for text, (text_arcs, tokens) in enumerate(self._tokens()):
            num_words = len(text_arcs.query_to_word_matrix)
            matrix[text, tokens, :num_words] = text_arcs.key_to_word_matrix[:, :num_words]
            matrix[text, tokens, W : W + len(text_arcs.shared_pairs)] = text_arcs.key_to_word_matrix[:, num_words:]
        return matrix

    @cached_property
    def query_to_word_matrix(self) -> Tensor:
        """Matrix that averages the tokens of each word at the positions of the batch, (N, W, S)."""
        matrix = torch.zeros(len(self.per_text), self.words, self.batch.ids.shape[1], device="cpu", dtype=torch.float32)
        for text, (text_arcs, tokens) in enumerate(self._tokens()):
            matrix[text, : len(text_arcs.query_to_word_matrix), tokens] = text_arcs.query_to_word_matrix
        return matrix

    @cached_property
    def matrices_on_device(self) -> tuple[Tensor, Tensor]:
        """`query_to_word_matrix` and `key_to_word_matrix` on the device of the batch."""
        device = self.batch.ids.device
        return self.query_to_word_matrix.to(device), self.key_to_word_matrix.to(device)

    @cached_property
    def row_counts_by_text(self) -> Tensor:
        """Number of rows of each text of the batch by relation and kind, (B, 1, relations · kinds)."""
        size = len(self.batch.samples) * self.num_relations
        rows, fit = (torch.bincount(slots, minlength=size) for slots in (self.row_slot, self.row_slot[self.fit]))
        parts = rows[:, None].expand(-1, len(COUNTED)), fit[:, None].expand(-1, len(COMPARED))
        return torch.cat(parts, 1).reshape(len(self.batch.samples), 1, -1).float()

    def remove_shared_token_attention(self, maps: Tensor) -> Tensor:
        """Convert maps (N, H, W, W + shared) to (N, H, W, W), in place. The weight of a word on its own tokens is removed
        from other words that share these tokens."""
        pairs, shared_index = self._shared
        for source, other in ((pairs.source, pairs.target), (pairs.target, pairs.source)):
            own_weight = maps[pairs.text, :, source, self.words + shared_index]  # (pairs, H)
            maps[pairs.text, :, source, other] = (maps[pairs.text, :, source, other] - own_weight).clamp(min=0)
        return maps[..., : self.words]

    def measure_rows(self, plain: Tensor, value_weighted: Tensor) -> dict[str, Tensor]:
        """Compute the scores of every row from two maps, (N, H, W, W) each. Return (R, H) per kind; NaN if the map is NaN."""
        results = {kind: torch.zeros(self.rows, plain.shape[1], device="cpu", dtype=torch.float32) for kind in KINDS}
        fit = self.fit[:, None]
        for maps, hits, mass, matched in ((plain, HITS, MASS, MATCHED), (value_weighted, *VALUE_WEIGHTED)):
            hit, weight = self._hits(maps)  # (A, H)
            results[hits].index_add_(0, self.row, hit).clamp_(
                max=1
            )  # two targets that share a token are both hit: count one
            results[mass].index_add_(0, self.row, weight)
            results[matched] = results[mass] * fit
        results[OTHERS] = results[OTHERS].index_add_(0, self.row, self._expected(plain)) * fit
        return results

    def sum_by_text(self, results: dict[str, Tensor]) -> Tensor:
        """Sum the results of `measure_rows` over the rows of each text of the batch, (B, H, relations · kinds)."""
        stacked = torch.stack([results[kind] for kind in KINDS], -1)  # (R, H, kinds)
        B, (_, H, kinds) = len(self.batch.samples), stacked.shape
        summed = torch.zeros(B * self.num_relations, H, kinds, device="cpu", dtype=torch.float32).index_add_(
            0, self.row_slot, stacked
        )
        return summed.unflatten(0, (B, self.num_relations)).transpose(1, 2).flatten(2)

    def _hits(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether each arc is hit, 1 or 0, and its weight, (A, H) each, for maps (N, H, W, W)."""
        weight, hits = self.arcs.gather_pair_weights(maps), []
        step = max(1, MAX_CELLS // max(1, maps.shape[1] * self.words))
        for chunk in (slice(first, first + step) for first in range(0, len(weight), step)):
            others = maps[self.arcs.text[chunk], :, self.arcs.source[chunk]]  # (a, H, W)
            before, after = (others.masked_fill(hide[chunk, None], -1.0).amax(-1) for hide in self._non_rivals)
            hits.append((weight[chunk] > before) & (weight[chunk] >= after) & (weight[chunk] > 0))
        # In a tie the first word counts as the attended one.
        hit = torch.cat(hits) if hits else torch.zeros_like(weight, dtype=torch.bool)
        return hit.float().masked_fill(weight.isnan(), torch.nan), weight

    def _expected(self, maps: Tensor) -> Tensor:
        """Return the mean weight of the pairs that each arc is compared with: (N, H, W, W) → (A, H). 0 without pairs."""
        weight, H = to_float64(self.arcs.gather_pair_weights(maps)), maps.shape[1]
        stratum_sums = weight.new_zeros(self.strata, H).index_add_(
            0, self.stratum_of_pair, to_float64(self.pairs.gather_pair_weights(maps))
        )
        arc_sums = weight.new_zeros(self.num_arc_kinds, H).index_add_(0, self.arc_kind, weight)
        other_sums = (stratum_sums[self.stratum] - arc_sums[self.arc_kind]).clamp(min=0)
        return (other_sums / self.others.clamp(min=1)[:, None]).to(maps)

    @cached_property
    def _non_rivals(self) -> tuple[Tensor, Tensor]:
        """Masks of the words that do not compete with the target of each arc, before and after it, (A, W) each."""
        rivals = torch.zeros(len(self.per_text), self.words, self.words, dtype=torch.bool, device="cpu")
        for text, text_arcs in enumerate(self.per_text):
            W = len(text_arcs.rivals)
            rivals[text, :W, :W] = text_arcs.rivals
        index = torch.arange(self.words, device="cpu")
        source, target = self.arcs.source[:, None], self.arcs.target[:, None]
        rivals_of_target = rivals[self.arcs.text, self.arcs.target] & (index != source)  # (A, W)
        return ~(rivals_of_target & (index < target)), ~(rivals_of_target & (index > target))

    @cached_property
    def _shared(self) -> tuple[WordPairIndex, Tensor]:
        """Pairs of words that share tokens, and the number of each pair in its text."""
        indices = [np.arange(len(text_arcs.shared_pairs)) for text_arcs in self.per_text]
        return self._pair_index([text_arcs.shared_pairs for text_arcs in self.per_text]), _concat(indices)

    def _tokens(self) -> Iterator[tuple[WordArcs, slice]]:
        """Iterate over the texts and the columns of their tokens in the batch."""
        for example, text_arcs in zip(self.batch_rows, self.per_text, strict=True):
            first = self.batch.first_columns[example]
            yield text_arcs, slice(first, first + len(text_arcs.key_to_word_matrix))

    @staticmethod
    def _pair_index(pairs_by_text: Sequence[np.ndarray]) -> WordPairIndex:
        """Concatenate the word pairs of all texts, (n, 2 or more) each."""
        text = _concat([np.full(len(pairs), index) for index, pairs in enumerate(pairs_by_text)])
        return WordPairIndex(text, *(_concat([pairs[:, side] for pairs in pairs_by_text]) for side in (0, 1)))


def _concat(arrays: Sequence[np.ndarray]) -> Tensor:
    """Concatenate the arrays of all texts."""
    return torch.from_numpy(np.concatenate(arrays) if arrays else np.zeros(0, np.int64))


def _with_offsets(arrays: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[Tensor, int]:
    """Concatenate indices of several texts, offset by the sizes of the previous texts. Return them and the total size.

    >>> _with_offsets([np.array([0, 1]), np.array([0, 2])], [2, 3])
    (tensor([0, 1, 2, 4]), 5)
    """
    starts = np.cumsum([0, *sizes])
    return _concat([array + start for array, start in zip(arrays, starts, strict=False)]), int(starts[-1])
