"""Torch modules with attention, built for tests: layers of torch, a ViT in the style of timm, DETR, and siblings."""

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


class FusedAttention(nn.Module):
    """Attention of a ViT: one linear layer for q, k and v, and one for the output."""

    def __init__(self, width: int, heads: int, *, fused: bool = True, qk_norm: bool = False) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim, self.fused_attn = heads, width // heads, width, fused
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm: nn.Module = nn.LayerNorm(width // heads) if qk_norm else nn.Identity()
        self.k_norm: nn.Module = nn.LayerNorm(width // heads) if qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Attend: (B, N, D) → (B, N, D)."""
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            z = F.scaled_dot_product_attention(q, k, v)
        else:
            z = (q * self.head_dim**-0.5 @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(z.transpose(1, 2).reshape(B, N, self.attn_dim))


class FixedWidthAttention(FusedAttention):
    """Attention whose forward assumes that heads × head_dim is the width of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend: (B, N, D) → (B, N, D)."""
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))


class EinsumAttention(FusedAttention):
    """Attention by einsum, which cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend: (B, N, D) → (B, N, D)."""
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
        return self.proj(torch.einsum("bhij,bhjd->bihd", weights, v).flatten(2))


class ViTBlock(nn.Module):
    """Pre-norm block with the attribute names of timm."""

    def __init__(self, attn: nn.Module, width: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), attn, nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Run the block: (B, N, D) → (B, N, D)."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Small ViT: patches by a convolution, a class token, blocks, and a classifier."""

    def __init__(self, attention: type[FusedAttention] = FusedAttention, **options: Any) -> None:
        super().__init__()
        width, heads = 20, 5
        self.patch_embed = nn.Conv2d(3, width, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.Sequential(*(ViTBlock(attention(width, heads, **options), width) for _ in range(2)))
        self.head = nn.Linear(width, 7)

    def forward(self, pixels: Tensor) -> Tensor:
        """Classify images: (B, 3, 12, 12) → (B, 7)."""
        x = self.patch_embed(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1)
        return self.head(self.blocks(x)[:, 0])


class DetrDecoderLayer(nn.Module):
    """Decoder layer of DETR: positions are added to queries and keys, but not to values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self_attn, self.multihead_attn = (nn.MultiheadAttention(width, heads) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor, query_pos: Tensor, pos: Tensor, padding: Tensor) -> Tensor:
        """Decode: (T, B, D) → (T, B, D)."""
        q = x + query_pos
        x = self.norms[0](x + self.self_attn(q, q, value=x)[0])
        attended = self.multihead_attn(x + query_pos, memory + pos, value=memory, key_padding_mask=padding)[0]
        return self.norms[1](x + attended)


class Detr(nn.Module):
    """Small DETR: image features, an encoder of torch, object queries."""

    def __init__(self) -> None:
        super().__init__()
        width, heads = 24, 4
        self.backbone = nn.Conv2d(3, width, 4, 4)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, heads, 40), 2, enable_nested_tensor=False
        )
        self.decoder = nn.ModuleList(DetrDecoderLayer(width, heads) for _ in range(2))
        self.query_pos = nn.Embedding(6, width)
        self.classes = nn.Linear(width, 5)

    def forward(self, pixels: Tensor, padding: Tensor) -> Tensor:
        """Detect: (B, 3, 12, 12), (B, 9) → (6, B, 5)."""
        features = self.backbone(pixels).flatten(2).permute(2, 0, 1)  # (S, B, D)
        pos = torch.linspace(-1, 1, len(features))[:, None, None].expand_as(features)
        memory = self.encoder(features + pos, src_key_padding_mask=padding)
        query_pos = self.query_pos.weight[:, None].expand(-1, len(pixels), -1)
        x = torch.zeros_like(query_pos)
        for layer in self.decoder:
            x = layer(x, memory, query_pos, pos, padding)
        return self.classes(x)


class Siblings(nn.Module):
    """Several encoders side by side."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        for index in range(count):
            layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True)
            self.add_module(f"reader_{'abcdefghijkl'[index]}", nn.TransformerEncoder(layer, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Sum the outputs: (B, T, D) → (B, T, D)."""
        return torch.stack([reader(x) for reader in self.children()]).sum(0)


def randomize(model: M) -> M:
    """Draw all weights from a normal distribution, in evaluation mode. torch starts biases of attention at zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * weight.shape[-1] ** -0.5 if weight.ndim > 1 else noise * 0.3 + (weight == 1))
    return model.eval()
