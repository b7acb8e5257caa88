"""`nn.MultiheadAttention` without its pruned heads. torch's own class needs heads × head_dim = width."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class TorchMHACall:
    """Arguments of one call of `nn.MultiheadAttention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False

    def run(self, forward: Callable[..., Any]) -> tuple[Tensor, Tensor | None]:
        """Pass the arguments to a function."""
        return forward(**vars(self))


class PrunedMultiheadAttention(nn.Module):
    """An `nn.MultiheadAttention` with fewer heads, and the same call and return values.

    A query that may not attend to any key gets zeros if weights are not requested, as in SDPA, and NaN otherwise.

    Args:
        module: The module with all heads. It is not changed.
        indices: Indices of the heads to keep.

    Attributes:
        original_heads: Number of heads before any were pruned.
        kept_heads: Original numbers of the remaining heads.
    """

    _qkv_same_embed_dim = False  # so that torch's blocks call this module instead of their own kernels

    def __init__(self, module: "nn.MultiheadAttention | PrunedMultiheadAttention", indices: Sequence[int]) -> None:
        super().__init__()
        original = module if isinstance(module, PrunedMultiheadAttention) else None
        self.original_heads = module.num_heads if original is None else original.original_heads
        kept_heads = tuple(range(module.num_heads)) if original is None else original.kept_heads
        self.kept_heads = tuple(kept_heads[index] for index in indices)
        self.embed_dim, self.kdim, self.vdim, self.head_dim = (
            module.embed_dim,
            module.kdim,
            module.vdim,
            module.head_dim,
        )
        self.num_heads, self.dropout, self.batch_first = len(indices), module.dropout, module.batch_first
        self.add_zero_attn = module.add_zero_attn
        rows = [index * module.head_dim + channel for index in indices for channel in range(module.head_dim)]
        index = torch.tensor(rows, dtype=torch.long, device=module.out_proj.weight.device)
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"):
            weight = getattr(module, name)
            parts = () if weight is None else weight.detach().chunk(3) if name.startswith("in_") else (weight.detach(),)
            sliced = torch.cat([part.index_select(0, index) for part in parts]) if parts else None
            self._keep(name, sliced, weight)
        for name in ("bias_k", "bias_v"):
            weight = getattr(module, name)
            self._keep(name, None if weight is None else weight.detach().index_select(2, index), weight)
        bias = module.out_proj.bias
        kept_weight = _as_parameter_like(module.out_proj.weight.detach().index_select(1, index), module.out_proj.weight)
        self.out_proj = make_linear(
            kept_weight, None if bias is None else _as_parameter_like(bias.detach().clone(), bias)
        )
        self.train(module.training)

    def _keep(self, name: str, value: Tensor | None, like: Tensor | None) -> None:
        self.register_parameter(name, None if value is None or like is None else _as_parameter_like(value, like))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the attention weights or None.

        Args:
            *args: Arguments of `nn.MultiheadAttention.forward`.
            **kwargs: Keyword arguments of `nn.MultiheadAttention.forward`.
        """
        call = TorchMHACall(*args, **kwargs)
        query, key, value, padding = call.query, call.key, call.value, call.key_padding_mask
        if query.is_nested:
            lengths = torch.tensor([len(x) for x in query.unbind()], device=query.device)
            query, key, value = (x.to_padded_tensor(0.0) for x in (query, key, value))
            real = torch.arange(query.shape[1], device=query.device) < lengths[:, None]  # (B, T)
            out, weights = self._attend(query, key, value, replace(call, key_padding_mask=~real))
            return torch._nested_tensor_from_mask(out.contiguous(), real, mask_check=False), weights  # pyright: ignore
        if query.ndim == 2:
            call = replace(call, key_padding_mask=None if padding is None else padding[None])
            out, weights = self._attend(query[None], key[None], value[None], call)
            return out[0], None if weights is None else weights[0]
        if self.batch_first:
            return self._attend(query, key, value, call)
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        out, weights = self._attend(query, key, value, call)
        return out.transpose(0, 1), weights

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, call: TorchMHACall) -> tuple[Tensor, Tensor | None]:
        """Attend with all inputs batch-first: (B, T, D), (B, S, ·), (B, S, ·) → (B, T, D)."""
        padding, need_weights = call.key_padding_mask, call.need_weights
        q, k, v = project_qkv(self, query, key, value)
        (B, H, T, d), S = q.shape, k.shape[2]
        uses_hint = call.is_causal and padding is None and not need_weights  # as in torch, which then ignores attn_mask
        scores = (
            None if uses_hint else mask_scores_to_add(self, q, S, call.attn_mask, padding)
        )  # (B or 1, H or 1, T, S)
        dropout = self.dropout if self.training else 0.0
        if not need_weights or not H:
            z = F.scaled_dot_product_attention(q, k, v, scores, dropout, uses_hint) if H else v.new_zeros(B, 0, T, d)
            weights = q.new_zeros(B, H, T, S) if need_weights else None
        else:
            products = (q * d**-0.5) @ k.mT
            weights = F.dropout((products if scores is None else products + scores).softmax(-1), dropout)
            z = weights @ v
        out = self.out_proj(z.transpose(1, 2).flatten(2))  # (B, T, D)
        if weights is not None and call.average_attn_weights:
            weights = weights.mean(1) if H else q.new_zeros(B, T, S)
        return out, weights


def qkv_weights_and_biases(module: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Return the weights (H·d, width) and the biases (H·d,) of q, k and v of an `nn.MultiheadAttention`, pruned or not."""
    separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    weights = separate if module.in_proj_weight is None else module.in_proj_weight.chunk(3)
    return weights, (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)


def project_qkv(module: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute q, k and v of an `nn.MultiheadAttention`, with its extra keys: (B, H, T, d), (B, H, S, d), (B, H, S, d)."""
    H, d = module.num_heads, module.head_dim
    q, k, v = (
        F.linear(x, weight, bias).unflatten(-1, (H, d)).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), *qkv_weights_and_biases(module), strict=True)
    )
    if module.bias_k is not None:
        k, v = (
            torch.cat((x, extra.view(1, H, 1, d).expand(len(x), -1, -1, -1)), 2)
            for x, extra in ((k, module.bias_k), (v, module.bias_v))
        )
    if module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    return q, k, v


def mask_scores_to_add(
    module: Any, q: Tensor, S: int, attn_mask: Tensor | None, padding: Tensor | None
) -> Tensor | None:
    """Return the numbers that the masks add to the scores, (B or 1, H or 1, T, S), or None. Extra keys are visible."""
    total: Tensor | None = None
    for mask, is_padding in ((attn_mask, False), (padding, True)):
        if mask is None:
            continue
        added = mask.to(q) if mask.is_floating_point() else q.new_zeros(mask.shape).masked_fill(mask.bool(), -torch.inf)
        if is_padding:
            added = added[:, None, None]
        elif added.ndim == 2:
            added = added[None, None]
        else:  # one mask per example and head of the original module
            added = added.unflatten(0, (len(q), -1))
            head_ids = getattr(module, "kept_heads", tuple(range(added.shape[1])))
            added = added.index_select(1, torch.tensor(head_ids, dtype=torch.long, device=q.device))
        added = F.pad(added, (0, S - added.shape[-1]))
        total = added if total is None else total + added
    return total


def make_linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """Return a linear layer with these weights, (out, in). Either size may be 0."""
    linear = nn.Linear(1, 1, bias=bias is not None, device="meta")
    linear.out_features, linear.in_features = weight.shape
    linear.weight = weight
    if bias is not None:
        linear.bias = bias
    return linear


def _as_parameter_like(value: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(value.contiguous(), requires_grad=like.requires_grad)
