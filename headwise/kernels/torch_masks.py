"""To and from torch's two opposite conventions, by name, so that nobody has to guess a polarity.

`nn.MultiheadAttention` and `nn.Transformer*`: a bool True **hides** a key. `F.scaled_dot_product_attention`: a bool True
**shows** it. Floats are added to the scores in both, so they come back as a bias.
"""

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.kernels.masks import Mask, padding_mask


def from_sdpa(attn_mask: Tensor) -> Mask | Tensor:
    """SDPA's `attn_mask`, (…, T, S): a bool becomes a mask, a float an additive bias (1 or B, 1 or H, T, S).

    >>> from_sdpa(torch.tensor([[True, False]])).dense(1, 2)[0, 0]
    tensor([[ True, False]])
    """
    four_axes = attn_mask[(None,) * (4 - attn_mask.ndim)]
    return four_axes if attn_mask.is_floating_point() else Mask.of(four_axes)


def from_mha(attn_mask: Tensor, heads: int) -> Mask | Tensor:
    """`nn.MultiheadAttention`'s `attn_mask`, (T, S) or (B·heads, T, S), True = hidden.

    >>> from_mha(torch.tensor([[True, False]]), heads=1).dense(1, 2)[0, 0]
    tensor([[False,  True]])
    """
    if attn_mask.ndim == 3:
        if attn_mask.shape[0] % heads:
            raise HeadwiseError(
                f"attn_mask has {attn_mask.shape[0]} leading rows, not a multiple of {heads} heads; give (batch·heads, T, S)."
            )
        attn_mask = attn_mask.unflatten(0, (-1, heads))  # (B, H, T, S)
    return from_sdpa(attn_mask if attn_mask.is_floating_point() else ~attn_mask.bool())


def from_mha_padding(key_padding_mask: Tensor) -> Mask:
    """`nn.MultiheadAttention`'s `key_padding_mask`, (B, S), True = padding.

    >>> from_mha_padding(torch.tensor([[False, True]])).dense(1, 2)[0, 0]
    tensor([[ True, False]])
    """
    if key_padding_mask.is_floating_point():
        raise HeadwiseError("a float key_padding_mask is a bias; pass it as bias=mask[:, None, None, :].")
    return padding_mask(~key_padding_mask.bool())


def to_sdpa(mask: Mask, T: int, S: int, device: torch.device | str = "cpu") -> Tensor:
    """A bool tensor for SDPA: (1 or B, 1 or H, T, S), True = may look."""
    dense = mask.dense(T, S, device)
    return dense.expand(*dense.shape[:2], T, S)


def to_mha(mask: Mask, T: int, S: int, *, batch: int, heads: int, device: torch.device | str = "cpu") -> Tensor:
    """A bool tensor for `nn.MultiheadAttention`: (T, S), or (B·heads, T, S) where rows or heads differ; True = hidden."""
    blocked = ~to_sdpa(mask, T, S, device)
    if blocked.shape[:2] == (1, 1):
        return blocked[0, 0]  # (T, S)
    return blocked.expand(batch, heads, T, S).reshape(batch * heads, T, S)
