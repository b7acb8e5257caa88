"""A cache by head: each key head keeps what it needs, all tokens or a few, at its own bits; nothing more is held.

Heads that keep alike are stored together and attended to in one call of the kernel, so that a layer is a handful of calls;
one, until the first of them forgets something.
"""

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.head_groups import CacheStepContext, HeadGroup, UnsplitHeadGroup, make_head_group
from headwise.heads.layer_cache import LayerCache
from headwise.kernels import Mask, per_head
from headwise.kernels.quantization import fake_quantize
from headwise.kernels.sink_window_masks import SinkWindowMask
from headwise.spec import AttentionSpec, CachePolicy


class PerHeadCache(LayerCache):
    """The cache of one layer whose key heads keep different things; `policies` tells what, one for each that is there.

    >>> spec = AttentionSpec(width=8, heads=2)
    >>> cache = PerHeadCache(spec, (CachePolicy(), CachePolicy(sink_tokens=1, window=2)))
    >>> k = v = torch.zeros(1, 2, 2, 4)  # two tokens
    >>> cache.append(k, v)
    >>> [group.kv_indices for group in cache.groups]  # so far nobody has forgotten anything
    [[0, 1]]
    >>> cache.append(k, v)
    >>> [group.kv_indices for group in cache.groups]
    [[0], [1]]
    """

    def __init__(self, spec: AttentionSpec, policies: tuple[CachePolicy, ...], size: int | None = None) -> None:
        if len(policies) != len(spec.kv_head_ids):
            raise HeadwiseError(
                f"the layer has {len(spec.kv_head_ids)} key heads; it was told what {len(policies)} of them keep."
            )
        self.policies = policies
        self.all_policies = policies  # of all key heads of the layer, where other processes hold some
        self._split_groups: list[HeadGroup] = []
        for policy in dict.fromkeys(policies):
            kv_indices = [i for i, kv_policy in enumerate(policies) if kv_policy == policy]
            heads = [head for head, key in enumerate(spec.kv_of_head) if key in kv_indices]
            kv_of_head = tuple(kv_indices.index(spec.kv_of_head[head]) for head in heads)
            self._split_groups.append(make_head_group(heads, kv_indices, kv_of_head, policy, spec.window, size))
        heads = [head for group in self._split_groups for head in group.head_indices]
        self._head_order = None if heads == sorted(heads) else torch.tensor(heads).argsort()  # of what all parts find
        self._batch: int | None = None
        self.groups = self._split_groups
        capacities = [policy.sink_tokens + policy.window for policy in policies if policy.window is not None]
        if (
            len(self._split_groups) > 1
            and capacities
            and spec.window is size is None
            and all(policy.bits == 32 for policy in policies)
        ):
            self.groups = [UnsplitHeadGroup(spec.kv_of_head, len(policies), min(capacities))]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: CacheStepContext) -> Tensor:
        """New tokens are kept, and their queries look at all that is: (B, H, T, d), (B, K, T, ·) twice → (B, H, T, e)."""
        self.check_batch_size(k)
        self._split_if_needed(k.shape[2], step.row_starts)
        if len(self.groups) == 1 and k.shape[2]:
            z = self.groups[0].attend(q, k, v, step)
        elif not k.shape[2] or not self.groups:
            z = q.new_zeros(*q.shape[:3], v.shape[-1])
        else:
            outputs = [
                group.attend(group.heads.select(q), group.kv_heads.select(k), group.kv_heads.select(v), step)
                for group in self.groups
            ]
            z = torch.cat(outputs, 1)
            if self._head_order is not None:
                self._head_order = self._head_order.to(z.device)
                z = z.index_select(1, self._head_order)
        self.length += k.shape[2]
        self._batch = len(k)
        return z

    def append(self, k: Tensor, v: Tensor) -> None:
        """Keep tokens that nobody asks about now: (B, K, T, ·) twice, T > 0, without padding."""
        self.check_batch_size(k)
        self._split_if_needed(k.shape[2])
        for group in self.groups:
            group.append(group.kv_heads.select(k), group.kv_heads.select(v), self.length)
        self.length += k.shape[2]
        self._batch = len(k)

    def _split_if_needed(self, T: int, row_starts: Tensor | None = None) -> None:
        """Before T more tokens come: whether a head will now forget one, or counts its first ones from another place."""
        unsplit = self.groups[0] if self.groups else None
        if isinstance(unsplit, UnsplitHeadGroup) and (self.length + T > unsplit.max_rows or row_starts is not None):
            unsplit.split_into(self._split_groups, self.length)
            self.groups = self._split_groups

    def check_batch_size(self, k: Tensor) -> None:
        """A cache serves one batch."""
        if self._batch not in (None, len(k)):
            raise HeadwiseError(
                f"the cache holds a batch of {self._batch}, got {len(k)}; start a new cache for a new batch."
            )

    def dense_kv(self, k: Tensor, v: Tensor, row_starts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, new ones too, at their places, zeros where one was forgotten: (B, K, S, ·) twice.

        For whoever looks at a call: it takes the memory that was saved.
        """
        S = self.length + k.shape[2]
        all_k, all_v = (x.new_zeros(*x.shape[:2], S, x.shape[3]) for x in (k, v))
        for group in self.groups:
            for dense, new, buffer in ((all_k, k, group.k), (all_v, v, group.v)):
                dense[:, group.kv_indices, self.length :] = buffer.fake_quantize(new[:, group.kv_indices])
                group.write_dense(dense, buffer, self.length, row_starts)
        return all_k, all_v

    def reorder(self, rows: Tensor) -> None:
        for group in self.groups:
            for buffer in (group.k, group.v):
                buffer.storage = tuple(x.index_select(0, rows) for x in buffer.storage)
        self._batch = None if self._batch is None else len(rows)

    @property
    def state(self) -> tuple:
        return self.length, self._batch, self.groups, [(group.k.storage, group.v.storage) for group in self.groups]

    @state.setter
    def state(self, snapshot: tuple) -> None:
        self.length, self._batch, self.groups, storages = snapshot
        for group, (k, v) in zip(self.groups, storages, strict=True):
            group.k.storage, group.v.storage = k, v

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for group in self.groups for buffer in (group.k, group.v))


def fake_quantize_kv(x: Tensor, policies: tuple[CachePolicy, ...]) -> Tensor:
    """Keys or values as they come back from a cache, each head's at its bits: (B, K, S, ·)"""
    if all(policy.bits == 32 for policy in policies):
        return x
    return torch.cat([fake_quantize(x[:, i : i + 1], policy.bits) for i, policy in enumerate(policies)], 1)


def streaming_mask(
    policies: tuple[CachePolicy, ...], kv_of_head: tuple[int, ...], S: int, row_starts: Tensor | None
) -> Mask | None:
    """For each head what it has not forgotten among S keys; None where nobody has forgotten anything."""
    if not any(policy.cached_tokens(S) < S for policy in policies):
        return None
    masks = [SinkWindowMask(policy.sink_tokens, policy.window or S, row_starts) for policy in policies]
    return per_head([masks[kv_index] for kv_index in kv_of_head])
