"""Similarity of heads by their weights: overlap of the subspaces they read and write, and composition of heads.

Norms before a layer are folded into its weights first, so all heads are compared on the residual stream itself. All
computations use factors with d rows or columns; no D×D matrix is built.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from headwise.errors import ArgumentError
from headwise.heads import Head
from headwise.heads.head import Circuit
from headwise.kernels.rounding_tolerance import at_least_float32, to_float64
from headwise.model import ModelProtocol
from headwise.spec import Address

READ_METRICS = {"read_q": "q", "read_k": "k", "read_v": "v"}
COMPOSITIONS = {"q_composition": "q", "k_composition": "k", "v_composition": "v"}
AFTER_ALL_LAYERS = 1 << 30

KVWeights = dict[
    tuple[str, int], tuple[Tensor, Tensor]
]  # (layer, KV head) → W_K and W_V, shared by the heads of a group


@dataclass(frozen=True)
class StreamPosition:
    """Stream that a head reads or writes, and its order. A head reads the outputs of earlier heads in the same stream."""

    name: str
    order: int


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """Weights of a head with the norms before it folded in.

    Attributes:
        address: Address of the head.
        weights: "q", "k", "v": (D, d); "o": (e, D).
        streams: Stream positions that "q", "k" and "v" read and "o" writes.
        rotary: Whether the layer uses rotary embeddings.
        group: Layer and KV head. Heads with equal group share W_K and W_V.
    """

    address: Address
    weights: dict[str, Tensor]
    streams: dict[str, StreamPosition]
    rotary: bool
    group: tuple[str, int]

    @property
    def OV(self) -> Circuit:
        """OV circuit, W_V W_O."""
        return Circuit(self.weights["v"], self.weights["o"])

    @property
    def QK(self) -> Circuit:
        """QK circuit, W_Q W_Kᵀ, before position encoding and scale."""
        return Circuit(self.weights["q"], self.weights["k"].mT)


def fold_norms_into_heads(model: ModelProtocol, addresses: Sequence[Address]) -> list[HeadWeights]:
    """Fold the norms before heads into their weights: x̂·w W = x̂ (w W). For LayerNorm, the columns of w W are centered.

    A post-norm model (BERT) has no norm between the residual stream and its heads, so nothing is folded.
    """
    norms = model.input_norms() or {str(address.layer_address): (None, None) for address in addresses}
    parallel = model.spec.norm_placement == "parallel"
    groups: KVWeights = {}
    all_heads = model.heads
    head_weights = [
        _fold_head(all_heads[address], *norms[str(address.layer_address)], parallel=parallel, groups=groups)
        for address in addresses
    ]
    sizes = {projection: {tuple(head.weights[projection].shape) for head in head_weights} for projection in "qkvo"}
    widths = {shape[projection == "o"] for projection, shapes in sizes.items() for shape in shapes}
    for head in head_weights:  # layers may be on several devices
        head.weights.update({name: weight.to(model.device) for name, weight in head.weights.items()})
    if len(widths) > 1 or any(len(shapes) > 1 for shapes in sizes.values()):
        raise ArgumentError(
            f"heads: heads of different sizes, or with residual streams of different widths, cannot be compared. Got "
            f"{', '.join(f'W_{projection.upper()} {sorted(shapes)}' for projection, shapes in sizes.items())}. "
            f"Select heads of equal size with heads=."
        )
    return head_weights


def _fold_head(
    head: Head, query_norm: nn.Module | None, source_norm: nn.Module | None, *, parallel: bool, groups: KVWeights
) -> HeadWeights:
    group = str(head.address.layer_address), head.kv_index
    if group not in groups:
        groups[group] = fold_norm(head.W_K, source_norm), fold_norm(head.W_V, source_norm)
    weights = {
        "q": fold_norm(head.W_Q, query_norm),
        "k": groups[group][0],
        "v": groups[group][1],
        "o": _as_float(head.W_O),
    }
    address, is_cross = head.address, head.address.stack == "cross"
    stream = "enc" if address.stack == "enc" else "dec"
    position = StreamPosition(stream, 2 * address.layer + (is_cross and not parallel))
    # cross-attention reads keys and values from the final encoder output
    source_position = StreamPosition("enc", AFTER_ALL_LAYERS) if is_cross else position
    streams = {"q": position, "k": source_position, "v": source_position, "o": position}
    return HeadWeights(address, weights, streams, head.layer.spec.rotary is not None, group)


def fold_norm(weight: Tensor, norm: nn.Module | None) -> Tensor:
    """Fold the gain and centering of a norm into a weight, up to the norm's scale of each token: (D, d) → (D, d)."""
    weight = _as_float(weight)
    if norm is None:
        return weight
    gain = norm.weight
    offset = getattr(norm, "weight_offset", 0.0)  # 1 in Gemma's norms
    weight = weight if not isinstance(gain, Tensor) else (offset + _as_float(gain))[:, None] * weight
    return weight - weight.mean(0) if isinstance(norm, nn.LayerNorm) else weight


def _as_float(weight: Tensor) -> Tensor:
    return at_least_float32(weight.detach())


# One head.


def ov_copying(head: Head | HeadWeights | Circuit) -> float:
    """Compute the OV eigenvalue score: Re Σλ / Σ|λ| of W_V W_O, from −1 to 1. Random weights: mean 0, sd about 1.5/d.

    The score does not measure the effect on the attended token: https://transformer-circuits.pub/2021/framework/index.html

    >>> ov_copying(Circuit(torch.eye(5)[:, :3], 2 * torch.eye(5)[:3]))
    1.0
    """
    values = (head if isinstance(head, Circuit) else head.OV).eigenvalues()
    size, real = torch.stack((values.abs().sum(), values.real.sum())).tolist()
    return real / size if size > 0 else float("nan")


def effective_rank(matrix: Tensor | Circuit) -> float:
    """Compute the effective rank: exp of the entropy of σ²/Σσ². Equals the rank if all nonzero σ are equal.

    >>> round(effective_rank(torch.eye(4)), 4)
    4.0
    """
    sigma = matrix.singular_values() if isinstance(matrix, Circuit) else torch.linalg.svdvals(_as_float(matrix))
    power = to_float64(sigma).square()
    fraction = power / power.sum()
    return float(torch.special.entr(fraction).sum().exp())


# Two heads.


def subspace_overlap(A: Tensor, B: Tensor) -> float:
    """Compute the mean cos² of the principal angles between two column spaces: 1 equal, 0 orthogonal, chance d/D.

    >>> subspace_overlap(torch.eye(6)[:, :2], torch.eye(6)[:, 1:3])
    0.5
    """
    if A.shape[0] != B.shape[0]:
        raise ArgumentError(
            f"A, B: must have the same number of rows. Got shapes {tuple(A.shape)} and {tuple(B.shape)}."
        )
    (a,), (b,) = orthonormal_bases(A[None]), orthonormal_bases(B[None])
    min_rank = min(int(basis.square().sum().round()) for basis in (a, b))
    return float((a.mT @ b).square().sum()) / min_rank if min_rank else float("nan")


def composition_score(A: Circuit, B: Circuit) -> float:
    """Compute ‖A B‖ / ‖A‖‖B‖ (Frobenius): how much B reads from the output of A. Chance is 1/√D. Row vectors: x A B.

    https://transformer-circuits.pub/2021/framework/index.html

    >>> first = Circuit(torch.eye(4)[:, :1], torch.eye(4)[1:2])  # reads direction 0, writes direction 1
    >>> second = Circuit(torch.eye(4)[:, 1:2], torch.eye(4)[2:3])  # reads direction 1
    >>> composition_score(first, second), composition_score(second, first)
    (1.0, 0.0)
    """
    left, right = (
        compress_product_rows(A.left[None], A.right[None])[0],
        compress_product_columns(B.left[None], B.right[None])[0],
    )
    size = float(left.norm() * right.norm())
    return float((left @ right).norm()) / size if size > 0 else float("nan")


# All pairs.


def orthonormal_bases(matrices: Tensor) -> Tensor:
    """Return orthonormal bases of the column spaces, (H, D, d) → (H, D, d). Columns beyond the rank are 0."""
    Q, R = torch.linalg.qr(_as_float(matrices))
    U, sigma, _ = torch.linalg.svd(R)
    tiny = torch.finfo(sigma.dtype).eps * max(matrices.shape[-2:])
    counts = (sigma > tiny * sigma[:, :1]) & (sigma > 0)
    return Q @ (U[..., : sigma.shape[1]] * counts[:, None])


def compress_product_rows(left: Tensor, right: Tensor) -> Tensor:
    """Reduce left · right to d rows, up to a rotation that preserves norms: (H, D, d), (H, d, D) → (H, d, D)."""
    return torch.linalg.qr(left, mode="r")[1] @ right


def compress_product_columns(left: Tensor, right: Tensor) -> Tensor:
    """Reduce left · right to d columns, up to a rotation that preserves norms: (H, D, d), (H, d, D) → (H, D, d)."""
    return left @ torch.linalg.qr(right.mT, mode="r")[1].mT


def pairwise_product_squared_norms(left: Tensor, right: Tensor, *, upper: bool = False) -> np.ndarray:
    """Compute ‖left[a] right[b]‖² for all a and b, or 0 for a > b if `upper`: (H, d, n), (H, n, e) → (H, H)."""
    H, n, e = right.shape
    flat = right.transpose(0, 1).reshape(n, H * e)
    norms = np.zeros((len(left), H))
    rows = [
        to_float64(matrix @ flat[:, (a if upper else 0) * e :]).square().unflatten(1, (-1, e)).sum((0, 2))
        for a, matrix in enumerate(left)
    ]
    for a, row in enumerate(copy_rows_to_host(rows)):
        norms[a, H - len(row) :] = row
    return norms


def copy_rows_to_host(rows: Sequence[Tensor]) -> list[np.ndarray]:
    """Return vectors as arrays in float64, with one copy from the device for all of them."""
    values = to_float64(torch.cat(list(rows))).cpu().numpy() if rows else np.zeros(0)
    return np.split(values, np.cumsum([len(row) for row in rows])[:-1])


def pairwise_gram_squared_norms(matrices: Tensor) -> np.ndarray:
    """Compute ‖Xᵀ[a] X[b]‖² for all pairs, each pair once: (H, n, e) → (H, H)."""
    upper = pairwise_product_squared_norms(matrices.mT, matrices, upper=True)
    return upper + np.triu(upper, 1).T


def compare_weights(heads: list[HeadWeights]) -> dict[str, np.ndarray]:
    """Compute all weight metrics of all pairs, (H, H). NaN if two heads cannot be compared.

    Compositions are directed: [a, b] measures how much b reads from the output of a. NaN unless a comes before b.
    """
    matrices = {name: _overlaps(heads, projection) for name, projection in READ_METRICS.items()}
    matrices["write"] = _overlaps(heads, "o")
    W_Q, W_K, W_V, W_O = (torch.stack([head.weights[projection] for head in heads]) for projection in "qkvo")
    reads = {
        "q": compress_product_columns(W_Q, W_K.mT),
        "k": compress_product_columns(W_K, W_Q.mT),
        "v": compress_product_columns(W_V, W_O),
    }
    writes = compress_product_rows(W_V, W_O)
    for name, projection in COMPOSITIONS.items():
        is_rotary = np.array([head.rotary and projection != "v" for head in heads])
        if is_rotary.all():
            matrices[name] = np.full((len(heads), len(heads)), np.nan)
            continue
        sizes = np.sqrt(_squared_norms(writes))[:, None] * np.sqrt(_squared_norms(reads[projection]))
        with np.errstate(invalid="ignore", divide="ignore"):
            score = np.sqrt(pairwise_product_squared_norms(writes, reads[projection], upper=True)) / sizes
        meets = np.array([[_comes_before(a.streams["o"], b.streams[projection]) for b in heads] for a in heads])
        matrices[name] = np.where(meets & ~is_rotary, score, np.nan)
    return matrices


def _overlaps(heads: list[HeadWeights], projection: str) -> np.ndarray:
    weights = [head.weights[projection] for head in heads]
    # Heads of a group share one tensor: compute it once and repeat the result.
    unique = {id(weight): weight for weight in weights}
    unique_index = [list(unique).index(id(weight)) for weight in weights]
    basis = orthonormal_bases(torch.stack([weight.mT if projection == "o" else weight for weight in unique.values()]))
    ranks = _squared_norms(basis).round()
    with np.errstate(invalid="ignore", divide="ignore"):
        overlaps = (pairwise_gram_squared_norms(basis) / np.minimum(ranks[:, None], ranks))[
            np.ix_(unique_index, unique_index)
        ]
    different_stream = np.array(
        [[a.streams[projection].name != b.streams[projection].name for b in heads] for a in heads]
    )
    return np.where(different_stream | (projection in "kv") & shared_kv_mask(heads), np.nan, overlaps)


def shared_kv_mask(heads: list[HeadWeights]) -> np.ndarray:
    """Return the pairs of different heads that share W_K and W_V, (H, H)."""
    groups = [head.group for head in heads]
    return np.array([[a == b and i != j for j, b in enumerate(groups)] for i, a in enumerate(groups)])


def _comes_before(writer: StreamPosition, reader: StreamPosition) -> bool:
    return writer.name == reader.name and writer.order < reader.order


def _squared_norms(matrices: Tensor) -> np.ndarray:
    return to_float64(matrices).square().sum((1, 2)).cpu().numpy()
