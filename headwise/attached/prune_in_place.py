"""Prune heads of a transformers model in place: its projections become smaller, and its modules get the new head counts.

KV heads without remaining heads are removed, too. If that leaves groups of different sizes, which transformers does not
support, our attention function runs them while the model is attached. A layer without heads is replaced by one that outputs
its bias. The pruned model is tested on a few tokens: its outputs must equal those of the model with these heads silenced. If
they do not, the model is restored, and pruning raises an error.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.discover import PRUNED_ATTRIBUTE, AttentionModuleInfo, is_conv1d, out_size
from headwise.attached.dummy_inputs import dummy_input_candidates
from headwise.attached.head_slices import (
    BIAS_TABLE,
    POSITION_BIAS,
    KeptTensorSlice,
    activation_head_selections,
    head_tensor_slices,
    hook_norm_channels,
    prune_hooks_of,
    register_bias_slice_hooks,
    restore_prune_hooks,
    set_head_counts,
    shares_position_bias,
)
from headwise.attached.layer import AttachedLayer, check_no_adapters, is_quantized
from headwise.attached.per_head_packed_weights import is_packed, packed_weight_of
from headwise.errors import HeadwiseError, UnsupportedModelError
from headwise.kernels.rounding_tolerance import autocast_disabled, to_float64
from headwise.model import eval_mode
from headwise.spec import Address, AttentionSpec, LayerAddress

RunOutputs = tuple[list[Tensor], dict[str, list[Tensor]]]  # outputs of the model, and outputs of W_O by layer path


def prune_and_verify(
    model: Any,
    layers: list[AttachedLayer],
    pruned: Iterable[Any],
    replace_layers: Callable[[list[AttachedLayer]], None],
    stop_routing_modules: Callable[[], None],
) -> None:
    """Prune heads and verify that outputs equal those with silenced heads, both attached and in plain transformers.

    Args:
        model: Transformers model.
        layers: Its layers.
        pruned: Addresses of the heads to prune.
        replace_layers: Attaches to new layers.
        stop_routing_modules: Lets plain transformers run the modules.

    Raises:
        HeadwiseError: The heads cannot be pruned. The model is unchanged.
    """
    pruned = list(pruned)
    check_prunable(layers, pruned)
    verifier = PruneVerifier(model, layers, pruned)
    with rollback_on_error(layers, pruned, replace_layers):
        pruned_layers = prune_layers(layers, pruned)
        replace_layers(pruned_layers)
        verifier.check(pruned_layers)
        heads = [
            address for layer in pruned_layers for address in layer.hook_point.head_addresses if layer.has_uneven_groups
        ]
        with suppress(RollbackSignal), rollback_on_error(pruned_layers, heads, replace_layers):
            stop_routing_modules()
            verifier.check(
                [
                    expand_kv_groups(layer) if layer.has_uneven_groups and layer.spec.head_ids else layer
                    for layer in pruned_layers
                ]
            )
            raise RollbackSignal


@torch.no_grad()
def prune_layers(layers: list[AttachedLayer], pruned: Iterable[Address]) -> list[AttachedLayer]:
    """Prune heads of these layers. Returns the new layers."""
    heads_by_layer = _heads_by_layer(pruned)
    pruned_by_layer = [heads_by_layer.get(layer.hook_point.address) for layer in layers]
    return [
        _prune_layer(layer, layer.pruned_spec(head_ids)) if head_ids else layer
        for layer, head_ids in zip(layers, pruned_by_layer, strict=True)
    ]


@torch.no_grad()
def add_to_output_biases(layers: Iterable[AttachedLayer], folded_biases: Mapping[LayerAddress, Tensor]) -> None:
    """Add tensors (D,) to the output biases of layers."""
    for layer in layers:
        bias = folded_biases.get(layer.hook_point.address)
        if bias is not None:
            _add_bias(layer, bias)


def check_prunable(layers: Iterable[AttachedLayer], pruned: Iterable[Address]) -> None:
    """Raise an error if heads cannot be pruned, before anything is changed."""
    heads_by_layer = _heads_by_layer(pruned)
    for layer in layers:
        head_ids = heads_by_layer.get(layer.hook_point.address)
        if head_ids and not isinstance(layer.info.module, HeadlessAttention):
            _check_layer(layer)
            if (
                hasattr(layer.info.module, BIAS_TABLE)
                and shares_position_bias(layer.info.module)
                and not layer.pruned_spec(head_ids).head_ids
            ):
                raise UnsupportedModelError(
                    f"{layer.info.name}: not all of its heads can be pruned, because it computes the position bias of all "
                    f"layers of its stack. Keep one head, or silence the heads: attached.heads[…].silenced()."
                )


def _check_layer(layer: AttachedLayer) -> None:
    info, name = layer.info, type(layer.info.module).__name__
    hint = "Silence the heads instead: attached.heads[…].silenced()."
    if layer.hook_point.is_active:
        raise HeadwiseError(
            f"layer {layer.hook_point.address}: a context that records or edits its heads is open. Close it before pruning."
        )
    projections = [] if info.qkv_modules is None else [info.qkv_module(i) for i in range(len(info.qkv_modules[1]))]
    for module in (*projections, *(() if info.output_module is None else (info.output_module,))):
        if is_quantized(module):
            raise UnsupportedModelError(
                f"{info.name}: its heads cannot be pruned, because its weights ({type(module).__name__}) are quantized. Load "
                f"the model without quantization to prune it. {hint}"
            )
        check_no_adapters(module, info.name, "pruned")
    if info.output_module is None or layer.z_path not in ("plain", "gated"):
        raise UnsupportedModelError(
            f"heads of {name} cannot be pruned: no test could confirm that the output of each head reaches W_O separately. "
            f"{hint}"
        )
    all_indices = list(range(len(layer.spec.head_ids))), list(range(len(layer.spec.kv_head_ids)))
    try:
        modules = {tensor_slice.holder for tensor_slice in head_tensor_slices(layer, *all_indices)}
    except HeadwiseError as error:
        raise UnsupportedModelError(f"heads of {name} cannot be pruned: {str(error).rstrip('.')}. {hint}") from None
    for module in modules:
        if hasattr(module, "in_features") and not _is_prunable_linear(module):
            raise UnsupportedModelError(
                f"{info.name}: a projection of type {type(module).__name__} cannot be pruned. {hint}"
            )


def _is_prunable_linear(module: nn.Module) -> bool:
    """Return whether a module is nn.Linear or a subclass of it in transformers, which the verification then tests."""
    module_class = type(module)
    return module_class is nn.Linear or (
        issubclass(module_class, nn.Linear) and module_class.__module__.startswith("transformers.models.")
    )


def _heads_by_layer(pruned: Iterable[Address]) -> dict[LayerAddress, set[int]]:
    heads_by_layer: dict[LayerAddress, set[int]] = {}
    for address in pruned:
        heads_by_layer.setdefault(address.layer_address, set()).add(address.head)
    return heads_by_layer


def _prune_layer(layer: AttachedLayer, pruned_spec: AttentionSpec) -> AttachedLayer:
    info, spec = layer.info, layer.spec
    heads = [spec.head_ids.index(head_id) for head_id in pruned_spec.head_ids]
    kv_heads = [spec.kv_head_ids.index(head_id) for head_id in pruned_spec.kv_head_ids]
    _slice_all(layer, heads, kv_heads)
    info = replace(info if pruned_spec.head_ids else _replace_with_headless(layer), kept_heads=pruned_spec.head_ids)
    return _rebuild_layer(layer, info)


@torch.no_grad()
def expand_kv_groups(layer: AttachedLayer) -> AttachedLayer:
    """Give each head its own key and value, so that plain transformers can run a layer with groups of different sizes."""
    spec = layer.spec
    _slice_all(layer, list(range(len(spec.head_ids))), list(spec.kv_of_head))
    return _rebuild_layer(layer, replace(layer.info, kv_heads=layer.info.heads, kv_expanded=True))


def _slice_all(layer: AttachedLayer, heads: list[int], kv_heads: list[int]) -> None:
    for selection in activation_head_selections(layer, heads, kv_heads):
        (register_bias_slice_hooks if selection.module is layer.info.module else hook_norm_channels)(
            selection.module, selection.head_indices, selection.head_count
        )
    for tensor_slice in head_tensor_slices(layer, heads, kv_heads):
        slice_parameter_in_place(tensor_slice)


def _rebuild_layer(layer: AttachedLayer, info: AttentionModuleInfo) -> AttachedLayer:
    """Create the new layer of a pruned module."""
    info = replace(
        info, layouts=tuple(layer.layouts[projection] for projection in "qkv"), num_outputs=layer.num_outputs
    )
    info.module.__dict__[PRUNED_ATTRIBUTE] = info  # found again when the model is attached again
    rebuilt = AttachedLayer(info, layer.mask_converter)
    rebuilt.copy_probe_results(layer)
    for selection in activation_head_selections(layer, [], []):
        if selection.module is not layer.info.module:
            rebuilt.withheld_reasons |= dict.fromkeys("qk", "a norm over all heads still includes the pruned heads")
    if rebuilt.spec.head_ids:
        set_head_counts(rebuilt, (len(layer.spec.head_ids), len(layer.spec.kv_head_ids)))
    return rebuilt


class HeadlessAttention(nn.Module):
    """Attention layer without heads: outputs its bias and appends empty keys and values to a cache."""

    def __init__(
        self, output_name: str | None, output_module: nn.Module, layer_idx: int | None, num_outputs: int, config: Any
    ) -> None:
        super().__init__()
        self.layer_idx, self.output_name, self._num_outputs = layer_idx, output_name, num_outputs
        self.config: Any = config  # selects the attention implementation
        if output_name is not None:  # W_O was a child of the module and keeps its name
            self.add_module(output_name, output_module)

    def forward(self, hidden_states: Tensor, *args: Any, key_value_states: Any = None, **kwargs: Any) -> Any:
        """Return the bias: (B, T, D) → (B, T, D), or (B, T, 0) if W_O is outside of the module.

        The output tuple has the same length as that of the original module. A position bias is passed on.
        """
        cache_class: Any = getattr(sys.modules.get("transformers"), "Cache", ())
        cache: Any = next((x for x in (*args, *kwargs.values()) if isinstance(x, cache_class)), None)
        if cache is not None and key_value_states is None:
            cache = getattr(cache, "self_attention_cache", cache)
            empty_kv = hidden_states.new_zeros(len(hidden_states), 1, hidden_states.shape[1], 1)  # (B, 1, T, 1)
            cache.update(empty_kv, empty_kv, self.layer_idx)
        if self.output_name is None:
            out = hidden_states[..., :0]
        else:
            output_module: Any = getattr(self, self.output_name)
            out = hidden_states.new_zeros(*hidden_states.shape[:-1], out_size(output_module))
            out = out if output_module.bias is None else out + output_module.bias
        extra_outputs = [kwargs.get(POSITION_BIAS), *(None,) * (self._num_outputs - 2)] if self._num_outputs > 1 else []
        return (out, *extra_outputs) if self._num_outputs else out


def _replace_with_headless(layer: AttachedLayer) -> AttentionModuleInfo:
    """Replace a module by a layer without heads."""
    info = layer.info
    assert info.output_module is not None
    child_names = {id(child): name for name, child in info.module.named_children()}
    layer_idx, layer_id, config = (getattr(info.module, name, None) for name in ("layer_idx", "layer_id", "config"))
    layer_idx = layer_id if layer_idx is None else layer_idx
    headless = HeadlessAttention(
        child_names.get(id(info.output_module)), info.output_module, layer_idx, layer.num_outputs, config
    )
    setattr(info.parent, info.name.rpartition(".")[2], headless.train(info.module.training))
    return replace(info, module=headless, qkv_modules=None)


def slice_parameter_in_place(tensor_slice: KeptTensorSlice) -> None:
    """Slice a parameter, and update the sizes of its module."""
    holder = tensor_slice.holder
    if is_packed(holder) and tensor_slice.name == "weight":
        packed = packed_weight_of(holder)
        if not packed.columns_by_head:  # W_O keeps its heads, because heads are pruned only in floats
            packed.select_rows(tensor_slice.indices)
        return
    value = getattr(holder, tensor_slice.name)
    index = torch.tensor(tensor_slice.indices, dtype=torch.long, device=value.device)
    setattr(holder, tensor_slice.name, _make_parameter_like(value, value.index_select(tensor_slice.axis, index)))
    if tensor_slice.name != "weight" or value.ndim != 2:
        return
    names = ("nx", "nf") if is_conv1d(holder) else ("out_features", "in_features")
    if hasattr(holder, names[tensor_slice.axis]):
        setattr(holder, names[tensor_slice.axis], len(tensor_slice.indices))


def _make_parameter_like(reference: Any, value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().contiguous().clone(), requires_grad=reference.requires_grad)


def _add_bias(layer: AttachedLayer, shift: Tensor) -> None:
    """Add to a layer's output bias in float64. A missing bias starts at 0."""
    output_module: Any = layer.info.output_module
    old_bias = output_module.weight.new_zeros(len(shift)) if output_module.bias is None else output_module.bias.detach()
    wide = to_float64(old_bias)
    output_module.bias = _make_parameter_like(output_module.weight, (wide + shift.to(wide)).to(old_bias))


# Verification.


class RollbackSignal(Exception):  # noqa: N818 (a signal, not an error)
    """Raised to restore a model after a successful trial."""


class PruneVerifier:
    """Compares the outputs of a pruned model with those of the model with these heads silenced."""

    def __init__(self, model: Any, layers: Sequence[AttachedLayer], pruned: Iterable[Any]) -> None:
        self._model, self._pruned = model, list(pruned)
        self._names = {
            layer.info.name for layer in layers if any(a in self._pruned for a in layer.hook_point.head_addresses)
        }
        self._inputs: dict[str, Tensor] | None = None
        parameter = next(model.parameters(), None)
        self.is_possible = parameter is not None and parameter.device.type != "meta"
        if not self.is_possible:
            return
        with ExitStack() as silencing:
            for layer in layers:
                head_indices = [index for index, a in enumerate(layer.hook_point.head_addresses) if a in self._pruned]
                if head_indices:
                    gate = torch.ones(len(layer.spec.head_ids), device=parameter.device)  # pyright: ignore
                    gate[head_indices] = 0
                    silencing.enter_context(layer.hook_point.scaled(gate))
            self._silenced_outputs, reason = self._run_first_working(layers)
        if self._inputs is None:
            raise UnsupportedModelError(
                f"heads of {type(model).__name__} cannot be pruned: the model could not be called with test inputs to verify "
                f"the result ({reason}). Silence the heads instead: attached.heads[…].silenced()."
            )

    def _run_first_working(self, layers: Sequence[AttachedLayer]) -> tuple[RunOutputs, str]:
        reason = "its input format is unknown"
        for inputs in dummy_input_candidates(self._model):
            try:
                outputs = self._run(layers, inputs)
            except Exception as error:  # a model may raise any error on guessed inputs
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
                continue
            self._inputs = inputs
            return outputs, ""
        return ([], {}), reason

    def _run(self, layers: Sequence[AttachedLayer], inputs: dict[str, Tensor]) -> RunOutputs:
        projection_outputs: dict[str, list[Tensor]] = {}
        device = next(self._model.parameters()).device
        with (
            ExitStack() as stack, torch.no_grad(), torch.random.fork_rng(), eval_mode(self._model),
            autocast_disabled(device),  # the outputs are compared up to the rounding of the weights
        ):  # fmt: skip
            for layer in layers:
                info = layer.info
                if info.output_module is not None and info.name in self._names:
                    captured = projection_outputs.setdefault(info.name, [])
                    hook = info.output_module.register_forward_hook(
                        lambda _, __, output, captured=captured: captured.append(output)
                    )
                    stack.callback(hook.remove)
            return [
                *flatten_tensors(self._model(**inputs)),
                *_next_token_outputs(self._model, inputs),
            ], projection_outputs

    def check(self, layers: Sequence[AttachedLayer]) -> None:
        """Raise an error if the outputs differ from those of the model with silenced heads."""
        if not self.is_possible or self._inputs is None:
            return
        outputs, projection_outputs = self._silenced_outputs
        try:
            new_outputs, new_projection_outputs = self._run(layers, self._inputs)
        except HeadwiseError:
            raise
        except Exception as error:  # for example, shapes that no longer match
            message = " ".join(str(error).split())[:120]
            self._raise_unprunable(f"the pruned model cannot be called ({type(error).__name__}: {message})")
            raise AssertionError from error
        pairs = (
            list(zip(outputs, new_outputs, strict=True))
            if len(outputs) == len(new_outputs)
            else [(outputs[0], outputs[0].new_zeros(0))]
        )
        for name, expected in projection_outputs.items():  # a layer without heads may not call W_O
            pairs += list(zip(expected, new_projection_outputs.get(name, expected) or expected, strict=False))
        if any(a.shape != b.shape or not is_close(b, a) for a, b in pairs):
            self._raise_unprunable("the outputs of the pruned model differ from those with silenced heads")

    def _raise_unprunable(self, reason: str) -> None:
        names = sorted(self._names)
        raise UnsupportedModelError(
            f"heads of {type(self._model).__name__} ({names[0]}{' …' if len(names) > 1 else ''}) cannot be pruned: {reason}. "
            f"Silence the heads instead: attached.heads[…].silenced()."
        )


def _next_token_outputs(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the outputs at a next token with the earlier tokens in a cache; empty if the model uses no cache."""
    ids = inputs.get("input_ids")
    if ids is None or set(inputs) != {"input_ids"} or not getattr(model, "can_generate", bool)():
        return []
    prefix_output = model(input_ids=ids[:, :-1], use_cache=True)
    if getattr(prefix_output, "past_key_values", None) is None:
        return []
    try:
        return flatten_tensors(model(input_ids=ids[:, -1:], past_key_values=prefix_output.past_key_values)[0])
    except Exception:  # the model needs more inputs
        return []


@contextmanager
def rollback_on_error(
    layers: list[AttachedLayer], pruned: Iterable[Any], replace_layers: Callable[[list[AttachedLayer]], None]
) -> Iterator[None]:
    """Restore the modules and layers if the body raises an error."""
    pruned_set = set(pruned)
    infos = [layer.info for layer in layers if pruned_set & set(layer.hook_point.head_addresses)]
    modules = {module for info in infos for root in (info.parent, info.module) for module in root.modules()}
    saved = [(module, _copy_state(module), prune_hooks_of(module)) for module in modules]
    try:
        yield
    except BaseException:
        for module, state, prune_hooks in saved:
            hooks = {name: module.__dict__[name] for name in module.__dict__ if "_hooks" in name}
            module.__dict__.clear()
            module.__dict__.update(state | hooks)
            restore_prune_hooks(module, prune_hooks)
        replace_layers(layers)
        raise


def _copy_state(module: nn.Module) -> dict[str, Any]:
    return {name: type(value)(value) if isinstance(value, dict) else value for name, value in module.__dict__.items()}


def flatten_tensors(output: Any) -> list[Tensor]:
    """Return all floating-point tensors of an output, in order, without caches."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = list(output.values())
    return [x for item in output for x in flatten_tensors(item)] if isinstance(output, list | tuple) else []


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """Return whether values are equal up to rounding, relative to the largest value."""
    if not expected.numel():
        return True
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()):
        return False
    difference = (to_float64(actual[finite]) - to_float64(expected[finite])).abs()
    size = to_float64(expected[finite]).abs()
    return not len(difference) or bool(difference.max() <= torch.finfo(expected.dtype).eps ** 0.5 * size.max())
