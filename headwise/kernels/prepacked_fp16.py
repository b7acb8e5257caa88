"""Weights laid out anew, at 16 bits, for the quick products of a generation step.

They go through operators of torch's CPU library that not every build has, and that may go away: so a form is tried when it
is made, against plain numbers, and where an operator is missing, fails or says something else the next one is tried. Where
none is left there is no form, and the caller multiplies plainly. A form is a copy: 2 bytes a number.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

Form = Callable[[Tensor, Tensor | None], Tensor]

HALF_TOLERANCE = (
    2**-10
)  # of a row's largest number: what 16-bit floats keep of 8, 4, 3 or 2 bits; 16 bits come back whole


def half_form(weight: Tensor) -> Form | None:
    """(out, in) at 16 bits; inputs, sums and outputs are float32."""
    plain = weight.detach().float().contiguous()
    if weight.device.type != "cpu" or not weight.numel() or plain.abs().max() > torch.finfo(torch.float16).max:
        return None
    kept = plain.half().float()
    near = (kept - plain).abs().amax(1) <= HALF_TOLERANCE * plain.abs().amax(1)  # tiny numbers have no 16-bit float
    if not near.all():
        return None
    ramp = torch.linspace(-1, 1, plain.shape[1])
    trial = torch.stack((ramp, (7 * ramp).cos()))
    want = trial @ kept.T
    for make in OPERATORS.values():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it may go away one day, once a process
                form = make(plain)
                made = form(trial, None)
        except (AttributeError, RuntimeError, TypeError):
            continue
        if torch.allclose(made, want, rtol=1e-4, atol=1e-4 * float(want.abs().max())):
            return form
    return None


def _by_matrix(plain: Tensor) -> Form:
    """Deprecated, and called with a fifth of what the other takes beside the product itself."""
    packed, multiply = torch.fbgemm_pack_gemm_matrix_fp16(plain), torch.fbgemm_linear_fp16_weight_fp32_activation
    return lambda x, bias: multiply(x, packed, bias)


def _by_parameters(plain: Tensor) -> Form:
    packed, multiply = (
        torch.ops.quantized.linear_prepack_fp16(plain, None),
        torch.ops.quantized.linear_dynamic_fp16.default,
    )

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        made = multiply(x, packed)
        return made if bias is None else made + bias

    return product


OPERATORS: dict[str, Callable[[Tensor], Form]] = {"fbgemm": _by_matrix, "quantized": _by_parameters}  # quickest first
