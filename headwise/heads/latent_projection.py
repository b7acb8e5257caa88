"""Query, key and value projections with a latent (multi-head latent attention, https://arxiv.org/abs/2405.04434).

Keys and values of all heads are computed from one narrow latent per token, and so are the queries if the spec has a query
rank. The first `head_dim - rotary_dims` channels of a key come from the latent. The last `rotary_dims` channels carry the
rotary positions; they come from the residual stream and are equal for all heads:

    c = norm(x W_DKV)                    (B, T, r)         r: kv_rank
    k[h] = (c W_UK[h], rotate(x W_KR))   (B, T, d)
    v[h] = c W_UV[h]                     (B, T, e)
    q[h] = norm(x W_DQ) W_UQ[h], or x W_Q[h], with its last channels rotated

Pruning a head frees its rows of the up-projections W_UQ, W_UK and W_UV. The down-projections serve all heads and stay.

In memory the up-projection of keys and values is one weight with the rows (W_UK[h], W_UV[h]) of each head. State dicts have
a head axis, and the down-projections without one:

    q.weight (H, d, D or query rank)   kv.weight (H, d - rotary_dims + e, r)
    q_down.weight (query rank, D)   q_norm.weight (query rank,)   kv_down.weight (r + rotary_dims, D)   kv_norm.weight (r,)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.heads.quantized_layers import QuantizedWeight
from headwise.kernels import RotaryTable
from headwise.kernels.matmul_tuner import linear
from headwise.spec import AttentionSpec

HEAD_WEIGHTS = ("q", "kv")  # weights with a head axis


class LatentQKVProjection(nn.Module):
    """Query, key and value projections of a layer with latents.

    Attributes:
        sizes: Heads and channels of q, k and v.
        storage: Always "q,k,v": the projections have no common weight.
    """

    storage = "q,k,v"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        assert spec.latent is not None
        self.spec, self.latent = spec, spec.latent
        heads, latent = len(spec.head_ids), spec.latent
        self.sizes = {"q": (heads, spec.head_dim), "k": (heads, spec.head_dim), "v": (heads, spec.value_dim)}
        self.sum_kv_grads_in_backward: Callable[[Tensor, str], Tensor] | None = None  # heads are never partitioned
        self.key_channels = spec.head_dim - latent.rotary_dims  # of a key, from the latent
        self.q_weight = nn.Parameter(torch.empty(heads * spec.head_dim, latent.query_rank or spec.width))
        self.kv_weight = nn.Parameter(torch.empty(heads * (self.key_channels + spec.value_dim), latent.kv_rank))
        down_rows, query_rank = latent.kv_rank + latent.rotary_dims, latent.query_rank
        self.kv_down_weight = nn.Parameter(torch.empty(down_rows, spec.width))
        self.kv_down_bias = nn.Parameter(torch.empty(down_rows)) if spec.bias else None
        self.kv_norm_weight = nn.Parameter(torch.empty(latent.kv_rank))
        self.q_down_weight = nn.Parameter(torch.empty(query_rank, spec.width)) if query_rank else None
        self.q_down_bias = nn.Parameter(torch.empty(query_rank)) if query_rank and spec.bias else None
        self.q_norm_weight = nn.Parameter(torch.empty(query_rank)) if query_rank else None

    def forward(
        self, x: Tensor, source: Tensor | None = None, rotary_table: RotaryTable | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project and rotate: (B, T, D), (B, S, D) → q (B, H, T, d), k (B, H, S, d), v (B, H, S, e)."""
        queries, keys_values = (
            self.project(x, "q", rotary_table),
            self.project(x if source is None else source, "kv", rotary_table),
        )
        return (*queries, *keys_values)  # pyright: ignore[reportReturnType]

    def project(self, x: Tensor, projections: str, rotary_table: RotaryTable | None = None) -> tuple[Tensor, ...]:
        """Return some of q, k and v of one input, each (B, H, T, channels)."""
        tensors: dict[str, Tensor] = {}
        if "q" in projections:
            tensors["q"] = self._queries(x, rotary_table)
        if "k" in projections or "v" in projections:
            tensors["k"], tensors["v"] = self._keys_values(x, rotary_table)
        return tuple(tensors[projection] for projection in projections)

    def _queries(self, x: Tensor, rotary_table: RotaryTable | None) -> Tensor:
        if self.q_down_weight is not None:
            assert self.q_norm_weight is not None
            x = self._norm(linear(x, self.q_down_weight, self.q_down_bias), self.q_norm_weight)  # (B, T, query rank)
        q = self._split_heads(linear(x, self.q_weight), self.spec.head_dim)  # (B, H, T, d)
        if rotary_table is None:
            return q
        latent_part, rotary_part = q.split((self.key_channels, self.latent.rotary_dims), -1)
        return torch.cat((latent_part, rotary_table.rotate(rotary_part)), -1)

    def _keys_values(self, x: Tensor, rotary_table: RotaryTable | None) -> tuple[Tensor, Tensor]:
        down = linear(x, self.kv_down_weight, self.kv_down_bias)
        latent, shared = down.split((self.latent.kv_rank, self.latent.rotary_dims), -1)
        latent = self._norm(latent, self.kv_norm_weight)  # (B, T, r)
        shared = (
            shared[:, None] if rotary_table is None else rotary_table.rotate(shared[:, None])
        )  # (B, 1, T, rotary dims)
        up = self._split_heads(linear(latent, self.kv_weight), self.key_channels + self.spec.value_dim)
        k, v = up.split((self.key_channels, self.spec.value_dim), -1)
        return torch.cat((k, shared.expand(-1, k.shape[1], -1, -1)), -1), v

    def _norm(self, latent: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(latent, (latent.shape[-1],), weight, self.latent.norm_eps)

    def _split_heads(self, product: Tensor, channels: int) -> Tensor:
        heads = self.sizes["q"][0]
        return product.reshape(*product.shape[:2], heads, channels).transpose(1, 2)  # (B, H, T, channels)

    def weight_by_head(self, projection: str) -> Tensor:
        """Return the product of the down- and up-projection with a head axis: (H, channels, D), a copy.

        The norm between them is included except for its scale, which depends on the token.
        """
        return self._compose(projection, self.kv_down_weight, self.q_down_weight)

    def bias_by_head(self, projection: str) -> Tensor | None:
        """Return the bias of the down-projection after the up-projection, (H, channels), a copy, or None."""
        if self.kv_down_bias is None or (projection == "q" and self.q_down_bias is None):
            return None
        q_bias = None if self.q_down_bias is None else self.q_down_bias[:, None]
        return self._compose(projection, self.kv_down_bias[:, None], q_bias).squeeze(-1)

    def _compose(self, projection: str, kv_down: Tensor, q_down: Tensor | None) -> Tensor:
        """Return the up-projection of one projection times the gain of the norm times a down-projection, (H, channels, n)."""
        if projection == "q":
            up = self.q_weight.unflatten(0, self.sizes["q"])
            return up if q_down is None or self.q_norm_weight is None else up @ (self.q_norm_weight[:, None] * q_down)
        latent_down, shared = kv_down.split((self.latent.kv_rank, self.latent.rotary_dims))
        up = (
            self.kv_weight.unflatten(0, (-1, self.key_channels + self.spec.value_dim))
            if self.kv_weight.numel()
            else None
        )
        heads = self.sizes["k"][0]
        if up is None:  # no head is left
            return kv_down.new_zeros(*self.sizes[projection], kv_down.shape[-1])
        keys, values = up.split((self.key_channels, self.spec.value_dim), 1)
        latent_down = self.kv_norm_weight[:, None] * latent_down
        if projection == "v":
            return values @ latent_down
        return torch.cat((keys @ latent_down, shared.expand(heads, -1, -1)), 1)

    def fuse_qkv(self) -> None:
        """Do nothing, because the projections have different inputs."""

    def _quantized(self, group: str) -> QuantizedWeight | None:
        return None

    def head_axis_shape(self, name: str) -> tuple[int, int]:
        """Return heads and channels per head of the weight "q" or "kv"."""
        heads, channels = self.sizes["q"]
        return (heads, channels) if name == "q" else (heads, self.key_channels + self.spec.value_dim)

    # In state dicts, names end in .weight or .bias, and weights of heads have a head axis.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: Any) -> None:
        for parameter_name, parameter in self._parameters.items():
            if parameter is None:
                continue
            name, _, kind = parameter_name.rpartition("_")
            value = parameter.unflatten(0, self.head_axis_shape(name)) if name in HEAD_WEIGHTS else parameter
            destination[f"{prefix}{name}.{kind}"] = value if keep_vars else value.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for parameter_name, parameter in self._parameters.items():
            name, _, kind = parameter_name.rpartition("_")
            key = f"{prefix}{name}.{kind}"
            if parameter is None or key not in state_dict:
                continue
            value = state_dict.pop(key)
            has_head_axis = name in HEAD_WEIGHTS and tuple(value.shape[:2]) == self.head_axis_shape(name)
            state_dict[f"{prefix}{parameter_name}"] = value.flatten(0, 1) if has_head_axis else value
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
