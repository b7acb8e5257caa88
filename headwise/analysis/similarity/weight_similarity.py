"""Heads beside each other by their weights alone: what they read and write, and whether one reads what another wrote.

Norms that stand before a layer are folded into its weights first, so that all heads are compared on the plain stream.
Everything goes through factors of d rows or columns; no D×D matrix is built.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads import Head
from headwise.heads.head import Circuit
from headwise.kernels.precision import at_least_float32
from headwise.model import AnyModel
from headwise.spec import Address

READS = {"read_q": "q", "read_k": "k", "read_v": "v"}
COMPOSITIONS = {"q_composition": "q", "k_composition": "k", "v_composition": "v"}
LAST = 1 << 30  # after every layer

Groups = dict[tuple[str, int], tuple[Tensor, Tensor]]  # W_K and W_V, which the heads of a group share


@dataclass(frozen=True)
class StreamPlace:
    """Which stream a head reads or writes, and when: a head reads what others wrote into the same stream before."""

    name: str
    turn: int


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """A head's weights with the norms before it folded in."""

    address: Address
    weights: dict[str, Tensor]  # q, k, v: (D, d); o: (e, D)
    streams: dict[str, StreamPlace]  # where q reads, where k and v read, where o writes
    rotary: bool
    group: tuple[str, int]  # heads with the same share W_K and W_V

    @property
    def OV(self) -> Circuit:
        """What is moved, W_V W_O."""
        return Circuit(self.weights["v"], self.weights["o"])

    @property
    def QK(self) -> Circuit:
        """What looks at what, W_Q W_Kᵀ, before positions and scale."""
        return Circuit(self.weights["q"], self.weights["k"].mT)


def folded_heads(model: AnyModel, addresses: Sequence[Address]) -> list[HeadWeights]:
    """These heads with norms folded in: x̂·w W = x̂ (w W), and for LayerNorm, which centres x, the columns of w W centred.

    A post-norm model (BERT) has no norm between its stream and what heads read: nothing is folded there.
    """
    norms = model.norms() or {str(address.site): (None, None) for address in addresses}
    at_once = model.spec.form == "parallel"
    groups: Groups = {}
    every = model.heads
    made = [_folded(every[address], *norms[str(address.site)], at_once, groups) for address in addresses]
    sizes = {letter: {tuple(head.weights[letter].shape) for head in made} for letter in "qkvo"}
    widths = {shape[letter == "o"] for letter, shapes in sizes.items() for shape in shapes}
    if len(widths) > 1 or any(len(shapes) > 1 for shapes in sizes.values()):
        raise HeadwiseError(
            f"heads of different sizes, or that read and write streams of different widths, are not compared; got "
            f"{', '.join(f'W_{letter.upper()} {sorted(shapes)}' for letter, shapes in sizes.items())}."
        )
    return made


def _folded(head: Head, own: nn.Module | None, source: nn.Module | None, at_once: bool, groups: Groups) -> HeadWeights:
    group = str(head.address.site), head.kv_index
    if group not in groups:
        groups[group] = fold(head.W_K, source), fold(head.W_V, source)
    weights = {"q": fold(head.W_Q, own), "k": groups[group][0], "v": groups[group][1], "o": _plain(head.W_O)}
    address, across = head.address, head.address.stack == "cross"
    stream = "enc" if address.stack == "enc" else "dec"
    now = StreamPlace(stream, 2 * address.layer + (across and not at_once))
    theirs = StreamPlace("enc", LAST) if across else now  # keys and values of cross-attention: the finished source
    streams = {"q": now, "k": theirs, "v": theirs, "o": now}
    return HeadWeights(address, weights, streams, head.layer.spec.rotary is not None, group)


def fold(weight: Tensor, norm: nn.Module | None) -> Tensor:
    """What a head reads of the stream before a norm, up to the norm's own scale of each token: (D, d) → (D, d)."""
    weight = _plain(weight)
    if norm is None:
        return weight
    gain = norm.weight
    weight = weight if not isinstance(gain, Tensor) else _plain(gain)[:, None] * weight
    return weight - weight.mean(0) if isinstance(norm, nn.LayerNorm) else weight


def _plain(weight: Tensor) -> Tensor:
    return at_least_float32(weight.detach())


# One head.


def ov_copying(head: Head | HeadWeights | Circuit) -> float:
    """OV eigenvalue score: Re Σλ / Σ|λ| of W_V W_O, from −1 to 1. Random weights: mean 0, sd about 1.5/d.

    It does not say what is written for the attended token: https://transformer-circuits.pub/2021/framework/index.html

    >>> ov_copying(Circuit(torch.eye(5)[:, :3], 2 * torch.eye(5)[:3]))
    1.0
    """
    values = (head if isinstance(head, Circuit) else head.OV).eigenvalues()
    size = float(values.abs().sum())
    return float(values.real.sum()) / size if size > 0 else float("nan")


def effective_rank(matrix: Tensor | Circuit) -> float:
    """How many directions carry the matrix: exp of the entropy of σ²/Σσ²; a matrix of equal σ has its rank.

    >>> round(effective_rank(torch.eye(4)), 4)
    4.0
    """
    sigma = matrix.singular_values() if isinstance(matrix, Circuit) else torch.linalg.svdvals(_plain(matrix))
    power = sigma.double().square()
    share = power / power.sum()
    return float(torch.special.entr(share).sum().exp())


# Two heads.


def subspace_overlap(A: Tensor, B: Tensor) -> float:
    """Σ cos² of the principal angles between two column spaces, over their number: 1 the same, 0 orthogonal, chance d/D.

    >>> subspace_overlap(torch.eye(6)[:, :2], torch.eye(6)[:, 1:3])
    0.5
    """
    if A.shape[0] != B.shape[0]:
        raise HeadwiseError(
            f"subspaces of one space have matrices of as many rows; got {tuple(A.shape)} and {tuple(B.shape)}."
        )
    (a,), (b,) = bases(A[None]), bases(B[None])
    fewest = min(int(basis.square().sum().round()) for basis in (a, b))
    return float((a.mT @ b).square().sum()) / fewest if fewest else float("nan")


def composition(A: Circuit, B: Circuit) -> float:
    """‖A B‖ / ‖A‖‖B‖ (Frobenius): how much of what A writes B reads, A first; chance is 1/√D. Row vectors: x A B.

    https://transformer-circuits.pub/2021/framework/index.html

    >>> one = Circuit(torch.eye(4)[:, :1], torch.eye(4)[1:2])  # reads direction 0, writes direction 1
    >>> two = Circuit(torch.eye(4)[:, 1:2], torch.eye(4)[2:3])  # reads direction 1
    >>> composition(one, two), composition(two, one)
    (1.0, 0.0)
    """
    left, right = fewest_rows(A.left[None], A.right[None])[0], fewest_columns(B.left[None], B.right[None])[0]
    size = float(left.norm() * right.norm())
    return float((left @ right).norm()) / size if size > 0 else float("nan")


# All pairs.


def bases(matrices: Tensor) -> Tensor:
    """Orthonormal bases of the column spaces, (H, D, d) → (H, D, d); columns beyond the rank are 0."""
    Q, R = torch.linalg.qr(_plain(matrices))
    U, sigma, _ = torch.linalg.svd(R)
    tiny = torch.finfo(sigma.dtype).eps * max(matrices.shape[-2:])
    counts = (sigma > tiny * sigma[:, :1]) & (sigma > 0)
    return Q @ (U[..., : sigma.shape[1]] * counts[:, None])


def fewest_rows(left: Tensor, right: Tensor) -> Tensor:
    """left · right of as few rows as can be, the rest being a rotation: (H, D, d), (H, d, D) → (H, d, D)."""
    return torch.linalg.qr(left, mode="r")[1] @ right


def fewest_columns(left: Tensor, right: Tensor) -> Tensor:
    """The same of as few columns: (H, D, d), (H, d, D) → (H, D, d)."""
    return left @ torch.linalg.qr(right.mT, mode="r")[1].mT


def product_norms(left: Tensor, right: Tensor, upper: bool = False) -> np.ndarray:
    """‖left[a] right[b]‖² for all a and b, or for a ≤ b and 0 elsewhere: (H, d, n), (H, n, e) → (H, H)."""
    H, n, e = right.shape
    flat = right.transpose(0, 1).reshape(n, H * e)
    made = np.zeros((len(left), H))
    for a, one in enumerate(left):
        first = a if upper else 0
        made[a, first:] = (one @ flat[:, first * e :]).square().unflatten(1, (-1, e)).sum((0, 2)).double().cpu().numpy()
    return made


def square_norms(matrices: Tensor) -> np.ndarray:
    """‖Xᵀ[a] X[b]‖² for all pairs, each made once: (H, n, e) → (H, H)."""
    upper = product_norms(matrices.mT, matrices, upper=True)
    return upper + np.triu(upper, 1).T


def compare_weights(heads: list[HeadWeights]) -> dict[str, np.ndarray]:
    """Every measure on weights between all pairs, (H, H); NaN where two heads cannot be compared.

    Compositions are directed, [a, b]: how much of what a writes b reads; NaN unless a comes before b.
    """
    made = {name: _overlaps(heads, letter) for name, letter in READS.items()}
    made["write"] = _overlaps(heads, "o")
    W_Q, W_K, W_V, W_O = (torch.stack([head.weights[letter] for head in heads]) for letter in "qkvo")
    reads = {"q": fewest_columns(W_Q, W_K.mT), "k": fewest_columns(W_K, W_Q.mT), "v": fewest_columns(W_V, W_O)}
    writes = fewest_rows(W_V, W_O)
    for name, letter in COMPOSITIONS.items():
        turned = np.array([head.rotary and letter != "v" for head in heads])
        if turned.all():
            made[name] = np.full((len(heads), len(heads)), np.nan)
            continue
        sizes = np.sqrt(_squares(writes))[:, None] * np.sqrt(_squares(reads[letter]))
        with np.errstate(invalid="ignore", divide="ignore"):
            score = np.sqrt(product_norms(writes, reads[letter], upper=True)) / sizes
        meets = np.array([[_before(a.streams["o"], b.streams[letter]) for b in heads] for a in heads])
        made[name] = np.where(meets & ~turned, score, np.nan)
    return made


def _overlaps(heads: list[HeadWeights], letter: str) -> np.ndarray:
    weights = [head.weights[letter] for head in heads]
    # Heads of a group hold the very same tensor: compared once, spread afterwards.
    once = {id(weight): weight for weight in weights}
    where = [list(once).index(id(weight)) for weight in weights]
    basis = bases(torch.stack([weight.mT if letter == "o" else weight for weight in once.values()]))
    ranks = _squares(basis).round()
    with np.errstate(invalid="ignore", divide="ignore"):
        made = (square_norms(basis) / np.minimum(ranks[:, None], ranks))[np.ix_(where, where)]
    apart = np.array([[a.streams[letter].name != b.streams[letter].name for b in heads] for a in heads])
    return np.where(apart | (letter in "kv") & shared(heads), np.nan, made)


def shared(heads: list[HeadWeights]) -> np.ndarray:
    """Which pairs of heads share W_K and W_V, and so agree there by construction: (H, H)."""
    groups = [head.group for head in heads]
    return np.array([[a == b and i != j for j, b in enumerate(groups)] for i, a in enumerate(groups)])


def _before(write: StreamPlace, read: StreamPlace) -> bool:
    return write.name == read.name and write.turn < read.turn


def _squares(matrices: Tensor) -> np.ndarray:
    return matrices.double().square().sum((1, 2)).cpu().numpy()
