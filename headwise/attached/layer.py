"""One attention layer of somebody else's model, with the face of our own: hook point, sizes, live views of its weights."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from headwise.attached.discover import AttentionModuleInfo, is_conv1d, out_size
from headwise.attached.uncopied_hook import UncopiedHook
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Edit, HookPoint, Listener, is_replaying
from headwise.kernels.score_params import ScoreParams
from headwise.spec import AttentionSpec, Rotary

if TYPE_CHECKING:
    from headwise.attached.layer_probe import LayerProbe
    from headwise.attached.masks import MaskConverter

# What stands between attention and W_O. plain: nothing, z enters it. gated: a gate of the call, so z is taken behind it.
# coupled: heads meet before W_O, in a norm say. unknown: W_O is not known here, but what the layer gives is linear in z.
# unverified: W_O is not known, and that was not seen. unprobed: W_O is known, but no call could be tried.
ZPath = Literal["plain", "gated", "coupled", "unknown", "unverified", "unprobed"]
COUPLED_REASON = (
    "heads meet between attention and W_O (in a norm over all of them, another mix, or several calls put together), so what "
    "one head writes, or the model without it, is not to be told; what heads look at can be seen"
)
UNVERIFIED_REASON = (
    "its W_O is not known here, and what it gives was not seen to be a sum over heads, so the model without one of them is "
    "not to be told; what heads look at can be seen"
)
MAX_EDITED_CALLS = 512  # edited calls whose queries are known again
MARK = "_headwise_layer"  # where a module keeps the mark that says which layer looks at it


class LayerMark:
    """The layer that looks at a module. A copy of the module, or what is pickled of it, has an empty mark.

    It is an attribute of the module, because torch.compile guards on attributes. It does not guard on a lookup by module.
    """

    def __init__(self, layer: "AttachedLayer | None" = None) -> None:
        self.layer = layer

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerMark":
        return LayerMark()

    def __reduce__(self) -> tuple[type["LayerMark"], tuple[()]]:
        return LayerMark, ()


def layer_of(module: nn.Module) -> "AttachedLayer | None":
    """The layer that looks at a module; None if the module is not attached."""
    mark = module.__dict__.get(MARK)
    return None if mark is None else mark.layer


class AttachedLayer:
    """What `Heads` and `Head` ask of a layer, over a module that is not ours."""

    gate: Tensor | None = None  # a gate that the model itself has learned; theirs have none

    def __init__(self, info: AttentionModuleInfo, mask_converter: "MaskConverter") -> None:
        self.info, self.mask_converter = info, mask_converter
        self.module = info.module
        width = 0 if info.output_module is None else out_size(info.output_module)
        self.spec = AttentionSpec(
            width=width or info.heads * info.head_dim, heads=info.heads, head_dim=info.head_dim,
            value_dim=info.value_dim, kv_heads=info.kv_heads, kept_heads=info.kept_heads,
            rotary=Rotary() if info.rotary else None, window=info.window,
        )  # fmt: skip
        self.qkv, self.output_projection = QKVProjectionView(self), OutputProjectionView(self)
        self.hook_point = GuardedHookPoint(self, info.window)
        heads, kv_heads = len(self.spec.head_ids), len(self.spec.kv_head_ids)
        even_kv_of_head = (
            tuple(head * kv_heads // heads for head in range(heads)) if heads and heads % kv_heads == 0 else ()
        )
        # Whether groups differ in size, as cutting may leave them.
        self.has_uneven_groups = self.spec.kv_of_head != even_kv_of_head
        self.z_path: ZPath = "plain"
        self.withheld_reasons: dict[str, str] = {}  # by letter, q, k, v or o: why its weights are not shown
        default_layouts = ("" if info.qkv_modules is None else info.qkv_modules[0],) * 3
        self.layouts = dict(zip("qkv", info.layouts or default_layouts, strict=True))
        self.num_outputs = info.num_outputs
        self.attends_ahead: bool | None = None  # whether a query was seen to look ahead, where that was asked
        self.reconstruction_problem = ""  # why what is rebuilt of attention that is not SDPA's is not what it computed
        self.handle: Callable[[], Any] = lambda: None  # a weak reference to the handle of the model
        self.probe: LayerProbe | None = None  # while it is found out how the layer is put together
        self.words: frozenset[str] | None = None  # of the attention function's source; None if it cannot be read
        self._pending_call = threading.local()  # `call`: what attention was called with and gave, until W_O is called
        self._edited_calls: deque[tuple[torch.Size, float]] = deque(maxlen=MAX_EDITED_CALLS)
        self._output_module_path = next(
            (name for name, module in info.parent.named_modules() if module is info.output_module), None
        )
        self._checked_projections = self._projections()

    def pruned_spec(self, pruned: set[int]) -> AttentionSpec:
        """The sizes of this layer when some heads, by number, are gone."""
        return replace(self.spec, kept_heads=tuple(head_id for head_id in self.spec.head_ids if head_id not in pruned))

    def copy_probe_results(self, other: "AttachedLayer") -> None:
        """Take over what was found out about another layer that is built alike."""
        self.z_path, self.withheld_reasons, self.layouts = (
            other.z_path,
            dict(other.withheld_reasons),
            dict(other.layouts),
        )
        self.hook_point.window, self.num_outputs = other.hook_point.window, other.num_outputs
        self.attends_ahead = other.attends_ahead

    def _projections(self) -> list[tuple[nn.Module, tuple[str, ...]]]:
        """What reads and writes here now, each with the names of its adapters."""
        info = self.info
        modules = [] if info.qkv_modules is None else [getattr(info.module, name) for name in info.qkv_modules[1]]
        modules += [] if self._output_module_path is None else [info.parent.get_submodule(self._output_module_path)]
        return [(module, _adapter_names(module)) for module in modules]

    def check_projections_unchanged(self) -> None:
        """Refuse where projections are not those that were checked: adapters were added since, or weights were packed."""
        if self._projections() != self._checked_projections:
            raise HeadwiseError(
                f"projections of {self.info.name} were replaced, or got adapters, after the model was attached, so they are "
                f"not those that were checked; detach it and attach it again: hw.attach(attached.detach())."
            )

    def register_forward_pre_hook(self, hook: Any) -> Any:
        """Show what the layer reads, (B, T, D), before it does: the first argument of what projects q."""
        return self.info.qkv_module(0).register_forward_pre_hook(hook)

    def register_forward_hook(self, hook: Any) -> Any:
        """Show what the layer writes, (B, T, D), once it has: what W_O gives."""
        if self.info.output_module is None:
            raise HeadwiseError(
                f"which part of {self.info.name} writes is not known, so what it writes cannot be shown."
            )
        return self.info.output_module.register_forward_hook(hook)

    @property
    def b_O(self) -> Tensor | None:
        """The output bias, (D,)."""
        return None if self.info.output_module is None else bias_of(self.info.output_module)

    # What passes.

    def apply_hook_point(
        self, q: Tensor, k: Tensor, v: Tensor, params: Callable[[], ScoreParams], out: Tensor
    ) -> Tensor:
        """Show a call where z is what enters W_O: here, or where W_O is called. (B, T, H, e) → (B, T, H, e)"""
        if self.hook_point.has_edits and not is_replaying() and not torch.compiler.is_compiling():
            self._edited_calls.append(_query_fingerprint(q))
        if self.z_path in ("gated", "unprobed") and self.info.output_module is not None:
            self._pending_call.call = q, k, v, params, out
            return out
        z = out.transpose(1, 2)  # (B, H, T, e)
        edited = self._edited_and_shown(q, k, v, params, z)
        return out if edited is z else edited.transpose(1, 2).contiguous()

    def _edited_and_shown(self, q: Tensor, k: Tensor, v: Tensor, terms: Callable[[], ScoreParams], z: Tensor) -> Tensor:
        """Apply edits and call listeners; the score parameters are computed only if a listener is open."""
        z = self.hook_point.apply_edits(z)
        if self.hook_point.has_listeners:
            self.hook_point.notify_listeners(q, k, v, terms, z)
        return z

    def register_output_projection_hooks(self) -> list[Any]:
        """Hooks before W_O where z is what enters it and not what attention gave; each has `.remove()`."""
        if self.z_path not in ("gated", "unprobed") or self.info.output_module is None:
            return []
        return [self.info.output_module.register_forward_pre_hook(UncopiedHook(self._before_output))]

    def _before_output(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        call = getattr(self._pending_call, "call", None)
        if call is None:
            return None
        self._pending_call.call = None
        q, k, v, params, out = call
        module_input = args[0]
        if self.hook_point.has_edits:
            self.check_projections_unchanged()  # an adapter put around W_O reads what an edit here does not reach
        if self.z_path == "unprobed" and not (
            module_input.numel() == out.numel() and torch.equal(module_input.reshape(out.shape), out)
        ):
            if self.hook_point.has_edits:
                raise HeadwiseError(
                    f"z of {self.info.name} is not what enters W_O, and no call could be tried to find out why; its heads "
                    f"can be looked at, not silenced."
                )
            self._edited_and_shown(q, k, v, params, out.transpose(1, 2))
            return None
        z = module_input.reshape(out.shape).transpose(1, 2)  # (B, H, T, e)
        edited = self._edited_and_shown(q, k, v, params, z)
        return None if edited is z else (edited.transpose(1, 2).reshape(module_input.shape), *args[1:])

    def check_replay_unedited(self, q: Tensor) -> None:
        """Refuse to repeat a call that was edited: with which edits is known of the model's own checkpoints alone."""
        if not self._edited_calls:
            return
        shape, query_sum = _query_fingerprint(q)
        if any(
            shape == edited_shape and abs(query_sum - edited_sum) <= 1e-6 * abs(edited_sum)
            for edited_shape, edited_sum in tuple(self._edited_calls)
        ):
            raise HeadwiseError(
                f"a checkpoint of your own repeats {self.info.name}, whose heads were scaled or replaced the first time; it "
                f"cannot be known how. Use model.gradient_checkpointing_enable(), or no checkpoint around edited heads."
            )


def _query_fingerprint(q: Tensor) -> tuple[torch.Size, float]:
    """By what the queries of a call are known again."""
    return q.shape, float(q.detach().double().abs().sum())


class GuardedHookPoint(HookPoint):
    """A hook point of somebody else's layer: where heads are coupled behind attention, z can be seen and not changed."""

    def __init__(self, layer: AttachedLayer, window: int | None) -> None:
        super().__init__(layer.info.address, layer.spec.head_ids, layer.output_projection, window)
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
        if handle is None or not handle.is_attached:
            raise HeadwiseError(
                f"{self._layer.info.name}: the model was detached, or its handle was dropped. Attach it again, "
                f"attached = hw.attach(model), and keep the handle."
            )
        yield handle

    def check_editable(self) -> None:
        """Refuse an edit that would not be what it says."""
        if self._layer.z_path == "coupled":
            raise HeadwiseError(f"heads of {self._layer.info.name} cannot be silenced or replaced: {COUPLED_REASON}.")
        if self._layer.z_path == "unverified":
            raise HeadwiseError(
                f"heads of {self._layer.info.name} cannot be silenced or replaced: {UNVERIFIED_REASON}."
            )


class OutputProjectionView:
    """The output projection, as `HasSlices`."""

    def __init__(self, layer: AttachedLayer) -> None:
        self._layer = layer

    @property
    def weight(self) -> Tensor:
        """Any tensor of the layer's dtype and device, where numbers are computed."""
        for weight in self._layer.module.parameters():
            if weight.is_floating_point() and weight.device.type != "meta":
                return weight if _is_dense_float(weight) else torch.zeros((), dtype=weight.dtype, device=weight.device)
        return torch.zeros((), dtype=torch.get_default_dtype())  # packed or elsewhere: whoever uses it looks at z

    @property
    def head_output_weights(self) -> Tensor:
        """A live view of every head's own W_O: (H, e, D)."""
        layer = self._layer
        if "o" in layer.withheld_reasons:
            raise HeadwiseError(f"W_O of {layer.info.name} cannot be shown: {layer.withheld_reasons['o']}.")
        if layer.z_path == "coupled":
            raise HeadwiseError(f"W_O of {layer.info.name} cannot be shared out among heads: {COUPLED_REASON}.")
        if layer.info.output_module is None:
            raise HeadwiseError(
                f"which part of {layer.info.name} writes is not known for {type(layer.module).__name__}, so its W_O cannot "
                f"be shown; what heads look at can be."
            )
        layer.check_projections_unchanged()
        _check_not_offloaded(layer.info.output_module, layer.info.name)
        head_shape = (len(layer.spec.head_ids), layer.spec.value_dim)
        return weight_matrix(layer.info.output_module).unflatten(1, head_shape).permute(1, 2, 0)


class QKVProjectionView:
    """The q, k and v projections, as live views with a head axis."""

    def __init__(self, layer: AttachedLayer) -> None:
        self._layer = layer

    def weight_by_head(self, projection: str) -> Tensor:
        """(heads, channels, width)"""
        return self.split_heads(projection, weight_matrix(self.projection_module(projection)))

    def bias_by_head(self, projection: str) -> Tensor | None:
        """(heads, channels)"""
        bias = bias_of(self.projection_module(projection))
        return None if bias is None else self.split_heads(projection, bias)

    def projection_module(self, projection: str) -> nn.Module:
        """What projects a letter."""
        layer, info = self._layer, self._layer.info
        if projection in layer.withheld_reasons:
            raise HeadwiseError(
                f"W_{projection.upper()} of {info.name} cannot be shown: {layer.withheld_reasons[projection]}."
            )
        if info.qkv_modules is None:
            raise HeadwiseError(
                f"how {type(info.module).__name__} keeps its q, k and v is not known, so {info.name} cannot show them; "
                f"what heads look at can be seen, and they can be silenced."
            )
        projection_module = info.qkv_module("qkv".index(projection) if len(info.qkv_modules[1]) == 3 else 0)
        layer.check_projections_unchanged()
        _check_not_offloaded(projection_module, info.name)
        return projection_module

    def split_heads(self, projection: str, rows: Tensor, layout: str | None = None) -> Tensor:
        """The rows of a letter, by head: (rows, …) → (heads, channels, …)."""
        spec, index = self._layer.spec, "qkv".index(projection)
        heads, kv_heads = len(spec.head_ids), len(spec.kv_head_ids)
        sizes = [(heads, spec.head_dim), (kv_heads, spec.head_dim), (kv_heads, spec.value_dim)]
        layout = self._layer.layouts[projection] if layout is None else layout
        if layout == "per_head":
            return rows.unflatten(0, (heads, 3, spec.head_dim))[:, index]
        if layout == "fused":
            rows = rows.split([a * b for a, b in sizes])[index]
        if layout == "padded_per_head":  # behind each head's own rows stand others, those of a gate say
            return rows.unflatten(0, (sizes[index][0], -1))[:, : sizes[index][1]]
        if layout == "padded_at_end":  # and here behind those of all heads
            rows = rows[: sizes[index][0] * sizes[index][1]]
        return rows.unflatten(0, sizes[index])


def weight_matrix(module: nn.Module) -> Tensor:
    """A projection's weight as (out, in): a live view; of one with adapters, a copy with those that are active."""
    weight = getattr(getattr(module, "base_layer", module), "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not _is_dense_float(weight):
        raise HeadwiseError(f"{type(module).__name__} keeps its weights packed, so they cannot be shown.")
    for delta in _adapter_deltas(module):
        weight = weight + delta
    return weight.mT if is_conv1d(module) else weight


def _check_not_offloaded(module: nn.Module, name: str) -> None:
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


def _is_dense_float(weight: Tensor) -> bool:
    return type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()


def _adapter_deltas(module: Any) -> list[Tensor]:
    """What active adapters add to a weight, (out, in) each; nothing where they are merged into it already."""
    if not hasattr(module, "base_layer") or module.disable_adapters or module.merged:
        return []
    active_names = [name for name in module.active_adapters if name in getattr(module, "lora_A", {})]
    return [module.get_delta_weight(name) for name in active_names]


def _adapter_names(module: Any) -> tuple[str, ...]:
    """The adapters a projection has, active or not."""
    kinds = getattr(module, "adapter_layer_names", ())
    return tuple(sorted(f"{kind}.{name}" for kind in kinds for name in getattr(module, kind, ())))
