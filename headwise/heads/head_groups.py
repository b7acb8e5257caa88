"""What some key heads of a layer keep: all tokens, or the first and the last; and the heads that read them.

Keys are stored after positions turned them, so that positions stay those of the text, whatever is forgotten.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.kv_buffer import KVBuffer
from headwise.kernels import Mask, ScoreParams, run_kernel
from headwise.kernels.masks import CausalMask, PaddingMask
from headwise.kernels.score_bias import DenseBias
from headwise.kernels.sink_window_masks import ColumnSubsetMask, RingBufferMask, flatten_and_mask, gather_columns
from headwise.spec import CachePolicy

PREFILL_ROWS = 256  # queries of a prompt at a time, where most keys are out of their sight


@dataclass(frozen=True, eq=False)
class CacheStepContext:
    """What one step of a layer gives to each part of its cache."""

    length: int  # tokens that came before
    row_starts: Tensor | None  # (B,): where the text of each row begins, padding being on its left; None: at 0
    params: ScoreParams  # of all heads, over all keys that ever came
    backend: str
    window: Mask | None = None  # of the layer, which each part of the cache sees to itself

    @cached_property
    def unmasked_params(self) -> ScoreParams:
        """The score params without their mask."""
        return replace(self.params, mask=None)

    @cached_property
    def masks_besides_causal(self) -> tuple[Mask, ...]:
        """Masks besides looking back and, where it is known where texts begin, padding."""
        handled_types = (CausalMask, PaddingMask) if self.row_starts is not None else (CausalMask,)
        other_masks = (mask for mask in flatten_and_mask(self.params.mask) if not isinstance(mask, handled_types))
        return tuple(mask for mask in other_masks if mask != self.window)

    @cached_property
    def is_causal(self) -> bool:
        """Whether no query looks ahead."""
        return any(mask == CausalMask() for mask in flatten_and_mask(self.params.mask))

    def check_causal(self) -> None:
        """Refuse a call whose queries look ahead."""
        if not self.is_causal:
            raise HeadwiseError("a head that forgets what lies behind must not look ahead; pass mask=hw.causal().")


class HeadSelection:
    """Some heads of those on the second axis of tensors: numbers in a row, which copy nothing, or any."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = _as_slice(indices)
        self._index_tensor = torch.tensor(indices, dtype=torch.long)

    def select(self, x: Tensor) -> Tensor:
        """(B, H, …) → (B, h, …)"""
        if isinstance(self.indices, slice):
            return x.narrow(1, self.indices.start, self.indices.stop - self.indices.start)
        self._index_tensor = self._index_tensor.to(x.device)
        return x.index_select(1, self._index_tensor)


class HeadGroup:
    """Key heads of a layer that keep everything, and the heads that read them."""

    def __init__(
        self, heads: list[int], kv_indices: list[int], kv_of_head: tuple[int, ...], bits: int, size: int | None
    ) -> None:
        self.head_indices, self.kv_indices, self.kv_of_head, self.size = heads, kv_indices, kv_of_head, size
        self.max_rows = size  # tokens there will be room for
        self.heads, self.kv_heads = HeadSelection(heads), HeadSelection(kv_indices)
        self.k, self.v = KVBuffer(bits), KVBuffer(bits)
        self._memoized_params: tuple[ScoreParams, ScoreParams | None] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: CacheStepContext) -> Tensor:
        """(B, h, T, d), (B, keys, T, ·) twice → (B, h, T, e)"""
        self.append(k, v, step.length)
        stored = slice(0, step.length + k.shape[2])
        if self._memoized_params is None or self._memoized_params[0] is not step.params:
            self._memoized_params = step.params, step.params.select_heads(self.heads.indices, self.kv_of_head)
        params = self._memoized_params[1]
        assert params is not None
        return run_kernel(q, self.k.read(stored), self.v.read(stored), params, step.backend)

    def append(self, k: Tensor, v: Tensor, start: int) -> None:
        """Keep the tokens from place `start` on: (B, keys, T, ·) twice."""
        end = start + k.shape[2]
        if self.size is not None and end > self.size:
            raise HeadwiseError(
                f"the cache is full: it holds {self.size} tokens, {start} are there and {end - start} more came; make it "
                f"larger, or use a dynamic one."
            )
        for buffer, new in ((self.k, k), (self.v, v)):
            encoded = buffer.encode(new)
            buffer.reserve(encoded, self.size or end, self.max_rows)
            buffer.write_contiguous(encoded, start)

    def write_dense(self, dense: Tensor, buffer: KVBuffer, length: int, row_starts: Tensor | None) -> None:
        """Put what is held at its places: whole is (B, K, S, ·)."""
        if length:
            dense[:, self.kv_indices, :length] = buffer.read(slice(0, length))


class UnsplitHeadGroup(HeadGroup):
    """All key heads of a layer, while none of them has forgotten anything: they are attended to in one call."""

    def __init__(self, kv_of_head: tuple[int, ...], kv_count: int, max_rows: int) -> None:
        super().__init__(list(range(len(kv_of_head))), list(range(kv_count)), kv_of_head, 32, None)
        self.max_rows = max_rows

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: CacheStepContext) -> Tensor:
        """(B, H, T, d), (B, K, T, ·) twice → (B, H, T, e)"""
        if self._memoized_params is None or self._memoized_params[0] is not step.params:
            step.check_causal()
        return super().attend(q, k, v, step)

    def split_into(self, groups: "list[HeadGroup]", length: int) -> None:
        """From now on the key heads go their own ways."""
        for group in groups:
            group.k.storage = group.v.storage = ()  # of a step that failed
            if length:
                k, v = (group.kv_heads.select(buffer.read(slice(0, length))) for buffer in (self.k, self.v))
                group.append(k, v, 0)
        self.k.storage = self.v.storage = ()


class StreamingHeadGroup(HeadGroup):
    """Key heads that keep the first tokens of the text and the last.

    The token at place p of its text stands in slot p while there is room, `sink_tokens` + `window` slots. After that it takes
    the slot of the token that is forgotten: the last ones go round in a ring behind the first ones.
    """

    def __init__(
        self,
        heads: list[int],
        kv_indices: list[int],
        kv_of_head: tuple[int, ...],
        policy: CachePolicy,
        window: int | None,
    ) -> None:
        super().__init__(heads, kv_indices, kv_of_head, policy.bits, None)
        assert policy.window is not None
        self.sink_tokens, self.ring_size, self.window = policy.sink_tokens, policy.window, window

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: CacheStepContext) -> Tensor:
        """(B, h, T, d), (B, keys, T, ·) twice → (B, h, T, e)"""
        T, capacity = k.shape[2], self.sink_tokens + self.ring_size
        params = self._decode_params(step) if T == 1 and step.row_starts is None else None
        if params is None:
            step.check_causal()
        encoded = self.k.encode(k), self.v.encode(v)
        self.k.reserve(encoded[0], min(capacity, step.length + T), capacity)
        self.v.reserve(encoded[1], min(capacity, step.length + T), capacity)
        if params is not None:  # what is held is what is seen
            slot, stored = self._slot(step.length), slice(0, min(capacity, step.length + 1))
            self.k.write_contiguous(encoded[0], slot)
            self.v.write_contiguous(encoded[1], slot)
            return run_kernel(q, self.k.read(stored), self.v.read(stored), params, step.backend)
        is_plain = step.row_starts is None and self.window is None and not step.masks_besides_causal
        new = self.k.decode(encoded[0]), self.v.decode(encoded[1])
        if is_plain and step.length == 0 and capacity >= T:  # nobody has forgotten anything yet
            z = run_kernel(
                q, new[0], new[1], step.params.select_heads(self.heads.indices, self.kv_of_head), step.backend
            )
            self._store(encoded, step)
            return z
        if T == 1:
            self._store(encoded, step)
            return self._attend_block(q, (), range(1), 1, step)
        self._store_sinks(encoded, step)
        blocks = [range(start, min(start + PREFILL_ROWS, T)) for start in range(0, T, PREFILL_ROWS)]
        z = torch.cat(
            [self._attend_block(q[:, :, block.start : block.stop], new, block, T, step) for block in blocks], 2
        )
        if step.length:
            self.k.clone_storage()  # a step that fails later finds the old ones again
            self.v.clone_storage()
        self._store(encoded, step)
        return z

    def _decode_params(self, step: CacheStepContext) -> ScoreParams | None:
        """What goes with one token that sees all that is held; None where it may not. Steps of a text have the same params,
        so that this is found out once."""
        if self._memoized_params is None or self._memoized_params[0] is not step.params:
            is_plain = (
                self.window is None and not step.masks_besides_causal and step.params.bias is None and step.is_causal
            )
            self._memoized_params = (
                step.params,
                step.unmasked_params.select_heads(self.heads.indices, self.kv_of_head) if is_plain else None,
            )
        return self._memoized_params[1]

    def append(self, k: Tensor, v: Tensor, start: int) -> None:
        """Keep those of the tokens from place `start` on that are not forgotten at once."""
        capacity = min(self.sink_tokens + self.ring_size, start + k.shape[2])
        encoded = self.k.encode(k), self.v.encode(v)
        for buffer, rows in zip((self.k, self.v), encoded, strict=True):
            buffer.reserve(rows, capacity, self.sink_tokens + self.ring_size)
        self._store(encoded, CacheStepContext(start, None, ScoreParams(1.0, ()), ""))

    def _attend_block(self, q: Tensor, new: tuple[Tensor, ...], rows: range, T: int, step: CacheStepContext) -> Tensor:
        """Some queries of T, and the keys they can see: the first, the ring as it was, and those that came with them.

        Without new keys everything is in its slot already.
        """
        text_starts = (
            q.new_zeros(1, 1, dtype=torch.long) if step.row_starts is None else step.row_starts[:, None]
        )  # (1 or B, 1)
        slots = torch.arange(self.k.capacity, device=q.device)[None]  # (1, room)
        tokens_before = (step.length - text_starts).clamp(
            min=0
        )  # (1 or B, 1): tokens of the text that are in their slots
        tokens_after = step.length + T - text_starts
        if not new:
            kv_blocks = [self.k.read(slice(0, self.k.capacity))], [self.v.read(slice(0, self.v.capacity))]
            position_blocks = [self._position_in_slot(slots, tokens_after)]
        else:
            sink_slots = slice(0, min(self.sink_tokens, self.k.capacity))
            ring_slots = slice(
                sink_slots.stop, self.k.capacity if step.length and rows.start + 1 < self.ring_size else sink_slots.stop
            )
            recent = slice(max(0, rows.start - self.ring_size + 1), rows.stop)
            kv_blocks = [
                [buffer.read(sink_slots), buffer.read(ring_slots), new_rows[:, :, recent]]
                for buffer, new_rows in zip((self.k, self.v), new, strict=True)
            ]
            recent_positions = (
                torch.arange(recent.start, recent.stop, device=q.device) + step.length - text_starts
            )  # (1 or B, n)
            position_blocks = [
                torch.where(slots[:, sink_slots] < tokens_after, slots[:, sink_slots], -1),
                self._position_in_slot(slots[:, ring_slots], tokens_before),
                torch.where(recent_positions < self.sink_tokens, -1, recent_positions),  # among the first already
            ]
        key_positions = torch.cat(
            [positions.expand(len(text_starts), -1) for positions in position_blocks], 1
        )  # (1 or B, C)
        query_positions = (
            torch.arange(rows.start, rows.stop, device=q.device) + step.length - text_starts
        )  # (1 or B, R)
        params = self._block_params(key_positions, query_positions, text_starts, rows, T, step)
        return run_kernel(q, torch.cat(kv_blocks[0], 2), torch.cat(kv_blocks[1], 2), params, step.backend)

    def _block_params(
        self,
        key_positions: Tensor,
        query_positions: Tensor,
        text_starts: Tensor,
        rows: range,
        T: int,
        step: CacheStepContext,
    ) -> ScoreParams:
        """What goes with keys in this order: held and queries are their places, (1 or B, C) and (1 or B, R)."""
        S = step.length + T
        columns = torch.where(key_positions < 0, -1, key_positions + text_starts)  # among all keys
        mask: Mask = RingBufferMask(query_positions, key_positions, self.sink_tokens, self.ring_size, self.window)
        for extra_mask in step.masks_besides_causal:
            mask = mask & ColumnSubsetMask(extra_mask.for_heads(self.heads.indices), columns, S, rows, T)
        params = step.unmasked_params.select_heads(self.heads.indices, self.kv_of_head)
        if params.bias is None:
            return replace(params, mask=mask)
        full_bias = params.bias.block(rows, range(S), T, S)  # by true places, whatever order keys are in
        bias = DenseBias(gather_columns(full_bias[(None,) * (4 - full_bias.ndim)], columns[:, None, None], S))
        return replace(params, mask=mask, bias=bias)

    def _position_in_slot(self, slots: Tensor, token_count: Tensor) -> Tensor:
        """The place of the token in each slot once so many came, or −1: (1, n), (1 or B, 1) → (1 or B, n)."""
        newest = token_count - 1
        # the last place that falls into this slot of the ring
        ring_position = newest - (newest - slots) % self.ring_size
        positions = torch.where(
            slots < self.sink_tokens, slots, torch.where(ring_position < self.sink_tokens, -1, ring_position)
        )
        return torch.where(positions > newest, -1, positions)

    def _slot(self, position: int) -> int:
        return (
            position
            if position < self.sink_tokens
            else self.sink_tokens + (position - self.sink_tokens) % self.ring_size
        )

    def _store(self, encoded: Sequence[tuple[Tensor, ...]], step: CacheStepContext) -> None:
        """Put new tokens into their slots; of many, those that are not forgotten at once."""
        T = encoded[0][0].shape[2]
        if T == 1 and step.row_starts is not None:
            position = (step.length - step.row_starts).clamp(min=0)  # padding lands where the first token will
            slot = torch.where(
                position < self.sink_tokens, position, self.sink_tokens + (position - self.sink_tokens) % self.ring_size
            )  # (B,)
            for buffer, rows in zip((self.k, self.v), encoded, strict=True):
                buffer.write_per_sequence(rows, slot)
            return
        self._store_sinks(encoded, step)
        for row, text_start in self._text_rows(step):
            end = step.length + T - text_start  # the text's own places
            start = max(self.sink_tokens, step.length - text_start, end - self.ring_size)
            if start < end:
                slots = [self._slot(position) for position in range(start, end)]
                self._write_slots(encoded, row, slots, start + text_start - step.length)

    def _store_sinks(self, encoded: Sequence[tuple[Tensor, ...]], step: CacheStepContext) -> None:
        """Put those of the new tokens that are among the first of their text into their slots."""
        for row, text_start in self._text_rows(step):
            start, end = max(0, step.length - text_start), step.length + encoded[0][0].shape[2] - text_start
            slots = list(range(start, min(end, self.sink_tokens)))
            if slots:
                self._write_slots(encoded, row, slots, start + text_start - step.length)

    def _write_slots(self, encoded: Sequence[tuple[Tensor, ...]], row: slice, slots: list[int], first: int) -> None:
        for buffer, rows in zip((self.k, self.v), encoded, strict=True):
            buffer.write(tuple(x[row, :, first : first + len(slots)] for x in rows), _as_slice(slots), row)

    def _text_rows(self, step: CacheStepContext) -> list[tuple[slice, int]]:
        """Rows of the batch, and where their text begins."""
        if step.row_starts is None:
            return [(slice(None), 0)]
        return [(slice(b, b + 1), text_start) for b, text_start in enumerate(step.row_starts.tolist())]

    def write_dense(self, dense: Tensor, buffer: KVBuffer, length: int, row_starts: Tensor | None) -> None:
        """Put what is held at its places: whole is (B, K, S, ·)."""
        if not length:
            return
        rows = buffer.read(slice(0, buffer.capacity))  # (B, keys, room, ·)
        slots = torch.arange(buffer.capacity, device=dense.device)[None]
        for row, text_start in self._text_rows(CacheStepContext(length, row_starts, ScoreParams(1.0, ()), "")):
            positions = self._position_in_slot(slots, torch.tensor([[length - text_start]], device=dense.device))[
                0
            ]  # (room,)
            is_stored = positions >= 0
            row_view = dense[row, self.kv_indices]
            row_view[:, :, positions[is_stored] + text_start] = rows[row, :, is_stored]
            dense[row, self.kv_indices] = row_view


def make_head_group(
    heads: list[int],
    kv_indices: list[int],
    kv_of_head: tuple[int, ...],
    policy: CachePolicy,
    window: int | None,
    size: int | None,
) -> HeadGroup:
    """The part for key heads that keep alike, in a layer with this window."""
    if window is not None and (policy.window is None or policy.window >= window):  # all it sees is the layer's window
        policy, window = CachePolicy(policy.bits, 0, window), None
    if policy.window is None:
        return HeadGroup(heads, kv_indices, kv_of_head, policy.bits, size)
    return StreamingHeadGroup(heads, kv_indices, kv_of_head, policy, window)


def _as_slice(indices: list[int]) -> slice | list[int]:
    """Numbers in a row as a slice, which copies nothing."""
    is_contiguous = indices == list(range(indices[0], indices[-1] + 1)) if indices else False
    return slice(indices[0], indices[-1] + 1) if is_contiguous else indices
