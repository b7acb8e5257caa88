"""Transformer models: a decoder, an encoder or an encoder-decoder, built from a spec."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headwise.cache import NO_CACHE, ModelCache
from headwise.cache.model_cache import check_model_cache
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads import Heads, HookPoint, MultiHeadAttention, initialize
from headwise.heads.head import AttentionLayerProtocol, Gates, resolve_gates
from headwise.heads.hook_point import HOOKS, HookContextState, replaying
from headwise.kernels import Mask, RotaryTable
from headwise.kernels.matmul_tuner import MatmulTuner
from headwise.kernels.random_state import checkpoint_restores_rng, get_rng_state, replayed_rng
from headwise.model.block import Block, BlockContext, distinct_rotaries_by_layer
from headwise.model.decode_forward import DecodeForwardCache
from headwise.model.generate import generate, stream
from headwise.model.non_attention_layers import Embedding, LMHead, Pooler, make_norm
from headwise.model.prefix_forward import prefix_forward
from headwise.model.prune import prune
from headwise.model.residual_stream import input_norms, residual_stream
from headwise.model.resumable_forward import resumable_forward
from headwise.model.simulated_streaming_forward import NativeSimulatedStreamingForward
from headwise.model.unsupported_kwargs import foreign_kwargs_error
from headwise.model.weights_digest import check_plan
from headwise.spec import LayerAddress, ModelSpec, Plan


class TokenizerProtocol(Protocol):
    """Interface of tokenizers.

    Attributes:
        special: Ids of special tokens by name, such as "bos" and "eos".
    """

    special: dict[str, int | None]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        ...

    def save(self, folder: Path) -> None:
        """Save the tokenizer to a folder."""
        ...


class Transformer(nn.Module):
    """A transformer with random weights, built from a spec. `hw.load` returns one with trained weights.

    Args:
        spec: Configuration of the model.
        backend: Attention kernel: "auto", "fused", "batched", "blockwise" or "reference".
        storage: Projections that share one weight in memory: "qkv", "q,kv" or "q,k,v".
        device: Device of the weights. None means torch's default device.

    Attributes:
        spec: Configuration of the model.
        heads: All heads by address: `model.heads["5.1"]`.
        tokenizer: Tokenizer of the model, or None.
        family: Model family of the weights if they were loaded, otherwise None.
        plans: Plans that were applied to the model.
        checkpointing: True recomputes activations of blocks in the backward pass instead of storing them.
        matmul_tuner: Choice of the matrix products of decode steps.

    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> model(torch.tensor([[72, 105, 33]])).shape
    torch.Size([1, 3, 256])
    >>> with model.heads["5.1,3.*"].silenced():
    ...     quieter = model(torch.tensor([[72, 105, 33]]))
    """

    image_input = None  # a Transformer reads tokens, not images
    is_native = True  # an attached model is not
    is_sharded = False  # True if other processes hold heads of the model

    def __init__(
        self,
        spec: ModelSpec,
        *,
        backend: str = "auto",
        storage: str = "qkv",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(spec, ModelSpec):
            raise ArgumentError(f'spec={spec!r}: must be a ModelSpec, for example hw.preset("nano").')
        self.spec = spec
        self._tokenizer: TokenizerProtocol | Callable[[], TokenizerProtocol] | None = None
        self.family: str | None = None
        self.plans: tuple[Plan, ...] = ()
        self.matmul_tuner = MatmulTuner()
        self._decode_forwards = DecodeForwardCache()
        self.checkpointing = False
        self.position_kinds = distinct_rotaries_by_layer(spec)[0]  # rotary embeddings that differ between layers
        two_stacks = spec.kind == "encoder-decoder"
        with nullcontext() if device is None else torch.device(device):
            self.embed = Embedding(spec)
            stack = "dec" if two_stacks else ""
            self.blocks = nn.ModuleList(
                Block(spec, LayerAddress(stack, layer), backend, storage) for layer in range(spec.layers)
            )
            self.norm = make_norm(spec) if spec.num_final_norms else None
            self.encoder_blocks = nn.ModuleList(
                Block(spec, LayerAddress("enc", layer), backend, storage) for layer in range(spec.encoder_layers)
            )
            self.encoder_norm = make_norm(spec) if spec.num_final_norms and two_stacks else None
            self.pooler = Pooler(spec) if spec.pooler else None
            self.output = LMHead(spec, self.embed.tokens) if spec.output != "none" else None
            initialize(self, residual_writes=max(1, len(spec.layer_addresses) + spec.layers + spec.encoder_layers))
        _tie_again(self)
        self.register_load_state_dict_post_hook(_tie_again)

    def _apply(self, *args: Any, **options: Any) -> Any:
        """Move or cast the model. Some devices need new parameters for that, so tied ones are tied again."""
        result = super()._apply(*args, **options)
        _tie_again(self)
        return result

    def forward(
        self,
        ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        mask: Mask | None = None,
        token_types: Tensor | None = None,
        source: Tensor | None = None,
        source_attention_mask: Tensor | None = None,
        memory: Tensor | None = None,
        cache: ModelCache | None = None,
        gates: Gates | None = None,
        hidden: bool = False,
        **unknown: object,
    ) -> Tensor:
        """Compute logits, or hidden states, of token ids.

        Args:
            ids: Token ids, (B, T).
            attention_mask: (B, T), True at real tokens. Padding may be on the left or right. None means no padding.
            mask: Additional mask.
            token_types: Token types, (B, T), of a model with token types.
            source: Source token ids of an encoder-decoder, (B, S).
            source_attention_mask: (B, S), True at real tokens of the source.
            memory: Encoded source, (B, S, D), instead of `source`.
            cache: Cache with earlier tokens, from `model.cache()`.
            gates: Factors of head outputs for this call, such as {"5.1": 0.0, "6.*": 0.5}. A factor is a number, or one
                number per example, (B,).
            hidden: Whether to return final hidden states instead of logits.
            **unknown: Not supported; raises an error that names the corresponding argument.

        Returns:
            Logits (B, T, V). Hidden states (B, T, D) if `hidden` is True or the model has no output layer.
        """
        if unknown:
            raise foreign_kwargs_error(self.forward, "model(ids, attention_mask=…)", unknown)
        ids = self._validate_ids(ids, attention_mask)
        layer_gates = {} if gates is None else resolve_gates(self.gathered_layers(), gates)
        self._check_cache(cache)
        with nullcontext() if cache is None else self._cached_step(cache, ids.numel()):
            start, full_attention_mask = (
                (0, attention_mask) if cache is None else cache.advance_length_and_mask(ids, attention_mask)
            )
            self._check_padding_side(cache, full_attention_mask)
            memory = self._memory(source, source_attention_mask, memory, cache, layer_gates)
            if cache is not None:
                source_attention_mask = cache.store_source(memory, source_attention_mask)
            positions = self._positions(ids, start, full_attention_mask)  # (1 or B, T)
            context = BlockContext(
                causal=self.spec.kind != "encoder",
                mask=mask,
                attention_mask=None if full_attention_mask is None else full_attention_mask.bool(),
                rotary_tables=self._rotary_tables(positions),
                gates=layer_gates,
                cache=cache,
                memory=memory,
                source_attention_mask=None if source_attention_mask is None else source_attention_mask.bool(),
            )
            x = self._embed(ids, positions, token_types)  # (B, T, D)
            decode = None if cache is None else self._decode_forwards.find(self.blocks, self.matmul_tuner, x)
            x = self._run_blocks(self.blocks, x, context) if decode is None else decode.run(x, context)
            x = x if self.norm is None else self.norm(x)
            return x if hidden or self.output is None else self.output(x)  # (B, T, V)

    generate, stream = generate, stream
    input_norms, residual_stream, resumable_forward = input_norms, residual_stream, resumable_forward
    prune, prefix_forward = prune, prefix_forward

    def streaming_forward(self) -> NativeSimulatedStreamingForward:
        """Return forward passes of a decoder in which KV heads stream, to rank them."""
        return NativeSimulatedStreamingForward(self)

    def why_not_resumable(self) -> str:
        """Return an empty string, because native models can always be resumed at a layer."""
        return ""

    @contextmanager
    def recompute_blocks(self) -> Iterator[None]:
        """Recompute the activations of blocks in the backward pass while the context is open, instead of storing them."""
        previous, self.checkpointing = self.checkpointing, True
        try:
            yield
        finally:
            self.checkpointing = previous

    def copy_offloaded_to_memory(self) -> Self:
        """Return this model, whose weights are always in memory."""
        return self

    def untrained(self, seed: int = 0) -> "Transformer":
        """Return a model of the same spec with random weights.

        Args:
            seed: Seed of the random weights.
        """
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Transformer(self.spec).to(self.device)
        model.tokenizer = self.tokenizer
        return model

    def check_native(self, operation: str) -> None:
        """Do nothing, because this model is native.

        Args:
            operation: Name of the operation.
        """

    def load_weights(self, state: Mapping[str, Tensor]) -> list[str]:
        """Load weights by the names that they have in a saved folder.

        Args:
            state: Tensors by name. Tied tensors occur once.

        Returns:
            The unknown names.
        """
        return self.load_state_dict(state, strict=False).unexpected_keys

    # Folders. Imports are local, because headwise.weights imports this module.

    def save(self, folder: str | Path) -> Path:
        """Save the model atomically to a folder. `hw.load(folder)` loads it with the same bits.

        Args:
            folder: Path of the folder.

        Returns:
            The path of the folder.
        """
        from headwise.weights.save import save

        return save(self, folder)

    @classmethod
    def reopen(cls, folder: str | Path) -> Self:
        """Load a model that `save` wrote as an instance of this class.

        Args:
            folder: Path of the folder.
        """
        from headwise.weights.load import load_native

        return load_native(cls, folder)

    def export(self, folder: str | Path, family: str | None = None) -> Path:
        """Write the model in the format of transformers.

        Args:
            folder: Path of the folder.
            family: Model family. None means the family that the weights came from, or the first that supports the spec.

        Returns:
            The path of the folder.
        """
        from headwise.weights.export import export_native

        return export_native(self, folder, family)

    def encode(self, source: Tensor, *, attention_mask: Tensor | None = None, gates: Gates | None = None) -> Tensor:
        """Encode a source with the encoder of an encoder-decoder: (B, S) → (B, S, D).

        Args:
            source: Source token ids, (B, S).
            attention_mask: (B, S), True at real tokens.
            gates: Factors of head outputs for this call.
        """
        if self.spec.kind != "encoder-decoder":
            raise UnsupportedModelError(
                f"encode: supports encoder-decoders only. This model has kind={self.spec.kind!r}. Call model(ids)."
            )
        x, context = self.begin_forward(source, attention_mask=attention_mask, gates=gates)
        x = self._run_blocks(self.encoder_blocks, x, context)
        return x if self.encoder_norm is None else self.encoder_norm(x)

    def begin_forward(
        self, ids: Tensor, *, attention_mask: Tensor | None = None, gates: Gates | None = None
    ) -> tuple[Tensor, BlockContext]:
        """Return the residual stream before the first block, (B, T, D), and the context of the blocks.

        Use it to run the blocks one by one. In an encoder-decoder these are the blocks of the encoder.

        Args:
            ids: Token ids, (B, T).
            attention_mask: (B, T), True at real tokens.
            gates: Factors of head outputs.
        """
        ids = self._validate_ids(ids, attention_mask)
        positions = self._positions(ids, 0, attention_mask)
        context = BlockContext(
            causal=self.spec.kind == "decoder",
            attention_mask=None if attention_mask is None else attention_mask.bool(),
            rotary_tables=self._rotary_tables(positions),
            gates=resolve_gates(self.gathered_layers(), gates),
        )
        return self._embed(ids, positions, None), context

    def pooled(self, ids: Tensor, *, attention_mask: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """Return the pooled output of an encoder for each text: (B, T) → (B, D).

        Args:
            ids: Token ids, (B, T).
            attention_mask: (B, T), True at real tokens.
            token_types: Token types, (B, T).
        """
        if self.pooler is None:
            raise UnsupportedModelError(
                "pooled: this model does not have a pooler. Use the mean of model(ids, hidden=True) over real tokens."
            )
        return self.pooler(self(ids, attention_mask=attention_mask, token_types=token_types, hidden=True))

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embed.reference_tensor.device

    @property
    def tokenizer(self) -> TokenizerProtocol | None:
        """Tokenizer of the model, or None. If it was set to a function, the function is called on first access."""
        if callable(self._tokenizer):
            self._tokenizer = self._tokenizer()
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, value: "TokenizerProtocol | Callable[[], TokenizerProtocol] | None") -> None:
        self._tokenizer = value

    @property
    def decoder_start_token(self) -> int:
        """First decoder token of an encoder-decoder: that of the spec, or the end-of-text token (or separator)."""
        if self.spec.decoder_start_id is not None:
            return self.spec.decoder_start_id
        special = {} if self.tokenizer is None else self.tokenizer.special
        token = special.get("eos") if special.get("eos") is not None else special.get("sep")
        if token is None:
            raise UnsupportedModelError(
                "decoder_start_token: the decoder starts with the end-of-text or separator token, and the tokenizer defines "
                "neither. Pass source= and a prompt of token ids that begins with the start token."
            )
        return token

    # Heads.

    def hook_points(self) -> list[HookPoint]:
        """Return the hook points of all attention layers in the order of `attention_layers`."""
        return [layer.hook_point for layer in self.attention_layers()]

    def gathered_hook_points(self) -> list[HookPoint]:
        """Return the hook points with the heads of all processes. All processes must open the same listeners and edits."""
        return [layer.hook_point for layer in self.gathered_layers()]

    @property
    def heads(self) -> Heads:
        """All heads by address: `model.heads["5.1"]`, `model.heads["0-3.*"]`."""
        return Heads(self.gathered_layers())

    def gathered_layers(self) -> Iterator[AttentionLayerProtocol]:
        """Return the attention layers with the heads of all processes."""
        return (layer.gathered_layer for layer in self.attention_layers())

    def attention_layers(self) -> Iterator[MultiHeadAttention]:
        """Yield the attention layers: encoder first, self-attention of a block before its cross-attention."""
        for block in (*self.encoder_blocks, *self.blocks):
            assert isinstance(block, Block)
            yield block.attention
            if block.cross is not None:
                yield block.cross

    # Caching.

    def cache(self, kind: str | Plan = "dynamic", size: int | None = None) -> ModelCache:
        """Create an empty KV cache for this model.

        Args:
            kind: "dynamic" grows as needed, "static" allocates memory for `size` tokens, "sliding" caches the last `size`
                tokens. A `Plan` uses the cache policies of the plan.
            size: Number of tokens of a static or sliding cache. The default of a static cache is the context of the model.

        Returns:
            The cache, for `model(ids, cache=cache)` or `model.generate(prompt, cache=cache)`.

        Raises:
            UnsupportedModelError: The model is an encoder.
        """
        if self.spec.kind == "encoder":
            raise UnsupportedModelError(
                "cache: an encoder does not have a KV cache, because it attends to all tokens at once. Call model(ids)."
            )
        if isinstance(kind, str):
            return self._make_cache(self.spec, kind, size)
        if not isinstance(kind, Plan):
            raise ArgumentError(f"kind={kind!r}: must be 'dynamic', 'static', 'sliding' or a Plan.")
        check_plan(kind, self)
        return self._make_cache(kind.cache_spec(), "dynamic" if size is None else "static", size)

    def _make_cache(self, spec: ModelSpec, kind: str, size: int | None) -> ModelCache:
        return ModelCache(spec, kind, size)

    @contextmanager
    def _cached_step(self, cache: ModelCache, rows: int) -> Iterator[None]:
        """Run a step with tuned matrix products. Restore the cache if the step fails."""
        with cache.atomic_step(), self.matmul_tuner.decode_step(self, rows):
            yield

    # Helpers of the forward pass.

    def _run_blocks(self, blocks: nn.ModuleList, x: Tensor, context: BlockContext) -> Tensor:
        if not (self.checkpointing and torch.is_grad_enabled()):
            for block in blocks:
                x = block(x, context)
            return x
        policies: set[bool] = {bool(block.attention.spec.cache) for block in blocks}  # pyright: ignore
        for has_policies in policies:
            context.score_request(NO_CACHE, x.shape[1], has_policies=has_policies)  # compiled blocks may only read it
        run_checkpointed = partial(checkpoint, use_reentrant=False)
        if not torch.compiler.is_compiling():  # compiled code repeats the traced operations, including edits
            run_checkpointed = partial(
                run_checkpointed,
                context_fn=partial(_checkpoint_contexts, HOOKS.now, x.device, is_training=self.training),
            )
        for block in blocks:
            x = run_checkpointed(block, x, context)
        return x

    def _memory(
        self,
        source: Tensor | None,
        source_attention_mask: Tensor | None,
        memory: Tensor | None,
        cache: ModelCache | None,
        gates: dict[LayerAddress, Tensor],
    ) -> Tensor | None:
        if self.spec.kind != "encoder-decoder":
            if source is not None or memory is not None:
                raise ArgumentError(
                    f"source: only an encoder-decoder reads a source. This model has kind={self.spec.kind!r}. Omit source "
                    f"and memory."
                )
            return None
        if cache is not None and cache.memory is not None:
            if source is not None or memory is not None:
                raise ArgumentError("source: the cache already contains a source. Create a new cache for a new source.")
            return cache.memory
        if memory is None and source is None:
            raise ArgumentError("source: missing. An encoder-decoder needs model(ids, source=source_ids).")
        if memory is None and source is not None:
            memory = self.encode(source, attention_mask=source_attention_mask, gates=gates)
        return memory

    def _positions(self, ids: Tensor, start: int, attention_mask: Tensor | None) -> Tensor:
        """Return the position of each token, without counting padding: (1 or B, T)."""
        T = ids.shape[1]
        if attention_mask is not None:
            positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, start : start + T]
        else:
            positions = torch.arange(start, start + T, device=ids.device)[None]
        if (
            self.spec.positions == "learned"
            and start + T > self.spec.context
            and int(positions.max()) >= self.spec.context
        ):
            raise ArgumentError(
                f"ids: {int(positions.max()) + 1} tokens are more than the {self.spec.context} positions that the model has "
                f"learned. Shorten the input."
            )
        return positions

    def _rotary_tables(self, positions: Tensor) -> tuple[RotaryTable | None, ...]:
        """Return one table for each kind of layer. None for layers without rotary embedding and query scaling."""
        head_dim, dtype = self.spec.attention.head_dim, self.embed.reference_tensor.dtype
        return tuple(
            None if kind == (None, None) else RotaryTable.at(positions, kind[0], head_dim, dtype, kind[1])
            for kind in self.position_kinds
        )

    def _embed(self, ids: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        try:
            return self.embed(ids, positions, token_types)
        except IndexError:
            low, high = int(ids.min()), int(ids.max())
            types = "" if token_types is None else f" and token types up to {int(token_types.max())}"
            raise ArgumentError(
                f"ids: token ids must be from 0 to {self.spec.vocab - 1} (and token types, if the model has them, below "
                f"{self.spec.token_types}). Got token ids from {low} to {high}{types}."
            ) from None

    def _validate_ids(self, ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise ArgumentError(f"ids: must be an integer tensor of shape (batch, tokens). Got {got}.")
        if attention_mask is not None and attention_mask.shape != ids.shape:
            raise ArgumentError(
                f"attention_mask: must have the shape of ids, {tuple(ids.shape)}, and be True at real tokens. "
                f"Got shape {tuple(attention_mask.shape)}."
            )
        if ids.device != self.device:
            raise ArgumentError(
                f"ids: the tensor is on {ids.device}, the model on {self.device}. Use ids.to(model.device), or model.to(...)."
            )
        return ids.long()

    def _check_cache(self, cache: ModelCache | None) -> None:
        check_model_cache(cache)
        if cache is not None and self.checkpointing and torch.is_grad_enabled():
            raise ArgumentError(
                "cache: not supported with checkpointing and gradients, because a cache does not store autograd graphs. Use "
                "torch.no_grad(), or set model.checkpointing = False."
            )

    def _check_padding_side(self, cache: ModelCache | None, attention_mask: Tensor | None) -> None:
        """Raise if a cache is used with right padding, but windows or position biases count padding as positions."""
        if cache is None or attention_mask is None:
            return
        cache_counts_positions = any(layer_cache.needs_left_padding for layer_cache in cache.layers.values())
        uses_distances = self.spec.attention.position_bias_field is not None or cache_counts_positions
        if uses_distances and (attention_mask[:, :-1] & ~attention_mask[:, 1:]).any():
            raise ArgumentError(
                "attention_mask: padding follows a token. Models with windows, position biases or cache policies per head "
                "need padding on the left if a cache is used."
            )


def _tie_again(model: Any, incompatible: object = None) -> None:
    """Tie the output layer to the embedding, and the blocks of shared layers to the first one.

    Loading with assign=True replaces the tensors, so they are tied again afterwards.
    """
    if model.output is not None:
        model.output.tie_weight(model.embed.tokens)
    if model.spec.shared_layers:
        for block in model.blocks[1:]:
            _share_parameters(model.blocks[0], block)


def _share_parameters(source: nn.Module, target: nn.Module) -> None:
    """Let a block use the parameters of another block. Its hook points stay its own."""
    for name, module in source.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            setattr(target.get_submodule(name), parameter_name, parameter)


def _checkpoint_contexts(hooks: HookContextState, device: torch.device, *, is_training: bool) -> tuple[Any, Any]:
    """Return the contexts in which a block runs first, and again in the backward pass."""
    must_restore = is_training and not checkpoint_restores_rng(device)
    return nullcontext(), _repeated(hooks, get_rng_state(device) if must_restore else None, device)


@contextmanager
def _repeated(hooks: HookContextState, rng_state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Repeat a forward pass with the same edits and the same dropout."""
    with replaying(hooks), replayed_rng(rng_state, device):
        yield
