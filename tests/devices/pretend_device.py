"""A pretend accelerator: a device made in Python that computes on the CPU and raises when devices mix.

`torch.device("pretend")` is a PrivateUse1 device. A tensor on it holds a CPU tensor and reports the device `pretend:0`.
An operation that mixes it with a CPU tensor raises, as CUDA does. CPU tensors without dimensions and CPU index tensors are
allowed, as CUDA allows them. The device has a random state of its own, and does not accept generators of the CPU.

    with pretend_device(float64=False) as device:
        model.to("pretend")(ids.to("pretend"))
    device.transfers  # device-to-host copies

With `float64=False` every float64 tensor on the device raises, as on MPS.

Operations are routed by the class of the tensors, and new tensors by kernels that are registered with torch.library. Neither
depends on the thread, because autograd runs the backward pass, and so recomputed blocks, on a thread of its own.

Limits: data pointers are those of the CPU tensor inside. `torch.compile`, pinned memory and streams are not covered. Autocast
casts nothing. Results are those of the CPU kernels, so rounding on a real accelerator differs. Quantized tensors of other
libraries are tensor subclasses too, so `attach` takes every tensor on this device as dense. It is slow. There is one device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from traceback import extract_stack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.utils.backend_registration as backend_registration
from torch import Tensor
from torch.utils import _pytree as pytree

import headwise.attached.generate as attached_generate
import headwise.attached.layer as attached_layer
import headwise.model.generate as model_generate
from headwise.kernels.rounding_tolerance import has_float64

NAME = "pretend"
backend_registration._setup_privateuseone_for_python_backend(NAME)  # the autograd engine counts devices when it starts
DEVICE, CPU = torch.device(NAME, 0), torch.device("cpu")
COPIES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::set_.source_Storage"}
SCALAR_READS = {"aten::_local_scalar_dense", "aten::item"}
# The host waits for the size of the result, or for one value.
SIZE_READS = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::equal",
    "aten::bincount", "aten::repeat_interleave.Tensor", "aten::is_nonzero", "aten::_linalg_check_errors",
}  # fmt: skip
INDEX_OPERATIONS = ("aten::index.Tensor", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index")
# Operations that create a tensor on a device from no tensor; torch builds the others from these.
FACTORIES = (
    "empty.memory_format", "empty_strided.default", "arange.default", "arange.start", "arange.start_step", "range.default",
    "range.step", "eye.default", "eye.m", "tril_indices.default", "triu_indices.default",
)  # fmt: skip


@dataclass
class DeviceState:
    """Switches and counters of the device.

    Attributes:
        float64: Whether float64 tensors are allowed on the device.
        transfers: Device-to-host copies since the device was opened, `.item()` and `.tolist()` included.
        sites: Copies per line of the package, as `file:line`.
        rng_state: State of the random numbers of the device.
        generators: Generators that belong to the device, by their address.
    """

    float64: bool = True
    transfers: int = 0
    sites: dict[str, int] = field(default_factory=dict)
    rng_state: Tensor = field(default_factory=torch.get_rng_state)
    generators: dict[int, torch.Generator] = field(default_factory=dict)

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

    @contextmanager
    def own_rng(self) -> Iterator[None]:
        """Draw the random numbers of the device inside the context."""
        host_state = torch.get_rng_state()
        torch.set_rng_state(self.rng_state)
        try:
            yield
        finally:
            self.rng_state = torch.get_rng_state()
            torch.set_rng_state(host_state)


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
            device=DEVICE,
        )
        result.cpu_data = data
        return result

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"PretendTensor({self.cpu_data})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace functions that read the memory of a tensor directly."""
        replacement = FUNCTIONS.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            if replacement is not None and isinstance(args[0], PretendTensor):
                return replacement(func, *args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Operation:
    """Properties of an operation of torch."""

    name: str
    is_copy: bool
    reads_scalar: bool
    reads_size: bool
    is_index: bool
    is_random: bool
    writes_first: bool


OPERATIONS: dict[Any, Operation] = {}


def _operation(func: Any) -> Operation:
    if func not in OPERATIONS:
        name, arguments = func.name(), func._schema.arguments
        alias = arguments[0].alias_info if arguments else None
        OPERATIONS[func] = Operation(
            name,
            is_copy=name in COPIES,
            reads_scalar=name in SCALAR_READS,
            reads_size=name in SIZE_READS,
            is_index=name.startswith(INDEX_OPERATIONS),
            is_random=torch.Tag.nondeterministic_seeded in func.tags,
            writes_first=alias is not None and alias.is_write,
        )
    return OPERATIONS[func]


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU data, and wrap the result if it belongs on the device."""
    operation, leaves = _operation(func), _Leaves()
    arguments = [leaves.to_cpu(item) for item in args]
    keywords = {key: leaves.to_cpu(item) for key, item in kwargs.items()}
    target = kwargs.get("device")
    to_device = torch.device(target).type == NAME if target is not None else leaves.on_device > 0
    if leaves.on_device:
        if leaves.on_cpu and not (operation.is_copy or operation.reads_scalar):
            _check_one_device(operation, args, kwargs)
        if _is_transfer(operation, args, to_device):
            STATE.count_transfer()
    if to_device and leaves.generator is not None and _address(leaves.generator) not in STATE.generators:
        raise RuntimeError("Expected a 'pretend' device type for generator but found 'cpu'")
    with STATE.own_rng() if to_device and operation.is_random and leaves.generator is None else nullcontext():
        result = func(*arguments, **keywords)
    if operation.name == "aten::copy_":
        return args[0]
    if not to_device:
        return result
    written = kwargs.get("out", args[0] if operation.writes_first else None)
    if isinstance(written, PretendTensor) and isinstance(result, Tensor):
        if written.shape != result.shape or written.stride() != result.stride():
            written.data = PretendTensor(result)  # the operation changed the shape in place
        return written  # not another wrapper of the same data
    return _to_device(result)


class _Leaves:
    """The arguments of an operation on the CPU, and which of them were on the device."""

    def __init__(self) -> None:
        self.on_device, self.on_cpu = 0, 0
        self.generator: torch.Generator | None = None

    def to_cpu(self, item: Any) -> Any:
        if isinstance(item, PretendTensor):
            self.on_device += 1
            return item.cpu_data
        if isinstance(item, Tensor):
            self.on_cpu += 1
        elif type(item) in (list, tuple):
            return type(item)(self.to_cpu(part) for part in item)
        elif isinstance(item, torch.device):
            return CPU if item.type == NAME else item
        elif isinstance(item, torch.Generator):
            self.generator = item
        return item


def _to_device(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result if isinstance(result, PretendTensor) else PretendTensor(result)
    return type(result)(map(_to_device, result)) if type(result) in (list, tuple) else result


def _is_transfer(operation: Operation, args: Any, to_device: bool) -> bool:
    """Return whether the host waits for data of the device."""
    if operation.reads_scalar or operation.reads_size:
        return True
    if operation.name == "aten::_to_copy":
        return not to_device
    if operation.name == "aten::copy_":
        return isinstance(args[1], PretendTensor) and not isinstance(args[0], PretendTensor)
    # a mask on the device is first turned into positions
    return operation.is_index and any(
        isinstance(part, PretendTensor) and part.dtype in (torch.bool, torch.uint8) for part in args[1]
    )


def _check_one_device(operation: Operation, args: Any, kwargs: dict[str, Any]) -> None:
    if operation.is_index:
        args = (args[0], *args[2:])  # positions may be on the CPU
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    writes_cpu = operation.writes_first and not isinstance(args[0], PretendTensor)
    if writes_cpu or any(tensor.ndim and not isinstance(tensor, PretendTensor) for tensor in tensors):
        shapes = [(tuple(item.shape), str(item.device)) for item in tensors]
        raise RuntimeError(f"{operation.name}: expected all tensors to be on the same device. Got {shapes}.")


# Functions that read memory directly, as `replacement(function, tensor, *args)`.


def _raise_numpy_error(func: Any, tensor: PretendTensor, *args: Any, **kwargs: Any) -> Any:
    raise TypeError("can't convert a pretend:0 tensor to numpy. Use Tensor.cpu() first.")


def _new_tensor(func: Any, tensor: PretendTensor, data: Any, **kwargs: Any) -> Tensor:
    device, dtype = kwargs.get("device", NAME), kwargs.get("dtype", tensor.dtype)
    return torch.tensor(data, dtype=dtype, device="cpu").to(torch.device(device))


def _index(func: Any, tensor: PretendTensor, index: Any, *values: Any) -> Any:
    """Index with lists, arrays and numbers, which torch would convert through the data pointer."""

    def convert(part: Any) -> Any:
        if not isinstance(part, (list, np.ndarray)):
            return part
        positions = torch.as_tensor(np.asarray(part), device="cpu")
        return (positions if positions.numel() else positions.long()).to(NAME)  # an empty list is float64 in numpy

    index = tuple(map(convert, index)) if isinstance(index, tuple) else convert(index)
    if values and not isinstance(values[0], Tensor):
        values = (torch.tensor(values[0], dtype=tensor.dtype, device="cpu").to(NAME),)
    return func(tensor, index, *values)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.numpy: _raise_numpy_error,
    Tensor.__array__: _raise_numpy_error,
    Tensor.data_ptr: lambda func, tensor: func(tensor.cpu_data),
    Tensor.untyped_storage: lambda func, tensor: func(tensor.cpu_data),
    Tensor.tolist: lambda func, tensor: tensor.detach().cpu().tolist(),
    Tensor.new_tensor: _new_tensor,
    Tensor.__getitem__: _index,
    Tensor.__setitem__: _index,
}


def _register() -> torch.library.Library:
    """Register the functions of the device module, and the kernels that create tensors on the device."""
    functions: dict[str, Callable[..., Any]] = {
        "get_rng_state": lambda device=None: STATE.rng_state.clone(),
        "set_rng_state": lambda state, device=None: setattr(STATE, "rng_state", state.clone()),
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "manual_seed_all": lambda seed: setattr(
            STATE, "rng_state", torch.Generator("cpu").manual_seed(seed).get_state()
        ),
        "_is_in_bad_fork": lambda: False,
        "synchronize": lambda device=None: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_autocast_enabled": lambda: False,
    }
    for name, function in functions.items():
        setattr(getattr(torch, NAME), name, function)
    library = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        packet, overload = name.split(".")
        library.impl(
            name.removesuffix(".default"), _factory(getattr(getattr(torch.ops.aten, packet), overload)), "PrivateUse1"
        )
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    return library


def _factory(func: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _dispatch(func, args, kwargs | {"device": DEVICE})


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between the devices. Constructors in C++, such as that of `torch.tensor`, copy below the class of the tensors."""
    return _dispatch(torch.ops.aten.copy_.default, (target, source), {})


LIBRARY = _register()


def _address(generator: torch.Generator) -> int:
    """Return the address of a generator. torch passes it to operations in another Python object."""
    return generator._cdata  # pyright: ignore[reportAttributeAccessIssue]


def _make_generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a generator of a device. torch has no generators for devices made in Python."""
    generator = torch.Generator("cpu").manual_seed(seed)
    if device.type == NAME:
        STATE.generators[_address(generator)] = generator
    return generator


@contextmanager
def pretend_device(*, float64: bool = True) -> Iterator[DeviceState]:
    """Open `device="pretend"` with its counters at 0. Yield its switches and counters."""
    STATE.float64, STATE.transfers, STATE.sites = float64, 0, {}
    has_float64.cache_clear()
    try:
        with (
            patch.object(attached_layer, "_is_dense_float", Tensor.is_floating_point),
            patch.object(model_generate, "make_generator", _make_generator),
            patch.object(attached_generate, "make_generator", _make_generator),
        ):
            yield STATE
    finally:
        STATE.float64 = True
        STATE.generators.clear()
        has_float64.cache_clear()
