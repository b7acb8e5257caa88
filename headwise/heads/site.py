"""A site is where attention happens: it shows a call to listeners and lets callers scale or replace z.

Everything acts on z, after the kernel and before W_O. Attention is linear in v, so scaling a head's z is the same as
scaling its probabilities, and the kernel never has to know: looking at or silencing a head leaves the backend as it was.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.kernels import Terms, maps
from headwise.kernels.batched import maps_of_rows
from headwise.kernels.precision import at_least_float32
from headwise.spec import Address, SiteAddress

Listener = Callable[["Seen"], None]
Edit = Callable[[Tensor], Tensor]
Edits = dict["Site", tuple[Edit, ...]]


class HasSlices(Protocol):
    """An output projection that can show each head's own part, (H, e, D)."""

    @property
    def slices(self) -> Tensor:
        """(H, e, D)"""
        ...


# While activation checkpointing repeats a forward pass: the edits that were in force the first time.
_repeating: ContextVar["Edits | None"] = ContextVar("repeating", default=None)


@dataclass(frozen=True, eq=False)
class Seen:
    """One attention call as a listener sees it: q and k after positions, z as it enters W_O; `maps()` rebuilds the maps.

    Tensors have the model's dtype. Maps are computed in at least float32.
    """

    site: "Site"
    q: Tensor  # (B, H, T, d)
    k: Tensor  # (B, K, S, d)
    v: Tensor  # (B, K, S, e)
    terms: Terms  # mask, scale, bias, sink, groups
    z: Tensor  # (B, H, T, e)

    def maps(self) -> Tensor:
        """Who looked at whom: the attention weights of every head, (B, H, T, S), rebuilt from q and k."""
        return maps(at_least_float32(self.q), at_least_float32(self.k), self.terms)

    def rows(self, rows: Sequence[int], some: slice = slice(None)) -> Tensor:
        """Some rows of the maps, (B, H, rows, S), or of `some` of the batch."""
        q, k = at_least_float32(self.q), at_least_float32(self.k)
        return torch.cat([maps_of_rows(q, k, self.terms, range(row, row + 1), some) for row in rows], 2)


class Site:
    """One attention layer, seen from outside: its address, its heads, their W_O, how far they see, and what passes."""

    def __init__(
        self, address: SiteAddress, head_ids: tuple[int, ...], output: HasSlices, window: int | None = None
    ) -> None:
        self.address = address
        self.head_ids = head_ids
        self.window = window  # a query sees keys fewer than so many positions away; None: however far
        self._output = output
        self._listeners: list[Listener] = []
        self._edits: list[Edit] = []

    @property
    def W_O(self) -> Tensor:
        """A live view of the heads' output projections: (H, e, D)."""
        return self._output.slices

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The heads here."""
        return tuple(self.address.head(number) for number in self.head_ids)

    @property
    def is_open(self) -> bool:
        """Whether somebody listens or edits here now, or did so in the pass that is being repeated."""
        return bool(self._listeners or self._edits or _repeating.get())

    @property
    def is_heard(self) -> bool:
        """Whether somebody listens here now."""
        return bool(self._listeners) and _repeating.get() is None

    @property
    def is_edited(self) -> bool:
        """Whether what passes is changed now, or was in the pass that is being repeated."""
        first_time = _repeating.get()
        return bool(self._edits) if first_time is None else bool(first_time.get(self))

    def index(self, head: Address) -> int:
        """Where a head stands on the head axis of this site's tensors."""
        if head not in self.addresses:
            there = ", ".join(map(str, self.head_ids)) or "none"
            raise HeadwiseError(f"there is no head {head} here; layer {self.address} has heads {there}.")
        return self.head_ids.index(head.head)

    @contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Show every call to a listener. Outputs stay bitwise what they are."""
        with _within(self._listeners, listener):
            yield

    @contextmanager
    def scaled(self, gate: Tensor) -> Iterator[None]:
        """Scale each head's z: (H,) or (B, H)."""
        self.check_edit()
        with _within(self._edits, lambda z: gated(z, gate)):
            yield

    @contextmanager
    def replaced(self, value: Tensor | Edit) -> Iterator[None]:
        """Put another z in: a tensor that broadcasts to (B, H, T, e), or a function of z."""
        self.check_edit()
        with _within(self._edits, value if callable(value) else lambda z: expanded(value, z)):
            yield

    def check_edit(self) -> None:
        """Refuse an edit that would not do what it says; here every edit does."""

    def check_shape(self, z: Tensor, changed: Tensor) -> None:
        """What is put in place of z has its shape."""
        if changed.shape != z.shape:
            raise HeadwiseError(
                f"z at {self.address} is {tuple(z.shape)} but was replaced by {tuple(changed.shape)}; keep the shape."
            )

    def here(self, z: Tensor) -> Tensor:
        """Of z of all heads, (B, H, T, e), that of the heads this process has: here all of them."""
        return z

    def __deepcopy__(self, memo: dict) -> "Site":
        """A copied model has sites of its own; contexts that are open belong to the original."""
        return Site(self.address, self.head_ids, copy.deepcopy(self._output, memo), self.window)

    def passing(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, z: Tensor) -> Tensor:
        """Called by the layer between the kernel and W_O: edits first, in the order they were made, then listeners."""
        first_time = _repeating.get()
        for edit in self._edits if first_time is None else first_time.get(self, ()):
            changed = edit(z)
            self.check_shape(z, changed)
            z = changed
        if self._listeners and first_time is None:
            seen = Seen(self, q, k, v, terms, z)
            for listener in tuple(self._listeners):
                listener(seen)
        return z


def gated(z: Tensor, gate: Tensor) -> Tensor:
    """Scale each head's z by a gate, (H,) or (B, H): (B, H, T, e)."""
    B, H = z.shape[:2]
    if not isinstance(gate, Tensor):
        raise HeadwiseError(f"a gate is a tensor, ({H},) or ({B}, {H}); got {type(gate).__name__}.")
    if gate.shape not in ((H,), (1, H), (B, H)):
        raise HeadwiseError(f"the gate is {tuple(gate.shape)} but must be ({H},) or ({B}, {H}): one number per head.")
    return z * gate.to(z)[..., None, None]


def expanded(value: Tensor, z: Tensor) -> Tensor:
    """A value as large as z."""
    try:
        return value.to(z).expand_as(z)
    except RuntimeError:
        return value  # it does not fit, and `passing` says so


@contextmanager
def _within(active: list, item: object) -> Iterator[None]:
    active.append(item)
    try:
        yield
    finally:
        # By identity and from the end: the same function may have been entered twice.
        last = max(i for i, other in enumerate(active) if other is item)
        del active[last]


@contextmanager
def repeated(edits: Edits) -> Iterator[None]:
    """Repeat a forward pass as it was: with the edits of then, and without calling listeners twice."""
    token = _repeating.set(edits)
    try:
        yield
    finally:
        _repeating.reset(token)


def is_repeated() -> bool:
    """Whether a forward pass is being repeated, and it is known with which edits."""
    return _repeating.get() is not None


def edits_now(sites: Iterable[Site]) -> Edits:
    """The edits in force, to repeat a forward pass later."""
    return {site: tuple(site._edits) for site in sites if site._edits}
