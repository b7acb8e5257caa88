"""What the cache of a key head keeps: every token or a few, at how many bits. Frozen data, no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headwise.errors import HeadwiseError
from headwise.spec.address import Address, select
from headwise.spec.weight_bits import GROUP_SIZE, row_bytes

CACHE_BITS = (32, 16, 8, 4)  # 32: numbers as the model computes them


@dataclass(frozen=True)
class CachePolicy:
    """What one key head remembers. With `window`, it streams: the first `sink_tokens` of the text and the last `window`,
    itself among them, are all a query sees (https://arxiv.org/abs/2309.17453). Fewer bits: keys and values are
    rounded as they come in.

    >>> str(CachePolicy(sink_tokens=4, window=128)), str(CachePolicy(bits=8)), str(CachePolicy())
    ('streaming 4 + 128', '8 bits', 'everything')
    """

    bits: int = 32
    sink_tokens: int = 0
    window: int | None = None  # None: every token

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in CACHE_BITS:
            raise HeadwiseError(f"a cache holds numbers at {', '.join(map(str, CACHE_BITS))} bits; got {self.bits!r}.")
        for name, value, minimum in (("sink_tokens", self.sink_tokens, 0), ("window", self.window, 1)):
            if value is not None and (type(value) is not int or value < minimum):
                raise HeadwiseError(f"{name} counts tokens, {minimum} or more; got {value!r}.")
        if self.window is None and self.sink_tokens:
            raise HeadwiseError(
                f"a head that keeps its first {self.sink_tokens} tokens also needs window=…, how many it ends with."
            )

    @property
    def is_streaming(self) -> bool:
        """Whether tokens are forgotten."""
        return self.window is not None

    def cached_tokens(self, length: int) -> int:
        """How many of so many tokens are held."""
        return length if self.window is None else min(length, self.sink_tokens + self.window)

    def __str__(self) -> str:
        labels = [f"streaming {self.sink_tokens} + {self.window}"] if self.is_streaming else []
        labels += [f"{self.bits} bits"] if self.bits != 32 else []
        return ", ".join(labels) or "everything"


KEEP_ALL = CachePolicy()


@dataclass(frozen=True)
class CacheRule:
    """Key heads that keep alike, by address."""

    heads: tuple[str, ...]
    policy: CachePolicy


CachePolicies = Mapping[str, CachePolicy | int] | Iterable[CacheRule]


def rules_from_policies(cache: CachePolicies, kv_heads: tuple[Address, ...]) -> tuple[CacheRule, ...]:
    """One rule for each way of keeping, heads in their order; those that keep everything are not told.

    A mapping names key heads by pattern, {"5.*": CachePolicy(sink_tokens=4, window=128), "0.1": 8}, a number being bits; of
    two patterns that name the same head the later one counts.
    """
    if isinstance(cache, Mapping):
        entries: list[tuple[str, CachePolicy | int]] = list(cache.items())  # pyright: ignore[reportAssignmentType]
    else:
        rules = tuple(cache)
        if not all(isinstance(rule, CacheRule) for rule in rules):
            raise HeadwiseError(f"a cache is told as {{'5.1': CachePolicy(sink_tokens=4, window=128)}}; got {rules!r}.")
        entries = [(",".join(rule.heads), rule.policy) for rule in rules if rule.heads]
    policy_of_head: dict[Address, CachePolicy] = {}
    for pattern, policy in entries:
        policy = CachePolicy(bits=policy) if isinstance(policy, int) else policy
        if not isinstance(policy, CachePolicy):
            raise HeadwiseError(
                f"a key head takes CachePolicy(sink_tokens=4, window=128), or a number of bits; got {policy!r}."
            )
        policy_of_head |= dict.fromkeys(select(pattern, kv_heads), policy)
    heads_by_policy: dict[CachePolicy, list[str]] = {}
    for head in kv_heads:
        if policy_of_head.get(head, KEEP_ALL) != KEEP_ALL:
            heads_by_policy.setdefault(policy_of_head[head], []).append(str(head))
    return tuple(CacheRule(tuple(heads), policy) for policy, heads in heads_by_policy.items())


def kv_row_bytes(d: int, bits: int, element_bytes: int = 4) -> int:
    """What d channels take, their scales among it; at 32 bits they are kept as they are, `element_bytes` each."""
    scale_bytes = 4 * -(-d // min(GROUP_SIZE, d)) if bits == 16 else 0  # those of weights have none at 16 bits
    return row_bytes(d, bits, GROUP_SIZE, element_bytes) + scale_bytes
