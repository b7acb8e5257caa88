"""The naive form: one head after the other, in a loop, as the formula says. Slow, plain, and what all others must equal."""

import torch
from torch import Tensor

from headwise.kernels.blocks import nothing
from headwise.kernels.score_params import Terms


def reference(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
    """(B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, H, T, e); half precision is rounded once, at the end."""
    asked = q.dtype
    if asked in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    (B, H, T, _), S = q.shape, k.shape[2]
    bias = None if terms.bias is None else terms.bias.block(range(T), range(S), T, S)
    allowed = None if terms.mask is None else terms.mask.dense(T, S, q.device).expand(B, H, T, S)
    z = nothing(q, k, v)  # (B, H, T, e)
    if S == 0:
        return z.to(asked)
    for head in range(H):
        scores = torch.einsum("btd,bsd->bts", q[:, head], k[:, terms.groups[head]]) * terms.scale
        if terms.softcap is not None:
            scores = torch.tanh(scores / terms.softcap) * terms.softcap
        if bias is not None:
            scores = scores + bias.expand(B, H, T, S)[:, head].to(q.dtype)
        if allowed is not None:
            scores = torch.where(allowed[:, head], scores, -torch.inf)
        peak = scores.detach().amax(-1, keepdim=True)
        peak = peak.clamp(min=torch.finfo(q.dtype).min)  # finite, even where the row is empty
        if terms.sink is not None:
            peak = peak.maximum(terms.sink[head].detach().to(q.dtype))
        share = torch.exp(scores - peak)  # (B, T, S)
        total = share.sum(-1, keepdim=True)
        if terms.sink is not None:
            total = total + torch.exp(terms.sink[head].to(q.dtype) - peak)
        share = share / torch.where(total == 0, 1, total)  # an empty row stays zero
        share = torch.nn.functional.dropout(share, terms.dropout)
        z[:, head] = torch.einsum("bts,bse->bte", share, v[:, terms.groups[head]])
    return z.to(asked)
