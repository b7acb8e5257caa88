"""`AttachedLayer`: an attention layer of an attached model with the interface of our own layers."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from headwise.attached.discover import AttentionModuleInfo, is_conv1d, out_size
from headwise.attached.per_head_packed_weights import packed_dtype_and_device
from headwise.attached.uncopied_hook import UncopiedHook
from headwise.errors import HeadwiseError, UnsupportedModelError
from headwise.heads.hook_point import Edit, HookPoint, Listener, is_replaying
from headwise.kernels.rounding_tolerance import to_float64
from headwise.kernels.score_params import ScoreParams
from headwise.spec import AttentionSpec, Rotary

if TYPE_CHECKING:
    from headwise.attached.layer_structure_check import LayerTestCallRecorder
    from headwise.attached.masks import MaskConverter

# How z (the output of attention) reaches W_O:
#   plain       z enters W_O unchanged
#   gated       z is multiplied by a gate, so z is taken after the gate
#   coupled     heads are combined before W_O, for example in a norm
#   unknown     W_O was not found, but the output of the layer is linear in z
#   unverified  W_O was not found, and linearity could not be verified
#   unprobed    W_O was found, but the layer could not be tested
ZPath = Literal["plain", "gated", "coupled", "unknown", "unverified", "unprobed"]
COUPLED_REASON = (
    "the layer combines heads between attention and W_O (in a norm over all heads, by mixing heads, or by joining several "
    "calls), so the output of a single head is not defined. Attention maps are still available"
)
UNVERIFIED_REASON = (
    "the output projection W_O was not found, and the layer's output could not be verified to be a sum over heads. "
    "Attention maps are still available"
)
MAX_EDITED_CALLS = 512  # number of edited calls to remember by their queries
MARK = "_headwise_layer"  # attribute of a module that stores its LayerMark


class LayerMark:
    """Link from a module to its `AttachedLayer`. Copies and pickles of the module have an empty link.

    It is an attribute of the module because torch.compile guards on attributes, but not on a lookup by module.
    """

    def __init__(self, layer: "AttachedLayer | None" = None) -> None:
        self.layer = layer

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerMark":
        return LayerMark()

    def __reduce__(self) -> tuple[type["LayerMark"], tuple[()]]:
        return LayerMark, ()


def layer_of(module: nn.Module) -> "AttachedLayer | None":
    """Return the layer attached to a module; None if the module is not attached."""
    mark = module.__dict__.get(MARK)
    return None if mark is None else mark.layer


class AttachedLayer:
    """One attention layer of an attached model, with the interface that `Heads` and `Head` need."""

    gate: Tensor | None = None  # learned head gates, which attached models do not have
    cache_gate: Tensor | None = (
        None  # (B, K), while gates are learned: 1 attends to all tokens, 0 as the cache policies say
    )

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
        self.hook_point = AttachedLayerHookPoint(self, info.window)
        heads, kv_heads = len(self.spec.head_ids), len(self.spec.kv_head_ids)
        even_kv_of_head = (
            tuple(head * kv_heads // heads for head in range(heads)) if heads and heads % kv_heads == 0 else ()
        )
        # Pruning may leave KV groups of different sizes.
        self.has_uneven_groups = self.spec.kv_of_head != even_kv_of_head
        self.z_path: ZPath = "plain"
        self.withheld_reasons: dict[str, str] = {}  # by projection (q, k, v, o): why its weights are not available
        default_layouts = ("" if info.qkv_modules is None else info.qkv_modules[0],) * 3
        self.layouts = dict(zip("qkv", info.layouts or default_layouts, strict=True))
        self.num_outputs = info.num_outputs
        self.attends_ahead: bool | None = None  # whether the probe saw attention to later tokens; None: not tested
        self.reconstruction_problem = ""  # why attention without SDPA could not be reproduced from its recorded inputs
        self.handle: Callable[[], Any] = lambda: None  # a weak reference to the handle of the model
        self.probe: LayerTestCallRecorder | None = None  # set while the layer is tested
        self.source_words: frozenset[str] | None = (
            None  # words in the attention function's source; None if it cannot be read
        )
        self._pending_call = threading.local()  # `call`: inputs and output of attention, until W_O is called
        self._edited_calls: deque[tuple[torch.Size, float]] = deque(maxlen=MAX_EDITED_CALLS)
        self._output_module_path = next(
            (name for name, module in info.parent.named_modules() if module is info.output_module), None
        )
        self._checked_projections = self._projections()

    def pruned_spec(self, pruned: set[int]) -> AttentionSpec:
        """Return the spec of this layer without these heads, given by number."""
        return replace(self.spec, kept_heads=tuple(head_id for head_id in self.spec.head_ids if head_id not in pruned))

    def copy_probe_results(self, other: "AttachedLayer") -> None:
        """Copy the test results of a layer with the same architecture."""
        self.z_path, self.withheld_reasons, self.layouts = (
            other.z_path,
            dict(other.withheld_reasons),
            dict(other.layouts),
        )
        self.hook_point.window, self.num_outputs = other.hook_point.window, other.num_outputs
        self.attends_ahead = other.attends_ahead

    def _projections(self) -> list[tuple[nn.Module, tuple[str, ...]]]:
        """Return the current q, k, v and output projections, each with the names of its adapters."""
        info = self.info
        modules = [] if info.qkv_modules is None else [getattr(info.module, name) for name in info.qkv_modules[1]]
        modules += [] if self._output_module_path is None else [info.parent.get_submodule(self._output_module_path)]
        return [(module, _adapter_names(module)) for module in modules]

    def check_projections_unchanged(self) -> None:
        """Raise an error if projections were replaced or got adapters since the model was attached."""
        if self._projections() != self._checked_projections:
            raise HeadwiseError(
                f"{self.info.name}: its projections were replaced or got adapters after the model was attached. Attach it "
                f"again: hw.attach(attached.detach())."
            )

    def register_forward_pre_hook(self, hook: Any) -> Any:
        """Register a hook on the layer's input (B, T, D), which is the input of the q projection."""
        return self.info.qkv_module(0).register_forward_pre_hook(hook)

    def register_forward_hook(self, hook: Any) -> Any:
        """Register a hook on the layer's output (B, T, D), which is the output of W_O."""
        if self.info.output_module is None:
            raise UnsupportedModelError(
                f"{self.info.name}: its output projection W_O was not found, so its output cannot be recorded."
            )
        return self.info.output_module.register_forward_hook(hook)

    @property
    def b_O(self) -> Tensor | None:
        """Output bias, (D,)."""
        return None if self.info.output_module is None else bias_of(self.info.output_module)

    # Calls.

    def apply_hook_point(
        self, q: Tensor, k: Tensor, v: Tensor, params: Callable[[], ScoreParams], out: Tensor
    ) -> Tensor:
        """Apply the hook point to a call, or, if z is taken after a gate, defer it to W_O: (B, T, H, e) → (B, T, H, e)."""
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
        """Register hooks before W_O if z is not the direct output of attention. Each returned hook has `.remove()`."""
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
            self.check_projections_unchanged()  # an adapter around W_O would see the unedited z
        if self.z_path == "unprobed" and not (
            module_input.numel() == out.numel() and torch.equal(module_input.reshape(out.shape), out)
        ):
            if self.hook_point.has_edits:
                raise UnsupportedModelError(
                    f"{self.info.name}: its heads cannot be silenced or replaced. The layer changes the output of attention "
                    f"before W_O, and hw.attach could not test whether its heads remain separate. Attention maps are still "
                    f"available."
                )
            self._edited_and_shown(q, k, v, params, out.transpose(1, 2))
            return None
        z = module_input.reshape(out.shape).transpose(1, 2)  # (B, H, T, e)
        edited = self._edited_and_shown(q, k, v, params, z)
        return None if edited is z else (edited.transpose(1, 2).reshape(module_input.shape), *args[1:])

    def check_replay_unedited(self, q: Tensor) -> None:
        """Raise an error if a user's own checkpoint repeats an edited call: only the model's checkpoints store edits."""
        if not self._edited_calls:
            return
        shape, query_sum = _query_fingerprint(q)
        if any(
            shape == edited_shape and abs(query_sum - edited_sum) <= 1e-6 * abs(edited_sum)
            for edited_shape, edited_sum in tuple(self._edited_calls)
        ):
            raise HeadwiseError(
                f"{self.info.name}: torch.utils.checkpoint recomputes this layer in the backward pass, but without the edits "
                f"of its heads. Use model.gradient_checkpointing_enable(), or do not checkpoint layers with edited heads."
            )


def _query_fingerprint(q: Tensor) -> tuple[torch.Size, float]:
    """Return a fingerprint by which the queries of a call are recognized."""
    return q.shape, float(to_float64(q.detach()).abs().sum())


class AttachedLayerHookPoint(HookPoint):
    """Hook point of an attached layer. If heads are coupled after attention, z can be recorded but not edited."""

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
        """Hold the handle of the model. Raise an error if it is detached, because edits would have no effect."""
        handle = self._layer.handle()
        if handle is None or not handle.is_attached:
            raise HeadwiseError(
                f"{self._layer.info.name}: the model is detached, or its handle was garbage collected. Attach it again, "
                f"attached = hw.attach(model), and keep a reference to the handle."
            )
        yield handle

    def check_editable(self) -> None:
        """Raise an error if z cannot be edited."""
        if self._layer.z_path == "coupled":
            raise UnsupportedModelError(
                f"{self._layer.info.name}: its heads cannot be silenced or replaced: {COUPLED_REASON}."
            )
        if self._layer.z_path == "unverified":
            raise UnsupportedModelError(
                f"{self._layer.info.name}: its heads cannot be silenced or replaced: {UNVERIFIED_REASON}."
            )


class OutputProjectionView:
    """View of the output projection that implements `HasSlices`."""

    def __init__(self, layer: AttachedLayer) -> None:
        self._layer = layer

    @property
    def weight(self) -> Tensor:
        """A tensor with the dtype and device in which the layer computes."""
        for weight in self._layer.module.parameters():
            if weight.is_floating_point() and weight.device.type != "meta":
                return weight if _is_dense_float(weight) else torch.zeros((), dtype=weight.dtype, device=weight.device)
        packed = packed_dtype_and_device(self._layer.module)
        if packed is not None:
            return torch.zeros((), dtype=packed[0], device=packed[1])
        return torch.zeros((), dtype=torch.get_default_dtype())  # weights of other quantizers, or offloaded ones

    @property
    def head_output_weights(self) -> Tensor:
        """Live view of W_O by head: (H, e, D)."""
        layer = self._layer
        if "o" in layer.withheld_reasons:
            raise UnsupportedModelError(
                f"{layer.info.name}: W_O by head is not available: {layer.withheld_reasons['o']}."
            )
        if layer.z_path == "coupled":
            raise UnsupportedModelError(f"{layer.info.name}: W_O cannot be split by head: {COUPLED_REASON}.")
        if layer.info.output_module is None:
            raise UnsupportedModelError(
                f"{layer.info.name}: the output projection W_O of {type(layer.module).__name__} was not found. Attention "
                f"maps are still available."
            )
        layer.check_projections_unchanged()
        _check_not_offloaded(layer.info.output_module, layer.info.name)
        head_shape = (len(layer.spec.head_ids), layer.spec.value_dim)
        return weight_matrix(layer.info.output_module).unflatten(1, head_shape).permute(1, 2, 0)


class QKVProjectionView:
    """Live views of the q, k and v projections by head."""

    def __init__(self, layer: AttachedLayer) -> None:
        self._layer = layer

    def weight_by_head(self, projection: str) -> Tensor:
        """Return the weights by head: (heads, channels, width)."""
        return self.split_heads(projection, weight_matrix(self.projection_module(projection)))

    def bias_by_head(self, projection: str) -> Tensor | None:
        """Return the biases by head: (heads, channels); None if the projection has no bias."""
        bias = bias_of(self.projection_module(projection))
        return None if bias is None else self.split_heads(projection, bias)

    def projection_module(self, projection: str) -> nn.Module:
        """Return the module that computes q, k or v."""
        layer, info = self._layer, self._layer.info
        if projection in layer.withheld_reasons:
            raise UnsupportedModelError(
                f"{info.name}: W_{projection.upper()} by head is not available: {layer.withheld_reasons[projection]}."
            )
        if info.qkv_modules is None:
            raise UnsupportedModelError(
                f"{info.name}: the q, k and v projections of {type(info.module).__name__} were not found. Attention maps are "
                f"still available, and heads can be silenced."
            )
        projection_module = info.qkv_module("qkv".index(projection) if len(info.qkv_modules[1]) == 3 else 0)
        layer.check_projections_unchanged()
        _check_not_offloaded(projection_module, info.name)
        return projection_module

    def split_heads(self, projection: str, rows: Tensor, layout: str | None = None) -> Tensor:
        """Split the rows of a q, k or v projection by head: (rows, …) → (heads, channels, …)."""
        spec, index = self._layer.spec, "qkv".index(projection)
        heads, kv_heads = len(spec.head_ids), len(spec.kv_head_ids)
        sizes = [(heads, spec.head_dim), (kv_heads, spec.head_dim), (kv_heads, spec.value_dim)]
        layout = self._layer.layouts[projection] if layout is None else layout
        if layout == "per_head":
            return rows.unflatten(0, (heads, 3, spec.head_dim))[:, index]
        if layout == "fused":
            rows = rows.split([a * b for a, b in sizes])[index]
        if layout == "padded_per_head":  # other rows, for example those of a gate, follow the rows of each head
            return rows.unflatten(0, (sizes[index][0], -1))[:, : sizes[index][1]]
        if layout == "padded_at_end":  # other rows follow the rows of all heads
            rows = rows[: sizes[index][0] * sizes[index][1]]
        return rows.unflatten(0, sizes[index])


def weight_matrix(module: nn.Module) -> Tensor:
    """Return a projection's weight (out, in) as a live view; with adapters, a copy that includes the active ones."""
    weight = getattr(getattr(module, "base_layer", module), "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not _is_dense_float(weight):
        raise UnsupportedModelError(
            f"{type(module).__name__}: its weights are quantized, so the weights of single heads cannot be read. Load the "
            f"model without quantization."
        )
    for delta in _adapter_deltas(module):
        weight = weight + delta
    return weight.mT if is_conv1d(module) else weight


def _check_not_offloaded(module: nn.Module, name: str) -> None:
    """Raise an error if weights are offloaded."""
    if getattr(getattr(module, "_hf_hook", None), "offload", False):
        raise UnsupportedModelError(
            f"{name}: its weights are offloaded and loaded only during a call, so they cannot be viewed. Attention maps are "
            f"still available, and heads can be silenced."
        )


def bias_of(module: nn.Module) -> Tensor | None:
    """Return a projection's bias (out,), or None."""
    bias = getattr(getattr(module, "base_layer", module), "bias", None)
    return bias if isinstance(bias, Tensor) else None


def is_quantized(module: nn.Module) -> bool:
    """Return whether the weight of a projection is stored in a quantized format (bitsandbytes, GPTQ, AWQ, …)."""
    base = getattr(module, "base_layer", module)
    weight = getattr(base, "weight", None)
    has_codes = isinstance(getattr(base, "qweight", None), Tensor)
    return has_codes or (isinstance(weight, Tensor) and not _is_dense_float(weight))


def check_no_adapters(module: nn.Module, name: str, operation: str) -> None:
    """Raise an error if a projection has adapters. `operation` is a participle, such as "pruned"."""
    if hasattr(module, "base_layer"):
        raise UnsupportedModelError(
            f"{name}: a projection with adapters (peft) cannot be {operation}. Merge them into the weights and attach the "
            f"result: hw.attach(peft_model.merge_and_unload(), tokenizer)."
        )


def _is_dense_float(weight: Tensor) -> bool:
    return type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()


def _adapter_deltas(module: Any) -> list[Tensor]:
    """Return the weight deltas (out, in) of active adapters; empty if they are merged."""
    if not hasattr(module, "base_layer") or module.disable_adapters or module.merged:
        return []
    active_names = [name for name in module.active_adapters if name in getattr(module, "lora_A", {})]
    return [module.get_delta_weight(name) for name in active_names]


def _adapter_names(module: Any) -> tuple[str, ...]:
    """Return the names of all adapters of a projection, active or not."""
    kinds = getattr(module, "adapter_layer_names", ())
    return tuple(sorted(f"{kind}.{name}" for kind in kinds for name in getattr(module, kind, ())))
