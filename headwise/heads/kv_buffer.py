"""Where keys, or values, of some heads lie: a row for each token, as it came or at few bits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.kernels.quantization import dequantize, quantize

StoredRows = tuple[Tensor, ...]  # as it lies there: numbers, or codes and scales; (B, K, T, ·) each


class KVBuffer:
    """Room for rows of (B, K, ·, d)."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.storage: StoredRows = ()
        self._channels = 0
        self._dtype = torch.float32

    def encode(self, x: Tensor) -> StoredRows:
        """Numbers as they will lie here: (B, K, T, d)"""
        self._channels, self._dtype = x.shape[-1], x.dtype
        return (x,) if self.bits == 32 else quantize(x, self.bits)

    def decode(self, rows: StoredRows) -> Tensor:
        """And back again: (B, K, T, d)"""
        if self.bits == 32:
            return rows[0]
        quantized, scales = rows
        return dequantize(quantized, scales, self.bits, self._channels, self._dtype)

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Numbers as they will be read: (B, K, T, d)"""
        return self.decode(self.encode(x))

    def reserve(self, like: StoredRows, needed: int, max_rows: int | None) -> None:
        """Room for so many rows. Where it runs out it doubles, up to `max_rows`."""
        if self.storage and needed <= self.storage[0].shape[2]:
            return
        capacity = max(needed, 2 * self.capacity, 64)
        capacity = capacity if max_rows is None else min(capacity, max_rows)
        if self.storage:
            self.storage = tuple(F.pad(x, (0, 0, 0, capacity - x.shape[2])) for x in self.storage)
        else:
            # Zeros, for a slot nobody has filled may be multiplied by a weight of 0.
            self.storage = tuple(x.new_zeros(*x.shape[:2], capacity, x.shape[3]) for x in like)

    def write(self, rows: StoredRows, slots: slice | list[int], batch_rows: slice = slice(None)) -> None:
        """Write rows into slots, in some texts of the batch."""
        for stored, new in zip(self.storage, rows, strict=True):
            stored[batch_rows, :, slots] = new

    def write_contiguous(self, rows: StoredRows, start: int) -> None:
        """Write rows into slots from one on, in all texts: what every step does, so it is quick."""
        for stored, new in zip(self.storage, rows, strict=True):
            stored.narrow(2, start, new.shape[2]).copy_(new)

    def write_per_sequence(self, rows: StoredRows, slots: Tensor) -> None:
        """Write one row for each text, (B, K, 1, ·), each into its own slot, (B,)."""
        batch_index = torch.arange(len(slots), device=slots.device)
        for stored, new in zip(self.storage, rows, strict=True):
            stored[batch_index, :, slots] = new[:, :, 0]

    def read(self, rows: slice) -> Tensor:
        """(B, K, rows, d)"""
        start, count = rows.start, rows.stop - rows.start
        if self.bits == 32:  # what every step does, so it is quick
            return self.storage[0].narrow(2, start, count)
        return self.decode(tuple(x.narrow(2, start, count) for x in self.storage))

    def clone_storage(self) -> None:
        """From now on write into a copy."""
        self.storage = tuple(x.clone() for x in self.storage)

    @property
    def capacity(self) -> int:
        """Rows there is room for."""
        return self.storage[0].shape[2] if self.storage else 0

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(x.numel() * x.element_size() for x in self.storage)
