"""Weights that accelerate offloads to disk or another device and loads for each call of their module.

Between calls such a weight is on the meta device. A hook of its module, or of a parent module, can load its values.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, UnsupportedModelError


def is_offloaded(model: nn.Module) -> bool:
    """Return whether any weights are offloaded."""
    return any(_weights_map(module) is not None for module in model.modules())


def check_in_memory(model: nn.Module) -> None:
    """Raise an error if weights are offloaded, because they cannot be changed in place."""
    if is_offloaded(model):
        raise UnsupportedModelError(
            f"in_place=True: weights of {type(model).__name__} are offloaded, so heads cannot be pruned in place. Use "
            f"hw.prune(attached, …), which returns a pruned copy in memory."
        )


def copy_to_memory(model: Any) -> Any:
    """Return a copy of an offloaded model with all weights in CPU memory and without accelerate's hooks."""
    from accelerate.hooks import remove_hook_from_module

    copied: Any = remove_hook_from_module(copy.deepcopy(model), recurse=True)
    copied.__dict__.pop("hf_device_map", None)
    for module in copied.modules():
        forward = module.__dict__.get("forward")
        if getattr(forward, "__func__", None) is type(module).forward:
            del module.__dict__["forward"]  # accelerate leaves the method on the object
    for name, tensor in [*copied.named_parameters(), *copied.named_buffers()]:
        if tensor.device.type == "meta":
            _replace(copied, name, _load_if_offloaded(model, name, tensor))
    copied.tie_weights()
    return copied.to("cpu")


def _weights_map(module: nn.Module) -> Mapping[str, Tensor] | None:
    """Return the values that the hooks of a module load, by name relative to the module."""
    hook: Any = module.__dict__.get("_hf_hook")
    for part in getattr(hook, "hooks", (hook,)):
        if getattr(part, "offload", False) and getattr(part, "weights_map", None) is not None:
            return part.weights_map
    return None


def _load_if_offloaded(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return the values of a parameter or buffer, which may be offloaded."""
    if tensor.device.type != "meta":
        return tensor
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        values = _weights_map(model.get_submodule(".".join(parts[:end])))
        own_name = ".".join(parts[end:])
        if values is not None and own_name in values:
            return values[own_name].to("cpu", tensor.dtype)
    raise HeadwiseError(
        f"{name} of {type(model).__name__} is on the meta device, and no hook of accelerate can load it. Load the model with "
        f"its weights."
    )


def _replace(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, own_name = name.rpartition(".")
    module = model.get_submodule(path)
    old = getattr(module, own_name)
    is_weight = isinstance(old, nn.Parameter)
    with torch.no_grad():
        new = value.clone()
    setattr(module, own_name, nn.Parameter(new, requires_grad=old.requires_grad) if is_weight else new)
