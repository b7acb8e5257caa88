"""The head as an object: its weights, its circuits, its gate; and sets of heads that can be silenced together."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol, overload

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.hook_point import HasSlices, Site
from headwise.kernels.precision import at_least_float32
from headwise.spec import Address, AttentionSpec, SiteAddress, select
from headwise.spec.address import is_single

Amount = float | Tensor
Pattern = str | Address | Iterable[Address]
Gates = Mapping[str, Amount] | Mapping[SiteAddress, Tensor]  # by pattern, or one gate for a whole layer


class HasProjections(Protocol):
    """What reads in a layer, by letter: q, k, v."""

    def weight(self, letter: str) -> Tensor:
        """(heads, channels, width)"""
        ...

    def bias(self, letter: str) -> Tensor | None:
        """(heads, channels)"""
        ...


class HasOutput(HasSlices, Protocol):
    """What writes in a layer."""

    @property
    def weight(self) -> Tensor:
        """A tensor of the layer's dtype and device."""
        ...


class HasHeads(Protocol):
    """An attention layer, ours or not, whose heads can be taken one by one."""

    @property
    def site(self) -> Site:
        """Where its calls are seen."""
        ...

    @property
    def spec(self) -> AttentionSpec:
        """Its sizes."""
        ...

    @property
    def read(self) -> HasProjections:
        """q, k and v."""
        ...

    @property
    def write(self) -> HasOutput:
        """W_O."""
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
        left, right = (torch.linalg.qr(at_least_float32(one))[1] for one in (self.left, self.right.mT))
        return torch.linalg.svdvals(left @ right.mT)

    def eigenvalues(self) -> Tensor:
        """The d eigenvalues that can differ from zero: those of the small product right · left. Complex."""
        return torch.linalg.eigvals(at_least_float32(self.right) @ at_least_float32(self.left))


class Head:
    """One head of a layer. Weights are live views: write into them and the layer changes (except for input='slice')."""

    def __init__(self, layer: HasHeads, number: int, owner: object = None) -> None:
        self.layer, self._owner = layer, owner
        self.address = layer.site.address.head(number)
        self.index = layer.site.index(self.address)
        self.kv_index = layer.spec.kv_of_head[self.index]

    def __repr__(self) -> str:
        shared = [self.layer.spec.head_ids[i] for i, kv in enumerate(self.layer.spec.kv_of_head) if kv == self.kv_index]
        group = f", keys shared by heads {shared}" if len(shared) > 1 else ""
        return f"Head({self.address}, head_dim={self.layer.spec.head_dim}{group})"

    def _repr_html_(self) -> str:
        from headwise.ui.notebook import head_html

        return head_html(self)

    @property
    def W_Q(self) -> Tensor:
        """(D, d)"""
        return self._read("q", self.index)

    @property
    def W_K(self) -> Tensor:
        """(D, d), shared inside a group."""
        return self._read("k", self.kv_index)

    @property
    def W_V(self) -> Tensor:
        """(D, e), shared inside a group."""
        return self._read("v", self.kv_index)

    @property
    def W_O(self) -> Tensor:
        """(e, D): what the head found, as it is written into the stream."""
        return self.layer.write.slices[self.index]

    @property
    def b_Q(self) -> Tensor | None:
        """(d,)"""
        return self._bias("q", self.index)

    @property
    def b_K(self) -> Tensor | None:
        """(d,)"""
        return self._bias("k", self.kv_index)

    @property
    def b_V(self) -> Tensor | None:
        """(e,)"""
        return self._bias("v", self.kv_index)

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
    def scaled(self, amount: Amount) -> Iterator[None]:
        """While open, what the head writes is scaled: a number, or one per example (B,)."""
        with Heads((self.layer,), (self.address,), self._owner).scaled(amount):
            yield

    def _read(self, letter: str, index: int) -> Tensor:
        weight = self.layer.read.weight(letter)[index].mT  # (D, d), or (D/heads, d)
        if self.layer.spec.input == "full":
            return weight
        whole = weight.new_zeros(self.layer.spec.heads, *weight.shape)
        whole[self.address.head] = weight  # the head is blind to all but its slice
        return whole.flatten(0, 1)

    def _bias(self, letter: str, index: int) -> Tensor | None:
        bias = self.layer.read.bias(letter)
        return None if bias is None else bias[index]


class Heads:
    """Heads of one layer or many, by address. `model.heads["5.1"]` is one head, `model.heads["5.*"]` a smaller set.

    They hold their `owner`, the handle of an attached model: a handle that nothing holds is detached.
    """

    def __init__(
        self, layers: Iterable[HasHeads], addresses: tuple[Address, ...] | None = None, owner: object = None
    ) -> None:
        self._owner = owner
        self._layers = {layer.site.address: layer for layer in layers}
        self.addresses = (
            tuple(address for layer in self._layers.values() for address in layer.site.addresses)
            if addresses is None
            else addresses
        )

    def __len__(self) -> int:
        return len(self.addresses)

    def __iter__(self) -> Iterator[Head]:
        for address in self.addresses:
            yield Head(self._layers[address.site], address.head, self._owner)

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.addresses[:8])) + (", …" if len(self) > 8 else "")
        return f"Heads({len(self)}: {shown})"

    @overload
    def __getitem__(self, which: int | Address) -> Head: ...
    @overload
    def __getitem__(self, which: str) -> "Head | Heads": ...  # pyright: ignore[reportOverlappingOverload]
    def __getitem__(self, which: "int | Pattern") -> "Head | Heads":
        if isinstance(which, Integral):
            which = self._in_only_layer(int(which))
        elif isinstance(which, tuple) and len(which) == 2 and all(isinstance(part, Integral) for part in which):
            raise HeadwiseError(f"heads are taken by address: heads['{which[0]}.{which[1]}'], not heads{list(which)}.")
        elif not isinstance(which, str | Address | Iterable):
            raise HeadwiseError(f"heads are taken by address, heads['5.1'] or heads['5.*']; got {which!r}.")
        chosen = select(which, self.addresses)
        if is_single(which):
            return Head(self._layers[chosen[0].site], chosen[0].head, self._owner)
        return self._some(chosen)

    def select(self, which: Pattern) -> "Heads":
        """The same choice, always as a set, even of one head."""
        return self._some(select(which, self.addresses))

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """While open, these heads write nothing. Contexts nest; other callers of the same model are affected too."""
        with self.scaled(0.0):
            yield

    @contextmanager
    def scaled(self, amount: Amount) -> Iterator[None]:
        """While open, what these heads write is scaled: a number, or one per example (B,)."""
        with ExitStack() as stack:
            for address, gate in self.gates(amount).items():
                stack.enter_context(self._layers[address].site.scaled(gate))
            yield

    def gates(self, amount: Amount) -> dict[SiteAddress, Tensor]:
        """The same as data, for one call: a gate per layer, (H,) or (B, H). `model(ids, gates=…)` takes it."""
        return make_gates({layer.site: layer.write.weight for layer in self._layers.values()}, self.addresses, amount)

    def _some(self, addresses: tuple[Address, ...]) -> "Heads":
        sites = {address.site for address in addresses}
        return Heads((layer for site, layer in self._layers.items() if site in sites), addresses, self._owner)

    def _in_only_layer(self, number: int) -> Address:
        if len(self._layers) != 1:
            raise HeadwiseError(f"head {number} of which layer? Write layer.head, e.g. heads['0.{number}'].")
        return next(iter(self._layers)).head(number)


def resolve_gates(layers: Iterable[HasHeads], gates: Gates | None) -> dict[SiteAddress, Tensor]:
    """Gates by pattern, as models take them, become one gate per layer, (H,) or (B, H); heads named twice are scaled twice.

    >>> from headwise.heads import MultiHeadAttention
    >>> layer = MultiHeadAttention(width=8, heads=4)
    >>> {str(site): gate.tolist() for site, gate in resolve_gates([layer], {"0.1": 0.0, "0.0-1": 0.5}).items()}
    {'0': [0.5, 0.0, 1.0, 1.0]}
    """
    made: dict[SiteAddress, Tensor] = {}
    if gates is not None and not isinstance(gates, Mapping):
        raise HeadwiseError(f'gates map heads to numbers, {{"5.1": 0.0}}; got {type(gates).__name__}.')
    if not gates:
        return made
    there = {layer.site.address: layer for layer in layers}
    for key, amount in gates.items():
        if isinstance(key, SiteAddress):
            if key not in there:
                raise HeadwiseError(f"gates name layer {key}; the model has {', '.join(map(str, there))}.")
            new = {key: torch.as_tensor(amount)}
        elif not isinstance(key, str):
            raise HeadwiseError(f"gates name heads by address, '5.1' or '5.*'; got {key!r}.")
        else:
            new = Heads(there.values()).select(key).gates(amount)
        for site, gate in new.items():
            made[site] = made[site] * gate if site in made else gate
    return made


def make_gates(sites: Mapping[Site, Tensor], addresses: Iterable[Address], amount: Amount) -> dict[SiteAddress, Tensor]:
    """A gate per site with `amount` at these heads and 1 elsewhere; `sites` gives each a tensor of its dtype and device."""
    if not isinstance(amount, Tensor | float | int) or (isinstance(amount, Tensor) and amount.ndim > 1):
        shape = tuple(amount.shape) if isinstance(amount, Tensor) else repr(amount)
        raise HeadwiseError(f"scale by a number, or by one number per example (B,); got {shape}.")
    wanted = set(addresses)
    gates = {}
    for site, like in sites.items():
        here = [i for i, address in enumerate(site.addresses) if address in wanted]
        if here:
            chosen = torch.zeros(len(site.head_ids), dtype=torch.bool, device=like.device)
            chosen[here] = True
            level = torch.as_tensor(amount).to(like)  # () or (B,)
            gates[site.address] = torch.where(chosen, level[..., None], 1.0)  # (H,) or (B, H)
    return gates
