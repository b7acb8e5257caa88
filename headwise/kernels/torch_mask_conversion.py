"""Conversion of masks to and from the two opposite conventions of torch.

In `nn.MultiheadAttention` and `nn.Transformer*`, True **hides** a key. In `F.scaled_dot_product_attention`, True **shows**
it. Float masks are added to the scores in both, so they are converted to a bias.
"""

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.kernels.masks import Mask, padding_mask


def from_sdpa(attn_mask: Tensor) -> Mask | Tensor:
    """Convert an `attn_mask` of SDPA, (…, T, S): bool to a mask, float to an additive bias (1 or B, 1 or H, T, S).

    >>> from_sdpa(torch.tensor([[True, False]])).dense(1, 2)[0, 0]
    tensor([[ True, False]])
    """
    four_axes = attn_mask[(None,) * (4 - attn_mask.ndim)]
    return four_axes if attn_mask.is_floating_point() else Mask.of(four_axes)


def from_mha(attn_mask: Tensor, heads: int) -> Mask | Tensor:
    """Convert an `attn_mask` of `nn.MultiheadAttention`, (T, S) or (B·heads, T, S), True at hidden keys.

    >>> from_mha(torch.tensor([[True, False]]), heads=1).dense(1, 2)[0, 0]
    tensor([[False,  True]])
    """
    if attn_mask.ndim == 3:
        if attn_mask.shape[0] % heads:
            raise ArgumentError(
                f"attn_mask: the first axis of (batch·heads, T, S) must be a multiple of heads={heads}. "
                f"Got shape {tuple(attn_mask.shape)}."
            )
        attn_mask = attn_mask.unflatten(0, (-1, heads))  # (B, H, T, S)
    return from_sdpa(attn_mask if attn_mask.is_floating_point() else ~attn_mask.bool())


def from_mha_padding(key_padding_mask: Tensor) -> Mask:
    """Convert a `key_padding_mask` of `nn.MultiheadAttention`, (B, S), True at padding.

    >>> from_mha_padding(torch.tensor([[False, True]])).dense(1, 2)[0, 0]
    tensor([[ True, False]])
    """
    if key_padding_mask.is_floating_point():
        raise ArgumentError(
            f"key_padding_mask: must be bool. Got {key_padding_mask.dtype}, which is an additive bias. "
            f"Pass it as bias=mask[:, None, None, :]."
        )
    return padding_mask(~key_padding_mask.bool())


def to_sdpa(mask: Mask, T: int, S: int, device: torch.device | str = "cpu") -> Tensor:
    """Convert a mask to a bool tensor for SDPA: (1 or B, 1 or H, T, S), True at visible keys."""
    dense = mask.dense(T, S, device)
    return dense.expand(*dense.shape[:2], T, S)


def to_mha(mask: Mask, T: int, S: int, *, batch: int, heads: int, device: torch.device | str = "cpu") -> Tensor:
    """Convert a mask to a bool tensor for `nn.MultiheadAttention`, True at hidden keys.

    The shape is (T, S), or (B·heads, T, S) if examples or heads have different masks.
    """
    blocked = ~to_sdpa(mask, T, S, device)
    if blocked.shape[:2] == (1, 1):
        return blocked[0, 0]  # (T, S)
    return blocked.expand(batch, heads, T, S).reshape(batch * heads, T, S)
