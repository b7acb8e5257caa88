"""The transformer block: self-attention, optional cross-attention and an MLP, each added to the residual stream."""

from dataclasses import dataclass, field

from torch import Tensor, nn

from headwise.cache import NO_CACHE, LayerCache, ModelCache
from headwise.heads import HookPoint, MultiHeadAttention
from headwise.kernels import Mask, RotaryTable, ScoreRequest, causal, padding_mask
from headwise.model.non_attention_layers import MLP, make_norm
from headwise.spec import LayerAddress, ModelSpec, QueryScaling, Rotary

CAUSAL = causal()  # a call of a function with a cache makes torch.compile warn


@dataclass(frozen=True, eq=False)
class BlockContext:
    """Per-call context shared by all blocks of a stack.

    Attributes:
        causal: Whether attention is causal.
        mask: Additional mask of the caller.
        attention_mask: (B, S), True at real tokens. None if all tokens are real.
        rotary_tables: Rotary angles of the tokens, one table for each kind of layer (`Block.position_kind`).
        gates: Factors of the head outputs by layer, (H,) or (B, H).
        cache: Cache of the model.
        memory: Encoded source of an encoder-decoder, (B, S, D).
        source_attention_mask: (B, S), True at real tokens of the source.
    """

    causal: bool = False
    mask: Mask | None = None
    attention_mask: Tensor | None = None
    rotary_tables: tuple[RotaryTable | None, ...] = (None,)
    gates: dict[LayerAddress, Tensor] = field(default_factory=dict)
    cache: ModelCache | None = None
    memory: Tensor | None = None
    source_attention_mask: Tensor | None = None
    # Requests by cache window and by whether they contain row starts. `dataclasses.replace` creates a new dict.
    _score_requests: dict[tuple[int | None, bool], ScoreRequest] = field(init=False, default_factory=dict)

    def layer_cache(self, hook_point: HookPoint) -> LayerCache:
        """Return the cache of one layer, or the null cache."""
        return NO_CACHE if self.cache is None else self.cache.layers.get(hook_point.address, NO_CACHE)

    def layer_gate(self, hook_point: HookPoint) -> Tensor | None:
        """Return the gate of one layer. Without gates the address is not read, so one compiled block serves all layers."""
        return self.gates.get(hook_point.address) if self.gates else None

    def score_request(self, cache: LayerCache, T: int, *, has_policies: bool = False) -> ScoreRequest:
        """Return mask and row starts of one self-attention layer. Layers that see the same keys share the request.

        Args:
            cache: The cache of the layer. In a sliding cache fewer keys are visible than tokens were seen.
            T: Number of new tokens.
            has_policies: True if the layer has cache policies, which count tokens from the start of each row.
        """
        needs_row_starts = has_policies or cache.needs_row_starts
        key = (cache.window, needs_row_starts)
        if key not in self._score_requests:
            row_starts = self._row_starts() if needs_row_starts else None
            self._score_requests[key] = ScoreRequest(self._mask(cache, T), row_starts=row_starts)
        return self._score_requests[key]

    def _mask(self, cache: LayerCache, T: int) -> Mask | None:
        """Combine the causal mask, the padding of the visible keys and the mask of the caller."""
        masks = [CAUSAL] if self.causal else []
        if self.attention_mask is not None:
            is_limited = cache.window is not None
            masks.append(
                padding_mask(self.attention_mask[:, -cache.visible_keys(T) :] if is_limited else self.attention_mask)
            )
        if self.mask is not None:
            masks.append(self.mask)
        return _and_all(masks)

    def _row_starts(self) -> Tensor | None:
        """Return the index of the first real token of each row, (B,), or None without padding."""
        return None if self.attention_mask is None else (self.attention_mask.cumsum(1) == 0).sum(1)


class Block(nn.Module):
    """One layer of a stack. `spec.norm_placement` sets the position of the norms:

    pre:       x + f(norm(x)) for each sub-layer             (https://arxiv.org/abs/2002.04745)
    post:      norm(x + f(x)) for each sub-layer             (https://arxiv.org/abs/1706.03762)
    parallel:  x + attention(norm(x)) + mlp(norm(x))         (GPT-J, Wang and Komatsuzaki 2021)
    sandwich:  x + norm(f(norm(x))) for each sub-layer       (https://arxiv.org/abs/2105.13290)
    output:    x + norm(f(x)) for each sub-layer             (https://arxiv.org/abs/2111.09883)
    """

    def __init__(self, spec: ModelSpec, address: LayerAddress, backend: str = "auto", storage: str = "qkv") -> None:
        super().__init__()
        self.norm_placement = spec.norm_placement
        self.position_kind = distinct_rotaries_by_layer(spec)[1][address.layer]
        self.attention = MultiHeadAttention(
            spec.attention_at(address), backend=backend, storage=storage, address=address
        )
        has_norm = spec.first_norm or address.layer > 0
        self.norm_attention = make_norm(spec) if has_norm else None
        self.cross: MultiHeadAttention | None = None
        if address.stack == "dec":
            cross_address = LayerAddress("cross", address.layer)
            self.cross = MultiHeadAttention(
                spec.attention_at(cross_address), backend=backend, storage=storage, address=cross_address
            )
            self.norm_cross = make_norm(spec)
        self.mlp = MLP(spec)
        self.norm_mlp = make_norm(spec) if spec.norm_placement != "parallel" else None
        # second norms of a sandwich block; `norm_attention` and `norm_mlp` are those of the inputs
        is_sandwich = spec.norm_placement == "sandwich"
        self.norm_attention_output = make_norm(spec) if is_sandwich else None
        self.norm_mlp_output = make_norm(spec) if is_sandwich else None
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """Run the block on the residual stream: (B, T, D) → (B, T, D)."""
        normed = self.attention_input(x)
        return self.finish(x, normed, self.attend(normed, context), context)

    def attention_input(self, x: Tensor) -> Tensor:
        """Return the input of self-attention, after its norm if there is one: (B, T, D) → (B, T, D)."""
        if self.norm_attention is None or self.norm_placement in ("post", "output"):
            return x
        return self.norm_attention(x)

    def attend(self, normed: Tensor, context: BlockContext) -> Tensor:
        """Compute the output of self-attention: (B, T, D) → (B, T, D)."""
        cache = context.layer_cache(self.attention.hook_point)
        request = context.score_request(cache, normed.shape[1], has_policies=bool(self.attention.spec.cache))
        gate = context.layer_gate(self.attention.hook_point)
        positions = context.rotary_tables[self.position_kind]
        out = self.attention(normed, request=request, positions=positions, gate=gate, cache=cache)
        return self._drop(out)

    def finish(self, x: Tensor, normed: Tensor, attention_output: Tensor, context: BlockContext) -> Tensor:
        """Run the block after self-attention: (B, T, D) three times → (B, T, D).

        Each token is computed independently, so the tensors may contain only some of the tokens.
        """
        if self.norm_placement == "pre":
            x = x + attention_output
            if self.cross is not None:
                x = x + self._cross_attend(self.norm_cross(x), context)
            return x + self._mlp(self.norm_mlp(x))  # pyright: ignore[reportOptionalCall]
        if self.norm_placement in ("sandwich", "output"):
            return self._finish_output_norms(x, attention_output, context)
        if self.norm_placement == "post":
            x = self.norm_attention(x + attention_output)  # pyright: ignore[reportOptionalCall]
            if self.cross is not None:
                x = self.norm_cross(x + self._cross_attend(x, context))
            return self.norm_mlp(x + self._mlp(x))  # pyright: ignore[reportOptionalCall]
        out = x + attention_output + self._mlp(normed)
        return out if self.cross is None else out + self._cross_attend(self.norm_cross(x), context)

    @property
    def output_norms(self) -> tuple[nn.Module | None, nn.Module | None]:
        """Norms of the outputs of attention and MLP before they are added to the residual stream, or None."""
        if self.norm_placement == "sandwich":
            return self.norm_attention_output, self.norm_mlp_output
        return (self.norm_attention, self.norm_mlp) if self.norm_placement == "output" else (None, None)

    def _finish_output_norms(self, x: Tensor, attention_output: Tensor, context: BlockContext) -> Tensor:
        """Run a block whose sub-layer outputs have a norm, after self-attention."""
        attention_norm, mlp_norm = self.output_norms
        x = x + attention_norm(attention_output)  # pyright: ignore[reportOptionalCall]
        if self.cross is not None:
            x = x + self._cross_attend(self.norm_cross(x), context)
        mlp_input = self.norm_mlp(x) if self.norm_placement == "sandwich" else x  # pyright: ignore[reportOptionalCall]
        return x + mlp_norm(self._mlp(mlp_input))  # pyright: ignore[reportOptionalCall]

    def _cross_attend(self, x: Tensor, context: BlockContext) -> Tensor:
        assert self.cross is not None
        cache, gate = context.layer_cache(self.cross.hook_point), context.layer_gate(self.cross.hook_point)
        mask = None if context.source_attention_mask is None else padding_mask(context.source_attention_mask)
        return self._drop(self.cross(x, context.memory, mask=mask, gate=gate, cache=cache))

    def _mlp(self, x: Tensor) -> Tensor:
        return self._drop(self.mlp(x))

    def _drop(self, x: Tensor) -> Tensor:
        return self.dropout(x) if self.dropout.training else x  # avoids the overhead of a module call


PositionKind = tuple[Rotary | None, QueryScaling | None]


def distinct_rotaries_by_layer(spec: ModelSpec) -> tuple[tuple[PositionKind, ...], tuple[int, ...]]:
    """Return the different positions of the layers of a model, and the index of each layer's among them.

    >>> from headwise.spec import Rotary, preset
    >>> from dataclasses import replace
    >>> kinds, index_of_layer = distinct_rotaries_by_layer(replace(preset("synthetic"), rotaries=(Rotary(), Rotary(), None)))
    >>> len(kinds), index_of_layer
    (2, (0, 0, 1, 0))
    """
    layers, scaling = max(spec.layers, spec.encoder_layers), spec.attention.query_scaling
    rotaries = spec.rotaries or (spec.attention.rotary,)
    by_layer = [(rotaries[layer % len(rotaries)], scaling) for layer in range(layers)]
    kinds = tuple(dict.fromkeys(by_layer)) or ((spec.attention.rotary, scaling),)
    return kinds, tuple(kinds.index(kind) for kind in by_layer)


def _and_all(masks: list[Mask]) -> Mask | None:
    if not masks:
        return None
    combined = masks[0]
    for mask in masks[1:]:
        combined = combined & mask
    return combined
