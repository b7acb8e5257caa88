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

import torch
from torch import Tensor

from headwise.heads.head import AttentionLayerProtocol
from headwise.spec import AttentionSpec, Rotary
from headwise.spec.weight_bits import Basis


@dataclass(frozen=True, eq=False)
class LayerHeadMatrices:
    """The weights of a layer's heads, with a head axis; o is W_O as each head writes with it."""

    q: Tensor  # (H, d, D)
    k: Tensor  # (K, d, D)
    v: Tensor  # (K, e, D)
    o: Tensor  # (H, e, D)
    b_q: Tensor | None = None  # (H, d)
    b_k: Tensor | None = None  # (K, d)
    b_v: Tensor | None = None  # (K, e)

    @staticmethod
    def from_layer(layer: AttentionLayerProtocol) -> "LayerHeadMatrices":
        """Those of a layer, ours or not: live where the layer's own views are."""
        qkv = layer.qkv
        q, k, v = (qkv.weight_by_head(projection) for projection in "qkv")
        b_q, b_k, b_v = (qkv.bias_by_head(projection) for projection in "qkv")
        return LayerHeadMatrices(q, k, v, layer.hook_point.W_O, b_q, b_k, b_v)


def change_basis(matrices: LayerHeadMatrices, spec: AttentionSpec, basis: Basis, seed: int = 0) -> LayerHeadMatrices:
    """The same heads as they are given, balanced, or in a basis drawn by chance; a copy."""
    if basis == "given":
        return replace(matrices, **{name: value.clone() for name, value in vars(matrices).items() if value is not None})
    return balanced_basis(matrices, spec) if basis == "balanced" else random_basis(matrices, spec, seed)


@torch.no_grad()
def balanced_basis(matrices: LayerHeadMatrices, spec: AttentionSpec) -> LayerHeadMatrices:
    """The same heads in their balanced basis."""
    result = change_basis(matrices, spec, "given")
    for kv_index in range(len(spec.kv_head_ids)):
        heads = [head for head, head_kv in enumerate(spec.kv_of_head) if head_kv == kv_index]
        _balance_vo(result, heads, kv_index)
        _balance_qk(result, heads, kv_index, spec.rotary)
    return result


@torch.no_grad()
def random_basis(matrices: LayerHeadMatrices, spec: AttentionSpec, seed: int = 0) -> LayerHeadMatrices:
    """The same heads in a basis drawn by chance among those they may have, by turns alone: to see what a basis matters."""
    generator = torch.Generator().manual_seed(seed)
    result = change_basis(matrices, spec, "given")
    for kv_index in range(len(spec.kv_head_ids)):
        heads = [head for head, head_kv in enumerate(spec.kv_of_head) if head_kv == kv_index]
        rotation = _random_rotation(result.v.shape[1], generator)
        _write_columns(result.v, result.b_v, [kv_index], _with_bias(result.v, result.b_v, [kv_index]) @ rotation)
        result.o[heads] = (rotation.mT @ result.o[heads].double()).to(result.o)
        rotation = torch.zeros(result.q.shape[1], result.q.shape[1], dtype=torch.float64)
        rotary_pairs, fixed_channels = split_rotary_channels(len(rotation), spec.rotary)
        for channels in [*rotary_pairs, *([fixed_channels] if fixed_channels else [])]:
            rotation[torch.tensor(channels)[:, None], channels] = _random_rotation(len(channels), generator)
        _write_columns(result.q, result.b_q, heads, _with_bias(result.q, result.b_q, heads) @ rotation)
        _write_columns(result.k, result.b_k, [kv_index], _with_bias(result.k, result.b_k, [kv_index]) @ rotation)
    return result


def _random_rotation(size: int, generator: torch.Generator) -> Tensor:
    """A rotation, no mirror, (size, size), each as likely as any other."""
    rotation, upper = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    rotation = rotation * upper.diagonal().sign()
    rotation[:, 0] *= torch.linalg.det(rotation).sign()
    return rotation


def _balance_vo(matrices: LayerHeadMatrices, heads: list[int], kv_index: int) -> None:
    left = _with_bias(matrices.v, matrices.b_v, [kv_index])  # (D + 1, e)
    right = matrices.o[heads].transpose(0, 1).flatten(1).double()  # (e, n·D)
    left, right = balance_factors(left, right)
    _write_columns(matrices.v, matrices.b_v, [kv_index], left)
    matrices.o[heads] = right.unflatten(1, (len(heads), -1)).transpose(0, 1).to(matrices.o)


def _balance_qk(matrices: LayerHeadMatrices, heads: list[int], kv_index: int, rotary: Rotary | None) -> None:
    queries, keys = (
        _with_bias(matrices.q, matrices.b_q, heads),
        _with_bias(matrices.k, matrices.b_k, [kv_index]),
    )  # (n·(D + 1), d), (D + 1, d)
    rotary_pairs, fixed_channels = split_rotary_channels(queries.shape[1], rotary)
    for pair in rotary_pairs:
        queries[:, pair], keys[:, pair] = balance_rotary_pair(queries[:, pair], keys[:, pair])
    if fixed_channels:
        balanced_queries, balanced_keys = balance_factors(queries[:, fixed_channels], keys[:, fixed_channels].mT)
        queries[:, fixed_channels], keys[:, fixed_channels] = balanced_queries, balanced_keys.mT
    _write_columns(matrices.q, matrices.b_q, heads, queries)
    _write_columns(matrices.k, matrices.b_k, [kv_index], keys)


def split_rotary_channels(channels: int, rotary: Rotary | None) -> tuple[list[list[int]], list[int]]:
    """The pairs of channels that turn together, and the channels that do not turn.

    >>> split_rotary_channels(6, Rotary(dims=4)), split_rotary_channels(4, Rotary(layout="interleaved"))
    (([[0, 2], [1, 3]], [4, 5]), ([[0, 1], [2, 3]], []))
    """
    if rotary is None:
        return [], list(range(channels))
    dims = rotary.dims or channels
    half = dims // 2
    pairs = [[i, i + half] if rotary.layout == "half" else [2 * i, 2 * i + 1] for i in range(half)]
    return pairs, list(range(dims, channels))


def balance_factors(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """(a, d) and (d, b) with the same product, each with the square roots of its singular values, the largest first."""
    d = left.shape[1]
    (q_left, r_left), (q_right, r_right) = torch.linalg.qr(left), torch.linalg.qr(right.mT)
    u, singular_values, v = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    balanced_left, balanced_right = q_left @ u, v @ q_right.mT  # (a, r), (r, b)
    signs = balanced_left.gather(
        0, balanced_left.abs().argmax(0, keepdim=True)
    ).sign()  # (1, r); which of two signs is then no matter of chance
    signs = torch.where(signs == 0, 1.0, signs)
    roots, missing = singular_values.sqrt(), d - len(singular_values)  # where there are fewer than d the others are 0
    balanced_left, balanced_right = balanced_left * signs * roots, (balanced_right * signs.mT) * roots[:, None]
    return torch.nn.functional.pad(balanced_left, (0, missing)), torch.nn.functional.pad(
        balanced_right, (0, 0, 0, missing)
    )


def balance_rotary_pair(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Two channels that turn together, (·, 2) each: equally long, on their principal axes; all q · k stay, at all turns."""
    query_norm, key_norm = queries.norm(), keys.norm()
    if query_norm > 0 and key_norm > 0:
        stretch = (key_norm / query_norm).sqrt()
        queries, keys = queries * stretch, keys / stretch
    axes = torch.linalg.eigh(queries.mT @ queries + keys.mT @ keys)[1].flip(1)  # (2, 2), the longest first
    axes = axes * torch.where(axes[0, 0] < 0, -1.0, 1.0)
    axes[:, 1] *= torch.linalg.det(axes).sign()  # a turn, no mirror: mirrors do not commute with turns
    return queries @ axes, keys @ axes


def _with_bias(weight: Tensor, bias: Tensor | None, heads: list[int]) -> Tensor:
    """Columns of channels: (heads · (D + 1), channels), or (heads · D, channels) without biases; in float64."""
    rows = weight[heads].mT.double()  # (n, D, channels)
    return (rows if bias is None else torch.cat((rows, bias[heads][:, None].double()), 1)).flatten(0, 1)


def _write_columns(weight: Tensor, bias: Tensor | None, heads: list[int], columns: Tensor) -> None:
    rows = columns.unflatten(0, (len(heads), -1))  # (n, D or D + 1, channels)
    weight[heads] = rows[:, : weight.shape[2]].mT.to(weight)
    if bias is not None:
        bias[heads] = rows[:, -1].to(bias)
