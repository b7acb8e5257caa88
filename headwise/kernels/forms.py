"""Weights laid out anew, at 16 bits, for the quick products of a generation step.

They go through an operator of torch's CPU library that not every build has, and that may go away: so a form is tried when it
is made, against plain numbers, and where the operator is missing, fails or says something else there is none, and the caller
multiplies plainly. A form is a copy: 2 bytes a number.
"""

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
    try:
        ops = torch.ops.quantized
        form, multiply = ops.linear_prepack_fp16(plain, None), ops.linear_dynamic_fp16.default
        back = ops.linear_unpack_fp16(form)[0]
        trial = torch.linspace(-1, 1, plain.shape[1])[None]
        made = multiply(trial, form)
    except (AttributeError, RuntimeError):
        return None
    near = (back - plain).abs().amax(1) <= HALF_TOLERANCE * plain.abs().amax(1)  # tiny numbers have no 16-bit float
    if not near.all() or not torch.allclose(made, trial @ back.T, rtol=1e-4, atol=1e-4 * float(made.abs().max())):
        return None

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        made = multiply(x, form)
        return made if bias is None else made + bias

    return product
