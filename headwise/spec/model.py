"""What a whole model is: one attention layer's shape, how many of them, and everything around. Frozen data, no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from headwise.errors import HeadwiseError
from headwise.spec.address import Address, LayerAddress, select
from headwise.spec.attention import AttentionSpec, check_at_most, check_non_negative_int, check_type
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
UNLIMITED_TOKENS = 1 << 30  # tokens
KeptHeads = Mapping[str, Iterable[int]] | tuple[tuple[str, tuple[int, ...]], ...]

CHOICES = {
    "kind": ("decoder", "encoder", "encoder-decoder"),
    "norm_placement": ("pre", "post", "parallel"),
    "norm": ("layer", "rms"),
    "activation": ("gelu", "gelu_tanh", "relu", "swiglu"),
    "positions": ("learned", "sinusoidal", "none"),
    "output": ("lm", "mlm", "none"),
}


@dataclass(frozen=True)
class ModelSpec(JSONSpec):
    """A transformer. `kept_heads` maps a layer's address to the heads it still has; layers not in it are whole.

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
    mlp_width: int = 0  # the MLP's inner width; 0: four times the width
    kind: Literal["decoder", "encoder", "encoder-decoder"] = "decoder"
    encoder_layers: int = 0  # 0: as many as layers; only in an encoder-decoder
    norm_placement: Literal["pre", "post", "parallel"] = "pre"
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-5
    activation: Literal["gelu", "gelu_tanh", "relu", "swiglu"] = "gelu"
    mlp_bias: bool = True
    positions: Literal["learned", "sinusoidal", "none"] = "learned"
    windows: tuple[int | None, ...] = ()  # one per layer, repeated as needed; (): attention.window everywhere
    embed_norm: bool = False
    embed_scale: float = 1.0
    token_types: int = 0
    pooler: bool = False
    output: Literal["lm", "mlm", "none"] = "lm"
    tied: bool = True
    dropout: float = 0.0  # on embeddings and on what each sub-layer adds
    kept_heads: KeptHeads = ()
    # of models that are not ours: towers, by name, and their layers; (): by kind
    stacks: tuple[tuple[str, int], ...] = ()
    cache: tuple[CacheRule, ...] = ()  # what key heads keep; those not named keep everything
    # at how many bits weights are stored; those not named are as they are computed
    weight_rules: tuple[WeightRule, ...] = ()
    activation_bits: int = FULL_PRECISION  # 8: what is multiplied by such weights is rounded as well

    def __post_init__(self) -> None:
        check_non_negative_int(self, "vocab", "context", "layers", "mlp_width", "encoder_layers", "token_types")
        check_at_most(self, MAX_LAYERS, "layers", "encoder_layers")
        check_type(self, bool, "mlp_bias", "embed_norm", "pooler", "tied")
        check_type(self, float, "norm_eps", "embed_scale", "dropout")
        object.__setattr__(self, "mlp_width", self.mlp_width or 4 * self.width)
        object.__setattr__(self, "windows", tuple(self.windows))
        object.__setattr__(self, "stacks", tuple((name, layers) for name, layers in self.stacks))
        if self.kind == "encoder-decoder":
            object.__setattr__(self, "encoder_layers", self.encoder_layers or self.layers)
        self._check()
        kept_heads = {str(layer_address): heads for layer_address, heads in dict(self.kept_heads).items()}
        valid_layers = {str(layer_address) for layer_address in self.layer_addresses}
        for layer_address in kept_heads:
            if layer_address not in valid_layers:
                raise HeadwiseError(
                    f"kept_heads names layer {layer_address!r}, which this model does not have; {self.layers} layers."
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
            self.attention_at(layer_address)  # each layer is checked now, not when it is built

    def _check(self) -> None:
        for field in ("vocab", "context"):
            if getattr(self, field) < 1:
                raise HeadwiseError(f"{field} must be at least 1, got {getattr(self, field)}.")
        if not 0 <= self.dropout < 1:
            raise HeadwiseError(f"dropout must be at least 0 and below 1, got {self.dropout}.")
        for field, allowed in CHOICES.items():
            if getattr(self, field) not in allowed:
                raise HeadwiseError(f"{field} {getattr(self, field)!r} is unknown; use {', '.join(allowed)}.")
        if self.attention.kept_heads is not None:
            raise HeadwiseError(
                "attention.kept_heads applies to one layer; in a model give kept_heads={'5': (0, 1)} per layer."
            )
        if self.attention.weight_bits is not None:
            raise HeadwiseError(
                "attention.weight_bits applies to one layer; for a model use spec.quantized({'5.1': 4})."
            )
        if self.activation_bits not in (FULL_PRECISION, 8):
            raise HeadwiseError(f"activation_bits are 8, or 32 for not rounded; got {self.activation_bits!r}.")
        if self.attention.cache:
            raise HeadwiseError("attention.cache applies to one layer; for a model use spec.with_cache({'5.1': …}).")
        if self.kind != "encoder-decoder" and self.encoder_layers:
            raise HeadwiseError(f"encoder_layers={self.encoder_layers} is for an encoder-decoder; use layers.")
        if self.kind == "decoder" and (self.pooler or self.output == "mlm"):
            raise HeadwiseError("a pooler and the mlm output belong to encoders; a decoder has output lm or none.")
        if self.kind == "encoder-decoder" and (self.pooler or self.token_types or self.output == "mlm"):
            raise HeadwiseError("an encoder-decoder has output lm or none, no pooler and no token types.")
        if self.attention.kv_width != self.width:
            raise HeadwiseError(f"in a model kv_width must equal width {self.width}, got {self.attention.kv_width}.")

    @property
    def width(self) -> int:
        """The width of the residual stream."""
        return self.attention.width

    @property
    def max_input_tokens(self) -> int:
        """How many tokens it can read: where positions are rows of a table no more than that has; else more than anybody has.

        >>> ModelSpec(vocab=9, context=16, layers=1, attention=AttentionSpec(width=8, heads=2)).max_input_tokens
        16
        """
        return self.context if self.positions == "learned" else UNLIMITED_TOKENS

    # Layers and heads.

    @cached_property
    def layer_addresses(self) -> tuple[LayerAddress, ...]:
        """Every attention layer, in the order data walks through them."""
        if self.stacks:
            return tuple(LayerAddress(stack, layer) for stack, layers in self.stacks for layer in range(layers))
        if self.kind != "encoder-decoder":
            return tuple(LayerAddress("", layer) for layer in range(self.layers))
        encoder = [LayerAddress("enc", layer) for layer in range(self.encoder_layers)]
        decoder = [LayerAddress(stack, layer) for layer in range(self.layers) for stack in ("dec", "cross")]
        return (*encoder, *decoder)

    def attention_at(self, layer_address: LayerAddress) -> AttentionSpec:
        """The attention layer at one address: its heads, its window, its positions."""
        if layer_address not in self.layer_addresses:
            raise HeadwiseError(
                f"there is no layer {layer_address} here; the model has {', '.join(map(str, self.layer_addresses))}."
            )
        spec = self.attention
        if self.windows:
            spec = replace(spec, window=self.windows[layer_address.layer % len(self.windows)])
        if layer_address.stack == "cross":  # keys come from another sequence: distances to them mean nothing
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
        return {}  # what __post_init__ puts here, once it knows which heads there are

    @property
    def _layers(self) -> dict[LayerAddress, AttentionSpec]:
        return {layer_address: self.attention_at(layer_address) for layer_address in self.layer_addresses}

    @cached_property
    def head_addresses(self) -> tuple[Address, ...]:
        """Every head there is."""
        return tuple(
            layer_address.head_address(number)
            for layer_address in self.layer_addresses
            for number in self.attention_at(layer_address).head_ids
        )

    @cached_property
    def cached_kv_head_addresses(self) -> tuple[Address, ...]:
        """Every head whose keys and values a cache holds, by its number among the key heads of its layer."""
        if self.kind == "encoder":
            return ()
        # a source is read once, whole
        cached_layers = [layer_address for layer_address in self.layer_addresses if layer_address.stack in ("", "dec")]
        return tuple(
            layer_address.head_address(number)
            for layer_address in cached_layers
            for number in self.attention_at(layer_address).kv_head_ids
        )

    def with_cache(self, cache: CachePolicies) -> "ModelSpec":
        """The spec of this model with caches by head: {"5.*": CachePolicy(sink_tokens=4, window=128), "0.1": 8}.

        Heads that are not named keep all.

        >>> from headwise.spec import CachePolicy, preset
        >>> spec = preset("smollm2-135m").with_cache({"0.1": CachePolicy(sink_tokens=4, window=128), "1.*": 8})
        >>> [(rule.heads, str(rule.policy)) for rule in spec.cache]
        [(('0.1',), 'streaming 4 + 128'), (('1.0', '1.1', '1.2'), '8 bits')]
        """
        if not self.cached_kv_head_addresses:
            reason = "an encoder sees all tokens at once" if self.kind == "encoder" else "it has no head left"
            raise HeadwiseError(f"this model keeps no cache, for {reason}; leave cache out.")
        return replace(self, cache=rules_from_policies(cache, self.cached_kv_head_addresses))

    def quantized(
        self, weights: BitAllocation, *, group_size: int = GROUP_SIZE, activation_bits: int = FULL_PRECISION
    ) -> "ModelSpec":
        """The spec of this model with weights at few bits: 4 for heads, MLPs and vocabulary, or by head and part.

        >>> from headwise.spec import preset
        >>> spec = preset("nano").quantized({"*": 8, "5.1": 4, "5.2:vo": 3, "mlp": 8})
        >>> [(rule.part, rule.bits, len(rule.heads)) for rule in spec.weight_rules if rule.part in ("q", "o", "mlp")]
        [('mlp', 8, 0), ('q', 8, 35), ('q', 4, 1), ('o', 8, 34), ('o', 4, 1), ('o', 3, 1)]
        """
        if self.weight_rules:
            raise HeadwiseError("the weights of this model are at few bits already; take the model it was made from.")
        rules = rules_from_allocation(weights, self._layers, group_size)
        if activation_bits != FULL_PRECISION and not rules:
            raise HeadwiseError("activations are rounded where weights are; give weights=8 as well.")
        return replace(self, weight_rules=rules, activation_bits=activation_bits)

    def bits_and_group_size(self, part: str) -> tuple[int, int]:
        """The bits and the group of the MLPs, or the vocabulary."""
        return next(
            ((rule.bits, rule.group_size) for rule in self.weight_rules if rule.part == part),
            (FULL_PRECISION, GROUP_SIZE),
        )

    def without(self, heads: "str | Address | Iterable[Address]") -> "ModelSpec":
        """The spec of this model with some heads cut."""
        pruned = set(select(heads, self.head_addresses))
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

    def resized(
        self,
        *,
        layers: int | None = None,
        width: int | None = None,
        heads: int | None = None,
        context: int | None = None,
    ) -> "ModelSpec":
        """The same kind of model in another size; what follows from width and heads follows again.

        `layers` are those of both stacks of an encoder-decoder, if they were as many.

        >>> from headwise.spec.presets import preset
        >>> spec = preset("llama2-70b").resized(layers=2, width=256, heads=16)
        >>> spec.attention.head_dim, spec.attention.kv_heads, spec.mlp_width
        (16, 2, 896)
        """
        attention = self.attention
        width, heads = self.width if width is None else width, attention.heads if heads is None else heads
        if (width, heads) != (attention.width, attention.heads):
            _check_divisible(width, heads, rotary_pairs=attention.rotary is not None and not attention.rotary.dims)
            # as many queries to a key as before, where that can be
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

    # Counting, without building anything.

    @property
    def num_parameters(self) -> int:
        """How many parameters the model holds; tied ones once.

        >>> from headwise.spec.presets import preset
        >>> preset("gpt2").num_parameters
        124439808
        """
        width, norm = self.width, self.width * (2 if self.norm == "layer" else 1)
        total = self.vocab * width + self.token_types * width
        total += self.context * width * (self.positions == "learned") + norm * self.embed_norm
        total += sum(self.attention_at(layer_address).num_parameters for layer_address in self.layer_addresses)
        blocks = self.layers + self.encoder_layers
        up, down = self.mlp_width * (width + self.mlp_bias), width * (self.mlp_width + self.mlp_bias)
        total += blocks * (up * (2 if self.activation == "swiglu" else 1) + down)
        total += norm * (len(self.layer_addresses) + (0 if self.norm_placement == "parallel" else blocks))
        total += norm * self.num_final_norms
        total += width * (width + 1) * self.pooler
        if self.output == "mlm":
            total += width * (width + 1) + norm + self.vocab
        return total + self.vocab * width * (self.output != "none" and not self.tied)

    def weight_bytes(self, element_bytes: int = 4) -> int:
        """What all weights take, in memory and on disk: `element_bytes` a parameter, but those at few bits are packed.

        >>> from headwise.spec.presets import preset
        >>> preset("gpt2").weight_bytes(), preset("gpt2").quantized(4).weight_bytes()
        (497759232, 80838624)
        """
        saved_total = total_head_bytes_saved(self._layers, element_bytes)
        bits, group_size = self.bits_and_group_size("mlp")
        up_projections = 2 if self.activation == "swiglu" else 1
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
    def num_final_norms(self) -> int:
        """Stacks that end in a norm: those whose blocks do not (https://arxiv.org/abs/2002.04745)."""
        return 0 if self.norm_placement == "post" else 1 + (self.kind == "encoder-decoder")


def _filter_cache_rule(rule: CacheRule, present: set[str]) -> CacheRule:
    return replace(rule, heads=tuple(head for head in rule.heads if head in present))


def _check_divisible(width: int, heads: int, rotary_pairs: bool) -> None:
    """Whether heads can share a width; rotary positions turn channels in pairs, so that each head needs an even number."""
    multiple = 2 if rotary_pairs else 1
    if heads < 1 or width % (heads * multiple) == 0:
        return
    lower_width = width // (heads * multiple) * heads * multiple
    widths = " or ".join(str(candidate) for candidate in (lower_width, lower_width + heads * multiple) if candidate)
    smaller_counts = [count for count in range(1, heads) if width % (count * multiple) == 0]
    alternative = f", or {smaller_counts[-1]} head{'s' * (smaller_counts[-1] > 1)}" if smaller_counts else ""
    suffix = " with an even number of channels each" if rotary_pairs else ""
    raise HeadwiseError(
        f"a width of {width} cannot be shared by {heads} heads{suffix}; take a width of {widths}{alternative}."
    )
