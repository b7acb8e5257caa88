"""Largest attention weights of every head, with their contexts. Examples of roles are in `role_examples.py`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.attention_call import AttentionCallContext, AttentionObserver, BlockListener
from headwise.analysis.metrics.batch_context import FIRST
from headwise.analysis.metrics.role_example_positions import render_marks, split_text_at_marks
from headwise.analysis.metrics.row_blocks import RowBlock
from headwise.analysis.recording.batching import TextSample
from headwise.distributed.process_group import ProcessGroup

CONTEXTS_PER_HEAD = 8


@dataclass(frozen=True)
class AttentionContext:
    """One large attention weight and its context.

    Attributes:
        token: Query token.
        attended: Key token.
        weight: Attention weight.
        sample: Number of the text in the corpus.
        row: Position of the query.
        column: Position of the key.
        text: The text around both tokens, with marks.
    """

    token: str
    attended: str
    weight: float
    sample: int
    row: int
    column: int
    text: str


class TopContexts(AttentionObserver):
    """Collect the rows with the largest weights of every head. Rows that attend to the first token or to themselves are
    left out."""

    follows_row_stride = True

    def __init__(self, heads: int, contexts_per_head: int = CONTEXTS_PER_HEAD) -> None:
        self.weights = np.zeros((heads, contexts_per_head))
        self.positions = np.full((heads, contexts_per_head, 3), -1, dtype=np.int64)  # sample, row, column
        self.samples: dict[int, TextSample] = {}
        self._remote_texts: dict[tuple[int, int, int], list[str]] = {}  # contexts of other processes

    def on_call(self, call: AttentionCallContext) -> BlockListener:
        """Add the top rows of every block of the call."""
        return partial(self._add_block, call)

    def _add_block(self, call: AttentionCallContext, block: RowBlock) -> None:
        """Add the rows of a block that attend neither to the first token nor to themselves."""
        batch_context, batch = call.batch_context, call.batch_context.batch
        attends_to_itself = (block.unnormalized_weights_at_offsets(0, 1)[..., 0] == 1) & (not call.is_cross_attention)
        attends_to_first = block.feature_sums[..., batch_context.layout.feature_index[FIRST]] == 1
        real_tokens = batch.real_tokens[:, block.rows.start : block.rows.stop]
        idle = attends_to_itself | attends_to_first | ~real_tokens[:, None]
        heads = slice(call.first_head + block.heads.start, call.first_head + block.heads.stop)
        positions_and_weights = self._top_rows(heads, block, idle, batch.first_token_positions)
        if positions_and_weights is not None:
            batch_context.host_copies.copy_then_call(
                positions_and_weights, partial(self._merge_rows, heads, batch.samples)
            )

    def _top_rows(self, heads: slice, block: RowBlock, idle: Tensor, starts: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the best rows of a block: text, query and key, (h, kept, 3), and weight, (h, kept). None if they are
        below the present contexts. `idle` (B, h, R) marks rows that do not count, `starts` (B,) the left padding."""
        confidence = torch.where(idle, 0.0, 1 / block.total)  # the largest e is 1: (B, h, R)
        B, h, R = confidence.shape
        on_host, limit = confidence.device.type == "cpu", self.weights.shape[1]
        if on_host and not (confidence.amax((0, 2)).numpy() > self.weights[heads][:, -1]).any():
            return None  # the usual case, once a few blocks have passed; on a device the question itself is a copy
        best, flat_index = confidence.transpose(0, 1).reshape(h, B * R).topk(min(limit, B * R), dim=1)  # (h, kept)
        row, example = flat_index % R, flat_index // R
        index = torch.arange(h, device=flat_index.device)[:, None].expand_as(flat_index)
        column = block.e[example, index, row].argmax(-1)  # (h, kept)
        first = starts[example]
        block_positions = torch.stack(
            (example, row + block.rows.start + block.past - first, column + block.cols.start - first), -1
        )
        return block_positions, best

    def _merge_rows(
        self, heads: slice, samples: Sequence[TextSample], row_positions: Tensor, row_weights: Tensor
    ) -> None:
        """Add the best rows of a block on the host."""
        positions, weights = row_positions.numpy(), row_weights.double().numpy()
        own_weights, limit = self.weights[heads], self.weights.shape[1]
        sample_ids = np.array([sample.index for sample in samples])
        positions = np.concatenate((sample_ids[positions[..., :1]], positions[..., 1:]), -1)
        weights, positions = (
            np.concatenate((own_weights, weights), 1),
            np.concatenate((self.positions[heads], positions), 1),
        )
        order = np.argsort(-weights, axis=1, kind="stable")[:, :limit]
        self.weights[heads] = np.take_along_axis(weights, order, 1)
        self.positions[heads] = np.take_along_axis(positions, order[..., None], 1)
        present_ids = set(self.positions[heads, :, 0].ravel().tolist())
        # copy, so that cached properties are not kept in memory
        self.samples |= {sample.index: replace(sample) for sample in samples if sample.index in present_ids}
        if len(self.samples) > 2 * self.weights.size:
            self.drop_unused_samples()

    def gather_from_processes(self, process_group: ProcessGroup) -> None:
        """Select the largest weights of all processes and exchange the texts of their contexts."""
        heads, limit = self.weights.shape
        weights, all_positions = (
            np.zeros((process_group.size, heads, limit)),
            np.zeros((process_group.size, heads, limit, 3), dtype=np.int64),
        )
        weights[process_group.rank], all_positions[process_group.rank] = self.weights, self.positions
        process_group.all_reduce_array_inplace(weights)
        process_group.all_reduce_array_inplace(all_positions)
        flat = weights.transpose(1, 0, 2).reshape(heads, -1)
        order = np.argsort(-flat, axis=1, kind="stable")[:, :limit]
        self.weights = np.take_along_axis(flat, order, 1)
        self.positions = np.take_along_axis(
            all_positions.transpose(1, 0, 2, 3).reshape(heads, -1, 3), order[..., None], 1
        )
        positions = [(sample, row, column) for sample, row, column in self.positions.reshape(-1, 3).tolist()]
        own_texts = [self._describe(*position) if position[0] in self.samples else [] for position in positions]
        lengths = np.zeros(process_group.size, dtype=np.int64)
        encoded = [json.dumps(words).encode() if words else b"" for words in own_texts]
        lengths[process_group.rank] = max(map(len, encoded))
        process_group.all_reduce_array_inplace(lengths)
        # each text was read by one process; the others contribute zeros
        shared = np.zeros((len(positions), int(lengths.max())), dtype=np.uint8)
        for row, words in enumerate(encoded):
            shared[row, : len(words)] = np.frombuffer(words, dtype=np.uint8)
        process_group.all_reduce_array_inplace(shared)
        payloads = (bytes(row).rstrip(b"\0") for row in shared)
        self._remote_texts = {
            position: json.loads(words) for position, words in zip(positions, payloads, strict=True) if words
        }

    def drop_unused_samples(self) -> None:
        """Discard the texts that no context refers to."""
        used_ids = set(self.positions[..., 0].ravel().tolist())
        self.samples = {index: sample for index, sample in self.samples.items() if index in used_ids}

    def contexts(self) -> list[list[AttentionContext]]:
        """Return the contexts of every head, largest weight first."""
        self.drop_unused_samples()
        return [
            [
                self._context(weight, *position)
                for weight, position in zip(weights, positions.tolist(), strict=True)
                if weight > 0
            ]
            for weights, positions in zip(self.weights.tolist(), self.positions, strict=True)
        ]

    def _context(self, weight: float, index: int, row: int, column: int) -> AttentionContext:
        token, attended, text = self._remote_texts.get((index, row, column)) or self._describe(index, row, column)
        return AttentionContext(token, attended, weight, index, row, column, text)

    def _describe(self, index: int, row: int, column: int) -> list[str]:
        """Return the query token, the key token and the text around them."""
        names, image = self.samples[index].token_texts, self.samples[index].image
        if image is not None:
            return [names[row], names[column], f"{image.name}: [{names[row]}] attends to *{names[column]}*"]
        return [
            names[row],
            names[column],
            render_marks(split_text_at_marks(names, {column: "attended", row: "token"})),
        ]
