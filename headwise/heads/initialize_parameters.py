"""Initialization of all weights:

    part                              single layer                      layer of a model
    q, k, v                           Xavier uniform per projection     normal, 0.02
    W_O, down projection of the MLP   Xavier uniform                    normal, 0.02 / √(number of residual writes)
    other linear layers               –                                 normal, 0.02
    token, position, type embeddings  –                                 normal, 0.02
    biases                            0                                 0
    norms                             gain 1, bias 0                    gain 1, bias 0
    output gates                      Xavier uniform                    normal, 0.02
    gates                             1                                 1
    sinks                             0                                 0
    position biases                   `Bias.initial_value`              `Bias.initial_value`

The number of residual writes is the number of sub-layers that add to the residual stream, two per block. With this scaling,
the variance of the residual stream stays nearly constant over the layers (GPT-2, Radford et al. 2019). Weights on the meta
device are not initialized.
"""

import math

import torch
from torch import Tensor, nn

from headwise.heads.latent_projection import LatentQKVProjection
from headwise.heads.output_gate import OutputGate
from headwise.heads.projections import OutputProjection, QKVProjection
from headwise.heads.qk_norm import HeadNorm
from headwise.kernels import POSITION_BIASES

STD = 0.02


def initialize(module: nn.Module, *, residual_writes: int | None = None) -> None:
    """Initialize every parameter of a module.

    Args:
        module: The module.
        residual_writes: Number of sub-layers of the model that write to the residual stream. None for a single layer.
    """
    if all(value.is_meta for value in module.parameters()):
        return
    for submodule in module.modules():
        if isinstance(submodule, QKVProjection):
            for projection in "qkv":
                _fill(submodule.weight_by_head(projection), residual_writes is None)
                _fill_constant(submodule.bias_by_head(projection), 0.0)
        elif isinstance(submodule, LatentQKVProjection):
            for name, value in submodule.named_parameters(recurse=False):
                if name.endswith("norm_weight"):
                    _fill_constant(value, 1.0)
                elif name.endswith("bias"):
                    _fill_constant(value, 0.0)
                else:
                    _fill(value, residual_writes is None)
        elif isinstance(submodule, OutputProjection):
            _fill(submodule.weight, residual_writes is None, STD / math.sqrt(residual_writes or 1))
            _fill_constant(submodule.bias, 0.0)
        elif isinstance(submodule, nn.Linear):
            writes_to_residual = getattr(submodule, "writes_to_residual", False)
            _fill(submodule.weight, False, STD / math.sqrt(residual_writes or 1) if writes_to_residual else STD)
            _fill_constant(submodule.bias, 0.0)
        elif isinstance(submodule, nn.Embedding):
            _fill(submodule.weight, False)
        elif isinstance(submodule, OutputGate):
            _fill(submodule.weight, residual_writes is None)
            _fill_constant(submodule.bias, 0.0)
        elif isinstance(submodule, HeadNorm):
            _fill_constant(submodule.weight, 0.0 if submodule.norm.kind == "rms_plus_one" else 1.0)
            _fill_constant(submodule.bias, 0.0)
            if submodule.pruned_weight is not None:
                _fill(submodule.pruned_weight, residual_writes is None)
                _fill_constant(submodule.pruned_bias, 0.0)
        elif isinstance(submodule, nn.LayerNorm | nn.RMSNorm):
            _fill_constant(submodule.weight, 0.0 if getattr(submodule, "weight_offset", 0.0) else 1.0)
            _fill_constant(getattr(submodule, "bias", None), 0.0)
        for name, value in submodule.named_parameters(recurse=False):
            if name == "gate":
                _fill_constant(value, 1.0)
            elif name == "sink":
                _fill_constant(value, 0.0)
            elif name == "position_bias":
                _fill_constant(value, POSITION_BIASES[submodule.spec.position_bias_field].initial_value)  # pyright: ignore


@torch.no_grad()
def _fill(weight: Tensor, xavier: bool, std: float = STD) -> None:
    if weight.numel() == 0:
        return
    if xavier:  # the outputs of a projection with a head axis are the channels of all heads
        outputs, inputs = weight.shape[:-1].numel(), weight.shape[-1]
        bound = math.sqrt(6 / (inputs + outputs))
        weight.uniform_(-bound, bound)
    else:
        weight.normal_(0.0, std)


@torch.no_grad()
def _fill_constant(value: Tensor | None, number: float) -> None:
    if value is not None:
        value.fill_(number)
