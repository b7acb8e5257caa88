"""The one runner: a model reads, and metrics and observers see what its heads do. Profiles, histories, comparisons and tasks
all look like this.

Each number is a mean over rows, so what is kept is sums and counts, per unit and head. Sums add up, whatever the batches,
blocks, padding or processes were. No n×n map is held.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.attention_call import AttentionCallContext, AttentionObserver, BlockListener
from headwise.analysis.metrics.batch_context import BatchContext, FeatureLayout
from headwise.analysis.metrics.fused_row_stats import fused_row_stats
from headwise.analysis.metrics.hook_listeners import listen_at_hook_points
from headwise.analysis.metrics.metric import Metric, MetricSpec
from headwise.analysis.metrics.row_blocks import iter_row_blocks, nan_output_gram
from headwise.analysis.metrics.row_stats import blockwise_row_stats
from headwise.analysis.recording.batching import TokenBatch, forward_batch, reachable_hook_points
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import AttentionCall, HookPoint
from headwise.heads.per_head_output import gram
from headwise.model import ModelProtocol


class MetricRunner:
    """Shows measures what heads do, and adds their numbers up in an accumulator. One for a whole corpus.

    `full` walks over every cell, or, with `row_stride`, over one block of rows in so many. `light` takes from all rows what
    the fused kernel gives without showing a map: everything but the largest weights (confidence, argmax, evidence), far
    distances and long range. Measures of blocks that are not `full` see every block all the same.

    `observers` see the same calls and blocks as the metrics, and add nothing to the accumulator.
    """

    def __init__(
        self,
        accumulator: Accumulator,
        metrics: Iterable[Metric] = (),
        row_stride: int = 1,
        detail: str = "full",
        observers: Iterable[AttentionObserver] = (),
    ) -> None:
        self.accumulator, self.row_stride, self.full_detail = accumulator, row_stride, detail == "full"
        self.observers = [observer for observer in observers if self.full_detail or not observer.needs_full_detail]
        self.metrics = [metric for metric in metrics if self.full_detail or not metric.needs_full_detail]
        self.layout = FeatureLayout.of(self.metrics)
        self._grams: dict[HookPoint, tuple[tuple[int, int], Tensor]] = {}
        self._batch_context: BatchContext | None = None
        for metric in self.metrics:
            if metric.metric_specs:
                accumulator.register_metrics(metric.names)

    @property
    def metric_specs(self) -> tuple[MetricSpec, ...]:
        """All that is counted."""
        return tuple(metric_spec for metric in self.metrics for metric_spec in metric.metric_specs)

    def run(self, model: ModelProtocol, batches: Iterable[TokenBatch]) -> None:
        """Let a model read batches."""
        hook_points = reachable_hook_points(model)
        for batch in batches:
            self.batch_context(batch)  # counted even where every head is cut
            with listen_at_hook_points(hook_points, self.on_call, batch):
                forward_batch(model, batch)

    def on_call(self, attention_call: AttentionCall, batch: TokenBatch, first_head: int) -> None:
        """One call at one site; its heads are counted from `first_head` on."""
        batch_context = self.batch_context(batch)
        if not attention_call.q.shape[1]:
            return
        call = AttentionCallContext(attention_call, batch_context, first_head, self._gram)
        is_cross = call.is_cross_attention
        observers = [observer for observer in self.observers if observer.supports_cross_attention or not is_cross]
        metrics = [metric for metric in self.metrics if metric.supports_cross_attention or not is_cross]
        block_listeners = [(observer.needs_full_detail, observer.on_call(call)) for observer in observers]
        accumulators = [(metric, metric.make_accumulator(call)) for metric in metrics]
        row_metrics = [metric for metric, block_accumulator in accumulators if block_accumulator is None]
        block_listeners += [
            (metric.needs_full_detail, block_accumulator.add_block)
            for metric, block_accumulator in accumulators
            if block_accumulator is not None
        ]
        all_blocks = self.full_detail and self.row_stride == 1  # the walk for all rows shows every block
        shared_listeners, own_listeners = (
            [listener for full, listener in block_listeners if listener and (all_blocks or full) == is_shared]
            for is_shared in (True, False)
        )
        if row_metrics:
            self._compute_rows(row_metrics, call, shared_listeners)
        else:
            _visit_blocks(call, shared_listeners, self.row_stride)
        _visit_blocks(call, own_listeners)
        for metric, block_accumulator in accumulators:
            self._add(metric, call, None if block_accumulator is None else block_accumulator.sums_and_counts())

    def batch_context(self, batch: TokenBatch) -> BatchContext:
        """What all layers have in common, made once for a batch."""
        if self._batch_context is None or self._batch_context.batch is not batch:
            self._batch_context = BatchContext(batch, self.layout)
            for metric in self.metrics:
                metric.begin_batch(batch)
        return self._batch_context

    def reset_batch(self) -> None:
        """Work out anew what was worked out for the last batch."""
        self._batch_context = None

    def _compute_rows(
        self, metrics: Sequence[Metric], call: AttentionCallContext, listeners: Sequence[BlockListener]
    ) -> None:
        """Fill the rows of a call, once for all measures, and let each take its own."""
        rows = blockwise_row_stats(call, self.row_stride, listeners) if self.full_detail else fused_row_stats(call)
        for metric in metrics:
            self._add(metric, call, metric.compute(rows))

    def _add(self, metric: Metric, call: AttentionCallContext, result: tuple[Tensor, Tensor] | None) -> None:
        if result is None:
            return
        sums, counts = result
        B, H = call.attention_call.q.shape[:2]
        if sums.shape != (B, H, len(metric.metric_specs)):
            raise HeadwiseError(
                f"{metric.names[0]!r} took {tuple(sums.shape)} from rows of {B} texts and {H} heads; "
                f"give {(B, H, len(metric.metric_specs))}."
            )
        if call.is_cross_attention:
            counted_mask = torch.tensor(
                [not metric_spec.positional for metric_spec in metric.metric_specs], device=sums.device
            )
            sums, counts = sums * counted_mask, counts * counted_mask
        if call.is_output_weight_unknown:  # what is made of W_O was not measured; all else was
            counted_mask = ~sums.isnan()
            sums, counts = sums.nan_to_num(0.0), counts * counted_mask
        self.accumulator.add(
            metric.names, call.head_slice, [sample.bucket for sample in call.batch_context.batch.samples], sums, counts
        )

    def _gram(self, call: AttentionCall) -> Tensor:
        """W_O W_Oᵀ, (H, e, e), until the weights change; NaN, and so what is made of it, where W_O cannot be shown."""
        hook_point = call.hook_point
        try:
            W_O = hook_point.W_O
        except HeadwiseError:
            return nan_output_gram(call)
        state = (W_O.data_ptr(), W_O._version)
        if self._grams.get(hook_point, (None,))[0] != state:
            self._grams[hook_point] = state, gram(W_O)
        return self._grams[hook_point][1]


def _visit_blocks(call: AttentionCallContext, listeners: Sequence[BlockListener], row_stride: int = 1) -> None:
    """Show every block of a call, or one in so many, to those who want to see them."""
    if listeners:
        for block in iter_row_blocks(call.attention_call, call.key_features, row_stride, call.batch_context.visibility):
            for listener in listeners:
                listener(block)
