"""The whole network: a decoder, an encoder, or both, built from a spec."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headwise.cache import ModelCache
from headwise.cache.model_cache import check_model_cache
from headwise.errors import HeadwiseError
from headwise.heads import Heads, HookPoint, MultiHeadAttention, initialize
from headwise.heads.head import AttentionLayerProtocol, Gates, resolve_gates
from headwise.heads.hook_point import HOOKS, replaying
from headwise.kernels import Mask, RotaryTable
from headwise.kernels.matmul_tuner import MatmulTuner
from headwise.model.block import Block, BlockContext
from headwise.model.generate import generate, stream
from headwise.model.layers import Embedding, LMHead, Pooler, make_norm
from headwise.model.prune import prune
from headwise.model.residual_stream import input_norms, residual_stream
from headwise.model.resumable_forward import resumable_forward
from headwise.model.unsupported_kwargs import foreign_kwargs_error
from headwise.model.weights_digest import check_plan
from headwise.spec import LayerAddress, ModelSpec, Plan


class TokenizerProtocol(Protocol):
    """What a model asks of a tokenizer."""

    special: dict[str, int | None]

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...

    def save(self, folder: Path) -> None:
        """Write it into a folder."""
        ...


class Transformer(nn.Module):
    """A transformer from a spec, with random weights.

    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> model(torch.tensor([[72, 105, 33]])).shape
    torch.Size([1, 3, 256])
    >>> with model.heads["5.1,3.*"].silenced():
    ...     quieter = model(torch.tensor([[72, 105, 33]]))
    """

    image_input = None  # it reads tokens
    is_sharded = False  # whether other processes hold heads of it

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
            raise HeadwiseError(f'a Transformer is built from a ModelSpec, e.g. hw.preset("nano"); got {spec!r}.')
        self.spec = spec
        self._tokenizer: TokenizerProtocol | Callable[[], TokenizerProtocol] | None = None
        self.family: str | None = None  # whose weights these are, if they came from a file
        self.plans: tuple[Plan, ...] = ()  # by which heads were cut, if by plans
        self.matmul_tuner = MatmulTuner()  # of the products of its decode steps
        self.checkpointing = False  # True: activations inside blocks are recomputed in the backward pass, not kept
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
        self.register_load_state_dict_post_hook(_tie_again)

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
        """Token ids (B, T) → logits (B, T, V); hidden states (B, T, D) if `hidden`, or where there is no output layer.

        `attention_mask` (B, T) is True at real tokens, left or right. `mask` comes on top of the model's own. `gates` scales
        heads for this call alone: {"5.1": 0.0, "6.*": 0.5}, a number each or one per example (B,). In an encoder-decoder
        `source` (B, S) is what is read; `memory` is the same, encoded already.
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
                rotary_table=self._rotary_table(positions),
                gates=layer_gates,
                cache=cache,
                memory=memory,
                source_attention_mask=None if source_attention_mask is None else source_attention_mask.bool(),
            )
            x = self._embed(ids, positions, token_types)  # (B, T, D)
            x = self._run_blocks(self.blocks, x, context)
            x = x if self.norm is None else self.norm(x)
            return x if hidden or self.output is None else self.output(x)  # (B, T, V)

    generate, stream = generate, stream
    input_norms, residual_stream, resumable_forward = input_norms, residual_stream, resumable_forward
    prune = prune

    def why_not_resumable(self) -> str:
        """Why ablated copies cost whole passes: here they never do."""
        return ""

    def copy_offloaded_to_memory(self) -> Self:
        """This model: its weights are always in memory."""
        return self

    def untrained(self, seed: int = 0) -> "Transformer":
        """A model of the same spec, drawn anew."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Transformer(self.spec).to(self.device)
        model.tokenizer = self.tokenizer
        return model

    def check_native(self, operation: str) -> None:
        """Refuse what only models of our own can do: this is one."""

    def load_weights(self, state: Mapping[str, Tensor]) -> list[str]:
        """Take over weights by their names in a folder; what is tied is there once. The names that are not known."""
        return self.load_state_dict(state, strict=False).unexpected_keys

    # Folders: a later room knows them.

    def save(self, folder: str | Path) -> Path:
        """Write the model into a folder, whole or not at all; `headwise.load(folder)` brings it back bit by bit."""
        from headwise.weights.save import save

        return save(self, folder)

    @classmethod
    def reopen(cls, folder: str | Path) -> Self:
        """What `save` wrote."""
        from headwise.weights.load import load_native

        return load_native(cls, folder)

    def export(self, folder: str | Path, family: str | None = None) -> Path:
        """Write the model for transformers, as the family it came from, the one named, or the first that can hold it."""
        from headwise.weights.export import export_native

        return export_native(self, folder, family)

    def encode(self, source: Tensor, *, attention_mask: Tensor | None = None, gates: Gates | None = None) -> Tensor:
        """Read a source with the encoder of an encoder-decoder: (B, S) → (B, S, D)."""
        if self.spec.kind != "encoder-decoder":
            raise HeadwiseError(
                f"this model is of kind {self.spec.kind}; encode is for an encoder-decoder. Call model(ids)."
            )
        x, context = self.begin_forward(source, attention_mask=attention_mask, gates=gates)
        x = self._run_blocks(self.encoder_blocks, x, context)
        return x if self.encoder_norm is None else self.encoder_norm(x)

    def begin_forward(
        self, ids: Tensor, *, attention_mask: Tensor | None = None, gates: Gates | None = None
    ) -> tuple[Tensor, BlockContext]:
        """The stream before the first block, (B, T, D), and what travels beside it: to walk through the blocks by hand.

        In an encoder-decoder these are the encoder's blocks.
        """
        ids = self._validate_ids(ids, attention_mask)
        positions = self._positions(ids, 0, attention_mask)
        context = BlockContext(
            causal=self.spec.kind == "decoder",
            attention_mask=None if attention_mask is None else attention_mask.bool(),
            rotary_table=self._rotary_table(positions),
            gates=resolve_gates(self.gathered_layers(), gates),
        )
        return self._embed(ids, positions, None), context

    def pooled(self, ids: Tensor, *, attention_mask: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """An encoder's summary of each text: (B, T) → (B, D)."""
        if self.pooler is None:
            raise HeadwiseError("this model has no pooler; take the mean of model(ids, hidden=True) over real tokens.")
        return self.pooler(self(ids, attention_mask=attention_mask, token_types=token_types, hidden=True))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.reference_tensor.device

    @property
    def tokenizer(self) -> TokenizerProtocol | None:
        """The model's tokenizer, if whoever loaded or trained it gave one; a function that makes it is called when asked."""
        if callable(self._tokenizer):
            self._tokenizer = self._tokenizer()
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, value: "TokenizerProtocol | Callable[[], TokenizerProtocol] | None") -> None:
        self._tokenizer = value

    @property
    def decoder_start_token(self) -> int:
        """The token before what an encoder-decoder writes: the end token, as it stands between any two texts."""
        special = {} if self.tokenizer is None else self.tokenizer.special
        token = special.get("eos") if special.get("eos") is not None else special.get("sep")
        if token is None:
            raise HeadwiseError("writing starts from the end token, and the model's tokenizer has none.")
        return token

    # Heads.

    def hook_points(self) -> list[HookPoint]:
        """Every place where attention happens, in the order data walks through them."""
        return [layer.hook_point for layer in self.attention_layers()]

    def gathered_hook_points(self) -> list[HookPoint]:
        """The same with all heads, also where processes share them: there, listen and edit in every process alike."""
        return [layer.hook_point for layer in self.gathered_layers()]

    @property
    def heads(self) -> Heads:
        """Every head, by address: model.heads["5.1"], model.heads["0-3.*"]."""
        return Heads(self.gathered_layers())

    def gathered_layers(self) -> Iterator[AttentionLayerProtocol]:
        """The attention layers with all their heads, whichever process holds them."""
        return (layer.gathered_layer for layer in self.attention_layers())

    def attention_layers(self) -> Iterator[MultiHeadAttention]:
        """The attention layers, encoder first, a block's self-attention before its cross-attention."""
        for block in (*self.encoder_blocks, *self.blocks):
            assert isinstance(block, Block)
            yield block.attention
            if block.cross is not None:
                yield block.cross

    # Caching.

    def cache(self, kind: str | Plan = "dynamic", size: int | None = None) -> ModelCache:
        """An empty cache for this model: dynamic, static (size, default the context) or sliding (size); or as a plan says."""
        if self.spec.kind == "encoder":
            raise HeadwiseError("an encoder sees all tokens at once and keeps no cache.")
        if isinstance(kind, str):
            return self._make_cache(self.spec, kind, size)
        if not isinstance(kind, Plan):
            raise HeadwiseError(f"a cache is 'dynamic', 'static', 'sliding' or what a Plan says; got {kind!r}.")
        check_plan(kind, self)
        return self._make_cache(kind.cache_spec(), "dynamic" if size is None else "static", size)

    def _make_cache(self, spec: ModelSpec, kind: str, size: int | None) -> ModelCache:
        return ModelCache(spec, kind, size)

    @contextmanager
    def _cached_step(self, cache: ModelCache, rows: int) -> Iterator[None]:
        """Run a step with tuned products; restore the cache if it fails."""
        with cache.atomic_step(), self.matmul_tuner.decode_step(self, rows):
            yield

    # The small print.

    def _run_blocks(self, blocks: nn.ModuleList, x: Tensor, context: BlockContext) -> Tensor:
        if not (self.checkpointing and torch.is_grad_enabled()):
            for block in blocks:
                x = block(x, context)
            return x
        run_checkpointed = partial(checkpoint, use_reentrant=False)
        if not torch.compiler.is_compiling():  # which repeats the operations that it traced, edits among them
            hooks = HOOKS.now
            run_checkpointed = partial(run_checkpointed, context_fn=lambda: (nullcontext(), replaying(hooks)))
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
                raise HeadwiseError(f"this model is of kind {self.spec.kind} and reads no source; leave source out.")
            return None
        if cache is not None and cache.memory is not None:
            if source is not None or memory is not None:
                raise HeadwiseError("the cache holds a source already; start a new cache for a new source.")
            return cache.memory
        if memory is None and source is None:
            raise HeadwiseError("an encoder-decoder needs what it reads: model(ids, source=source_ids).")
        if memory is None and source is not None:
            memory = self.encode(source, attention_mask=source_attention_mask, gates=gates)
        return memory

    def _positions(self, ids: Tensor, start: int, attention_mask: Tensor | None) -> Tensor:
        """Where each token stands, padding not counted: (1 or B, T)."""
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
            raise HeadwiseError(
                f"{int(positions.max()) + 1} tokens are more than the {self.spec.context} positions this model has learned; "
                f"shorten the input."
            )
        return positions

    def _rotary_table(self, positions: Tensor) -> RotaryTable | None:
        attention = self.spec.attention
        if attention.rotary is None:
            return None
        return RotaryTable.at(positions, attention.rotary, attention.head_dim, self.embed.reference_tensor.dtype)

    def _embed(self, ids: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        try:
            return self.embed(ids, positions, token_types)
        except IndexError:
            low, high = int(ids.min()), int(ids.max())
            raise HeadwiseError(
                f"token ids must lie in 0-{self.spec.vocab - 1} (and token types, if any, below {self.spec.token_types}); "
                f"got ids {low}-{high}."
            ) from None

    def _validate_ids(self, ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise HeadwiseError(f"token ids are a tensor of whole numbers, (batch, tokens); got {got}.")
        if attention_mask is not None and attention_mask.shape != ids.shape:
            raise HeadwiseError(
                f"attention_mask is {tuple(attention_mask.shape)} but ids are {tuple(ids.shape)}; True at real tokens."
            )
        return ids.long()

    def _check_cache(self, cache: ModelCache | None) -> None:
        check_model_cache(cache)
        if cache is not None and self.checkpointing and torch.is_grad_enabled():
            raise HeadwiseError("a cache holds numbers, not graphs; use torch.no_grad(), or turn checkpointing off.")

    def _check_padding_side(self, cache: ModelCache | None, attention_mask: Tensor | None) -> None:
        """Windows and biases by distance count places, padding among them: with a cache, padding must all lie on the left."""
        if cache is None or attention_mask is None:
            return
        cache_counts_positions = any(layer_cache.needs_left_padding for layer_cache in cache.layers.values())
        uses_distances = self.spec.attention.position_bias_field is not None or cache_counts_positions
        if uses_distances and (attention_mask[:, :-1] & ~attention_mask[:, 1:]).any():
            raise HeadwiseError(
                "with windows, biases by distance or caches by head texts are padded on the left; padding follows a token "
                "here."
            )


def _tie_again(model: Any, incompatible: object) -> None:
    """Loading with assign=True puts new tensors in place of old ones; what was tied stays tied."""
    if model.output is not None:
        model.output.tie_weight(model.embed.tokens)
