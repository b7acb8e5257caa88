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

from headwise.cache import AttendResult
from headwise.errors import ArgumentError, HeadwiseError
from headwise.kernels import ScoreParams, attention_weights
from headwise.kernels.batched import attention_weight_rows
from headwise.kernels.rounding_tolerance import at_least_float32, autocast_disabled
from headwise.spec import Address, LayerAddress

Listener = Callable[["AttentionCall"], None]
Edit = Callable[[Tensor], Tensor]
_numbers = count()  # numbers of the hook points of this process


class OutputWeightsProtocol(Protocol):
    """An output projection that gives access to the weights of each head."""

    @property
    def head_output_weights(self) -> Tensor:
        """Output weights of each head, (H, e, D)."""
        ...


@dataclass(frozen=True, eq=False)
class HookContextState:
    """Edits and listeners that are open in one context, by the key of their hook point. Never changed in place.

    Attributes:
        edits: Functions of z in the order in which they were opened. A hook point without edits has no entry.
        listeners: Functions that are shown each call. A hook point without listeners has no entry.
        repeats: True while activation checkpointing repeats a forward pass.
    """

    edits: Mapping[str, tuple[Edit, ...]]
    listeners: Mapping[str, tuple[Listener, ...]]
    repeats: bool = False


_open: ContextVar[HookContextState] = ContextVar("open hooks")


class _NoHooks(HookContextState):
    """No edits and no listeners. `now` is the hooks of the current context, or this object if nothing is open.

    torch.compile cannot trace a call of `ContextVar.get`. It does trace a property whose getter is a C function, as an
    attribute with a guard on its value. So compiled code reads the hooks of the context it is called in, without a graph
    break, and is compiled again if they differ.
    """

    now = property(_open.get)  # `get` is called with this object, which is its default


HOOKS = _NoHooks({}, {})


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Tensors of one attention call, passed to listeners. They have the dtype of the model.

    Attributes:
        hook_point: Hook point of the layer.
        q: Queries after positions, (B, H, T, d).
        k: Keys after positions, (B, K, S, d).
        v: Values, (B, K, S, e).
        params: Mask, scale, bias, sink and KV groups of the call.
        z: Head outputs before W_O, after all gates, (B, H, T, e).
        token_gate: Output gate of the tokens of a native layer, (B, H, T, 1 or e), which is a factor of z. None without one.
    """

    hook_point: "HookPoint"
    q: Tensor
    k: Tensor
    v: Tensor
    params: ScoreParams
    z: Tensor
    token_gate: Tensor | None = None

    def to(self, device: torch.device) -> "AttentionCall":
        """Return the call with all tensors on a device. Masks move when they are read."""
        if self.q.device == device:
            return self
        q, k, v, z = (x.to(device) for x in (self.q, self.k, self.v, self.z))
        params = self.params.with_learnable_tensors([x.to(device) for x in self.params.learnable_tensors()])
        token_gate = None if self.token_gate is None else self.token_gate.to(device)
        return AttentionCall(self.hook_point, q, k, v, params, z, token_gate)

    def maps(self) -> Tensor:
        """Compute the attention weights of every head from q and k in at least float32, (B, H, T, S)."""
        with autocast_disabled(self.q.device):
            return attention_weights(at_least_float32(self.q), at_least_float32(self.k), self.params)

    def map_rows(self, rows: Sequence[int], batch_slice: slice = slice(None)) -> Tensor:
        """Compute some rows of the maps, (B, H, rows, S), for the examples of `batch_slice`."""
        q, k = at_least_float32(self.q), at_least_float32(self.k)
        with autocast_disabled(q.device):
            return torch.cat(
                [attention_weight_rows(q, k, self.params, range(row, row + 1), batch_slice) for row in rows], 2
            )


class HookPoint:
    """Access to z of one attention layer for listeners and edits.

    Args:
        address: Address of the layer.
        head_ids: Original numbers of the remaining heads.
        output: Output projection of the layer.
        window: Attention window of the layer. None means no limit.

    Attributes:
        extra_keys: Number of keys after those of the tokens, such as the learned key of `nn.MultiheadAttention`.
        listener_device: Device of the tensors that listeners see. None means that of the layer.
    """

    extra_keys = 0
    listener_device: torch.device | None = None

    def __init__(
        self, address: LayerAddress, head_ids: tuple[int, ...], output: OutputWeightsProtocol, window: int | None = None
    ) -> None:
        self.address = address
        self.head_ids = head_ids
        self.window = window
        self._output = output
        # A string, because torch.compile guards on its value. An object that is looked up in a dict is not guarded.
        self.key = f"hook point {next(_numbers)}"

    @property
    def W_O(self) -> Tensor:
        """View of the output weights of the heads, (H, e, D)."""
        return self._output.head_output_weights

    @property
    def W_O_for_listeners(self) -> Tensor:
        """`W_O` on the device of the tensors that listeners see."""
        return self.W_O if self.listener_device is None else self.W_O.to(self.listener_device)

    @property
    def head_addresses(self) -> tuple[Address, ...]:
        """Addresses of the heads of this layer."""
        return tuple(self.address.head_address(number) for number in self.head_ids)

    @property
    def is_cross_attention(self) -> bool:
        """True if the keys come from another sequence than the queries."""
        return self.address.stack.startswith("cross")

    @property
    def is_active(self) -> bool:
        """True if this context has an edit or a listener at this hook point."""
        return self.has_edits or self.has_listeners

    @property
    def has_listeners(self) -> bool:
        """True if this context has a listener at this hook point."""
        return self.key in HOOKS.now.listeners

    @property
    def has_edits(self) -> bool:
        """True if this context has an edit at this hook point, or had one in the pass that is being repeated."""
        return self.key in HOOKS.now.edits

    def head_index(self, head: Address) -> int:
        """Return the index of a head on the head axis of tensors of this layer."""
        if head not in self.head_addresses:
            present_ids = ", ".join(map(str, self.head_ids)) or "none"
            raise ArgumentError(f"head {head}: does not exist. Layer {self.address} has heads {present_ids}.")
        return self.head_ids.index(head.head)

    @contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Call a listener with every attention call inside the context. Outputs stay bitwise equal."""
        with _opened("listeners", self.key, listener):
            yield

    @contextmanager
    def scaled(self, gate: Tensor) -> Iterator[None]:
        """Scale z of each head by a gate, (H,) or (B, H), inside the context."""
        self.check_editable()
        with _opened("edits", self.key, lambda z: apply_gate(z, gate)):
            yield

    @contextmanager
    def replaced(self, value: Tensor | Edit) -> Iterator[None]:
        """Replace z inside the context by a tensor that broadcasts to (B, H, T, e), or by a function of z."""
        self.check_editable()
        with _opened("edits", self.key, value if callable(value) else lambda z: expand_like(value, z)):
            yield

    def check_editable(self) -> None:
        """Raise if edits at this hook point would have no effect. Native layers support all edits."""

    def check_edit_shape(self, z: Tensor, edited: Tensor) -> None:
        """Raise if the replacement of z has another shape."""
        if edited.shape != z.shape:
            raise ArgumentError(
                f"z of layer {self.address}: the replacement has shape {tuple(edited.shape)}, but z has {tuple(z.shape)}. "
                f"Keep the shape."
            )

    def local_z(self, z: Tensor) -> Tensor:
        """Return the part of z of all heads, (B, H, T, e), that belongs to this process. Here it is all of z."""
        return z

    def __deepcopy__(self, memo: dict) -> "HookPoint":
        """Copy the hook point without the open contexts, which belong to the original."""
        copied = HookPoint(self.address, self.head_ids, copy.deepcopy(self._output, memo), self.window)
        copied.listener_device = self.listener_device
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give an unpickled hook point a new key."""
        self.__dict__ |= state | {"key": f"hook point {next(_numbers)}"}

    def apply(self, q: Tensor, result: AttendResult, z: Tensor, token_gate: Tensor | None = None) -> Tensor:
        """Apply the open edits to z, then call the listeners. The layer calls this between the kernel and W_O."""
        z = self.apply_edits(z)
        if self.has_listeners:
            self.notify_listeners(q, result.keys, result.values, lambda: result.params, z, token_gate)
        return z

    def apply_edits(self, z: Tensor) -> Tensor:
        """Apply the edits of this context in the order in which they were opened: (B, H, T, e) → (B, H, T, e)."""
        for edit in HOOKS.now.edits.get(self.key, ()):
            changed = edit(z)
            self.check_edit_shape(z, changed)
            z = changed.to(z.device)
        return z

    def notify_listeners(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        make_params: Callable[[], ScoreParams],
        z: Tensor,
        token_gate: Tensor | None = None,
    ) -> None:
        """Call the listeners of this context. They run outside of compiled code (a graph break)."""
        if torch.compiler.is_compiling():
            from headwise.heads.uncompiled_listeners import call_uncompiled

            call_uncompiled(self, q, k, v, make_params, z, token_gate)
        else:
            call_listeners(self, q, k, v, make_params, z, token_gate)


def call_listeners(
    hook_point: HookPoint,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    make_params: Callable[[], ScoreParams],
    z: Tensor,
    token_gate: Tensor | None = None,
) -> None:
    """Call the listeners that this context has at a hook point."""
    call = AttentionCall(hook_point, q, k, v, make_params(), z, token_gate)
    call = call if hook_point.listener_device is None else call.to(hook_point.listener_device)
    for listener in HOOKS.now.listeners.get(hook_point.key, ()):
        listener(call)


def apply_gate(z: Tensor, gate: Tensor) -> Tensor:
    """Scale each head's z by a gate, (H,) or (B, H): (B, H, T, e)."""
    B, H = z.shape[:2]
    if not isinstance(gate, Tensor):
        raise ArgumentError(f"gate: must be a tensor of shape ({H},) or ({B}, {H}). Got {type(gate).__name__}.")
    if gate.shape not in ((H,), (1, H), (B, H)):
        raise ArgumentError(
            f"gate: needs one number per head, so shape ({H},) or ({B}, {H}). Got shape {tuple(gate.shape)}."
        )
    return z * gate.to(z)[..., None, None]


def expand_like(value: Tensor, z: Tensor) -> Tensor:
    """Expand a value to the shape of z."""
    try:
        return value.to(z).expand_as(z)
    except RuntimeError:
        return value  # `check_edit_shape` raises the error


@contextmanager
def _opened(kind: Literal["edits", "listeners"], key: str, item: Callable[[Any], Any]) -> Iterator[None]:
    """Open an edit or a listener in this context."""
    now: HookContextState = HOOKS.now
    _set_items(kind, key, (*getattr(now, kind).get(key, ()), item))
    try:
        yield
    finally:
        items = getattr(HOOKS.now, kind).get(key, ())
        # By identity and from the end: the same function may have been entered twice.
        indices = [index for index, other in enumerate(items) if other is item]
        if not indices:
            raise HeadwiseError(
                f"hook point {kind}: opened in one context and closed in another, for example in two threads. Open and close "
                "them in the same thread or task."
            )
        _set_items(kind, key, items[: indices[-1]] + items[indices[-1] + 1 :])


def _set_items(kind: str, key: str, items: tuple[Any, ...]) -> None:
    """Set the edits or the listeners of one hook point in this context."""
    now: HookContextState = HOOKS.now
    by_key: dict[str, tuple[Any, ...]] = {k: value for k, value in getattr(now, kind).items() if k != key}
    if items:
        by_key[key] = items
    edits, listeners = (by_key, now.listeners) if kind == "edits" else (now.edits, by_key)
    set_open_hooks(HookContextState(edits, listeners, now.repeats) if edits or listeners or now.repeats else HOOKS)


def set_open_hooks(hooks: HookContextState) -> None:
    """Open hooks of another context (its `HOOKS.now`) in this context."""
    _open.set(hooks)


@contextmanager
def replaying(hooks: HookContextState) -> Iterator[None]:
    """Repeat a forward pass with the edits that were open when it ran first, and without calling listeners again."""
    token = _open.set(HookContextState(hooks.edits, {}, repeats=True))
    try:
        yield
    finally:
        _open.reset(token)


@contextmanager
def listeners_suspended(*, keep_edits: bool = True) -> Iterator[None]:
    """Run a part of the model again without calling the open listeners, and with or without the open edits."""
    token = _open.set(HookContextState(HOOKS.now.edits, {}) if keep_edits and HOOKS.now.edits else HOOKS)
    try:
        yield
    finally:
        _open.reset(token)


def is_replaying() -> bool:
    """Return True while activation checkpointing repeats a forward pass with its original edits."""
    return HOOKS.now.repeats
