"""Quantize the weights of a native state dict as its spec says."""

from torch import Tensor

from headwise.heads.quantized_layers import QuantizedWeight
from headwise.model.transformer import Transformer
from headwise.spec import ModelSpec


def quantize_state_dict(spec: ModelSpec, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with packed buffers in place of the weights that have weight rules.

    Args:
        spec: Spec with weight rules.
        state: Weights by name. Projections are split and have a head axis.
    """
    state = dict(state)
    for name, module in Transformer(spec, device="meta").named_modules():
        if isinstance(module, QuantizedWeight):
            weight = state.pop(f"{name.removesuffix('.quantized')}.weight")
            buffers = module.quantize_to_buffers(_as_matrices(name, weight))
            state |= {f"{name}.{buffer}": tensor for buffer, tensor in buffers.items()}
    return state


def _as_matrices(name: str, weight: Tensor) -> Tensor:
    """Return a weight as the matrices that are quantized separately, (units, rows, inputs): one per head, or one."""
    if name.endswith(".quantized"):
        return weight.transpose(0, 1)  # W_O, (D, H, e): quantized along the channels of each head
    return weight if ".qkv." in name else weight[None]
