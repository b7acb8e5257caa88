"""What heads read and what they write: projections with a head axis.

Storage is fused, one weight for q, k and v, because one product is quicker than three. What is saved is split, one tensor
per letter with its head axis, because that is what a person can read, cut and share:

    q.weight (H, d, D)   k.weight (K, d, D)   v.weight (K, e, D)   and   weight (D, H, e) of the output projection
"""

from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.kernels.linear import linear
from headwise.spec import AttentionSpec

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
        for slab in storage.split(","):
            rows = sum(self._rows(letter) for letter in slab)
            self.register_parameter(f"{slab}_weight", nn.Parameter(torch.empty(rows, self.inputs[slab[0]])))
            self.register_parameter(f"{slab}_bias", nn.Parameter(torch.empty(rows)) if spec.bias else None)

    def forward(self, x: Tensor, source: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D), (B, S, D) → q (B, H, T, d), k (B, K, S, d), v (B, K, S, e)"""
        if source is not None:
            return (*self.project(x, "q"), *self.project(source, "kv"))  # pyright: ignore[reportReturnType]
        return self.project(x, "qkv")  # pyright: ignore[reportReturnType]

    def project(self, x: Tensor, letters: str) -> tuple[Tensor, ...]:
        """Some of q, k and v of one input, each (B, its heads, T, its channels), with as few products as storage allows."""
        if self.spec.input == "slice":
            return tuple(self._project_slices(x, letter) for letter in letters)
        out: list[Tensor] = []
        for slab in self.storage.split(","):
            some = "".join(letter for letter in slab if letter in letters)
            if some:
                made = linear(x, self._weight(some), self._bias(some))  # (B, T, rows)
                pieces = made.split([self._rows(letter) for letter in some], -1)
                out += [p.unflatten(-1, self.sizes[c]).transpose(1, 2) for p, c in zip(pieces, some, strict=True)]
        return tuple(out)

    def _project_slices(self, x: Tensor, letter: str) -> Tensor:
        """Each head reads its own slice of the embedding: a grouped 1×1 convolution."""
        heads = torch.tensor(self.spec.head_ids, dtype=torch.long, device=x.device)
        slices = x.unflatten(-1, (self.spec.heads, -1)).index_select(2, heads)  # (B, T, H, D/heads)
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

    def _rows(self, letter: str) -> int:
        heads, channels = self.sizes[letter]
        return heads * channels

    def _weight(self, letters: str) -> Tensor:
        slab, rows = self._rows_in_slab(letters)
        weight = getattr(self, f"{slab}_weight")
        return weight if letters == slab else weight[rows]  # a slice would cost a copy in the backward pass

    def _bias(self, letters: str) -> Tensor | None:
        slab, rows = self._rows_in_slab(letters)
        bias = getattr(self, f"{slab}_bias")
        return bias if bias is None or letters == slab else bias[rows]

    def _rows_in_slab(self, letters: str) -> tuple[str, slice]:
        """Where neighbouring letters are kept: the slab, and their rows in it."""
        slab = next(slab for slab in self.storage.split(",") if letters in slab)
        start = sum(self._rows(letter) for letter in slab[: slab.index(letters)])
        return slab, slice(start, start + sum(self._rows(letter) for letter in letters))

    # Saved split, stored fused.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for letter in "qkv":
            for kind, value in (("weight", self.weight(letter)), ("bias", self.bias(letter))):
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
        for slab in self.storage.split(","):
            for kind in ("weight", "bias") if self.spec.bias else ("weight",):
                if f"{prefix}{slab}_{kind}" in state_dict:
                    continue  # fused already
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


class Write(nn.Module):
    """The output projection W_O: it mixes what the heads found into one stream. Stored (D, H·e), saved (D, H, e)."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.heads, self.value_dim = len(spec.head_ids), spec.value_dim
        self.weight = nn.Parameter(torch.empty(spec.width, self.heads * self.value_dim))
        self.bias = nn.Parameter(torch.empty(spec.width)) if spec.out_bias else None

    def forward(self, z: Tensor) -> Tensor:
        """Concatenate the heads and mix them: (B, H, T, e) → (B, T, D)"""
        return linear(z.transpose(1, 2).flatten(2), self.weight, self.bias)

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
