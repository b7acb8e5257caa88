"""Attention farther away than the window of the offset profile, on long texts made by concatenation.

    far offset      Weight at a fixed distance outside the window. The best distance of each head is selected on every other
                    text and evaluated on the remaining texts.
    fixed position  Weight on a fixed position of the text, from rows outside the window. The best position is selected and
                    evaluated in the same way. The first token and special tokens are excluded.
    outside window  Weight on the keys that a streaming KV head would evict, which caches only the first tokens and a window.
                    `plan_streaming` ranks KV heads by it. A low weight does not prove that a head can stream: an induction
                    head attends to the first token until a token is repeated.

Heads with sliding-window attention are not measured. The baseline of the first two metrics is 1 divided by the number of
visible keys. The order of the texts is random, so no word is at the same position in all of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.batch_context import WINDOW
from headwise.analysis.metrics.listen_at_hook_points import listen_at_hook_points
from headwise.analysis.metrics.metric import IDENTICAL, MetricSpec
from headwise.analysis.metrics.prompt_metric import MIN_SAMPLES
from headwise.analysis.metrics.row_blocks import value_output_norms
from headwise.analysis.metrics.task_metric import TaskMetric, TaskMetricDetails
from headwise.analysis.recording.batching import forward_ids, reachable_hook_points, tokenizer_of
from headwise.analysis.recording.tokenized_corpus import default_corpus
from headwise.heads.hook_point import AttentionCall
from headwise.model import ModelProtocol
from headwise.progress import Progress
from headwise.spec import CachePolicy
from headwise.text.corpus import Corpus

TEXTS, LENGTH = 40, 112  # number of texts, and tokens of each
MIN_ROWS = WINDOW  # minimum number of rows of an offset or a position
STREAMING_POLICY = CachePolicy(sink_tokens=4, window=WINDOW)  # cache policy of a streaming KV head
BATCH_TEXTS = 8  # texts per batch

_BASE = MetricSpec("", positional=True, merge=IDENTICAL, corpus_label="texts laid end to end")
FAR_OFFSET_SPECS = replace(
    _BASE,
    name="far offset",
    label=f"weight at its best offset of {WINDOW} or more",
    high_means="attends at a fixed distance outside the window",
).with_variants()
FIXED_POSITION_SPECS = replace(
    _BASE,
    name="fixed position",
    label=f"weight on its best position, from {WINDOW} tokens away or more",
    high_means="attends to one position",
).with_variants()
OUTSIDE_WINDOW = replace(
    _BASE, name="outside window",
    label=f"weight on keys that a cache of {STREAMING_POLICY.sink_tokens} + {STREAMING_POLICY.window} tokens evicts",
    in_table=True, high_means="needs the full cache",
)  # fmt: skip


class FarAttentionMetric(TaskMetric):
    """Far-offset, fixed-position and outside-window scores. Computed by `hw.profile(model, prompts=True)`.

    `outside window` is not measured for encoders, which have no cache.

    Args:
        corpus: Texts to concatenate. None selects the default corpus of a profile.

    >>> [spec.name for spec in FarAttentionMetric().metric_specs if spec.displayed]
    ['far offset', 'fixed position', 'outside window']
    """

    metric_specs = (*FAR_OFFSET_SPECS, *FIXED_POSITION_SPECS, OUTSIDE_WINDOW)

    def __init__(self, corpus: Any = None) -> None:
        self.corpus = corpus

    def run(
        self, model: ModelProtocol, accumulator: Accumulator, seed: int = 0, progress: Progress | None = None
    ) -> TaskMetricDetails:
        """Read the texts, choose an offset and a position for each head, and add up their weights."""
        accumulator.register_metrics(self.names)
        if model.spec.kind == "encoder-decoder":
            return TaskMetricDetails(
                "encoder-decoder models are not supported: far offsets need a single stack and one text."
            )
        prefix, suffix = tokenizer_of(model).template_ids
        inner = range(max(1, len(prefix)), LENGTH - len(suffix))
        ids = concatenated_texts(model, self.corpus, seed)
        if len(ids) < MIN_SAMPLES:
            return TaskMetricDetails(
                f"too little context or text: {MIN_SAMPLES} texts of {LENGTH} tokens are needed. Got {len(ids)}."
            )
        hook_points = reachable_hook_points(model)
        full_attention = [
            hook_point.window is None or hook_point.window >= LENGTH
            for hook_point in hook_points
            for _ in hook_point.head_ids
        ]
        text_sums = _FarOffsetSums(accumulator.heads, len(ids), inner, ahead=model.spec.kind == "encoder")
        for first in range(0, len(ids), BATCH_TEXTS):
            if progress is not None:
                progress(FAR_OFFSET_SPECS[0].corpus_label, first, len(ids))
            batch_ids = torch.tensor(ids[first : first + BATCH_TEXTS], device=model.device)
            with listen_at_hook_points(hook_points, text_sums.on_call, first):
                forward_ids(model, batch_ids)
        if progress is not None:
            progress(FAR_OFFSET_SPECS[0].corpus_label, len(ids), len(ids))
        return TaskMetricDetails(chosen_offsets=self._add(accumulator, text_sums, np.array(full_attention)))

    def _add(
        self, accumulator: Accumulator, text_sums: "_FarOffsetSums", full_attention: np.ndarray
    ) -> dict[str, list[int]]:
        """Add the weights at the offset and the position chosen for each head, and return the choices.

        `full_attention` (heads,) marks the heads that see the full text; a window would hide the far tokens.
        """
        choices: dict[str, list[int]] = {}
        sums, counts = (arrays[self.names[0]] for arrays in (accumulator.sums, accumulator.counts))
        heads = np.arange(accumulator.heads)
        for group, (name, arrays) in enumerate(text_sums.means.items()):
            best = arrays[0, 0::2].mean(0).argmax(1)  # (heads,), on the texts for selection
            choices[name] = [text_sums.labels[name][index] for index in best]
            for kind in range(3):
                value = text_sums.baselines[name][best][None] if kind == 1 else arrays[kind // 2][:, heads, best]
                sums[: len(arrays[0]), :, 3 * group + kind] += value * full_attention
                counts[: len(arrays[0]), :, 3 * group + kind] += full_attention
        if not text_sums.ahead:
            sums[: len(text_sums.outside_window), :, -1] += text_sums.outside_window * full_attention
            counts[: len(text_sums.outside_window), :, -1] += full_attention
        return choices


class _FarOffsetSums:
    """Mean weights of each text at every far offset and position, plain and value-weighted, and outside the window."""

    def __init__(self, heads: int, texts: int, inner: range, *, ahead: bool) -> None:
        self.ahead, T = ahead, LENGTH
        row, key = np.arange(T)[:, None], np.arange(T)[None]
        visible = np.full(T, T) if ahead else np.arange(1, T + 1)
        target, distance = (key >= inner.start) & (key < inner.stop) & (ahead | (key <= row)), row - key
        offsets = [
            o for o in range(1 - T, T) if abs(o) >= WINDOW and (target & (distance == o)).any(1).sum() >= MIN_ROWS
        ]
        positions = [j for j in inner if (target & (np.abs(distance) >= WINDOW))[:, j].sum() >= MIN_ROWS]
        self.labels = {FAR_OFFSET_SPECS[0].name: offsets, FIXED_POSITION_SPECS[0].name: positions}
        # (choices, T, T): the map entries of each offset or position, at most one per row
        cells = {
            FAR_OFFSET_SPECS[0].name: np.stack([target & (distance == o) for o in offsets]),
            FIXED_POSITION_SPECS[0].name: np.stack(
                [target & (np.abs(distance) >= WINDOW) & (key == j) for j in positions]
            ),
        }
        self.baselines = {name: (masks.any(2) / visible).sum(1) / masks.any(2).sum(1) for name, masks in cells.items()}
        self.cell_indices = {name: [np.nonzero(mask) for mask in masks] for name, masks in cells.items()}
        self.means = {name: np.zeros((2, texts, heads, len(masks))) for name, masks in cells.items()}
        self.outside_window = np.zeros((texts, heads))

    def on_call(self, call: AttentionCall, first: int, first_head: int) -> None:
        """Add one attention call. `first` is the number of the first text of the batch."""
        maps = call.maps()  # (B, H, T, T)
        B, H = maps.shape[:2]
        if not H:
            return
        value_weighted = maps * value_output_norms(call)[:, :, None]
        value_weighted = value_weighted / value_weighted.sum(-1, keepdim=True).clamp(min=1e-30)
        index = (slice(first, first + B), slice(first_head, first_head + H))
        rows = range(STREAMING_POLICY.cached_tokens(LENGTH), LENGTH)
        outside = attention_outside_window(maps[:, :, rows.start :], rows, STREAMING_POLICY).mean(-1)  # (B, H)
        cell_means = [
            weights[:, :, rows, keys].mean(-1)  # (B, H)
            for weights in (maps, value_weighted)
            for cells in self.cell_indices.values()
            for rows, keys in cells
        ]
        means = torch.stack((*cell_means, outside)).cpu().double().numpy()  # in one copy
        column = 0
        for kind in range(2):
            for name, cells in self.cell_indices.items():
                self.means[name][(kind, *index)] = np.moveaxis(means[column : column + len(cells)], 0, -1)
                column += len(cells)
        if not self.ahead:
            self.outside_window[index] = means[-1]


def attention_outside_window(weights: Tensor, rows: Sequence[int], policy: CachePolicy) -> Tensor:
    """Return the weight on keys that are evicted under a cache policy: (…, rows, S) → (…, rows).

    Args:
        weights: Attention weights, (…, rows, S).
        rows: Position of each row.
        policy: Cache policy with a window.

    >>> attention_outside_window(torch.full((1, 8), 0.125), [7], CachePolicy(sink_tokens=1, window=3))
    tensor([0.5000])
    """
    assert policy.window is not None
    keys = torch.arange(weights.shape[-1], device=weights.device)
    position = torch.tensor(list(rows), device=weights.device)[:, None]
    evicted = (keys >= policy.sink_tokens) & (keys <= position - policy.window)  # (rows, S)
    return (weights * evicted.to(weights)).sum(-1)


def concatenated_texts(model: ModelProtocol, corpus: Any = None, seed: int = 0, texts: int = TEXTS) -> list[list[int]]:
    """Concatenate texts in random order to sequences of LENGTH tokens, with the BOS/EOS template of the tokenizer.

    The result is empty if the context is shorter or the corpus has too few tokens.
    """
    tokenizer = tokenizer_of(model)
    prefix, suffix = tokenizer.template_ids
    documents = default_corpus(model) if corpus is None else Corpus.of(corpus)
    token_ids = [tokenizer.encode(item.text, add_special_tokens=False) for item in documents.items()]
    inner = LENGTH - len(prefix) - len(suffix)
    if model.spec.max_input_tokens < LENGTH or sum(map(len, token_ids)) < inner:
        return []
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(texts):
        ids: list[int] = []
        for i in rng.permutation(len(token_ids)):
            ids += token_ids[i]
            if len(ids) >= inner:
                break
        sequences.append([*prefix, *ids[:inner], *suffix])
    return sequences
