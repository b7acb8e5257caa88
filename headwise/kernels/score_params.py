"""Everything besides q, k and v that decides the scores, and the two steps every materialising kernel shares."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.kernels.bias import Bias
from headwise.kernels.masks import Mask


@dataclass(frozen=True, eq=False)
class Terms:
    """How scores are made: softcap·tanh(scale·q·k / softcap) + bias, where the mask allows; then softmax with a sink."""

    scale: float
    groups: tuple[int, ...]  # for each head, its key/value head
    mask: Mask | None = None
    bias: Bias | None = None
    softcap: float | None = None
    sink: Tensor | None = None  # (H,): a logit that takes part in the softmax and writes nothing
    dropout: float = 0.0

    def mask_block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor | None:
        """The mask of a block, (1 or B, 1 or H, 1 or R, C), or None where everything is visible."""
        if self.mask is None or self.mask.is_full(T, S):
            return None
        return self.mask.block(rows, cols, T, S, device)

    def bias_block(self, rows: range, cols: range, T: int, S: int) -> Tensor | None:
        """The bias of a block, broadcastable to (B, H, R, C)."""
        return None if self.bias is None else self.bias.block(rows, cols, T, S)

    def keys(self, rows: range, T: int, S: int) -> range:
        """The keys these queries can see at most."""
        return range(S) if self.mask is None else self.mask.keys(rows, T, S)

    def planes(self) -> int:
        """How many separate T×S planes the mask and the bias need together, at most B·H."""
        batch, heads = (1, 1) if self.mask is None else self.mask.planes()
        if self.bias is not None:
            own = self.bias.planes()
            batch, heads = max(batch, own[0]), max(heads, own[1])
        return batch * heads

    def may_be_empty(self, T: int, S: int) -> bool:
        """Whether a row might see nothing: by its mask, or by a bias of −inf. A sink is always there to be seen."""
        if self.sink is not None:
            return False
        masked = self.mask is not None and not self.mask.is_full(T, S) and self.mask.may_be_empty(T, S)
        return masked or (self.bias is not None and self.bias.hides)

    def for_heads(self, heads: range, shared: range) -> "Terms":
        """The same terms for a run of heads, whose key/value heads lie in `shared`."""
        groups = self.groups[heads.start : heads.stop]
        return self.pick(slice(heads.start, heads.stop), tuple(group - shared.start for group in groups))

    def pick(self, pick: slice | list[int], groups: tuple[int, ...]) -> "Terms":
        """The same terms for some heads, that read these key/value heads."""
        return Terms(
            self.scale,
            groups,
            mask=None if self.mask is None else self.mask.for_heads(pick),
            bias=None if self.bias is None else self.bias.for_heads(pick),
            softcap=self.softcap,
            sink=None if self.sink is None else self.sink[pick],
            dropout=self.dropout,
        )

    def tensors(self) -> list[Tensor]:
        """The tensors in here that might be learned: the sink, and those of the bias."""
        return [*([] if self.sink is None else [self.sink]), *([] if self.bias is None else self.bias.tensors())]

    def with_tensors(self, tensors: list[Tensor]) -> "Terms":
        """The same terms with other tensors, in the order of `tensors()`."""
        new = list(tensors)
        sink = None if self.sink is None else new.pop(0)
        return replace(self, sink=sink, bias=None if self.bias is None else self.bias.with_tensors(new))


def raw_scores(q: Tensor, k: Tensor, terms: Terms) -> Tensor:
    """Scaled, capped dot products, before bias and mask: (B, H, R, d), (B, H, C, d) → (B, H, R, C)."""
    scores = (q * terms.scale) @ k.mT
    return scores if terms.softcap is None else terms.softcap * torch.tanh(scores / terms.softcap)


def visible_scores(
    scores: Tensor, terms: Terms, rows: range, cols: range, T: int, S: int, some: slice = slice(None)
) -> Tensor:
    """Add the bias and put −inf where the mask forbids. (B, H, R, C), or of `some` of the batch."""
    bias = terms.bias_block(rows, cols, T, S)
    if bias is not None:
        scores = scores + _of_some(bias, some).to(scores.dtype)
    allowed = terms.mask_block(rows, cols, T, S, scores.device)
    return scores if allowed is None else scores.masked_fill(~_of_some(allowed, some), -torch.inf)


def _of_some(block: Tensor, some: slice) -> Tensor:
    return block[some] if block.ndim == 4 and len(block) > 1 else block  # else all of the batch share it


def weights(scores: Tensor, terms: Terms, may_be_empty: bool) -> Tensor:
    """Softmax over keys. A row of −inf alone gives zeros, with zero gradients; a sink takes its share. (B, H, R, C)"""
    if terms.sink is not None:
        sink = terms.sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    if not may_be_empty:
        return scores.softmax(-1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)  # (B, H, R, 1)
    return scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)


def spread(x: Tensor, groups: tuple[int, ...]) -> Tensor:
    """Give every head its own copy of its key/value head: (B, K, S, d) → (B, H, S, d)."""
    if groups == tuple(range(x.shape[1])):
        return x
    return x.index_select(1, torch.tensor(groups, device=x.device, dtype=torch.long))
