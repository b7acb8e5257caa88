"""Groups of KV heads that keep the same tokens: all of them, or sink tokens and a window. Each is one kernel call.

Keys are stored after positions are applied, so evicting a token moves no other one. A streaming group has one slot per sink
token, followed by a ring buffer of `window` slots. The token at position p of a row is stored in slot p until all slots are
taken; from then on it overwrites the oldest token of the ring. With sink_tokens=2 and window=4:

    slot                 |  0   1  |  2   3   4   5  |
                         |  sinks  |   ring buffer   |
    after positions 0-5  |  0   1  |  2   3   4   5  |
    after position 6     |  0   1  | *6   3   4   5  |     position 6 evicts 2
    after position 7     |  0   1  |  6  *7   4   5  |     position 7 evicts 3
    after position 10    |  0   1  | *10  7   8   9  |     slot = 2 + (10 - 2) % 4

    position 10 attends to    0   1   .   .   .   .   .   7   8   9   10

Slots are not in the order of positions. A single query attends to all of them, so their order does not matter; several
queries need a mask with the position of each slot (`RingBufferMask`).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headwise.cache.kv_buffer import KVBuffer, StoredRows
from headwise.cache.sink_window_masks import ColumnSubsetMask, RingBufferMask, flatten_and_mask, gather_columns
from headwise.errors import ArgumentError
from headwise.kernels import Mask, ScoreParams, ScoreRequest, run_kernel, window
from headwise.kernels.masks import CausalMask, PaddingMask
from headwise.kernels.score_bias import DenseBias
from headwise.spec import CachePolicy

PREFILL_ROWS = 256  # queries of a prompt per kernel call if most keys are outside their window


class HeadSelection:
    """Heads selected on the second axis of tensors: a view if their indices are contiguous, otherwise a copy."""

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
    """KV heads of a layer that cache all tokens, and the heads that use them."""

    def __init__(
        self, heads: list[int], kv_indices: list[int], kv_of_head: tuple[int, ...], bits: int, size: int | None
    ) -> None:
        self.head_indices, self.kv_indices, self.kv_of_head, self.size = heads, kv_indices, kv_of_head, size
        self.max_rows = size  # limit of the memory
        self.heads, self.kv_heads = HeadSelection(heads), HeadSelection(kv_indices)
        self.k, self.v = KVBuffer(bits), KVBuffer(bits)
        self.memo_key: tuple[object, ...] = (type(self), tuple(heads), kv_of_head)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, params: ScoreParams, request: ScoreRequest) -> Tensor:
        """Append new tokens and attend: (B, h, T, d), (B, KV heads, T, ·) twice → (B, h, T, e).

        `params` are the score params of all heads of the layer over all tokens, including evicted ones.
        """
        T = k.shape[2]
        length = tokens_before(request, T)
        self.append(k, v, length)
        stored = slice(0, length + T)
        group_params = request.memoized((params, self.memo_key, T == 1), lambda: self._select_params(params, T))
        return run_kernel(q, self.k.read(stored), self.v.read(stored), group_params, request.required_layer.backend)

    def _select_params(self, params: ScoreParams, T: int) -> ScoreParams:
        """Return the score params of the heads of this group."""
        if T == 1 and params.mask == CausalMask():  # a single query sees all keys
            params = replace(params, mask=None)
        return params.select_heads(self.heads.indices, self.kv_of_head)

    def append(self, k: Tensor, v: Tensor, start: int, row_starts: Tensor | None = None) -> None:
        """Store the tokens from position `start` on: (B, KV heads, T, ·) twice."""
        end = start + k.shape[2]
        if self.size is not None and end > self.size:
            raise ArgumentError(
                f"cache: it is full. Its size is {self.size} tokens; it contains {start}, and {end - start} more do not fit. "
                f"Use a larger size or a dynamic cache."
            )
        for buffer, new in ((self.k, k), (self.v, v)):
            buffer.append(new, start, self.size or end, self.max_rows)

    def write_dense(self, dense: Tensor, buffer: KVBuffer, length: int, row_starts: Tensor | None) -> None:
        """Write the stored tokens to their positions in `dense`, (B, K, S, ·)."""
        if length:
            dense[:, self.kv_indices, :length] = buffer.read(slice(0, length))


class UnsplitHeadGroup(HeadGroup):
    """All KV heads of a layer until the first of them evicts a token: one kernel call for all."""

    def __init__(self, kv_of_head: tuple[int, ...], kv_count: int, max_rows: int) -> None:
        super().__init__(list(range(len(kv_of_head))), list(range(kv_count)), kv_of_head, 32, None)
        self.max_rows = max_rows

    def _select_params(self, params: ScoreParams, T: int) -> ScoreParams:
        check_causal(params.mask)
        return super()._select_params(params, T)

    def split_into(self, groups: "list[HeadGroup]", length: int) -> None:
        """Move all tokens to groups of KV heads with the same policy."""
        for group in groups:
            group.k.storage = group.v.storage = ()  # left by a step that failed
            if length:
                k, v = (group.kv_heads.select(buffer.read(slice(0, length))) for buffer in (self.k, self.v))
                group.append(k, v, 0)
        self.k.storage = self.v.storage = ()


class StreamingHeadGroup(HeadGroup):
    """KV heads that keep sink tokens and a window of the last tokens, in a ring buffer (drawn in the module docstring)."""

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
        self.capacity = self.sink_tokens + self.ring_size
        self.memo_key = (*self.memo_key, window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, params: ScoreParams, request: ScoreRequest) -> Tensor:
        """Append new tokens and attend: (B, h, T, d), (B, KV heads, T, ·) twice → (B, h, T, e)."""
        T, backend = k.shape[2], request.required_layer.backend
        length = tokens_before(request, T)
        if T == 1 and request.row_starts is None:
            key = (params, self.memo_key)
            decode_params = request.memoized(key, lambda: self._decode_params(params, request))
            if decode_params is not None:
                slot, stored = self._slot(length), slice(0, min(self.capacity, length + 1))
                self.k.append(k, slot, stored.stop, self.capacity)
                self.v.append(v, slot, stored.stop, self.capacity)
                return run_kernel(q, self.k.read(stored), self.v.read(stored), decode_params, backend)
        check_causal(params.mask)
        encoded = self._encode(k, v, length)
        new = self.k.decode(encoded[0]), self.v.decode(encoded[1])
        is_plain = (
            request.row_starts is None and self.window is None and not masks_besides_causal_and_window(params, request)
        )
        if is_plain and length == 0 and self.capacity >= T:  # no token is evicted yet
            z = run_kernel(q, *new, params.select_heads(self.heads.indices, self.kv_of_head), backend)
            self._store(encoded, length, None)
            return z
        if T == 1:
            self._store(encoded, length, request.row_starts)
            return self._attend_block(q, (), range(1), T, params, request)
        self._store_sinks(encoded, length, request.row_starts)
        blocks = [range(start, min(start + PREFILL_ROWS, T)) for start in range(0, T, PREFILL_ROWS)]
        z = torch.cat(
            [self._attend_block(q[:, :, rows.start : rows.stop], new, rows, T, params, request) for rows in blocks], 2
        )
        if length:
            self.k.clone_storage()  # a step that fails later finds the old tokens again
            self.v.clone_storage()
        self._store(encoded, length, request.row_starts)
        return z

    def _decode_params(self, params: ScoreParams, request: ScoreRequest) -> ScoreParams | None:
        """Return the score params of a single query that sees all stored tokens; None if a mask may hide one."""
        check_causal(params.mask)
        if self.window is not None or params.bias is not None or masks_besides_causal_and_window(params, request):
            return None
        return replace(params, mask=None).select_heads(self.heads.indices, self.kv_of_head)

    def append(self, k: Tensor, v: Tensor, start: int, row_starts: Tensor | None = None) -> None:
        """Store those of the tokens from position `start` on that no other of them evicts."""
        self._store(self._encode(k, v, start), start, row_starts)

    def _encode(self, k: Tensor, v: Tensor, length: int) -> tuple[StoredRows, StoredRows]:
        """Return new tokens as they are stored, and reserve memory for them."""
        encoded = self.k.encode(k), self.v.encode(v)
        for buffer, rows in zip((self.k, self.v), encoded, strict=True):
            buffer.reserve(rows, min(self.capacity, length + k.shape[2]), self.capacity)
        return encoded

    def _attend_block(
        self, q: Tensor, new: tuple[Tensor, ...], rows: range, T: int, params: ScoreParams, request: ScoreRequest
    ) -> Tensor:
        """Attend with some of T queries to the keys they can see: the sinks, the ring before this step, and new keys.

        If `new` is empty, all new tokens are stored already.
        """
        length, row_starts = tokens_before(request, T), request.row_starts
        text_starts = q.new_zeros(1, 1, dtype=torch.long) if row_starts is None else row_starts[:, None]  # (1 or B, 1)
        slots = torch.arange(self.k.capacity, device=q.device)[None]  # (1, capacity)
        tokens_after = length + T - text_starts  # (1 or B, 1)
        if not new:
            kv_blocks = [self.k.read(slice(0, self.k.capacity))], [self.v.read(slice(0, self.v.capacity))]
            position_blocks = [self._position_in_slot(slots, tokens_after)]
        else:
            stored_tokens = (length - text_starts).clamp(min=0)  # (1 or B, 1)
            sink_slots = slice(0, min(self.sink_tokens, self.k.capacity))
            ring_is_visible = length and rows.start + 1 < self.ring_size
            ring_slots = slice(sink_slots.stop, self.k.capacity if ring_is_visible else sink_slots.stop)
            recent = slice(max(0, rows.start - self.ring_size + 1), rows.stop)
            kv_blocks = [
                [buffer.read(sink_slots), buffer.read(ring_slots), new_rows[:, :, recent]]
                for buffer, new_rows in zip((self.k, self.v), new, strict=True)
            ]
            recent_positions = torch.arange(recent.start, recent.stop, device=q.device) + length - text_starts
            position_blocks = [
                torch.where(slots[:, sink_slots] < tokens_after, slots[:, sink_slots], -1),
                self._position_in_slot(slots[:, ring_slots], stored_tokens),
                torch.where(recent_positions < self.sink_tokens, -1, recent_positions),  # sinks are in their slots
            ]
        key_positions = torch.cat([positions.expand(len(text_starts), -1) for positions in position_blocks], 1)
        block_params = self._block_params(key_positions, text_starts, rows, T, params, request)
        backend = request.required_layer.backend
        return run_kernel(q, torch.cat(kv_blocks[0], 2), torch.cat(kv_blocks[1], 2), block_params, backend)

    def _block_params(
        self,
        key_positions: Tensor,
        text_starts: Tensor,
        rows: range,
        T: int,
        params: ScoreParams,
        request: ScoreRequest,
    ) -> ScoreParams:
        """Return the score params of some queries and of keys at these positions, (1 or B, C), −1 for an empty slot."""
        length = tokens_before(request, T)
        S = length + T
        query_positions = torch.arange(rows.start, rows.stop, device=key_positions.device) + length - text_starts
        columns = torch.where(key_positions < 0, -1, key_positions + text_starts)  # among all keys
        mask: Mask = RingBufferMask(query_positions, key_positions, self.sink_tokens, self.ring_size, self.window)
        for extra_mask in masks_besides_causal_and_window(params, request):
            mask = mask & ColumnSubsetMask(extra_mask.for_heads(self.heads.indices), columns, S, rows, T)
        group_params = replace(params, mask=None).select_heads(self.heads.indices, self.kv_of_head)
        if group_params.bias is None:
            return replace(group_params, mask=mask)
        full_bias = group_params.bias.block(rows, range(S), T, S)  # by position, in whatever order the keys are
        bias = DenseBias(gather_columns(full_bias[(None,) * (4 - full_bias.ndim)], columns[:, None, None], S))
        return replace(group_params, mask=mask, bias=bias)

    def _position_in_slot(self, slots: Tensor, token_count: Tensor) -> Tensor:
        """Return the position stored in each slot after this number of tokens, or −1: (1, n), (1 or B, 1) → (1 or B, n)."""
        newest = token_count - 1
        ring_position = newest - (newest - slots) % self.ring_size  # the last position that maps to this slot
        positions = torch.where(
            slots < self.sink_tokens, slots, torch.where(ring_position < self.sink_tokens, -1, ring_position)
        )
        return torch.where(positions > newest, -1, positions)

    def _slot(self, position: int) -> int:
        """Return the slot of a position (drawn in the module docstring)."""
        ring_position = position - self.sink_tokens
        return position if ring_position < 0 else self.sink_tokens + ring_position % self.ring_size

    def _store(self, encoded: Sequence[StoredRows], length: int, row_starts: Tensor | None) -> None:
        """Write new tokens to their slots, except those that another new token evicts."""
        T = encoded[0][0].shape[2]
        if T == 1 and row_starts is not None:
            position = (length - row_starts).clamp(min=0)  # padding is stored where the first token will be
            slot = torch.where(
                position < self.sink_tokens, position, self.sink_tokens + (position - self.sink_tokens) % self.ring_size
            )  # (B,)
            for buffer, rows in zip((self.k, self.v), encoded, strict=True):
                buffer.write_per_sequence(rows, slot)
            return
        self._store_sinks(encoded, length, row_starts)
        for row, text_start in _text_rows(row_starts):
            end = length + T - text_start  # positions within the row's text
            start = max(self.sink_tokens, length - text_start, end - self.ring_size)
            if start < end:
                slots = [self._slot(position) for position in range(start, end)]
                self._write_slots(encoded, row, slots, start + text_start - length)

    def _store_sinks(self, encoded: Sequence[StoredRows], length: int, row_starts: Tensor | None) -> None:
        """Write those of the new tokens that are sinks of their row to their slots."""
        for row, text_start in _text_rows(row_starts):
            start, end = max(0, length - text_start), length + encoded[0][0].shape[2] - text_start
            slots = list(range(start, min(end, self.sink_tokens)))
            if slots:
                self._write_slots(encoded, row, slots, start + text_start - length)

    def _write_slots(self, encoded: Sequence[StoredRows], row: slice, slots: list[int], first: int) -> None:
        for buffer, rows in zip((self.k, self.v), encoded, strict=True):
            buffer.write(tuple(x[row, :, first : first + len(slots)] for x in rows), _as_slice(slots), row)

    def write_dense(self, dense: Tensor, buffer: KVBuffer, length: int, row_starts: Tensor | None) -> None:
        """Write the stored tokens to their positions in `dense`, (B, K, S, ·)."""
        if not length:
            return
        rows = buffer.read(slice(0, buffer.capacity))  # (B, KV heads, capacity, ·)
        slots = torch.arange(buffer.capacity, device=dense.device)[None]
        for row, text_start in _text_rows(row_starts):
            token_count = torch.tensor([[length - text_start]], device=dense.device)
            positions = self._position_in_slot(slots, token_count)[0]  # (capacity,)
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
    """Make the group of KV heads with this policy, in a layer with this window."""
    if window is not None and (policy.window is None or policy.window >= window):  # it never sees beyond the window
        policy, window = CachePolicy(policy.bits, 0, window), None
    if policy.window is None:
        return HeadGroup(heads, kv_indices, kv_of_head, policy.bits, size)
    return StreamingHeadGroup(heads, kv_indices, kv_of_head, policy, window)


def tokens_before(request: ScoreRequest, T: int) -> int:
    """Return the number of tokens before a step of T tokens."""
    assert request.num_keys is not None
    return request.num_keys - T


def check_causal(mask: Mask | None) -> None:
    """Raise if a query may attend to a later token."""
    if mask != CausalMask() and not any(part == CausalMask() for part in flatten_and_mask(mask)):
        raise ArgumentError(
            "mask: streaming heads need a causal mask, because they evict earlier tokens. Pass mask=hw.causal()."
        )


def masks_besides_causal_and_window(params: ScoreParams, request: ScoreRequest) -> tuple[Mask, ...]:
    """Return the masks besides the causal one, the window of the layer and, if row starts are known, padding."""
    if params.mask == CausalMask():
        return ()
    layer_window = request.required_layer.spec.window
    handled_types = (CausalMask, PaddingMask) if request.row_starts is not None else (CausalMask,)
    other_masks = (mask for mask in flatten_and_mask(params.mask) if not isinstance(mask, handled_types))
    return tuple(mask for mask in other_masks if layer_window is None or mask != window(layer_window))


def _text_rows(row_starts: Tensor | None) -> list[tuple[slice, int]]:
    """Return batch rows, each with the index of its first real token."""
    if row_starts is None:
        return [(slice(None), 0)]
    return [(slice(b, b + 1), text_start) for b, text_start in enumerate(row_starts.tolist())]


def _as_slice(indices: list[int]) -> slice | list[int]:
    """Return contiguous indices as a slice, which makes a view instead of a copy."""
    is_contiguous = indices == list(range(indices[0], indices[-1] + 1)) if indices else False
    return slice(indices[0], indices[-1] + 1) if is_contiguous else indices
