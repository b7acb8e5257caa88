"""Copy of a model with random attention weights and all other weights as trained, as a control for profiles."""

import copy

import torch
from torch import Tensor

from headwise.errors import UnsupportedModelError
from headwise.model.protocols import ModelProtocol


def control_model(model: ModelProtocol, control: str | None, seed: int = 0) -> ModelProtocol:
    """Return the model that a control profiles. It is the model itself if the control is None or changes only the texts."""
    if control == "random-init":
        return model.untrained(seed)
    return randomize_attention(model, seed) if control == "random-attention" else model


@torch.no_grad()
def randomize_attention(model: ModelProtocol, seed: int = 0) -> ModelProtocol:
    """Copy a model and replace W_Q, W_K, W_V, W_O and the biases of q, k and v of every head by random weights.

    The new weights are normal with mean 0 and the root mean square of the original weights of each head. Embeddings, MLPs,
    norms, output biases, attention sinks and position biases stay as trained.

    Args:
        model: A native or attached model. It stays unchanged.
        seed: Seed of the random weights.

    Returns:
        The copy.
    """
    if model.is_sharded:
        raise UnsupportedModelError(
            "random attention: not supported for sharded models, because this process holds only a part of the model. "
            "Load the model in one process."
        )
    twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for layer in twin.attention_layers():
        if not layer.hook_point.head_ids:
            continue
        views = [lambda letter=letter, layer=layer: layer.qkv.weight_by_head(letter) for letter in "qkv"]
        views += [lambda letter=letter, layer=layer: layer.qkv.bias_by_head(letter) for letter in "qkv"]
        for view in (*views, lambda layer=layer: layer.hook_point.W_O):
            weight = view()
            if weight is None:  # no bias
                continue
            new_weight = _redrawn(weight, generator)
            weight.copy_(new_weight)
            if not torch.equal(view(), new_weight):  # the view is a copy: weights are quantized or have adapters
                raise UnsupportedModelError(
                    f"random attention: weights of layer {layer.hook_point.address} cannot be set, because they are "
                    "quantized or have adapters. Dequantize them, or merge the adapters."
                )
    return twin


def _redrawn(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal random numbers with the shape and the root mean square of the weights of each head, (heads, …)."""
    rms = weight.float().square().flatten(1).mean(1).sqrt().view(-1, *[1] * (weight.ndim - 1)).cpu()
    return (torch.randn(weight.shape, generator=generator, device="cpu", dtype=torch.float32) * rms).to(weight)
