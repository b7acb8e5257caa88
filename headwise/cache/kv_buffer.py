"""Memory for keys or values of some KV heads: one row per token, optionally quantized."""

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.kernels.quantization import dequantize, quantize

StoredRows = tuple[Tensor, ...]  # rows as they are stored: numbers, or codes and scales; (B, K, T, ·) each


class KVBuffer:
    """Growable rows of keys or values: (B, K, capacity, d)."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.storage: StoredRows = ()
        self._channels = 0
        self._dtype = torch.float32

    def encode(self, x: Tensor) -> StoredRows:
        """Quantize rows as they are stored: (B, K, T, d) → rows."""
        self._channels, self._dtype = x.shape[-1], x.dtype
        return (x,) if self.bits == 32 else quantize(x, self.bits)

    def decode(self, rows: StoredRows) -> Tensor:
        """Dequantize stored rows: rows → (B, K, T, d)."""
        if self.bits == 32:
            return rows[0]
        quantized, scales = rows
        return dequantize(quantized, scales, self.bits, self._channels, self._dtype)

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Quantize and dequantize: (B, K, T, d) → (B, K, T, d)."""
        return self.decode(self.encode(x))

    def reserve(self, like: StoredRows, needed: int, max_rows: int | None) -> None:
        """Allocate memory for `needed` rows. If it is full it grows by 1/16 and at least 64 rows, up to `max_rows`."""
        if self.storage and needed <= self.storage[0].shape[2]:
            return
        capacity = max(needed, self.capacity + max(64, self.capacity // 16))
        capacity = capacity if max_rows is None else min(capacity, max_rows)
        if self.storage:
            self.storage = tuple(F.pad(x, (0, 0, 0, capacity - x.shape[2])) for x in self.storage)
        else:
            # Zeros, because an empty slot may be multiplied by a weight of 0.
            self.storage = tuple(x.new_zeros(*x.shape[:2], capacity, x.shape[3]) for x in like)

    def append(self, x: Tensor, start: int, needed: int, max_rows: int | None) -> None:
        """Write new rows, (B, K, T, d), to the slots from `start` on, with memory for `needed` rows."""
        rows = self.encode(x)
        self.reserve(rows, needed, max_rows)
        for stored, new in zip(self.storage, rows, strict=True):
            stored.narrow(2, start, new.shape[2]).copy_(new)

    def write(self, rows: StoredRows, slots: slice | list[int], batch_rows: slice = slice(None)) -> None:
        """Write stored rows to slots, in some rows of the batch."""
        for stored, new in zip(self.storage, rows, strict=True):
            stored[batch_rows, :, slots] = new

    def write_per_sequence(self, rows: StoredRows, slots: Tensor) -> None:
        """Write one stored row per sequence, (B, K, 1, ·), each to its own slot, (B,)."""
        batch_index = torch.arange(len(slots), device=slots.device)
        for stored, new in zip(self.storage, rows, strict=True):
            stored[batch_index, :, slots] = new[:, :, 0]

    def read(self, rows: slice) -> Tensor:
        """Return the rows of these slots, dequantized: (B, K, n, d)."""
        start, count = rows.start, rows.stop - rows.start
        if self.bits == 32:
            return self.storage[0].narrow(2, start, count)
        return self.decode(tuple(x.narrow(2, start, count) for x in self.storage))

    def clone_storage(self) -> None:
        """Replace the storage by a copy, so that earlier snapshots stay as they are."""
        self.storage = tuple(x.clone() for x in self.storage)

    @property
    def capacity(self) -> int:
        """Number of rows allocated."""
        return self.storage[0].shape[2] if self.storage else 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(x.numel() * x.element_size() for x in self.storage)
