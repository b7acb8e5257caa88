"""Matrix-vector products of torch at the shapes of SmolLM2, one thread: CPU time per step, and error.

python -m bench.products

Some operators are deprecated or private; missing or failing ones are listed as such. Errors are relative to the float32
product on normal random numbers. They include the quantization of the weights (per row, or in groups of 32 for int4) and of
the inputs, if the operator quantizes them.
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
from headwise.kernels.matmul_tuner import MATMUL_KERNELS
from headwise.kernels.prepacked_fp16 import PREPACKERS
from headwise.ui.terminal_table import make_table

SHAPES = {  # outputs, inputs, number of matrices
    "q, k, v": (960, 576, 30), "o": (576, 576, 30), "gate, up": (3072, 576, 30), "down": (576, 1536, 30),
    "vocabulary": (49152, 576, 1),
}  # fmt: skip
ROUNDS, GROUP_SIZE = 5, 32

Candidate = tuple[Callable[[Tensor], Any], Callable[[Tensor, Any], Tensor]]  # prepare the weights, multiply


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(1) / 127
    return (weight / scales[:, None]).round().to(torch.int8), scales


def pack_dynamic_int8(weight: Tensor) -> Any:
    quantized, scales = quantize_rows(weight)
    zeros = torch.zeros(len(scales), dtype=torch.long)
    return torch.ops.quantized.linear_prepack(
        torch._make_per_channel_quantized_tensor(quantized, scales, zeros, 0),  # pyright: ignore
        None,
    )


def pack_int4(weight: Tensor) -> Any:
    groups = weight.unflatten(1, (-1, GROUP_SIZE))
    scales = groups.abs().amax(-1) / 7
    quantized = ((groups / scales[..., None]).round() + 8).clamp(0, 15).to(torch.int32).flatten(1)
    scales_and_zeros = torch.stack((scales, torch.zeros_like(scales)), -1).transpose(0, 1).contiguous().bfloat16()
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(quantized, 1), scales_and_zeros


def plain_candidate(linear: Callable[[Tensor, Tensor, None], Tensor]) -> Candidate:
    return lambda weight: weight, lambda x, weight: linear(x, weight, None)


def half_candidate(dtype: torch.dtype) -> Candidate:
    return lambda weight: weight.to(dtype), lambda x, weight: F.linear(x.to(dtype), weight)


def int8_candidate(dtype: torch.dtype) -> Candidate:
    def pack(weight: Tensor) -> Any:
        quantized, scales = quantize_rows(weight)
        return quantized, scales.to(dtype)

    return pack, lambda x, packed: torch.ops.aten._weight_int8pack_mm(x.to(dtype), *packed)


CANDIDATES: dict[str, Candidate] = {
    **{f"float32, {name}": plain_candidate(operator) for name, operator in MATMUL_KERNELS.items()},
    **{f"16-bit weights, {name}": (operator, lambda x, form: form(x, None)) for name, operator in PREPACKERS.items()},
    "float16, F.linear": half_candidate(torch.float16),
    "bfloat16, F.linear": half_candidate(torch.bfloat16),
    "8-bit weights, int8pack in float32": int8_candidate(torch.float32),
    "8-bit weights, int8pack in bfloat16": int8_candidate(torch.bfloat16),
    "8-bit weights and inputs, linear_dynamic": (
        pack_dynamic_int8, lambda x, form: torch.ops.quantized.linear_dynamic(x, form, False),
    ),
    "4-bit weights, int4pack in bfloat16": (
        pack_int4,
        lambda x, form: torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), form[0], GROUP_SIZE, form[1]),
    ),
}  # fmt: skip


def measure_candidate(candidate: Candidate, weights: list[Tensor], x: Tensor) -> tuple[float, float]:
    """Return the best milliseconds for all weights, and the largest relative error."""
    pack, multiply = candidate
    packed_weights = [pack(weight) for weight in weights]
    errors, best = [], float("inf")
    for packed, weight in zip(packed_weights, weights, strict=True):
        expected = x @ weight.T
        errors.append(((multiply(x, packed).float() - expected).norm() / expected.norm()).item())
    for _ in range(ROUNDS):
        began = time.thread_time()
        for packed in packed_weights:
            multiply(x, packed)
        best = min(best, time.thread_time() - began)
    return 1e3 * best, max(errors)


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    times: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    worst, failed = dict.fromkeys(CANDIDATES, 0.0), dict[str, str]()
    for outputs, inputs, count in SHAPES.values():
        weights = [torch.randn(outputs, inputs) / inputs**0.5 for _ in range(count)]
        for name, candidate in CANDIDATES.items():
            try:
                spent, error = measure_candidate(candidate, weights, torch.randn(1, inputs))
            except (AttributeError, RuntimeError, TypeError) as problem:
                failed[name] = str(problem).splitlines()[0][:80]
                continue
            times[name].append(spent)
            worst[name] = max(worst[name], error)
    rows = [[name, sum(times[name]), *times[name], f"{worst[name]:.0e}"] for name in CANDIDATES if name not in failed]
    console = Console(file=sys.stdout, width=140)
    console.print(make_table(f"Milliseconds, {machine()}", ["product", "all", *SHAPES, "error"], rows))
    for name, problem in failed.items():
        console.print(f"{name}: not available ({problem})")


if __name__ == "__main__":
    main()
