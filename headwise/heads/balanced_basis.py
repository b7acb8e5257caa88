"""Change of the basis of head channels. The head computes the same function, but its quantization error changes.

A head is unchanged if W_V becomes W_V G and W_O becomes G⁻¹ W_O, for any invertible G. The quantization error is not: it
depends on the basis. The balanced basis splits the singular values of the product W_V W_O = U Σ Vᵀ equally between both
factors: W_V = U√Σ and W_O = √ΣVᵀ. Between W_Q and W_K, G must commute with the position encoding:

    no rotary positions   any invertible G, so W_Q and W_K are balanced by singular values too
    rotary channels       a rotation and a scaling of each rotary pair, which commute with the rotary rotation: W_Q and W_K
                          are scaled to equal norm and rotated to their principal axes
    other channels        any invertible G among the channels that are not rotated
    QK norm               none: the norm lies between W_Q, W_K and the scores, so both stay as they are

An output gate per channel multiplies z between W_V and W_O, so these stay as they are, too.

Heads that share a KV head share its basis. All computations are in float64.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.errors import UnsupportedModelError
from headwise.heads.head import AttentionLayerProtocol
from headwise.kernels.rounding_tolerance import to_float64
from headwise.spec import AttentionSpec, Rotary
from headwise.spec.weight_bits import Basis


@dataclass(frozen=True, eq=False)
class LayerHeadMatrices:
    """Weights and biases of the heads of a layer, with a head axis.

    Attributes:
        q: W_Q, (H, d, D).
        k: W_K, (K, d, D).
        v: W_V, (K, e, D).
        o: W_O, (H, e, D).
        b_q: Query bias, (H, d).
        b_k: Key bias, (K, d).
        b_v: Value bias, (K, e).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None

    @staticmethod
    def from_layer(layer: AttentionLayerProtocol) -> "LayerHeadMatrices":
        """Return the matrices of a native or attached layer. They are views if the layer's own accessors return views."""
        if layer.spec.latent is not None:
            raise UnsupportedModelError(
                f"layer {layer.hook_point.address}: its projections have latents (MLA), whose weights cannot be quantized "
                f"per head. Omit the layer, or use a model without latents."
            )
        qkv = layer.qkv
        q, k, v = (qkv.weight_by_head(projection) for projection in "qkv")
        b_q, b_k, b_v = (qkv.bias_by_head(projection) for projection in "qkv")
        return LayerHeadMatrices(q, k, v, layer.hook_point.W_O, b_q, b_k, b_v)


def change_basis(matrices: LayerHeadMatrices, spec: AttentionSpec, basis: Basis, seed: int = 0) -> LayerHeadMatrices:
    """Return a copy of the heads in the given, balanced or random basis."""
    if basis == "given":
        return _copy_to(matrices, matrices.q.device)
    on_cpu = _copy_to(matrices, torch.device("cpu"))  # decompositions in float64, which not every device has
    result = balanced_basis(on_cpu, spec) if basis == "balanced" else random_basis(on_cpu, spec, seed)
    return _copy_to(result, matrices.q.device)


def _copy_to(matrices: LayerHeadMatrices, device: torch.device) -> LayerHeadMatrices:
    copies = {name: value.to(device, copy=True) for name, value in vars(matrices).items() if value is not None}
    return replace(matrices, **copies)


@torch.no_grad()
def balanced_basis(matrices: LayerHeadMatrices, spec: AttentionSpec) -> LayerHeadMatrices:
    """Return a copy of the heads in the balanced basis."""
    result = change_basis(matrices, spec, "given")
    for kv_index in range(len(spec.kv_head_ids)):
        heads = [head for head, head_kv in enumerate(spec.kv_of_head) if head_kv == kv_index]
        if spec.output_gate != "channel":
            _balance_vo(result, heads, kv_index)
        if spec.qk_norm is None:
            _balance_qk(result, heads, kv_index, spec.rotary)
    return result


@torch.no_grad()
def random_basis(matrices: LayerHeadMatrices, spec: AttentionSpec, seed: int = 0) -> LayerHeadMatrices:
    """Return a copy of the heads in a random rotated basis, as a control for the balanced basis."""
    generator = torch.Generator().manual_seed(seed)
    result = change_basis(matrices, spec, "given")
    for kv_index in range(len(spec.kv_head_ids)):
        heads = [head for head, head_kv in enumerate(spec.kv_of_head) if head_kv == kv_index]
        rotation = _random_rotation(result.v.shape[1], generator)
        rotation = (
            rotation if spec.output_gate != "channel" else torch.eye(len(rotation), dtype=rotation.dtype, device="cpu")
        )
        _write_columns(result.v, result.b_v, [kv_index], _with_bias(result.v, result.b_v, [kv_index]) @ rotation)
        result.o[heads] = (rotation.mT @ to_float64(result.o[heads])).to(result.o)
        rotation = torch.zeros(result.q.shape[1], result.q.shape[1], dtype=torch.float64, device="cpu")
        rotary_pairs, fixed_channels = split_rotary_channels(len(rotation), spec.rotary)
        for channels in [*rotary_pairs, *([fixed_channels] if fixed_channels else [])]:
            rotation[torch.tensor(channels, device="cpu")[:, None], channels] = _random_rotation(
                len(channels), generator
            )
        if spec.qk_norm is not None:
            continue
        _write_columns(result.q, result.b_q, heads, _with_bias(result.q, result.b_q, heads) @ rotation)
        _write_columns(result.k, result.b_k, [kv_index], _with_bias(result.k, result.b_k, [kv_index]) @ rotation)
    return result


def _random_rotation(size: int, generator: torch.Generator) -> Tensor:
    """Draw a uniformly distributed rotation (determinant 1), (size, size)."""
    rotation, upper = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64, device="cpu"))
    rotation = rotation * upper.diagonal().sign()
    rotation[:, 0] *= torch.linalg.det(rotation).sign()
    return rotation


def _balance_vo(matrices: LayerHeadMatrices, heads: list[int], kv_index: int) -> None:
    left = _with_bias(matrices.v, matrices.b_v, [kv_index])  # (D + 1, e)
    right = to_float64(matrices.o[heads].transpose(0, 1).flatten(1))  # (e, n·D)
    left, right = rebalance_factor_pair(left, right)
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
        balanced_queries, balanced_keys = rebalance_factor_pair(queries[:, fixed_channels], keys[:, fixed_channels].mT)
        queries[:, fixed_channels], keys[:, fixed_channels] = balanced_queries, balanced_keys.mT
    _write_columns(matrices.q, matrices.b_q, heads, queries)
    _write_columns(matrices.k, matrices.b_k, [kv_index], keys)


def split_rotary_channels(channels: int, rotary: Rotary | None) -> tuple[list[list[int]], list[int]]:
    """Return the pairs of channels that rotary positions rotate, and the channels that they leave unchanged.

    >>> split_rotary_channels(6, Rotary(dims=4)), split_rotary_channels(4, Rotary(layout="interleaved"))
    (([[0, 2], [1, 3]], [4, 5]), ([[0, 1], [2, 3]], []))
    """
    if rotary is None:
        return [], list(range(channels))
    dims = rotary.dims or channels
    half = dims // 2
    pairs = [[i, i + half] if rotary.layout == "half" else [2 * i, 2 * i + 1] for i in range(half)]
    return pairs, list(range(dims, channels))


def rebalance_factor_pair(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors with the same product, (a, d) and (d, b), that share its singular values equally, largest first."""
    d = left.shape[1]
    (q_left, r_left), (q_right, r_right) = torch.linalg.qr(left), torch.linalg.qr(right.mT)
    u, singular_values, v = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    balanced_left, balanced_right = q_left @ u, v @ q_right.mT  # (a, r), (r, b)
    # the largest entry of each column becomes positive, so that the result is deterministic
    signs = balanced_left.gather(0, balanced_left.abs().argmax(0, keepdim=True)).sign()  # (1, r)
    signs = torch.where(signs == 0, 1.0, signs)
    roots, missing = singular_values.sqrt(), d - len(singular_values)  # missing singular values are 0
    balanced_left, balanced_right = balanced_left * signs * roots, (balanced_right * signs.mT) * roots[:, None]
    return torch.nn.functional.pad(balanced_left, (0, missing)), torch.nn.functional.pad(
        balanced_right, (0, 0, 0, missing)
    )


def balance_rotary_pair(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scale one rotary pair of queries and keys, (·, 2) each, to equal norm and rotate it to its principal axes.

    All products q·k stay the same at all rotary angles.
    """
    query_norm, key_norm = queries.norm(), keys.norm()
    if query_norm > 0 and key_norm > 0:
        stretch = (key_norm / query_norm).sqrt()
        queries, keys = queries * stretch, keys / stretch
    axes = torch.linalg.eigh(queries.mT @ queries + keys.mT @ keys)[1].flip(1)  # (2, 2), largest first
    axes = axes * torch.where(axes[0, 0] < 0, -1.0, 1.0)
    axes[:, 1] *= torch.linalg.det(axes).sign()  # a rotation: reflections do not commute with rotations
    return queries @ axes, keys @ axes


def _with_bias(weight: Tensor, bias: Tensor | None, heads: list[int]) -> Tensor:
    """Return weights with their bias as one more input row, in float64: (heads · (D + 1), channels)."""
    rows = to_float64(weight[heads].mT)  # (n, D, channels)
    return (rows if bias is None else torch.cat((rows, to_float64(bias[heads][:, None])), 1)).flatten(0, 1)


def _write_columns(weight: Tensor, bias: Tensor | None, heads: list[int], columns: Tensor) -> None:
    rows = columns.unflatten(0, (len(heads), -1))  # (n, D or D + 1, channels)
    weight[heads] = rows[:, : weight.shape[2]].mT.to(weight)
    if bias is not None:
        bias[heads] = rows[:, -1].to(bias)
