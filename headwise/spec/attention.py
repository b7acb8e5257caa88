"""What one attention layer is: sizes, heads, positions, softmax. Frozen data, no torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from headwise.errors import HeadwiseError
from headwise.spec.cache_policy import KEEP_ALL, CachePolicy
from headwise.spec.json_spec import JSONSpec
from headwise.spec.weight_bits import LayerBits


@dataclass(frozen=True)
class RotaryScaling:
    """How rotary frequencies are stretched for longer contexts.

    `linear` divides every frequency by `factor`. `llama3` divides the slow ones, keeps the fast ones and blends between
    (Llama 3, https://arxiv.org/abs/2407.21783).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise HeadwiseError(f"rotary scaling {self.kind!r} is unknown; use linear or llama3.")
        if self.factor <= 0:
            raise HeadwiseError(f"rotary scaling factor must be above 0, got {self.factor}.")


@dataclass(frozen=True)
class Rotary:
    """Rotary positions (https://arxiv.org/abs/2104.09864): pairs of channels turn with the position.

    `half` pairs channel i with i + dims/2 (Hugging Face), `interleaved` pairs 2i with 2i + 1 (the paper, Meta).
    `dims` is how many channels turn; None means all of head_dim.
    """

    theta: float = 10000.0
    layout: Literal["half", "interleaved"] = "half"
    dims: int | None = None
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        if not self.theta > 0:
            raise HeadwiseError(f"rotary theta must be above 0, got {self.theta}.")
        if self.layout not in ("half", "interleaved"):
            raise HeadwiseError(f"rotary layout {self.layout!r} is unknown; use half or interleaved.")
        if self.dims is not None and (self.dims < 2 or self.dims % 2):
            raise HeadwiseError(f"rotary dims must be an even number of at least 2, got {self.dims}.")


MAX_HEADS = 2**16


def check_non_negative_int(spec: object, *names: str) -> None:
    """Sizes are whole numbers, 0 or more."""
    for name in names:
        value = getattr(spec, name)
        if type(value) is not int or value < 0:
            raise HeadwiseError(f"{name} must be a whole number, 0 or more; got {value!r}.")


def check_at_most(spec: object, maximum: int, *names: str) -> None:
    """Far more layers or heads than anybody has come from a damaged file; counting them would take for ever."""
    for name in names:
        if getattr(spec, name) > maximum:
            raise HeadwiseError(
                f"{name} is {getattr(spec, name)}, and at most {maximum} are counted; is the file damaged?"
            )


def check_type(spec: object, expected_type: type, *names: str) -> None:
    """Switches are True or False, measures are numbers."""
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, expected_type | int if expected_type is float else expected_type) or (
            expected_type is float and isinstance(value, bool)
        ):
            raise HeadwiseError(f"{name} must be a {expected_type.__name__}, got {value!r}.")


# What scores gain by distance: the field that asks for it, and how many numbers each head learns for it.
POSITION_BIASES: dict[str, Callable[["AttentionSpec"], int]] = {
    "alibi": lambda spec: 0,
    "t5_buckets": lambda spec: spec.t5_buckets,
}


@dataclass(frozen=True)
class AttentionSpec(JSONSpec):
    """One multi-head attention layer.

    `heads` and `kv_heads` count the heads the layer was born with; `kept_heads` lists those still there by their original
    numbers (None: all of them). So a pruned layer is just a spec, and its query groups may be uneven or empty.

    >>> AttentionSpec(width=512, heads=8).head_dim
    64
    >>> AttentionSpec(width=64, heads=8, kv_heads=2, kept_heads=(0, 1, 2, 7)).kv_of_head
    (0, 0, 0, 1)
    """

    width: int
    heads: int
    head_dim: int = 0  # 0: width / heads
    value_dim: int = 0  # 0: head_dim
    kv_heads: int = 0  # 0: heads; 1 is multi-query, in between is grouped-query
    kv_width: int = 0  # 0: width; the width of the source in cross-attention
    kept_heads: tuple[int, ...] | None = None
    cache: tuple[CachePolicy, ...] = ()  # what each key head it was born with keeps; (): all keep everything
    weight_bits: LayerBits | None = None  # at how many bits its weights are stored; None: as the layer computes
    bias: bool = False  # on q, k and v
    out_bias: bool = False
    scale: float | None = None  # None: 1/√head_dim
    rotary: Rotary | None = None
    alibi: bool = False  # scores lose a head's slope times the distance
    t5_buckets: int = 0  # T5's: a learned number for each head and so many buckets of distances; 0: none
    window: int | None = None  # a query sees keys fewer than `window` positions away
    softcap: float | None = None  # scores become softcap·tanh(score/softcap)
    softmax: Literal["plain", "off_by_one", "sink"] = "plain"
    head_input: Literal["full", "slice"] = "full"
    gated: bool = False  # a learnable scalar per head, on what it writes
    dropout: float = 0.0  # on attention weights
    head_dropout: float = 0.0  # on whole heads
    head_dropout_schedule: Literal["constant", "ramp", "v"] = "constant"

    def __post_init__(self) -> None:
        check_non_negative_int(self, "width", "heads", "head_dim", "value_dim", "kv_heads", "kv_width", "t5_buckets")
        check_at_most(self, MAX_HEADS, "heads", "kv_heads")
        check_type(self, bool, "bias", "out_bias", "alibi", "gated")
        if self.rotary is not None and not isinstance(self.rotary, Rotary):
            raise HeadwiseError(f"rotary must be a Rotary(theta=…), got {self.rotary!r}.")
        if self.width < 1:
            raise HeadwiseError(f"width must be at least 1, got {self.width}.")
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
            return self.width  # no head will use it
        if self.width % self.heads:
            nearest = max(1, round(self.width / self.heads))
            raise HeadwiseError(
                f"width {self.width} is not divisible by heads {self.heads}; give head_dim explicitly, e.g. "
                f"head_dim={nearest}."
            )
        return self.width // self.heads

    def _check(self) -> None:
        if self.heads % max(1, self.kv_heads):
            raise HeadwiseError(
                f"heads {self.heads} cannot be shared out over kv_heads {self.kv_heads}; kv_heads must divide heads."
            )
        if self.kept_heads and (self.kept_heads[0] < 0 or self.kept_heads[-1] >= self.heads):
            raise HeadwiseError(f"kept_heads must lie in 0-{self.heads - 1}, got {list(self.kept_heads)}.")
        if self.softmax not in ("plain", "off_by_one", "sink"):
            raise HeadwiseError(f"softmax {self.softmax!r} is unknown; use plain, off_by_one or sink.")
        if self.softcap is not None and self.softcap <= 0:
            raise HeadwiseError(f"softcap must be above 0, got {self.softcap}; leave it out for none.")
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise HeadwiseError(
                f"window must be a whole number of at least 1, got {self.window}; leave it out for none."
            )
        if self.head_dropout_schedule not in ("constant", "ramp", "v"):
            raise HeadwiseError(
                f"head dropout schedule {self.head_dropout_schedule!r} is unknown; use constant, ramp or v."
            )
        if self.cache and len(self.cache) != self.kv_heads:
            raise HeadwiseError(f"cache tells what each of {self.kv_heads} key heads keeps; got {len(self.cache)}.")
        if self.weight_bits is not None:
            sizes = [len(getattr(self.weight_bits, projection)) for projection in "qkvo"]
            if sizes != [self.heads, self.kv_heads, self.kv_heads, self.heads]:
                raise HeadwiseError(f"weight_bits tell the bits of every head, q k v o; got {sizes} of them.")
        for name, rate in (("dropout", self.dropout), ("head_dropout", self.head_dropout)):
            if not 0 <= rate < 1:
                raise HeadwiseError(f"{name} must be at least 0 and below 1, got {rate}.")
        enabled_biases = [name for name in POSITION_BIASES if getattr(self, name)]
        if len(enabled_biases) > 1:
            raise HeadwiseError(f"scores have one bias by distance; {' and '.join(enabled_biases)} are two.")
        if 0 < self.t5_buckets < 4:
            raise HeadwiseError(
                f"t5_buckets are for both directions, near and far: 0 or at least 4, got {self.t5_buckets}."
            )
        self._check_rotary()
        self._check_input()

    def _check_rotary(self) -> None:
        if self.rotary is None:
            return
        rotary_dims = self.rotary.dims or self.head_dim
        if rotary_dims % 2 or rotary_dims > self.head_dim:
            raise HeadwiseError(
                f"rotary positions turn channels in pairs, so {rotary_dims} channels of head_dim {self.head_dim} will not "
                f"do; give an even head_dim, or Rotary(dims=...) within it."
            )

    def _check_input(self) -> None:
        if self.head_input not in ("full", "slice"):
            raise HeadwiseError(f"head_input {self.head_input!r} is unknown; use full or slice.")
        if self.head_input == "slice" and (self.heads == 0 or self.width % self.heads or self.kv_width % self.heads):
            raise HeadwiseError(
                f"head_input='slice' gives each head its own slice of the embedding: width {self.width} and kv_width "
                f"{self.kv_width} must be divisible by heads {self.heads}."
            )
        if self.head_input == "slice" and self.kv_heads != self.heads:
            raise HeadwiseError(
                f"head_input='slice' needs kv_heads equal to heads, got {self.kv_heads} and {self.heads}; a shared key head "
                f"has no slice of its own."
            )

    # What follows from the fields.

    @cached_property
    def head_ids(self) -> tuple[int, ...]:
        """The heads that are there, by their original numbers."""
        return tuple(range(self.heads)) if self.kept_heads is None else self.kept_heads

    @cached_property
    def kv_head_ids(self) -> tuple[int, ...]:
        """The key/value heads some present head still reads from, by their original numbers."""
        return tuple(sorted({self._kv_of(head) for head in self.head_ids}))

    @cached_property
    def kv_of_head(self) -> tuple[int, ...]:
        """For each present head, the index of its key/value head among those present."""
        index = {kv_id: i for i, kv_id in enumerate(self.kv_head_ids)}
        return tuple(index[self._kv_of(head)] for head in self.head_ids)

    @cached_property
    def heads_of_kv(self) -> tuple[tuple[int, ...], ...]:
        """For each present key/value head, the original numbers of the heads that read it."""
        return tuple(tuple(n for n in self.head_ids if self._kv_of(n) == kv_id) for kv_id in self.kv_head_ids)

    @cached_property
    def cache_policies(self) -> tuple[CachePolicy, ...]:
        """What each present key head keeps."""
        return tuple(self.cache[kv_id] if self.cache else KEEP_ALL for kv_id in self.kv_head_ids)

    @cached_property
    def position_bias_field(self) -> str | None:
        """The field that asks for a bias by distance, if one does."""
        return next((name for name in POSITION_BIASES if getattr(self, name)), None)

    @cached_property
    def uses_default_score_params(self) -> bool:
        """Whether scores are q·k and the caller's mask alone: no window, no bias by distance, no sink."""
        return self.window is None and self.position_bias_field is None and self.softmax == "plain"

    @property
    def position_params_per_head(self) -> int:
        """How many numbers each head learns for it."""
        return 0 if self.position_bias_field is None else POSITION_BIASES[self.position_bias_field](self)

    def without_positions(self) -> "AttentionSpec":
        """The same layer where distances mean nothing: keys come from another sequence."""
        disabled = {name: type(getattr(self, name))() for name in POSITION_BIASES}  # False, 0
        return replace(self, window=None, rotary=None, **disabled)

    def _kv_of(self, head: int) -> int:
        return head * self.kv_heads // self.heads

    @property
    def num_parameters(self) -> int:
        """How many parameters the layer holds."""
        heads, kv_heads = len(self.head_ids), len(self.kv_head_ids)
        input_slices = self.heads if self.head_input == "slice" else 1
        queries = heads * self.head_dim
        keys_values = kv_heads * (self.head_dim + self.value_dim)
        total = queries * self.width // input_slices + keys_values * self.kv_width // input_slices
        total += heads * self.value_dim * self.width
        total += (queries + keys_values) * self.bias + self.width * self.out_bias
        return total + heads * (self.gated + (self.softmax == "sink") + self.position_params_per_head)

    def keep_heads(self, heads: tuple[int, ...]) -> "AttentionSpec":
        """The same layer with only these heads, by their original numbers."""
        return replace(self, kept_heads=tuple(heads))
