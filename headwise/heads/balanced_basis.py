"""The same heads in another basis: what they compute stays, what rounding does to them changes.

Between W_V and W_O any invertible G can stand, W_V G and G⁻¹ W_O, and the head is the same. Rounding is not: it depends on
the basis a head happens to have. So there is one basis to come to, the balanced one: of the product's singular values each
factor takes the square root, W_V = U√Σ and W_O = √ΣVᵀ. Between W_Q and W_K only that can stand which positions leave alone:

    no rotary positions        any invertible G: balanced by singular values too
    rotary positions           in each pair of channels that turn together a turn and a stretch, which commute with turning:
                               stretched until W_Q and W_K are equally long there, turned to their principal axes
    channels that do not turn  any invertible G among them

Heads that share a key head share its basis. All is computed in float64.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from headwise.errors import HeadwiseError, close_names
from headwise.heads.head import HasHeads
from headwise.spec import AttentionSpec, Rotary

Basis = Literal["given", "balanced", "random"]
BASES = ("given", "balanced", "random")


@dataclass(frozen=True, eq=False)
class Matrices:
    """The weights of a layer's heads, with a head axis; o is W_O as each head writes with it."""

    q: Tensor  # (H, d, D)
    k: Tensor  # (K, d, D)
    v: Tensor  # (K, e, D)
    o: Tensor  # (H, e, D)
    b_q: Tensor | None = None  # (H, d)
    b_k: Tensor | None = None  # (K, d)
    b_v: Tensor | None = None  # (K, e)

    @staticmethod
    def of(layer: HasHeads) -> "Matrices":
        """Those of a layer, ours or not: live where the layer's own views are."""
        read = layer.read
        q, k, v = (read.weight(letter) for letter in "qkv")
        b_q, b_k, b_v = (read.bias(letter) for letter in "qkv")
        return Matrices(q, k, v, layer.write.slices, b_q, b_k, b_v)


def check_basis(basis: str) -> None:
    """Refuse a basis nobody knows."""
    if basis not in BASES:
        raise HeadwiseError(f"there is no basis {basis!r}; {close_names(str(basis), BASES)}")


def in_basis(matrices: Matrices, spec: AttentionSpec, basis: Basis, seed: int = 0) -> Matrices:
    """The same heads as they are given, balanced, or in a basis drawn by chance; a copy."""
    if basis == "given":
        return replace(matrices, **{name: value.clone() for name, value in vars(matrices).items() if value is not None})
    return balanced(matrices, spec) if basis == "balanced" else shuffled(matrices, spec, seed)


@torch.no_grad()
def balanced(matrices: Matrices, spec: AttentionSpec) -> Matrices:
    """The same heads in their balanced basis."""
    made = in_basis(matrices, spec, "given")
    for key in range(len(spec.kv_ids)):
        heads = [head for head, its in enumerate(spec.kv_of_head) if its == key]
        _balance_vo(made, heads, key)
        _balance_qk(made, heads, key, spec.rotary)
    return made


@torch.no_grad()
def shuffled(matrices: Matrices, spec: AttentionSpec, seed: int = 0) -> Matrices:
    """The same heads in a basis drawn by chance among those they may have, by turns alone: to see what a basis matters."""
    draws = torch.Generator().manual_seed(seed)
    made = in_basis(matrices, spec, "given")
    for key in range(len(spec.kv_ids)):
        heads = [head for head, its in enumerate(spec.kv_of_head) if its == key]
        turn = _drawn_turn(made.v.shape[1], draws)
        _put(made.v, made.b_v, [key], _with_bias(made.v, made.b_v, [key]) @ turn)
        made.o[heads] = (turn.mT @ made.o[heads].double()).to(made.o)
        turn = torch.zeros(made.q.shape[1], made.q.shape[1], dtype=torch.float64)
        turning, still = channel_pairs(len(turn), spec.rotary)
        for some in [*turning, *([still] if still else [])]:
            turn[torch.tensor(some)[:, None], some] = _drawn_turn(len(some), draws)
        _put(made.q, made.b_q, heads, _with_bias(made.q, made.b_q, heads) @ turn)
        _put(made.k, made.b_k, [key], _with_bias(made.k, made.b_k, [key]) @ turn)
    return made


def _drawn_turn(size: int, draws: torch.Generator) -> Tensor:
    """A rotation, no mirror, (size, size), each as likely as any other."""
    turn, upper = torch.linalg.qr(torch.randn(size, size, generator=draws, dtype=torch.float64))
    turn = turn * upper.diagonal().sign()
    turn[:, 0] *= torch.linalg.det(turn).sign()
    return turn


def _balance_vo(made: Matrices, heads: list[int], key: int) -> None:
    left = _with_bias(made.v, made.b_v, [key])  # (D + 1, e)
    right = made.o[heads].transpose(0, 1).flatten(1).double()  # (e, n·D)
    left, right = balanced_pair(left, right)
    _put(made.v, made.b_v, [key], left)
    made.o[heads] = right.unflatten(1, (len(heads), -1)).transpose(0, 1).to(made.o)


def _balance_qk(made: Matrices, heads: list[int], key: int, rotary: Rotary | None) -> None:
    queries, keys = (
        _with_bias(made.q, made.b_q, heads),
        _with_bias(made.k, made.b_k, [key]),
    )  # (n·(D + 1), d), (D + 1, d)
    turning, still = channel_pairs(queries.shape[1], rotary)
    for pair in turning:
        queries[:, pair], keys[:, pair] = turned_pair(queries[:, pair], keys[:, pair])
    if still:
        one, other = balanced_pair(queries[:, still], keys[:, still].mT)
        queries[:, still], keys[:, still] = one, other.mT
    _put(made.q, made.b_q, heads, queries)
    _put(made.k, made.b_k, [key], keys)


def channel_pairs(channels: int, rotary: Rotary | None) -> tuple[list[list[int]], list[int]]:
    """The pairs of channels that turn together, and the channels that do not turn.

    >>> channel_pairs(6, Rotary(dims=4)), channel_pairs(4, Rotary(layout="interleaved"))
    (([[0, 2], [1, 3]], [4, 5]), ([[0, 1], [2, 3]], []))
    """
    if rotary is None:
        return [], list(range(channels))
    dims = rotary.dims or channels
    half = dims // 2
    pairs = [[i, i + half] if rotary.layout == "half" else [2 * i, 2 * i + 1] for i in range(half)]
    return pairs, list(range(dims, channels))


def balanced_pair(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """(a, d) and (d, b) with the same product, each with the square roots of its singular values, the largest first."""
    d = left.shape[1]
    (q_left, r_left), (q_right, r_right) = torch.linalg.qr(left), torch.linalg.qr(right.mT)
    u, sizes, v = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    one, other = q_left @ u, v @ q_right.mT  # (a, r), (r, b)
    signs = one.gather(
        0, one.abs().argmax(0, keepdim=True)
    ).sign()  # (1, r); which of two signs is then no matter of chance
    signs = torch.where(signs == 0, 1.0, signs)
    roots, more = sizes.sqrt(), d - len(sizes)  # where there are fewer than d the others are 0
    one, other = one * signs * roots, (other * signs.mT) * roots[:, None]
    return torch.nn.functional.pad(one, (0, more)), torch.nn.functional.pad(other, (0, 0, 0, more))


def turned_pair(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Two channels that turn together, (·, 2) each: equally long, on their principal axes; all q · k stay, at all turns."""
    long, wide = queries.norm(), keys.norm()
    if long > 0 and wide > 0:
        stretch = (wide / long).sqrt()
        queries, keys = queries * stretch, keys / stretch
    axes = torch.linalg.eigh(queries.mT @ queries + keys.mT @ keys)[1].flip(1)  # (2, 2), the longest first
    axes = axes * torch.where(axes[0, 0] < 0, -1.0, 1.0)
    axes[:, 1] *= torch.linalg.det(axes).sign()  # a turn, no mirror: mirrors do not commute with turns
    return queries @ axes, keys @ axes


def _with_bias(weight: Tensor, bias: Tensor | None, heads: list[int]) -> Tensor:
    """Columns of channels: (heads · (D + 1), channels), or (heads · D, channels) without biases; in float64."""
    rows = weight[heads].mT.double()  # (n, D, channels)
    return (rows if bias is None else torch.cat((rows, bias[heads][:, None].double()), 1)).flatten(0, 1)


def _put(weight: Tensor, bias: Tensor | None, heads: list[int], columns: Tensor) -> None:
    rows = columns.unflatten(0, (len(heads), -1))  # (n, D or D + 1, channels)
    weight[heads] = rows[:, : weight.shape[2]].mT.to(weight)
    if bias is not None:
        bias[heads] = rows[:, -1].to(bias)
