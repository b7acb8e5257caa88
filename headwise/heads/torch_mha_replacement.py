"""Drop-in replacement of `torch.nn.MultiheadAttention`: same constructor, call, return values and state dict.

Differences from torch:

- A query that may not attend to any key returns zeros. torch returns NaN.
- Returned attention weights are those before dropout. torch returns them after dropout.
- `need_weights` never changes the output, not even its last bit. In torch it selects another kernel. With `is_causal=True`
  and `need_weights=False`, torch replaces `attn_mask` by its own causal mask, which hides the extra keys of `add_bias_kv` and
  `add_zero_attn`.

Short calls without gradients on a CPU (`MAX_KEYS`) compute the attention weights in blocks that stay in the cache, and z from
them, with and without `need_weights`. Returning the weights then costs one copy. All other calls run the kernel of any layer,
and `need_weights` computes the weights in addition.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.cache import NO_CACHE, AttendResult, LayerCache
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.attention import MultiHeadAttention
from headwise.heads.projections import QKVProjection
from headwise.kernels import (
    Bias,
    KernelChoice,
    Mask,
    RotaryTable,
    ScoreRequest,
    attend_with_weights,
    attention_weights,
    causal,
)
from headwise.kernels.torch_mask_conversion import from_mha, from_mha_padding
from headwise.spec import AttentionSpec

MAX_KEYS = 2048  # without a mask; with more keys weights are computed after the fused kernel
MAX_MASKED_KEYS = 512  # with a mask, of which the fused kernel skips more than blocks of 64 rows


class TorchAttention(MultiHeadAttention):
    """A `MultiHeadAttention` with the constructor, call and state dict of `torch.nn.MultiheadAttention`.

    `MultiHeadAttention.like_torch` creates it. The arguments are those of torch. Heads, hook points, recording and
    `kernel_choice` work as in any native layer.

    Attributes:
        bias_k: Learned key that every query may attend to, (1, 1, D), or None.
        bias_v: Learned value of that key, (1, 1, D), or None.
    """

    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    _qkv_same_embed_dim = False  # so that nn.TransformerEncoderLayer calls this layer instead of its own kernel

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
            raise ArgumentError(f"embed_dim={embed_dim}: not divisible by num_heads={num_heads}.")
        torch_layer = nn.MultiheadAttention(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        with torch.random.fork_rng(devices=[]):  # so that a seed gives the same weights as in torch's layer
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
        """Return the output, and the attention weights (averaged over heads by default) or None, as torch does.

        Args:
            query: (B, T, D) if batch_first, else (T, B, D), or (T, D) without a batch.
            key: Input of the keys, with width kdim.
            value: Input of the values, with width vdim.
            key_padding_mask: (B, S), True at padding.
            need_weights: Whether to return attention weights.
            attn_mask: (T, S) or (B·heads, T, S), True at hidden keys, or floats that are added to the scores.
            average_attn_weights: Whether to average the returned weights over heads.
            is_causal: Hint that `attn_mask` is causal. Requires `attn_mask`.
        """
        batched, key_padding_mask = self._check_call(query, key, value, key_padding_mask)
        is_self_attention = query is key is value
        query, key, value = (self._batch_first(x, batched=batched) for x in (query, key, value))  # (B, T, D) (B, S, ·)
        mask, bias = self._masks(query, key, key_padding_mask, attn_mask, is_causal=is_causal)
        if is_self_attention and self.qkv.storage == "qkv":
            q, k, v = self.qkv(query)
        else:
            (q,), (k,), (v,) = (
                self.qkv.project(x, projection) for x, projection in ((query, "q"), (key, "k"), (value, "v"))
            )  # (B, H, T, d) (B, H, S, d) (B, H, S, d)
        k, v, mask, bias = self._append_extra_kv(k, v, mask, bias, q.shape[2])
        request = ScoreRequest(mask, bias)
        if need_weights and self._uses_weight_blocks(q, k.shape[2], request):
            z, weights = self._attend_in_blocks(q, k, v, request, keep_weights=True)  # (B, H, T, d) (B, H, T, S)
        else:
            z = self.attend_projected(q, k, v, request)
            weights = attention_weights(q, k, self.score_params(q, k, v, request)) if need_weights else None
        out = self.output_projection(z)  # (B, T, D)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)  # (B, T, S)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def attend_projected(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        request: ScoreRequest,
        gate: Tensor | None = None,
        cache: LayerCache = NO_CACHE,
        token_gate: Tensor | None = None,
    ) -> Tensor:
        """Attend for `compute_z` and `per_head_output`, with the kernel of `forward`: z, (B, H, T, e)."""
        if cache is not NO_CACHE or not self._uses_weight_blocks(q, k.shape[2], request):
            return super().attend_projected(q, k, v, request, gate, cache, token_gate)
        return self._attend_in_blocks(q, k, v, request, gate, keep_weights=False)[0]

    def _attend_in_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, request: ScoreRequest, gate: Tensor | None = None, *, keep_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return z, (B, H, T, e), and the attention weights it was computed from, (B, H, T, S), or None."""
        params = self.score_params(q, k, v, request)
        z, weights = attend_with_weights(q, k, v, params, keep_weights=keep_weights)
        return self._finish_z(q, AttendResult(z, lambda: (k, v, params)), gate), weights

    def _uses_weight_blocks(self, q: Tensor, num_keys: int, request: ScoreRequest) -> bool:
        """Whether a call computes z from blocks of attention weights. The answer does not depend on `need_weights`."""
        max_keys = MAX_KEYS if request.mask is None and request.bias is None else MAX_MASKED_KEYS
        return (
            not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not torch._C._are_functorch_transforms_active()
            and self.backend == "auto"
            and self.partition is None
            and not (self.training and self.dropout)
            and q.device.type == "cpu"
            and q.dtype in (torch.float32, torch.float64)
            and q.numel() > 0
            and 0 < num_keys <= max_keys
        )

    def kernel_choice(
        self,
        T: int = 512,
        S: int | None = None,
        *,
        B: int = 1,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
    ) -> KernelChoice:
        """Return the kernel that a call of this size runs in the current grad mode, as for any native layer."""
        num_keys = (T if S is None else S) + (self.bias_k is not None) + self.add_zero_attn
        weight = self.output_projection.weight
        q = weight.detach()[:1] if B and T else weight.new_empty(0)
        if self._uses_weight_blocks(q, num_keys, ScoreRequest(mask, bias)):
            return KernelChoice(
                "batched",
                f"calls without gradients on a CPU with at most {MAX_KEYS} keys, or {MAX_MASKED_KEYS} with a mask, compute z "
                "from blocks of attention weights, so that need_weights=True costs little",
                "Gradients, more keys or layer.backend = 'fused' would select fused.",
            )
        return super().kernel_choice(T, S, B=B, mask=mask, bias=bias)

    @property
    def in_proj_bias(self) -> Tensor | None:
        """Biases of q, k and v concatenated, as in torch, or None."""
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
            raise UnsupportedModelError(
                f"source: keys and values need separate inputs, because kdim={self.kdim} differs from vdim={self.vdim}. "
                "Call layer(query, key, value)."
            )
        if cache is not NO_CACHE and (self.bias_k is not None or self.add_zero_attn):
            raise UnsupportedModelError("cache: not supported with add_bias_kv or add_zero_attn. Omit cache.")
        q, k, v, request = super()._project(x, source, request, positions, cache)
        k, v, mask, bias = self._append_extra_kv(k, v, request.mask, request.bias, q.shape[2])
        return q, k, v, replace(request, mask=mask, bias=bias)

    def _append_extra_kv(
        self, k: Tensor, v: Tensor, mask: Mask | None, bias: Bias | Tensor | None, T: int
    ) -> tuple[Tensor, Tensor, Mask | None, Bias | Tensor | None]:
        """Append the learned key and the zero key, which every query may attend to."""
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
            bias = (
                bias.block(range(T), range(S), T, S) if isinstance(bias, Bias) else bias
            )  # extra keys have no position
            bias = F.pad(bias.expand(*bias.shape[:3], S), (0, extra_keys))
        return k, v, mask, bias

    def _masks(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        *,
        is_causal: bool,
    ) -> tuple[Mask | None, Tensor | None]:
        (B, T, _), S = query.shape, key.shape[1]
        masks: list[Mask] = []
        biases: list[Tensor] = []
        if is_causal and attn_mask is None:
            raise ArgumentError("is_causal=True: only a hint about attn_mask, as in torch. Pass attn_mask as well.")
        if attn_mask is not None:
            valid_shapes = ((T, S), (B * self.num_heads, T, S))
            if tuple(attn_mask.shape) not in valid_shapes:
                raise ArgumentError(
                    f"attn_mask: must have shape {valid_shapes[0]} or {valid_shapes[1]}. Got {tuple(attn_mask.shape)}."
                )
            # A causal mask lets the kernels skip hidden keys. Reading a mask on another device would wait for that device.
            is_readable = is_causal or (attn_mask.device.type == "cpu" and not torch.compiler.is_compiling())
            is_candidate = is_readable and attn_mask.ndim == 2 and not attn_mask.requires_grad
            converted = (
                causal(offset=0) if is_candidate and _is_causal(attn_mask) else from_mha(attn_mask, self.num_heads)
            )
            masks += [converted] if isinstance(converted, Mask) else []
            biases += [] if isinstance(converted, Mask) else [converted.to(query)]
        if key_padding_mask is not None:
            if tuple(key_padding_mask.shape) != (B, S):
                raise ArgumentError(f"key_padding_mask: must have shape {(B, S)}. Got {tuple(key_padding_mask.shape)}.")
            if key_padding_mask.is_floating_point():
                biases.append(key_padding_mask[:, None, None].to(query))  # (B, 1, 1, S)
            else:
                masks.append(from_mha_padding(key_padding_mask))
        mask = None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]
        return mask, None if not biases else biases[0] if len(biases) == 1 else biases[0] + biases[1]

    def _check_call(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None
    ) -> tuple[bool, Tensor | None]:
        """Check the shapes. Return whether the call has a batch axis, and the padding mask with a batch axis."""
        batched = query.ndim == 3
        sizes = (self.embed_dim, self.kdim, self.vdim)
        for name, x, width in zip(("query", "key", "value"), (query, key, value), sizes, strict=True):
            if x.ndim != query.ndim or x.ndim not in (2, 3) or x.shape[-1] != width:
                axes = "(batch, tokens" if self.batch_first else "(tokens, batch"
                raise ArgumentError(
                    f"{name}: must have shape {axes}, {width}), or (tokens, {width}) without a batch. Got {tuple(x.shape)}."
                )
        return batched, key_padding_mask if key_padding_mask is None or batched else key_padding_mask[None]

    def _batch_first(self, x: Tensor, *, batched: bool) -> Tensor:
        if not batched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _from_torch_names(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Rename the keys of a torch state dict to ours in place. Keys that are already ours stay."""
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
    """Return True if a mask, (T, S), hides exactly the keys above the main diagonal."""
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
