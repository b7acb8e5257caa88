"""Check of quantized heads of one architecture: dequantize and multiply, with the values written into the weights by hand."""

from typing import Any

import torch
from torch import Tensor

import headwise as hw
from bench.tried_with import CheckFailed, check_same, outputs
from headwise.kernels.quantization import fake_quantize

BITS = 4


def check_quantize(model: Any, part: Any, inputs: dict[str, Tensor]) -> None:
    """Compare outputs with quantized heads with those of rounded weights, and the outputs afterwards with those before."""
    before = outputs(model, inputs)
    with hw.attach(part) as attached:
        with hw.quantized(attached, {"*": BITS}):
            actual = outputs(model, inputs)
        restored = outputs(model, inputs)
        weights = {name: weight.detach().clone() for name, weight in part.named_parameters()}
        try:
            with torch.no_grad():
                for head in attached.heads:
                    for matrix in ("W_Q", "W_K", "W_V", "W_O"):
                        value = getattr(head, matrix)  # (D, d), a live view; W_O (d, D)
                        value.copy_(fake_quantize(value.mT.contiguous(), BITS).mT)
            expected = outputs(model, inputs)
        finally:
            with torch.no_grad():
                for name, weight in part.named_parameters():
                    weight.copy_(weights[name])
    if any(not torch.equal(after, other) for after, other in zip(restored, before, strict=True)):
        raise CheckFailed("outputs after quantized heads were restored differ from those before")
    for number, other in zip(actual, expected, strict=True):
        check_same(number, other, "quantized heads beside rounded weights")
