"""Weights prepacked as 16-bit floats for fast matrix products in decode steps on CPUs.

Prepacking uses CPU operators of torch that are not part of every build and may be removed. So each operator is checked
against a plain product when a weight is packed. If an operator is missing, fails or returns a different result, the next
one is tried. If all fail, the caller uses the plain product. A packed weight is a copy with 2 bytes per number.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

PrepackedMatmul = Callable[[Tensor, Tensor | None], Tensor]

# Largest error of a 16-bit float, relative to the largest number of its row. Quantized weights stay within it.
FP16_TOLERANCE = 2**-10


def make_prepacked_matmul(weight: Tensor) -> PrepackedMatmul | None:
    """Prepack a weight, (out, in), as 16-bit floats. Return a product with float32 inputs, sums and outputs, or None."""
    weight_f32 = weight.detach().float().contiguous()
    if weight.device.type != "cpu" or not weight.numel() or weight_f32.abs().max() > torch.finfo(torch.float16).max:
        return None
    weight_fp16 = weight_f32.half().float()
    # very small numbers cannot be represented as 16-bit floats
    is_close = (weight_fp16 - weight_f32).abs().amax(1) <= FP16_TOLERANCE * weight_f32.abs().amax(1)
    if not is_close.all():
        return None
    ramp = torch.linspace(-1, 1, weight_f32.shape[1], dtype=torch.float32)
    probe = torch.stack((ramp, (7 * ramp).cos()))
    expected = probe @ weight_fp16.T
    for prepack in PREPACKERS.values():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns once per process that the operator is deprecated
                prepacked = prepack(weight_f32)
                out = prepacked(probe, None)
        except (AttributeError, RuntimeError, TypeError):
            continue
        if torch.allclose(out, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())):
            return prepacked
    return None


def _fbgemm_matmul(weight_f32: Tensor) -> PrepackedMatmul:
    """Pack with fbgemm. The operator is deprecated, but its call overhead is a fifth of the other operator's."""
    packed, multiply = torch.fbgemm_pack_gemm_matrix_fp16(weight_f32), torch.fbgemm_linear_fp16_weight_fp32_activation
    return lambda x, bias: multiply(x, packed, bias)


def _quantized_op_matmul(weight_f32: Tensor) -> PrepackedMatmul:
    packed, multiply = (
        torch.ops.quantized.linear_prepack_fp16(weight_f32, None),
        torch.ops.quantized.linear_dynamic_fp16.default,
    )

    def matmul(x: Tensor, bias: Tensor | None) -> Tensor:
        out = multiply(x, packed)
        return out if bias is None else out + bias

    return matmul


# fastest first
PREPACKERS: dict[str, Callable[[Tensor], PrepackedMatmul]] = {
    "fbgemm": _fbgemm_matmul,
    "quantized": _quantized_op_matmul,
}
