"""The one signature of all kernels, and the choice between them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from headwise.errors import HeadwiseError, close_names
from headwise.kernels.batched import batched
from headwise.kernels.bias import Bias, Given
from headwise.kernels.blockwise import BUDGET, blockwise
from headwise.kernels.fused import fused
from headwise.kernels.masks import Causal, Mask
from headwise.kernels.reference import reference
from headwise.kernels.score_params import Terms

BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, Terms], Tensor]] = {
    "reference": reference,
    "batched": batched,
    "fused": fused,
    "blockwise": blockwise,
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    bias: Bias | Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | float | None = None,
    groups: tuple[int, ...] | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Scaled-dot-product attention of all heads: (B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, H, T, e).

    `groups` says which key/value head each head reads, default: in even groups. `sink` is a logit per head that takes
    part in the softmax and writes nothing; 0.0 gives the off-by-one softmax. `bias` is added to the
    scores: a tensor, or a `Bias`.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    >>> attention(q, k, v).shape
    torch.Size([1, 2, 5, 4])
    """
    terms = make_terms(
        q, k, v, mask=mask, scale=scale, bias=bias, softcap=softcap, sink=sink, groups=groups, dropout=dropout
    )
    return run(q, k, v, terms, backend)


def run(q: Tensor, k: Tensor, v: Tensor, terms: Terms, backend: str = "auto") -> Tensor:
    """The same, for a caller whose terms are ready."""
    if backend == "auto":
        beyond = _beyond_fused(terms)  # to write down why takes longer than to know
        if not beyond:
            backend = "fused"
        elif torch.compiler.is_exporting():
            backend = "batched"  # sizes may be symbols: nobody knows how large the maps will be
        else:
            backend = choose(terms, q.shape[0], q.shape[1], q.shape[2], k.shape[2]).backend
    kernel = BACKENDS.get(backend)
    if kernel is None:
        raise HeadwiseError(f"there is no backend {backend!r}; {close_names(backend, ['auto', *BACKENDS])}")
    return kernel(q, k, v, terms)


def make_terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    bias: Bias | Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | float | None = None,
    groups: tuple[int, ...] | None = None,
    dropout: float = 0.0,
    keys: int | None = None,
) -> Terms:
    """Check a call and fill in what was left out; `keys` counts all there are, where k and v are only the new ones."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise HeadwiseError(
            f"q, k and v are (batch, heads, tokens, channels); got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}."
        )
    (B, H, T, d), (_, K, S, _) = q.shape, k.shape
    if k.shape[-1] != d or v.shape[:3] != k.shape[:3] or k.shape[0] != B:
        raise HeadwiseError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit: q and k share batch and channels, "
            f"k and v share batch, heads and tokens."
        )
    if groups is None:
        if H % max(K, 1) or (H and not K):
            raise HeadwiseError(
                f"{H} heads cannot share {K} key/value heads evenly; say groups=(…), one number per head."
            )
        groups = tuple(head * K // H for head in range(H))
    elif len(groups) != H or (H and not 0 <= min(groups) <= max(groups) < K):
        raise HeadwiseError(f"groups must give one of {K} key/value heads to each of {H} heads, got {groups}.")
    S = S if keys is None else keys
    if mask is not None:
        if not isinstance(mask, Mask):
            raise HeadwiseError(
                f"mask must be a Mask, got {type(mask).__name__}; wrap a tensor with hw.Mask.of(tensor)."
            )
        mask.check(B, H, T, S)
    if isinstance(bias, Tensor):
        bias = Given(bias)
    if bias is not None:
        if not isinstance(bias, Bias):
            raise HeadwiseError(f"bias must be a tensor or a Bias, got {type(bias).__name__}.")
        bias.check(B, H, T, S)
    if isinstance(sink, int | float):
        sink = q.new_full((H,), float(sink))
    if sink is not None and sink.shape != (H,):
        raise HeadwiseError(f"sink is {tuple(sink.shape)} but must hold one logit for each of {H} heads.")
    scale = 1 / math.sqrt(d) if scale is None else scale
    if sink is not None and scale == 0:
        raise HeadwiseError("scale must not be 0 where there is a sink.")
    return Terms(scale, groups, mask, bias, softcap, sink, dropout)


@lru_cache
def plain_terms(
    d: int, scale: float | None, groups: tuple[int, ...], mask: Mask | None, softcap: float | None
) -> Terms:
    """Terms of the commonest call, one for all layers and steps: a mask that fits any sizes, and nothing beside."""
    return Terms(1 / math.sqrt(d) if scale is None else scale, groups, mask, softcap=softcap)


@dataclass(frozen=True)
class Choice:
    """Which kernel runs, why, and what would change it."""

    backend: str
    because: str
    instead: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.because}. {self.instead}"


def choose(terms: Terms, B: int, H: int, T: int, S: int) -> Choice:
    """Pick the kernel for a call: fused, unless something in it is beyond the fused kernel."""
    beyond = _beyond_fused(terms)
    if not beyond:
        return Choice(
            "fused",
            _fused_how(terms, T, S),
            "A score cap, dropout on attention weights or a learned bias would move it to batched or blockwise.",
        )
    small = B * H * T * S <= BUDGET
    backend, size = ("batched", "few enough to keep") if small else ("blockwise", "too many to keep at once")
    return Choice(
        backend,
        f"{' and '.join(beyond)}, and the {B}·{H}·{T}·{S} scores are {size}",
        "Without that it would be fused.",
    )


def _beyond_fused(terms: Terms) -> list[str]:
    """What in a call the fused kernel cannot do, or not without keeping every map."""
    beyond = []
    if terms.softcap is not None:
        beyond.append("scores are capped")
    if terms.dropout > 0:
        beyond.append("attention weights are dropped out, which makes the fused kernel keep every map")
    if terms.bias is not None and terms.bias.learned():
        beyond.append(terms.bias.learned_as)
    return beyond


def _fused_how(terms: Terms, T: int, S: int) -> str:
    if terms.mask is None or terms.mask.is_full(T, S):
        how = "every query sees every key"
    elif isinstance(terms.mask, Causal) and terms.mask.places(T, S) == 0:
        how = "plain causal attention, by the kernel's own flag"
    else:
        how = "the mask is handed over in blocks of rows"
    extras = [
        name
        for name, there in (
            ("the sink rides on one more key", terms.sink is not None),
            ("the bias is added", terms.bias is not None),
        )
        if there
    ]
    return ", ".join([how, *extras])
