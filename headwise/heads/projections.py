"""What heads read and what they write: projections with a head axis.

Storage is fused, one weight for q, k and v, because one product is quicker than three. What is saved is split, one tensor
per letter with its head axis, because that is what a person can read, cut and share:

    q.weight (H, d, D)   k.weight (K, d, D)   v.weight (K, e, D)   and   weight (D, H, e) of the output projection

Where heads have weights at few bits (`spec.weights`), letters are kept apart, each in a `Packed`.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads.quantized_weights import Packed, multiplied, multiplied_as_one
from headwise.kernels import Angles
from headwise.kernels.autotuned_linear import linear
from headwise.kernels.collectives import Together
from headwise.spec import AttentionSpec
from headwise.spec.weight_bits import FULL

STORAGES = ("qkv", "q,kv", "q,k,v")


class Read(nn.Module):
    """The q, k and v projections of a layer. `storage` says which letters share a weight: qkv, q,kv or q,k,v.

    `value_width` is that of what values are read from, where it is not what keys are read from.
    """

    def __init__(self, spec: AttentionSpec, storage: str = "qkv", value_width: int | None = None) -> None:
        super().__init__()
        if storage not in STORAGES:
            raise HeadwiseError(f"storage {storage!r} is unknown; use one of {' | '.join(STORAGES)}.")
        if storage == "qkv" and spec.kv_width != spec.width:
            storage = "q,kv"  # two inputs of different width cannot share a weight
        heads, kv_heads = len(spec.head_ids), len(spec.kv_ids)
        self.spec, self.storage = spec, storage
        self.sizes = {"q": (heads, spec.head_dim), "k": (kv_heads, spec.head_dim), "v": (kv_heads, spec.value_dim)}
        share = spec.heads if spec.input == "slice" else 1
        values = spec.kv_width if value_width is None else value_width
        self.inputs = {"q": spec.width // share, "k": spec.kv_width // share, "v": values // share}
        bits = {letter: bits_here(spec, letter) for letter in "qkv"}
        packed = {letter: own for letter, own in bits.items() if any(count != FULL for count in own)}
        self.slabs = tuple("qkv" if packed else storage.split(","))  # what lies together
        self.same_keys: Callable[[Tensor, str], Tensor] | None = None  # where other processes hold copies of key heads
        for slab in self.slabs:
            rows = sum(self._rows(letter) for letter in slab)
            if slab in packed:
                assert spec.weights is not None
                sizes = (self.sizes[slab][1], self.inputs[slab], spec.weights.group, spec.weights.activations)
                self.add_module(slab, Packed(packed[slab], *sizes))
            else:
                self.register_parameter(f"{slab}_weight", nn.Parameter(torch.empty(rows, self.inputs[slab[0]])))
            self.register_parameter(f"{slab}_bias", nn.Parameter(torch.empty(rows)) if spec.bias else None)

    def forward(
        self, x: Tensor, source: Tensor | None = None, angles: Angles | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D), (B, S, D) → q (B, H, T, d), k (B, K, S, d), v (B, K, S, e); q and k turned by their angles."""
        if source is not None:
            return (*self.project(x, "q"), *self.project(source, "kv"))  # pyright: ignore[reportReturnType]
        return self.project(x, "qkv", angles)  # pyright: ignore[reportReturnType]

    def project(self, x: Tensor, letters: str, angles: Angles | None = None) -> tuple[Tensor, ...]:
        """Some of q, k and v of one input, each (B, its heads, T, its channels), with as few products as storage allows.

        q and k that come of one product are turned together.
        """
        out: list[Tensor] = []
        together = self._packed_as_one(x) if letters == "qkv" else None
        for slab in self.slabs if together is None else ("qkv",):
            some = slab if slab in letters else "".join(letter for letter in slab if letter in letters)
            if not some:
                continue
            if self.spec.input == "slice":
                made = [self._project_slices(x, letter) for letter in some]
            else:
                product = self._product(x, slab, some) if together is None else together  # (B, T, rows)
                if angles is not None and some == "qkv":
                    out += self._turned(product, angles)
                    continue
                made = [product] if len(some) == 1 else product.split([self._rows(letter) for letter in some], -1)
                made = [self._by_head(piece, letter) for letter, piece in zip(some, made, strict=True)]
            turned = () if angles is None else "qk"
            out += [angles.turn(p) if c in turned else p for c, p in zip(some, made, strict=True)]  # pyright: ignore
        return tuple(out)

    def _product(self, x: Tensor, slab: str, some: str) -> Tensor:
        packed, bias = self._packed(slab), self._bias(some)
        if packed is not None and self.same_keys is None:
            return packed.product(x, bias)
        weight = self._weight(some)
        if self.same_keys is not None:
            weight = self.same_keys(weight, some)
            bias = None if bias is None else self.same_keys(bias, some)
        return linear(self._as_input(x, slab), weight, bias)

    def _packed_as_one(self, x: Tensor) -> Tensor | None:
        """q, k and v of packed weights by one product, where a generation step has one."""
        q, k, v = (self._packed(letter) for letter in "qkv")
        if q is None or k is None or v is None or self.same_keys is not None or self.spec.input == "slice":
            return None
        made = multiplied_as_one((q, k, v), x) if len(set(self.inputs.values())) == 1 else None
        return made if made is None or not self.spec.bias else made + torch.cat([self._bias(c) for c in "qkv"])  # pyright: ignore

    def _by_head(self, product: Tensor, letter: str) -> Tensor:
        return product.reshape(*product.shape[:2], *self.sizes[letter]).transpose(1, 2)

    def _turned(self, product: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """q and k side by side are turned as heads of one: (B, T, rows) → (B, H, T, d) (B, K, T, d) (B, K, T, e)"""
        (H, d), (K, _), rows = self.sizes["q"], self.sizes["k"], self._rows("v")
        turning = (H + K) * d
        both = product.narrow(-1, 0, turning).view(*product.shape[:2], H + K, d).transpose(1, 2)
        turned = angles.turn(both)  # narrow and view are called without a detour through Python, as split is not
        return turned.narrow(1, 0, H), turned.narrow(1, H, K), self._by_head(product.narrow(-1, turning, rows), "v")

    def _project_slices(self, x: Tensor, letter: str) -> Tensor:
        """Each head reads its own slice of the embedding: a grouped 1×1 convolution."""
        heads = torch.tensor(self.spec.head_ids, dtype=torch.long, device=x.device)
        slices = x.unflatten(-1, (self.spec.heads, -1)).index_select(2, heads)  # (B, T, H, D/heads)
        slices = self._as_input(slices, letter)
        made = torch.einsum("bthc,hdc->bhtd", slices, self.weight(letter))  # (B, H, T, d)
        bias = self.bias(letter)
        return made if bias is None else made + bias[:, None]

    def weight(self, letter: str) -> Tensor:
        """A live view of one letter's weight with its head axis: (heads, channels, width)."""
        return self._weight(letter).unflatten(0, self.sizes[letter])

    def bias(self, letter: str) -> Tensor | None:
        """A live view of one letter's bias: (heads, channels)."""
        bias = self._bias(letter)
        return None if bias is None else bias.unflatten(0, self.sizes[letter])

    @torch.no_grad()
    def join(self) -> None:
        """Keep q, k and v in one weight from now on, a copy, where they may lie in one: one product instead of three."""
        if self.slabs != ("q", "k", "v") or len(set(self.inputs.values())) > 1 or any(map(self._packed, self.slabs)):
            return
        for kind in ("weight", "bias") if self.spec.bias else ("weight",):
            pieces = [self._parameters.pop(f"{letter}_{kind}") for letter in "qkv"]
            grads = all(piece.requires_grad for piece in pieces if piece is not None)
            self.register_parameter(f"qkv_{kind}", nn.Parameter(torch.cat(pieces), grads))  # pyright: ignore
        if not self.spec.bias:
            for letter in "qkv":
                del self._parameters[f"{letter}_bias"]
            self.register_parameter("qkv_bias", None)
        self.storage, self.slabs = "qkv", ("qkv",)

    def _rows(self, letter: str) -> int:
        heads, channels = self.sizes[letter]
        return heads * channels

    def _weight(self, letters: str) -> Tensor:
        slab, rows = self._rows_in_slab(letters)
        packed = self._packed(slab)
        if packed is not None:
            return packed.unpacked().flatten(0, 1)
        weight = getattr(self, f"{slab}_weight")
        return weight if letters == slab else weight[rows]  # a slice would cost a copy in the backward pass

    def _packed(self, slab: str) -> Packed | None:
        packed = self._modules.get(slab)
        return packed if isinstance(packed, Packed) else None

    def _as_input(self, x: Tensor, slab: str) -> Tensor:
        packed = self._packed(slab)
        return x if packed is None else packed.as_input(x)

    def _bias(self, letters: str) -> Tensor | None:
        slab, rows = self._rows_in_slab(letters)
        bias = getattr(self, f"{slab}_bias")
        return bias if bias is None or letters == slab else bias[rows]

    def _rows_in_slab(self, letters: str) -> tuple[str, slice]:
        """Where neighbouring letters are kept: the slab, and their rows in it."""
        if letters in self.slabs:
            return letters, slice(None)
        slab = next(slab for slab in self.slabs if letters in slab)
        start = sum(self._rows(letter) for letter in slab[: slab.index(letters)])
        return slab, slice(start, start + sum(self._rows(letter) for letter in letters))

    # Saved split, stored fused.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for letter in "qkv":
            weight = None if self._packed(letter) else self.weight(letter)  # what is packed saves itself
            for kind, value in (("weight", weight), ("bias", self.bias(letter))):
                if value is not None:
                    destination[f"{prefix}{letter}.{kind}"] = value if keep_vars else value.detach()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for slab in self.slabs:
            for kind in ("weight", "bias") if self.spec.bias else ("weight",):
                if f"{prefix}{slab}_{kind}" in state_dict or (kind == "weight" and self._packed(slab)):
                    continue  # fused already, or it loads itself
                keys = [f"{prefix}{letter}.{kind}" for letter in slab]
                missing_keys += [key for key in keys if key not in state_dict]
                pieces = [state_dict.pop(key) for key in keys if key in state_dict]
                wrong = [
                    f"size mismatch for {key}: it is {tuple(piece.shape)}, expected {self._shape(letter, kind)}."
                    for key, piece, letter in zip(keys, pieces, slab, strict=False)
                    if len(pieces) == len(keys) and tuple(piece.shape) != self._shape(letter, kind)
                ]
                error_msgs += wrong
                if len(pieces) == len(keys) and not wrong:
                    flat = [piece.flatten(0, 1) if kind == "weight" else piece.flatten() for piece in pieces]
                    state_dict[f"{prefix}{slab}_{kind}"] = flat[0] if len(flat) == 1 else torch.cat(flat)
        already_told: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, already_told, unexpected_keys, error_msgs
        )

    def _shape(self, letter: str, kind: str) -> tuple[int, ...]:
        return (*self.sizes[letter], self.inputs[letter]) if kind == "weight" else self.sizes[letter]


def bits_here(spec: AttentionSpec, letter: str) -> tuple[int, ...]:
    """The bits of each present head, of k and v of each key head."""
    there = spec.head_ids if letter in "qo" else spec.kv_ids
    return tuple(FULL if spec.weights is None else getattr(spec.weights, letter)[number] for number in there)


class Write(nn.Module):
    """The output projection W_O: it mixes what the heads found into one stream. Stored (D, H·e), saved (D, H, e).

    Where other processes hold heads of the layer, what all of them write is added up, and the bias once.
    """

    together: Together | None = None

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.heads, self.value_dim = len(spec.head_ids), spec.value_dim
        self.weight = nn.Parameter(torch.empty(spec.width, self.heads * self.value_dim))
        self.bias = nn.Parameter(torch.empty(spec.width)) if spec.out_bias else None

    def forward(self, z: Tensor) -> Tensor:
        """Concatenate the heads and mix them: (B, H, T, e) → (B, T, D)"""
        found = z.transpose(1, 2).flatten(2)
        if self.together is None:
            return linear(found, self.weight, self.bias)
        written = self.together.sum(linear(found, self.weight))
        return written if self.bias is None else written + self.bias

    @property
    def slices(self) -> Tensor:
        """A live view of every head's own W_O: (H, e, D)."""
        return self.weight.unflatten(1, (self.heads, self.value_dim)).permute(1, 2, 0)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        weight = self.weight.unflatten(1, (self.heads, self.value_dim))
        destination[f"{prefix}weight"] = weight if keep_vars else weight.detach()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any, **more: Any) -> None:
        key = f"{prefix}weight"
        if key in state_dict and tuple(state_dict[key].shape) == (len(self.weight), self.heads, self.value_dim):
            state_dict[key] = state_dict[key].flatten(1)
        super()._load_from_state_dict(state_dict, prefix, *rest, **more)


class PackedWrite(Write):
    """The same with weights at few bits, each head's W_O rounded along its own channels alone."""

    def __init__(self, spec: AttentionSpec) -> None:
        nn.Module.__init__(self)
        assert spec.weights is not None
        self.heads, self.value_dim = len(spec.head_ids), spec.value_dim
        sizes = (spec.width, spec.value_dim, spec.weights.group, spec.weights.activations)
        self.packed = Packed(bits_here(spec, "o"), *sizes)  # (H, D, e)
        self.packed.inputs_are_split = True
        self.bias = nn.Parameter(torch.empty(spec.width)) if spec.out_bias else None

    def forward(self, z: Tensor) -> Tensor:
        """(B, H, T, e) → (B, T, D)"""
        z = self.packed.as_input(z)
        if self.together is not None:
            return super().forward(z)
        return multiplied(self.packed, z.transpose(1, 2).flatten(2), self.bias, lambda: self.weight)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The numbers, (D, H·e); not live."""
        return self.packed.unpacked().transpose(0, 1).flatten(1)

    @property
    def slices(self) -> Tensor:
        """Every head's own W_O: (H, e, D); not live."""
        return self.packed.unpacked().mT

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)

    def _load_from_state_dict(self, *given: Any, **named: Any) -> None:
        nn.Module._load_from_state_dict(self, *given, **named)


def cut_packed(state: dict[str, Tensor], prefix: str, layer: "HasPacked", after: AttentionSpec) -> None:
    """In a state dict, keep of a layer's packed weights those of the heads that `after` has; floats, if all of these are."""
    before = layer.spec
    for letter in "qkvo":
        packed = getattr(layer.write, "packed", None) if letter == "o" else layer.read._packed(letter)
        if not isinstance(packed, Packed):
            continue
        had, has = (before.head_ids, after.head_ids) if letter in "qo" else (before.kv_ids, after.kv_ids)
        name = f"{prefix}write.packed" if letter == "o" else f"{prefix}read.{letter}"
        for held, _ in packed.named_buffers():
            state.pop(f"{name}.{held}")
        left = packed.some_units([had.index(number) for number in has])
        if any(bits != FULL for bits in bits_here(after, letter)):
            state |= {f"{name}.{held}": tensor for held, tensor in left.items()}
            continue
        empty = torch.empty(0, packed.rows, packed.inputs, dtype=packed.dtype, device=packed.device)
        rows = left.get("rows32", empty)
        state[f"{name.removesuffix('.packed')}.weight"] = rows.transpose(0, 1) if letter == "o" else rows


class HasPacked(Protocol):
    """A layer of ours."""

    spec: AttentionSpec
    read: Read
    write: Write


def make_write(spec: AttentionSpec) -> Write:
    """The output projection of a layer, packed where any of its heads is."""
    return PackedWrite(spec) if any(bits != FULL for bits in bits_here(spec, "o")) else Write(spec)
