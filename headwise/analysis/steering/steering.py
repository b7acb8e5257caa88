"""`Steering`: directions of heads, with their strength, as data that is saved, applied, combined and folded.

A steering knows the heads it was made for by their output weights: the size of W_O[h] and its inner products with a
few fixed sign patterns. These numbers are the same, up to rounding, for a native and an attached model, in every
dtype, and after other heads are pruned. Another model, another basis of the head, or noticeably changed output
weights are an error.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from headwise.errors import ArgumentError, FileFormatError, HeadwiseError
from headwise.heads.head import Heads
from headwise.heads.steering_edits import as_directions, check_clamp_range, check_strength
from headwise.io.aligned_safetensors import read_tensors, write_tensors
from headwise.io.atomic_write import atomic_folder
from headwise.io.resolve_path import read_text
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol
from headwise.spec import Address

STEERING_FORMAT = 1
STEERING_FILE, VECTORS_FILE = "steering.json", "vectors.safetensors"
NUM_PROJECTIONS = 8  # numbers per head in a fingerprint, besides the norm
FINGERPRINT_TOLERANCE = (
    0.02  # relative to the norm of W_O[h]: above rounding to bfloat16 (0.001), below other weights (about 1)
)
SteeringEdit = Literal["shift", "project_out", "clamp"]
EDITS = ("shift", "project_out", "clamp")


@dataclass(frozen=True, eq=False, repr=False)
class Steering:
    """Directions of heads with a strength: data that changes a model while it is applied, or for good after folding.

    Attributes:
        vectors: Direction of each head by address, (head_dim,) each.
        strength: Factor of the directions of a shift.
        edit: "shift" adds strength times the direction to z (head output before W_O). "project_out" removes the component
            along the direction. "clamp" limits the component along the unit direction to `low` and `high`.
        low: Smallest component of a clamp. None means no limit.
        high: Largest component of a clamp. None means no limit.
        name: Name for tables and for the live view.
        fingerprint: Numbers that identify W_O of each head, by address. Empty if the steering was not made from a model.
        origin: How the directions were found, as plain data.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> steering = Steering({"5.1": torch.ones(64), "3.0": torch.ones(64)}, strength=0.5).for_model(model)
    >>> print(steering)
    Steering: shift of 2 heads, strength 0.5
      3.0: norm 8
      5.1: norm 8
    >>> with steering.applied(model):
    ...     model(torch.tensor([[72, 105, 33]])).shape
    torch.Size([1, 3, 256])
    """

    vectors: Mapping[str, Tensor]
    strength: float = 1.0
    edit: SteeringEdit = "shift"
    low: float | None = None
    high: float | None = None
    name: str = ""
    fingerprint: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.vectors, Mapping) or not self.vectors:
            raise ArgumentError(
                f'vectors: must map head addresses to directions, for example {{"5.1": vector}}. Got {self.vectors!r:.80}.'
            )
        if self.edit not in EDITS:
            raise ArgumentError(f"edit: must be one of {', '.join(EDITS)}. Got {self.edit!r}.")
        if isinstance(self.strength, Tensor):
            raise ArgumentError(
                "strength: must be a number. For one strength per example, use model.heads[…].shifted()."
            )
        check_strength(self.strength)
        if self.edit == "clamp":
            check_clamp_range(self.low, self.high)
        elif self.low is not None or self.high is not None:
            raise ArgumentError(f"low, high: only a clamp has a range. Got edit={self.edit!r}. Use edit='clamp'.")
        vectors: dict[Address, Tensor] = {}
        for key, vector in self.vectors.items():
            address = _parse_head(key)
            if address in vectors:
                raise ArgumentError(f"vectors: head {address} is named twice. Name each head once.")
            vectors[address] = _as_vector(address, vector)
        object.__setattr__(self, "vectors", {str(address): vectors[address] for address in sorted(vectors)})

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Addresses of the heads, sorted."""
        return tuple(map(Address.parse, self.vectors))

    def __repr__(self) -> str:
        details = f", strength {self.strength:g}" if self.edit == "shift" else ""
        details += f", from {self.low} to {self.high}" if self.edit == "clamp" else ""
        title = (
            f"Steering{f' {self.name!r}' if self.name else ''}: {self.edit.replace('_', ' ')} of {len(self.vectors)} "
        )
        lines = [f"{title}head{'s' * (len(self.vectors) > 1)}{details}"]
        return "\n".join(
            [*lines, *(f"  {head}: norm {float(v.double().norm()):.4g}" for head, v in self.vectors.items())]
        )

    def for_model(self, model: ModelProtocol) -> "Steering":
        """Return the steering with the fingerprint of the heads of a model.

        Args:
            model: The model that the directions belong to.
        """
        heads = self.heads_of(model)
        return replace(self, fingerprint={str(head.address): w_o_fingerprint(_w_o(head)) for head in heads})

    def at_strength(self, strength: float) -> "Steering":
        """Return the steering with another strength.

        Args:
            strength: Factor of the directions.
        """
        if self.edit != "shift":
            raise ArgumentError(
                f"strength: a steering with edit={self.edit!r} has no strength. Leave the strength out."
            )
        return replace(self, strength=strength)

    def __add__(self, other: "Steering") -> "Steering":
        """Combine two steerings. Shifts of one head add up; other edits must be of different heads."""
        if not isinstance(other, Steering):
            return NotImplemented
        if (self.edit, self.low, self.high) != (other.edit, other.low, other.high):
            raise ArgumentError(
                f"other: steerings with different edits cannot be combined into one, because their order matters. Got "
                f"{self.edit} and {other.edit}. Apply them one after the other: with a.applied(model), b.applied(model): …"
            )
        shared = [head for head in self.vectors if head in other.vectors]
        if shared and self.edit != "shift":
            raise ArgumentError(f"other: head {shared[0]} has two directions to {self.edit}. Combine different heads.")
        for head in set(self.fingerprint) & set(other.fingerprint):
            if not _fingerprints_agree(self.fingerprint[head], other.fingerprint[head]):
                raise ArgumentError(
                    f"other: made for another model (head {head} differs). Combine steerings of one model."
                )
        if self.edit == "shift":
            scaled = [{h: s.strength * v for h, v in s.vectors.items()} for s in (self, other)]
            vectors = {**scaled[0], **scaled[1]} | {head: scaled[0][head] + scaled[1][head] for head in shared}
        else:
            vectors = {**self.vectors, **other.vectors}
        return Steering(
            vectors,
            1.0,
            self.edit,
            self.low,
            self.high,
            " + ".join(filter(None, (self.name, other.name))),
            {**self.fingerprint, **other.fingerprint},
            {"combined": [dict(self.origin), dict(other.origin)]},
        )

    def heads_of(self, model: ModelProtocol) -> Heads:
        """Return the steered heads of a model. Raise if a head does not exist or has another size."""
        heads = model.heads
        present = set(heads.addresses)
        missing = [str(address) for address in self.addresses if address not in present]
        if missing:
            raise ArgumentError(
                f"steering: made for another model. This model has no head {', '.join(missing[:5])}. It "
                f"has {len(present)} heads"
                f"{f', from {heads.addresses[0]} to {heads.addresses[-1]}' if present else ''}."
            )
        return heads.select(self.addresses)

    def check_model(self, model: ModelProtocol) -> None:
        """Raise if the steering does not belong to a model.

        Args:
            model: A model with the heads that the directions were made for.

        Raises:
            ArgumentError: A head does not exist, has another size, or has other output weights.
        """
        for head in self.heads_of(model):
            vector, value_dim = self.vectors[str(head.address)], head.layer.spec.value_dim
            if len(vector) != value_dim:
                raise ArgumentError(
                    f"steering: made for another model. Head {head.address} has {value_dim} channels, but its direction has "
                    f"{len(vector)}. Find the directions again on this model."
                )
            expected = self.fingerprint.get(str(head.address), ())
            actual = w_o_fingerprint(_w_o(head)) if expected else ()
            if expected and actual and not _fingerprints_agree(expected, actual):
                raise ArgumentError(
                    f"steering: made for another model. The output weights of head {head.address} differ from those that the "
                    f"steering was made for. Find the directions again on this model, or pass check=False."
                )

    @contextmanager
    def applied(
        self,
        model: ModelProtocol,
        strength: float | None = None,
        *,
        positions: Sequence[int] | None = None,
        check: bool = True,
    ) -> Iterator[None]:
        """Steer a model inside the context. The model is unchanged after the context closes.

        Args:
            model: Native or attached model.
            strength: Strength instead of `self.strength`. 0 changes no bit.
            positions: Tokens of each call to edit, such as [-1]. None means all tokens.
            check: Raise if the steering was made for another model.
        """
        if check:
            self.check_model(model)
        heads = self.heads_of(model)
        if self.edit == "shift":
            edit = heads.shifted(self.vectors, self.strength if strength is None else strength, positions=positions)
        elif strength is not None:
            raise ArgumentError(
                f"strength: a steering with edit={self.edit!r} has no strength. Leave the strength out."
            )
        elif self.edit == "project_out":
            edit = heads.projected_out(self.vectors, positions=positions)
        else:
            edit = heads.clamped(self.vectors, self.low, self.high, positions=positions)
        with edit:
            yield

    def save(self, folder: str | Path) -> Path:
        """Write the steering to a folder, atomically: vectors as safetensors, the rest as JSON.

        Args:
            folder: Output folder. A folder that holds a steering is replaced.

        Returns:
            The folder.
        """
        header = {
            "format": STEERING_FORMAT, "name": self.name, "edit": self.edit, "strength": self.strength, "low": self.low,
            "high": self.high, "heads": list(self.vectors), "fingerprint": dict(self.fingerprint),
            "origin": dict(self.origin),
        }  # fmt: skip
        try:
            text = json.dumps(header, indent=2, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"origin: must be plain data that JSON can hold ({error}).") from None
        with atomic_folder(folder, (STEERING_FILE,)) as temp_folder:
            (temp_folder / STEERING_FILE).write_text(text, encoding="utf-8")
            write_tensors(
                {head: vector.contiguous() for head, vector in self.vectors.items()}, temp_folder / VECTORS_FILE
            )
        return Path(folder)

    @staticmethod
    def load(folder: str | Path) -> "Steering":
        """Read a steering from a folder that `save` wrote.

        Args:
            folder: The folder.

        Raises:
            FileFormatError: The folder is missing, damaged, or of another format.
        """
        path = Path(folder) / STEERING_FILE
        if not path.is_file():
            raise FileFormatError(
                f"{folder}: not a steering. Pass a folder that Steering.save or headwise steer --out wrote."
            )
        try:
            header = json.loads(read_text(path))
            if not isinstance(header, dict) or header.pop("format", None) != STEERING_FORMAT:
                raise FileFormatError(
                    f"{path}: another format. This version of headwise reads format {STEERING_FORMAT}. "
                    "Find the steering again."
                )
            vectors = {name: tensor.clone() for name, tensor in read_tensors(Path(folder) / VECTORS_FILE).items()}
            if header.pop("heads") != sorted(vectors, key=Address.parse):
                raise FileFormatError(
                    f"{folder}: the vectors are not those of the listed heads. Find the steering again."
                )
            if not isinstance(header.get("name"), str) or not isinstance(header.get("origin"), dict):
                raise FileFormatError(f"{path}: name or origin has the wrong type. Find the steering again.")
            header["fingerprint"] = {
                head: tuple(map(float, numbers)) for head, numbers in header["fingerprint"].items()
            }
            return Steering(vectors=vectors, **header)
        except FileFormatError:
            raise
        except (HeadwiseError, AttributeError, KeyError, OSError, TypeError, ValueError, SafetensorError) as error:
            raise FileFormatError(f"{folder}: damaged steering ({error}). Find the steering again.") from None


def w_o_fingerprint(W_O: Tensor | None) -> tuple[float, ...]:
    """Return the norm of W_O[h], (e, D), and its inner products with fixed sign patterns, divided by the norm.

    Returns an empty tuple if the weights are not available.
    """
    if W_O is None:
        return ()
    flat = to_float64(W_O.detach()).flatten()
    norm = float(flat.norm())
    indices = torch.arange(1, flat.numel() + 1, dtype=torch.double, device=flat.device)
    projections = [
        float((flat * torch.sign(torch.frac(indices * math.sqrt(prime)) - 0.5)).sum()) / norm if norm else 0.0
        for prime in (2, 3, 5, 7, 11, 13, 17, 19)[:NUM_PROJECTIONS]
    ]
    return (norm, *(round(value, 6) for value in projections))


def _fingerprints_agree(expected: Sequence[float], actual: Sequence[float]) -> bool:
    if len(expected) != len(actual):
        return False
    norm_agrees = abs(actual[0] - expected[0]) <= FINGERPRINT_TOLERANCE * max(abs(expected[0]), abs(actual[0]))
    return norm_agrees and all(
        abs(a - b) <= FINGERPRINT_TOLERANCE for a, b in zip(expected[1:], actual[1:], strict=True)
    )


def _w_o(head: Any) -> Tensor | None:
    """Return W_O of a head, or None if the model does not give access to it."""
    try:
        return head.W_O
    except HeadwiseError:
        return None


def _parse_head(key: str) -> Address:
    if not isinstance(key, str):
        raise ArgumentError(f"vectors: keys must be head addresses such as '5.1'. Got {key!r}.")
    return Address.parse(key)


def _as_vector(address: Address, value: object) -> Tensor:
    vectors = as_directions(value)
    if vectors.ndim != 1 or not len(vectors):
        raise ArgumentError(
            f"vectors: the direction of head {address} must be a vector, (head_dim,). Got shape {tuple(vectors.shape)}."
        )
    return vectors.detach().cpu().clone()
