"""Reference implementation: calls built by hand, batches of plain ids, and every surface metric from full maps in float64."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.default_metrics import default_metrics
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.token_classes import CLASSES
from headwise.analysis.metrics.top_contexts import TopContexts
from headwise.analysis.recording.batching import TextSample, TokenBatch, forward_batch, make_batch
from headwise.heads import HookPoint
from headwise.heads.hook_point import AttentionCall
from headwise.kernels import Mask, ScoreParams, attention_weights, causal
from headwise.model import Transformer
from headwise.spec import LayerAddress
from headwise.text.token_alignment import Alignment

LONG_RANGE = 32  # first distance of long range
SumsAndCounts = dict[str, tuple[np.ndarray, np.ndarray]]  # sums and counts of a metric, (samples, heads)


def call_from_scores(
    scores: Tensor, mask: Mask | None = None, sink: Tensor | None = None, norms: Tensor | None = None
) -> AttentionCall:
    """Make a call with given scores (B, H, T, S): the queries are the scores, the keys unit vectors. `norms` (S,) are the
    value output norms of the keys, 1 by default."""
    B, H, _, S = scores.shape
    eye = torch.eye(S, dtype=scores.dtype).expand(B, H, S, S)
    v = (torch.ones(S) if norms is None else norms).to(scores)[None, None, :, None].expand(B, H, S, 1)
    output: Any = SimpleNamespace(head_output_weights=torch.eye(3, dtype=scores.dtype)[None, :1].expand(H, 1, 3))
    params = ScoreParams(scale=1.0, kv_of_head=tuple(range(H)), mask=mask, sink=sink)
    z = attention_weights(scores, eye, params) @ v
    return AttentionCall(HookPoint(LayerAddress("", 0), tuple(range(H)), output), scores, eye, v, params, z)


def make_sample(index: int, ids: Sequence[int]) -> TextSample:
    """Make a sample from ids. Its text is the ids."""
    words = [str(i) for i in ids]
    starts = np.cumsum([0, *(len(word) + 1 for word in words)]).tolist()
    spans = [(start, start + len(word)) for start, word in zip(starts, words, strict=False)]
    return TextSample(index, index, tuple(ids), None, partial(Alignment.of, " ".join(words), tuple(ids), words, spans))


def batch_without_repeats(n: int, batch: int = 1) -> TokenBatch:
    """Make a batch without padding and without repeated tokens."""
    return make_batch([make_sample(index, range(n)) for index in range(batch)])


def accumulate_call(call: AttentionCall, batch: TokenBatch, flags: Tensor | None = None, **options: Any) -> Accumulator:
    """Return the result of the streaming metrics for one call."""
    accumulator = Accumulator(call.q.shape[1])
    flags = torch.zeros(int(batch.ids.max()) + 1, len(CLASSES)) if flags is None else flags
    MetricRunner(accumulator, default_metrics(flags), **options).on_call(call, batch, 0)
    return accumulator


def accumulate_causal_head(scores: Tensor, n: int, **options: Any) -> Accumulator:
    """Accumulate one causal head with these scores, (n, n)."""
    return accumulate_call(call_from_scores(scores.double()[None, None], causal(), **options), batch_without_repeats(n))


def streaming_and_dense(
    model: Transformer, batches: list[TokenBatch], flags: Tensor, evidence: bool = False, block: int = 0, **options: Any
) -> tuple[Accumulator, SumsAndCounts]:
    """Return the streaming metrics of a model and the dense ones from the same passes. `block` is the number of rows of a
    block."""
    heads = sum(len(hook_point.head_ids) for hook_point in model.hook_points())
    accumulator = Accumulator(heads)
    observers = [TopContexts(heads)] if evidence else []
    runner = MetricRunner(accumulator, default_metrics(flags), observers=observers, **options)
    dense: SumsAndCounts = {}
    for batch in batches:
        with ExitStack() as stack:
            first_head = 0
            for hook_point in model.hook_points():
                stack.enter_context(
                    hook_point.listen(partial(_accumulate_both, runner, dense, batch, first_head, heads, flags, block))
                )
                first_head += len(hook_point.head_ids)
            with torch.no_grad():
                forward_batch(model, batch)
    return accumulator, dense


def _accumulate_both(
    runner: MetricRunner,
    dense: SumsAndCounts,
    batch: TokenBatch,
    first_head: int,
    heads: int,
    flags: Tensor,
    block: int,
    call: AttentionCall,
) -> None:
    runner.on_call(call, batch, first_head)
    T, row_stride = call.q.shape[2], runner.row_stride
    rows = np.array(
        [
            not block or i // block % row_stride == _middle_block(i // block, row_stride, -(-T // block))
            for i in range(T)
        ]
    )
    for name, (sums, counts) in dense_metrics(call, batch, flags, rows).items():
        old = dense.setdefault(name, (np.zeros(heads), np.zeros(heads)))
        head_slice = slice(first_head, first_head + sums.shape[1])
        old[0][head_slice] += sums.sum(0)
        old[1][head_slice] += counts.sum(0)


def _middle_block(block: int, row_stride: int, blocks: int) -> int:
    """Return whether a block is read with a row stride: the middle one of its group. The last group may be short."""
    return min(row_stride, blocks - block // row_stride * row_stride) // 2


def dense_metrics(
    call: AttentionCall, batch: TokenBatch, flags: Tensor, rows: np.ndarray | None = None
) -> SumsAndCounts:
    """Compute every surface metric by its definition from the full map. Return sums and counts over rows, (B, H). With `rows`
    (T,) only these rows count, except for output norms, which use all rows."""
    p = attention_weights(call.q.double(), call.k.double(), call.params).numpy()  # (B, H, T, S)
    B, H, T, _ = p.shape
    mask = call.params.mask
    visible_mask = torch.ones(1, 1, T, T) if mask is None else mask.dense(T, T)
    visible_mask = visible_mask.expand(B, H, T, T).bool().numpy()
    real_tokens, ids = batch.real_tokens.numpy(), batch.ids.numpy()
    first = batch.first_token_positions.numpy()
    value_outputs = torch.einsum(
        "bhse,hed->bhsd", call.v.double()[:, list(call.params.kv_of_head)], call.hook_point.W_O.double()
    )
    norms = value_outputs.norm(dim=-1).numpy()  # (B, H, S)
    value_weighted = p * norms[:, :, None]
    value_weighted = value_weighted / np.maximum(value_weighted.sum(-1, keepdims=True), 1e-30)
    offsets = np.arange(T)[:, None] - np.arange(T)  # (T, S): distance back
    pairs = (real_tokens[:, :, None] & real_tokens[:, None])[:, None]  # pairs of tokens
    start = (np.arange(T) == first[:, None])[:, None, None]  # (B, 1, 1, S)
    visible = visible_mask.sum(-1)
    totals: SumsAndCounts = {}

    def store(name: str, values: np.ndarray, counted: np.ndarray) -> None:
        """Store the sums of values (B, H, T) over the rows that count."""
        selected = True if rows is None or name.startswith("output") else rows
        counted = np.broadcast_to(counted & selected, values.shape)
        totals[name] = (np.where(counted, values, 0.0).sum(-1), counted.sum(-1))

    row = real_tokens[:, None]
    entropy = -np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0.0).sum(-1)
    store("entropy", entropy, row)
    store("relative entropy", entropy / np.log(np.maximum(visible, 2)), row & (visible > 1))
    store("participation", 1 / np.maximum((p**2).sum(-1), 1e-12), row)
    ordinary = real_tokens & ~flags[batch.ids][..., CLASSES.index("special")].bool().numpy()  # (B, T)
    sees = (visible_mask & ordinary[:, None, None]).any(-1)  # (B, H, T): whether the row sees an ordinary token
    store("confidence", (p * ordinary[:, None, None]).max(-1), ordinary[:, None] & sees)
    store("distance", (p * abs(offsets)).sum(-1), row)
    store("signed distance", (p * offsets).sum(-1), row)
    store("first", (p * start).sum(-1), row)
    store("abstention", 1 - p.sum(-1), row)
    store("uniform", 1 / np.maximum(visible, 1), row)
    for c, name in enumerate(CLASSES):
        in_class = (flags[batch.ids][..., c].bool().numpy() & real_tokens)[:, None, None]
        # attention to a sink does not count as attention to a class
        in_class = in_class if name == "special" else in_class & ~start
        eligible = row if name == "special" else row & (visible_mask & in_class).any(-1)  # rows that see the class
        store(name, (p * in_class).sum(-1), eligible)
        store(f"{name} baseline", (visible_mask & in_class).sum(-1) / np.maximum(visible, 1), eligible)
        store(f"{name} value-weighted", (value_weighted * in_class).sum(-1), eligible)
    length = torch.einsum("bhte,hed->bhtd", call.z.double(), call.hook_point.W_O.double()).norm(dim=-1).numpy()
    store("output norm", length, row)
    store("output share", length / np.maximum(length.sum(1, keepdims=True), 1e-30), row)
    ahead = bool((visible_mask & (offsets < 0) & pairs).any())  # whether later tokens are visible
    for offset in range(1 - LONG_RANGE if ahead else 0, LONG_RANGE):
        at_offset = (offsets == offset) & pairs  # (B, 1, T, S): at most one entry per row
        target_cells = at_offset & ~start
        at = {kind: (at_offset * values).sum(-1) for kind, values in (("p", p), ("top", p == p.max(-1, keepdims=True)))}
        store(f"offset {offset}", at["p"], at_offset.any(-1))
        store(f"argmax {offset}", at["top"], at_offset.any(-1))
        store(f"aimed {offset}", at["p"], target_cells.any(-1))
        store(f"aimed baseline {offset}", 1 / np.maximum(visible, 1), target_cells.any(-1))
        store(f"aimed value-weighted {offset}", (at_offset * value_weighted).sum(-1), target_cells.any(-1))
    nearby = (abs(offsets) <= 3) & (offsets != 0) & pairs & ~start & (ahead | (offsets > 0))
    store("local", (p * nearby).sum(-1), nearby.any(-1))
    store("local baseline", nearby.sum(-1) / np.maximum(visible, 1), nearby.any(-1))
    store("local value-weighted", (value_weighted * nearby).sum(-1), nearby.any(-1))
    for low in (LONG_RANGE << i for i in range(11)):
        inside = (abs(offsets) >= low) & (abs(offsets) < 2 * low) & pairs
        reach = ((abs(offsets) >= low) & pairs & (ahead | (offsets > 0))).any(-1)
        store(f"distance {low}-{2 * low - 1}", (p * inside).sum(-1), reach)
    follows = np.concatenate((np.full((B, 1), -2), np.where(real_tokens, ids, -1)[:, :-1]), 1)
    repeats = (ids[:, :, None] == ids[:, None]) | (ids[:, :, None] == follows[:, None])
    far = (abs(offsets) >= LONG_RANGE) & ~repeats[:, None] & ~start & pairs
    eligible = (visible_mask & far).any(-1)
    store("long range", (p * far).sum(-1), eligible)
    store("long range baseline", (visible_mask & far).sum(-1) / np.maximum(visible, 1), eligible)
    store("long range value-weighted", (value_weighted * far).sum(-1), eligible)
    return totals


def assert_matches_dense(accumulator: Accumulator, dense: SumsAndCounts, names: Sequence[str] | None = None) -> None:
    """Check that means agree to 1e-5, and that the same scores have no rows."""
    for name in dense if names is None else names:
        sums, counts = dense[name]
        actual, rows = (x.sum(0) for x in accumulator.bucket_sums_and_counts(name))
        np.testing.assert_array_equal(rows, counts, err_msg=f"rows of {name}")
        with np.errstate(invalid="ignore", divide="ignore"):
            np.testing.assert_allclose(actual / rows, sums / counts, rtol=1e-5, atol=1e-5, err_msg=name)
