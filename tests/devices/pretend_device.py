"""A pretend accelerator: a device made in Python that computes on the CPU and raises when devices mix.

`torch.device("pretend")` is a PrivateUse1 device. A tensor on it holds a CPU tensor and reports the device `pretend:0`.
An operation that mixes it with a CPU tensor raises, as CUDA does. CPU tensors without dimensions and CPU index tensors are
allowed, as CUDA allows them.

    with pretend_device(float64=False) as device:
        model.to("pretend")(ids.to("pretend"))
    device.transfers  # device-to-host copies

With `float64=False` every float64 tensor on the device raises, as on MPS.

Limits: data pointers are those of the CPU tensor inside. `torch.compile`, pinned memory and streams are not covered. Autocast
casts nothing. Results are those of the CPU kernels, so rounding on a real accelerator differs. Quantized tensors of other
libraries are tensor subclasses too, so `attach` takes every tensor on this device as dense. It is slow. A pruned attached
model must be detached inside the block, because restoring it needs the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import extract_stack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.utils.backend_registration as backend_registration
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import headwise.attached.layer as attached_layer
from headwise.kernels.rounding_tolerance import has_float64

NAME = "pretend"
COPIES = {"aten::_to_copy", "aten::copy_", "aten::set_.source_Storage"}
SCALAR_READS = {"aten::_local_scalar_dense", "aten::item"}
# The host waits for the size of the result, or for one value.
SIZE_READS = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::equal",
    "aten::bincount", "aten::repeat_interleave.Tensor", "aten::is_nonzero",
}  # fmt: skip


@dataclass
class DeviceState:
    """Switches and counters of the device.

    Attributes:
        float64: Whether float64 tensors are allowed on the device.
        transfers: Device-to-host copies since the device was opened, `.item()` and `.tolist()` included.
        sites: Copies per line of the package, as `file:line`.
    """

    float64: bool = True
    transfers: int = 0
    sites: dict[str, int] = field(default_factory=dict)

    def reset_counts(self) -> None:
        """Start counting again."""
        self.transfers, self.sites = 0, {}

    def count_transfer(self) -> None:
        """Count one copy, and the innermost line of the package that caused it."""
        self.transfers += 1
        for frame in reversed(extract_stack(limit=40)):
            if "/headwise/" in frame.filename:
                site = f"{frame.filename.rpartition('/headwise/')[2]}:{frame.lineno}"
                self.sites[site] = self.sites.get(site, 0) + 1
                return


STATE = DeviceState()


class PretendTensor(Tensor):
    """A tensor on the pretend device."""

    cpu_data: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> "PretendTensor":
        if data.dtype == torch.float64 and not STATE.float64:
            raise TypeError("float64 is not supported on the pretend device. Use float32.")
        result = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=torch.device(NAME, 0),
        )
        result.cpu_data = data
        return result

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"PretendTensor({self.cpu_data})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the CPU tensor. Hooks of autograd run outside of the function mode."""
        return self.cpu_data.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _is_pretend(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU data, and wrap the result if it belongs on the device."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    on_device = [isinstance(tensor, PretendTensor) for tensor in tensors]
    name, target = func.name(), kwargs.get("device")
    if any(on_device) and name not in COPIES | SCALAR_READS:
        _check_one_device(name, tensors, on_device)
    to_device = _is_pretend(target) if target is not None else any(on_device)
    if any(on_device) and (name in SCALAR_READS or (name == "aten::_to_copy" and not to_device)):
        STATE.count_transfer()
    if name == "aten::copy_" and on_device[1] and not on_device[0]:
        STATE.count_transfer()
    if (any(on_device) and name in SIZE_READS) or _is_mask_index(name, args):
        STATE.count_transfer()
    arguments, keywords = pytree.tree_unflatten([_to_cpu(leaf) for leaf in leaves], spec)
    result = func(*arguments, **keywords)
    if not to_device or (name == "aten::copy_" and not on_device[0]):
        return args[0] if name == "aten::copy_" else result
    result = pytree.tree_map(lambda leaf: PretendTensor(leaf) if _is_plain(leaf) else leaf, result)
    return _restore_written(func, args, kwargs, result)


def _is_mask_index(name: str, args: Any) -> bool:
    """Return whether an operation indexes with a mask on the device, which the device first turns into positions."""
    index = args[1] if name.startswith(("aten::index.Tensor", "aten::index_put", "aten::_index_put")) else ()
    return any(isinstance(part, PretendTensor) and part.dtype in (torch.bool, torch.uint8) for part in index)


def _restore_written(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """Return the argument that an in-place operation writes to, rather than a new wrapper of it."""
    arguments = func._schema.arguments
    if isinstance(result, PretendTensor):
        if "out" in kwargs:
            return kwargs["out"]
        first = arguments[0].alias_info if arguments else None
        if first is not None and first.is_write and args:
            return args[0]
    return result


def _check_one_device(name: str, tensors: list[Tensor], on_device: list[bool]) -> None:
    index_operation = name.startswith(("aten::index", "aten::_index", "aten::_unsafe_index"))
    for tensor, inside in zip(tensors, on_device, strict=True):
        is_index = index_operation and tensor.dtype in (torch.int64, torch.int32, torch.bool, torch.uint8)
        if not inside and tensor.ndim and not (is_index and not name.startswith("aten::index_")):
            shapes = [(tuple(item.shape), str(item.device)) for item in tensors]
            raise RuntimeError(f"{name}: expected all tensors to be on the same device. Got {shapes}.")


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, PretendTensor)


def _to_cpu(leaf: Any) -> Any:
    if isinstance(leaf, PretendTensor):
        return leaf.cpu_data
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == NAME else leaf


class _DispatchMode(TorchDispatchMode):
    """Routes factory functions with `device="pretend"` to the pretend device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


class _FunctionMode(TorchFunctionMode):
    """Replaces functions that read the memory of a tensor directly."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and _is_pretend(kwargs.get("device")):
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        first = args[0] if args else None
        if not isinstance(first, PretendTensor):
            return func(*args, **kwargs)
        if func is Tensor.numpy or func is Tensor.__array__:
            raise TypeError("can't convert a pretend:0 tensor to numpy. Use Tensor.cpu() first.")
        if func in (Tensor.data_ptr, Tensor.untyped_storage):
            return func(first.cpu_data)
        if func is Tensor.tolist:
            return first.detach().cpu().tolist()
        if func is Tensor.new_tensor:
            dtype, device = kwargs.get("dtype", first.dtype), kwargs.get("device", NAME)
            return torch.tensor(args[1], dtype=dtype).to(torch.device(device))
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            return _index(func, first, args[1:])
        return func(*args, **kwargs)


def _index(func: Any, tensor: Tensor, args: Any) -> Any:
    """Index with lists, arrays and numbers, which torch would convert through the data pointer."""

    def convert(index: Any) -> Any:
        if not isinstance(index, (list, np.ndarray)):
            return index
        positions = torch.as_tensor(np.asarray(index))
        return (positions if positions.numel() else positions.long()).to(NAME)  # an empty list is float64 in numpy

    index = tuple(map(convert, args[0])) if isinstance(args[0], tuple) else convert(args[0])
    if func is Tensor.__getitem__:
        return func(tensor, index)
    value = args[1] if isinstance(args[1], Tensor) else torch.tensor(args[1], dtype=tensor.dtype).to(NAME)
    return func(tensor, index, value)


def _register() -> None:
    """Register the device with torch. The autograd engine counts devices when it starts, so this runs on import."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    module, generator_state = getattr(torch, NAME), {"state": torch.get_rng_state()}
    functions: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda device=None: generator_state["state"],
        "set_rng_state": lambda state, device=None: generator_state.update(state=state),
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "manual_seed_all": lambda seed: None,
        "_is_in_bad_fork": lambda: False,
        "synchronize": lambda device=None: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_autocast_enabled": lambda: False,
    }
    for name, function in functions.items():
        setattr(module, name, function)


_register()


@contextmanager
def pretend_device(*, float64: bool = True) -> Iterator[DeviceState]:
    """Make `device="pretend"` available in the block. Yield its switches and counters."""
    STATE.float64, STATE.transfers, STATE.sites = float64, 0, {}
    has_float64.cache_clear()
    try:
        with (
            _FunctionMode(),
            _DispatchMode(),
            patch.object(attached_layer, "_is_dense_float", Tensor.is_floating_point),
        ):
            yield STATE
    finally:
        STATE.float64 = True
