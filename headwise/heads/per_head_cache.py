"""A cache by head: each key head keeps what it needs, all tokens or a few, at its own bits; nothing more is held.

Heads that keep alike are stored together and attended to in one call of the kernel, so that a layer is a handful of calls;
one, until the first of them forgets something.
"""

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.head_groups import BeforeForgetting, CacheStep, Part, make_part
from headwise.heads.layer_cache import Cache
from headwise.kernels import Mask, per_head
from headwise.kernels.quantization import rounded
from headwise.kernels.sink_window_masks import Streaming
from headwise.spec import AttentionSpec, Keeps


class HeadCache(Cache):
    """The cache of one layer whose key heads keep different things; `keeps` tells what, one for each that is there.

    >>> spec = AttentionSpec(width=8, heads=2)
    >>> cache = HeadCache(spec, (Keeps(), Keeps(first=1, last=2)))
    >>> k = v = torch.zeros(1, 2, 2, 4)  # two tokens
    >>> cache.keep(k, v)
    >>> [part.keys for part in cache.parts]  # so far nobody has forgotten anything
    [[0, 1]]
    >>> cache.keep(k, v)
    >>> [part.keys for part in cache.parts]
    [[0], [1]]
    """

    def __init__(self, spec: AttentionSpec, keeps: tuple[Keeps, ...], size: int | None = None) -> None:
        if len(keeps) != len(spec.kv_ids):
            raise HeadwiseError(
                f"the layer has {len(spec.kv_ids)} key heads; it was told what {len(keeps)} of them keep."
            )
        self.keeps = keeps
        self.everywhere = keeps  # of all key heads of the layer, where other processes hold some
        self._own: list[Part] = []
        for one in dict.fromkeys(keeps):
            keys = [i for i, other in enumerate(keeps) if other == one]
            heads = [head for head, key in enumerate(spec.kv_of_head) if key in keys]
            groups = tuple(keys.index(spec.kv_of_head[head]) for head in heads)
            self._own.append(make_part(heads, keys, groups, one, spec.window, size))
        heads = [head for part in self._own for head in part.numbers]
        self._order = None if heads == sorted(heads) else torch.tensor(heads).argsort()  # of what all parts find
        self._batch: int | None = None
        self.parts = self._own
        rooms = [one.first + one.last for one in keeps if one.last is not None]
        if len(self._own) > 1 and rooms and spec.window is size is None and all(one.bits == 32 for one in keeps):
            self.parts = [BeforeForgetting(spec.kv_of_head, len(keeps), min(rooms))]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: CacheStep) -> Tensor:
        """New tokens are kept, and their queries look at all that is: (B, H, T, d), (B, K, T, ·) twice → (B, H, T, e)."""
        self.check_batch(k)
        self._part_ways(k.shape[2], call.starts)
        if len(self.parts) == 1 and k.shape[2]:
            z = self.parts[0].attend(q, k, v, call)
        elif not k.shape[2] or not self.parts:
            z = q.new_zeros(*q.shape[:3], v.shape[-1])
        else:
            found = [p.attend(p.heads.of(q), p.key_heads.of(k), p.key_heads.of(v), call) for p in self.parts]
            z = torch.cat(found, 1)
            if self._order is not None:
                self._order = self._order.to(z.device)
                z = z.index_select(1, self._order)
        self.length += k.shape[2]
        self._batch = len(k)
        return z

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Keep tokens that nobody asks about now: (B, K, T, ·) twice, T > 0, without padding."""
        self.check_batch(k)
        self._part_ways(k.shape[2])
        for part in self.parts:
            part.keep(part.key_heads.of(k), part.key_heads.of(v), self.length)
        self.length += k.shape[2]
        self._batch = len(k)

    def _part_ways(self, T: int, starts: Tensor | None = None) -> None:
        """Before T more tokens come: whether a head will now forget one, or counts its first ones from another place."""
        together = self.parts[0] if self.parts else None
        if isinstance(together, BeforeForgetting) and (self.length + T > together.most or starts is not None):
            together.hand_over(self._own, self.length)
            self.parts = self._own

    def check_batch(self, k: Tensor) -> None:
        """A cache serves one batch."""
        if self._batch not in (None, len(k)):
            raise HeadwiseError(
                f"the cache holds a batch of {self._batch}, got {len(k)}; start a new cache for a new batch."
            )

    def laid_out(self, k: Tensor, v: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, new ones too, at their places, zeros where one was forgotten: (B, K, S, ·) twice.

        For whoever looks at a call: it takes the memory that was saved.
        """
        S = self.length + k.shape[2]
        all_k, all_v = (x.new_zeros(*x.shape[:2], S, x.shape[3]) for x in (k, v))
        for part in self.parts:
            for whole, new, shelf in ((all_k, k, part.k), (all_v, v, part.v)):
                whole[:, part.keys, self.length :] = shelf.as_kept(new[:, part.keys])
                part.lay_out(whole, shelf, self.length, starts)
        return all_k, all_v

    def reorder(self, rows: Tensor) -> None:
        for part in self.parts:
            for shelf in (part.k, part.v):
                shelf.held = tuple(x.index_select(0, rows) for x in shelf.held)
        self._batch = None if self._batch is None else len(rows)

    @property
    def state(self) -> tuple:
        return self.length, self._batch, self.parts, [(part.k.held, part.v.held) for part in self.parts]

    @state.setter
    def state(self, kept: tuple) -> None:
        self.length, self._batch, self.parts, shelves = kept
        for part, (k, v) in zip(self.parts, shelves, strict=True):
            part.k.held, part.v.held = k, v

    @property
    def bytes(self) -> int:
        return sum(shelf.bytes for part in self.parts for shelf in (part.k, part.v))


def as_kept(x: Tensor, keeps: tuple[Keeps, ...]) -> Tensor:
    """Keys or values as they come back from a cache, each head's at its bits: (B, K, S, ·)"""
    if all(one.bits == 32 for one in keeps):
        return x
    return torch.cat([rounded(x[:, i : i + 1], one.bits) for i, one in enumerate(keeps)], 1)


def not_forgotten(keeps: tuple[Keeps, ...], kv_of_head: tuple[int, ...], S: int, starts: Tensor | None) -> Mask | None:
    """For each head what it has not forgotten among S keys; None where nobody has forgotten anything."""
    if not any(one.tokens(S) < S for one in keeps):
        return None
    masks = [Streaming(one.first, one.last or S, starts) for one in keeps]
    return per_head([masks[key] for key in kv_of_head])
