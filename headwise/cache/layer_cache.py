"""Caches of one attention layer, and `NoCache` for a layer without one. All have one operation, `attend`.

`PerHeadCache`, whose KV heads keep different tokens, is in `headwise.cache.per_head_cache`. Caches hold no autograd graph.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.kernels import ScoreParams, ScoreRequest, run_kernel, window
from headwise.kernels.masks import and_masks

KernelInputs = tuple[Tensor, Tensor, ScoreParams]  # keys (B, K, S, d), values (B, K, S, e), score params


@dataclass(eq=False)
class AttendResult:
    """Result of one attention call: z, (B, H, T, e), and, computed on access, the inputs that listeners see."""

    z: Tensor
    compute_inputs: Callable[[], KernelInputs]
    _inputs: KernelInputs | None = None

    @property
    def keys(self) -> Tensor:
        """Keys of all tokens, (B, K, S, d)."""
        return self._computed_inputs()[0]

    @property
    def values(self) -> Tensor:
        """Values of all tokens, (B, K, S, e)."""
        return self._computed_inputs()[1]

    @property
    def params(self) -> ScoreParams:
        """Score params of the call over these keys."""
        return self._computed_inputs()[2]

    def _computed_inputs(self) -> KernelInputs:
        # Not a cached_property: its lock in Python 3.11 would break the graph of torch.compile.
        if self._inputs is None:
            self._inputs = self.compute_inputs()
        return self._inputs


@dataclass(eq=False)
class CacheState:
    """Contents of a layer cache before a step: `restore` of the same cache takes them back."""

    length: int
    contents: tuple[Any, ...]


class LayerCache(ABC):
    """Keys and values of one attention layer. Caches hold no autograd graph.

    Attributes:
        length: Number of tokens seen, evicted tokens included.
        window: Number of last tokens that a query sees, itself included; None: all.
        needs_row_starts: True if the cache counts tokens from the first real token of each row.
        needs_left_padding: True if the cache counts positions, so that padding must not follow a token.
    """

    length = 0
    window: int | None = None
    needs_row_starts = False
    needs_left_padding = False

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: ScoreRequest) -> AttendResult:
        """Append the keys and values of new tokens, then attend to all that are visible.

        Args:
            q: (B, H, T, d), after positions.
            k: (B, K, T, d), after positions.
            v: (B, K, T, e).
            request: Mask, bias and layer of the call.
        """

    def attend_one(self, q: Tensor, k: Tensor, v: Tensor, request: ScoreRequest) -> Tensor:
        """Append one new token and attend to all visible keys, as `attend` does, without inputs for listeners.

        Args:
            q: (B, H, 1, d), after positions.
            k: (B, K, 1, d), after positions.
            v: (B, K, 1, e).
            request: Request of the layer from `MultiHeadAttention.single_query_request`, with a kernel.

        Returns:
            z, (B, H, 1, e).
        """
        return self.attend(q, k, v, request).z

    @abstractmethod
    def snapshot(self) -> CacheState:
        """Return the contents before a step, for `restore` if the step fails."""

    @abstractmethod
    def restore(self, state: CacheState) -> None:
        """Return to the contents of a snapshot."""

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Select and reorder batch rows."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held."""

    def visible_keys(self, T: int) -> int:
        """Return the number of keys that a mask covers in a step of T tokens."""
        return self.length + T

    def stored_source_kv(self, source: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the keys and values of a source for cross-attention, or None if they are not computed yet."""
        raise ArgumentError(
            f"cache: cross-attention needs a CrossAttentionCache. Got {type(self).__name__}. Use model.cache()."
        )


class NoCache(LayerCache):
    """A null object: attends to the keys and values of the call and stores nothing."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: ScoreRequest) -> AttendResult:
        return attend_to(q, k, v, request)

    def snapshot(self) -> CacheState:
        return CacheState(0, ())

    def restore(self, state: CacheState) -> None:
        pass

    def reorder(self, rows: Tensor) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return 0

    def stored_source_kv(self, source: Tensor) -> tuple[Tensor, Tensor] | None:
        return None


NO_CACHE = NoCache()


class SharedKVCache(LayerCache):
    """All KV heads of the layer keep the same tokens, in one tensor for keys and one for values."""

    def __init__(self) -> None:
        self._k: Tensor | None = None  # (B, K, capacity, d)
        self._v: Tensor | None = None  # (B, K, capacity, e)

    @abstractmethod
    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens, (B, K, T, ·), and return all that are visible, (B, K, S, ·)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: ScoreRequest) -> AttendResult:
        if request.required_layer.spec.cache:
            raise ArgumentError(
                f"cache: the KV heads of this layer have different cache policies, which {type(self).__name__} does not "
                f"support. Use a PerHeadCache."
            )
        return attend_to(q, *self.append(k, v), request)

    def attend_one(self, q: Tensor, k: Tensor, v: Tensor, request: ScoreRequest) -> Tensor:
        assert request.kernel is not None
        return request.kernel(q, *self.append(k, v))

    def reorder(self, rows: Tensor) -> None:
        if self._k is not None and self._v is not None:
            self._k, self._v = self._k.index_select(0, rows), self._v.index_select(0, rows)

    def snapshot(self) -> CacheState:
        return CacheState(self.length, (self._k, self._v))

    def restore(self, state: CacheState) -> None:
        self.length, (self._k, self._v) = state.length, state.contents

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self._k, self._v) if t is not None)

    def _reserve(self, k: Tensor, v: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Allocate memory for this number of tokens and keep those that are stored."""
        self._check_batch(k)
        if self._k is None or self._v is None:
            self._k, self._v = (x.new_empty(*x.shape[:2], capacity, x.shape[3]) for x in (k.detach(), v.detach()))
        elif self._k.shape[2] < capacity:
            missing = capacity - self._k.shape[2]
            self._k, self._v = (torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (self._k, self._v))
        return self._k, self._v

    def _check_batch(self, k: Tensor) -> None:
        if self._k is not None and self._k.shape[0] != k.shape[0]:
            raise ArgumentError(
                f"cache: it contains a batch of {self._k.shape[0]}. Got a batch of {k.shape[0]}. Create a new cache "
                f"for a new batch."
            )

    def _write(self, k: Tensor, v: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Write new tokens after the stored ones and return all of them."""
        stored_k, stored_v = self._reserve(k, v, capacity)
        start, T = self.length, k.shape[2]
        self.length = length = start + T
        stored_k.narrow(2, start, T).copy_(k.detach() if k.requires_grad else k)
        stored_v.narrow(2, start, T).copy_(v.detach() if v.requires_grad else v)
        return stored_k.narrow(2, 0, length), stored_v.narrow(2, 0, length)


class DynamicCache(SharedKVCache):
    """Keeps all tokens. Its memory doubles when it is full, so that appending a token takes amortized constant time."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        needed = self.length + k.shape[2]
        capacity = 0 if self._k is None else self._k.shape[2]
        return self._write(k, v, capacity if needed <= capacity else max(needed, 2 * capacity, 64))


class StaticCache(SharedKVCache):
    """Keeps up to `size` tokens in memory that is allocated once; one more raises an error."""

    def __init__(self, size: int) -> None:
        super().__init__()
        if size < 1:
            raise ArgumentError(f"size={size}: a static cache needs room for at least 1 token.")
        self.size = size

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.length + k.shape[2] > self.size:
            raise ArgumentError(
                f"cache: it is full. Its size is {self.size} tokens; it contains {self.length}, and {k.shape[2]} more do not "
                f"fit. Use a larger size, or a dynamic or sliding cache."
            )
        return self._write(k, v, self.size)


class SlidingWindowCache(SharedKVCache):
    """Keeps the tokens that a window of `size` can still see: for each new token, the `size` − 1 before it."""

    needs_left_padding = True

    def __init__(self, size: int) -> None:
        super().__init__()
        if size < 1:
            raise ArgumentError(f"size={size}: a sliding cache needs room for at least 1 token.")
        self.size = self.window = size

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: ScoreRequest) -> AttendResult:
        # The window hides tokens of a long prompt that would have been evicted if tokens had come one at a time.
        return super().attend(q, k, v, replace(request, mask=and_masks(request.mask, window(self.size))))

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self._check_batch(k)
        k, v = k.detach(), v.detach()
        self.length += k.shape[2]
        if self._k is not None and self._v is not None:
            k, v = torch.cat((self._k, k), 2), torch.cat((self._v, v), 2)
        start = max(0, k.shape[2] - (self.size - 1))  # the next token sees itself and size − 1 more
        self._k, self._v = k[:, :, start:].clone(), v[:, :, start:].clone()
        return k, v

    def visible_keys(self, T: int) -> int:
        return min(self.length, self.size - 1) + T


class CrossAttentionCache(SharedKVCache):
    """Keys and values of the source of cross-attention, computed once and used in every step."""

    source: Tensor | None = None  # the tensor that the keys were computed from

    def attend(self, q: Tensor, k: Tensor, v: Tensor, request: ScoreRequest) -> AttendResult:
        if self.source is None or (self._k is not None and self._k is not k):  # keys of self-attention
            raise ArgumentError(
                "cache: a CrossAttentionCache supports only cross-attention. Use a DynamicCache, StaticCache or "
                "SlidingWindowCache for self-attention."
            )
        return attend_to(q, *(self.kv or self.append(k, v)), request)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.length = k.shape[2]
        self._k, self._v = k.detach(), v.detach()
        return self._k, self._v

    @property
    def kv(self) -> tuple[Tensor, Tensor] | None:
        """The keys and values, or None if they are not computed yet."""
        return None if self._k is None or self._v is None else (self._k, self._v)

    def stored_source_kv(self, source: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.kv is not None and self.source is not source:
            raise ArgumentError(
                "cache: it contains the keys of another source. Create a new CrossAttentionCache for a new source."
            )
        self.source = source
        return self.kv


def attend_to(q: Tensor, k: Tensor, v: Tensor, request: ScoreRequest) -> AttendResult:
    """Run the kernel of the layer over all these keys and values."""
    layer = request.required_layer
    params = layer.score_params(q, k, v, request)
    return AttendResult(run_kernel(q, k, v, params, layer.backend), lambda: (k, v, params))
