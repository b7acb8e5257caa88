"""Precision of statistics: sums, norms and tolerances of models in half precision."""

from math import sqrt

import torch
from torch import Tensor

CONFIDENCE = 4.0  # standard deviations; a bound on the sum of random rounding errors fails once in 16,000 cases


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` itself in float32 and float64, and a float32 copy of half-precision values.

    Squares of float16 overflow above 255, and bfloat16 sums keep 8 bits, so statistics are never computed in half precision.

    >>> [at_least_float32(torch.ones(1, dtype=kind)).dtype for kind in (torch.float16, torch.float64)]
    [torch.float32, torch.float64]
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rounding_bound(dtype: torch.dtype, roundings: int) -> float:
    """Bound the relative error that so many roundings in a dtype leave: λ √n u, with u half a unit in the last place.

    The errors of n roundings add up like a random walk (https://doi.org/10.1137/18M1226312).

    >>> [round(rounding_bound(dtype, 4), 6) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    [0.0, 0.003906, 0.03125]
    """
    return CONFIDENCE * sqrt(roundings) * torch.finfo(dtype).eps / 2
