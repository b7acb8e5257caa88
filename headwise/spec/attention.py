"""Configuration of one attention layer: sizes, heads, position encoding and softmax. Does not import torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

from headwise.errors import ArgumentError
from headwise.spec.cache_policy import KEEP_ALL, CachePolicy
from headwise.spec.json_spec import JSONSpec
from headwise.spec.weight_bits import LayerBits


@dataclass(frozen=True)
class RotaryScaling:
    """Scaling of rotary frequencies for contexts longer than those of pretraining.

    Attributes:
        kind: "linear" divides every frequency by `factor`. "llama3" divides low frequencies, keeps high frequencies and
            interpolates between them (Llama 3, https://arxiv.org/abs/2407.21783). "yarn" does the same with a ramp over the
            channels, and scales cosines and sines (https://arxiv.org/abs/2309.00071). "dynamic" raises theta for texts longer
            than `original_context`. "longrope" divides each frequency by its own factor
            (https://arxiv.org/abs/2402.13753).
        factor: Divisor of the scaled frequencies, above 0.
        low_freq_factor: llama3 only. Frequencies with a wavelength above `original_context / low_freq_factor` are divided.
        high_freq_factor: llama3 only. Frequencies with a wavelength below `original_context / high_freq_factor` are kept.
        original_context: Context length of pretraining, in tokens. Not used by linear.
        beta_fast: yarn only. Frequencies with more rotations than this over the original context are kept.
        beta_slow: yarn only. Frequencies with fewer rotations than this over the original context are divided.
        truncate: yarn only. Whether the ends of the ramp are rounded to channels.
        attention_factor: yarn and longrope only. Factor of cosines and sines. None means the value of the paper, which
            depends on `factor`.
        short_factors: longrope only. Divisor of each frequency for texts of at most `original_context` tokens.
        long_factors: longrope only. Divisor of each frequency for longer texts.

    >>> Rotary(theta=500000.0, scaling=RotaryScaling("llama3", factor=8.0)).scaling.original_context
    8192
    >>> round(RotaryScaling("yarn", factor=4.0, original_context=32768).cos_sin_factor, 4)
    1.1386
    """

    kind: Literal["linear", "llama3", "yarn", "dynamic", "longrope"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        kinds = ("linear", "llama3", "yarn", "dynamic", "longrope")
        if self.kind not in kinds:
            raise ArgumentError(f"RotaryScaling kind={self.kind!r}: unknown. Use one of {', '.join(map(repr, kinds))}.")
        if self.factor <= 0:
            raise ArgumentError(f"RotaryScaling factor={self.factor}: must be above 0.")
        for name in ("short_factors", "long_factors"):
            factors = tuple(map(float, getattr(self, name)))
            object.__setattr__(self, name, factors)
            if self.kind == "longrope" and (not factors or min(factors) <= 0):
                raise ArgumentError(
                    f"RotaryScaling {name}={factors}: longrope needs one positive number per pair of channels."
                )

    @property
    def depends_on_length(self) -> bool:
        """True if the frequencies depend on the length of the text."""
        return self.kind in ("dynamic", "longrope")

    @property
    def cos_sin_factor(self) -> float:
        """Factor of cosines and sines: `attention_factor`, or its default in the paper of the kind."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        if self.kind == "yarn":
            return 0.1 * math.log(self.factor) + 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding: pairs of channels are rotated by the position (https://arxiv.org/abs/2104.09864).

    Attributes:
        theta: Base of the frequencies, above 0.
        layout: "half" pairs channel i with i + dims/2 (Hugging Face). "interleaved" pairs 2i with 2i + 1 (the paper, Meta).
        dims: Number of rotated channels per head, an even number. None rotates all channels of head_dim.
        scaling: Scaling of the frequencies for longer contexts. None applies no scaling.

    >>> AttentionSpec(width=64, heads=4, rotary=Rotary(dims=8)).rotary
    Rotary(theta=10000.0, layout='half', dims=8, scaling=None)
    """

    theta: float = 10000.0
    layout: Literal["half", "interleaved"] = "half"
    dims: int | None = None
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        if not self.theta > 0:
            raise ArgumentError(f"Rotary theta={self.theta}: must be above 0.")
        if self.layout not in ("half", "interleaved"):
            raise ArgumentError(f"Rotary layout={self.layout!r}: unknown. Use 'half' or 'interleaved'.")
        if self.dims is not None and (self.dims < 2 or self.dims % 2):
            raise ArgumentError(f"Rotary dims={self.dims}: must be an even number of at least 2.")


@dataclass(frozen=True)
class QKNorm:
    """Norm of queries and keys before their dot product (https://arxiv.org/abs/2010.04245).

    Attributes:
        kind: "rms" (RMSNorm), "rms_plus_one" (RMSNorm whose gain is 1 + weight, as in Gemma) or "layer" (LayerNorm).
        over: Channels that one norm covers: "head" (those of one head) or "width" (those of all heads, as in OLMo 2). With
            "width" the norm of a head depends on all heads, so a pruned layer keeps the rows of pruned heads for it.
        weights: "shared" (one gain per channel for all heads), "per_head" (own gains of each head) or "none".
        bias: Whether the norms have a bias, in the shape of the gains.
        after_rotary: Whether the norms follow the rotary embedding instead of preceding it.
        eps: Epsilon of the norms.

    >>> AttentionSpec(width=64, heads=4, qk_norm=QKNorm(over="width")).qk_norm.weights
    'per_head'
    """

    kind: Literal["rms", "rms_plus_one", "layer"] = "rms"
    over: Literal["head", "width"] = "head"
    weights: Literal["shared", "per_head", "none"] = "shared"
    bias: bool = False
    after_rotary: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        choices = {
            "kind": ("rms", "rms_plus_one", "layer"),
            "over": ("head", "width"),
            "weights": ("shared", "per_head", "none"),
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ArgumentError(
                    f"QKNorm {field}={getattr(self, field)!r}: unknown. Use one of {', '.join(allowed)}."
                )
        check_type(self, bool, "bias", "after_rotary")
        if self.eps < 0:
            raise ArgumentError(f"QKNorm eps={self.eps}: must be at least 0.")
        if self.over == "width" and self.weights == "shared":
            object.__setattr__(self, "weights", "per_head")
        if self.bias and self.weights == "none":
            raise ArgumentError("QKNorm bias=True: needs gains. Set weights='shared' or 'per_head'.")


@dataclass(frozen=True)
class QueryScaling:
    """Attention temperature that depends on the position: queries are multiplied by a factor that grows with it.

    The factor is 1 + beta · log(1 + ⌊(position + offset) / context⌋), as in Llama 4
    (https://ai.meta.com/blog/llama-4-multimodal-intelligence/). A constant temperature is `AttentionSpec.scale`.

    Attributes:
        beta: Growth of the factor, at least 0.
        context: Number of tokens after which the factor grows.
        offset: Added to the position.

    >>> AttentionSpec(width=64, heads=4, query_scaling=QueryScaling(beta=0.1, context=8192)).query_scaling.offset
    0
    """

    beta: float
    context: int
    offset: int = 0

    def __post_init__(self) -> None:
        if self.beta < 0:
            raise ArgumentError(f"QueryScaling beta={self.beta}: must be at least 0.")
        if self.context < 1:
            raise ArgumentError(f"QueryScaling context={self.context}: must be at least 1.")


@dataclass(frozen=True)
class Latent:
    """Latents that queries, keys and values are computed from (multi-head latent attention, https://arxiv.org/abs/2405.04434).

    Attributes:
        kv_rank: Channels of the latent of keys and values.
        rotary_dims: Last channels of queries and keys, which carry the rotary positions. All heads share those of the keys.
        query_rank: Channels of the latent of queries. 0: queries are projected directly from the residual stream.
        norm_eps: Epsilon of the RMS norms of the latents.

    >>> latent = Latent(kv_rank=16, rotary_dims=4)
    >>> spec = AttentionSpec(
    ...     width=64, heads=4, head_dim=12, value_dim=8, latent=latent, rotary=Rotary(layout="interleaved", dims=4)
    ... )
    >>> spec.num_parameters  # queries, down-projection with its norm, up-projection, output
    7440
    """

    kv_rank: int
    rotary_dims: int
    query_rank: int = 0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_non_negative_int(self, "kv_rank", "rotary_dims", "query_rank")
        check_type(self, float, "norm_eps")
        if self.kv_rank < 1 or self.rotary_dims % 2:
            raise ArgumentError(
                f"Latent kv_rank={self.kv_rank}, rotary_dims={self.rotary_dims}: kv_rank must be at least 1, and rotary_dims "
                f"even."
            )


MAX_HEADS = 2**16


def check_non_negative_int(spec: object, *names: str) -> None:
    """Raise if one of the fields is not an integer of at least 0."""
    for name in names:
        value = getattr(spec, name)
        if type(value) is not int or value < 0:
            raise ArgumentError(f"{name}={value!r}: must be an integer of at least 0.")


def check_at_most(spec: object, maximum: int, *names: str) -> None:
    """Raise if a count is so large that it must come from a damaged file; iterating over it would not finish."""
    for name in names:
        if getattr(spec, name) > maximum:
            raise ArgumentError(
                f"{name}={getattr(spec, name)}: must be at most {maximum}. If the value comes from a file, "
                f"the file is damaged."
            )


def check_type(spec: object, expected_type: type, *names: str) -> None:
    """Raise if one of the fields has another type. Integers are accepted as floats, booleans are not."""
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, expected_type | int if expected_type is float else expected_type) or (
            expected_type is float and isinstance(value, bool)
        ):
            raise ArgumentError(f"{name}={value!r}: must be a {expected_type.__name__}.")


# Biases that depend on the distance between query and key: field name to number of learned parameters per head.
POSITION_BIASES: dict[str, Callable[["AttentionSpec"], int]] = {
    "alibi": lambda spec: 0,
    "t5_buckets": lambda spec: spec.t5_buckets,
}


@dataclass(frozen=True)
class AttentionSpec(JSONSpec):
    """Configuration of one multi-head attention layer.

    `heads` and `kv_heads` are the original counts. A pruned layer lists the remaining heads in `kept_heads`; its query
    groups may then be uneven or empty.

    Attributes:
        width: Width of the residual stream.
        heads: Original number of heads.
        head_dim: Channels of queries and keys per head. 0 means `width / heads`.
        value_dim: Channels of values per head. 0 means `head_dim`.
        kv_heads: Original number of KV heads. 0 means `heads`; 1 is multi-query, values in between are grouped-query.
        kv_width: Width of the sequence that keys and values are computed from, in cross-attention. 0 means `width`.
        kept_heads: Original numbers of the remaining heads. None means all heads.
        cache: Cache policy of each original KV head. Empty means that all KV heads cache every token.
        weight_bits: Bits per weight of each head. None means that weights are not quantized.
        bias: Whether queries, keys and values have a bias.
        out_bias: Whether the output projection has a bias.
        scale: Factor of the attention scores. None means 1/√head_dim.
        rotary: Rotary position embedding. None means no rotary embedding.
        qk_norm: Norm of queries and keys. None means no norm.
        query_scaling: Factor of the queries that grows with their position. None means no such factor.
        alibi: Whether scores have an ALiBi bias: minus the slope of the head times the distance.
        t5_buckets: Number of distance buckets of a learned T5 position bias per head. 0 means no such bias.
        t5_max_distance: All distances from this one on share the last T5 bucket.
        t5_bidirectional: Whether half of the T5 buckets are for keys after the query.
        window: A query attends only to keys fewer than `window` positions away. None means no limit.
        softcap: Scores become softcap·tanh(score/softcap). None means no cap.
        softmax: "plain"; "off_by_one" adds 1 to the denominator; "sink" adds a learned logit per head.
        latent: Latents of keys, values and queries. With them, every head needs its own KV head, and `bias` means biases of
            the down-projections. The cache holds k and v of every head. None means direct projections.
        head_input: "full" projects the full residual stream for each head; "slice" projects the head's own slice of it.
        gated: Whether each head has a learnable scalar that multiplies its output.
        output_gate: Gate of z that is computed from the input of each token, a sigmoid of a linear layer: "head" (one number
            per head) or "channel" (one per channel, https://arxiv.org/abs/2505.06708). z is always the gated output, which
            enters W_O. The gate has a bias if `bias` is True, and is never quantized. None means no gate.
        dropout: Dropout rate of attention weights in training.
        head_dropout: Rate at which entire heads are dropped in training.
        head_dropout_schedule: Schedule of `head_dropout` over training: "constant", "ramp" or "v".

    >>> AttentionSpec(width=512, heads=8).head_dim
    64
    >>> AttentionSpec(width=64, heads=8, kv_heads=2, kept_heads=(0, 1, 2, 7)).kv_of_head
    (0, 0, 0, 1)
    """

    width: int
    heads: int
    head_dim: int = 0
    value_dim: int = 0
    kv_heads: int = 0
    kv_width: int = 0
    kept_heads: tuple[int, ...] | None = None
    cache: tuple[CachePolicy, ...] = ()
    weight_bits: LayerBits | None = None
    bias: bool = False
    out_bias: bool = False
    scale: float | None = None
    rotary: Rotary | None = None
    qk_norm: QKNorm | None = None
    query_scaling: QueryScaling | None = None
    alibi: bool = False
    t5_buckets: int = 0
    t5_max_distance: int = 128
    t5_bidirectional: bool = True
    window: int | None = None
    softcap: float | None = None
    softmax: Literal["plain", "off_by_one", "sink"] = "plain"
    latent: Latent | None = None
    head_input: Literal["full", "slice"] = "full"
    gated: bool = False
    output_gate: Literal["head", "channel"] | None = None
    dropout: float = 0.0
    head_dropout: float = 0.0
    head_dropout_schedule: Literal["constant", "ramp", "v"] = "constant"

    def __post_init__(self) -> None:
        check_non_negative_int(self, "width", "heads", "head_dim", "value_dim", "kv_heads", "kv_width", "t5_buckets")
        check_non_negative_int(self, "t5_max_distance")
        check_at_most(self, MAX_HEADS, "heads", "kv_heads")
        check_type(self, bool, "bias", "out_bias", "alibi", "gated", "t5_bidirectional")
        if self.rotary is not None and not isinstance(self.rotary, Rotary):
            raise ArgumentError(f"rotary={self.rotary!r}: must be a Rotary object, for example Rotary(theta=10000.0).")
        for name, kind, example in (
            ("qk_norm", QKNorm, "QKNorm()"),
            ("query_scaling", QueryScaling, "QueryScaling(0.1, 8192)"),
        ):
            if not isinstance(getattr(self, name), kind | None):
                raise ArgumentError(
                    f"{name}={getattr(self, name)!r}: must be a {kind.__name__} object, for example {example}."
                )
        if self.width < 1:
            raise ArgumentError(f"width={self.width}: must be at least 1.")
        self._set_field("head_dim", self.head_dim or self._default_head_dim())
        self._set_field("value_dim", self.value_dim or self.head_dim)
        self._set_field("kv_heads", self.kv_heads or self.heads)
        self._set_field("kv_width", self.kv_width or self.width)
        if self.kept_heads is not None:
            kept_heads = tuple(sorted(set(self.kept_heads)))
            self._set_field("kept_heads", None if kept_heads == tuple(range(self.heads)) else kept_heads)
        self._set_field("cache", () if all(policy == KEEP_ALL for policy in self.cache) else tuple(self.cache))
        self._check()

    def _set_field(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    def _default_head_dim(self) -> int:
        if self.heads == 0:
            return self.width  # unused, because the layer has no head
        if self.width % self.heads:
            nearest = max(1, round(self.width / self.heads))
            raise ArgumentError(
                f"width={self.width}: not divisible by heads={self.heads}. Set head_dim explicitly, for example "
                f"head_dim={nearest}."
            )
        return self.width // self.heads

    def _check(self) -> None:
        if self.heads % max(1, self.kv_heads):
            raise ArgumentError(
                f"heads={self.heads}: not divisible by kv_heads={self.kv_heads}. Set kv_heads to a divisor of heads."
            )
        if self.kept_heads and (self.kept_heads[0] < 0 or self.kept_heads[-1] >= self.heads):
            raise ArgumentError(
                f"kept_heads={list(self.kept_heads)}: head numbers must be between 0 and {self.heads - 1}."
            )
        if self.softmax not in ("plain", "off_by_one", "sink"):
            raise ArgumentError(f"softmax={self.softmax!r}: unknown. Use 'plain', 'off_by_one' or 'sink'.")
        if self.softcap is not None and self.softcap <= 0:
            raise ArgumentError(f"softcap={self.softcap}: must be above 0. Use None for no cap.")
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ArgumentError(f"window={self.window}: must be an integer of at least 1. Use None for no window.")
        if self.head_dropout_schedule not in ("constant", "ramp", "v"):
            raise ArgumentError(
                f"head_dropout_schedule={self.head_dropout_schedule!r}: unknown. Use 'constant', 'ramp' or 'v'."
            )
        if self.cache and len(self.cache) != self.kv_heads:
            raise ArgumentError(
                f"cache: needs one policy per KV head. Got {len(self.cache)} policies for {self.kv_heads} KV heads."
            )
        if self.weight_bits is not None:
            sizes = [len(getattr(self.weight_bits, projection)) for projection in "qkvo"]
            expected_sizes = [self.heads, self.kv_heads, self.kv_heads, self.heads]
            if sizes != expected_sizes:
                raise ArgumentError(
                    f"weight_bits: needs one number per head for q, k, v and o, so {expected_sizes} numbers. Got {sizes}."
                )
        for name, rate in (("dropout", self.dropout), ("head_dropout", self.head_dropout)):
            if not 0 <= rate < 1:
                raise ArgumentError(f"{name}={rate}: must be at least 0 and below 1.")
        enabled_biases = [name for name in POSITION_BIASES if getattr(self, name)]
        if len(enabled_biases) > 1:
            raise ArgumentError(
                f"{' and '.join(enabled_biases)}: a layer supports only one position bias. Set one of them."
            )
        if 0 < self.t5_buckets < 4:
            raise ArgumentError(
                f"t5_buckets={self.t5_buckets}: must be 0 or at least 4, because both directions need near and far buckets."
            )
        exact = self.t5_buckets // (4 if self.t5_bidirectional else 2)
        if self.t5_buckets and self.t5_max_distance <= exact:
            raise ArgumentError(
                f"t5_max_distance={self.t5_max_distance}: must be above {exact}, because distances below {exact} have one "
                f"bucket each. Increase it, or reduce t5_buckets={self.t5_buckets}."
            )
        self._check_rotary()
        self._check_input()
        self._check_latent()

    def _check_rotary(self) -> None:
        if self.rotary is None:
            return
        rotary_dims = self.rotary.dims or self.head_dim
        if rotary_dims % 2 or rotary_dims > self.head_dim:
            raise ArgumentError(
                f"rotary: cannot rotate {rotary_dims} of {self.head_dim} channels per head, because channels are rotated "
                f"in pairs. Set an even head_dim, or Rotary(dims=...) to an even number of at most head_dim."
            )
        scaling = self.rotary.scaling
        if scaling is not None and scaling.kind == "longrope":
            for name in ("short_factors", "long_factors"):
                if len(getattr(scaling, name)) != rotary_dims // 2:
                    raise ArgumentError(
                        f"rotary: longrope needs one factor for each of {rotary_dims // 2} pairs of channels. Got "
                        f"{len(getattr(scaling, name))} in {name}."
                    )

    def _check_input(self) -> None:
        if self.head_input not in ("full", "slice"):
            raise ArgumentError(f"head_input={self.head_input!r}: unknown. Use 'full' or 'slice'.")
        if self.output_gate not in (None, "head", "channel"):
            raise ArgumentError(f"output_gate={self.output_gate!r}: unknown. Use 'head', 'channel' or None.")
        if self.head_input == "slice" and (self.output_gate is not None or self._has_width_norm):
            raise ArgumentError(
                "head_input='slice': a head reads only its own slice, but output_gate and a norm over the full width read "
                "the full residual stream. Use head_input='full'."
            )
        if self.head_input == "slice" and (self.heads == 0 or self.width % self.heads or self.kv_width % self.heads):
            raise ArgumentError(
                f"head_input='slice': each head has its own slice of the residual stream, so width={self.width} and "
                f"kv_width={self.kv_width} must be divisible by heads={self.heads}."
            )
        if self.head_input == "slice" and self.kv_heads != self.heads:
            raise ArgumentError(
                f"head_input='slice': needs kv_heads equal to heads, because a shared KV head has no slice of its own. "
                f"Got kv_heads={self.kv_heads} and heads={self.heads}."
            )

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        if not isinstance(self.latent, Latent):
            raise ArgumentError(
                f"latent={self.latent!r}: must be a Latent object, for example Latent(512, rotary_dims=64)."
            )
        problems = {
            f"kv_heads={self.kv_heads} other than heads={self.heads}": self.kv_heads != self.heads,
            f"kv_width={self.kv_width} other than the width": self.kv_width != self.width,
            "head_input='slice'": self.head_input == "slice",
            "quantized weights": self.weight_bits is not None,
            "a norm of queries and keys (qk_norm)": self.qk_norm is not None,
            "an output gate (output_gate)": self.output_gate is not None,
            f"rotary_dims={self.latent.rotary_dims} with head_dim={self.head_dim}, which leaves no channel for the latent":
                self.latent.rotary_dims >= self.head_dim,
            f"a rotary embedding of other channels than rotary_dims={self.latent.rotary_dims}":
                self.rotary is not None and (self.rotary.dims or self.head_dim) != self.latent.rotary_dims,
        }  # fmt: skip
        for problem, applies in problems.items():
            if applies:
                raise ArgumentError(f"latent: not supported with {problem}. Change the field, or set latent=None.")

    # Derived values.

    def compute_derived_values(self) -> Self:
        """Compute all cached values now and return this spec: in Python 3.11 torch.compile cannot trace their lock."""
        for name, attribute in vars(AttentionSpec).items():
            if isinstance(attribute, cached_property):
                getattr(self, name)
        return self

    @cached_property
    def head_ids(self) -> tuple[int, ...]:
        """Original numbers of the remaining heads."""
        return tuple(range(self.heads)) if self.kept_heads is None else self.kept_heads

    @cached_property
    def kv_head_ids(self) -> tuple[int, ...]:
        """Original numbers of the KV heads that at least one remaining head uses."""
        return tuple(sorted({self._kv_of(head) for head in self.head_ids}))

    @cached_property
    def kv_of_head(self) -> tuple[int, ...]:
        """Index into `kv_head_ids` for each remaining head."""
        index = {kv_id: i for i, kv_id in enumerate(self.kv_head_ids)}
        return tuple(index[self._kv_of(head)] for head in self.head_ids)

    @cached_property
    def heads_of_kv(self) -> tuple[tuple[int, ...], ...]:
        """Original numbers of the heads that share each remaining KV head."""
        groups: dict[int, list[int]] = {kv_id: [] for kv_id in self.kv_head_ids}
        for head in self.head_ids:
            groups[self._kv_of(head)].append(head)
        return tuple(map(tuple, groups.values()))

    @cached_property
    def cache_policies(self) -> tuple[CachePolicy, ...]:
        """Cache policy of each remaining KV head."""
        return tuple(self.cache[kv_id] if self.cache else KEEP_ALL for kv_id in self.kv_head_ids)

    @cached_property
    def position_bias_field(self) -> str | None:
        """Name of the field that enables a position bias, or None."""
        return next((name for name in POSITION_BIASES if getattr(self, name)), None)

    @cached_property
    def uses_default_score_params(self) -> bool:
        """True if scores need only q·k and the caller's mask: no window, no position bias, no sink."""
        return self.window is None and self.position_bias_field is None and self.softmax == "plain"

    @property
    def position_params_per_head(self) -> int:
        """Number of learned parameters of the position bias per head."""
        return 0 if self.position_bias_field is None else POSITION_BIASES[self.position_bias_field](self)

    def without_positions(self) -> "AttentionSpec":
        """Return this spec without window, rotary, query scaling and position bias, for keys from another sequence."""
        disabled = {name: type(getattr(self, name))() for name in POSITION_BIASES}  # False, 0
        return replace(self, window=None, rotary=None, query_scaling=None, **disabled)

    def _kv_of(self, head: int) -> int:
        return head * self.kv_heads // self.heads

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the layer."""
        heads, kv_heads = len(self.head_ids), len(self.kv_head_ids)
        input_slices = self.heads if self.head_input == "slice" else 1
        queries = heads * self.head_dim
        keys_values = kv_heads * (self.head_dim + self.value_dim)
        if self.latent is not None:
            return self._num_latent_parameters
        total = queries * self.width // input_slices + keys_values * self.kv_width // input_slices
        total += heads * self.value_dim * self.width
        total += (queries + keys_values) * self.bias + self.width * self.out_bias
        total += heads * (self.gated + (self.softmax == "sink") + self.position_params_per_head)
        if self.output_gate is not None:
            total += heads * (self.value_dim if self.output_gate == "channel" else 1) * (self.width + self.bias)
        return total + self._num_norm_parameters

    @property
    def num_input_weights(self) -> int:
        """Number of weights of the projections of q, k, v and of the output gate, without biases."""
        heads, kv_heads = len(self.head_ids), len(self.kv_head_ids)
        if self.latent is not None:
            latent = self.latent
            up = self.head_dim - latent.rotary_dims + self.value_dim
            down = (latent.kv_rank + latent.rotary_dims + latent.query_rank) * self.width
            return down + heads * (self.head_dim * (latent.query_rank or self.width) + up * latent.kv_rank)
        pruned = {projection: len(rows) for projection, rows in self.pruned_norm_rows.items()}
        queries = (heads + pruned["q"]) * self.head_dim
        keys_values = kv_heads * (self.head_dim + self.value_dim) + pruned["k"] * self.head_dim
        input_slices = self.heads if self.head_input == "slice" else 1
        gates = {None: 0, "head": heads, "channel": heads * self.value_dim}[self.output_gate]
        return (queries * self.width + keys_values * self.kv_width) // input_slices + gates * self.width

    @property
    def _has_width_norm(self) -> bool:
        return self.qk_norm is not None and self.qk_norm.over == "width"

    @property
    def pruned_norm_rows(self) -> dict[str, tuple[int, ...]]:
        """Pruned heads ("q") and KV heads ("k") whose rows the layer keeps for a norm over the full width."""
        if not self._has_width_norm:
            return {"q": (), "k": ()}
        return {
            "q": tuple(head for head in range(self.heads) if head not in self.head_ids),
            "k": tuple(head for head in range(self.kv_heads) if head not in self.kv_head_ids),
        }

    @property
    def _num_norm_parameters(self) -> int:
        if self.qk_norm is None:
            return 0
        pruned = {projection: len(rows) for projection, rows in self.pruned_norm_rows.items()}
        total = self.head_dim * (pruned["q"] * (self.width + self.bias) + pruned["k"] * (self.kv_width + self.bias))
        present = len(self.head_ids) + len(self.kv_head_ids)
        gains = {"shared": 2, "per_head": present, "none": 0}[self.qk_norm.weights]
        return total + self.head_dim * gains * (1 + self.qk_norm.bias)

    @property
    def _num_latent_parameters(self) -> int:
        assert self.latent is not None
        latent, heads = self.latent, len(self.head_ids)
        down_rows = latent.kv_rank + latent.rotary_dims + latent.query_rank
        total = down_rows * (self.width + self.bias) + latent.kv_rank + latent.query_rank
        total += heads * self.head_dim * (latent.query_rank or self.width)
        total += heads * (self.head_dim - latent.rotary_dims + self.value_dim) * latent.kv_rank
        total += heads * self.value_dim * self.width + self.width * self.out_bias
        return total + heads * (self.gated + (self.softmax == "sink") + self.position_params_per_head)

    def keep_heads(self, heads: tuple[int, ...]) -> "AttentionSpec":
        """Return this spec with only some of its heads.

        Args:
            heads: Original numbers of the heads to keep.
        """
        return replace(self, kept_heads=tuple(heads))
