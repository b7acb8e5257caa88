"""Run a model on batches and pass its attention calls to metrics and observers. Used by profiles, histories and tasks.

Each score is a mean over rows, stored as sums and counts per head and bucket. The sums do not depend on batches, blocks,
padding or the number of processes. No full attention map is held in memory.
"""

from collections.abc import Container, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.attention_call import AttentionCallContext, AttentionObserver, BlockListener
from headwise.analysis.metrics.batch_context import BatchContext, TokenFeatureColumns
from headwise.analysis.metrics.listen_at_hook_points import listen_at_hook_points
from headwise.analysis.metrics.metric import Metric, MetricSpec
from headwise.analysis.metrics.row_blocks import iter_row_blocks, nan_output_gram
from headwise.analysis.metrics.row_stats import blockwise_row_stats
from headwise.analysis.recording.batching import TokenBatch, forward_batch, reachable_hook_points
from headwise.errors import ArgumentError, HeadwiseError
from headwise.heads.hook_point import AttentionCall, HookPoint
from headwise.heads.per_head_output import gram
from headwise.model import ModelProtocol
from headwise.spec import LayerAddress


class MetricRunner:
    """Compute metrics during forward passes and add their sums to an accumulator.

    Args:
        accumulator: Destination of the sums and counts.
        metrics: Metrics to compute.
        row_stride: Row statistics read one block of rows out of `row_stride`. Block metrics get every block.
        observers: Objects that see the same calls and blocks and add nothing to the accumulator.
        layers: Layers to measure; the accumulator has the heads of these only. None measures all that the inputs reach.
    """

    def __init__(
        self,
        accumulator: Accumulator,
        metrics: Iterable[Metric] = (),
        row_stride: int = 1,
        observers: Iterable[AttentionObserver] = (),
        layers: Container[LayerAddress] | None = None,
    ) -> None:
        self.accumulator, self.row_stride, self.layers = accumulator, row_stride, layers
        self.observers, self.metrics = list(observers), list(metrics)
        self.layout = TokenFeatureColumns.of(self.metrics)
        self._grams: dict[HookPoint, tuple[tuple[int, int], Tensor]] = {}
        self._unknown_grams: dict[HookPoint, tuple[Tensor, bool]] = {}  # gram, and whether it contains NaN
        self._batch_context: BatchContext | None = None
        for metric in self.metrics:
            if metric.metric_specs:
                accumulator.register_metrics(metric.names)

    @property
    def metric_specs(self) -> tuple[MetricSpec, ...]:
        """Descriptions of all scores."""
        return tuple(metric_spec for metric in self.metrics for metric_spec in metric.metric_specs)

    def run(self, model: ModelProtocol, batches: Iterable[TokenBatch]) -> None:
        """Run the model on batches."""
        hook_points = points_in_layers(reachable_hook_points(model), self.layers)
        for batch in batches:
            self.batch_context(batch)  # metrics count the batch even if every head is pruned
            with listen_at_hook_points(hook_points, self._process_call, batch):
                forward_batch(model, batch)
            self.batch_context(batch).host_copies.flush()

    def on_call(self, attention_call: AttentionCall, batch: TokenBatch, first_head: int) -> None:
        """Compute the metrics of one attention call. `first_head` is the index of its first head in the model."""
        self._process_call(attention_call, batch, first_head)
        self.batch_context(batch).host_copies.flush()

    def _process_call(self, attention_call: AttentionCall, batch: TokenBatch, first_head: int) -> None:
        """Compute the metrics of one attention call. Results on a device are added to the accumulator after the batch."""
        batch_context = self.batch_context(batch)
        if not attention_call.q.shape[1]:
            return
        call = AttentionCallContext(attention_call, batch_context, first_head, self._gram)
        is_cross = call.is_cross_attention
        observers = [observer for observer in self.observers if observer.supports_cross_attention or not is_cross]
        metrics = [metric for metric in self.metrics if metric.supports_cross_attention or not is_cross]
        block_listeners = [(observer.follows_row_stride, observer.on_call(call)) for observer in observers]
        accumulators = [(metric, metric.make_accumulator(call)) for metric in metrics]
        row_metrics = [metric for metric, block_accumulator in accumulators if block_accumulator is None]
        block_listeners += [
            (False, block_accumulator.add_block)
            for metric, block_accumulator in accumulators
            if block_accumulator is not None
        ]
        all_blocks = self.row_stride == 1  # the row statistics pass visits every block
        shared_listeners, own_listeners = (
            [listener for strided, listener in block_listeners if listener and (all_blocks or strided) == is_shared]
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
        """Return the context of a batch, created once and shared by all layers."""
        if self._batch_context is None or self._batch_context.batch is not batch:
            self._batch_context = BatchContext(batch, self.layout)
            for metric in self.metrics:
                metric.begin_batch(batch)
        return self._batch_context

    def reset_batch(self) -> None:
        """Discard the context of the last batch."""
        self._batch_context = None

    def _compute_rows(
        self, metrics: Sequence[Metric], call: AttentionCallContext, listeners: Sequence[BlockListener]
    ) -> None:
        """Compute the row statistics of a call once and pass them to all metrics."""
        rows = blockwise_row_stats(call, self.row_stride, listeners)
        for metric in metrics:
            self._add(metric, call, metric.compute(rows))

    def _add(self, metric: Metric, call: AttentionCallContext, result: tuple[Tensor, Tensor] | None) -> None:
        if result is None:
            return
        sums, counts = result
        B, H = call.attention_call.q.shape[:2]
        if sums.shape != (B, H, len(metric.metric_specs)):
            raise ArgumentError(
                f"metric {metric.names[0]!r}: it returned sums of shape {tuple(sums.shape)} for {B} texts and {H} heads. "
                f"Return shape (texts, heads, scores) = {(B, H, len(metric.metric_specs))}."
            )
        if call.is_cross_attention:
            counted_mask = torch.tensor(
                [not metric_spec.positional for metric_spec in metric.metric_specs], device=sums.device
            )
            sums, counts = sums * counted_mask, counts * counted_mask
        if self._is_output_weight_unknown(call):  # scores that need W_O are NaN and do not count
            counted_mask = ~sums.isnan()
            sums, counts = sums.nan_to_num(0.0), counts * counted_mask
        bucket_ids = [sample.bucket for sample in call.batch_context.batch.samples]
        add = partial(self.accumulator.add, metric.names, call.head_slice, bucket_ids)
        call.batch_context.host_copies.copy_then_call((sums, counts), add)

    def _gram(self, call: AttentionCall) -> Tensor:
        """Return W_O W_Oᵀ, (H, e, e), cached until the weights change. NaN if W_O cannot be read."""
        hook_point = call.hook_point
        try:
            W_O = hook_point.W_O_for_listeners
        except HeadwiseError:
            return nan_output_gram(call)
        state = (W_O.data_ptr(), W_O._version)
        if self._grams.get(hook_point, (None,))[0] != state:
            self._grams[hook_point] = state, gram(W_O)
        return self._grams[hook_point][1]

    def _is_output_weight_unknown(self, call: AttentionCallContext) -> bool:
        """Return whether W_O of a call cannot be read. The answer is cached with W_O W_Oᵀ."""
        hook_point, gram_matrix = call.attention_call.hook_point, call.output_gram
        cached, is_unknown = self._unknown_grams.get(hook_point, (None, True))
        if cached is not gram_matrix:
            is_unknown = bool(gram_matrix.isnan().any())
            self._unknown_grams[hook_point] = gram_matrix, is_unknown
        return is_unknown


def points_in_layers(hook_points: list[HookPoint], layers: Container[LayerAddress] | None) -> list[HookPoint]:
    """Return the hook points of the selected layers. None selects all."""
    return [point for point in hook_points if layers is None or point.address in layers]


def _visit_blocks(call: AttentionCallContext, listeners: Sequence[BlockListener], row_stride: int = 1) -> None:
    """Pass the blocks of a call to the listeners, every block or one out of `row_stride`."""
    if listeners:
        for block in iter_row_blocks(call.attention_call, call.key_features, row_stride, call.batch_context.visibility):
            for listener in listeners:
                listener(block)
