"""Heads as objects: weights, QK and OV circuits and gate of one head, and sets of heads that can be silenced together."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol, overload

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.heads.hook_point import Edit, HookPoint
from headwise.heads.steering_edits import (
    HeadDirections,
    check_clamp_range,
    check_strength,
    clamp_edit,
    project_out_edit,
    resolve_directions,
    shift_edit,
)
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.spec import Address, AttentionSpec, LayerAddress, select
from headwise.spec.address import is_single_head

ScaleFactor = float | Tensor
HeadPattern = str | Address | Iterable[Address]
Gates = Mapping[str, ScaleFactor] | Mapping[LayerAddress, Tensor]  # factors by head pattern, or gates (H,) by layer


class QKVWeightsProtocol(Protocol):
    """Query, key and value projections of a layer, named "q", "k" and "v"."""

    def weight_by_head(self, projection: str) -> Tensor:
        """Return the weight of one projection, (heads, channels, width)."""
        ...

    def bias_by_head(self, projection: str) -> Tensor | None:
        """Return the bias of one projection, (heads, channels), or None."""
        ...


class OutputProjectionProtocol(Protocol):
    """An output projection. `HookPoint.W_O` holds the weights of its heads."""

    @property
    def weight(self) -> Tensor:
        """A tensor with the dtype and device of the layer."""
        ...


class AttentionLayerProtocol(Protocol):
    """A native or attached attention layer that gives access to its heads."""

    @property
    def hook_point(self) -> HookPoint:
        """Hook point of the layer."""
        ...

    @property
    def spec(self) -> AttentionSpec:
        """Configuration of the layer."""
        ...

    @property
    def qkv(self) -> QKVWeightsProtocol:
        """Query, key and value projections."""
        ...

    @property
    def output_projection(self) -> OutputProjectionProtocol:
        """The output projection, for its dtype and device."""
        ...

    @property
    def gate(self) -> Tensor | None:
        """Learned gate of each head, (H,), or None."""
        ...


@dataclass(frozen=True, eq=False)
class Circuit:
    """A D×D matrix of rank at most d, stored as two factors.

    Attributes:
        left: Left factor, (D, d).
        right: Right factor, (d, D).
    """

    left: Tensor
    right: Tensor

    def dense(self) -> Tensor:
        """Return the full matrix, (D, D)."""
        return self.left @ self.right

    def singular_values(self) -> Tensor:
        """Return the d singular values that can be nonzero, largest first, without building the D×D matrix."""
        left, right = (torch.linalg.qr(at_least_float32(factor))[1] for factor in (self.left, self.right.mT))
        return torch.linalg.svdvals(left @ right.mT)

    def eigenvalues(self) -> Tensor:
        """Return the d eigenvalues that can be nonzero, as complex numbers, computed from the d×d product right · left."""
        return torch.linalg.eigvals(at_least_float32(self.right) @ at_least_float32(self.left))


class Head:
    """One head of a layer.

    Weights are views of the layer's weights, so that writing to them changes the layer. With head_input='slice' they are
    copies.

    Args:
        layer: The layer.
        number: Original number of the head in the layer.
        owner: Handle of an attached model, kept alive by this object.

    Attributes:
        address: Address of the head, such as `5.1`.
        index: Index of the head on the head axis of tensors.
        kv_index: Index of its KV head on the head axis of keys and values.

    >>> from headwise.heads import MultiHeadAttention
    >>> head = MultiHeadAttention(width=8, heads=2).heads[1]
    >>> str(head.address), head.W_Q.shape, head.OV.dense().shape
    ('0.1', torch.Size([8, 4]), torch.Size([8, 8]))
    """

    def __init__(self, layer: AttentionLayerProtocol, number: int, owner: object = None) -> None:
        self.layer, self._owner = layer, owner
        self.address = layer.hook_point.address.head_address(number)
        self.index = layer.hook_point.head_index(self.address)
        self.kv_index = layer.spec.kv_of_head[self.index]

    def __repr__(self) -> str:
        from headwise.ui.result_text import head_repr

        return head_repr(self)

    def _repr_html_(self) -> str:
        from headwise.ui.notebook import head_matrices_html

        return head_matrices_html(self)

    @property
    def W_Q(self) -> Tensor:
        """Query weights, (D, d)."""
        return self._projection_weight("q", self.index)

    @property
    def W_K(self) -> Tensor:
        """Key weights, (D, d), shared by heads with the same KV head."""
        return self._projection_weight("k", self.kv_index)

    @property
    def W_V(self) -> Tensor:
        """Value weights, (D, e), shared by heads with the same KV head."""
        return self._projection_weight("v", self.kv_index)

    @property
    def W_O(self) -> Tensor:
        """Output weights, (e, D): they project z to the residual stream."""
        return self.layer.hook_point.W_O[self.index]

    @property
    def b_Q(self) -> Tensor | None:
        """Query bias, (d,), or None."""
        return self._projection_bias("q", self.index)

    @property
    def b_K(self) -> Tensor | None:
        """Key bias, (d,), or None."""
        return self._projection_bias("k", self.kv_index)

    @property
    def b_V(self) -> Tensor | None:
        """Value bias, (e,), or None."""
        return self._projection_bias("v", self.kv_index)

    @property
    def gate(self) -> Tensor | None:
        """Learned gate of the head, a scalar, or None if the layer is not gated."""
        return None if self.layer.gate is None else self.layer.gate[self.index]

    @property
    def QK(self) -> Circuit:
        """QK circuit W_Q W_Kᵀ, which determines the attention scores, before positions and scale."""
        return Circuit(self.W_Q, self.W_K.mT)

    @property
    def OV(self) -> Circuit:
        """OV circuit W_V W_O, which maps an attended token to the output of the head."""
        return Circuit(self.W_V, self.W_O)

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Set the output of the head to zero inside the context."""
        with self.scaled(0.0):
            yield

    @contextmanager
    def scaled(self, factor: ScaleFactor) -> Iterator[None]:
        """Scale the output of the head inside the context.

        Args:
            factor: A number, or one number per example, (B,).
        """
        with self._as_set().scaled(factor):
            yield

    @contextmanager
    def shifted(
        self, direction: HeadDirections, strength: ScaleFactor = 1.0, *, positions: Sequence[int] | None = None
    ) -> Iterator[None]:
        """Add a direction to the output of the head, before W_O, inside the context.

        Args:
            direction: Direction, (e,).
            strength: Factor of the direction: a number, or one per example, (B,). 0 changes no bit.
            positions: Tokens of each call to edit, such as [-1]. None means all tokens.

        >>> import torch
        >>> from headwise.heads import MultiHeadAttention
        >>> layer, x, direction = MultiHeadAttention(width=8, heads=2), torch.randn(1, 3, 8), torch.randn(4)
        >>> with layer.heads[1].shifted(direction, strength=2.0):
        ...     shifted = layer(x)
        >>> torch.allclose(shifted - layer(x), 2.0 * direction @ layer.heads[1].W_O, atol=1e-6)
        True
        """
        with self._as_set().shifted(direction, strength, positions=positions):
            yield

    @contextmanager
    def projected_out(self, direction: HeadDirections, *, positions: Sequence[int] | None = None) -> Iterator[None]:
        """Remove the component along a direction from the output of the head, before W_O, inside the context.

        Args:
            direction: Direction, (e,). Its length does not matter.
            positions: Tokens of each call to edit. None means all tokens.
        """
        with self._as_set().projected_out(direction, positions=positions):
            yield

    @contextmanager
    def clamped(
        self,
        direction: HeadDirections,
        low: float | None = None,
        high: float | None = None,
        *,
        positions: Sequence[int] | None = None,
    ) -> Iterator[None]:
        """Limit the component along a direction of the output of the head, before W_O, inside the context.

        Args:
            direction: Direction, (e,). Its length does not matter.
            low: Smallest component. None means no limit.
            high: Largest component. None means no limit. If it equals `low`, the component is set to this value.
            positions: Tokens of each call to edit. None means all tokens.
        """
        with self._as_set().clamped(direction, low, high, positions=positions):
            yield

    def _as_set(self) -> "Heads":
        return Heads((self.layer,), (self.address,), self._owner)

    def _projection_weight(self, projection: str, index: int) -> Tensor:
        weight = self.layer.qkv.weight_by_head(projection)[index].mT  # (D, d), or (D/heads, d)
        if self.layer.spec.head_input == "full":
            return weight
        full = weight.new_zeros(self.layer.spec.heads, *weight.shape)
        full[self.address.head] = weight  # zero outside of the head's slice
        return full.flatten(0, 1)

    def _projection_bias(self, projection: str, index: int) -> Tensor | None:
        bias = self.layer.qkv.bias_by_head(projection)
        return None if bias is None else bias[index]


class Heads:
    """A set of heads of one or more layers. `model.heads["5.1"]` is one head, `model.heads["5.*"]` is a subset.

    Args:
        layers: Layers of the heads.
        addresses: Addresses of the heads. None means all heads of the layers.
        owner: Handle of an attached model, kept alive by this object. A model is detached when its handle is deleted.

    Attributes:
        addresses: Addresses of the heads.

    >>> from headwise.heads import MultiHeadAttention
    >>> heads = MultiHeadAttention(width=8, heads=4).heads
    >>> len(heads), len(heads["0.1-2"])
    (4, 2)
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
        from headwise.ui.result_text import heads_by_layer_table

        return heads_by_layer_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import heads_by_layer_table

        return heads_by_layer_table(self).as_html()

    @overload
    def __getitem__(self, pattern: int | Address) -> Head: ...
    @overload
    def __getitem__(self, pattern: str) -> "Head | Heads": ...  # pyright: ignore[reportOverlappingOverload]
    def __getitem__(self, pattern: "int | HeadPattern") -> "Head | Heads":
        if isinstance(pattern, Integral):
            pattern = self._in_only_layer(int(pattern))
        elif isinstance(pattern, tuple) and len(pattern) == 2 and all(isinstance(item, Integral) for item in pattern):
            raise ArgumentError(
                f"heads{list(pattern)}: use the address as a string, heads['{pattern[0]}.{pattern[1]}']."
            )
        elif not isinstance(pattern, str | Address | Iterable):
            raise ArgumentError(
                f"heads[{pattern!r}]: not a head address. Use, for example, heads['5.1'] or heads['5.*']."
            )
        selected = select(pattern, self.addresses)
        if is_single_head(pattern):
            return Head(self._layers[selected[0].layer_address], selected[0].head, self._owner)
        return self._subset(selected)

    def select(self, pattern: HeadPattern) -> "Heads":
        """Return the selected heads as a set, even if the pattern selects one head.

        Args:
            pattern: Addresses, or a pattern such as `5.1`, `5.*`, `0-3.*` or `5.1,6.9`.
        """
        return self._subset(select(pattern, self.addresses))

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Set the outputs of these heads to zero inside the context.

        Contexts can be nested. Other threads, and asyncio tasks that were started before, are not affected.
        """
        with self.scaled(0.0):
            yield

    @contextmanager
    def scaled(self, factor: ScaleFactor) -> Iterator[None]:
        """Scale the outputs of these heads inside the context.

        Args:
            factor: A number, or one number per example, (B,).
        """
        with ExitStack() as stack:
            for address, gate in self.gates(factor).items():
                stack.enter_context(self._layers[address].hook_point.scaled(gate))
            yield

    @contextmanager
    def shifted(
        self, direction: HeadDirections, strength: ScaleFactor = 1.0, *, positions: Sequence[int] | None = None
    ) -> Iterator[None]:
        """Add directions to the outputs of these heads, before W_O, inside the context.

        Args:
            direction: One direction for all heads, (e,); one per head, (n, e); or directions by head pattern, such as
                {"5.1": vector}. Heads that no pattern names stay unchanged.
            strength: Factor of the directions: a number, or one per example, (B,). 0 changes no bit.
            positions: Tokens of each call to edit; negative numbers count from the end. None means all tokens. With a
                cache, each call after the prompt has one token, which is position -1.
        """
        check_strength(strength)
        if isinstance(strength, Tensor) or strength != 0:
            edits = self._edits(direction, lambda index, rows: shift_edit(index, rows, strength, positions))
        else:
            edits = self._edits(direction, lambda index, rows: None)  # checks the arguments only
        with _head_outputs_edited(edits):
            yield

    @contextmanager
    def projected_out(self, direction: HeadDirections, *, positions: Sequence[int] | None = None) -> Iterator[None]:
        """Remove the components along directions from the outputs of these heads, before W_O, inside the context.

        Args:
            direction: Directions, as in `shifted`. Their lengths do not matter.
            positions: Tokens of each call to edit, as in `shifted`.
        """
        with _head_outputs_edited(self._edits(direction, lambda index, rows: project_out_edit(index, rows, positions))):
            yield

    @contextmanager
    def clamped(
        self,
        direction: HeadDirections,
        low: float | None = None,
        high: float | None = None,
        *,
        positions: Sequence[int] | None = None,
    ) -> Iterator[None]:
        """Limit the components along directions of the outputs of these heads, before W_O, inside the context.

        Args:
            direction: Directions, as in `shifted`. Their lengths do not matter.
            low: Smallest component. None means no limit.
            high: Largest component. None means no limit. If it equals `low`, the component is set to this value.
            positions: Tokens of each call to edit, as in `shifted`.
        """
        check_clamp_range(low, high)
        with _head_outputs_edited(
            self._edits(direction, lambda index, rows: clamp_edit(index, rows, low, high, positions))
        ):
            yield

    def _edits(
        self, direction: HeadDirections, make_edit: Callable[[list[int], Tensor], Edit | None]
    ) -> list[tuple[HookPoint, Edit]]:
        """Return an edit per layer with selected heads. `make_edit` gets head indices and their directions, (n, e)."""
        value_dims = {address: layer.spec.value_dim for address, layer in self._layers.items()}
        directions = resolve_directions(direction, self.addresses, value_dims)
        edits = []
        for layer_address, layer in self._layers.items():
            selected = [address for address in directions if address.layer_address == layer_address]
            if selected:
                layer.hook_point.check_editable()
                rows = torch.stack([directions[address] for address in selected])  # (n, e)
                edit = make_edit([layer.hook_point.head_index(address) for address in selected], rows)
                edits += [] if edit is None else [(layer.hook_point, edit)]
        return edits

    def gates(self, factor: ScaleFactor) -> dict[LayerAddress, Tensor]:
        """Return gates that scale these heads in one call: `model(ids, gates=heads.gates(0.0))`.

        Args:
            factor: A number, or one number per example, (B,).

        Returns:
            A gate per layer, (H,) or (B, H), with 1 for the other heads.
        """
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
            raise ArgumentError(
                f"heads[{number}]: this names a head but no layer, and there are {len(self._layers)} layers. "
                f"Use layer.head, for example heads['0.{number}']."
            )
        return next(iter(self._layers)).head_address(number)


@contextmanager
def _head_outputs_edited(edits: Iterable[tuple[HookPoint, Edit]]) -> Iterator[None]:
    """Open edits at their hook points."""
    with ExitStack() as stack:
        for hook_point, edit in edits:
            stack.enter_context(hook_point.replaced(edit))
        yield


def resolve_gates(layers: Iterable[AttentionLayerProtocol], gates: Gates | None) -> dict[LayerAddress, Tensor]:
    """Convert gates by head pattern into one gate per layer, (H,) or (B, H). Factors of overlapping patterns multiply.

    >>> from headwise.heads import MultiHeadAttention
    >>> layer = MultiHeadAttention(width=8, heads=4)
    >>> {str(address): gate.tolist() for address, gate in resolve_gates([layer], {"0.1": 0.0, "0.0-1": 0.5}).items()}
    {'0': [0.5, 0.0, 1.0, 1.0]}
    """
    resolved: dict[LayerAddress, Tensor] = {}
    if gates is not None and not isinstance(gates, Mapping):
        raise ArgumentError(
            f'gates: must map head patterns to numbers, for example {{"5.1": 0.0}}. Got {type(gates).__name__}.'
        )
    if not gates:
        return resolved
    layers_by_address = {layer.hook_point.address: layer for layer in layers}
    for key, factor in gates.items():
        if isinstance(key, LayerAddress):
            if key not in layers_by_address:
                raise ArgumentError(
                    f"gates: the model does not have layer {key}. Use one of {', '.join(map(str, layers_by_address))}."
                )
            layer_gates = {key: torch.as_tensor(factor)}
        elif not isinstance(key, str):
            raise ArgumentError(f"gates: keys must be head patterns such as '5.1' or '5.*'. Got {key!r}.")
        else:
            layer_gates = Heads(layers_by_address.values()).select(key).gates(factor)
        for layer_address, gate in layer_gates.items():
            resolved[layer_address] = resolved[layer_address] * gate if layer_address in resolved else gate
    return resolved


def make_gates(
    hook_points: Mapping[HookPoint, Tensor], addresses: Iterable[Address], factor: ScaleFactor
) -> dict[LayerAddress, Tensor]:
    """Return a gate per layer with `factor` at these heads and 1 elsewhere.

    Args:
        hook_points: Hook points, each with a tensor of the dtype and device of its layer.
        addresses: Heads to scale.
        factor: A number, or one number per example, (B,).
    """
    if not isinstance(factor, Tensor | float | int) or (isinstance(factor, Tensor) and factor.ndim > 1):
        shape = tuple(factor.shape) if isinstance(factor, Tensor) else repr(factor)
        raise ArgumentError(f"factor: must be a number, or a tensor with one number per example, (B,). Got {shape}.")
    selected = set(addresses)
    gates = {}
    for hook_point, reference in hook_points.items():
        indices = [i for i, address in enumerate(hook_point.head_addresses) if address in selected]
        if indices:
            is_selected = torch.zeros(len(hook_point.head_ids), dtype=torch.bool, device=reference.device)
            is_selected[indices] = True
            is_tensor = isinstance(factor, Tensor)
            factor_tensor = torch.as_tensor(factor, dtype=None if is_tensor else torch.float32).to(
                reference
            )  # () or (B,)
            gates[hook_point.address] = torch.where(is_selected, factor_tensor[..., None], 1.0)  # (H,) or (B, H)
    return gates
