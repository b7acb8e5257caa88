"""What a whole model is: one attention layer's shape, how many of them, and everything around. Frozen data, no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from headwise.errors import HeadwiseError
from headwise.spec.address import Address, SiteAddress, select
from headwise.spec.attention import AttentionSpec, check_kind, check_most, check_whole
from headwise.spec.cache_policy import ALL, CacheRule, Treatments, cache_rules
from headwise.spec.json_spec import Wire
from headwise.spec.weight_bits import (
    FULL,
    GROUP,
    Bits,
    LayerBits,
    WeightRule,
    layer_bits,
    row_saving,
    rules_left,
    saved_bytes,
    weight_rules,
)

MOST_LAYERS = 2**12
ENDLESS = 1 << 30  # tokens
Kept = Mapping[str, Iterable[int]] | tuple[tuple[str, tuple[int, ...]], ...]

CHOICES = {
    "kind": ("decoder", "encoder", "encoder-decoder"),
    "form": ("pre", "post", "parallel"),
    "norm": ("layer", "rms"),
    "activation": ("gelu", "gelu_tanh", "relu", "swiglu"),
    "positions": ("learned", "sinusoidal", "none"),
    "output": ("lm", "mlm", "none"),
}


@dataclass(frozen=True)
class ModelSpec(Wire):
    """A transformer. `kept` maps a layer's address to the heads it still has; layers not in it are whole.

    >>> spec = ModelSpec(vocab=256, context=64, layers=2, attention=AttentionSpec(width=32, heads=4))
    >>> smaller = spec.without("0.1,1.*")
    >>> [str(address) for address in smaller.addresses]
    ['0.0', '0.2', '0.3']
    >>> ModelSpec.from_json(smaller.to_json()) == smaller
    True
    """

    vocab: int
    context: int
    layers: int
    attention: AttentionSpec
    hidden: int = 0  # the MLP's inner width; 0: four times the width
    kind: Literal["decoder", "encoder", "encoder-decoder"] = "decoder"
    encoder_layers: int = 0  # 0: as many as layers; only in an encoder-decoder
    form: Literal["pre", "post", "parallel"] = "pre"
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
    kept: Kept = ()
    stacks: tuple[
        tuple[str, int], ...
    ] = ()  # of models that are not ours: towers, by name, and their layers; (): by kind
    cache: tuple[CacheRule, ...] = ()  # what key heads keep; those not named keep everything
    weights: tuple[
        WeightRule, ...
    ] = ()  # at how many bits weights are stored; those not named are as they are computed
    activations: int = FULL  # 8: what is multiplied by such weights is rounded as well

    def __post_init__(self) -> None:
        check_whole(self, "vocab", "context", "layers", "hidden", "encoder_layers", "token_types")
        check_most(self, MOST_LAYERS, "layers", "encoder_layers")
        check_kind(self, bool, "mlp_bias", "embed_norm", "pooler", "tied")
        check_kind(self, float, "norm_eps", "embed_scale", "dropout")
        object.__setattr__(self, "hidden", self.hidden or 4 * self.width)
        object.__setattr__(self, "windows", tuple(self.windows))
        object.__setattr__(self, "stacks", tuple((name, layers) for name, layers in self.stacks))
        if self.kind == "encoder-decoder":
            object.__setattr__(self, "encoder_layers", self.encoder_layers or self.layers)
        self._check()
        kept = {str(site): heads for site, heads in dict(self.kept).items()}
        sites = {str(site) for site in self.sites}
        for site in kept:
            if site not in sites:
                raise HeadwiseError(f"kept names layer {site!r}, which this model does not have; {self.layers} layers.")
        ordered = ((str(site), tuple(sorted(set(kept[str(site)])))) for site in self.sites if str(site) in kept)
        whole = tuple(range(self.attention.heads))
        object.__setattr__(self, "kept", tuple((site, heads) for site, heads in ordered if heads != whole))
        rules, bits = tuple(self.cache), tuple(self.weights)
        object.__setattr__(self, "cache", ())
        object.__setattr__(self, "weights", ())
        object.__setattr__(self, "cache", cache_rules(rules, self.key_heads) if rules else ())
        self.__dict__["_layer_bits"] = layer_bits(bits, self._layers, self.activations)
        object.__setattr__(self, "weights", bits)
        for site in self.sites:
            self.attention_at(site)  # each layer is checked now, not when it is built

    def _check(self) -> None:
        for field in ("vocab", "context"):
            if getattr(self, field) < 1:
                raise HeadwiseError(f"{field} must be at least 1, got {getattr(self, field)}.")
        if not 0 <= self.dropout < 1:
            raise HeadwiseError(f"dropout must be at least 0 and below 1, got {self.dropout}.")
        for field, allowed in CHOICES.items():
            if getattr(self, field) not in allowed:
                raise HeadwiseError(f"{field} {getattr(self, field)!r} is unknown; use {', '.join(allowed)}.")
        if self.attention.kept is not None:
            raise HeadwiseError("attention.kept applies to one layer; in a model give kept={'5': (0, 1)} per layer.")
        if self.attention.weights is not None:
            raise HeadwiseError("attention.weights applies to one layer; for a model use spec.quantised({'5.1': 4}).")
        if self.activations not in (FULL, 8):
            raise HeadwiseError(f"activations are rounded to 8 bits, or not at all (32); got {self.activations!r}.")
        if self.attention.cache:
            raise HeadwiseError("attention.cache applies to one layer; for a model use spec.caching({'5.1': …}).")
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
    def room(self) -> int:
        """How many tokens it can read: where positions are rows of a table no more than that has; else more than anybody has.

        >>> ModelSpec(vocab=9, context=16, layers=1, attention=AttentionSpec(width=8, heads=2)).room
        16
        """
        return self.context if self.positions == "learned" else ENDLESS

    # Layers and heads.

    @cached_property
    def sites(self) -> tuple[SiteAddress, ...]:
        """Every attention layer, in the order data walks through them."""
        if self.stacks:
            return tuple(SiteAddress(stack, layer) for stack, layers in self.stacks for layer in range(layers))
        if self.kind != "encoder-decoder":
            return tuple(SiteAddress("", layer) for layer in range(self.layers))
        encoder = [SiteAddress("enc", layer) for layer in range(self.encoder_layers)]
        decoder = [SiteAddress(stack, layer) for layer in range(self.layers) for stack in ("dec", "cross")]
        return (*encoder, *decoder)

    def attention_at(self, site: SiteAddress) -> AttentionSpec:
        """The attention layer at one address: its heads, its window, its positions."""
        if site not in self.sites:
            raise HeadwiseError(f"there is no layer {site} here; the model has {', '.join(map(str, self.sites))}.")
        spec = self.attention
        if self.windows:
            spec = replace(spec, window=self.windows[site.layer % len(self.windows)])
        if site.stack == "cross":  # keys come from another sequence: distances to them mean nothing
            spec = spec.without_positions()
        spec = replace(spec, kept=dict(self.kept).get(str(site)), weights=self._layer_bits.get(site))
        named = [(Address.parse(head), rule.keeps) for rule in self.cache for head in rule.heads]
        here = {head.head: keeps for head, keeps in named if head.site == site}
        return replace(spec, cache=tuple(here.get(n, ALL) for n in range(spec.kv_heads))) if here else spec

    @cached_property
    def _layer_bits(self) -> dict[SiteAddress, LayerBits]:
        return {}  # what __post_init__ puts here, once it knows which heads there are

    @property
    def _layers(self) -> dict[SiteAddress, AttentionSpec]:
        return {site: self.attention_at(site) for site in self.sites}

    @cached_property
    def addresses(self) -> tuple[Address, ...]:
        """Every head there is."""
        return tuple(site.head(number) for site in self.sites for number in self.attention_at(site).head_ids)

    @cached_property
    def key_heads(self) -> tuple[Address, ...]:
        """Every head whose keys and values a cache holds, by its number among the key heads of its layer."""
        if self.kind == "encoder":
            return ()
        sites = [site for site in self.sites if site.stack in ("", "dec")]  # a source is read once, whole
        return tuple(site.head(number) for site in sites for number in self.attention_at(site).kv_ids)

    def caching(self, treatments: Treatments) -> "ModelSpec":
        """The spec of this model with caches by head: {"5.*": Keeps(first=4, last=128), "0.1": 8}; heads not named keep all.

        >>> from headwise.spec import Keeps, preset
        >>> spec = preset("smollm2-135m").caching({"0.1": Keeps(first=4, last=128), "1.*": 8})
        >>> [(rule.heads, str(rule.keeps)) for rule in spec.cache]
        [(('0.1',), 'streaming 4 + 128'), (('1.0', '1.1', '1.2'), '8 bits')]
        """
        if not self.key_heads:
            why = "an encoder sees all tokens at once" if self.kind == "encoder" else "it has no head left"
            raise HeadwiseError(f"this model keeps no cache, for {why}; leave cache out.")
        return replace(self, cache=cache_rules(treatments, self.key_heads))

    def quantised(self, weights: Bits, *, group: int = GROUP, activations: int = FULL) -> "ModelSpec":
        """The spec of this model with weights at few bits: 4 for heads, MLPs and vocabulary, or by head and part.

        >>> from headwise.spec import preset
        >>> spec = preset("nano").quantised({"*": 8, "5.1": 4, "5.2:vo": 3, "mlp": 8})
        >>> [(rule.part, rule.bits, len(rule.heads)) for rule in spec.weights if rule.part in ("q", "o", "mlp")]
        [('mlp', 8, 0), ('q', 8, 35), ('q', 4, 1), ('o', 8, 34), ('o', 4, 1), ('o', 3, 1)]
        """
        if self.weights:
            raise HeadwiseError("the weights of this model are at few bits already; take the model it was made from.")
        rules = weight_rules(weights, self._layers, group)
        if activations != FULL and not rules:
            raise HeadwiseError("activations are rounded where weights are; give weights=8 as well.")
        return replace(self, weights=rules, activations=activations)

    def bits_of(self, part: str) -> tuple[int, int]:
        """The bits and the group of the MLPs, or the vocabulary."""
        return next(((rule.bits, rule.group) for rule in self.weights if rule.part == part), (FULL, GROUP))

    def without(self, heads: "str | Address | Iterable[Address]") -> "ModelSpec":
        """The spec of this model with some heads cut."""
        gone = set(select(heads, self.addresses))
        left = {
            str(site): tuple(n for n in self.attention_at(site).head_ids if site.head(n) not in gone)
            for site in self.sites
        }
        bare = replace(self, kept=left, cache=(), weights=())
        cached = set(map(str, bare.key_heads))
        keys = {str(site.head(n)) for site, layer in bare._layers.items() for n in layer.kv_ids}
        return replace(
            bare,
            cache=tuple(_among(rule, cached) for rule in self.cache),
            weights=rules_left(self.weights, set(map(str, bare.addresses)), keys),
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
        >>> spec.attention.head_dim, spec.attention.kv_heads, spec.hidden
        (16, 2, 896)
        """
        old = self.attention
        width, heads = self.width if width is None else width, old.heads if heads is None else heads
        if (width, heads) != (old.width, old.heads):
            _check_shares(width, heads, pairs=old.rotary is not None and not old.rotary.dims)
            groups = heads * old.kv_heads // max(1, old.heads)  # as many queries to a key as before, where that can be
            sizes = {
                "head_dim": 0,
                "value_dim": 0,
                "kv_width": 0,
                "kv_heads": groups if groups and heads % groups == 0 else 0,
            }
            old = replace(old, width=width, heads=heads, **sizes)
        return replace(
            self,
            attention=old,
            hidden=round(self.hidden * width / self.width),
            layers=self.layers if layers is None else layers,
            encoder_layers=layers if layers is not None and self.encoder_layers == self.layers else self.encoder_layers,
            context=self.context if context is None else context,
            kept=() if (heads, layers) != (self.attention.heads, None) else self.kept,
            cache=() if (heads, layers) != (self.attention.heads, None) else self.cache,
            weights=(),
            activations=FULL,
        )

    # Counting, without building anything.

    @property
    def parameters(self) -> int:
        """How many parameters the model holds; tied ones once.

        >>> from headwise.spec.presets import preset
        >>> preset("gpt2").parameters
        124439808
        """
        width, norm = self.width, self.width * (2 if self.norm == "layer" else 1)
        total = self.vocab * width + self.token_types * width
        total += self.context * width * (self.positions == "learned") + norm * self.embed_norm
        total += sum(self.attention_at(site).parameters for site in self.sites)
        blocks = self.layers + self.encoder_layers
        up, down = self.hidden * (width + self.mlp_bias), width * (self.hidden + self.mlp_bias)
        total += blocks * (up * (2 if self.activation == "swiglu" else 1) + down)
        total += norm * (len(self.sites) + (0 if self.form == "parallel" else blocks))
        total += norm * self.final_norms
        total += width * (width + 1) * self.pooler
        if self.output == "mlm":
            total += width * (width + 1) + norm + self.vocab
        return total + self.vocab * width * (self.output != "none" and not self.tied)

    def weight_bytes(self, element: int = 4) -> int:
        """What all weights take, in memory and on disk: `element` bytes a parameter, but those at few bits are packed.

        >>> from headwise.spec.presets import preset
        >>> preset("gpt2").weight_bytes(), preset("gpt2").quantised(4).weight_bytes()
        (497759232, 80838624)
        """
        saved = saved_bytes(self._layers, element)
        bits, group = self.bits_of("mlp")
        ways = 2 if self.activation == "swiglu" else 1
        blocks = self.layers + self.encoder_layers
        saved += blocks * ways * self.hidden * row_saving(self.width, bits, group, element)
        saved += blocks * self.width * row_saving(self.hidden, bits, group, element)
        tables = 1 + (self.output != "none" and not self.tied)
        saved += tables * self.vocab * row_saving(self.width, *self.bits_of("vocabulary"), element)
        return self.parameters * element - saved

    @property
    def final_norms(self) -> int:
        """Stacks that end in a norm: those whose blocks do not (https://arxiv.org/abs/2002.04745)."""
        return 0 if self.form == "post" else 1 + (self.kind == "encoder-decoder")


def _among(rule: CacheRule, there: set[str]) -> CacheRule:
    return replace(rule, heads=tuple(head for head in rule.heads if head in there))


def _check_shares(width: int, heads: int, pairs: bool) -> None:
    """Whether heads can share a width; rotary positions turn channels in pairs, so that each head needs an even number."""
    least = 2 if pairs else 1
    if heads < 1 or width % (heads * least) == 0:
        return
    low = width // (heads * least) * heads * least
    widths = " or ".join(str(one) for one in (low, low + heads * least) if one)
    fewer = [count for count in range(1, heads) if width % (count * least) == 0]
    also = f", or {fewer[-1]} head{'s' * (fewer[-1] > 1)}" if fewer else ""
    each = " with an even number of channels each" if pairs else ""
    raise HeadwiseError(f"a width of {width} cannot be shared by {heads} heads{each}; take a width of {widths}{also}.")
