"""Cache policy of KV heads: the cached tokens and the bits per number. Does not import torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headwise.errors import ArgumentError
from headwise.spec.address import Address, select
from headwise.spec.weight_bits import GROUP_SIZE, row_bytes

CACHE_BITS = (32, 16, 8, 4)  # 32 means not quantized, in the dtype of the model


@dataclass(frozen=True)
class CachePolicy:
    """Tokens that one KV head caches, and the bits at which it stores their keys and values.

    A KV head with a `window` is a streaming head: a query attends only to the first `sink_tokens` tokens of the text and to
    the last `window` tokens, including itself (https://arxiv.org/abs/2309.17453).

    Attributes:
        bits: Bits per number: 32, 16, 8 or 4. Keys and values are quantized when they enter the cache; 32 means not
            quantized.
        sink_tokens: Number of tokens at the start of the text that are always cached. Requires `window`.
        window: Number of most recent tokens that are cached. None caches every token.

    >>> str(CachePolicy(sink_tokens=4, window=128)), str(CachePolicy(bits=8)), str(CachePolicy())
    ('streaming 4 + 128', '8 bits', 'everything')
    """

    bits: int = 32
    sink_tokens: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in CACHE_BITS:
            raise ArgumentError(
                f"CachePolicy bits={self.bits!r}: not supported. Use one of {', '.join(map(str, CACHE_BITS))} bits."
            )
        for name, value, minimum in (("sink_tokens", self.sink_tokens, 0), ("window", self.window, 1)):
            if value is not None and (type(value) is not int or value < minimum):
                raise ArgumentError(
                    f"CachePolicy {name}={value!r}: must be an integer number of tokens of at least {minimum}."
                )
        if self.window is None and self.sink_tokens:
            raise ArgumentError(
                f"CachePolicy sink_tokens={self.sink_tokens}: requires a window. Set window to the number of most recent "
                f"tokens to cache."
            )

    @property
    def is_streaming(self) -> bool:
        """True if the head evicts tokens."""
        return self.window is not None

    def cached_tokens(self, length: int) -> int:
        """Return the number of cached tokens after `length` tokens of text."""
        return length if self.window is None else min(length, self.sink_tokens + self.window)

    def __str__(self) -> str:
        labels = [f"streaming {self.sink_tokens} + {self.window}"] if self.is_streaming else []
        labels += [f"{self.bits} bits"] if self.bits != 32 else []
        return ", ".join(labels) or "everything"


KEEP_ALL = CachePolicy()


@dataclass(frozen=True)
class CacheRule:
    """Cache policy shared by several KV heads.

    Attributes:
        heads: Addresses of the KV heads, such as `5.1`.
        policy: Their cache policy.
    """

    heads: tuple[str, ...]
    policy: CachePolicy


CachePolicies = Mapping[str, CachePolicy | int] | Iterable[CacheRule]


def rules_from_policies(cache: CachePolicies, kv_heads: tuple[Address, ...]) -> tuple[CacheRule, ...]:
    """Group KV heads by cache policy into one rule per policy. Heads that cache everything get no rule.

    Args:
        cache: Rules, or a mapping from head patterns to policies such as
            {"5.*": CachePolicy(sink_tokens=4, window=128), "0.1": 8}. An integer means bits. If two patterns select the
            same head, the later pattern wins.
        kv_heads: Addresses of all KV heads.
    """
    if isinstance(cache, Mapping):
        entries: list[tuple[str, CachePolicy | int]] = list(cache.items())  # pyright: ignore[reportAssignmentType]
    else:
        rules = tuple(cache)
        if not all(isinstance(rule, CacheRule) for rule in rules):
            raise ArgumentError(
                f"cache={rules!r}: must map KV heads to policies. "
                f"Use, for example, {{'5.1': CachePolicy(sink_tokens=4, window=128)}}."
            )
        entries = [(",".join(rule.heads), rule.policy) for rule in rules if rule.heads]
    policy_of_head: dict[Address, CachePolicy] = {}
    for pattern, policy in entries:
        policy = CachePolicy(bits=policy) if isinstance(policy, int) else policy
        if not isinstance(policy, CachePolicy):
            raise ArgumentError(
                f"cache[{pattern!r}]={policy!r}: must be a CachePolicy, for example CachePolicy(sink_tokens=4, window=128), "
                f"or a number of bits."
            )
        policy_of_head |= dict.fromkeys(select(pattern, kv_heads), policy)
    heads_by_policy: dict[CachePolicy, list[str]] = {}
    for head in kv_heads:
        if policy_of_head.get(head, KEEP_ALL) != KEEP_ALL:
            heads_by_policy.setdefault(policy_of_head[head], []).append(str(head))
    return tuple(CacheRule(tuple(heads), policy) for policy, heads in heads_by_policy.items())


def kv_row_bytes(d: int, bits: int, element_bytes: int = 4) -> int:
    """Return the bytes of d cached channels including their scales. At 32 bits each takes `element_bytes` bytes."""
    scale_bytes = 4 * -(-d // min(GROUP_SIZE, d)) if bits == 16 else 0  # 16-bit weights, unlike caches, have no scales
    return row_bytes(d, bits, GROUP_SIZE, element_bytes) + scale_bytes
