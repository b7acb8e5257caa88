"""The head as an object: its weights, its circuits, its gate; and sets of heads that can be silenced together."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol, overload

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.hook_point import HookPoint
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.spec import Address, AttentionSpec, LayerAddress, select
from headwise.spec.address import is_single_head

ScaleFactor = float | Tensor
HeadPattern = str | Address | Iterable[Address]
Gates = Mapping[str, ScaleFactor] | Mapping[LayerAddress, Tensor]  # by pattern, or one gate for a whole layer


class QKVWeightsProtocol(Protocol):
    """What reads in a layer, by letter: q, k, v."""

    def weight_by_head(self, projection: str) -> Tensor:
        """(heads, channels, width)"""
        ...

    def bias_by_head(self, projection: str) -> Tensor | None:
        """(heads, channels)"""
        ...


class OutputProjectionProtocol(Protocol):
    """An output projection. `HookPoint.W_O` holds the weights of its heads."""

    @property
    def weight(self) -> Tensor:
        """A tensor of the layer's dtype and device."""
        ...


class AttentionLayerProtocol(Protocol):
    """An attention layer, ours or not, whose heads can be taken one by one."""

    @property
    def hook_point(self) -> HookPoint:
        """Where its calls are seen."""
        ...

    @property
    def spec(self) -> AttentionSpec:
        """Its sizes."""
        ...

    @property
    def qkv(self) -> QKVWeightsProtocol:
        """q, k and v."""
        ...

    @property
    def output_projection(self) -> OutputProjectionProtocol:
        """The output projection, for its dtype and device."""
        ...

    @property
    def gate(self) -> Tensor | None:
        """A learned scalar per head, (H,)."""
        ...


@dataclass(frozen=True, eq=False)
class Circuit:
    """A D×D matrix of rank at most d, kept as its two factors, left (D, d) and right (d, D)."""

    left: Tensor
    right: Tensor

    def dense(self) -> Tensor:
        """The whole matrix, (D, D)."""
        return self.left @ self.right

    def singular_values(self) -> Tensor:
        """The d singular values that can differ from zero, largest first, without building D×D."""
        left, right = (torch.linalg.qr(at_least_float32(factor))[1] for factor in (self.left, self.right.mT))
        return torch.linalg.svdvals(left @ right.mT)

    def eigenvalues(self) -> Tensor:
        """The d eigenvalues that can differ from zero: those of the small product right · left. Complex."""
        return torch.linalg.eigvals(at_least_float32(self.right) @ at_least_float32(self.left))


class Head:
    """One head of a layer. Weights are live views: write into them and the layer changes (except for head_input='slice')."""

    def __init__(self, layer: AttentionLayerProtocol, number: int, owner: object = None) -> None:
        self.layer, self._owner = layer, owner
        self.address = layer.hook_point.address.head_address(number)
        self.index = layer.hook_point.head_index(self.address)
        self.kv_index = layer.spec.kv_of_head[self.index]

    def __repr__(self) -> str:
        group_heads = [
            self.layer.spec.head_ids[i]
            for i, kv_index in enumerate(self.layer.spec.kv_of_head)
            if kv_index == self.kv_index
        ]
        group_note = f", keys shared by heads {group_heads}" if len(group_heads) > 1 else ""
        return f"Head({self.address}, head_dim={self.layer.spec.head_dim}{group_note})"

    def _repr_html_(self) -> str:
        from headwise.ui.notebook import head_html

        return head_html(self)

    @property
    def W_Q(self) -> Tensor:
        """(D, d)"""
        return self._projection_weight("q", self.index)

    @property
    def W_K(self) -> Tensor:
        """(D, d), shared inside a group."""
        return self._projection_weight("k", self.kv_index)

    @property
    def W_V(self) -> Tensor:
        """(D, e), shared inside a group."""
        return self._projection_weight("v", self.kv_index)

    @property
    def W_O(self) -> Tensor:
        """(e, D): what the head found, as it is written into the stream."""
        return self.layer.hook_point.W_O[self.index]

    @property
    def b_Q(self) -> Tensor | None:
        """(d,)"""
        return self._projection_bias("q", self.index)

    @property
    def b_K(self) -> Tensor | None:
        """(d,)"""
        return self._projection_bias("k", self.kv_index)

    @property
    def b_V(self) -> Tensor | None:
        """(e,)"""
        return self._projection_bias("v", self.kv_index)

    @property
    def gate(self) -> Tensor | None:
        """The head's learned gate, a scalar; None in a layer that has none."""
        return None if self.layer.gate is None else self.layer.gate[self.index]

    @property
    def QK(self) -> Circuit:
        """What looks at what: W_Q W_Kᵀ, before positions and scale."""
        return Circuit(self.W_Q, self.W_K.mT)

    @property
    def OV(self) -> Circuit:
        """What is moved: W_V W_O."""
        return Circuit(self.W_V, self.W_O)

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """While open, the head writes nothing."""
        with self.scaled(0.0):
            yield

    @contextmanager
    def scaled(self, factor: ScaleFactor) -> Iterator[None]:
        """While open, what the head writes is scaled: a number, or one per example (B,)."""
        with Heads((self.layer,), (self.address,), self._owner).scaled(factor):
            yield

    def _projection_weight(self, projection: str, index: int) -> Tensor:
        weight = self.layer.qkv.weight_by_head(projection)[index].mT  # (D, d), or (D/heads, d)
        if self.layer.spec.head_input == "full":
            return weight
        full = weight.new_zeros(self.layer.spec.heads, *weight.shape)
        full[self.address.head] = weight  # the head is blind to all but its slice
        return full.flatten(0, 1)

    def _projection_bias(self, projection: str, index: int) -> Tensor | None:
        bias = self.layer.qkv.bias_by_head(projection)
        return None if bias is None else bias[index]


class Heads:
    """Heads of one layer or many, by address. `model.heads["5.1"]` is one head, `model.heads["5.*"]` a smaller set.

    They hold their `owner`, the handle of an attached model: a handle that nothing holds is detached.
    """

    def __init__(
        self,
        layers: Iterable[AttentionLayerProtocol],
        addresses: tuple[Address, ...] | None = None,
        owner: object = None,
    ) -> None:
        self._owner = owner
        self._layers = {layer.hook_point.address: layer for layer in layers}
        self.addresses = (
            tuple(address for layer in self._layers.values() for address in layer.hook_point.head_addresses)
            if addresses is None
            else addresses
        )

    def __len__(self) -> int:
        return len(self.addresses)

    def __iter__(self) -> Iterator[Head]:
        for address in self.addresses:
            yield Head(self._layers[address.layer_address], address.head, self._owner)

    def __repr__(self) -> str:
        preview = ", ".join(map(str, self.addresses[:8])) + (", …" if len(self) > 8 else "")
        return f"Heads({len(self)}: {preview})"

    @overload
    def __getitem__(self, pattern: int | Address) -> Head: ...
    @overload
    def __getitem__(self, pattern: str) -> "Head | Heads": ...  # pyright: ignore[reportOverlappingOverload]
    def __getitem__(self, pattern: "int | HeadPattern") -> "Head | Heads":
        if isinstance(pattern, Integral):
            pattern = self._in_only_layer(int(pattern))
        elif isinstance(pattern, tuple) and len(pattern) == 2 and all(isinstance(item, Integral) for item in pattern):
            raise HeadwiseError(
                f"heads are taken by address: heads['{pattern[0]}.{pattern[1]}'], not heads{list(pattern)}."
            )
        elif not isinstance(pattern, str | Address | Iterable):
            raise HeadwiseError(f"heads are taken by address, heads['5.1'] or heads['5.*']; got {pattern!r}.")
        selected = select(pattern, self.addresses)
        if is_single_head(pattern):
            return Head(self._layers[selected[0].layer_address], selected[0].head, self._owner)
        return self._subset(selected)

    def select(self, pattern: HeadPattern) -> "Heads":
        """The same choice, always as a set, even of one head."""
        return self._subset(select(pattern, self.addresses))

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """While open, these heads write nothing. Contexts nest; other callers of the same model are affected too."""
        with self.scaled(0.0):
            yield

    @contextmanager
    def scaled(self, factor: ScaleFactor) -> Iterator[None]:
        """While open, what these heads write is scaled: a number, or one per example (B,)."""
        with ExitStack() as stack:
            for address, gate in self.gates(factor).items():
                stack.enter_context(self._layers[address].hook_point.scaled(gate))
            yield

    def gates(self, factor: ScaleFactor) -> dict[LayerAddress, Tensor]:
        """The same as data, for one call: a gate per layer, (H,) or (B, H). `model(ids, gates=…)` takes it."""
        return make_gates(
            {layer.hook_point: layer.output_projection.weight for layer in self._layers.values()},
            self.addresses,
            factor,
        )

    def _subset(self, addresses: tuple[Address, ...]) -> "Heads":
        layer_addresses = {address.layer_address for address in addresses}
        return Heads(
            (layer for layer_address, layer in self._layers.items() if layer_address in layer_addresses),
            addresses,
            self._owner,
        )

    def _in_only_layer(self, number: int) -> Address:
        if len(self._layers) != 1:
            raise HeadwiseError(f"head {number} of which layer? Write layer.head, e.g. heads['0.{number}'].")
        return next(iter(self._layers)).head_address(number)


def resolve_gates(layers: Iterable[AttentionLayerProtocol], gates: Gates | None) -> dict[LayerAddress, Tensor]:
    """Gates by pattern, as models take them, become one gate per layer, (H,) or (B, H); heads named twice are scaled twice.

    >>> from headwise.heads import MultiHeadAttention
    >>> layer = MultiHeadAttention(width=8, heads=4)
    >>> {str(address): gate.tolist() for address, gate in resolve_gates([layer], {"0.1": 0.0, "0.0-1": 0.5}).items()}
    {'0': [0.5, 0.0, 1.0, 1.0]}
    """
    resolved: dict[LayerAddress, Tensor] = {}
    if gates is not None and not isinstance(gates, Mapping):
        raise HeadwiseError(f'gates map heads to numbers, {{"5.1": 0.0}}; got {type(gates).__name__}.')
    if not gates:
        return resolved
    layers_by_address = {layer.hook_point.address: layer for layer in layers}
    for key, factor in gates.items():
        if isinstance(key, LayerAddress):
            if key not in layers_by_address:
                raise HeadwiseError(f"gates name layer {key}; the model has {', '.join(map(str, layers_by_address))}.")
            layer_gates = {key: torch.as_tensor(factor)}
        elif not isinstance(key, str):
            raise HeadwiseError(f"gates name heads by address, '5.1' or '5.*'; got {key!r}.")
        else:
            layer_gates = Heads(layers_by_address.values()).select(key).gates(factor)
        for layer_address, gate in layer_gates.items():
            resolved[layer_address] = resolved[layer_address] * gate if layer_address in resolved else gate
    return resolved


def make_gates(
    hook_points: Mapping[HookPoint, Tensor], addresses: Iterable[Address], factor: ScaleFactor
) -> dict[LayerAddress, Tensor]:
    """A gate per hook point with `factor` at these heads and 1 elsewhere.

    `hook_points` gives each a tensor of its dtype and device.
    """
    if not isinstance(factor, Tensor | float | int) or (isinstance(factor, Tensor) and factor.ndim > 1):
        shape = tuple(factor.shape) if isinstance(factor, Tensor) else repr(factor)
        raise HeadwiseError(f"scale by a number, or by one number per example (B,); got {shape}.")
    selected = set(addresses)
    gates = {}
    for hook_point, reference in hook_points.items():
        indices = [i for i, address in enumerate(hook_point.head_addresses) if address in selected]
        if indices:
            is_selected = torch.zeros(len(hook_point.head_ids), dtype=torch.bool, device=reference.device)
            is_selected[indices] = True
            factor_tensor = torch.as_tensor(factor).to(reference)  # () or (B,)
            gates[hook_point.address] = torch.where(is_selected, factor_tensor[..., None], 1.0)  # (H,) or (B, H)
    return gates
