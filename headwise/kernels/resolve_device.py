"""Devices and data types by name, as `hw.load` and the command line take them."""

import torch

from headwise.errors import ArgumentError, suggest_names
from headwise.kernels.rounding_tolerance import has_float64

# Data types in which torch computes on every device, except float64 on MPS. Files may hold others, such as float8.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def resolve_device(device: torch.device | str) -> torch.device:
    """Return a device that can be used on this machine.

    Args:
        device: A device, its name, or "auto": the first available of CUDA, XPU, MPS and CPU.

    Raises:
        ArgumentError: The name is unknown, or this machine or this build of torch does not have the device.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if device == "auto":
        return torch.device(_available_devices()[0])
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError):  # unknown, not in this build, or no driver
        raise ArgumentError(
            f"device: unknown, or not available on this machine and in this build of torch. Got {str(device)!r}. "
            f"Available: {', '.join(_available_devices())}. Use one of them, or auto."
        ) from None
    return resolved


def _available_devices() -> list[str]:
    """Return the device types of this machine, the preferred one first."""
    accelerators = {
        "cuda": torch.cuda.is_available,
        "xpu": torch.xpu.is_available,
        "mps": torch.backends.mps.is_available,
    }
    return [*(name for name, is_available in accelerators.items() if is_available()), "cpu"]


def resolve_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype | None:
    """Return a data type that can be used for weights on a device. None stays None.

    Args:
        dtype: A floating-point data type, or its name.
        device: Device of the weights.

    Raises:
        ArgumentError: The data type is unknown, or the device does not compute in it.

    >>> resolve_dtype("bfloat16", torch.device("cpu"))
    torch.bfloat16
    """
    if dtype is None:
        return None
    resolved = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if resolved not in DTYPES.values():
        raise ArgumentError(
            f"dtype: not a data type of weights. Got {str(dtype)!r}; {suggest_names(str(dtype), DTYPES)}"
        )
    if resolved == torch.float64 and not has_float64(device):
        raise ArgumentError(f"dtype: {device.type} does not compute in float64. Got {dtype!r}. Use float32.")
    return resolved


def stored_or_float32(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the data type of stored weights, or float32 if the device does not compute in it.

    >>> stored_or_float32(torch.float8_e4m3fn, torch.device("cpu"))
    torch.float32
    """
    is_computable = stored in DTYPES.values() and (stored != torch.float64 or has_float64(device))
    return stored if is_computable else torch.float32
