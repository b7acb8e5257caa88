"""A cache with its own tokens per KV head: all tokens, or sink tokens and a window, quantized or not.

KV heads with the same policy form a group, which is stored together and attended to in one kernel call. Until the first
eviction all KV heads are one group.
"""

from dataclasses import replace

import torch
from torch import Tensor

from headwise.cache.head_groups import HeadGroup, StreamingHeadGroup, UnsplitHeadGroup, make_head_group
from headwise.cache.layer_cache import AttendResult, CacheState, KernelInputs, LayerCache
from headwise.cache.sink_window_masks import SinkWindowMask
from headwise.errors import ArgumentError
from headwise.kernels import Mask, ScoreRequest, per_head
from headwise.kernels.quantization import fake_quantize
from headwise.spec import AttentionSpec, CachePolicy


class PerHeadCache(LayerCache):
    """Cache of one layer with a cache policy for each of its KV heads.

    Args:
        spec: The layer.
        policies: One policy per KV head of the layer.
        size: Number of tokens to allocate at once, which is also the limit. None means that memory grows.
        all_policies: Policies of all KV heads if other processes hold some of them. None means `policies`.

    >>> spec = AttentionSpec(width=8, heads=2)
    >>> cache = PerHeadCache(spec, (CachePolicy(), CachePolicy(sink_tokens=1, window=2)))
    >>> k = v = torch.zeros(1, 2, 2, 4)  # two tokens
    >>> cache.append(k, v)
    >>> [group.kv_indices for group in cache.groups]  # no head has evicted a token yet
    [[0, 1]]
    >>> cache.append(k, v)
    >>> [group.kv_indices for group in cache.groups]
    [[0], [1]]
    """

    needs_row_starts = True
    needs_left_padding = True

    def __init__(
        self,
        spec: AttentionSpec,
        policies: tuple[CachePolicy, ...],
        size: int | None = None,
        all_policies: tuple[CachePolicy, ...] | None = None,
    ) -> None:
        if len(policies) != len(spec.kv_head_ids):
            raise ArgumentError(
                f"policies: needs one policy per KV head. Got {len(policies)} policies for {len(spec.kv_head_ids)} KV heads."
            )
        self.policies = policies
        self.all_policies = policies if all_policies is None else all_policies
        self._split_groups: list[HeadGroup] = []
        for policy in dict.fromkeys(policies):
            kv_indices = [i for i, kv_policy in enumerate(policies) if kv_policy == policy]
            heads = [head for head, key in enumerate(spec.kv_of_head) if key in kv_indices]
            kv_of_head = tuple(kv_indices.index(spec.kv_of_head[head]) for head in heads)
            self._split_groups.append(make_head_group(heads, kv_indices, kv_of_head, policy, spec.window, size))
        heads = [head for group in self._split_groups for head in group.head_indices]
        self._head_order = None if heads == sorted(heads) else torch.tensor(heads).argsort()  # of the groups' outputs
        self.batch: int | None = None
        self.groups = self._split_groups
        capacities = [policy.sink_tokens + policy.window for policy in policies if policy.window is not None]
        if (
            len(self._split_groups) > 1
            and capacities
            and spec.window is size is None
            and all(policy.bits == 32 for policy in policies)
        ):
            self.groups = [UnsplitHeadGroup(spec.kv_of_head, len(policies), min(capacities))]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: ScoreRequest) -> AttendResult:
        self._check_batch(k)
        k, v = k.detach() if k.requires_grad else k, v.detach() if v.requires_grad else v
        request = request.for_keys(self.length + k.shape[2], ())
        layer = request.required_layer
        params = layer.score_params(q, k, v, request)
        # Listeners see all keys and values at their positions, which must be read before tokens are evicted.
        dense_kv = self.dense_kv(k, v, request.row_starts) if request.has_listeners else (k, v)

        def compute_inputs() -> KernelInputs:
            masked = replace(request, policies=self.all_policies)
            return *dense_kv, layer.score_params(q, k, v, masked)

        self._split_if_needed(k.shape[2], request.row_starts)
        if len(self.groups) == 1 and k.shape[2]:
            z = self.groups[0].attend(q, k, v, params, request)
        elif not k.shape[2] or not self.groups:
            z = q.new_zeros(*q.shape[:3], v.shape[-1])
        else:
            outputs = [
                group.attend(group.heads.select(q), group.kv_heads.select(k), group.kv_heads.select(v), params, request)
                for group in self.groups
            ]
            z = torch.cat(outputs, 1)
            if self._head_order is not None:
                self._head_order = self._head_order.to(z.device)
                z = z.index_select(1, self._head_order)
        self.length += k.shape[2]
        self.batch = len(k)
        return AttendResult(z, compute_inputs)

    def append(self, k: Tensor, v: Tensor, row_starts: Tensor | None = None) -> None:
        """Store tokens without attending: (B, K, T, ·) twice, T > 0. `row_starts`, (B,), are the first real tokens."""
        self._check_batch(k)
        self._split_if_needed(k.shape[2], row_starts)
        for group in self.groups:
            group.append(group.kv_heads.select(k), group.kv_heads.select(v), self.length, row_starts)
        self.length += k.shape[2]
        self.batch = len(k)

    def remove_last(self, count: int) -> None:
        """Remove the last tokens. Raise if a KV head has evicted a token, because evicted tokens cannot be restored."""
        if self.has_evicted:
            raise ArgumentError(
                f"cache: {count} tokens cannot be removed, because KV heads have evicted earlier tokens, which would be "
                f"visible again. Create a new cache."
            )
        self.length -= count  # the rows of removed tokens are overwritten by the next ones

    @property
    def has_evicted(self) -> bool:
        """True if a KV head has evicted a token."""
        return any(group.capacity < self.length for group in self.groups if isinstance(group, StreamingHeadGroup))

    def _split_if_needed(self, T: int, row_starts: Tensor | None = None) -> None:
        """Split the groups if one of the next T tokens evicts another, or if rows start at different tokens."""
        unsplit = self.groups[0] if self.groups else None
        if isinstance(unsplit, UnsplitHeadGroup) and (self.length + T > unsplit.max_rows or row_starts is not None):
            unsplit.split_into(self._split_groups, self.length)
            self.groups = self._split_groups

    def _check_batch(self, k: Tensor) -> None:
        if self.batch not in (None, len(k)):
            raise ArgumentError(
                f"cache: it contains a batch of {self.batch}. Got a batch of {len(k)}. Create a new cache for a new batch."
            )

    def dense_kv(self, k: Tensor, v: Tensor, row_starts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return keys and values of all tokens, the new ones too, with zeros for evicted tokens: (B, K, S, ·) twice."""
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
        self.batch = None if self.batch is None else len(rows)

    def snapshot(self) -> CacheState:
        storages = [(group.k.storage, group.v.storage) for group in self.groups]
        return CacheState(self.length, (self.batch, self.groups, storages))

    def restore(self, state: CacheState) -> None:
        self.length, (self.batch, self.groups, storages) = state.length, state.contents
        for group, (k, v) in zip(self.groups, storages, strict=True):
            group.k.storage, group.v.storage = k, v

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for group in self.groups for buffer in (group.k, group.v))


def fake_quantize_kv(x: Tensor, policies: tuple[CachePolicy, ...]) -> Tensor:
    """Quantize and dequantize the keys or values of each KV head as a cache with these policies does: (B, K, S, ·)."""
    if all(policy.bits == 32 for policy in policies):
        return x
    return torch.cat([fake_quantize(x[:, i : i + 1], policy.bits) for i, policy in enumerate(policies)], 1)


def streaming_mask(
    policies: tuple[CachePolicy, ...], kv_of_head: tuple[int, ...], S: int, row_starts: Tensor | None
) -> Mask | None:
    """Return the mask of tokens that each head has not evicted among S keys, or None if no head has evicted one."""
    if not any(policy.cached_tokens(S) < S for policy in policies):
        return None
    masks = [SinkWindowMask(policy.sink_tokens, policy.window or S, row_starts) for policy in policies]
    return per_head([masks[kv_index] for kv_index in kv_of_head])
