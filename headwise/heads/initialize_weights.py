"""How weights begin. One place for all of them:

    part                              a layer alone                     inside a model
    q, k, v                           Xavier uniform per projection     normal, 0.02
    W_O, the MLP's way down           Xavier uniform                    normal, 0.02 / √(number of writes)
    other linear layers               –                                 normal, 0.02
    token, position, type tables      –                                 normal, 0.02
    biases                            0                                 0
    norms                             weight 1, bias 0                  weight 1, bias 0
    gates                             1                                 1
    sinks                             0                                 0
    biases by distance                0, or as their class says         the same

"Number of writes" is how many sub-layers add to the stream, two a block: with that, the stream's spread at the end of a
deep stack stays near that at its start (GPT-2, Radford et al. 2019). Nothing happens on the meta device.
"""

import math

import torch
from torch import Tensor, nn

from headwise.heads.projections import OutputProjection, QKVProjection
from headwise.kernels import POSITION_BIASES

STD = 0.02


def initialize(module: nn.Module, *, residual_writes: int | None = None) -> None:
    """Fill every parameter below a module. `residual_writes` is the number of writes in the model; None for a layer alone."""
    if all(value.is_meta for value in module.parameters()):
        return
    for submodule in module.modules():
        if isinstance(submodule, QKVProjection):
            for projection in "qkv":
                _fill(submodule.weight_by_head(projection), residual_writes is None)
                _constant(submodule.bias_by_head(projection), 0.0)
        elif isinstance(submodule, OutputProjection):
            _fill(submodule.weight, residual_writes is None, STD / math.sqrt(residual_writes or 1))
            _constant(submodule.bias, 0.0)
        elif isinstance(submodule, nn.Linear):
            writes_to_residual = getattr(submodule, "writes_to_residual", False)
            _fill(submodule.weight, False, STD / math.sqrt(residual_writes or 1) if writes_to_residual else STD)
            _constant(submodule.bias, 0.0)
        elif isinstance(submodule, nn.Embedding):
            _fill(submodule.weight, False)
        elif isinstance(submodule, nn.LayerNorm | nn.RMSNorm):
            _constant(submodule.weight, 1.0)
            _constant(getattr(submodule, "bias", None), 0.0)
        for name, value in submodule.named_parameters(recurse=False):
            if name == "gate":
                _constant(value, 1.0)
            elif name == "sink":
                _constant(value, 0.0)
            elif name == "position_bias":
                _constant(value, POSITION_BIASES[submodule.spec.position_bias_field].initial_value)  # pyright: ignore


@torch.no_grad()
def _fill(weight: Tensor, xavier: bool, std: float = STD) -> None:
    if weight.numel() == 0:
        return
    if xavier:  # a projection with a head axis counts all its heads as outputs
        outputs, inputs = weight.shape[:-1].numel(), weight.shape[-1]
        bound = math.sqrt(6 / (inputs + outputs))
        weight.uniform_(-bound, bound)
    else:
        weight.normal_(0.0, std)


@torch.no_grad()
def _constant(value: Tensor | None, number: float) -> None:
    if value is not None:
        value.fill_(number)
