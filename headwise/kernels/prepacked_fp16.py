"""Weights laid out anew, at 16 bits, for the quick products of a generation step.

They go through operators of torch's CPU library that not every build has, and that may go away: so a form is tried when it
is made, against plain numbers, and where an operator is missing, fails or says something else the next one is tried. Where
none is left there is no form, and the caller multiplies plainly. A form is a copy: 2 bytes a number.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

PrepackedMatmul = Callable[[Tensor, Tensor | None], Tensor]

# of a row's largest number: what 16-bit floats keep of 8, 4, 3 or 2 bits; 16 bits come back whole
FP16_TOLERANCE = 2**-10


def make_prepacked_matmul(weight: Tensor) -> PrepackedMatmul | None:
    """(out, in) at 16 bits; inputs, sums and outputs are float32."""
    weight_f32 = weight.detach().float().contiguous()
    if weight.device.type != "cpu" or not weight.numel() or weight_f32.abs().max() > torch.finfo(torch.float16).max:
        return None
    weight_fp16 = weight_f32.half().float()
    # tiny numbers have no 16-bit float
    is_close = (weight_fp16 - weight_f32).abs().amax(1) <= FP16_TOLERANCE * weight_f32.abs().amax(1)
    if not is_close.all():
        return None
    ramp = torch.linspace(-1, 1, weight_f32.shape[1])
    probe = torch.stack((ramp, (7 * ramp).cos()))
    expected = probe @ weight_fp16.T
    for prepack in PREPACKERS.values():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it may go away one day, once a process
                prepacked = prepack(weight_f32)
                out = prepacked(probe, None)
        except (AttributeError, RuntimeError, TypeError):
            continue
        if torch.allclose(out, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())):
            return prepacked
    return None


def _fbgemm_matmul(weight_f32: Tensor) -> PrepackedMatmul:
    """Deprecated, and called with a fifth of what the other takes beside the product itself."""
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


# quickest first
PREPACKERS: dict[str, Callable[[Tensor], PrepackedMatmul]] = {
    "fbgemm": _fbgemm_matmul,
    "quantized": _quantized_op_matmul,
}
