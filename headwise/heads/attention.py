"""Multi-head attention: Σ over heads of softmax(x W_Q (y W_K)ᵀ / √d + mask) · y W_V · W_O, plus a bias."""

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headwise.cache import NO_CACHE, AttendResult, LayerCache
from headwise.cache.per_head_cache import fake_quantize_kv, streaming_mask
from headwise.errors import ArgumentError, HeadwiseError, suggest_names
from headwise.heads.collectives_protocol import HeadPartitionProtocol
from headwise.heads.head import AttentionLayerProtocol, Heads
from headwise.heads.head_dropout import HeadDropout
from headwise.heads.hook_point import HOOKS, HookPoint, apply_gate
from headwise.heads.initialize_parameters import initialize
from headwise.heads.latent_projection import LatentQKVProjection
from headwise.heads.output_gate import OutputGate
from headwise.heads.per_head_output import PerHeadOutput
from headwise.heads.projections import QKVProjection, make_output_projection
from headwise.heads.qk_norm import HeadNorm
from headwise.kernels import (
    BACKENDS,
    POSITION_BIASES,
    Bias,
    CausalMask,
    KernelChoice,
    Mask,
    RotaryTable,
    ScoreParams,
    ScoreRequest,
    attention_weights,
    default_score_params,
    make_kernel_choice,
    make_score_params,
    window,
)
from headwise.kernels.fused import bind_single_query
from headwise.kernels.masks import and_masks
from headwise.spec import AttentionSpec, LayerAddress

if TYPE_CHECKING:
    from headwise.heads.torch_mha_replacement import TorchAttention


class MultiHeadAttention(nn.Module):
    """Multi-head attention layer that gives access to each of its heads.

    Args:
        spec: Configuration of the layer, or its width.
        heads: Number of heads, if no spec is given.
        backend: Kernel: "auto", "fused", "batched", "blockwise" or "reference". "auto" chooses per call.
        storage: Projections that share one weight in memory: "qkv", "q,kv" or "q,k,v".
        address: Address of the layer in a model.
        **fields: Fields of `AttentionSpec`, if no spec is given.

    Attributes:
        spec: Configuration of the layer.
        heads: The heads of the layer; `layer.heads[1]` is one head.
        hook_point: Hook point of z, between the kernel and W_O. With an output gate, z is the gated output.

    Raises:
        ArgumentError: A field or the backend is unknown, or width or heads are missing.

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
        self.spec = spec = _as_spec(spec, heads, fields).compute_derived_values()
        self.backend = backend
        if backend != "auto" and backend not in BACKENDS:
            raise ArgumentError(f"backend={backend!r}: unknown; {suggest_names(backend, ['auto', *BACKENDS])}")
        if backend == "fused" and spec.softcap is not None:
            raise ArgumentError(
                f"backend='fused': the fused kernel does not support softcap={spec.softcap}. "
                f"Use backend='blockwise', 'batched' or 'auto'."
            )
        self.qkv: Any = QKVProjection(spec, storage) if spec.latent is None else LatentQKVProjection(spec)
        self.output_projection = make_output_projection(spec)
        present = len(spec.head_ids)
        self.sink = nn.Parameter(torch.empty(present)) if spec.softmax == "sink" else None
        self.gate = nn.Parameter(torch.empty(present)) if spec.gated else None
        self.q_norm = HeadNorm(spec, "q") if spec.qk_norm is not None else None
        self.k_norm = HeadNorm(spec, "k") if spec.qk_norm is not None else None
        self.output_gate = OutputGate(spec) if spec.output_gate is not None else None
        position_parameters = spec.position_params_per_head
        self.position_bias = nn.Parameter(torch.empty(present, position_parameters)) if position_parameters else None
        self.head_dropout = HeadDropout(spec.head_dropout, spec.head_dropout_schedule)
        self.hook_point = HookPoint(address, spec.head_ids, self.output_projection, spec.window)
        self.partition: HeadPartitionProtocol | None = None  # set if other processes hold some heads of this layer
        self._gathered: AttentionLayerProtocol | None = None
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
        request: ScoreRequest | None = None,
        **unknown: object,
    ) -> Tensor:
        """Attend, then project to the residual stream: (B, T, D) → (B, T, D).

        Args:
            x: Input, (B, T, D).
            source: Sequence that keys and values are computed from in cross-attention, (B, S, ·).
            *extra: Not supported; raises an error.
            mask: Keys that each query may attend to. None means all keys.
            bias: Added to the scores.
            gate: Factors of the head outputs, (H,) or (B, H).
            positions: Positions of the tokens, (T,) or (B, T), or a table of rotary angles. By default positions continue
                after the tokens in the cache.
            cache: Keys and values of earlier tokens.
            request: Mask, bias and row starts in one object that the layers of a model share. Replaces `mask` and `bias`.
            **unknown: Not supported; raises an error that names the corresponding argument.

        Returns:
            Output of the layer, (B, T, D).
        """
        if extra or unknown:
            raise _foreign_kwargs_error(len(extra), unknown)
        z = self.compute_z(
            x, source, mask=mask, bias=bias, gate=gate, positions=positions, cache=cache, request=request
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
        request: ScoreRequest | None = None,
    ) -> Tensor:
        """Compute the outputs of all heads before W_O: z, (B, H, T, e). The arguments are those of `forward`.

        z enters W_O, so all gates of the layer are applied.
        """
        if request is None:
            request = ScoreRequest(mask, bias)
        elif mask is not None or bias is not None:
            raise ArgumentError("request: already contains the mask and the bias. Omit mask and bias.")
        cache = NO_CACHE if cache is None else cache
        q, k, v, request = self._project(x, source, request, positions, cache)
        return self.attend_projected(q, k, v, request, gate, cache, self.token_gate(x))

    def token_gate(self, x: Tensor) -> Tensor | None:
        """Return the output gate of each token: (B, T, D) → (B, H, T, 1 or e), or None without an output gate."""
        if self.output_gate is None:
            return None
        return self.output_gate(x if self.partition is None else self.partition.collectives.copy_to_group(x))

    def attention_weights(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | RotaryTable | None = None,
    ) -> Tensor:
        """Return the attention weights of each head, (B, H, T, S), without dropout.

        Rows sum to 1, or to less if the layer has a sink.

        Args:
            x: Input, (B, T, D).
            source: Sequence that keys and values are computed from in cross-attention, (B, S, ·).
            mask: Keys that each query may attend to. None means all keys.
            bias: Added to the scores.
            positions: Positions of the tokens, (T,) or (B, T), or a table of rotary angles.

        >>> layer = MultiHeadAttention(width=8, heads=2)
        >>> layer.attention_weights(torch.randn(3, 5, 8)).shape
        torch.Size([3, 2, 5, 5])
        """
        q, k, v, request = self._project(x, source, ScoreRequest(mask, bias), positions, NO_CACHE)
        return attention_weights(q, k, self.score_params(q, k, v, self._bind(request)))

    def per_head_output(
        self, x: Tensor, source: Tensor | None = None, *, mask: Mask | None = None, gate: Tensor | None = None
    ) -> PerHeadOutput:
        """Return z and the output of each head. The head outputs and b_O sum to the output of the layer.

        Args:
            x: Input, (B, T, D).
            source: Sequence that keys and values are computed from in cross-attention, (B, S, ·).
            mask: Keys that each query may attend to. None means all keys.
            gate: Factors of the head outputs, (H,) or (B, H).
        """
        return PerHeadOutput(
            self.compute_z(x, source, mask=mask, gate=gate), self.output_projection.head_output_weights, self.b_O
        )

    @staticmethod
    def like_torch(embed_dim: int, num_heads: int, *args: Any, **kwargs: Any) -> "TorchAttention":
        """Create a drop-in replacement of `torch.nn.MultiheadAttention`: same constructor, call and state dict.

        Args:
            embed_dim: Width of the residual stream.
            num_heads: Number of heads.
            *args: Further positional arguments of `torch.nn.MultiheadAttention`.
            **kwargs: Keyword arguments of `torch.nn.MultiheadAttention`.

        >>> layer = MultiHeadAttention.like_torch(8, 2, batch_first=True)
        >>> x = torch.randn(3, 5, 8)
        >>> out, weights = layer(x, x, x, average_attn_weights=False)
        >>> out.shape, weights.shape
        (torch.Size([3, 5, 8]), torch.Size([3, 2, 5, 5]))
        """
        from headwise.heads.torch_mha_replacement import (
            TorchAttention,
        )  # a subclass of this class

        return TorchAttention(embed_dim, num_heads, *args, **kwargs)

    def hook_points(self) -> list[HookPoint]:
        """Return the hook point of this layer in a list, so that a single layer can be recorded like a model."""
        return [self.hook_point]

    def gathered_hook_points(self) -> list[HookPoint]:
        """Return the hook point with the heads of all processes, in a list."""
        return [self.gathered_layer.hook_point]

    @property
    def heads(self) -> Heads:
        """The heads of this layer. Iterate over them, or index by head number."""
        return Heads((self,))

    @property
    def gathered_layer(self) -> AttentionLayerProtocol:
        """The layer with the heads of all processes. The layer itself if it is not partitioned."""
        return self if self._gathered is None else self._gathered

    def set_partition(self, partition: HeadPartitionProtocol) -> None:
        """Make this layer one part of a larger layer whose other heads are in other processes.

        Args:
            partition: The partition of the heads.
        """
        self.partition, self._gathered = partition, partition.gathered_layer(self)
        self.output_projection.collectives = partition.collectives
        self.qkv.sum_kv_grads_in_backward = (
            partial(partition.sum_kv_grads_in_backward, sizes=self.qkv.sizes) if partition.has_replicated_kv else None
        )
        for norm in (self.q_norm, self.k_norm):
            if norm is None:
                continue
            if norm.norm.weights == "shared":  # every process uses the gains for its own heads
                norm.sum_grads = partition.collectives.copy_to_group
            elif norm is self.k_norm and partition.has_replicated_kv:
                norm.sum_grads = self._sum_key_gain_grads

    def _sum_key_gain_grads(self, gains: Tensor) -> Tensor:
        """Return the gains of the keys of this process, (K, d). The backward pass sums those of copied KV heads."""
        assert self.qkv.sum_kv_grads_in_backward is not None
        return self.qkv.sum_kv_grads_in_backward(gains.flatten(), "k").view_as(gains)

    @property
    def _full_spec(self) -> AttentionSpec:
        return self.spec if self.partition is None else self.partition.full_spec

    @property
    def b_O(self) -> Tensor | None:
        """Output bias, (D,), or None."""
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
        """Return the kernel that a call of this size runs, the reason, and a change that would select another kernel.

        Args:
            T: Number of queries.
            S: Number of keys. None means `T`.
            B: Batch size.
            mask: Mask of the call.
            bias: Bias of the call.

        >>> MultiHeadAttention(width=8, heads=2).kernel_choice(T=16).backend
        'fused'
        """
        S = T if S is None else S
        if self.backend != "auto":
            return KernelChoice(
                self.backend, "the layer sets this backend", "Set layer.backend = 'auto' to choose per call."
            )
        spec, H = self.spec, len(self.spec.head_ids)
        q = torch.empty(B, H, T, spec.head_dim, device="meta")
        k = torch.empty(B, len(spec.kv_head_ids), S, spec.head_dim, device="meta")
        return make_kernel_choice(self.score_params(q, k, k, ScoreRequest(mask, bias)), B, H, T, S)

    def score_params(self, q: Tensor, k: Tensor, v: Tensor, request: ScoreRequest) -> ScoreParams:
        """Build the kernel's score params for a call with these tensors."""
        if self.partition is not None:
            return self.partition.score_params(self, (q, k, v), request)
        return self.build_score_params(self.spec, self.sink, self.position_bias, (q, k, v), request)

    def build_score_params(
        self,
        spec: AttentionSpec,
        sink: Tensor | None,
        position_bias: Tensor | None,
        tensors: tuple[Tensor, Tensor, Tensor],
        request: ScoreRequest,
    ) -> ScoreParams:
        """Build score params from a request, and from the spec, the sinks and the position biases of some heads."""
        (q, k, v), mask, bias = tensors, request.mask, request.bias
        dropout = spec.dropout if self.training else 0.0
        is_simple = bias is None and len(request.policies) == 0 and (mask is None or isinstance(mask, CausalMask))
        fits = q.shape[0] == k.shape[0] and q.shape[-1] == k.shape[-1] and k.shape[:3] == v.shape[:3]  # or raise below
        if is_simple and fits and spec.uses_default_score_params and not dropout:
            # torch.compile would warn about a function with a cache
            make_params = default_score_params.__wrapped__ if torch.compiler.is_compiling() else default_score_params
            return make_params(spec.head_dim, spec.scale, spec.kv_of_head, mask, spec.softcap)
        if spec.window is not None:
            mask = and_masks(mask, window(spec.window))
        if len(request.policies):
            num_keys = k.shape[2] if request.num_keys is None else request.num_keys
            not_evicted = streaming_mask(request.policies, spec.kv_of_head, num_keys, request.row_starts)
            mask = mask if not_evicted is None else and_masks(mask, not_evicted)
        if spec.position_bias_field is not None:
            if bias is not None:
                raise ArgumentError(
                    f"bias: this layer already has a position bias ({spec.position_bias_field}) and supports only one. "
                    f"Omit bias, or build the layer without {spec.position_bias_field}."
                )
            bias_parameters = q.new_empty(q.shape[1], 0) if position_bias is None else position_bias  # (H, n)
            bias = POSITION_BIASES[spec.position_bias_field].from_layer(bias_parameters, spec)
        return make_score_params(
            q,
            k,
            v,
            mask=mask,
            scale=spec.scale,
            bias=bias,
            softcap=spec.softcap,
            sink=0.0 if spec.softmax == "off_by_one" else sink,
            kv_of_head=spec.kv_of_head,
            dropout=dropout,
            num_keys=request.num_keys,
        )

    def _project(
        self,
        x: Tensor,
        source: Tensor | None,
        request: ScoreRequest,
        positions: Tensor | RotaryTable | None,
        cache: LayerCache,
    ) -> tuple[Tensor, Tensor, Tensor, ScoreRequest]:
        """Return q, k and v after positions, (B, H, T, d) (B, K, T, d) (B, K, T, e), and the request for them."""
        self._check_input(x, source)
        if self.partition is not None:
            x = self.partition.collectives.copy_to_group(x)
            if source is not None and cache is NO_CACHE:  # other caches compare sources by identity
                source = self.partition.collectives.copy_to_group(source)
        rotary_table = self._rotary_table(x, source, positions, cache)
        stored_source = None if source is None else cache.stored_source_kv(source)
        if stored_source is not None:
            (q,) = self.qkv.project(x, "q")
            q = q if self.q_norm is None else self.q_norm(q, x)
            return q, *stored_source, request  # pyright: ignore[reportReturnType]
        if self.q_norm is None:
            q, k, v = self.qkv(x, source, rotary_table)
        else:
            q, k, v = self.qkv(x, source)
            q, k = self._normalize_qk(q, k, (x, x if source is None else source), rotary_table)
        if rotary_table is not None:
            q = rotary_table.scale_queries(q)
        if self.spec.cache and source is None and cache is NO_CACHE:  # as a per-head cache would return them
            k, v = fake_quantize_kv(k, self.spec.cache_policies), fake_quantize_kv(v, self.spec.cache_policies)
        return q, k, v, request

    def _normalize_qk(
        self, q: Tensor, k: Tensor, inputs: tuple[Tensor, Tensor], rotary_table: RotaryTable | None
    ) -> tuple[Tensor, Tensor]:
        """Normalize and rotate queries and keys, in the order of the spec. `inputs` are the inputs of both projections."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        is_last = self.q_norm.norm.after_rotary
        if is_last and rotary_table is not None:
            q, k = rotary_table.rotate(q), rotary_table.rotate(k)
        q, k = self.q_norm(q, inputs[0]), self.k_norm(k, inputs[1])
        if is_last or rotary_table is None:
            return q, k
        return rotary_table.rotate(q), rotary_table.rotate(k)

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
        """Attend with projected and rotated q, k and v, apply gates and head dropout, and pass the hook point.

        Args:
            q: Queries, (B, H, T, d).
            k: Keys of the new tokens, (B, K, T, d).
            v: Values of the new tokens, (B, K, T, e).
            request: Mask, bias and row starts of the call.
            gate: Factors of the head outputs, (H,) or (B, H).
            cache: Keys and values of earlier tokens.
            token_gate: Output gate of the tokens, (B, H, T, 1 or e).

        Returns:
            z, (B, H, T, e).
        """
        if self.partition is None:
            result = cache.attend(q, k, v, self._bind(request))
        else:
            with self._local_rng(q.device, self.partition):
                result = cache.attend(q, k, v, self._bind(request))
        return self._finish_z(q, result, gate, token_gate)

    def _finish_z(
        self, q: Tensor, result: AttendResult, gate: Tensor | None = None, token_gate: Tensor | None = None
    ) -> Tensor:
        """Apply gates and head dropout to the output of the kernel, and pass the hook point: z, (B, H, T, e)."""
        z = self._apply_gates(result.z if token_gate is None else result.z * token_gate, gate)
        return z if HOOKS.now is HOOKS else self.hook_point.apply(q, result, z, token_gate)

    def single_query_request(self) -> ScoreRequest | None:
        """Return the request of one new token that sees all keys of the cache, for any number of steps without listeners.

        None if the score params depend on more than the spec.
        """
        spec = self.spec
        if self.partition is not None or not spec.uses_default_score_params or spec.dropout:
            return None
        params = default_score_params(spec.head_dim, spec.scale, spec.kv_of_head, None, spec.softcap)
        is_fused = self.backend in ("auto", "fused")
        kernel = bind_single_query(params, len(spec.kv_head_ids), spec.head_dim, spec.value_dim) if is_fused else None
        policies = spec.cache_policies if spec.cache else ()
        return ScoreRequest(CausalMask(), policies=policies, layer=self, kernel=kernel)

    def attend_one(
        self, q: Tensor, k: Tensor, v: Tensor, request: ScoreRequest, gate: Tensor | None, cache: LayerCache
    ) -> Tensor:
        """Run `attend_projected` for one new token, with the request of `single_query_request` and without hooks."""
        if request.kernel is None or request.policies:
            return self.attend_projected(q, k, v, request, gate, cache)
        z = cache.attend_one(q, k, v, request)
        return (
            z if gate is None and self.gate is None and not self.head_dropout.max_rate else self._apply_gates(z, gate)
        )

    def _bind(self, request: ScoreRequest) -> ScoreRequest:
        """Return a request for this layer. It shares the memo of the given one."""
        if request.layer is self:
            return request
        spec = self._full_spec
        has_listeners = HOOKS.now is not HOOKS and self.hook_point.has_listeners
        return request.for_layer(self, spec.cache_policies if spec.cache else (), has_listeners=has_listeners)

    def _apply_gates(self, z: Tensor, gate: Tensor | None) -> Tensor:
        """Scale z by the learned gates, the gates of the call, and head dropout."""
        partition = self.partition
        if self.gate is not None:
            z = apply_gate(z, self.gate)
        if gate is not None:
            z = apply_gate(z, gate if partition is None else partition.local_gate(gate))
        if self.head_dropout.training:
            dropout_gate = self.head_dropout.sample_gate(z.shape[0], len(self._full_spec.head_ids), z)  # (B, H)
            if dropout_gate is not None:
                z = apply_gate(z, dropout_gate if partition is None else partition.local_gate(dropout_gate))
        return z

    def _local_rng(self, device: torch.device, partition: HeadPartitionProtocol) -> Any:
        """Return a context in which each process draws its own dropout masks."""
        has_dropout = self.training and self.spec.dropout > 0
        return partition.fork_rng_per_rank(device) if has_dropout else nullcontext()

    def _rotary_table(
        self, x: Tensor, source: Tensor | None, positions: Tensor | RotaryTable | None, cache: LayerCache
    ) -> RotaryTable | None:
        if self.spec.rotary is None and self.spec.query_scaling is None:
            return None
        if source is not None:
            raise ArgumentError(
                "source: cross-attention is not supported with rotary positions, because queries and keys come from two "
                "sequences. Build the layer with rotary=None."
            )
        if isinstance(positions, RotaryTable):
            return positions
        if positions is None:
            positions = torch.arange(cache.length, cache.length + x.shape[1], device=x.device)
        return RotaryTable.at(positions, self.spec.rotary, self.spec.head_dim, x.dtype, self.spec.query_scaling)

    def _check_input(self, x: Tensor, source: Tensor | None) -> None:
        spec = self.spec
        if source is None and x.ndim == 3 and x.shape[-1] == spec.width == spec.kv_width:
            return
        for name, tensor, width in (("x", x, spec.width), ("source", source, spec.kv_width)):
            if tensor is not None and (tensor.ndim != 3 or tensor.shape[-1] != width):
                raise ArgumentError(f"{name}: must have shape (batch, tokens, {width}). Got {tuple(tensor.shape)}.")
        if source is None and spec.kv_width != spec.width:
            raise ArgumentError(
                f"source: missing. This layer computes keys and values from a source of width {spec.kv_width}. "
                f"Call layer(x, source)."
            )

    def extra_repr(self) -> str:
        """Return the sizes for `print(layer)`."""
        spec = self.spec
        return f"width={spec.width}, heads={len(spec.head_ids)}, kv_heads={len(spec.kv_head_ids)}, head_dim={spec.head_dim}"


# Arguments of attention layers of torch and transformers, and the corresponding argument here.
TORCH_ARGUMENTS = {
    "attention_mask": "mask=hw.padding_mask(attention_mask.bool()), which is True at real tokens",
    "key_padding_mask": "mask=hw.padding_mask(~key_padding_mask)",
    "attn_mask": "mask=hw.Mask.of(~attn_mask), or bias=attn_mask[None, None] if it is added to scores",
    "is_causal": "mask=hw.causal()",
    "need_weights": "layer.attention_weights(x, mask=…), which returns one map per head",
    "average_attn_weights": "layer.attention_weights(x, mask=…), which returns one map per head",
    **dict.fromkeys(("query", "key", "value"), "layer(x) for self-attention, layer(x, source) for cross-attention"),
}


def _foreign_kwargs_error(extra_count: int, unknown: dict[str, object]) -> HeadwiseError:
    valid_names = ("source", "mask", "bias", "gate", "positions", "cache")
    hints = [f"Instead of {name}=, use {TORCH_ARGUMENTS[name]}." for name in unknown if name in TORCH_ARGUMENTS]
    hints += [
        f"Unknown argument {name!r}; {suggest_names(name, valid_names)}"
        for name in unknown
        if name not in TORCH_ARGUMENTS
    ]
    if extra_count:
        hints.append(f"Got {extra_count + 2} positional tensors. Use {TORCH_ARGUMENTS['query']}.")
    return ArgumentError(
        f"MultiHeadAttention: call it as layer(x, source, mask=…). {' '.join(hints)} For a layer with the arguments of "
        "torch.nn.MultiheadAttention, use hw.MultiHeadAttention.like_torch(embed_dim, num_heads)."
    )


# Names of other libraries for fields of AttentionSpec.
FOREIGN_FIELD_NAMES = {
    **dict.fromkeys(("embed_dim", "d_model", "hidden_size", "dim"), "width"),
    **dict.fromkeys(("num_heads", "n_heads", "nhead", "num_attention_heads"), "heads"),
    **dict.fromkeys(("num_kv_heads", "num_key_value_heads"), "kv_heads"),
    **dict.fromkeys(("kdim", "vdim"), "kv_width"),
}


def _as_spec(spec: AttentionSpec | int | None, heads: int | None, fields: dict[str, Any]) -> AttentionSpec:
    if isinstance(spec, AttentionSpec):
        if fields or heads is not None:
            raise ArgumentError(
                f"spec: pass either a spec or its fields. Got a spec and also {', '.join(fields) or 'heads'}."
            )
        return spec
    fields = {**({} if spec is None else {"width": spec}), **({} if heads is None else {"heads": heads}), **fields}
    field_names = AttentionSpec.__dataclass_fields__
    for name in fields:
        if name not in field_names:
            hint = (
                f"use {FOREIGN_FIELD_NAMES[name]}." if name in FOREIGN_FIELD_NAMES else suggest_names(name, field_names)
            )
            raise ArgumentError(f"MultiHeadAttention: unknown argument {name!r}; {hint}")
    for name in ("width", "heads"):
        if name not in fields:
            raise ArgumentError(
                f"{name}: required argument of MultiHeadAttention. Example: MultiHeadAttention(width=512, heads=8)."
            )
    return AttentionSpec(**fields)
