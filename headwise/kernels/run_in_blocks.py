"""Runs a kernel in blocks of heads and queries, so that memory grows with n instead of n².

A block contains all visible keys of its queries, so its softmax is complete and results need no rescaling. The backward
pass computes each block again instead of storing it (https://arxiv.org/abs/2112.05682).
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.kernels.random_state import get_rng_state, replayed_rng
from headwise.kernels.score_params import ScoreParams

# A kernel for one block. Arguments: q (B, h, R, d), k and v (B, K, C, ·), score params, row range, key range, T, S.
BlockKernel = Callable[[Tensor, Tensor, Tensor, ScoreParams, range, range, int, int], Tensor]


@dataclass(frozen=True)
class HeadRowBlockShape:
    """Size of the blocks of a call.

    Attributes:
        rows: Number of queries per block.
        heads: Number of heads per block.
    """

    rows: int
    heads: int

    def iter_blocks(self, params: ScoreParams, H: int, T: int, S: int) -> Iterator[tuple[range, range, range, range]]:
        """Yield the heads, KV heads, rows and keys of each block."""
        for first in range(0, H, self.heads):
            heads = range(first, min(first + self.heads, H))
            kv_indices = params.kv_of_head[first : heads.stop]
            for start in range(0, T, self.rows):
                rows = range(start, min(start + self.rows, T))
                yield heads, range(min(kv_indices), max(kv_indices) + 1), rows, params.key_range(rows, T, S)


def run_blocks(
    kernel: BlockKernel, q: Tensor, k: Tensor, v: Tensor, params: ScoreParams, block_shape: HeadRowBlockShape
) -> Tensor:
    """Run a kernel over all blocks: (B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, H, T, e)."""
    H, T, S = q.shape[1], q.shape[2], k.shape[2]
    if min(q.shape[:3]) == 0 or S == 0:
        return zero_output(q, k, v)
    if block_shape.rows >= T and block_shape.heads >= H:
        rows, cols = range(T), params.key_range(range(T), T, S)
        return kernel(q, k[:, :, _as_slice(cols)], v[:, :, _as_slice(cols)], params, rows, cols, T, S)
    return _RunBlocks.apply(kernel, params, block_shape, q, k, v, *params.learnable_tensors())  # pyright: ignore[reportReturnType]


def zero_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the output of queries without visible keys: zeros with zero gradients, (B, H, T, e)."""
    connected = q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()  # 0, connected to the autograd graph
    return q.new_zeros(*q.shape[:3], v.shape[-1]) + connected


class _RunBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: BlockKernel,
        params: ScoreParams,
        block_shape: HeadRowBlockShape,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *extra: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, *extra)
        ctx.kernel, ctx.params, ctx.block_shape = kernel, params, block_shape
        ctx.autocast = _autocast(q.device.type)
        ctx.rng_state = get_rng_state(q.device) if params.dropout else None
        B, H, T, _ = q.shape
        z = q.new_empty(B, T, H, v.shape[-1]).transpose(1, 2)  # so that concatenating heads needs no copy
        for heads, kv_range, rows, cols in block_shape.iter_blocks(params, H, T, k.shape[2]):
            inputs = _slice_qkv(q, k, v, heads, kv_range, rows, cols)
            head_params = params.for_heads(heads, kv_range)
            z[:, _as_slice(heads), _as_slice(rows)] = kernel(*inputs, head_params, rows, cols, T, k.shape[2])
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, *extra = ctx.saved_tensors
        extra = [x.detach().requires_grad_(needed) for x, needed in zip(extra, ctx.needs_input_grad[6:], strict=True)]
        learned = [x for x in extra if x.requires_grad]
        params = ctx.params.with_learnable_tensors(extra)
        # gradients of k and v are sums over many blocks
        accumulation_dtype = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
        dq, dk, dv = (
            torch.empty_like(q),
            torch.zeros_like(k, dtype=accumulation_dtype),
            torch.zeros_like(v, dtype=accumulation_dtype),
        )
        d_learned = [torch.zeros_like(x) for x in learned]
        T, S = q.shape[2], k.shape[2]
        with replayed_rng(ctx.rng_state, q.device), ctx.autocast():
            for heads, kv_range, rows, cols in ctx.block_shape.iter_blocks(params, q.shape[1], T, S):
                with torch.enable_grad():
                    inputs = [x.detach().requires_grad_() for x in _slice_qkv(q, k, v, heads, kv_range, rows, cols)]
                    z = ctx.kernel(*inputs, params.for_heads(heads, kv_range), rows, cols, T, S)
                    grads = torch.autograd.grad(
                        z, [*inputs, *learned], dz[:, _as_slice(heads), _as_slice(rows)], allow_unused=True
                    )
                dq[:, _as_slice(heads), _as_slice(rows)] = grads[0]  # each query is in exactly one block
                for total, grad in ((dk, grads[1]), (dv, grads[2])):
                    total[:, _as_slice(kv_range), _as_slice(cols)] += grad
                for total, grad in zip(d_learned, grads[3:], strict=True):
                    total += 0 if grad is None else grad
        remaining_grads = iter(d_learned)
        return (
            None,
            None,
            None,
            dq,
            dk.to(k.dtype),
            dv.to(v.dtype),
            *(next(remaining_grads) if x.requires_grad else None for x in extra),
        )


def _slice_qkv(
    q: Tensor, k: Tensor, v: Tensor, heads: range, kv_range: range, rows: range, cols: range
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q[:, _as_slice(heads), _as_slice(rows)],
        k[:, _as_slice(kv_range), _as_slice(cols)],
        v[:, _as_slice(kv_range), _as_slice(cols)],
    )


def _as_slice(indices: range) -> slice:
    return slice(indices.start, indices.stop)


def _autocast(device: str) -> Callable[[], Any]:
    """Return a factory of the current autocast context, for the recomputation in the backward pass."""
    if not torch.is_autocast_enabled(device):
        return nullcontext
    dtype = torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype)
