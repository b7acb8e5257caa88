"""Numerical precision of sums, norms and tolerances for models in half precision."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, wraps
from math import sqrt
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])
AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")
CONFIDENCE = 4.0  # standard deviations: random rounding errors exceed the bound once in 16,000 cases


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` unchanged if it is float32 or float64, and a float32 copy if it is in half precision.

    Squares of float16 overflow above 255, and bfloat16 sums keep 8 bits, so statistics are never computed in half precision.

    >>> [at_least_float32(torch.ones(1, dtype=kind)).dtype for kind in (torch.float16, torch.float64)]
    [torch.float32, torch.float64]
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def autocast_disabled(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast, in which statistics of a model under `torch.autocast` are computed in float32.

    >>> with torch.autocast("cpu"), autocast_disabled(torch.device("cpu")):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def without_autocast(function: F) -> F:
    """Make a function compute in the dtype of the weights if it is called inside `torch.autocast`.

    For functions that check their results up to the rounding of that dtype, or that write a model to a file.

    >>> with torch.autocast("cpu"):
    ...     without_autocast(torch.mm)(torch.ones(2, 2), torch.ones(2, 2)).dtype
    torch.float32
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for name in AUTOCAST_DEVICES:
                if torch.is_autocast_enabled(name):
                    stack.enter_context(torch.autocast(name, enabled=False))
            return function(*args, **kwargs)

    return cast(F, run)


@cache
def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64. MPS does not.

    >>> has_float64(torch.device("cpu"))
    True
    """
    if device.type in ("cpu", "cuda", "meta"):
        return True
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def float64_device(device: torch.device) -> torch.device:
    """Return the device itself if it computes in float64, otherwise the CPU."""
    return device if has_float64(device) else torch.device("cpu")


def to_float64(x: Tensor) -> Tensor:
    """Return `x` in float64, on the CPU if its device has no float64.

    >>> to_float64(torch.ones(2)).dtype
    torch.float64
    """
    return x.to(float64_device(x.device)).double()


def rounding_bound(dtype: torch.dtype, roundings: int) -> float:
    """Return a bound on the relative error after n roundings in a dtype: λ √n u, with u half a unit in the last place.

    The errors of n roundings accumulate like a random walk (https://doi.org/10.1137/18M1226312).

    >>> [round(rounding_bound(dtype, 4), 6) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    [0.0, 0.003906, 0.03125]
    """
    return CONFIDENCE * sqrt(roundings) * torch.finfo(dtype).eps / 2
