"""Torch's products of one row at SmolLM2's shapes, one thread: processor time for all of a step, and the error.

python -m bench.products

Some are deprecated or private; one that is missing or fails on this machine is told as such. Errors are those of outputs
against the float32 product, on normal numbers: they hold what weights lose at these bits too (rounded by row, or in groups
of 32 for int4), and what inputs lose where an operator rounds these.
"""

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from bench.measure import machine
from headwise.kernels.autotuned_linear import PRODUCTS
from headwise.kernels.prepacked_fp16 import OPERATORS
from headwise.ui.tables import make_table

SHAPES = {  # outputs, inputs, how many
    "q, k, v": (960, 576, 30), "o": (576, 576, 30), "gate, up": (3072, 576, 30), "down": (576, 1536, 30),
    "vocabulary": (49152, 576, 1),
}  # fmt: skip
TURNS, GROUP = 5, 32

Candidate = tuple[Callable[[Tensor], Any], Callable[[Tensor, Any], Tensor]]  # laid out, and multiplied


def by_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(1) / 127
    return (weight / scales[:, None]).round().to(torch.int8), scales


def dynamic(weight: Tensor) -> Any:
    codes, scales = by_row(weight)
    zeros = torch.zeros(len(scales), dtype=torch.long)
    return torch.ops.quantized.linear_prepack(
        torch._make_per_channel_quantized_tensor(codes, scales, zeros, 0),  # pyright: ignore
        None,
    )


def int4(weight: Tensor) -> Any:
    groups = weight.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1) / 7
    codes = ((groups / scales[..., None]).round() + 8).clamp(0, 15).to(torch.int32).flatten(1)
    both = torch.stack((scales, torch.zeros_like(scales)), -1).transpose(0, 1).contiguous().bfloat16()
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1), both


def as_is(made: Callable[[Tensor, Tensor, None], Tensor]) -> Candidate:
    return lambda weight: weight, lambda x, weight: made(x, weight, None)


def half(dtype: torch.dtype) -> Candidate:
    return lambda weight: weight.to(dtype), lambda x, weight: F.linear(x.to(dtype), weight)


def int8pack(dtype: torch.dtype) -> Candidate:
    def laid_out(weight: Tensor) -> Any:
        codes, scales = by_row(weight)
        return codes, scales.to(dtype)

    return laid_out, lambda x, form: torch.ops.aten._weight_int8pack_mm(x.to(dtype), *form)


CANDIDATES: dict[str, Candidate] = {
    **{f"float32, {name}": as_is(made) for name, made in PRODUCTS.items()},
    **{f"16-bit weights, {name}": (made, lambda x, form: form(x, None)) for name, made in OPERATORS.items()},
    "float16, F.linear": half(torch.float16),
    "bfloat16, F.linear": half(torch.bfloat16),
    "8-bit weights, int8pack in float32": int8pack(torch.float32),
    "8-bit weights, int8pack in bfloat16": int8pack(torch.bfloat16),
    "8-bit weights and inputs, linear_dynamic": (dynamic, lambda x, form: torch.ops.quantized.linear_dynamic(x, form, False)),
    "4-bit weights, int4pack in bfloat16": (
        int4,
        lambda x, form: torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), form[0], GROUP, form[1]),
    ),
}  # fmt: skip


def measure(candidate: Candidate, weights: list[Tensor], x: Tensor) -> tuple[float, float]:
    """Milliseconds for all weights, the best turn, and the largest relative error."""
    laid_out, multiplied = candidate
    forms = [laid_out(weight) for weight in weights]
    errors, best = [], float("inf")
    for form, weight in zip(forms, weights, strict=True):
        want = x @ weight.T
        errors.append(((multiplied(x, form).float() - want).norm() / want.norm()).item())
    for _ in range(TURNS):
        began = time.thread_time()
        for form in forms:
            multiplied(x, form)
        best = min(best, time.thread_time() - began)
    return 1e3 * best, max(errors)


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    found: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    worst, failed = dict.fromkeys(CANDIDATES, 0.0), dict[str, str]()
    for outputs, inputs, count in SHAPES.values():
        weights = [torch.randn(outputs, inputs) / inputs**0.5 for _ in range(count)]
        for name, candidate in CANDIDATES.items():
            try:
                spent, error = measure(candidate, weights, torch.randn(1, inputs))
            except (AttributeError, RuntimeError, TypeError) as problem:
                failed[name] = str(problem).splitlines()[0][:80]
                continue
            found[name].append(spent)
            worst[name] = max(worst[name], error)
    rows = [[name, sum(found[name]), *found[name], f"{worst[name]:.0e}"] for name in CANDIDATES if name not in failed]
    console = Console(file=sys.stdout, width=140)
    console.print(make_table(f"Milliseconds, {machine()}", ["product", "all", *SHAPES, "error"], rows))
    for name, problem in failed.items():
        console.print(f"{name}: not here ({problem})")


if __name__ == "__main__":
    main()
