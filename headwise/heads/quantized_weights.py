"""Weights at few bits, packed. Looked at, they are numbers again: unpacking and multiplying is the reference.

A `Packed` holds matrices of one shape, one for each head say, (units, rows, inputs). Those of equal bits lie together,
`codes4` and `scales4`; those that stay as they are lie in `rows32`. Nothing of it is a parameter: a model that is to be
trained is unpacked first.
"""

import re
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.kernels.autotuned_linear import forms_wanted, linear
from headwise.kernels.prepacked_fp16 import Form, half_form
from headwise.kernels.quantization import from_codes, rounded, to_codes
from headwise.spec.weight_bits import FULL, GROUP


class Packed(nn.Module):
    """Matrices (units, rows, inputs) at so many bits each, rounded in groups along the inputs."""

    def __init__(
        self, bits: Sequence[int], rows: int, inputs: int, group: int = GROUP, activations: int = FULL
    ) -> None:
        super().__init__()
        if torch.empty(0).device.type != "meta":
            raise HeadwiseError(
                "weights at few bits are made from weights that are there; build the model without, and use hw.quantise."
            )
        self.bits, self.rows, self.inputs, self.group = tuple(bits), rows, inputs, group
        self.activations, self.dtype = activations, torch.get_default_dtype()
        self.inputs_are_split = False  # True: the matrices stand side by side along what is read, as W_O's heads do
        for count in self._kinds():
            units = len(self._units(count))
            if count == FULL:
                self.register_buffer("rows32", torch.empty(units, rows, inputs))
            elif count == 16:
                self.register_buffer("rows16", torch.empty(units, rows, inputs, dtype=torch.float16))
            else:
                codes, kind = (inputs, torch.int8) if count == 8 else (-(-inputs * count // 8), torch.uint8)
                scales = -(-inputs // max(1, min(group, inputs)))
                self.register_buffer(f"codes{count}", torch.empty(units, rows, codes, dtype=kind))
                self.register_buffer(f"scales{count}", torch.empty(units, rows, scales, dtype=torch.float32))

    def _kinds(self) -> list[int]:
        return sorted(set(self.bits))

    def _units(self, count: int) -> list[int]:
        return [unit for unit, bits in enumerate(self.bits) if bits == count]

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """What is to be held of these numbers, (units, rows, inputs), by name."""
        held: dict[str, Tensor] = {}
        for count in self._kinds():
            some = weight[self._units(count)]
            if count == FULL:
                held["rows32"] = some.clone()
            elif count == 16:
                held["rows16"] = some.to(torch.float16)
                if not held["rows16"].isfinite().all():
                    raise HeadwiseError(
                        f"weights of up to {some.abs().max():.3g} are too large for 16-bit floats, which end at 65504; "
                        f"store these at 8 bits."
                    )
            else:
                codes, scales = to_codes(some, count, self.group)
                held |= {f"codes{count}": codes.contiguous(), f"scales{count}": scales.contiguous()}
        return held

    def some_units(self, chosen: Sequence[int]) -> dict[str, Tensor]:
        """What is held of some matrices, by name; of kinds that none of them is of, nothing."""
        held: dict[str, Tensor] = {}
        for count in self._kinds():
            there = self._units(count)
            places = [there.index(unit) for unit in chosen if unit in there]
            names = (f"rows{count}",) if count in (FULL, 16) else (f"codes{count}", f"scales{count}")
            held |= {name: getattr(self, name)[places] for name in names if places}
        return held

    def unpacked(self) -> Tensor:
        """The numbers: (units, rows, inputs)."""
        kinds = self._kinds()
        if len(kinds) == 1:
            return self._of(kinds[0])
        made = torch.empty(len(self.bits), self.rows, self.inputs, dtype=self.dtype, device=self.device)
        for count in kinds:
            made[self._units(count)] = self._of(count)
        return made

    def _of(self, count: int) -> Tensor:
        if count in (FULL, 16):
            return self.get_buffer(f"rows{count}").to(self.dtype)
        codes, scales = getattr(self, f"codes{count}"), getattr(self, f"scales{count}")
        return from_codes(codes, scales, count, self.inputs, self.dtype, self.group)

    def some_rows(self, rows: Tensor) -> Tensor:
        """Some rows of the only matrix: (…) → (…, inputs)."""
        (count,) = self.bits
        if count == 16:
            return F.embedding(rows, self.get_buffer("rows16")[0]).to(self.dtype)
        codes, scales = getattr(self, f"codes{count}")[0], getattr(self, f"scales{count}")[0]
        codes, scales = F.embedding(rows, codes), F.embedding(rows, scales)  # which refuses rows that are not there
        return from_codes(codes, scales, count, self.inputs, self.dtype, self.group)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Side by side what all matrices make of an input: (…, inputs) → (…, units · rows)"""
        return multiplied(self, x, bias, lambda: self.unpacked().flatten(0, 1))

    def as_input(self, x: Tensor) -> Tensor:
        """What is multiplied by these weights: as it is, or rounded to few bits, row by row."""
        return rounded(x, self.activations, x.shape[-1])

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.buffers()).device

    @property
    def nbytes(self) -> int:
        """What is held, scales among it."""
        return sum(held.nbytes for held in self.buffers())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Packed":
        """Another dtype is that of the numbers as they are looked at; codes and scales stay what they are."""
        before = {name: held for name, held in self._buffers.items() if name.startswith("scales") or name == "rows16"}
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        for name, held in before.items():
            now = self._buffers[name]
            if held is not None and now is not None and now.dtype != held.dtype:
                self._buffers[name] = now.to(held.dtype) if held.is_meta else held.to(now.device)
        return self

    def extra_repr(self) -> str:
        """Sizes, for print(model)."""
        told = ", ".join(f"{len(self._units(count))} at {count}" for count in self._kinds())
        return f"{self.rows} × {self.inputs}, bits: {told}"


_forms: WeakKeyDictionary[Packed, dict[int, tuple[object, Form | None]]] = WeakKeyDictionary()  # made at a first step


def multiplied(packed: Packed, x: Tensor, bias: Tensor | None, weight: Callable[[], Tensor]) -> Tensor:
    """x Wᵀ + b; in a generation step through a form of the weight, if one can be made, else by its plain numbers."""
    read = x if packed.inputs_are_split else packed.as_input(x)  # what is split was rounded head by head
    form = _form((packed,), weight) if forms_wanted(x) else None
    return linear(read, weight(), bias) if form is None else form(read, bias)


def multiplied_as_one(several: tuple[Packed, ...], x: Tensor) -> Tensor | None:
    """In a generation step, side by side what each makes of one input, by one product; None where there is no such form."""
    if not forms_wanted(x):
        return None
    form = _form(several, lambda: torch.cat([packed.unpacked().flatten(0, 1) for packed in several]))
    return None if form is None else form(several[0].as_input(x), None)


def _form(several: tuple[Packed, ...], weight: Callable[[], Tensor]) -> Form | None:
    held = [(b.data_ptr(), b._version) for packed in several for b in packed._buffers.values() if b is not None]
    there = _forms.setdefault(several[0], {})
    key, form = there.get(len(several), (None, None))
    if key != held:  # not made yet, or written over
        form = half_form(weight())
        there[len(several)] = held, form
    return form


def is_held(name: str) -> bool:
    """Whether a name in a state dict is that of codes, scales or rows of a `Packed`."""
    return re.search(r"\.(codes|scales|rows)\d+$", name) is not None


class PackedLinear(Packed):
    """A linear layer whose weight, (out, in), is packed."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool, bits: int, group: int = GROUP, activations: int = FULL
    ) -> None:
        super().__init__((bits,), outputs, inputs, group, activations)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    @property
    def weight(self) -> Tensor:
        """The numbers, (out, in); not live."""
        return self.unpacked()[0]

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)"""
        return self.product(x, self.bias)


class PackedTable(Packed):
    """A table of vectors, one a row, packed."""

    def __init__(self, rows: int, width: int, bits: int, group: int = GROUP) -> None:
        super().__init__((bits,), rows, width, group)

    @property
    def weight(self) -> Tensor:
        """The numbers, (rows, width); not live."""
        return self.unpacked()[0]

    def forward(self, ids: Tensor) -> Tensor:
        """(…) → (…, width)"""
        return self.some_rows(ids)


class PackedTied(nn.Module):
    """A linear layer whose weight is a packed table that stands elsewhere."""

    def __init__(self, table: PackedTable, bias: bool, activations: int = FULL) -> None:
        super().__init__()
        self._table = (table,)  # in a tuple: it is not held here
        self.activations = activations
        self.bias = nn.Parameter(torch.empty(table.rows)) if bias else None

    @property
    def weight(self) -> Tensor:
        """The numbers, (out, in); not live."""
        return self._table[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)"""
        return self._table[0].product(rounded(x, self.activations, x.shape[-1]), self.bias)
