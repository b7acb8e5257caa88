"""Remote-code modeling file of a pruned model: plain transformers loads the folder with `trust_remote_code=True`.

The file subclasses the installed model class. It resizes parameters and head counts after the class has built the full model,
so no code of transformers is copied, and Headwise need not be installed. Its data is in config.json, as `headwise_pruned`:

    shapes      parameters whose shape differs, by path; a bias that the full model lacks is listed, too
    attributes  attributes of attention modules, by path: head counts
    config      head counts that attention modules read from their configuration, by path
    channels    output channels of modules, by path: keys and values that several heads of an uneven group share
    headless    attention modules without heads, by path
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.attached.attach_support import copy_config
from headwise.attached.head_slices import (
    KV_CHANNEL_COUNT_NAMES,
    KV_COUNT_NAMES,
    HeadCountConfigProxy,
    SelectChannelsHook,
    head_tensor_slices,
    is_prune_hook,
)
from headwise.attached.layer import AttachedLayer
from headwise.attached.prune_in_place import HeadlessAttention
from headwise.attached.quantize_in_place import quantization_of
from headwise.errors import UnsupportedModelError

MODULE_NAME = "modeling_headwise"
INSTEAD = "Leave out remote_code; hw.load reads the folder"
TEMPLATE = '''"""Pruned {base}, written by Headwise, which is not needed to load it.

config.json lists under "headwise_pruned" which parameters are smaller than those of {base}.
"""

import torch
from torch import nn
from {module} import {base}


class HeadlessAttention(nn.Module):
    """Attention without heads: its output is its bias."""

    def __init__(self, attention, output_name, num_outputs, layer_idx):
        super().__init__()
        self.output_name, self.num_outputs, self.layer_idx = output_name, num_outputs, layer_idx
        self.config = getattr(attention, "config", None)
        if output_name is not None:
            self.add_module(output_name, getattr(attention, output_name))

    def forward(self, hidden_states, *args, **kwargs):
        for value in (*args, *kwargs.values()):
            if hasattr(value, "update") and hasattr(value, "get_seq_length"):  # a KV cache counts the tokens
                empty = hidden_states.new_zeros(len(hidden_states), 1, hidden_states.shape[1], 1)
                value.update(empty, empty, self.layer_idx)
        if self.output_name is None:
            out = hidden_states[..., :0]
        else:
            projection = getattr(self, self.output_name)
            out = hidden_states.new_zeros(*hidden_states.shape[:-1], {width})
            out = out if projection.bias is None else out + projection.bias
        return (out, *[None] * (self.num_outputs - 1)) if self.num_outputs else out


class HeadCounts:
    """Configuration of one layer with other head counts."""

    def __init__(self, config, counts):
        self.__dict__.update(counts, wrapped=config)

    def __getattr__(self, name):
        if name.startswith("__") or name == "wrapped":
            raise AttributeError(name)
        return getattr(self.wrapped, name)


class SelectChannels:
    """Forward hook that selects or repeats output channels."""

    def __init__(self, channels):
        self.channels = channels

    def __call__(self, module, inputs, output):
        return output[..., torch.tensor(self.channels, device=output.device)]


class {name}({base}):
    """{base} with fewer heads."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        pruned = config.headwise_pruned
        for path, (output_name, num_outputs, layer_idx) in pruned["headless"].items():
            parent, _, child = path.rpartition(".")
            attention = self.get_submodule(path)
            setattr(
                self.get_submodule(parent), child, HeadlessAttention(attention, output_name, num_outputs, layer_idx)
            )
        reference = next(self.parameters())
        for path, shape in pruned["shapes"].items():
            owner_path, _, parameter = path.rpartition(".")
            owner = self.get_submodule(owner_path)
            setattr(owner, parameter, nn.Parameter(reference.new_empty(shape)))
            if isinstance(owner, nn.Linear) and parameter == "weight":
                owner.out_features, owner.in_features = shape
            elif parameter == "weight" and hasattr(owner, "nf"):
                owner.nx, owner.nf = shape
        for path, attributes in pruned["attributes"].items():
            for attribute, value in attributes.items():
                setattr(self.get_submodule(path), attribute, value)
        for path, counts in pruned["config"].items():
            module = self.get_submodule(path)
            module.config = HeadCounts(module.config, counts)
        for path, channels in pruned["channels"].items():
            self.get_submodule(path).register_forward_hook(SelectChannels(channels))
'''


def write_remote_code(model: Any, layers: Sequence[AttachedLayer], folder: Path) -> None:
    """Add a modeling file to the folder of a saved pruned model, and name it in config.json."""
    check_remote_code(model, layers)
    base = type(model)
    class_name = f"Pruned{base.__name__}"
    width = next(layer.spec.width for layer in layers)
    source = TEMPLATE.format(base=base.__name__, module=base.__module__, name=class_name, width=width)
    (folder / f"{MODULE_NAME}.py").write_text(source, encoding="utf-8")
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["headwise_pruned"] = pruned_sizes(model, layers)
    config["auto_map"] = dict.fromkeys(_auto_classes(model), f"{MODULE_NAME}.{class_name}")
    config_file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def check_remote_code(model: Any, layers: Sequence[AttachedLayer]) -> None:
    """Raise an error if a modeling file cannot represent the model."""
    name = type(model).__name__
    if quantization_of(model)[0]:
        raise UnsupportedModelError(
            f"remote_code=True: plain transformers does not read the quantized weights of this {name}. {INSTEAD}."
        )
    if not type(model).__module__.startswith("transformers."):
        raise UnsupportedModelError(
            f"remote_code=True: {name} is not a class of transformers, so a modeling file could not import it. {INSTEAD}."
        )
    for layer in layers:
        hooks = [hook for module in layer.module.modules() for hook in _hooks_of(module) if is_prune_hook(hook)]
        if any(not isinstance(hook, SelectChannelsHook) for hook in hooks):
            raise UnsupportedModelError(
                f"remote_code=True: {layer.info.name} of this {name} shares a position bias with other layers, which a "
                f"modeling file cannot represent. {INSTEAD}."
            )
    if not _auto_classes(model):
        raise UnsupportedModelError(f"remote_code=True: no Auto class of transformers loads {name}. {INSTEAD}.")


def _hooks_of(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _auto_classes(model: Any) -> list[str]:
    """Return the Auto classes of transformers that load this model class."""
    from transformers.models.auto import modeling_auto

    names = []
    for name, auto_class in vars(modeling_auto).items():
        mapping = getattr(getattr(auto_class, "_model_mapping", None), "_model_mapping", None)
        if name.startswith("AutoModel") and isinstance(mapping, dict):
            loaded = mapping.get(model.config.model_type, ())
            if type(model).__name__ in ((loaded,) if isinstance(loaded, str) else loaded):
                names.append(name)
    return names


def pruned_sizes(model: Any, layers: Sequence[AttachedLayer]) -> dict[str, Any]:
    """Return how a pruned model differs from the model that its configuration describes."""
    with torch.device("meta"):
        full = type(model)(copy_config(model))
    full_shapes = {name: tuple(parameter.shape) for name, parameter in full.named_parameters()}
    shapes = {
        name: list(parameter.shape)
        for name, parameter in model.named_parameters()
        if tuple(parameter.shape) != full_shapes.get(name)
    }
    attributes: dict[str, dict[str, int]] = {}
    config_counts: dict[str, dict[str, int]] = {}
    channels: dict[str, list[int]] = {}
    headless: dict[str, tuple[str | None, int, int | None]] = {}
    paths = {id(module): name for name, module in model.named_modules()}
    for layer in layers:
        path = paths[id(layer.module)]
        if isinstance(layer.module, HeadlessAttention):
            headless[path] = layer.module.output_name, layer.num_outputs, layer.module.layer_idx
            continue
        if layer.info.kept_heads is None:
            continue
        full_values, values = full.get_submodule(path).__dict__, dict(layer.module.__dict__)
        if layer.has_uneven_groups:
            channels |= _kv_expansion_channels(layer, paths)
            values |= _expanded_head_counts(layer)
        attributes[path] = {
            name: value for name, value in values.items() if type(value) is int and full_values.get(name) != value
        }
        if isinstance(config := values.get("config"), HeadCountConfigProxy):
            expanded = len(layer.spec.head_ids if layer.has_uneven_groups else layer.spec.kv_head_ids)
            own_counts = {name: value for name, value in vars(config).items() if name != "wrapped"}
            config_counts[path] = {
                name: expanded if name in KV_COUNT_NAMES else value for name, value in own_counts.items()
            }
        for module in layer.module.modules():
            for hook in _hooks_of(module):
                if isinstance(hook, SelectChannelsHook):
                    channels[paths[id(module)]] = list(hook.channels)
    return {
        "shapes": shapes,
        "attributes": attributes,
        "config": config_counts,
        "channels": channels,
        "headless": headless,
    }


def _kv_expansion_channels(layer: AttachedLayer, paths: dict[int, str]) -> dict[str, list[int]]:
    """Return the output channels that give each head of an uneven group its own key and value, by path of a projection."""
    channels = {}
    for tensor_slice in head_tensor_slices(layer, list(range(len(layer.spec.head_ids))), list(layer.spec.kv_of_head)):
        if tensor_slice.indices == list(
            range(getattr(tensor_slice.holder, tensor_slice.name).shape[tensor_slice.axis])
        ):
            continue
        if (
            tensor_slice.name == "weight"
            and isinstance(tensor_slice.holder, nn.Module)
            and tensor_slice.holder in (_qkv_modules(layer))
        ):
            channels[paths[id(tensor_slice.holder)]] = tensor_slice.indices
        elif tensor_slice.name != "bias" or tensor_slice.holder not in _qkv_modules(layer):
            raise UnsupportedModelError(
                f"remote_code=True: {layer.info.name} has KV groups of different sizes and parameters per KV head "
                f"({tensor_slice.name}), which a modeling file cannot represent. {INSTEAD}."
            )
    return channels


def _expanded_head_counts(layer: AttachedLayer) -> dict[str, int]:
    """Return the KV head counts of a module in which each head has its own key and value."""
    heads, kv_heads, size = len(layer.spec.head_ids), len(layer.spec.kv_head_ids), layer.spec.value_dim
    counts = {}
    for names, factor in ((KV_COUNT_NAMES, 1), (KV_CHANNEL_COUNT_NAMES, size)):
        counts |= {name: heads * factor for name in names if layer.module.__dict__.get(name) == kv_heads * factor}
    return counts


def _qkv_modules(layer: AttachedLayer) -> list[nn.Module]:
    names = () if layer.info.qkv_modules is None else layer.info.qkv_modules[1]
    return [getattr(layer.module, name) for name in names]


# Uniformly pruned models, which a configuration describes.


def uniform_config(model: Any, layers: Sequence[AttachedLayer]) -> dict[str, int] | None:
    """Return the fields of a configuration with which plain transformers builds this pruned model, or None.

    All layers must have the same number of heads per KV head, and the configuration must have its own `head_dim`.
    """
    counts = {(len(layer.spec.head_ids), len(layer.spec.kv_head_ids)) for layer in layers}
    heads, kv_heads = next(iter(counts))
    if len(counts) > 1 or not heads or any(layer.has_uneven_groups for layer in layers):
        return None
    config, fields = model.config, {}
    head_dim = layers[0].spec.head_dim
    for name, value in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads), ("head_dim", head_dim)):
        if hasattr(config, name):
            fields[config.attribute_map.get(name, name)] = value
    try:
        changed = copy_config(model)
        for name, value in fields.items():
            setattr(changed, name, value)
        type(changed).from_dict(changed.to_dict())  # loading a folder validates the numbers
        with torch.device("meta"):
            plain = type(model)(changed)
    except Exception:  # transformers may reject the numbers, for example a width that heads do not divide
        return None
    shapes = {name: value.shape for name, value in plain.state_dict().items()}
    if shapes != {name: value.shape for name, value in model.state_dict().items()}:
        return None
    paths = {id(module): name for name, module in model.named_modules()}
    for layer in layers:
        own, other = layer.module.__dict__, plain.get_submodule(paths[id(layer.module)]).__dict__
        numbers = [name for name, value in own.items() if type(value) in (int, float) and name in other]
        if any(own[name] != other[name] for name in numbers) or any(map(is_prune_hook, _hooks_of(layer.module))):
            return None
    return fields
