"""x Wᵀ + b, with a quicker route for the few rows of a generation step.

A step reads every weight once, so its time is memory bandwidth. For one row torch's own product comes near it; for 4 to 16
rows and a large weight oneDNN's does better (bench/generate.py; docs/log.md has the figures). That operator is private to
torch, so it is used only where it is there, and only without gradients.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS = range(4, 17)
LARGE = 2**20  # entries of a weight that leaves the cache between two steps


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(…, in), (out, in), (out,) → (…, out)"""
    if _few_rows(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _few_rows(x: Tensor, weight: Tensor) -> bool:
    return (
        weight.numel() >= LARGE
        and type(weight) in (Tensor, nn.Parameter)  # not a tensor that is spread over processes
        and x.numel() // max(1, x.shape[-1]) in FEW_ROWS
        and not torch.is_grad_enabled()
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and _has_onednn()
    )


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class Linear(nn.Linear):
    """nn.Linear by that route. Its weights begin empty: `heads.init` fills them, or a file does."""

    def reset_parameters(self) -> None:
        """Nothing: see above."""

    def forward(self, input: Tensor) -> Tensor:
        """(…, in) → (…, out)"""
        return linear(input, self.weight, self.bias)
