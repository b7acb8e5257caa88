"""A hook point is where attention happens: it shows a call to listeners and lets callers scale or replace z.

Everything acts on z, after the kernel and before W_O. Attention is linear in v, so scaling a head's z is the same as
scaling its probabilities, and the kernel never has to know: looking at or silencing a head leaves the backend as it was.

Edits and listeners belong to the context (`contextvars`) that opened them. Another thread, or another asyncio task that was
started before, does not see them. `contextvars.copy_context().run` carries them into a thread.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from headwise.cache import CacheResult
from headwise.errors import HeadwiseError
from headwise.kernels import ScoreParams, attention_weights
from headwise.kernels.batched import attention_weight_rows
from headwise.kernels.rounding_tolerance import at_least_float32
from headwise.spec import Address, LayerAddress

Listener = Callable[["AttentionCall"], None]
Edit = Callable[[Tensor], Tensor]
_numbers = count()  # of hook points in this process


class OutputWeightsProtocol(Protocol):
    """An output projection that can show each head's own part, (H, e, D)."""

    @property
    def head_output_weights(self) -> Tensor:
        """(H, e, D)"""
        ...


@dataclass(frozen=True, eq=False)
class OpenHooks:
    """Edits and listeners that are open in one context, by the key of their hook point. Never changed in place.

    Attributes:
        edits: Functions of z in the order in which they were opened. A hook point without edits has no entry.
        listeners: Functions that are shown each call. A hook point without listeners has no entry.
        repeats: True while activation checkpointing repeats a forward pass.
    """

    edits: Mapping[str, tuple[Edit, ...]]
    listeners: Mapping[str, tuple[Listener, ...]]
    repeats: bool = False


_open: ContextVar[OpenHooks] = ContextVar("open hooks")


class _NoHooks(OpenHooks):
    """No edits and no listeners. `now` gives the hooks of the current context, or this object if it has none.

    torch.compile cannot trace a call of `ContextVar.get`. It does trace a property whose getter is a C function, as an
    attribute with a guard on its value. So compiled code reads the hooks of the context it is called in, without a graph
    break, and is compiled again if they differ.
    """

    now = property(_open.get)  # `get` is called with this object, which is its default


HOOKS = _NoHooks({}, {})


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call as a listener sees it: q and k after positions, z as it enters W_O; `maps()` rebuilds the maps.

    Tensors have the model's dtype. Maps are computed in at least float32.
    """

    hook_point: "HookPoint"
    q: Tensor  # (B, H, T, d)
    k: Tensor  # (B, K, S, d)
    v: Tensor  # (B, K, S, e)
    params: ScoreParams  # mask, scale, bias, sink, groups
    z: Tensor  # (B, H, T, e)

    def maps(self) -> Tensor:
        """Who looked at whom: the attention weights of every head, (B, H, T, S), rebuilt from q and k."""
        return attention_weights(at_least_float32(self.q), at_least_float32(self.k), self.params)

    def map_rows(self, rows: Sequence[int], batch_slice: slice = slice(None)) -> Tensor:
        """Some rows of the maps, (B, H, rows, S), or of `batch_slice` of the batch."""
        q, k = at_least_float32(self.q), at_least_float32(self.k)
        return torch.cat(
            [attention_weight_rows(q, k, self.params, range(row, row + 1), batch_slice) for row in rows], 2
        )


class HookPoint:
    """One attention layer, seen from outside: its address, its heads, their W_O, how far they see, and what passes."""

    def __init__(
        self, address: LayerAddress, head_ids: tuple[int, ...], output: OutputWeightsProtocol, window: int | None = None
    ) -> None:
        self.address = address
        self.head_ids = head_ids
        self.window = window  # a query sees keys fewer than so many positions away; None: however far
        self._output = output
        # A string, because torch.compile guards on its value. An object that is looked up in a dict is not guarded.
        self.key = f"hook point {next(_numbers)}"

    @property
    def W_O(self) -> Tensor:
        """A live view of the heads' output projections: (H, e, D)."""
        return self._output.head_output_weights

    @property
    def head_addresses(self) -> tuple[Address, ...]:
        """The heads here."""
        return tuple(self.address.head_address(number) for number in self.head_ids)

    @property
    def is_active(self) -> bool:
        """Whether this context has an edit or a listener here."""
        return self.has_edits or self.has_listeners

    @property
    def has_listeners(self) -> bool:
        """Whether this context has a listener here."""
        return self.key in HOOKS.now.listeners

    @property
    def has_edits(self) -> bool:
        """Whether this context has an edit here, or had one in the pass that is being repeated."""
        return self.key in HOOKS.now.edits

    def head_index(self, head: Address) -> int:
        """Where a head stands on the head axis of this hook point's tensors."""
        if head not in self.head_addresses:
            present_ids = ", ".join(map(str, self.head_ids)) or "none"
            raise HeadwiseError(f"there is no head {head} here; layer {self.address} has heads {present_ids}.")
        return self.head_ids.index(head.head)

    @contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Show every call to a listener. Outputs stay bitwise what they are."""
        with _opened("listeners", self.key, listener):
            yield

    @contextmanager
    def scaled(self, gate: Tensor) -> Iterator[None]:
        """Scale each head's z: (H,) or (B, H)."""
        self.check_editable()
        with _opened("edits", self.key, lambda z: apply_gate(z, gate)):
            yield

    @contextmanager
    def replaced(self, value: Tensor | Edit) -> Iterator[None]:
        """Put another z in: a tensor that broadcasts to (B, H, T, e), or a function of z."""
        self.check_editable()
        with _opened("edits", self.key, value if callable(value) else lambda z: expand_like(value, z)):
            yield

    def check_editable(self) -> None:
        """Refuse an edit that would not do what it says; here every edit does."""

    def check_edit_shape(self, z: Tensor, edited: Tensor) -> None:
        """What is put in place of z has its shape."""
        if edited.shape != z.shape:
            raise HeadwiseError(
                f"z at {self.address} is {tuple(z.shape)} but was replaced by {tuple(edited.shape)}; keep the shape."
            )

    def local_z(self, z: Tensor) -> Tensor:
        """Of z of all heads, (B, H, T, e), that of the heads this process has: here all of them."""
        return z

    def __deepcopy__(self, memo: dict) -> "HookPoint":
        """A copied model has hook points of its own; contexts that are open belong to the original."""
        return HookPoint(self.address, self.head_ids, copy.deepcopy(self._output, memo), self.window)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickled hook point gets a key of its own when it is read."""
        self.__dict__ |= state | {"key": f"hook point {next(_numbers)}"}

    def apply(self, q: Tensor, result: CacheResult, z: Tensor) -> Tensor:
        """Apply the open edits to z, then show the call to listeners. The layer calls this between the kernel and W_O."""
        z = self.apply_edits(z)
        if self.has_listeners:
            self.notify_listeners(q, result.keys, result.values, lambda: result.params, z)
        return z

    def apply_edits(self, z: Tensor) -> Tensor:
        """Apply the edits of this context in the order in which they were opened: (B, H, T, e) → (B, H, T, e)."""
        for edit in HOOKS.now.edits.get(self.key, ()):
            changed = edit(z)
            self.check_edit_shape(z, changed)
            z = changed
        return z

    def notify_listeners(
        self, q: Tensor, k: Tensor, v: Tensor, make_params: Callable[[], ScoreParams], z: Tensor
    ) -> None:
        """Show a call to the listeners of this context. Compiled code is left for them (a graph break)."""
        if torch.compiler.is_compiling():
            from headwise.heads.uncompiled_listeners import call_uncompiled

            call_uncompiled(self, q, k, v, make_params, z)
        else:
            call_listeners(self, q, k, v, make_params, z)


def call_listeners(
    hook_point: HookPoint, q: Tensor, k: Tensor, v: Tensor, make_params: Callable[[], ScoreParams], z: Tensor
) -> None:
    """Show a call to the listeners that this context has at a hook point."""
    call = AttentionCall(hook_point, q, k, v, make_params(), z)
    for listener in HOOKS.now.listeners.get(hook_point.key, ()):
        listener(call)


def apply_gate(z: Tensor, gate: Tensor) -> Tensor:
    """Scale each head's z by a gate, (H,) or (B, H): (B, H, T, e)."""
    B, H = z.shape[:2]
    if not isinstance(gate, Tensor):
        raise HeadwiseError(f"a gate is a tensor, ({H},) or ({B}, {H}); got {type(gate).__name__}.")
    if gate.shape not in ((H,), (1, H), (B, H)):
        raise HeadwiseError(f"the gate is {tuple(gate.shape)} but must be ({H},) or ({B}, {H}): one number per head.")
    return z * gate.to(z)[..., None, None]


def expand_like(value: Tensor, z: Tensor) -> Tensor:
    """A value as large as z."""
    try:
        return value.to(z).expand_as(z)
    except RuntimeError:
        return value  # it does not fit, and `check_shape` says so


@contextmanager
def _opened(kind: Literal["edits", "listeners"], key: str, item: Callable[[Any], Any]) -> Iterator[None]:
    """Open an edit or a listener in this context."""
    now: OpenHooks = HOOKS.now
    _set_items(kind, key, (*getattr(now, kind).get(key, ()), item))
    try:
        yield
    finally:
        items = getattr(HOOKS.now, kind).get(key, ())
        # By identity and from the end: the same function may have been entered twice.
        indices = [index for index, other in enumerate(items) if other is item]
        if not indices:
            raise HeadwiseError(
                f"{kind} at a layer were opened in one context and closed in another, for example in two threads. Open and "
                "close them in the same one."
            )
        _set_items(kind, key, items[: indices[-1]] + items[indices[-1] + 1 :])


def _set_items(kind: str, key: str, items: tuple[Any, ...]) -> None:
    """Put the edits or the listeners of one hook point into this context."""
    now: OpenHooks = HOOKS.now
    by_key: dict[str, tuple[Any, ...]] = {k: value for k, value in getattr(now, kind).items() if k != key}
    if items:
        by_key[key] = items
    edits, listeners = (by_key, now.listeners) if kind == "edits" else (now.edits, by_key)
    set_open_hooks(OpenHooks(edits, listeners, now.repeats) if edits or listeners or now.repeats else HOOKS)


def set_open_hooks(hooks: OpenHooks) -> None:
    """Make hooks that were open elsewhere (`HOOKS.now` there) those of this context."""
    _open.set(hooks)


@contextmanager
def replaying(hooks: OpenHooks) -> Iterator[None]:
    """Repeat a forward pass with the edits that were open when it ran first, and without calling listeners again."""
    token = _open.set(OpenHooks(hooks.edits, {}, repeats=True))
    try:
        yield
    finally:
        _open.reset(token)


def is_replaying() -> bool:
    """Whether activation checkpointing repeats a forward pass, and its edits are known."""
    return HOOKS.now.repeats
