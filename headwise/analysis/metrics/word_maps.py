"""Attention between words of a batch, accumulated from blocks of rows."""

from functools import partial

import torch
from torch import Tensor

from headwise.analysis.metrics.attention_call import AttentionCallContext
from headwise.analysis.metrics.batch_context import NORM
from headwise.analysis.metrics.directed_relations import HITS, MASS, DirectedRelation
from headwise.analysis.metrics.example_sampler import ExampleSampler
from headwise.analysis.metrics.gold_arc_data import BatchWordArcs
from headwise.analysis.metrics.metric import RowBlockAccumulator
from headwise.analysis.metrics.row_blocks import RowBlock


class WordMapAccumulator(RowBlockAccumulator):
    """Attention between the words of each text of a call, plain and value-weighted.

    Args:
        arcs: Gold arcs of the batch.
        call: The attention call.
        relations: Relations to measure.
        sampler: Records the attention at some positions as examples.
    """

    def __init__(
        self,
        arcs: BatchWordArcs,
        call: AttentionCallContext,
        relations: tuple[DirectedRelation, ...],
        sampler: ExampleSampler | None,
    ) -> None:
        self.arcs, self.call, self.relations, self.sampler = arcs, call, relations, sampler
        self.norm_feature = call.batch_context.layout.feature_index[NORM]
        size = len(arcs.per_text), call.attention_call.q.shape[1], arcs.words, arcs.key_to_word_matrix.shape[-1]
        # (2, N, H, W, W + shared), on the device of the call: the host gets words, not tokens
        self.maps = torch.zeros(2, *size, device=arcs.batch.ids.device, dtype=torch.float32)

    def add_block(self, block: RowBlock) -> None:
        """Add one block of rows."""
        if not self.arcs.per_text:
            return
        rows, cols = (slice(span.start, span.stop) for span in (block.rows, block.cols))
        from_word_matrix, to_word_matrix = self.arcs.matrices_on_device
        from_words, to_words = from_word_matrix[:, None, :, rows], to_word_matrix[:, None, cols]
        norms = self.call.value_output_norms[:, block.heads, None, cols]
        row_norms = block.feature_sums[..., self.norm_feature].clamp(min=1e-30)[..., None]
        value_weighted = block.e * norms / row_norms
        for maps, p in zip(self.maps, (block.normalize(block.e), value_weighted), strict=True):
            if len(self.arcs.per_text) < len(p):
                p = p[self.arcs.batch_rows]
            if not self.arcs.batch.is_unpadded:  # padded rows may contain NaN, and 0 times NaN is NaN
                p.masked_fill_(~self.arcs.batch.real_tokens[self.arcs.batch_rows, None, rows, None], 0.0)
            maps[:, block.heads] += from_words @ (p.float() @ to_words)

    def sums_and_counts(self) -> tuple[Tensor, Tensor] | None:
        """Return sums over rows by relation and kind, (B, H, scores), and the number of rows, (B, 1, scores)."""
        if not self.relations:
            return None
        arcs = self.arcs
        plain, value_weighted = (
            arcs.remove_shared_token_attention(maps) for maps in self.maps.cpu().unbind()
        )  # (N, H, W, W)
        results = arcs.measure_rows(plain, value_weighted)
        if self.sampler is not None:
            for text, (example, text_arcs) in enumerate(zip(arcs.batch_rows, arcs.per_text, strict=True)):
                rows = slice(arcs.starts[text], arcs.starts[text + 1])
                find_row, sample = partial(text_arcs.find_row, self.relations), arcs.batch.samples[example]
                hit, weight = (results[kind][rows].T for kind in (HITS, MASS))
                maps = plain[text, :, : len(text_arcs.query_to_word_matrix), : len(text_arcs.query_to_word_matrix)]
                self.sampler.record_relation_examples(sample, find_row, hit, weight, maps, self.call.head_slice)
        return arcs.sum_by_text(results), arcs.row_counts_by_text
