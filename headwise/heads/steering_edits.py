"""Edits of z along a direction of each head: add a direction, project it out, or clamp the component along it.

With the unit direction u of a head and its component c = z · u:

    shift         z + strength · direction                    a change of b_O: strength · direction · W_O[h]
    project out   z − c u = z (I − u uᵀ)                      a linear edit of W_O[h]
    clamp         z + (min(max(c, low), high) − c) u          linear only if low = high: z (I − u uᵀ) + low · u

All edits are computed in at least float32 and rounded once to the dtype of z. Heads that are not selected keep their bits.
"""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.heads.hook_point import Edit
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.spec import Address, LayerAddress, select

HeadDirections = Tensor | Sequence[float] | Mapping[str, Tensor]
StrengthFactor = float | Tensor


def resolve_directions(
    direction: HeadDirections, addresses: Sequence[Address], value_dims: Mapping[LayerAddress, int]
) -> dict[Address, Tensor]:
    """Return the direction of each head, (e,).

    Args:
        direction: One direction for all heads, (e,); one per head, (n, e); or directions by head pattern.
        addresses: The heads, in the order of the rows of `direction`.
        value_dims: Size e of z for each layer.
    """
    if isinstance(direction, Mapping):
        by_head: dict[Address, Tensor] = {}
        for pattern, vector in direction.items():
            for address in select(pattern, tuple(addresses)):
                if address in by_head:
                    raise ArgumentError(f"direction: head {address} is named twice. Name each head once.")
                by_head[address] = as_directions(vector)
    else:
        rows = as_directions(direction)
        if rows.ndim == 2 and len(rows) != len(addresses):
            raise ArgumentError(
                f"direction: must have one row per head, ({len(addresses)}, head_dim), or one vector for all heads, "
                f"(head_dim,). Got {tuple(rows.shape)}."
            )
        by_head = {address: rows[i] if rows.ndim == 2 else rows for i, address in enumerate(addresses)}
    for address, vector in by_head.items():
        value_dim = value_dims[address.layer_address]
        if vector.shape != (value_dim,):
            raise ArgumentError(
                f"direction: z of head {address} has {value_dim} channels. Got a direction of shape {tuple(vector.shape)}. "
                f"Pass a vector of shape ({value_dim},)."
            )
    return by_head


def as_directions(value: object) -> Tensor:
    """Return directions as a finite real tensor, (e,) or (n, e)."""
    try:
        vectors = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(f"direction: must be a tensor of numbers. Got {type(value).__name__}.") from None
    if vectors.ndim not in (1, 2) or vectors.is_complex():
        raise ArgumentError(
            f"direction: must be a real vector (head_dim,), or one vector per head. Got shape {tuple(vectors.shape)}, "
            f"{vectors.dtype}."
        )
    if not torch.compiler.is_compiling() and not bool(vectors.detach().isfinite().all()):
        raise ArgumentError("direction: contains NaN or infinity. Compute the direction again.")
    return vectors if vectors.is_floating_point() else vectors.float()


def unit_vectors(vectors: Tensor) -> Tensor:
    """Return vectors of length 1, (n, e) → (n, e), in at least float32."""
    wide = at_least_float32(vectors)
    norms = wide.norm(dim=-1, keepdim=True)
    if bool((norms == 0).any()):
        raise ArgumentError("direction: a direction of length 0 cannot be projected out or clamped. Remove its head.")
    return wide / norms


def check_strength(strength: StrengthFactor) -> None:
    """Raise if the strength is not a finite number or a tensor with one number per example."""
    if isinstance(strength, Tensor):
        is_valid = strength.ndim <= 1 and not strength.is_complex() and bool(strength.detach().isfinite().all())
    else:
        is_valid = isinstance(strength, Real) and not isinstance(strength, bool) and abs(float(strength)) < float("inf")
    if not is_valid:
        got = tuple(strength.shape) if isinstance(strength, Tensor) and strength.ndim > 1 else strength
        raise ArgumentError(
            f"strength: must be a finite number, or a tensor with one number per example, (B,). Got {got!r}."
        )


def shift_edit(
    indices: Sequence[int], vectors: Tensor, strength: StrengthFactor, positions: Sequence[int] | None = None
) -> Edit:
    """Return the edit that adds `strength` times a vector to z of each selected head.

    Args:
        indices: Selected heads, as indices on the head axis.
        vectors: Direction of each selected head, (n, e).
        strength: A number, or one per example, (B,). Examples with strength 0 keep their bits.
        positions: Tokens of the call to edit. None means all.
    """

    def change(z: Tensor) -> Tensor:
        step = vectors.to(z)[None, :, None]  # (1, n, 1, e)
        if not isinstance(strength, Tensor):
            return z + strength * step
        factor = strength.to(z).reshape(-1, 1, 1, 1)  # (B or 1, 1, 1, 1)
        if len(factor) not in (1, len(z)):
            raise ArgumentError(f"strength: needs one number per example. Got {len(factor)} for a batch of {len(z)}.")
        return torch.where(factor != 0, z + factor * step, z)

    return _edit_of_heads(indices, change, positions)


def project_out_edit(indices: Sequence[int], vectors: Tensor, positions: Sequence[int] | None = None) -> Edit:
    """Return the edit that removes the component of z along a vector for each selected head, (n, e)."""
    units = unit_vectors(vectors)

    def change(z: Tensor) -> Tensor:
        u = units.to(z)[None, :, None]  # (1, n, 1, e)
        return z - (z * u).sum(-1, keepdim=True) * u

    return _edit_of_heads(indices, change, positions)


def clamp_edit(
    indices: Sequence[int],
    vectors: Tensor,
    low: float | None,
    high: float | None,
    positions: Sequence[int] | None = None,
) -> Edit:
    """Return the edit that limits the component of z along the unit vector of each selected head to [low, high]."""
    units = unit_vectors(vectors)
    check_clamp_range(low, high)

    def change(z: Tensor) -> Tensor:
        u = units.to(z)[None, :, None]  # (1, n, 1, e)
        component = (z * u).sum(-1, keepdim=True)
        return z + (component.clamp(low, high) - component) * u

    return _edit_of_heads(indices, change, positions)


def check_clamp_range(low: float | None, high: float | None) -> None:
    """Raise if the range of a clamp is missing or empty."""
    for name, value in (("low", low), ("high", high)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real) or value != value):
            raise ArgumentError(f"{name}: must be a number or None. Got {value!r}.")
    if low is None and high is None:
        raise ArgumentError("low, high: missing. Pass at least one end of the range, for example low=0.0.")
    if low is not None and high is not None and low > high:
        raise ArgumentError(f"low, high: low must not exceed high. Got low={low} and high={high}.")


def _edit_of_heads(indices: Sequence[int], change: Callable[[Tensor], Tensor], positions: Sequence[int] | None) -> Edit:
    """Return an edit that applies `change` to z of some heads and tokens, in at least float32."""
    rows = None if positions is None else _check_positions(positions)

    def edit(z: Tensor) -> Tensor:
        heads = torch.tensor(list(indices), device=z.device)
        edited = z.clone()
        if rows is None:
            edited[:, heads] = change(at_least_float32(z[:, heads])).to(z)
            return edited
        columns = torch.tensor(_columns(rows, z.shape[2]), dtype=torch.long, device=z.device)
        selected = z[:, heads[:, None], columns]  # (B, n, positions, e)
        edited[:, heads[:, None], columns] = change(at_least_float32(selected)).to(z)
        return edited

    return edit


def _check_positions(positions: Sequence[int]) -> list[int]:
    if isinstance(positions, str) or not isinstance(positions, Sequence | range):
        raise ArgumentError(f"positions: must be a list of token positions, such as [-1]. Got {positions!r}.")
    if not all(isinstance(row, Integral) and not isinstance(row, bool) for row in positions):
        raise ArgumentError(f"positions: must be integers. Got {list(positions)!r}.")
    return [int(row) for row in positions]


def _columns(rows: list[int], T: int) -> list[int]:
    """Return the columns of token positions of a call with T tokens, each once."""
    invalid = [row for row in rows if not -T <= row < T]
    if invalid:
        raise ArgumentError(
            f"positions: out of range for a call with {T} tokens. Got {invalid[0]}. With a cache, each call after the "
            f"prompt has one token: use positions=[-1] for the last token of every call, or None for all."
        )
    return list(dict.fromkeys(row % T for row in rows))
