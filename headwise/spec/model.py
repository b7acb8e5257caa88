"""Configuration of a transformer: its attention layers, MLPs, norms, embeddings and output. Does not import torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.spec.address import Address, LayerAddress, select
from headwise.spec.attention import AttentionSpec, Rotary, check_at_most, check_non_negative_int, check_type
from headwise.spec.cache_policy import KEEP_ALL, CachePolicies, CacheRule, rules_from_policies
from headwise.spec.json_spec import JSONSpec
from headwise.spec.weight_bits import (
    FULL_PRECISION,
    GROUP_SIZE,
    BitAllocation,
    LayerBits,
    WeightRule,
    filter_rules,
    layer_bits_from_rules,
    row_bytes_saved,
    rules_from_allocation,
    total_head_bytes_saved,
)

MAX_LAYERS = 2**12
UNLIMITED_TOKENS = 1 << 30  # length limit of models whose positions are not a table
CACHED_STACKS = (
    "",
    "dec",
    "text",
)  # stacks whose self-attention has a KV cache; "text" is a tower of an attached model
KeptHeads = Mapping[str, Iterable[int]] | tuple[tuple[str, tuple[int, ...]], ...]

GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu")
CHOICES = {
    "kind": ("decoder", "encoder", "encoder-decoder"),
    "norm_placement": ("pre", "post", "parallel", "sandwich", "output"),
    "norm": ("layer", "layer_no_bias", "rms", "rms_plus_one"),
    "activation": ("gelu", "gelu_tanh", "relu", "swiglu", "geglu", "geglu_tanh", "reglu"),
    "positions": ("learned", "sinusoidal", "none"),
    "output": ("lm", "mlm", "none"),
    "output_activation": ("", "gelu", "gelu_tanh", "relu"),
}


@dataclass(frozen=True)
class ModelSpec(JSONSpec):
    """Configuration of a transformer.

    Attributes:
        vocab: Number of tokens of the vocabulary.
        context: Maximum number of tokens of a text, for learned positions.
        layers: Number of layers (of the decoder in an encoder-decoder).
        attention: Configuration shared by all attention layers.
        mlp_width: Inner width of the MLPs. 0 means four times the width.
        kind: "decoder", "encoder" or "encoder-decoder".
        encoder_layers: Number of encoder layers of an encoder-decoder. 0 means `layers`.
        norm_placement: "pre" (before each sub-layer), "post" (after it and the residual sum), "parallel" (attention and MLP
            share one norm), "sandwich" (before each sub-layer, and on its output before the residual sum, as in Gemma 2) or
            "output" (only on the output before the residual sum, as in OLMo 2).
        norm: "layer" (LayerNorm), "layer_no_bias" (LayerNorm without bias, as in ModernBERT), "rms" (RMSNorm) or
            "rms_plus_one" (RMSNorm whose gain is 1 + weight, as in Gemma).
        norm_eps: Epsilon of the norms.
        activation: Activation of the MLPs. "swiglu", "geglu", "geglu_tanh" and "reglu" have a second up projection, the gate.
        mlp_bias: Whether the MLPs have biases.
        positions: Absolute position embedding of the tokens. Use "none" with rotary, ALiBi or T5 positions.
        position_offset: Number of rows of the position table before the row of the first token (RoBERTa: 2).
        windows: Attention window of each layer, repeated if there are more layers. Empty means `attention.window`
            in all layers.
        rotaries: Rotary embedding of each layer, repeated if there are more layers; None in a layer without positions (NoPE).
            Empty means `attention.rotary` in all layers.
        embed_norm: Whether a norm follows the embeddings.
        embed_scale: Factor of the token embeddings.
        embed_width: Width of the embeddings if a linear layer maps them to the residual stream (ALBERT). 0: no such layer.
        shared_layers: Whether all layers share the weights of one block (ALBERT). A head is then pruned in all layers.
        causal_t5_buckets: Whether decoder layers use all T5 buckets for keys before the query, as T5 does. If False, they
            keep half of the buckets for later keys, which causal attention never uses.
        decoder_start_id: Token id that starts the decoder of an encoder-decoder. None means the end-of-text token (or
            separator) of the tokenizer.
        logit_scale: Factor of the final hidden states before the output projection.
        token_types: Number of token types (BERT's segments). 0 means no token types.
        pooler: Whether an encoder has a pooler over its first token.
        output: "lm" (next-token logits), "mlm" (masked-token logits) or "none" (hidden states).
        first_norm: Whether the first block has a norm before its attention. In ModernBERT the embeddings are
            normalized instead.
        transform_bias: Whether the transform layer of output="mlm" has a bias.
        output_activation: Activation of the transform layer of output="mlm". Empty means `activation`.
        logit_softcap: Logits become logit_softcap·tanh(logit/logit_softcap). None means no cap.
        tied: Whether the output projection shares the weights of the token embedding.
        dropout: Dropout rate of the embeddings and of the output of each sub-layer.
        kept_heads: Remaining heads by layer, such as {"5": (0, 1)}. Layers that are not listed have all heads.
        stacks: Names and layer counts of the towers of an attached model. Empty means the stacks of `kind`.
        cache: Cache rules of KV heads. A KV head without a rule caches everything.
        weight_rules: Bits of quantized weights. Weights without a rule are not quantized.
        activation_bits: 8 quantizes the activations that quantized weights are multiplied by; 32 does not.

    >>> spec = ModelSpec(vocab=256, context=64, layers=2, attention=AttentionSpec(width=32, heads=4))
    >>> smaller = spec.without("0.1,1.*")
    >>> [str(address) for address in smaller.head_addresses]
    ['0.0', '0.2', '0.3']
    >>> ModelSpec.from_json(smaller.to_json()) == smaller
    True
    """

    vocab: int
    context: int
    layers: int
    attention: AttentionSpec
    mlp_width: int = 0
    kind: Literal["decoder", "encoder", "encoder-decoder"] = "decoder"
    encoder_layers: int = 0
    norm_placement: Literal["pre", "post", "parallel", "sandwich", "output"] = "pre"
    norm: Literal["layer", "layer_no_bias", "rms", "rms_plus_one"] = "layer"
    norm_eps: float = 1e-5
    activation: Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu", "geglu_tanh", "reglu"] = "gelu"
    mlp_bias: bool = True
    positions: Literal["learned", "sinusoidal", "none"] = "learned"
    windows: tuple[int | None, ...] = ()
    embed_norm: bool = False
    embed_scale: float = 1.0
    token_types: int = 0
    pooler: bool = False
    output: Literal["lm", "mlm", "none"] = "lm"
    tied: bool = True
    dropout: float = 0.0
    kept_heads: KeptHeads = ()
    stacks: tuple[tuple[str, int], ...] = ()
    embed_width: int = 0
    shared_layers: bool = False
    rotaries: tuple[Rotary | None, ...] = ()
    logit_softcap: float | None = None
    cache: tuple[CacheRule, ...] = ()
    weight_rules: tuple[WeightRule, ...] = ()
    activation_bits: int = FULL_PRECISION
    position_offset: int = 0
    output_activation: Literal["", "gelu", "gelu_tanh", "relu"] = ""
    causal_t5_buckets: bool = False
    decoder_start_id: int | None = None
    logit_scale: float = 1.0
    first_norm: bool = True
    transform_bias: bool = True

    def __post_init__(self) -> None:
        check_non_negative_int(self, "vocab", "context", "layers", "mlp_width", "encoder_layers", "token_types")
        check_non_negative_int(self, "embed_width", "position_offset")
        check_at_most(self, MAX_LAYERS, "layers", "encoder_layers")
        check_type(self, bool, "mlp_bias", "embed_norm", "pooler", "tied", "shared_layers", "causal_t5_buckets")
        check_type(self, bool, "first_norm", "transform_bias")
        check_type(self, float, "norm_eps", "embed_scale", "dropout", "logit_scale")
        object.__setattr__(self, "mlp_width", self.mlp_width or 4 * self.width)
        object.__setattr__(self, "windows", tuple(self.windows))
        object.__setattr__(self, "rotaries", tuple(self.rotaries))
        object.__setattr__(self, "stacks", tuple((name, layers) for name, layers in self.stacks))
        if self.kind == "encoder-decoder":
            object.__setattr__(self, "encoder_layers", self.encoder_layers or self.layers)
        self._check()
        kept_heads = {str(layer_address): heads for layer_address, heads in dict(self.kept_heads).items()}
        valid_layers = {str(layer_address) for layer_address in self.layer_addresses}
        for layer_address in kept_heads:
            if layer_address not in valid_layers:
                raise ArgumentError(
                    f"kept_heads: the model does not have layer {layer_address!r}. It has {self.layers} layers."
                )
        ordered = (
            (str(layer_address), tuple(sorted(set(kept_heads[str(layer_address)]))))
            for layer_address in self.layer_addresses
            if str(layer_address) in kept_heads
        )
        all_heads = tuple(range(self.attention.heads))
        object.__setattr__(
            self, "kept_heads", tuple((layer_address, heads) for layer_address, heads in ordered if heads != all_heads)
        )
        rules, weight_rules = tuple(self.cache), tuple(self.weight_rules)
        object.__setattr__(self, "cache", ())
        object.__setattr__(self, "weight_rules", ())
        object.__setattr__(self, "cache", rules_from_policies(rules, self.cached_kv_head_addresses) if rules else ())
        self.__dict__["_layer_bits"] = layer_bits_from_rules(weight_rules, self._layers, self.activation_bits)
        object.__setattr__(self, "weight_rules", weight_rules)
        for layer_address in self.layer_addresses:
            self.attention_at(layer_address)  # raises now, rather than when the model is built
        self._check_sharing()

    def _check(self) -> None:
        for field in ("vocab", "context"):
            if getattr(self, field) < 1:
                raise ArgumentError(f"{field}={getattr(self, field)}: must be at least 1.")
        if not 0 <= self.dropout < 1:
            raise ArgumentError(f"dropout={self.dropout}: must be at least 0 and below 1.")
        for field, allowed in CHOICES.items():
            if getattr(self, field) not in allowed:
                raise ArgumentError(f"{field}={getattr(self, field)!r}: unknown. Use one of {', '.join(allowed)}.")
        if not self.first_norm and (self.norm_placement not in ("pre", "sandwich") or self.shared_layers):
            raise ArgumentError(
                "first_norm=False: needs norm_placement='pre' or 'sandwich', and layers with weights of their own. Set "
                "first_norm=True."
            )
        if self.logit_softcap is not None and (self.logit_softcap <= 0 or self.output == "none"):
            raise ArgumentError(
                f"logit_softcap={self.logit_softcap}: must be above 0, in a model with logits. Use None for no cap."
            )
        if self.attention.kept_heads is not None:
            raise ArgumentError(
                "attention.kept_heads: applies to one layer only. In a ModelSpec, set kept_heads={'5': (0, 1)} by layer."
            )
        if self.attention.weight_bits is not None:
            raise ArgumentError(
                "attention.weight_bits: applies to one layer only. For a model, use spec.quantized({'5.1': 4})."
            )
        if self.activation_bits not in (FULL_PRECISION, 8):
            raise ArgumentError(
                f"activation_bits={self.activation_bits!r}: not supported. Use 8, or 32 for activations that are not "
                f"quantized."
            )
        if self.attention.cache:
            raise ArgumentError(
                "attention.cache: applies to one layer only. For a model, use spec.with_cache({'5.1': …})."
            )
        if self.kind != "encoder-decoder" and self.encoder_layers:
            raise ArgumentError(
                f"encoder_layers={self.encoder_layers}: only an encoder-decoder has it. Set layers instead, or "
                f"kind='encoder-decoder'."
            )
        if self.kind == "decoder" and (self.pooler or self.output == "mlm"):
            raise ArgumentError(
                f"kind='decoder': does not support a pooler or output='mlm'. Got pooler={self.pooler}, "
                f"output={self.output!r}. Set pooler=False and output='lm' or 'none', or kind='encoder'."
            )
        if self.kind == "encoder-decoder" and (self.pooler or self.token_types or self.output == "mlm"):
            raise ArgumentError(
                f"kind='encoder-decoder': does not support a pooler, token types or output='mlm'. Got "
                f"pooler={self.pooler}, token_types={self.token_types}, output={self.output!r}. Set pooler=False, "
                f"token_types=0 and output='lm' or 'none'."
            )
        if self.attention.kv_width != self.width:
            raise ArgumentError(
                f"attention.kv_width={self.attention.kv_width}: must equal width={self.width} in a ModelSpec."
            )

    def _check_sharing(self) -> None:
        """Check narrow embeddings and shared layers."""
        if self.embed_width and (self.kind == "encoder-decoder" or self.output == "lm"):
            raise ArgumentError(
                f"embed_width={self.embed_width}: supported for kind='encoder' or 'decoder' with output='mlm' or 'none'. Got "
                f"kind={self.kind!r}, output={self.output!r}. Set embed_width=0."
            )
        if self.shared_layers and (
            self.kind == "encoder-decoder" or self.windows or self.rotaries or self.cache or self.weight_rules
        ):
            raise ArgumentError(
                "shared_layers=True: layers that share their weights cannot differ in windows, rotaries, cache policies or "
                "weight bits, and an encoder-decoder cannot share them. Set shared_layers=False."
            )
        if self.shared_layers and len({self.attention_at(layer).kept_heads for layer in self.layer_addresses}) > 1:
            raise ArgumentError(
                "kept_heads: the layers share their weights, so all of them must have the same heads. Use spec.without(…)."
            )

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.attention.width

    @property
    def has_gated_mlp(self) -> bool:
        """True if the MLPs have a gate, a second up projection."""
        return self.activation in GATED_ACTIVATIONS

    @property
    def max_input_tokens(self) -> int:
        """Maximum number of input tokens: `context` for learned positions, otherwise practically unlimited.

        >>> ModelSpec(vocab=9, context=16, layers=1, attention=AttentionSpec(width=8, heads=2)).max_input_tokens
        16
        """
        return self.context if self.positions == "learned" else UNLIMITED_TOKENS

    @property
    def position_rows(self) -> int:
        """Number of rows of the position table. 0 without learned positions."""
        return self.position_offset + self.context if self.positions == "learned" else 0

    # Layers and heads.

    @cached_property
    def layer_addresses(self) -> tuple[LayerAddress, ...]:
        """Addresses of all attention layers in the order of the forward pass."""
        if self.stacks:
            return tuple(LayerAddress(stack, layer) for stack, layers in self.stacks for layer in range(layers))
        if self.kind != "encoder-decoder":
            return tuple(LayerAddress("", layer) for layer in range(self.layers))
        encoder = [LayerAddress("enc", layer) for layer in range(self.encoder_layers)]
        decoder = [LayerAddress(stack, layer) for layer in range(self.layers) for stack in ("dec", "cross")]
        return (*encoder, *decoder)

    def attention_at(self, layer_address: LayerAddress) -> AttentionSpec:
        """Return the configuration of one attention layer: its own heads, window, rotary embedding, cache policies and bits.

        Args:
            layer_address: Address of the layer.

        Raises:
            ArgumentError: The model does not have this layer.
        """
        if layer_address not in self.layer_addresses:
            raise ArgumentError(
                f"layer {layer_address}: the model does not have it. Use one of {', '.join(map(str, self.layer_addresses))}."
            )
        spec = self.attention
        if self.windows:
            spec = replace(spec, window=self.windows[layer_address.layer % len(self.windows)])
        if self.causal_t5_buckets and self.kind != "encoder" and layer_address.stack in ("", "dec"):
            spec = replace(spec, t5_bidirectional=False)
        if self.rotaries:
            spec = replace(spec, rotary=self.rotaries[layer_address.layer % len(self.rotaries)])
        if layer_address.stack == "cross":  # keys come from another sequence, so distances have no meaning
            spec = spec.without_positions()
        spec = replace(
            spec,
            kept_heads=dict(self.kept_heads).get(str(layer_address)),
            weight_bits=self._layer_bits.get(layer_address),
        )
        policy_of_head = [(Address.parse(head), rule.policy) for rule in self.cache for head in rule.heads]
        layer_policies = {head.head: policy for head, policy in policy_of_head if head.layer_address == layer_address}
        return (
            replace(spec, cache=tuple(layer_policies.get(n, KEEP_ALL) for n in range(spec.kv_heads)))
            if layer_policies
            else spec
        )

    @cached_property
    def _layer_bits(self) -> dict[LayerAddress, LayerBits]:
        return {}  # __post_init__ sets the value after it has determined the remaining heads

    @property
    def _layers(self) -> dict[LayerAddress, AttentionSpec]:
        return {layer_address: self.attention_at(layer_address) for layer_address in self.layer_addresses}

    @cached_property
    def head_addresses(self) -> tuple[Address, ...]:
        """Addresses of all remaining heads."""
        return tuple(
            layer_address.head_address(number)
            for layer_address in self.layer_addresses
            for number in self.attention_at(layer_address).head_ids
        )

    @cached_property
    def cached_kv_head_addresses(self) -> tuple[Address, ...]:
        """Addresses of all KV heads that a cache stores, numbered by the KV heads of each layer."""
        if self.kind == "encoder":
            return ()
        # cross-attention is left out: its keys and values are computed once and never evicted
        cached_layers = [
            layer_address for layer_address in self.layer_addresses if layer_address.stack in CACHED_STACKS
        ]
        return tuple(
            layer_address.head_address(number)
            for layer_address in cached_layers
            for number in self.attention_at(layer_address).kv_head_ids
        )

    def with_cache(self, cache: CachePolicies) -> "ModelSpec":
        """Return this spec with cache policies per KV head.

        Args:
            cache: Policies by head pattern, such as {"5.*": CachePolicy(sink_tokens=4, window=128), "0.1": 8}. An integer
                means bits. KV heads that no pattern selects cache everything.

        Raises:
            UnsupportedModelError: The model has no KV cache.

        >>> from headwise.spec import CachePolicy, preset
        >>> spec = preset("smollm2-135m").with_cache({"0.1": CachePolicy(sink_tokens=4, window=128), "1.*": 8})
        >>> [(rule.heads, str(rule.policy)) for rule in spec.cache]
        [(('0.1',), 'streaming 4 + 128'), (('1.0', '1.1', '1.2'), '8 bits')]
        """
        if not self.cached_kv_head_addresses:
            reason = "an encoder attends to all tokens at once" if self.kind == "encoder" else "it has no heads left"
            raise UnsupportedModelError(f"cache: this model has no KV cache, because {reason}. Omit cache.")
        return replace(self, cache=rules_from_policies(cache, self.cached_kv_head_addresses))

    def quantized(
        self, weights: BitAllocation, *, group_size: int = GROUP_SIZE, activation_bits: int = FULL_PRECISION
    ) -> "ModelSpec":
        """Return this spec with quantized weights.

        Args:
            weights: Bits for all heads, MLPs and the vocabulary, or bits by pattern such as
                {"*": 8, "5.1": 4, "5.2:qk": 3, "mlp": 8}. 32 means not quantized.
            group_size: Number of weights along the input that share a scale.
            activation_bits: 8 quantizes the activations that quantized weights are multiplied by; 32 does not.

        Raises:
            ArgumentError: The weights are already quantized, or only activations would be quantized.

        >>> from headwise.spec import preset
        >>> spec = preset("nano").quantized({"*": 8, "5.1": 4, "5.2:vo": 3, "mlp": 8})
        >>> [(rule.part, rule.bits, len(rule.heads)) for rule in spec.weight_rules if rule.part in ("q", "o", "mlp")]
        [('mlp', 8, 0), ('q', 8, 35), ('q', 4, 1), ('o', 8, 34), ('o', 4, 1), ('o', 3, 1)]
        """
        if self.weight_rules:
            raise ArgumentError("weights: this model is already quantized. Quantize the original model instead.")
        if self.attention.latent is not None:
            raise UnsupportedModelError(
                "weights: quantization is not supported for a model with latent projections (MLA)."
            )
        if self.shared_layers or self.embed_width:
            raise UnsupportedModelError(
                "weights: quantization is not supported for a model with shared layers or narrow embeddings (ALBERT)."
            )
        rules = rules_from_allocation(weights, self._layers, group_size)
        if activation_bits != FULL_PRECISION and not rules:
            raise ArgumentError(
                f"activation_bits={activation_bits}: activations are quantized only together with weights. Set weights=8 "
                f"as well."
            )
        return replace(self, weight_rules=rules, activation_bits=activation_bits)

    def bits_and_group_size(self, part: str) -> tuple[int, int]:
        """Return the bits per weight and the group size of "mlp" or "vocabulary"."""
        return next(
            ((rule.bits, rule.group_size) for rule in self.weight_rules if rule.part == part),
            (FULL_PRECISION, GROUP_SIZE),
        )

    def without(self, heads: "str | Address | Iterable[Address]") -> "ModelSpec":
        """Return this spec with some heads pruned.

        Args:
            heads: Heads to prune: an address, several addresses, or a pattern such as `0.1,1.*`.
        """
        pruned = set(self.with_shared_copies(select(heads, self.head_addresses)))
        remaining = {
            str(layer_address): tuple(
                n for n in self.attention_at(layer_address).head_ids if layer_address.head_address(n) not in pruned
            )
            for layer_address in self.layer_addresses
        }
        pruned_spec = replace(self, kept_heads=remaining, cache=(), weight_rules=())
        cached_kv_heads = set(map(str, pruned_spec.cached_kv_head_addresses))
        kv_heads = {
            str(layer_address.head_address(n))
            for layer_address, layer in pruned_spec._layers.items()
            for n in layer.kv_head_ids
        }
        return replace(
            pruned_spec,
            cache=tuple(_filter_cache_rule(rule, cached_kv_heads) for rule in self.cache),
            weight_rules=filter_rules(self.weight_rules, set(map(str, pruned_spec.head_addresses)), kv_heads),
        )

    def with_shared_copies(self, heads: Iterable[Address]) -> tuple[Address, ...]:
        """Return heads together with the heads that have the same weights in other layers, in the order of the layers.

        Args:
            heads: Addresses of heads.

        >>> spec = ModelSpec(vocab=9, context=8, layers=3, attention=AttentionSpec(width=8, heads=2), shared_layers=True)
        >>> [str(head) for head in spec.with_shared_copies([Address.parse("1.0")])]
        ['0.0', '1.0', '2.0']
        """
        selected = set(heads)
        numbers = {head.head for head in selected}
        return tuple(
            head for head in self.head_addresses if head in selected or (self.shared_layers and head.head in numbers)
        )

    def resized(
        self,
        *,
        layers: int | None = None,
        width: int | None = None,
        heads: int | None = None,
        context: int | None = None,
    ) -> "ModelSpec":
        """Return a spec of the same architecture in another size, with head_dim, KV heads and MLP width scaled to fit.

        Pruned heads, cache rules and quantization are dropped if they do not apply to the new size.

        Args:
            layers: Number of layers. Also sets `encoder_layers` if it was equal to `layers`.
            width: Width of the residual stream.
            heads: Number of heads per layer.
            context: Maximum number of tokens.

        >>> from headwise.spec.presets import preset
        >>> spec = preset("llama2-70b").resized(layers=2, width=256, heads=16)
        >>> spec.attention.head_dim, spec.attention.kv_heads, spec.mlp_width
        (16, 2, 896)
        """
        attention = self.attention
        width, heads = self.width if width is None else width, attention.heads if heads is None else heads
        if (width, heads) != (attention.width, attention.heads):
            _check_divisible(width, heads, rotary_pairs=attention.rotary is not None and not attention.rotary.dims)
            # keep the number of query heads per KV head if it divides the new number of heads
            kv_heads = heads * attention.kv_heads // max(1, attention.heads)
            sizes = {
                "head_dim": 0,
                "value_dim": 0,
                "kv_width": 0,
                "kv_heads": kv_heads if kv_heads and heads % kv_heads == 0 else 0,
            }
            attention = replace(attention, width=width, heads=heads, **sizes)
        return replace(
            self,
            attention=attention,
            mlp_width=round(self.mlp_width * width / self.width),
            layers=self.layers if layers is None else layers,
            encoder_layers=layers if layers is not None and self.encoder_layers == self.layers else self.encoder_layers,
            context=self.context if context is None else context,
            kept_heads=() if (heads, layers) != (self.attention.heads, None) else self.kept_heads,
            cache=() if (heads, layers) != (self.attention.heads, None) else self.cache,
            weight_rules=(),
            activation_bits=FULL_PRECISION,
        )

    # Sizes, computed without building the model.

    @property
    def num_parameters(self) -> int:
        """Number of parameters. Tied parameters count once.

        >>> from headwise.spec.presets import preset
        >>> preset("gpt2").num_parameters
        124439808
        """
        width, norm_rows = self.width, 2 if self.norm == "layer" else 1
        narrow, norm = self.embed_width or width, width * norm_rows
        total = (self.vocab + self.token_types + self.position_rows) * narrow
        total += narrow * norm_rows * self.embed_norm + (narrow + 1) * width * bool(self.embed_width)
        layers = self.layer_addresses[:1] if self.shared_layers else self.layer_addresses
        total += sum(self.attention_at(layer_address).num_parameters for layer_address in layers)
        blocks = min(1, self.layers) if self.shared_layers else self.layers + self.encoder_layers
        up, down = self.mlp_width * (width + self.mlp_bias), width * (self.mlp_width + self.mlp_bias)
        total += blocks * (up * (2 if self.has_gated_mlp else 1) + down)
        total += norm * (len(layers) + (0 if self.norm_placement == "parallel" else blocks))
        total += norm * 2 * blocks * (self.norm_placement == "sandwich")
        total += norm * (self.num_final_norms - self._num_omitted_norms)
        total += width * (width + 1) * self.pooler
        if self.output == "mlm":
            total += narrow * (width + self.transform_bias) + narrow * norm_rows + self.vocab
        return total + self.vocab * narrow * (self.output != "none" and not self.tied)

    def weight_bytes(self, element_bytes: int = 4) -> int:
        """Return the size of all weights in bytes, in memory and on disk.

        Args:
            element_bytes: Bytes per parameter that is not quantized. Quantized weights are packed.

        >>> from headwise.spec.presets import preset
        >>> preset("gpt2").weight_bytes(), preset("gpt2").quantized(4).weight_bytes()
        (497759232, 80838624)
        """
        saved_total = total_head_bytes_saved(self._layers, element_bytes)
        bits, group_size = self.bits_and_group_size("mlp")
        up_projections = 2 if self.has_gated_mlp else 1
        blocks = self.layers + self.encoder_layers
        saved_total += (
            blocks * up_projections * self.mlp_width * row_bytes_saved(self.width, bits, group_size, element_bytes)
        )
        saved_total += blocks * self.width * row_bytes_saved(self.mlp_width, bits, group_size, element_bytes)
        tables = 1 + (self.output != "none" and not self.tied)
        saved_total += (
            tables * self.vocab * row_bytes_saved(self.width, *self.bits_and_group_size("vocabulary"), element_bytes)
        )
        return self.num_parameters * element_bytes - saved_total

    @property
    def _num_omitted_norms(self) -> int:
        """Number of first blocks without a norm before attention."""
        return 0 if self.first_norm else bool(self.layers) + bool(self.encoder_layers)

    @property
    def num_final_norms(self) -> int:
        """Number of stacks with a final norm. Post-norm stacks do not have one (https://arxiv.org/abs/2002.04745)."""
        return 0 if self.norm_placement == "post" else 1 + (self.kind == "encoder-decoder")


def _filter_cache_rule(rule: CacheRule, present: set[str]) -> CacheRule:
    return replace(rule, heads=tuple(head for head in rule.heads if head in present))


def _check_divisible(width: int, heads: int, *, rotary_pairs: bool) -> None:
    """Raise if the width is not divisible by the heads. With rotary positions, head_dim must be even."""
    multiple = 2 if rotary_pairs else 1
    if heads < 1 or width % (heads * multiple) == 0:
        return
    lower_width = width // (heads * multiple) * heads * multiple
    widths = " or ".join(str(candidate) for candidate in (lower_width, lower_width + heads * multiple) if candidate)
    smaller_counts = [count for count in range(1, heads) if width % (count * multiple) == 0]
    alternative = f", or {smaller_counts[-1]} head{'s' * (smaller_counts[-1] > 1)}" if smaller_counts else ""
    suffix = " with an even head_dim, which rotary positions need" if rotary_pairs else ""
    raise ArgumentError(f"width={width}: not divisible by heads={heads}{suffix}. Use a width of {widths}{alternative}.")
