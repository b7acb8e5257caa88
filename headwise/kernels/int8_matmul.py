"""Products of inputs and weights that are both 8-bit codes.

`int8_matmul`, one scale per row of inputs and weights, exact integer sums:

x is quantized row by row as `kernels.quantization.quantize` does it: x ≈ s · a with integers a from −127 to 127. With a
weight W ≈ t · b, one t per row of W, the product is s · t · Σ a b. The sum is exact, so the result equals the product of the
dequantized numbers up to the rounding of a few multiplications. torch has an operator for the sum (`torch._int_mm`), which
reads a quarter of the bytes of float32 weights. It is private, so `is_int8_matmul_exact` compares it with known sums once.

`make_dynamic_int8_matmul`, one scale and one offset for an input of one row, in one operator: faster, but its codes of x are
not those of `quantize`, and weights get one scale per row, whatever they were quantized with.
"""

import warnings
from functools import lru_cache

import torch
from torch import Tensor

from headwise.kernels.prepacked_fp16 import PrepackedMatmul
from headwise.kernels.quantization import quantize

MAX_CODE = 127
SMALLEST_STEP = 1e-30  # in place of 0 for rows of zeros


def int8_matmul(x: Tensor, codes: Tensor, steps: Tensor, bias: Tensor | None) -> Tensor:
    """Quantize x row by row and multiply: (…, in), codes (out, in), their steps (out,), (out,) → (…, out)."""
    rows = x.reshape(-1, x.shape[-1])  # (R, in)
    x_steps = torch.linalg.vector_norm(rows, torch.inf, -1, True).div_(MAX_CODE).clamp_(min=SMALLEST_STEP)  # (R, 1)
    x_codes = (rows / x_steps).round_().to(torch.int8)
    sums = torch._int_mm(x_codes, codes.t())  # pyright: ignore[reportPrivateImportUsage]
    out = sums.float().mul_(steps).mul_(x_steps)  # (R, out)
    out = out if bias is None else out.add_(bias)
    return out.view(*x.shape[:-1], -1)


def make_int8_matmul(codes: Tensor, scales: Tensor) -> PrepackedMatmul | None:
    """Return the product with codes (out, in) and scales (out,), or None if torch or the CPU does not support it."""
    if (
        codes.shape[1] < 2  # torch 2.13 multiplies a single column of codes with wrong strides
        or codes.device.type != "cpu"
        or not codes.numel()
        or torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX")
    ):
        return None
    steps = scales / MAX_CODE
    return (lambda x, bias: int8_matmul(x, codes, steps, bias)) if is_int8_matmul_exact() else None


@lru_cache
def is_int8_matmul_exact() -> bool:
    """Return True if torch multiplies 8-bit codes exactly. Some CPUs add them in 16 bits, which can overflow."""
    generator = torch.Generator().manual_seed(0)
    for rows, inputs, outputs in ((1, 64, 96), (3, 37, 51), (16, 200, 5)):
        x = torch.randint(-MAX_CODE, MAX_CODE + 1, (rows, inputs), generator=generator, device="cpu").to(torch.int8)
        weight = torch.randint(-MAX_CODE, MAX_CODE + 1, (outputs, inputs), generator=generator, device="cpu").to(
            torch.int8
        )
        x[0], weight[0] = MAX_CODE, MAX_CODE  # the largest sum
        try:
            sums = torch._int_mm(x, weight.t())  # pyright: ignore[reportPrivateImportUsage]
        except (AttributeError, RuntimeError):
            return False
        if not torch.equal(sums.double(), x.double() @ weight.double().t()):
            return False
    return True


def make_dynamic_int8_matmul(weight: Tensor) -> PrepackedMatmul | None:
    """Return the product of an input of one row, (…, in), with a weight, (out, in), both as 8-bit codes. None if unsupported.

    With m and M as the smallest and the largest number of x and of 0, x has codes of step (M − m) / 255. Row i of the weight
    has codes of step max|W_i| / 127.
    """
    if weight.device.type != "cpu" or not weight.numel() or not is_dynamic_int8_matmul_exact():
        return None
    codes, scales = quantize(weight, 8, weight.shape[1])
    return _pack_dynamic(codes, scales[:, 0] / MAX_CODE)


def _pack_dynamic(codes: Tensor, steps: Tensor) -> PrepackedMatmul:
    """Pack codes, (out, in), and their steps, (out,)."""
    offsets = torch.zeros(len(steps), dtype=torch.long, device="cpu")
    steps = steps.double().clamp(min=SMALLEST_STEP)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that quantized tensors are deprecated
        make_tensor = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateImportUsage]
        quantized = make_tensor(codes, steps, offsets, 0)
        packed, multiply = (
            torch.ops.quantized.linear_prepack(quantized, None),
            torch.ops.quantized.linear_dynamic.default,
        )

    def matmul(x: Tensor, bias: Tensor | None) -> Tensor:
        out = multiply(x, packed)
        return out if bias is None else out + bias

    return matmul


@lru_cache
def is_dynamic_int8_matmul_exact() -> bool:
    """Return True if torch has the product and sums codes without overflow. Some CPUs add them in 16 bits."""
    for inputs, outputs in ((64, 96), (37, 51), (2, 5)):
        codes = torch.full((outputs, inputs), MAX_CODE, dtype=torch.int8, device="cpu")
        codes[::2] = -MAX_CODE
        x = torch.arange(255, 255 - inputs, -1, device="cpu", dtype=torch.float32)[None]  # codes with a step of 1
        try:
            out = _pack_dynamic(codes, torch.ones(outputs, device="cpu"))(x, None)
        except (AttributeError, RuntimeError):
            return False
        want = x.double() @ codes.double().t()
        if not ((out - want).abs() <= 1e-5 * want.abs()).all():
            return False
    return True
