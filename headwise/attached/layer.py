"""One attention layer of somebody else's model, with the face of our own: its site, its sizes, live views of its weights."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from headwise.attached.discover import FoundAttention, is_turned, out_size
from headwise.attached.hooks import Hook
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Edit, Listener, Site, is_repeated
from headwise.kernels.score_params import Terms
from headwise.spec import AttentionSpec, Rotary

if TYPE_CHECKING:
    from headwise.attached.layer_probe import LayerTrial
    from headwise.attached.masks import Masks

# What stands between attention and W_O. plain: nothing, z enters it. gated: a gate of the call, so z is taken behind it.
# coupled: heads meet before W_O, in a norm say. unknown: W_O is not known here, but what the layer gives is linear in z.
# untold: W_O is not known, and that was not seen. unseen: W_O is known, but no call could be tried.
Passes = Literal["plain", "gated", "coupled", "unknown", "untold", "unseen"]
COUPLED = (
    "heads meet between attention and W_O (in a norm over all of them, another mix, or several calls put together), so what "
    "one head writes, or the model without it, is not to be told; what heads look at can be seen"
)
UNTOLD = (
    "its W_O is not known here, and what it gives was not seen to be a sum over heads, so the model without one of them is "
    "not to be told; what heads look at can be seen"
)
REMEMBERED = 512  # edited calls whose queries are known again
MARK = "_headwise_layer"  # where a module keeps the mark that says which layer looks at it


class LayerMark:
    """The layer that looks at a module. A copy of the module, or what is pickled of it, has an empty mark.

    It is an attribute of the module, because torch.compile guards on attributes. It does not guard on a lookup by module.
    """

    def __init__(self, layer: "Layer | None" = None) -> None:
        self.layer = layer

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerMark":
        return LayerMark()

    def __reduce__(self) -> tuple[type["LayerMark"], tuple[()]]:
        return LayerMark, ()


def layer_of(module: nn.Module) -> "Layer | None":
    """The layer that looks at a module; None if the module is not attached."""
    mark = module.__dict__.get(MARK)
    return None if mark is None else mark.layer


class Layer:
    """What `Heads` and `Head` ask of a layer, over a module that is not ours."""

    gate: Tensor | None = None  # a gate that the model itself has learned; theirs have none

    def __init__(self, found: FoundAttention, masks: "Masks") -> None:
        self.found, self.masks = found, masks
        self.module = found.module
        width = 0 if found.writes is None else out_size(found.writes)
        self.spec = AttentionSpec(
            width=width or found.heads * found.head_dim, heads=found.heads, head_dim=found.head_dim,
            value_dim=found.value_dim, kv_heads=found.kv_heads, kept=found.kept, rotary=Rotary() if found.rotary else None,
            window=found.window,
        )  # fmt: skip
        self.read, self.write = Reads(self), OutputSlices(self)
        self.site = GuardedSite(self, found.window)
        heads, keys = len(self.spec.head_ids), len(self.spec.kv_ids)
        even = tuple(head * keys // heads for head in range(heads)) if heads and heads % keys == 0 else ()
        self.uneven = self.spec.kv_of_head != even  # whether groups differ in size, as cutting may leave them
        self.passes: Passes = "plain"
        self.withheld: dict[str, str] = {}  # by letter, q, k, v or o: why its weights are not shown
        named = ("" if found.reads is None else found.reads[0],) * 3
        self.layouts = dict(zip("qkv", found.layouts or named, strict=True))
        self.gives = found.gives
        self.looks_ahead: bool | None = None  # whether a query was seen to look ahead, where that was asked
        self.unlike = ""  # why what is rebuilt of attention that is not SDPA's is not what it computed
        self.handle: Callable[[], Any] = lambda: None  # a weak reference to the handle of the model
        self.trial: LayerTrial | None = None  # while it is found out how the layer is put together
        self.words: frozenset[str] | None = None  # of the attention function's source; None if it cannot be read
        self._waiting = threading.local()  # `call`: what attention was called with and gave, until W_O is called
        self._edited: deque[tuple[torch.Size, float]] = deque(maxlen=REMEMBERED)
        self._path = next((name for name, part in found.parent.named_modules() if part is found.writes), None)
        self._stood = self._projections()

    def without(self, gone: set[int]) -> AttentionSpec:
        """The sizes of this layer when some heads, by number, are gone."""
        return replace(self.spec, kept=tuple(number for number in self.spec.head_ids if number not in gone))

    def learned_of(self, other: "Layer") -> None:
        """Take over what was found out about another layer that is built alike."""
        self.passes, self.withheld, self.layouts = other.passes, dict(other.withheld), dict(other.layouts)
        self.site.window, self.gives = other.site.window, other.gives
        self.looks_ahead = other.looks_ahead

    def _projections(self) -> list[tuple[nn.Module, tuple[str, ...]]]:
        """What reads and writes here now, each with the names of its adapters."""
        found = self.found
        there = [] if found.reads is None else [getattr(found.module, name) for name in found.reads[1]]
        there += [] if self._path is None else [found.parent.get_submodule(self._path)]
        return [(part, _adapter_names(part)) for part in there]

    def check_stands(self) -> None:
        """Refuse where projections are not those that were checked: adapters were added since, or weights were packed."""
        if self._projections() != self._stood:
            raise HeadwiseError(
                f"projections of {self.found.name} were replaced, or got adapters, after the model was attached, so they are "
                f"not those that were checked; detach it and attach it again: hw.attach(theirs.detach())."
            )

    def register_forward_pre_hook(self, hook: Any) -> Any:
        """Show what the layer reads, (B, T, D), before it does: the first argument of what projects q."""
        return self.found.reader(0).register_forward_pre_hook(hook)

    def register_forward_hook(self, hook: Any) -> Any:
        """Show what the layer writes, (B, T, D), once it has: what W_O gives."""
        if self.found.writes is None:
            raise HeadwiseError(
                f"which part of {self.found.name} writes is not known, so what it writes cannot be shown."
            )
        return self.found.writes.register_forward_hook(hook)

    @property
    def b_O(self) -> Tensor | None:
        """The output bias, (D,)."""
        return None if self.found.writes is None else bias_of(self.found.writes)

    # What passes.

    def passing(self, q: Tensor, k: Tensor, v: Tensor, terms: Callable[[], Terms], out: Tensor) -> Tensor:
        """Show a call to the site where z is what enters W_O: here, or where W_O is called. (B, T, H, e) → (B, T, H, e)"""
        if self.site.is_edited and not is_repeated() and not torch.compiler.is_compiling():
            self._edited.append(_known_by(q))
        if self.passes in ("gated", "unseen") and self.found.writes is not None:
            self._waiting.call = q, k, v, terms, out
            return out
        z = out.transpose(1, 2)  # (B, H, T, e)
        changed = self._edited_and_shown(q, k, v, terms, z)
        return out if changed is z else changed.transpose(1, 2).contiguous()

    def _edited_and_shown(self, q: Tensor, k: Tensor, v: Tensor, terms: Callable[[], Terms], z: Tensor) -> Tensor:
        """Apply edits and call listeners; the score parameters are computed only if a listener is open."""
        z = self.site.edit(z)
        if self.site.is_heard:
            self.site.show(q, k, v, terms, z)
        return z

    def watch_entry(self) -> list[Any]:
        """Hooks before W_O where z is what enters it and not what attention gave; each has `.remove()`."""
        if self.passes not in ("gated", "unseen") or self.found.writes is None:
            return []
        return [self.found.writes.register_forward_pre_hook(Hook(self._entering))]

    def _entering(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        call = getattr(self._waiting, "call", None)
        if call is None:
            return None
        self._waiting.call = None
        q, k, v, terms, out = call
        entered = given[0]
        if self.site.is_edited:
            self.check_stands()  # an adapter put around W_O reads what an edit here does not reach
        if self.passes == "unseen" and not (
            entered.numel() == out.numel() and torch.equal(entered.reshape(out.shape), out)
        ):
            if self.site.is_edited:
                raise HeadwiseError(
                    f"z of {self.found.name} is not what enters W_O, and no call could be tried to find out why; its heads "
                    f"can be looked at, not silenced."
                )
            self._edited_and_shown(q, k, v, terms, out.transpose(1, 2))
            return None
        z = entered.reshape(out.shape).transpose(1, 2)  # (B, H, T, e)
        changed = self._edited_and_shown(q, k, v, terms, z)
        return None if changed is z else (changed.transpose(1, 2).reshape(entered.shape), *given[1:])

    def check_repeated(self, q: Tensor) -> None:
        """Refuse to repeat a call that was edited: with which edits is known of the model's own checkpoints alone."""
        if not self._edited:
            return
        shape, sums = _known_by(q)
        if any(shape == there and abs(sums - was) <= 1e-6 * abs(was) for there, was in tuple(self._edited)):
            raise HeadwiseError(
                f"a checkpoint of your own repeats {self.found.name}, whose heads were scaled or replaced the first time; it "
                f"cannot be known how. Use model.gradient_checkpointing_enable(), or no checkpoint around edited heads."
            )


def _known_by(q: Tensor) -> tuple[torch.Size, float]:
    """By what the queries of a call are known again."""
    return q.shape, float(q.detach().double().abs().sum())


class GuardedSite(Site):
    """A site of somebody else's layer: where heads are coupled behind attention, z can be seen and not changed."""

    def __init__(self, layer: Layer, window: int | None) -> None:
        super().__init__(layer.found.address, layer.spec.head_ids, layer.write, window)
        self._layer = layer

    @contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Show every call to a listener. The handle stays alive while the context is open."""
        with self._attached(), super().listen(listener):
            yield

    @contextmanager
    def scaled(self, gate: Tensor) -> Iterator[None]:
        """Scale each head's z: (H,) or (B, H). The handle stays alive while the context is open."""
        with self._attached(), super().scaled(gate):
            yield

    @contextmanager
    def replaced(self, value: Tensor | Edit) -> Iterator[None]:
        """Replace z by a tensor or a function of z. The handle stays alive while the context is open."""
        with self._attached(), super().replaced(value):
            yield

    @contextmanager
    def _attached(self) -> Iterator[Any]:
        """Hold the handle of the model; without one, nothing that is done here would reach the model."""
        handle = self._layer.handle()
        if handle is None or not handle.attached:
            raise HeadwiseError(
                f"{self._layer.found.name}: the model was detached, or its handle was dropped. Attach it again, "
                f"theirs = hw.attach(model), and keep the handle."
            )
        yield handle

    def check_edit(self) -> None:
        """Refuse an edit that would not be what it says."""
        if self._layer.passes == "coupled":
            raise HeadwiseError(f"heads of {self._layer.found.name} cannot be silenced or replaced: {COUPLED}.")
        if self._layer.passes == "untold":
            raise HeadwiseError(f"heads of {self._layer.found.name} cannot be silenced or replaced: {UNTOLD}.")


class OutputSlices:
    """The output projection, as `HasSlices`."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    @property
    def weight(self) -> Tensor:
        """Any tensor of the layer's dtype and device, where numbers are computed."""
        for weight in self._layer.module.parameters():
            if weight.is_floating_point() and weight.device.type != "meta":
                return weight if _is_plain(weight) else torch.zeros((), dtype=weight.dtype, device=weight.device)
        return torch.zeros((), dtype=torch.get_default_dtype())  # packed or elsewhere: whoever uses it looks at z

    @property
    def slices(self) -> Tensor:
        """A live view of every head's own W_O: (H, e, D)."""
        layer = self._layer
        if "o" in layer.withheld:
            raise HeadwiseError(f"W_O of {layer.found.name} cannot be shown: {layer.withheld['o']}.")
        if layer.passes == "coupled":
            raise HeadwiseError(f"W_O of {layer.found.name} cannot be shared out among heads: {COUPLED}.")
        if layer.found.writes is None:
            raise HeadwiseError(
                f"which part of {layer.found.name} writes is not known for {type(layer.module).__name__}, so its W_O cannot "
                f"be shown; what heads look at can be."
            )
        layer.check_stands()
        _check_here(layer.found.writes, layer.found.name)
        heads = (len(layer.spec.head_ids), layer.spec.value_dim)
        return matrix(layer.found.writes).unflatten(1, heads).permute(1, 2, 0)


class Reads:
    """The q, k and v projections, as live views with a head axis."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def weight(self, letter: str) -> Tensor:
        """(heads, channels, width)"""
        return self.shared_out(letter, matrix(self.module(letter)))

    def bias(self, letter: str) -> Tensor | None:
        """(heads, channels)"""
        bias = bias_of(self.module(letter))
        return None if bias is None else self.shared_out(letter, bias)

    def module(self, letter: str) -> nn.Module:
        """What projects a letter."""
        layer, found = self._layer, self._layer.found
        if letter in layer.withheld:
            raise HeadwiseError(f"W_{letter.upper()} of {found.name} cannot be shown: {layer.withheld[letter]}.")
        if found.reads is None:
            raise HeadwiseError(
                f"how {type(found.module).__name__} keeps its q, k and v is not known, so {found.name} cannot show them; "
                f"what heads look at can be seen, and they can be silenced."
            )
        made = found.reader("qkv".index(letter) if len(found.reads[1]) == 3 else 0)
        layer.check_stands()
        _check_here(made, found.name)
        return made

    def shared_out(self, letter: str, whole: Tensor, layout: str | None = None) -> Tensor:
        """The rows of a letter, by head: (rows, …) → (heads, channels, …)."""
        spec, place = self._layer.spec, "qkv".index(letter)
        heads, keys = len(spec.head_ids), len(spec.kv_ids)
        sizes = [(heads, spec.head_dim), (keys, spec.head_dim), (keys, spec.value_dim)]
        layout = self._layer.layouts[letter] if layout is None else layout
        if layout == "by head":
            return whole.unflatten(0, (heads, 3, spec.head_dim))[:, place]
        if layout == "joined":
            whole = whole.split([a * b for a, b in sizes])[place]
        if layout == "wide":  # behind each head's own rows stand others, those of a gate say
            return whole.unflatten(0, (sizes[place][0], -1))[:, : sizes[place][1]]
        if layout == "first":  # and here behind those of all heads
            whole = whole[: sizes[place][0] * sizes[place][1]]
        return whole.unflatten(0, sizes[place])


def matrix(module: nn.Module) -> Tensor:
    """A projection's weight as (out, in): a live view; of one with adapters, a copy with those that are active."""
    weight = getattr(getattr(module, "base_layer", module), "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not _is_plain(weight):
        raise HeadwiseError(f"{type(module).__name__} keeps its weights packed, so they cannot be shown.")
    for more in _adapters(module):
        weight = weight + more
    return weight.mT if is_turned(module) else weight


def _check_here(module: nn.Module, name: str) -> None:
    """Refuse weights that are brought from another device, or a disk, for each call."""
    if getattr(getattr(module, "_hf_hook", None), "offload", False):
        raise HeadwiseError(
            f"weights of {name} are offloaded and there only while it is called, so they cannot be shown; what heads look at "
            f"can be seen, and they can be silenced."
        )


def bias_of(module: nn.Module) -> Tensor | None:
    """A projection's bias, (out,)."""
    bias = getattr(getattr(module, "base_layer", module), "bias", None)
    return bias if isinstance(bias, Tensor) else None


def _is_plain(weight: Tensor) -> bool:
    return type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()


def _adapters(module: Any) -> list[Tensor]:
    """What active adapters add to a weight, (out, in) each; nothing where they are merged into it already."""
    if not hasattr(module, "base_layer") or module.disable_adapters or module.merged:
        return []
    there = [name for name in module.active_adapters if name in getattr(module, "lora_A", {})]
    return [module.get_delta_weight(name) for name in there]


def _adapter_names(module: Any) -> tuple[str, ...]:
    """The adapters a projection has, active or not."""
    kinds = getattr(module, "adapter_layer_names", ())
    return tuple(sorted(f"{kind}.{name}" for kind in kinds for name in getattr(module, kind, ())))
