"""Entry point of all kernels, and the choice of a kernel for a call."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from headwise.errors import ArgumentError, suggest_names
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
    """Compute scaled dot-product attention of all heads.

    Args:
        q: Queries, (B, H, T, d).
        k: Keys, (B, K, S, d).
        v: Values, (B, K, S, e).
        mask: Keys that each query may attend to. None means all keys.
        scale: Factor of the scores. None means 1/√d.
        bias: Added to the scores: a tensor that broadcasts to (B, H, T, S), or a `Bias`.
        softcap: Scores become softcap·tanh(score/softcap) before the bias is added. None means no cap.
        sink: Logit per head, (H,), that takes part in the softmax and adds nothing to the output. 0.0 is the
            off-by-one softmax.
        kv_of_head: Index of the KV head of each head. None means even groups.
        dropout: Dropout rate of the attention weights.
        backend: Kernel: "auto", "fused", "batched", "blockwise" or "reference".

    Returns:
        Head outputs z, (B, H, T, e).

    Raises:
        ArgumentError: Shapes do not match, or the backend is unknown.

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
    """Compute attention with score params that are already checked. `attention` documents the shapes."""
    if backend == "auto":
        unsupported = _unsupported_by_fused(params)  # cheaper than make_kernel_choice, which formats a reason
        if not unsupported:
            backend = "fused"
        elif torch.compiler.is_exporting():
            backend = "batched"  # sizes may be symbolic, so the size of the maps is unknown
        else:
            backend = make_kernel_choice(params, q.shape[0], q.shape[1], q.shape[2], k.shape[2]).backend
    kernel = BACKENDS.get(backend)
    if kernel is None:
        raise ArgumentError(f"backend={backend!r}: unknown; {suggest_names(backend, ['auto', *BACKENDS])}")
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
    """Check the arguments of a call and fill in defaults. `attention` documents the arguments.

    `num_keys` is the total number of keys if k and v contain only the new tokens.
    """
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ArgumentError(
            f"q, k, v: must have shape (batch, heads, tokens, channels). Got {tuple(q.shape)}, {tuple(k.shape)}, "
            f"{tuple(v.shape)}."
        )
    (B, H, T, d), (_, K, S, _) = q.shape, k.shape
    if k.shape[-1] != d or v.shape[:3] != k.shape[:3] or k.shape[0] != B:
        raise ArgumentError(
            f"q, k, v: shapes do not match. Got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}. q and k must "
            f"have the same batch and channels; k and v must have the same batch, heads and tokens."
        )
    if kv_of_head is None:
        if H % max(K, 1) or (H and not K):
            raise ArgumentError(
                f"q, k: {H} heads cannot be divided evenly over {K} KV heads. Pass kv_of_head=(…), with the index of the KV "
                f"head of each head."
            )
        kv_of_head = tuple(head * K // H for head in range(H))
    elif len(kv_of_head) != H or (H and not 0 <= min(kv_of_head) <= max(kv_of_head) < K):
        raise ArgumentError(
            f"kv_of_head={kv_of_head}: needs {H} numbers, one per head, each a KV head index below {K}."
        )
    S = S if num_keys is None else num_keys
    if mask is not None:
        if not isinstance(mask, Mask):
            raise ArgumentError(
                f"mask: must be a Mask. Got {type(mask).__name__}. Convert a tensor with hw.Mask.of(tensor)."
            )
        mask.check(B, H, T, S)
    if isinstance(bias, Tensor):
        bias = DenseBias(bias)
    if bias is not None:
        if not isinstance(bias, Bias):
            raise ArgumentError(f"bias: must be a tensor or a Bias. Got {type(bias).__name__}.")
        bias.check(B, H, T, S)
    if isinstance(sink, int | float):
        sink = q.new_full((H,), float(sink))
    if sink is not None and sink.shape != (H,):
        raise ArgumentError(f"sink: needs one logit per head, shape ({H},). Got shape {tuple(sink.shape)}.")
    scale = 1 / math.sqrt(d) if scale is None else scale
    if sink is not None and scale == 0:
        raise ArgumentError("scale=0: not supported with a sink. Use a nonzero scale, or sink=None.")
    return ScoreParams(scale, kv_of_head, mask, bias, softcap, sink, dropout)


@lru_cache
def default_score_params(
    d: int, scale: float | None, kv_of_head: tuple[int, ...], mask: Mask | None, softcap: float | None
) -> ScoreParams:
    """Return the cached score params of a call without bias, sink and dropout, whose mask fits any size."""
    return ScoreParams(1 / math.sqrt(d) if scale is None else scale, kv_of_head, mask, softcap=softcap)


@dataclass(frozen=True)
class KernelChoice:
    """Kernel of a call, and the reason.

    Attributes:
        backend: Name of the kernel.
        reason: Reason of the choice.
        alternative: Change that would select another kernel.
    """

    backend: str
    reason: str
    alternative: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}. {self.alternative}"


def make_kernel_choice(params: ScoreParams, B: int, H: int, T: int, S: int) -> KernelChoice:
    """Choose the kernel of a call: fused if it supports the call, otherwise batched or blockwise by size."""
    unsupported = _unsupported_by_fused(params)
    if not unsupported:
        return KernelChoice(
            "fused",
            _describe_fused_inputs(params, T, S),
            "A softcap, dropout of attention weights or a learned bias would select batched or blockwise.",
        )
    small = B * H * T * S <= SCORE_BUDGET
    backend, size = ("batched", "fit into memory at once") if small else ("blockwise", "do not fit into memory at once")
    return KernelChoice(
        backend,
        f"{' and '.join(unsupported)}, and the {B}·{H}·{T}·{S} scores {size}",
        "Without this the fused kernel would run.",
    )


def _unsupported_by_fused(params: ScoreParams) -> list[str]:
    """Return the reasons why the fused kernel does not support a call, or would store all attention maps."""
    unsupported = []
    if params.softcap is not None:
        unsupported.append("scores have a softcap")
    if params.dropout > 0:
        unsupported.append("attention weights have dropout, for which the fused kernel would store all attention maps")
    if params.bias is not None and params.bias.needs_grad():
        unsupported.append(params.bias.learned_reason)
    return unsupported


def _describe_fused_inputs(params: ScoreParams, T: int, S: int) -> str:
    if params.mask is None or params.mask.is_full(T, S):
        description = "every query attends to every key"
    elif isinstance(params.mask, CausalMask) and params.mask.resolve_offset(T, S) == 0:
        description = "plain causal attention, with the causal flag of the kernel"
    else:
        description = "the mask is passed in blocks of rows"
    extras = [
        name
        for name, is_present in (
            ("the sink is passed as an additional key", params.sink is not None),
            ("the bias is added", params.bias is not None),
        )
        if is_present
    ]
    return ", ".join([description, *extras])
