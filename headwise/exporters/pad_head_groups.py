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
class Filled:
    """One layer: its weights, rows of q and k as they were, and how many heads are nothing but zeros."""

    heads: int
    kv_heads: int
    q: Tensor | None  # (heads · d, D)
    k: Tensor | None
    v: Tensor | None
    o: Tensor | None  # (D, heads · e)
    biases: dict[str, Tensor]  # of q, k, v and o
    zeros: int


def filled_layers(model: Transformer) -> tuple[list[Filled], dict[int, Tensor]]:
    """All layers, and by layer what has to be added behind its MLP: the constant of the emptied layer after it."""
    made, behind = [], {}
    for number, layer in enumerate(model.attention_layers()):
        constant = layer.b_O
        if layer.spec.head_ids:
            made.append(_filled(layer))
        elif number == 0:
            made.append(_one_of_zeros(layer, constant))
        else:
            made.append(Filled(0, 0, None, None, None, None, {}, 0))
            if constant is not None:
                behind[number - 1] = constant.detach()
    return made, behind


def _filled(layer: MultiHeadAttention) -> Filled:
    spec, read = layer.spec, layer.read
    groups: list[list[int]] = [[] for _ in spec.kv_ids]
    for place, group in enumerate(spec.kv_of_head):
        groups[group].append(place)
    size = max(map(len, groups))
    places = [place for some in groups for place in (*some, *[-1] * (size - len(some)))]  # −1: nothing but zeros
    q, o = read.weight("q").detach(), layer.write.slices.detach()  # (H, d, D), (H, e, D)
    biases = {}
    if spec.bias:
        biases = {letter: bias.detach().flatten() for letter in "kv" if (bias := read.bias(letter)) is not None}
        own = read.bias("q")
        assert own is not None
        biases["q"] = _taken(own.detach(), places).flatten()
    if layer.b_O is not None:
        biases["o"] = layer.b_O.detach()
    return Filled(
        len(places),
        len(groups),
        _taken(q, places).flatten(0, 1),
        read.weight("k").detach().flatten(0, 1),
        read.weight("v").detach().flatten(0, 1),
        _taken(o, places).flatten(0, 1).mT,
        biases,
        places.count(-1),
    )


def _one_of_zeros(layer: MultiHeadAttention, constant: Tensor | None) -> Filled:
    spec = layer.spec
    rows, width = torch.zeros(spec.head_dim, spec.width), spec.width
    biases = {} if constant is None else {"o": constant.detach()}
    if spec.bias:
        biases |= {letter: torch.zeros(spec.head_dim) for letter in "qkv"}
    return Filled(1, 1, rows, rows, rows, torch.zeros(width, spec.value_dim), biases, 1)


def _taken(x: Tensor, places: list[int]) -> Tensor:
    """Heads in another order, zeros where there is none: (H, …) → (len(places), …)"""
    with_none = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
    return with_none[[place if place >= 0 else len(x) for place in places]]
