"""A copy of a model whose attention weights are random and whose other weights are as trained: a control for profiles."""

import copy

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.model.protocols import ModelProtocol


def control_model(model: ModelProtocol, control: str | None, seed: int = 0) -> ModelProtocol:
    """Return the model that a control profiles; the model itself if the control changes the texts, or is None."""
    if control == "random-init":
        return model.untrained(seed)
    return randomize_attention(model, seed) if control == "random-attention" else model


@torch.no_grad()
def randomize_attention(model: ModelProtocol, seed: int = 0) -> ModelProtocol:
    """Copy a model and draw W_Q, W_K, W_V, W_O and the biases of q, k and v of every head again.

    The new weights are normal with mean 0. Each head's weights keep their root mean square, and nothing else. Embeddings,
    MLPs, norms, output biases, attention sinks and biases by distance stay as trained.

    Args:
        model: One of ours or an attached one. It stays as it is.
        seed: Seed of the draw.

    Returns:
        The copy.
    """
    if model.is_sharded:
        raise HeadwiseError("random attention: this process holds a part of the model. Load it in one process.")
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
            if not torch.equal(view(), new_weight):  # a copy was filled: the weights are quantized, or have adapters
                raise HeadwiseError(
                    f"random attention: weights of layer {layer.hook_point.address} cannot be set. Dequantize them, or merge "
                    "adapters."
                )
    return twin


def _redrawn(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers with the root mean square of each head: (heads, …) → the same shape."""
    rms = weight.float().square().flatten(1).mean(1).sqrt().view(-1, *[1] * (weight.ndim - 1)).cpu()
    return (torch.randn(weight.shape, generator=generator) * rms).to(weight)
