"""Multi-head attention: Σ over heads of softmax(x W_Q (y W_K)ᵀ / √d + mask) · y W_V · W_O, plus a bias."""

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, suggest_names
from headwise.heads.build_score_params import and_masks, layer_score_params
from headwise.heads.head import Heads
from headwise.heads.head_dropout import HeadDropout
from headwise.heads.head_groups import CacheStepContext
from headwise.heads.hook_point import HookPoint, apply_gate
from headwise.heads.initialize_weights import initialize
from headwise.heads.layer_cache import CrossAttentionCache, LayerCache, SharedKVCache, SlidingWindowCache
from headwise.heads.per_head_cache import PerHeadCache, fake_quantize_kv
from headwise.heads.per_head_output import PerHeadOutput
from headwise.heads.projections import QKVProjection, make_output_projection
from headwise.heads.tensor_parallel import GatheredLayer, HeadPartition, sharded_score_params
from headwise.kernels import (
    BACKENDS,
    Bias,
    KernelChoice,
    Mask,
    RotaryTable,
    ScoreParams,
    attention_weights,
    choose_kernel,
    run_kernel,
    window,
)
from headwise.spec import AttentionSpec, CachePolicy, LayerAddress

if TYPE_CHECKING:
    from headwise.heads.torch_mha_replacement import TorchAttention


class MultiHeadAttention(nn.Module):
    """An attention layer whose heads can be opened. Takes an `AttentionSpec`, or its fields by name.

    >>> layer = MultiHeadAttention(width=512, heads=8)
    >>> layer(torch.randn(2, 10, 512)).shape
    torch.Size([2, 10, 512])
    >>> [tuple(head.W_Q.shape) for head in layer.heads][:2]
    [(512, 64), (512, 64)]
    """

    def __init__(
        self,
        spec: AttentionSpec | int | None = None,
        heads: int | None = None,
        *,
        backend: str = "auto",
        storage: str = "qkv",
        address: LayerAddress = LayerAddress("", 0),  # noqa: B008 (frozen)
        **fields: Any,
    ) -> None:
        super().__init__()
        self.spec = spec = _as_spec(spec, heads, fields)
        self.backend = backend
        if backend != "auto" and backend not in BACKENDS:
            raise HeadwiseError(f"there is no backend {backend!r}; {suggest_names(backend, ['auto', *BACKENDS])}")
        if backend == "fused" and spec.softcap is not None:
            raise HeadwiseError("the fused kernel cannot cap scores; use backend='blockwise', 'batched' or 'auto'.")
        self.qkv = QKVProjection(spec, storage)
        self.output_projection = make_output_projection(spec)
        present = len(spec.head_ids)
        self.sink = nn.Parameter(torch.empty(present)) if spec.softmax == "sink" else None
        self.gate = nn.Parameter(torch.empty(present)) if spec.gated else None
        position_parameters = spec.position_params_per_head
        self.position_bias = nn.Parameter(torch.empty(present, position_parameters)) if position_parameters else None
        self.head_dropout = HeadDropout(spec.head_dropout, spec.head_dropout_schedule)
        self.hook_point = HookPoint(address, spec.head_ids, self.output_projection, spec.window)
        self.partition: HeadPartition | None = None  # where other processes hold heads of this layer too
        self._gathered: GatheredLayer | None = None
        initialize(self)

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *extra: object,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        gate: Tensor | None = None,
        positions: Tensor | RotaryTable | None = None,
        cache: LayerCache | None = None,
        row_starts: Tensor | None = None,
        **unknown: object,
    ) -> Tensor:
        """(B, T, D) → (B, T, D). `source` (B, S, ·) makes it cross-attention; `gate` (H,) or (B, H) scales heads.

        `row_starts` (B,) says where the text of each row begins, for heads that keep its first tokens; None: at the first.
        """
        if extra or unknown:
            raise _foreign_kwargs_error(len(extra), unknown)
        z = self.compute_z(
            x, source, mask=mask, bias=bias, gate=gate, positions=positions, cache=cache, row_starts=row_starts
        )
        return self.output_projection(z)  # (B, H, T, e) → (B, T, D)

    def compute_z(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        gate: Tensor | None = None,
        positions: Tensor | RotaryTable | None = None,
        cache: LayerCache | None = None,
        row_starts: Tensor | None = None,
    ) -> Tensor:
        """What each head found, before W_O: z, (B, H, T, e)."""
        q, k, v, mask, bias = self._project(x, source, mask, bias, positions, cache)
        if isinstance(cache, PerHeadCache):
            return self._attend_per_head(q, k, v, mask, bias, gate, cache, row_starts)
        spec = self._full_spec
        policies = spec.cache_policies if spec.cache else ()  # () is for all heads that keep everything
        return self._run_attention(q, k, v, self._score_params(q, k, v, mask, bias, policies, row_starts), gate)

    def attention_weights(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | RotaryTable | None = None,
    ) -> Tensor:
        """Who looks at whom, head by head: (B, H, T, S). Rows sum to 1, but for a sink; dropout is left out.

        >>> layer = MultiHeadAttention(width=8, heads=2)
        >>> layer.attention_weights(torch.randn(3, 5, 8)).shape
        torch.Size([3, 2, 5, 5])
        """
        q, k, v, mask, bias = self._project(x, source, mask, bias, positions, None)
        return attention_weights(q, k, self._score_params(q, k, v, mask, bias, self._full_spec.cache_policies))

    def per_head_output(
        self, x: Tensor, source: Tensor | None = None, *, mask: Mask | None = None, gate: Tensor | None = None
    ) -> PerHeadOutput:
        """The heads' outputs one by one: z, and what each writes; their sum plus b_O is the layer's output."""
        return PerHeadOutput(
            self.compute_z(x, source, mask=mask, gate=gate), self.output_projection.head_weights, self.b_O
        )

    @staticmethod
    def like_torch(embed_dim: int, num_heads: int, *args: Any, **kwargs: Any) -> "TorchAttention":
        """A layer that is built, called and saved as `torch.nn.MultiheadAttention` is; its arguments are torch's.

        >>> layer = MultiHeadAttention.like_torch(8, 2, batch_first=True)
        >>> x = torch.randn(3, 5, 8)
        >>> out, weights = layer(x, x, x, average_attn_weights=False)
        >>> out.shape, weights.shape
        (torch.Size([3, 5, 8]), torch.Size([3, 2, 5, 5]))
        """
        from headwise.heads.torch_mha_replacement import TorchAttention  # which is a MultiHeadAttention itself

        return TorchAttention(embed_dim, num_heads, *args, **kwargs)

    def hook_points(self) -> list[HookPoint]:
        """The one hook point, so that a layer alone can be recorded as a model is."""
        return [self.hook_point]

    def gathered_hook_points(self) -> list[HookPoint]:
        """The same with all heads, where processes share them."""
        return [self.gathered_layer.hook_point]

    @property
    def heads(self) -> Heads:
        """The heads of this layer: iterate, or take one by its number."""
        return Heads((self,))

    @property
    def gathered_layer(self) -> "MultiHeadAttention | GatheredLayer":
        """The layer with all its heads, whichever process holds them; of a whole one, itself."""
        return self if self._gathered is None else self._gathered

    def set_partition(self, partition: HeadPartition) -> None:
        """From now on other processes hold the other heads of this layer."""
        self.partition, self._gathered = partition, GatheredLayer(self, partition)
        self.output_projection.collectives = partition.collectives
        self.qkv.sync_kv_grad = (
            partial(partition.sync_kv_grad, sizes=self.qkv.sizes) if partition.has_replicated_kv else None
        )

    @property
    def _full_spec(self) -> AttentionSpec:
        return self.spec if self.partition is None else self.partition.full_spec

    @property
    def b_O(self) -> Tensor | None:
        """The output bias, (D,)."""
        return self.output_projection.bias

    def kernel_choice(
        self,
        T: int = 512,
        S: int | None = None,
        *,
        B: int = 1,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
    ) -> KernelChoice:
        """Which kernel a call of this size would run, why, and what would change it.

        >>> MultiHeadAttention(width=8, heads=2).kernel_choice(T=16).backend
        'fused'
        """
        S = T if S is None else S
        if self.backend != "auto":
            return KernelChoice(self.backend, "it was asked for", "Set layer.backend = 'auto' to let the call decide.")
        spec, H = self.spec, len(self.spec.head_ids)
        q = torch.empty(B, H, T, spec.head_dim, device="meta")
        k = torch.empty(B, len(spec.kv_head_ids), S, spec.head_dim, device="meta")
        return choose_kernel(self._score_params(q, k, k, mask, bias), B, H, T, S)

    def _project(
        self,
        x: Tensor,
        source: Tensor | None,
        mask: Mask | None,
        bias: Bias | Tensor | None,
        positions: Tensor | RotaryTable | None,
        cache: LayerCache | None,
    ) -> tuple[Tensor, Tensor, Tensor, Mask | None, Bias | Tensor | None]:
        """q, k and v, turned by their positions and with what a cache holds; and the mask and bias that go with them."""
        self._check_input(x, source)
        if self.partition is not None:
            x = self.partition.collectives.copy_to_group(x)
            if source is not None and cache is None:  # a cache knows its source by sight
                source = self.partition.collectives.copy_to_group(source)
        rotary_table = self._rotary_table(x, source, positions, cache)
        if source is not None:
            q, k, v = self._project_cross(x, source, cache)
        else:
            q, k, v = self.qkv(x, rotary_table=rotary_table)  # (B, H, T, d) (B, K, T, d) (B, K, T, e)
            if isinstance(cache, CrossAttentionCache):
                raise HeadwiseError(
                    "a CrossAttentionCache is for cross-attention; self-attention takes one of the others."
                )
            if isinstance(cache, SlidingWindowCache):
                # what it will have forgotten is not seen in a long prompt either
                mask = and_masks(mask, window(cache.size))
            if cache is None:
                if self.spec.cache:
                    k, v = fake_quantize_kv(k, self.spec.cache_policies), fake_quantize_kv(v, self.spec.cache_policies)
            elif isinstance(cache, SharedKVCache):
                if self.spec.cache:
                    raise HeadwiseError("heads of this layer keep different things; give it a PerHeadCache.")
                k, v = cache.extend(k, v)  # (B, K, S, ·)
        return q, k, v, mask, bias

    def _attend_per_head(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        bias: Bias | Tensor | None,
        gate: Tensor | None,
        cache: PerHeadCache,
        row_starts: Tensor | None,
    ) -> Tensor:
        """Each head looks at what its cache holds: z, (B, H, T, e). Only who listens sees keys side by side."""
        cache.check_batch_size(k)
        S = cache.visible_keys(k.shape[2])
        k, v = (x.detach() if x.requires_grad else x for x in (k, v))
        params = self._score_params(q, k, v, mask, bias, num_keys=S)
        listener_inputs = None
        if self.hook_point.has_listeners:
            listener_inputs = (
                *cache.dense_kv(k, v, row_starts),
                self._score_params(q, k, v, mask, bias, cache.all_policies, row_starts, S),
            )
        window_mask = None if self.spec.window is None else window(self.spec.window)
        z = cache.attend(q, k, v, CacheStepContext(cache.length, row_starts, params, self.backend, window_mask))
        return self._run_attention(q, *(listener_inputs or (k, v, params)), gate, z)

    def _run_attention(
        self, q: Tensor, k: Tensor, v: Tensor, params: ScoreParams, gate: Tensor | None = None, z: Tensor | None = None
    ) -> Tensor:
        """The kernel (unless its z is there), gates, head dropout and the hook point: z, (B, H, T, e)."""
        partition = self.partition
        with nullcontext() if partition is None else partition.local_rng_if(params.dropout > 0, q.device):
            z = run_kernel(q, k, v, params, self.backend) if z is None else z  # (B, H, T, e)
        if self.gate is not None:
            z = apply_gate(z, self.gate)
        if gate is not None:
            z = apply_gate(z, gate if partition is None else partition.local_gate(gate))
        if self.head_dropout.training:
            dropout_gate = self.head_dropout.sample_gate(z.shape[0], len(self._full_spec.head_ids), z)  # (B, H)
            if dropout_gate is not None:
                z = apply_gate(z, dropout_gate if partition is None else partition.local_gate(dropout_gate))
        return self.hook_point.apply(q, k, v, params, z)

    def _score_params(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        bias: Bias | Tensor | None,
        policies: tuple[CachePolicy, ...] = (),
        row_starts: Tensor | None = None,
        num_keys: int | None = None,
    ) -> ScoreParams:
        request = (mask, bias, policies, row_starts, num_keys)
        if self.partition is not None:
            return sharded_score_params(self, self.partition, (q, k, v), request)
        return layer_score_params(self.spec, self.sink, self.position_bias, (q, k, v), request, self.training)

    def _project_cross(self, x: Tensor, source: Tensor, cache: LayerCache | None) -> tuple[Tensor, Tensor, Tensor]:
        if cache is None:
            return self.qkv(x, source)
        if not isinstance(cache, CrossAttentionCache):
            raise HeadwiseError(
                f"cross-attention keeps its source in a CrossAttentionCache, got {type(cache).__name__}."
            )
        if cache.kv is not None and cache.source is not source:
            raise HeadwiseError(
                "the cache holds the keys of another source; start a new CrossAttentionCache for a new source."
            )
        cache.source = source
        (q,) = self.qkv.project(x, "q")
        k, v = cache.kv or cache.extend(*self.qkv.project(source, "kv"))  # pyright: ignore[reportCallIssue]
        return q, k, v

    def _rotary_table(
        self, x: Tensor, source: Tensor | None, positions: Tensor | RotaryTable | None, cache: LayerCache | None
    ) -> RotaryTable | None:
        if self.spec.rotary is None:
            return None
        if source is not None:
            raise HeadwiseError(
                "rotary positions compare places in one sequence; cross-attention has two: use no rotary."
            )
        if isinstance(positions, RotaryTable):
            return positions
        if positions is None:
            start = 0 if cache is None else cache.length
            positions = torch.arange(start, start + x.shape[1], device=x.device)
        return RotaryTable.at(positions, self.spec.rotary, self.spec.head_dim, x.dtype)

    def _check_input(self, x: Tensor, source: Tensor | None) -> None:
        spec = self.spec
        if source is None and x.ndim == 3 and x.shape[-1] == spec.width == spec.kv_width:
            return
        for name, tensor, width in (("x", x, spec.width), ("source", source, spec.kv_width)):
            if tensor is not None and (tensor.ndim != 3 or tensor.shape[-1] != width):
                raise HeadwiseError(f"{name} must be (batch, tokens, {width}), got {tuple(tensor.shape)}.")
        if source is None and spec.kv_width != spec.width:
            raise HeadwiseError(f"this layer reads keys from a source of width {spec.kv_width}; pass layer(x, source).")

    def extra_repr(self) -> str:
        """Sizes, for print(layer)."""
        spec = self.spec
        return f"width={spec.width}, heads={len(spec.head_ids)}, kv_heads={len(spec.kv_head_ids)}, head_dim={spec.head_dim}"


# What torch's layer and those of transformers are called with, and what to write here.
TORCH_ARGUMENTS = {
    "attention_mask": "mask=hw.padding_mask(attention_mask.bool()): True where a token is real",
    "key_padding_mask": "mask=hw.padding_mask(~key_padding_mask)",
    "attn_mask": "mask=hw.Mask.of(~attn_mask), or bias=attn_mask[None, None] if it is added to scores",
    "is_causal": "mask=hw.causal()",
    "need_weights": "layer.attention_weights(x, mask=…), one map for each head",
    "average_attn_weights": "layer.attention_weights(x, mask=…), one map for each head",
    **dict.fromkeys(("query", "key", "value"), "layer(x) for self-attention, layer(x, source) for cross-attention"),
}


def _foreign_kwargs_error(extra_count: int, unknown: dict[str, object]) -> HeadwiseError:
    valid_names = ("source", "mask", "bias", "gate", "positions", "cache")
    hints = [f"for {name}= write {TORCH_ARGUMENTS[name]}" for name in unknown if name in TORCH_ARGUMENTS]
    hints += [
        f"there is no argument {name!r}; {suggest_names(name, valid_names)}"
        for name in unknown
        if name not in TORCH_ARGUMENTS
    ]
    if extra_count:
        hints.append(f"{extra_count + 2} tensors were given: write {TORCH_ARGUMENTS['query']}")
    return HeadwiseError(
        f"this layer is called as layer(x, source, mask=…): {'; '.join(hints)}. For a layer that is called as "
        "torch.nn.MultiheadAttention is: hw.MultiHeadAttention.like_torch(embed_dim, num_heads)."
    )


# What other libraries call our settings.
FOREIGN_FIELD_NAMES = {
    **dict.fromkeys(("embed_dim", "d_model", "hidden_size", "dim"), "width"),
    **dict.fromkeys(("num_heads", "n_heads", "nhead", "num_attention_heads"), "heads"),
    **dict.fromkeys(("num_kv_heads", "num_key_value_heads"), "kv_heads"),
    **dict.fromkeys(("kdim", "vdim"), "kv_width"),
}


def _as_spec(spec: AttentionSpec | int | None, heads: int | None, fields: dict[str, Any]) -> AttentionSpec:
    if isinstance(spec, AttentionSpec):
        if fields or heads is not None:
            raise HeadwiseError(
                f"give a spec or its fields, not both: {', '.join(fields) or 'heads'} came beside a spec."
            )
        return spec
    fields = {**({} if spec is None else {"width": spec}), **({} if heads is None else {"heads": heads}), **fields}
    field_names = AttentionSpec.__dataclass_fields__
    for name in fields:
        if name not in field_names:
            hint = (
                f"here it is {FOREIGN_FIELD_NAMES[name]}."
                if name in FOREIGN_FIELD_NAMES
                else suggest_names(name, field_names)
            )
            raise HeadwiseError(f"an attention layer has no setting {name!r}; {hint}")
    for name in ("width", "heads"):
        if name not in fields:
            raise HeadwiseError(f"an attention layer needs {name}=…; e.g. MultiHeadAttention(width=512, heads=8).")
    return AttentionSpec(**fields)
