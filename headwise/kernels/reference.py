"""Reference kernel: a loop over heads that follows the formula. Slow; tests compare all other kernels with it."""

import torch
from torch import Tensor

from headwise.kernels.run_in_blocks import zero_output
from headwise.kernels.score_params import ScoreParams


def reference(q: Tensor, k: Tensor, v: Tensor, params: ScoreParams) -> Tensor:
    """Attend head by head: (B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, H, T, e).

    Half-precision inputs are computed in float32 and rounded once at the end.
    """
    dtype = q.dtype
    if dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    (B, H, T, _), S = q.shape, k.shape[2]
    bias = None if params.bias is None else params.bias.block(range(T), range(S), T, S)
    allowed = None if params.mask is None else params.mask.dense(T, S, q.device).expand(B, H, T, S)
    z = zero_output(q, k, v)  # (B, H, T, e)
    if S == 0:
        return z.to(dtype)
    for head in range(H):
        scores = torch.einsum("btd,bsd->bts", q[:, head], k[:, params.kv_of_head[head]]) * params.scale
        if params.softcap is not None:
            scores = torch.tanh(scores / params.softcap) * params.softcap
        if bias is not None:
            scores = scores + bias.expand(B, H, T, S)[:, head].to(q.dtype)
        if allowed is not None:
            scores = torch.where(allowed[:, head], scores, -torch.inf)
        max_score = scores.detach().amax(-1, keepdim=True)
        max_score = max_score.clamp(min=torch.finfo(q.dtype).min)  # finite even if the row is empty
        if params.sink is not None:
            max_score = max_score.maximum(params.sink[head].detach().to(q.dtype))
        probs = torch.exp(scores - max_score)  # (B, T, S)
        total = probs.sum(-1, keepdim=True)
        if params.sink is not None:
            total = total + torch.exp(params.sink[head].to(q.dtype) - max_score)
        probs = probs / torch.where(total == 0, 1, total)  # an empty row stays zero
        probs = torch.nn.functional.dropout(probs, params.dropout)
        z[:, head] = torch.einsum("bts,bse->bte", probs, v[:, params.kv_of_head[head]])
    return z.to(dtype)
