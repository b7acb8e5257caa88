"""Statistics of all attention rows of one call. They are filled block by block and passed to the metrics at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from headwise.analysis.metrics.attention_call import AttentionCallContext, BlockListener
from headwise.analysis.metrics.batch_context import NORM, WINDOW, BatchContext, FarRepeatPairs
from headwise.analysis.metrics.row_blocks import (
    RowBlock,
    VisibilityCache,
    count_sampled_rows,
    iter_row_blocks,
    visible_blocks,
)
from headwise.heads.hook_point import AttentionCall
from headwise.kernels.score_params import ScoreParams

DISTANCE_EDGES = tuple(WINDOW << i for i in range(11))


@dataclass(frozen=True, eq=False)
class RowStats:
    """Statistics of the n attention rows of one call. `Metric.compute` gets this object.

    Sums are sums of the unnormalized weights e, as in `RowBlock`; `normalize` divides them by the row total. Features are
    selected by name: `feature_fraction("digit")` is the weight on digits.

    Attributes:
        attention_call: The attention call.
        batch_context: The batch, with its token features and key targets.
        output_gram: W_O W_Oᵀ, (H, e, e).
        value_output_norms: Norm of the value output ‖v W_O‖ of each key, (B, H, S).
        positions: Position of each query among the keys, (n,).
        counted: Whether each row is a token, not padding, (B, n).
        sees_future_keys: Whether rows can see later keys.
        visible_keys: Number of visible keys of each row, (1 or B, 1 or H, n).
        visible_features: Sum of each token feature over the visible keys, (B, 1 or H, n, c).
        sees_first: Whether the first token is visible, (B, 1 or H, n). A sliding window may hide it.
        sees: For each key target, whether the row has a target and sees it, (B, 1 or H, n).
        total: Σ e, plus the attention sink, (B, H, n).
        energy: Σ e · (score − largest score), (B, H, n).
        feature_sums: Σ e · feature for each feature of the layout, (B, H, n, f).
        square: Σ e², (B, H, n).
        near: e at each offset of the window, farthest back first, (B, H, n, o).
        distance_ahead: Σ e · (j − i) over the later keys, (B, H, n), or None if rows see none.
        target_weights: e at each key target, (B, H, n).
        max_non_special: Largest e at a key that is not a special token, (B, H, n).
        far_bins: Σ e in distance bins outside the window, by powers of two, (B, H, n, bins).
        remainder_bin: Bin of the weight that is in no other bin and not in the window, (n,). -1 if there is none.
        repeat_counts: Number of keys outside the window that repeat the token of the query or follow such a key, (B, 1, n).
        repeat_weights: e on these keys, and e times the norm of their value outputs, (2, B, H, n).
        max_ties: Number of keys with the largest e, (B, H, n). None if no metric needs hits.
        value_weighted_max: Largest e times norm of the value output, and number of keys with it, (2, B, H, n). None if no
            metric needs hits.
    """

    NORM: ClassVar[str] = NORM

    attention_call: AttentionCall
    batch_context: BatchContext
    output_gram: Tensor
    value_output_norms: Tensor
    positions: Tensor
    counted: Tensor
    sees_future_keys: bool
    visible_keys: Tensor
    visible_features: Tensor
    sees_first: Tensor
    sees: dict[str, Tensor]
    total: Tensor
    energy: Tensor
    feature_sums: Tensor
    square: Tensor
    near: Tensor
    distance_ahead: Tensor | None
    target_weights: dict[str, Tensor]
    max_non_special: Tensor
    far_bins: Tensor
    remainder_bin: Tensor
    repeat_counts: Tensor
    repeat_weights: Tensor
    max_ties: Tensor | None
    value_weighted_max: Tensor | None

    def normalize(self, summed: Tensor) -> Tensor:
        """Divide sums of e by the row total, (B, H, n, …). The result is 0 for padding and rows without visible keys."""
        return summed * self._inverse.reshape(*self._inverse.shape, *[1] * (summed.ndim - self._inverse.ndim))

    def feature_sum(self, feature: str) -> Tensor:
        """Return Σ e · feature, (B, H, n)."""
        return self.feature_sums[..., self.batch_context.layout.feature_index[feature]]

    def feature_fraction(self, feature: str) -> Tensor:
        """Return Σ p · feature, the attention weight on a feature, (B, H, n)."""
        return self._fractions[..., self.batch_context.layout.feature_index[feature]]

    def value_weighted_sum(self, feature: str) -> Tensor:
        """Return Σ p · feature · norm of the value output, (B, H, n), for a token feature."""
        return self._fractions[..., self.batch_context.layout.value_weighted_column_by_feature[feature]]

    def visible_feature_sum(self, feature: str) -> Tensor:
        """Return the sum of a token feature over the visible keys, (B, 1 or H, n)."""
        return self.visible_features[..., self.batch_context.layout.feature_names.index(feature)]

    def has_target(self, key_target: str) -> Tensor:
        """Return whether each row has a target, visible or not, (B, 1, n)."""
        return (self.batch_context.key_targets[key_target][:, self.positions] >= 0)[:, None]

    def weights_and_value_shares_at(self, key_target: str) -> tuple[Tensor, Tensor]:
        """Return the weight on a key target and its value-weighted share, (B, H, n) each."""
        e = self.target_weights[key_target]
        return self.normalize(e), e * self._value_norms_at(key_target) * self.inverse_value_weighted_total

    @cached_property
    def target_hits(self) -> dict[str, tuple[Tensor, Tensor]]:
        """For each key target, whether it has the largest weight and the largest value-weighted weight, (B, H, n) each.
        Ties are divided equally."""
        assert self.max_ties is not None
        assert self.value_weighted_max is not None
        max_weighted, tied = self.value_weighted_max
        return {
            name: (
                e.floor() / self.max_ties.clamp(min=1),
                (e * self._value_norms_at(name) >= max_weighted) * (max_weighted > 0) / tied.clamp(min=1),
            )
            for name, e in self.target_weights.items()
        }

    @cached_property
    def inverse_value_weighted_total(self) -> Tensor:
        """1 / Σ e · norm of the value output, (B, H, n). 0 for padding."""
        return self.counted[:, None] / self.feature_sum(NORM).clamp(min=1e-30)

    @cached_property
    def _inverse(self) -> Tensor:
        return torch.where(self.counted[:, None] & (self.total > 0), 1 / self.total, 0.0)

    @cached_property
    def _fractions(self) -> Tensor:
        return self.normalize(self.feature_sums)

    def _value_norms_at(self, key_target: str) -> Tensor:
        target = self.batch_context.key_targets[key_target][:, self.positions].clamp(min=0)[:, None]  # (B, 1, n)
        return self.value_output_norms.gather(-1, target.expand(-1, self.value_output_norms.shape[1], -1))


def blockwise_row_stats(
    call: AttentionCallContext, row_stride: int = 1, listeners: Sequence[BlockListener] = ()
) -> RowStats:
    """Compute the statistics of a call block by block.

    Args:
        call: The attention call.
        row_stride: Read every block (1), or one block of rows out of `row_stride`.
        listeners: Functions that are called with each block.
    """
    attention_call, batch_context, norms, key_features = (
        call.attention_call,
        call.batch_context,
        call.value_output_norms,
        call.key_features,
    )
    (B, H, T, _), S, device = attention_call.q.shape, attention_call.k.shape[2], key_features.device
    n, ahead = (
        count_sampled_rows(T, row_stride),
        any_future_keys_visible(attention_call.params, T, S, key_features.device, batch_context.visibility),
    )
    new, hits = key_features.new_zeros, any(key_target.hits for key_target in batch_context.layout.key_targets)
    total, energy, square, top = (new(B, H, n) for _ in range(4))
    features, far, repeated = new(B, H, n, key_features.shape[-1]), new(B, H, n, len(DISTANCE_EDGES)), new(2, B, H, n)
    near, last = new(B, H, n, 2 * WINDOW - 1 if ahead else WINDOW), torch.full((n,), -1, device=device)
    beyond = new(B, H, n) if ahead else None
    target_weights = {name: new(B, H, n) for name in batch_context.key_targets}
    max_ties, value_weighted_max = (new(B, H, n), new(2, B, H, n)) if hits else (None, None)
    visibility, repeats = batch_context.row_visibility(attention_call.params, T, S, row_stride), new(B, 1, n)
    slot, pairs = slice(0, 0), None
    for block in iter_row_blocks(
        attention_call, key_features, row_stride, batch_context.visibility, batch_context.non_special_column_range
    ):
        heads = block.heads
        if heads.start == 0:
            slot = slice(slot.stop, slot.stop + len(block.rows))
            pairs = batch_context.far_repeat_pairs(block.visible)
            repeats[..., slot] = pairs.repeat_counts.to(repeats)
        for into, block_values in ((total, block.total), (energy, block.energy), (features, block.feature_sums)):
            into[:, heads, slot] = block_values
        torch.linalg.vector_norm(block.e, dim=-1, out=square[:, heads, slot])
        near[:, heads, slot] = block.unnormalized_weights_at_offsets(1 - WINDOW if ahead else 0, WINDOW)
        top[:, heads, slot] = (
            block.largest
            if batch_context.non_special_column_range is not None
            else _max_non_special(block, batch_context.non_special_mask)
        )
        _add_distance_bins(block, ahead, far[:, heads, slot], last[slot])
        _add_repeated(block, pairs, norms, repeated[:, :, heads, slot])
        if beyond is not None:
            _add_distance_ahead(block, beyond[:, heads, slot])
        for name, into in target_weights.items():
            into[:, heads, slot] = _at_target(block, batch_context.key_targets[name][:, visibility["positions"][slot]])
        if max_ties is not None and value_weighted_max is not None:
            max_ties[:, heads, slot] = (block.e == 1).sum(-1).to(max_ties)
            _add_max_value_weighted(block, norms, value_weighted_max[:, :, heads, slot])
        for listener in listeners:
            listener(block)
    return RowStats(
        attention_call, batch_context, call.output_gram, norms, **visibility, sees_future_keys=ahead, total=total,
        energy=energy,
        feature_sums=features, square=square.square_(), near=near, distance_ahead=beyond, target_weights=target_weights,
        max_non_special=top, far_bins=far, remainder_bin=last, repeat_counts=repeats, repeat_weights=repeated,
        max_ties=max_ties, value_weighted_max=value_weighted_max,
    )  # fmt: skip


def any_future_keys_visible(params: ScoreParams, T: int, S: int, device: torch.device, cache: VisibilityCache) -> bool:
    """Return whether any row sees a later key. For causal masks the answer follows from the key ranges alone."""
    past = S - T
    if all(params.key_range(range(i, i + 1), T, S).stop <= i + past + 1 for i in {0, T // 2}):
        return False
    return any(visible.sees_future_keys for visible in visible_blocks(params, T, S, device, cache=cache))


def _max_non_special(block: RowBlock, ordinary: Tensor) -> Tensor:
    """Return the largest e at an ordinary key, (B, h, R). `ordinary` (B, S) marks keys that are not special tokens."""
    mask = ordinary[:, None, None, block.cols.start : block.cols.stop].to(block.e)
    return torch.mul(block.e, mask, out=block.scratch).amax(-1)


def _add_distance_bins(block: RowBlock, ahead: bool, out: Tensor, last: Tensor) -> None:
    """Sum e in distance bins outside the window, by powers of two, into `out` (B, h, R, bins).

    The last bin of a causal row is not summed. It is the remainder of the other bins and the window, and `last` (R,) is set
    to its index.
    """
    back = block.rows.stop + block.past - block.cols.start  # largest distance back in this block
    after = block.cols.stop - block.rows.start - block.past  # largest distance ahead
    common_back = back - len(block.rows)  # distance back that every row has
    for bin_index, low in enumerate(DISTANCE_EDGES):
        if low >= back and (low >= after or not ahead):
            return
        if not ahead and 2 * low > common_back and back <= 2 * low:
            last[:] = bin_index
            return
        if low < back:
            torch.sum(block.unnormalized_weights_at_offsets(low, min(2 * low, back + 1)), -1, out=out[..., bin_index])
        if low < after and ahead:
            out[..., bin_index] += block.unnormalized_weights_at_offsets(1 - min(2 * low, after + 1), 1 - low).sum(-1)


def _add_distance_ahead(block: RowBlock, out: Tensor) -> None:
    """Compute Σ e · (j − i) over later keys into `out` (B, h, R)."""
    start = block.rows.start + block.past  # keys before the first query are later than no row
    cols = slice(max(0, start - block.cols.start), None)
    keys = torch.arange(block.cols.start, block.cols.stop, device=out.device)[cols]
    queries = torch.arange(len(block.rows), device=out.device)[:, None] + start
    steps = (keys - queries).clamp(min=0).to(block.e)  # (R, C')
    torch.sum(torch.mul(block.e[..., cols], steps, out=block.scratch[..., cols]), -1, out=out)


def _add_repeated(block: RowBlock, pairs: FarRepeatPairs | None, norms: Tensor, out: Tensor) -> None:
    """Add e on repeated tokens, and e times the norm of their value outputs, to `out` (2, B, h, R)."""
    if pairs is None or not len(pairs.row):
        return
    b, r, c = pairs.example, pairs.row, pairs.column
    picked = block.e[b, :, r, c]  # (pairs, h)
    stacked = torch.stack((picked, picked * norms[:, block.heads][b, :, c + block.cols.start]), 1)
    out.permute(1, 3, 0, 2).index_put_((b, r), stacked, accumulate=True)


def _at_target(block: RowBlock, target: Tensor) -> Tensor:
    """Return e at the target of each row, (B, h, R), 0 if the target is outside the block. `target` (B, R)."""
    column = target - block.cols.start
    inside = (column >= 0) & (column < len(block.cols))
    index = column.clamp(0, len(block.cols) - 1)[:, None, :, None].expand(-1, block.e.shape[1], -1, 1)
    return block.e.gather(-1, index)[..., 0] * inside[:, None]


def _add_max_value_weighted(block: RowBlock, norms: Tensor, out: Tensor) -> None:
    """Compute the largest e times norm of the value output, and the number of keys with it, into `out` (2, B, h, R)."""
    key_norms = norms[:, block.heads, None, block.cols.start : block.cols.stop]
    weighted = torch.mul(block.e, key_norms, out=block.scratch)
    torch.amax(weighted, -1, out=out[0])
    out[1] = (weighted == out[0][..., None]).sum(-1).to(out)
