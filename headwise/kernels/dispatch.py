"""The one signature of all kernels, and the choice between them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from headwise.errors import HeadwiseError, suggest_names
from headwise.kernels.batched import batched
from headwise.kernels.blockwise import SCORE_BUDGET, blockwise
from headwise.kernels.fused import fused
from headwise.kernels.masks import CausalMask, Mask
from headwise.kernels.reference import reference
from headwise.kernels.score_bias import Bias, DenseBias
from headwise.kernels.score_params import ScoreParams

BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, ScoreParams], Tensor]] = {
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
    kv_of_head: tuple[int, ...] | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Scaled-dot-product attention of all heads: (B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, H, T, e).

    `kv_of_head` says which key/value head each head reads, default: in even groups. `sink` is a logit per head that takes
    part in the softmax and writes nothing; 0.0 gives the off-by-one softmax. `bias` is added to the
    scores: a tensor, or a `Bias`.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    >>> attention(q, k, v).shape
    torch.Size([1, 2, 5, 4])
    """
    params = make_score_params(
        q, k, v, mask=mask, scale=scale, bias=bias, softcap=softcap, sink=sink, kv_of_head=kv_of_head, dropout=dropout
    )
    return run_kernel(q, k, v, params, backend)


def run_kernel(q: Tensor, k: Tensor, v: Tensor, params: ScoreParams, backend: str = "auto") -> Tensor:
    """The same, for a caller whose score params are ready."""
    if backend == "auto":
        unsupported = _unsupported_by_fused(params)  # to write down why takes longer than to know
        if not unsupported:
            backend = "fused"
        elif torch.compiler.is_exporting():
            backend = "batched"  # sizes may be symbols: nobody knows how large the maps will be
        else:
            backend = make_kernel_choice(params, q.shape[0], q.shape[1], q.shape[2], k.shape[2]).backend
    kernel = BACKENDS.get(backend)
    if kernel is None:
        raise HeadwiseError(f"there is no backend {backend!r}; {suggest_names(backend, ['auto', *BACKENDS])}")
    return kernel(q, k, v, params)


def make_score_params(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    bias: Bias | Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | float | None = None,
    kv_of_head: tuple[int, ...] | None = None,
    dropout: float = 0.0,
    num_keys: int | None = None,
) -> ScoreParams:
    """Check a call and fill in what was left out; `num_keys` counts all there are, where k and v are only the new ones."""
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
    if kv_of_head is None:
        if H % max(K, 1) or (H and not K):
            raise HeadwiseError(
                f"{H} heads cannot share {K} key/value heads evenly; say kv_of_head=(…), one number per head."
            )
        kv_of_head = tuple(head * K // H for head in range(H))
    elif len(kv_of_head) != H or (H and not 0 <= min(kv_of_head) <= max(kv_of_head) < K):
        raise HeadwiseError(f"kv_of_head must give one of {K} key/value heads to each of {H} heads, got {kv_of_head}.")
    S = S if num_keys is None else num_keys
    if mask is not None:
        if not isinstance(mask, Mask):
            raise HeadwiseError(
                f"mask must be a Mask, got {type(mask).__name__}; wrap a tensor with hw.Mask.of(tensor)."
            )
        mask.check(B, H, T, S)
    if isinstance(bias, Tensor):
        bias = DenseBias(bias)
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
    return ScoreParams(scale, kv_of_head, mask, bias, softcap, sink, dropout)


@lru_cache
def default_score_params(
    d: int, scale: float | None, kv_of_head: tuple[int, ...], mask: Mask | None, softcap: float | None
) -> ScoreParams:
    """Score params of the commonest call, one for all layers and steps: a mask that fits any sizes, and nothing beside."""
    return ScoreParams(1 / math.sqrt(d) if scale is None else scale, kv_of_head, mask, softcap=softcap)


@dataclass(frozen=True)
class KernelChoice:
    """Which kernel runs, why, and what would change it."""

    backend: str
    reason: str
    alternative: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}. {self.alternative}"


def make_kernel_choice(params: ScoreParams, B: int, H: int, T: int, S: int) -> KernelChoice:
    """Pick the kernel for a call: fused, unless something in it is beyond the fused kernel."""
    unsupported = _unsupported_by_fused(params)
    if not unsupported:
        return KernelChoice(
            "fused",
            _describe_fused(params, T, S),
            "A score cap, dropout on attention weights or a learned bias would move it to batched or blockwise.",
        )
    small = B * H * T * S <= SCORE_BUDGET
    backend, size = ("batched", "few enough to keep") if small else ("blockwise", "too many to keep at once")
    return KernelChoice(
        backend,
        f"{' and '.join(unsupported)}, and the {B}·{H}·{T}·{S} scores are {size}",
        "Without that it would be fused.",
    )


def _unsupported_by_fused(params: ScoreParams) -> list[str]:
    """What in a call the fused kernel cannot do, or not without keeping every map."""
    unsupported = []
    if params.softcap is not None:
        unsupported.append("scores are capped")
    if params.dropout > 0:
        unsupported.append("attention weights are dropped out, which makes the fused kernel keep every map")
    if params.bias is not None and params.bias.needs_grad():
        unsupported.append(params.bias.learned_reason)
    return unsupported


def _describe_fused(params: ScoreParams, T: int, S: int) -> str:
    if params.mask is None or params.mask.is_full(T, S):
        description = "every query sees every key"
    elif isinstance(params.mask, CausalMask) and params.mask.resolve_offset(T, S) == 0:
        description = "plain causal attention, by the kernel's own flag"
    else:
        description = "the mask is handed over in blocks of rows"
    extras = [
        name
        for name, is_present in (
            ("the sink rides on one more key", params.sink is not None),
            ("the bias is added", params.bias is not None),
        )
        if is_present
    ]
    return ", ".join([description, *extras])
