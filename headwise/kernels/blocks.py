"""Running a kernel block by block: some heads, some queries, the keys those can see. Memory grows with n, not with n².

A block is a whole softmax row, so nothing has to be rescaled between blocks. With gradients each block is computed again
in the backward pass instead of being stored (the idea is described in https://arxiv.org/abs/2112.05682).
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.kernels.score_params import Terms

# A kernel for one block: q (B, h, R, d), k and v (B, K, C, ·), terms of those heads, which rows and keys, T, S.
Inner = Callable[[Tensor, Tensor, Tensor, Terms, range, range, int, int], Tensor]


@dataclass(frozen=True)
class Blocks:
    """How a call is cut up."""

    rows: int
    heads: int

    def walk(self, terms: Terms, H: int, T: int, S: int) -> Iterator[tuple[range, range, range, range]]:
        """Heads, their key/value heads, rows and keys of each block."""
        for first in range(0, H, self.heads):
            heads = range(first, min(first + self.heads, H))
            groups = terms.groups[first : heads.stop]
            for start in range(0, T, self.rows):
                rows = range(start, min(start + self.rows, T))
                yield heads, range(min(groups), max(groups) + 1), rows, terms.keys(rows, T, S)


def by_blocks(inner: Inner, q: Tensor, k: Tensor, v: Tensor, terms: Terms, blocks: Blocks) -> Tensor:
    """Run a kernel over all blocks: (B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, H, T, e)."""
    H, T, S = q.shape[1], q.shape[2], k.shape[2]
    if min(q.shape[:3]) == 0 or S == 0:
        return nothing(q, k, v)
    if blocks.rows >= T and blocks.heads >= H:
        rows, cols = range(T), terms.keys(range(T), T, S)
        return inner(q, k[:, :, _s(cols)], v[:, :, _s(cols)], terms, rows, cols, T, S)
    return _OverBlocks.apply(inner, terms, blocks, q, k, v, *terms.tensors())  # pyright: ignore[reportReturnType]


def nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What queries that see no key get: zeros, with zero gradients. (B, H, T, e)"""
    connected = q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()  # 0, but part of the graph
    return q.new_zeros(*q.shape[:3], v.shape[-1]) + connected


class _OverBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inner: Inner, terms: Terms, blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, *extra: Tensor
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, *extra)
        ctx.inner, ctx.terms, ctx.blocks = inner, terms, blocks
        ctx.autocast = _autocast(q.device.type)
        ctx.dice = _dice(q) if terms.dropout else None
        B, H, T, _ = q.shape
        z = q.new_empty(B, T, H, v.shape[-1]).transpose(1, 2)  # so that putting heads side by side costs nothing
        for heads, shared, rows, cols in blocks.walk(terms, H, T, k.shape[2]):
            parts = _cut(q, k, v, heads, shared, rows, cols)
            some = terms.for_heads(heads, shared)
            z[:, _s(heads), _s(rows)] = inner(*parts, some, rows, cols, T, k.shape[2])
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, *extra = ctx.saved_tensors
        extra = [x.detach().requires_grad_(needed) for x, needed in zip(extra, ctx.needs_input_grad[6:], strict=True)]
        wanted = [x for x in extra if x.requires_grad]
        terms = ctx.terms.with_tensors(extra)
        wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype  # many blocks add up
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        dextra = [torch.zeros_like(x) for x in wanted]
        T, S = q.shape[2], k.shape[2]
        gpus = [q.device] if q.is_cuda else []
        with torch.random.fork_rng(gpus, enabled=ctx.dice is not None), ctx.autocast():
            if ctx.dice is not None:
                _set_dice(ctx.dice, q)
            for heads, shared, rows, cols in ctx.blocks.walk(terms, q.shape[1], T, S):
                with torch.enable_grad():
                    parts = [x.detach().requires_grad_() for x in _cut(q, k, v, heads, shared, rows, cols)]
                    z = ctx.inner(*parts, terms.for_heads(heads, shared), rows, cols, T, S)
                    grads = torch.autograd.grad(z, [*parts, *wanted], dz[:, _s(heads), _s(rows)], allow_unused=True)
                dq[:, _s(heads), _s(rows)] = grads[0]  # every query is in just one block
                for total, grad in ((dk, grads[1]), (dv, grads[2])):
                    total[:, _s(shared), _s(cols)] += grad
                for total, grad in zip(dextra, grads[3:], strict=True):
                    total += 0 if grad is None else grad
        left = iter(dextra)
        return (
            None,
            None,
            None,
            dq,
            dk.to(k.dtype),
            dv.to(v.dtype),
            *(next(left) if x.requires_grad else None for x in extra),
        )


def _dice(q: Tensor) -> Tensor:
    """The state of the random numbers dropout will draw, to be drawn again in the backward pass."""
    return torch.cuda.get_rng_state(q.device) if q.is_cuda else torch.get_rng_state()


def _set_dice(state: Tensor, q: Tensor) -> None:
    torch.cuda.set_rng_state(state, q.device) if q.is_cuda else torch.set_rng_state(state)


def _cut(
    q: Tensor, k: Tensor, v: Tensor, heads: range, shared: range, rows: range, cols: range
) -> tuple[Tensor, Tensor, Tensor]:
    return q[:, _s(heads), _s(rows)], k[:, _s(shared), _s(cols)], v[:, _s(shared), _s(cols)]


def _s(run: range) -> slice:
    return slice(run.start, run.stop)


def _autocast(device: str) -> Callable[[], Any]:
    """The mixed precision in force now, to be in force again when a block is repeated."""
    if not torch.is_autocast_enabled(device):
        return nullcontext
    dtype = torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype)
