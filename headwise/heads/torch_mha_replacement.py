"""A layer of ours with the face of `torch.nn.MultiheadAttention`: its constructor, its call, its returns, its state dict.

What differs: a query that may look nowhere gets zeros, where torch gives NaN; weights that are asked for are those before
dropout, where torch's are after it; and asking for them leaves the output as it is, where torch, told `is_causal`, takes the
hint for the mask if they are not asked for, and hides the extra keys of `add_bias_kv` and `add_zero_attn` behind it.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.cache import NO_CACHE, LayerCache
from headwise.errors import HeadwiseError
from headwise.heads.attention import MultiHeadAttention
from headwise.heads.projections import QKVProjection
from headwise.kernels import Bias, Mask, RotaryTable, ScoreRequest, attention_weights, causal
from headwise.kernels.torch_masks import from_mha, from_mha_padding
from headwise.spec import AttentionSpec


class TorchAttention(MultiHeadAttention):
    """What `MultiHeadAttention.like_torch` gives.

    Heads, hook points, recording and `kernel_choice` are as for any layer of ours.
    """

    bias_k: nn.Parameter | None  # (1, 1, D): one more key and value for everybody, learned
    bias_v: nn.Parameter | None
    _qkv_same_embed_dim = False  # so that nn.TransformerEncoderLayer calls this layer, and not a kernel of its own

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        kdim, vdim = kdim or embed_dim, vdim or embed_dim
        spec = AttentionSpec(width=embed_dim, heads=num_heads, kv_width=kdim, bias=bias, out_bias=bias, dropout=dropout)
        if spec.head_dim * num_heads != embed_dim:
            raise HeadwiseError(f"embed_dim {embed_dim} is not divisible by num_heads {num_heads}.")
        torch_layer = nn.MultiheadAttention(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        with torch.random.fork_rng(devices=[]):  # so that the same seed gives the weights it gives torch's layer
            super().__init__(spec)
            if vdim != kdim:
                self.qkv = QKVProjection(spec, "q,k,v", vdim)
        for name in ("bias_k", "bias_v"):
            initial = getattr(torch_layer, name)
            self.register_parameter(name, None if initial is None else nn.Parameter(initial.detach().clone()))
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.kdim, self.vdim, self.add_zero_attn, self.batch_first = kdim, vdim, add_zero_attn, batch_first
        self.head_dim = spec.head_dim
        self._register_load_state_dict_pre_hook(self._from_torch_names)
        self.register_state_dict_post_hook(_to_torch_names)
        self.to(torch_layer.out_proj.weight)
        self.load_state_dict(torch_layer.state_dict())

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's: the output, and the weights (averaged over heads unless told not to) or None."""
        batched, key_padding_mask = self._check_call(query, key, value, key_padding_mask)
        is_self_attention = query is key is value
        query, key, value = (self._batch_first(x, batched) for x in (query, key, value))  # (B, T, D) (B, S, ·)
        mask, bias = self._masks(query, key, key_padding_mask, attn_mask, is_causal)
        if is_self_attention and self.qkv.storage == "qkv":
            q, k, v = self.qkv(query)
        else:
            (q,), (k,), (v,) = (
                self.qkv.project(x, projection) for x, projection in ((query, "q"), (key, "k"), (value, "v"))
            )  # (B, H, T, d) (B, H, S, d) (B, H, S, d)
        k, v, mask, bias = self._append_extra_kv(k, v, mask, bias, q.shape[2])
        request = ScoreRequest(mask, bias)
        out = self.output_projection(self._attend(q, k, v, request))  # (B, T, D)
        weights = attention_weights(q, k, self.score_params(q, k, v, request)) if need_weights else None  # (B, H, T, S)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)  # (B, T, S)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    @property
    def in_proj_bias(self) -> Tensor | None:
        """As torch's: the biases of q, k and v end to end."""
        biases = [self.qkv.bias_by_head(projection) for projection in "qkv"]
        return torch.cat([bias.flatten() for bias in biases if bias is not None]) if self.spec.bias else None

    def _project(
        self,
        x: Tensor,
        source: Tensor | None,
        request: ScoreRequest,
        positions: Tensor | RotaryTable | None,
        cache: LayerCache,
    ) -> tuple[Tensor, Tensor, Tensor, ScoreRequest]:
        """Project for `compute_z`, `per_head_output` and `attention_weights`: keys and values come from one source."""
        if self.kdim != self.vdim:
            raise HeadwiseError(
                f"kdim {self.kdim} and vdim {self.vdim} differ, so keys and values need a source each: "
                "call layer(query, key, value)."
            )
        if cache is not NO_CACHE and (self.bias_k is not None or self.add_zero_attn):
            raise HeadwiseError("a layer with add_bias_kv or add_zero_attn takes no cache. Leave cache= out.")
        q, k, v, request = super()._project(x, source, request, positions, cache)
        k, v, mask, bias = self._append_extra_kv(k, v, request.mask, request.bias, q.shape[2])
        return q, k, v, replace(request, mask=mask, bias=bias)

    def _append_extra_kv(
        self, k: Tensor, v: Tensor, mask: Mask | None, bias: Bias | Tensor | None, T: int
    ) -> tuple[Tensor, Tensor, Mask | None, Bias | Tensor | None]:
        """With the keys that everybody may look at: the learned one, and the one of zeros."""
        B, H, S, d = k.shape
        extra_keys = 0
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([x, learned.view(1, H, 1, d).expand(B, -1, -1, -1)], 2)
                for x, learned in ((k, self.bias_k), (v, self.bias_v))
            )
            extra_keys += 1
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
            extra_keys += 1
        if extra_keys and mask is not None:
            dense = mask.dense(T, S, k.device)
            mask = Mask.of(F.pad(dense.expand(*dense.shape[:2], T, S), (0, extra_keys), value=True))
        if extra_keys and bias is not None:
            bias = bias.block(range(T), range(S), T, S) if isinstance(bias, Bias) else bias  # they have no place
            bias = F.pad(bias.expand(*bias.shape[:3], S), (0, extra_keys))
        return k, v, mask, bias

    def _masks(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[Mask | None, Tensor | None]:
        (B, T, _), S = query.shape, key.shape[1]
        masks: list[Mask] = []
        biases: list[Tensor] = []
        if is_causal and attn_mask is None:
            raise HeadwiseError("is_causal=True says what attn_mask is, as in torch: give attn_mask too.")
        if attn_mask is not None:
            valid_shapes = ((T, S), (B * self.num_heads, T, S))
            if tuple(attn_mask.shape) not in valid_shapes:
                raise HeadwiseError(
                    f"attn_mask is {tuple(attn_mask.shape)} but must be {valid_shapes[0]} or {valid_shapes[1]}."
                )
            # a hint that is true lets the kernel use its own flag
            converted = causal(offset=0) if is_causal and _is_causal(attn_mask) else from_mha(attn_mask, self.num_heads)
            masks += [converted] if isinstance(converted, Mask) else []
            biases += [] if isinstance(converted, Mask) else [converted.to(query)]
        if key_padding_mask is not None:
            if tuple(key_padding_mask.shape) != (B, S):
                raise HeadwiseError(f"key_padding_mask is {tuple(key_padding_mask.shape)} but must be {(B, S)}.")
            if key_padding_mask.is_floating_point():
                biases.append(key_padding_mask[:, None, None].to(query))  # (B, 1, 1, S)
            else:
                masks.append(from_mha_padding(key_padding_mask))
        mask = None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]
        return mask, None if not biases else biases[0] if len(biases) == 1 else biases[0] + biases[1]

    def _check_call(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None
    ) -> tuple[bool, Tensor | None]:
        """Whether there is a batch; a padding mask of a call without one gets the axis."""
        batched = query.ndim == 3
        sizes = (self.embed_dim, self.kdim, self.vdim)
        for name, x, width in zip(("query", "key", "value"), (query, key, value), sizes, strict=True):
            if x.ndim != query.ndim or x.ndim not in (2, 3) or x.shape[-1] != width:
                axes = "(batch, tokens" if self.batch_first else "(tokens, batch"
                raise HeadwiseError(
                    f"{name} must be {axes}, {width}), or (tokens, {width}) without a batch; got {tuple(x.shape)}."
                )
        return batched, key_padding_mask if key_padding_mask is None or batched else key_padding_mask[None]

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _from_torch_names(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """A state dict in torch's names is put into ours, in place; one in ours is left."""
        H, d, sizes = self.num_heads, self.head_dim, (self.embed_dim, self.kdim, self.vdim)
        for kind, shapes in (("weight", [(H, d, size) for size in sizes]), ("bias", [(H, d)] * 3)):
            if f"{prefix}in_proj_{kind}" in state:
                chunks = state.pop(f"{prefix}in_proj_{kind}").chunk(3)
                state |= {
                    f"{prefix}qkv.{name}.{kind}": x.reshape(s) for name, x, s in zip("qkv", chunks, shapes, strict=True)
                }
            for projection, shape in zip("qkv", shapes, strict=True):
                if f"{prefix}{projection}_proj_{kind}" in state:
                    state[f"{prefix}qkv.{projection}.{kind}"] = state.pop(f"{prefix}{projection}_proj_{kind}").reshape(
                        shape
                    )
            if f"{prefix}out_proj.{kind}" in state:
                state[f"{prefix}output_projection.{kind}"] = state.pop(f"{prefix}out_proj.{kind}")


def _is_causal(attn_mask: Tensor) -> bool:
    """Whether a mask, (T, S), hides what lies ahead of the diagonal from the upper left, and nothing else."""
    if attn_mask.is_floating_point():
        ahead = torch.zeros_like(attn_mask).masked_fill(
            torch.ones_like(attn_mask, dtype=torch.bool).triu(1), -torch.inf
        )
        return torch.equal(attn_mask, ahead.expand_as(attn_mask))
    return torch.equal(attn_mask.bool(), torch.ones_like(attn_mask, dtype=torch.bool).triu(1))


def _to_torch_names(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    assert isinstance(module, TorchAttention)
    weights = [state.pop(f"{prefix}qkv.{projection}.weight").flatten(0, 1) for projection in "qkv"]
    if module.kdim == module.vdim == module.embed_dim:
        state[f"{prefix}in_proj_weight"] = torch.cat(weights)
    else:
        state |= {
            f"{prefix}{projection}_proj_weight": weight for projection, weight in zip("qkv", weights, strict=True)
        }
    if module.spec.bias:
        state[f"{prefix}in_proj_bias"] = torch.cat([state.pop(f"{prefix}qkv.{name}.bias").flatten() for name in "qkv"])
        state[f"{prefix}out_proj.bias"] = state.pop(f"{prefix}output_projection.bias")
    state[f"{prefix}out_proj.weight"] = state.pop(f"{prefix}output_projection.weight").flatten(1)
