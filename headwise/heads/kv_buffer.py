"""Where keys, or values, of some heads lie: a row for each token, as it came or at few bits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.kernels.quantization import from_codes, to_codes

Coded = tuple[Tensor, ...]  # as it lies there: numbers, or codes and scales; (B, K, T, ·) each


class Shelf:
    """Room for rows of (B, K, ·, d)."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.held: Coded = ()
        self._channels = 0
        self._dtype = torch.float32

    def coded(self, x: Tensor) -> Coded:
        """Numbers as they will lie here: (B, K, T, d)"""
        self._channels, self._dtype = x.shape[-1], x.dtype
        return (x,) if self.bits == 32 else to_codes(x, self.bits)

    def decoded(self, rows: Coded) -> Tensor:
        """And back again: (B, K, T, d)"""
        if self.bits == 32:
            return rows[0]
        codes, scales = rows
        return from_codes(codes, scales, self.bits, self._channels, self._dtype)

    def as_kept(self, x: Tensor) -> Tensor:
        """Numbers as they will be read: (B, K, T, d)"""
        return self.decoded(self.coded(x))

    def make_room(self, like: Coded, needed: int, most: int | None) -> None:
        """Room for so many rows. Where it runs out it doubles, up to `most`."""
        if self.held and needed <= self.held[0].shape[2]:
            return
        room = max(needed, 2 * self.room, 64)
        room = room if most is None else min(room, most)
        if self.held:
            self.held = tuple(F.pad(x, (0, 0, 0, room - x.shape[2])) for x in self.held)
        else:
            # Zeros, for a slot nobody has filled may be multiplied by a weight of 0.
            self.held = tuple(x.new_zeros(*x.shape[:2], room, x.shape[3]) for x in like)

    def put(self, rows: Coded, at: slice | list[int], of: slice = slice(None)) -> None:
        """Write rows into slots, in some texts of the batch."""
        for held, new in zip(self.held, rows, strict=True):
            held[of, :, at] = new

    def put_at(self, rows: Coded, start: int) -> None:
        """Write rows into slots from one on, in all texts: what every step does, so it is quick."""
        for held, new in zip(self.held, rows, strict=True):
            held.narrow(2, start, new.shape[2]).copy_(new)

    def put_each(self, rows: Coded, at: Tensor) -> None:
        """Write one row for each text, (B, K, 1, ·), each into its own slot, (B,)."""
        every = torch.arange(len(at), device=at.device)
        for held, new in zip(self.held, rows, strict=True):
            held[every, :, at] = new[:, :, 0]

    def get(self, rows: slice) -> Tensor:
        """(B, K, rows, d)"""
        start, count = rows.start, rows.stop - rows.start
        if self.bits == 32:  # what every step does, so it is quick
            return self.held[0].narrow(2, start, count)
        return self.decoded(tuple(x.narrow(2, start, count) for x in self.held))

    def copy(self) -> None:
        """From now on write into a copy."""
        self.held = tuple(x.clone() for x in self.held)

    @property
    def room(self) -> int:
        """Rows there is room for."""
        return self.held[0].shape[2] if self.held else 0

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(x.numel() * x.element_size() for x in self.held)
