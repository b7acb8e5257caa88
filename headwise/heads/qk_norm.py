"""Norms of queries and keys, over the channels of each head or over those of all heads (`QKNorm`).

A norm over all heads is computed from one sum per token. The heads of a pruned layer still need the queries and keys of the
pruned heads for this sum, so the layer keeps their rows of W_Q and W_K:

    mean square of a token's queries = (Σ over remaining heads |q_h|² + Σ over pruned heads |q_h|²) / (heads · head_dim)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.kernels.rounding_tolerance import at_least_float32, to_float64
from headwise.spec import AttentionSpec


class HeadNorm(nn.Module):
    """Norm of the queries or the keys of a layer.

    Args:
        spec: Configuration of the layer, with `qk_norm`.
        projection: "q" or "k".
    """

    def __init__(self, spec: AttentionSpec, projection: str) -> None:
        super().__init__()
        assert spec.qk_norm is not None
        self.norm, self.projection, self.head_dim = spec.qk_norm, projection, spec.head_dim
        present = len(spec.head_ids if projection == "q" else spec.kv_head_ids)
        total_heads = spec.heads if projection == "q" else spec.kv_heads
        self.total_channels = total_heads * spec.head_dim
        shape = (present, spec.head_dim) if self.norm.weights == "per_head" else (spec.head_dim,)
        self.weight = nn.Parameter(torch.empty(shape)) if self.norm.weights != "none" else None
        self.bias = nn.Parameter(torch.empty(shape)) if self.norm.bias else None
        pruned, width = len(spec.pruned_norm_rows[projection]), spec.width if projection == "q" else spec.kv_width
        has_rows = pruned > 0
        self.pruned_weight = nn.Parameter(torch.empty(pruned, spec.head_dim, width)) if has_rows else None
        self.pruned_bias = nn.Parameter(torch.empty(pruned, spec.head_dim)) if has_rows and spec.bias else None
        # set if other processes hold heads of the layer: sums the gradients of gains and biases over processes
        self.sum_grads: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Normalize queries or keys of each token: (B, H, T, d), layer input (B, T, D) → (B, H, T, d)."""
        weight, bias = self._gains()
        norm = self.norm
        if norm.over == "head" and norm.kind == "rms" and norm.weights != "per_head":
            return F.rms_norm(x, (self.head_dim,), weight, norm.eps)
        mean, scale = self.statistics(x, inputs)
        wide = at_least_float32(x)
        normed = ((wide if mean is None else wide - mean) * scale).to(x.dtype)
        if weight is not None:
            normed = (at_least_float32(normed) * self._by_head(at_least_float32(weight))).to(x.dtype)
        return normed if bias is None else normed + self._by_head(bias)

    def statistics(self, x: Tensor, inputs: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the mean (None for RMS norms) and the inverse standard deviation, (B, H or 1, T, 1) each.

        Args:
            x: Queries or keys, (B, H, T, d).
            inputs: Input of the layer, (B, T, D).
        """
        x, norm = at_least_float32(x), self.norm
        if norm.over == "head":
            mean = x.mean(-1, keepdim=True) if norm.kind == "layer" else None
            variance = (x if mean is None else x - mean).square().mean(-1, keepdim=True)
            return mean, (variance + norm.eps).rsqrt()
        pruned = self._pruned_channels(inputs, x)  # (B, T, channels)
        mean = None
        if norm.kind == "layer":
            mean = (x.sum((1, 3)) + pruned.sum(-1))[:, None, :, None] / self.total_channels  # (B, 1, T, 1)
            x, pruned = x - mean, pruned - mean[:, 0]
        total = x.square().sum((1, 3)) + pruned.square().sum(-1)  # (B, T)
        return mean, (total[:, None, :, None] / self.total_channels + norm.eps).rsqrt()

    def double_statistics(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Return the scale of an RMS norm in float64: (B, H, T, d), (B, T, D) → (B, H or 1, T, 1)."""
        return self.statistics(to_float64(x), inputs)[1]

    @property
    def gain(self) -> Tensor | None:
        """Gains of the norm, (d,) or (H, d), including the 1 of "rms_plus_one"; None for a norm without weights."""
        if self.weight is None or self.norm.kind != "rms_plus_one":
            return self.weight
        return 1 + at_least_float32(self.weight)

    def _gains(self) -> tuple[Tensor | None, Tensor | None]:
        gain, bias = self.gain, self.bias
        if self.sum_grads is None:
            return gain, bias
        return (None if gain is None else self.sum_grads(gain)), (None if bias is None else self.sum_grads(bias))

    @staticmethod
    def _by_head(gain: Tensor) -> Tensor:
        return gain[:, None] if gain.ndim == 2 else gain  # (H, 1, d)

    def _pruned_channels(self, inputs: Tensor, like: Tensor) -> Tensor:
        """Return the queries or keys of pruned heads, (B, T, channels)."""
        if self.pruned_weight is None:
            return like.new_zeros(*inputs.shape[:2], 0)
        bias = None if self.pruned_bias is None else self.pruned_bias.flatten()
        return F.linear(inputs, self.pruned_weight.flatten(0, 1), bias).to(like)

    def extra_repr(self) -> str:
        """Return the settings for `print(layer)`."""
        return f"{self.norm.kind} over {self.norm.over}, weights={self.norm.weights}"


@torch.no_grad()
def store_pruned_norm_rows(
    state: dict[str, Tensor], prefix: str, layer: Any, before: AttentionSpec, after: AttentionSpec
) -> None:
    """Add the rows of newly pruned heads to a state dict, for a norm over the full width.

    Args:
        state: State dict of the model, changed in place.
        prefix: Prefix of the layer's tensors.
        layer: The layer before pruning.
        before: Its spec before pruning.
        after: Its spec after pruning.
    """
    for projection in "qk":
        remaining, ids = (
            after.pruned_norm_rows[projection],
            before.head_ids if projection == "q" else before.kv_head_ids,
        )
        if not remaining:
            continue
        earlier = before.pruned_norm_rows[projection]
        sources = {"weight": layer.qkv.weight_by_head(projection), "bias": layer.qkv.bias_by_head(projection)}
        for kind, present in sources.items():
            if present is None:
                continue
            name = f"{prefix}{projection}_norm.pruned_{kind}"
            rows = [
                state[name][earlier.index(head)] if head in earlier else present[ids.index(head)] for head in remaining
            ]
            state[name] = torch.stack(rows)
