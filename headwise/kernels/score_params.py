"""Score params of kernels (mask, bias, scale, sink), score requests of calls, and steps that kernels share."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from headwise.kernels.masks import Mask
from headwise.kernels.score_bias import Bias
from headwise.spec import AttentionSpec, CachePolicy


@dataclass(frozen=True, eq=False)
class ScoreParams:
    """Parameters of the scores softcap·tanh(scale·q·k / softcap) + bias of visible keys, and of their softmax.

    Attributes:
        scale: Factor of the dot products.
        kv_of_head: Index of the KV head of each head.
        mask: Keys that each query may attend to. None means all keys.
        bias: Added to the scores.
        softcap: Cap of the scores. None means no cap.
        sink: Logit per head, (H,), that takes part in the softmax and adds nothing to the output.
        dropout: Dropout rate of the attention weights.
    """

    scale: float
    kv_of_head: tuple[int, ...]
    mask: Mask | None = None
    bias: Bias | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    dropout: float = 0.0

    def mask_block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor | None:
        """Return the mask of a block, (1 or B, 1 or H, 1 or R, C), or None if all keys are visible."""
        if self.mask is None or self.mask.is_full(T, S):
            return None
        return self.mask.block(rows, cols, T, S, device)

    def bias_block(self, rows: range, cols: range, T: int, S: int) -> Tensor | None:
        """Return the bias of a block, broadcastable to (B, H, R, C), or None."""
        return None if self.bias is None else self.bias.block(rows, cols, T, S)

    def key_range(self, rows: range, T: int, S: int) -> range:
        """Return a range that contains all keys visible to these queries."""
        return range(S) if self.mask is None else self.mask.key_range(rows, T, S)

    def num_mask_bias_planes(self) -> int:
        """Return the number of different T×S planes of mask and bias, at most B·H."""
        batch, heads = (1, 1) if self.mask is None else self.mask.leading_shape()
        if self.bias is not None:
            bias_shape = self.bias.leading_shape()
            batch, heads = max(batch, bias_shape[0]), max(heads, bias_shape[1])
        return batch * heads

    def may_have_empty_rows(self, T: int, S: int) -> bool:
        """Return True if a query may have no visible key, because of its mask or a bias of −inf. False with a sink."""
        if self.sink is not None:
            return False
        mask_may_be_empty = (
            self.mask is not None and not self.mask.is_full(T, S) and self.mask.may_have_empty_rows(T, S)
        )
        return mask_may_be_empty or (self.bias is not None and self.bias.may_hide_keys)

    def for_heads(self, heads: range, kv_range: range) -> "ScoreParams":
        """Return the params of consecutive heads whose KV heads are in `kv_range`."""
        kv_of_head = self.kv_of_head[heads.start : heads.stop]
        return self.select_heads(
            slice(heads.start, heads.stop), tuple(kv_index - kv_range.start for kv_index in kv_of_head)
        )

    def select_heads(self, index: slice | list[int], kv_of_head: tuple[int, ...]) -> "ScoreParams":
        """Return the params of some heads with these KV heads."""
        return ScoreParams(
            self.scale,
            kv_of_head,
            mask=None if self.mask is None else self.mask.for_heads(index),
            bias=None if self.bias is None else self.bias.for_heads(index),
            softcap=self.softcap,
            sink=None if self.sink is None else self.sink[index],
            dropout=self.dropout,
        )

    def learnable_tensors(self) -> list[Tensor]:
        """Return the tensors that can be learned: the sink and the tensors of the bias."""
        return [*([] if self.sink is None else [self.sink]), *([] if self.bias is None else self.bias.tensors())]

    def with_learnable_tensors(self, tensors: list[Tensor]) -> "ScoreParams":
        """Return a copy with other tensors, in the order of `learnable_tensors()`."""
        remaining = list(tensors)
        sink = None if self.sink is None else remaining.pop(0)
        return replace(self, sink=sink, bias=None if self.bias is None else self.bias.with_tensors(remaining))


class ScoringLayerProtocol(Protocol):
    """An attention layer as a cache sees it: it turns a request into the score params of its heads."""

    spec: AttentionSpec
    backend: str

    def score_params(self, q: Tensor, k: Tensor, v: Tensor, request: "ScoreRequest") -> ScoreParams:
        """Build the score params of a call with these tensors."""
        ...


@dataclass(eq=False)
class ScoreRequest:
    """Mask, bias and cache settings of one attention call. The layer builds the kernel's `ScoreParams` from it.

    Attributes:
        mask: Keys that each query may attend to. None means all keys.
        bias: Added to the scores. None means no bias.
        policies: Cache policies of all KV heads of the layer if evicted tokens are masked; () if all tokens are visible.
        row_starts: Index of the first real token of each left-padded row, (B,). None means 0 in every row.
        num_keys: Number of keys if k and v contain only the new tokens. None means the number of keys in k.
        layer: The layer that attends. None in a request that several layers share.
        has_listeners: True if a listener will read the keys and values of this call.
        kernel: Kernel with the score params of a single query that sees all keys, if they do not depend on the call.
        memo: Values derived from this request. The layers of a model share it for one step.
    """

    mask: Mask | None = None
    bias: Bias | Tensor | None = None
    policies: tuple[CachePolicy, ...] = ()
    row_starts: Tensor | None = None
    num_keys: int | None = None
    layer: ScoringLayerProtocol | None = None
    has_listeners: bool = False
    kernel: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def required_layer(self) -> ScoringLayerProtocol:
        """The layer that attends."""
        assert self.layer is not None, "a shared request belongs to no layer"
        return self.layer

    def for_layer(
        self, layer: ScoringLayerProtocol, policies: tuple[CachePolicy, ...], *, has_listeners: bool
    ) -> "ScoreRequest":
        """Return the request of one layer. It shares the memo."""
        return ScoreRequest(
            self.mask, self.bias, policies, self.row_starts, self.num_keys, layer, has_listeners, None, self.memo
        )

    def for_keys(self, num_keys: int, policies: tuple[CachePolicy, ...]) -> "ScoreRequest":
        """Return the request for this number of keys, some of which these policies evict. It shares the memo."""
        return ScoreRequest(
            self.mask, self.bias, policies, self.row_starts, num_keys, self.layer, self.has_listeners, None, self.memo
        )

    def memoized(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return a derived value, computed once per step."""
        if key not in self.memo:
            self.memo[key] = compute()
        return self.memo[key]


def raw_scores(q: Tensor, k: Tensor, params: ScoreParams) -> Tensor:
    """Return scaled, capped dot products before bias and mask: (B, H, R, d), (B, H, C, d) → (B, H, R, C)."""
    scores = (q * params.scale) @ k.mT
    return scores if params.softcap is None else params.softcap * torch.tanh(scores / params.softcap)


def add_bias_and_mask(
    scores: Tensor,
    params: ScoreParams,
    rows: range,
    cols: range,
    T: int,
    S: int,
    batch_slice: slice = slice(None),
    *,
    in_place: bool = False,
) -> Tensor:
    """Add the bias and set hidden keys to −inf, for the examples of `batch_slice`: (B, H, R, C)."""
    bias = params.bias_block(rows, cols, T, S)
    if bias is not None:
        scores = scores + _slice_batch(bias, batch_slice).to(scores.dtype)
    allowed = params.mask_block(rows, cols, T, S, scores.device)
    if allowed is None:
        return scores
    fill = scores.masked_fill_ if in_place else scores.masked_fill
    return fill(~_slice_batch(allowed, batch_slice), -torch.inf)


def _slice_batch(block: Tensor, batch_slice: slice) -> Tensor:
    return block[batch_slice] if block.ndim == 4 and len(block) > 1 else block  # otherwise all examples share it


def softmax_weights(scores: Tensor, params: ScoreParams, *, may_have_empty_rows: bool) -> Tensor:
    """Return the softmax over keys and the sink, (B, H, R, C). A row of only −inf gives zeros with zero gradients."""
    if params.sink is not None:
        sink = params.sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    if not may_have_empty_rows:
        return scores.softmax(-1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)  # (B, H, R, 1)
    return scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)


def repeat_kv(x: Tensor, kv_of_head: tuple[int, ...]) -> Tensor:
    """Repeat KV heads so that every head has its own copy: (B, K, S, d) → (B, H, S, d)."""
    if kv_of_head == tuple(range(x.shape[1])):
        return x
    return x.index_select(1, torch.tensor(kv_of_head, device=x.device, dtype=torch.long))
