"""A cut Llama as llama.cpp's architecture `deci` holds it: heads by layer, groups made even, constants where they fit.

Groups must be even there (a layer's heads are shared out equally over its key heads), so smaller ones are filled up with
heads whose W_O is zero: they write nothing. A layer without heads has no attention at all, and what it wrote on average
goes into the bias of the MLP before it: both are added to the same stream. The first layer keeps one head of zeros, for the
file tells the size of heads by it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.heads import MultiHeadAttention
from headwise.model import Transformer


@dataclass(frozen=True)
class PaddedLayer:
    """One layer: its weights, rows of q and k as they were, and how many heads are nothing but zeros."""

    heads: int
    kv_heads: int
    q: Tensor | None  # (heads · d, D)
    k: Tensor | None
    v: Tensor | None
    o: Tensor | None  # (D, heads · e)
    biases: dict[str, Tensor]  # of q, k, v and o
    zero_heads: int


def pad_head_groups(model: Transformer) -> tuple[list[PaddedLayer], dict[int, Tensor]]:
    """All layers, and by layer what has to be added behind its MLP: the constant of the emptied layer after it."""
    padded, constant_biases = [], {}
    for index, layer in enumerate(model.attention_layers()):
        bias = layer.b_O
        if layer.spec.head_ids:
            padded.append(_pad_layer(layer))
        elif index == 0:
            padded.append(_zero_head_layer(layer, bias))
        else:
            padded.append(PaddedLayer(0, 0, None, None, None, None, {}, 0))
            if bias is not None:
                constant_biases[index - 1] = bias.detach()
    return padded, constant_biases


def _pad_layer(layer: MultiHeadAttention) -> PaddedLayer:
    spec, qkv = layer.spec, layer.qkv
    groups: list[list[int]] = [[] for _ in spec.kv_head_ids]
    for index, group in enumerate(spec.kv_of_head):
        groups[group].append(index)
    group_size = max(map(len, groups))
    indices = [
        index for members in groups for index in (*members, *[-1] * (group_size - len(members)))
    ]  # −1: nothing but zeros
    q, o = qkv.weight("q").detach(), layer.output_projection.head_weights.detach()  # (H, d, D), (H, e, D)
    biases = {}
    if spec.bias:
        biases = {
            projection: bias.detach().flatten() for projection in "kv" if (bias := qkv.bias(projection)) is not None
        }
        q_bias = qkv.bias("q")
        assert q_bias is not None
        biases["q"] = _gather_heads(q_bias.detach(), indices).flatten()
    if layer.b_O is not None:
        biases["o"] = layer.b_O.detach()
    return PaddedLayer(
        len(indices),
        len(groups),
        _gather_heads(q, indices).flatten(0, 1),
        qkv.weight("k").detach().flatten(0, 1),
        qkv.weight("v").detach().flatten(0, 1),
        _gather_heads(o, indices).flatten(0, 1).mT,
        biases,
        indices.count(-1),
    )


def _zero_head_layer(layer: MultiHeadAttention, out_bias: Tensor | None) -> PaddedLayer:
    spec = layer.spec
    rows, width = torch.zeros(spec.head_dim, spec.width), spec.width
    biases = {} if out_bias is None else {"o": out_bias.detach()}
    if spec.bias:
        biases |= {projection: torch.zeros(spec.head_dim) for projection in "qkv"}
    return PaddedLayer(1, 1, rows, rows, rows, torch.zeros(width, spec.value_dim), biases, 1)


def _gather_heads(x: Tensor, indices: list[int]) -> Tensor:
    """Heads in another order, zeros where there is none: (H, …) → (len(indices), …)"""
    padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
    return padded[[index if index >= 0 else len(x) for index in indices]]
