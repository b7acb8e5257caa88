"""Every number that a row of attention has, of all rows of one call: filled block by block, then measured at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from headwise.analysis.metrics.attention_call import AttentionCallContext, BlockListener
from headwise.analysis.metrics.batch_context import NORM, WINDOW, BatchContext, FarRepeatPairs
from headwise.analysis.metrics.row_blocks import RowBlock, count_sampled_rows, iter_row_blocks, visible_blocks
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import AttentionCall
from headwise.kernels.score_params import ScoreParams

DISTANCE_EDGES = tuple(WINDOW << i for i in range(11))


@dataclass(frozen=True, eq=False)
class RowStats:
    """Rows of one call, n of them: what a measure takes from. Sums are of e, as in `RowBlock`; `normalize` makes them parts
    of the row. Columns over the keys go by name: `feature_fraction("digit")` is the weight on digits."""

    NORM: ClassVar[str] = NORM

    attention_call: AttentionCall
    batch_context: BatchContext
    output_gram: Tensor  # (H, e, e): W_O W_Oᵀ
    value_output_norms: Tensor  # (B, H, S): the length of what each key would write
    positions: Tensor  # (n,): where each query stands among the keys
    counted: Tensor  # (B, n): rows that are tokens
    sees_future_keys: bool  # whether keys behind the query are seen
    visible_keys: Tensor  # (1 or B, 1 or H, n): keys a row may see
    visible_features: Tensor  # (B, 1 or H, n, c): and what they have of each mark
    sees_first: Tensor  # (B, 1 or H, n): whether the first token is seen, which a window may forbid
    sees: dict[str, Tensor]  # (B, 1 or H, n) for each aim: whether there is something to look at, and it is seen
    total: Tensor  # (B, H, n)
    energy: Tensor  # (B, H, n)
    feature_sums: Tensor  # (B, H, n, f): Σ e · column, for each column of the layout
    square: Tensor  # (B, H, n): Σ e²
    near: Tensor  # (B, H, n, o): e at each offset of the window, farthest back first
    # (B, H, n): Σ e · (j − i) over the keys that come after the query; None: it sees none
    distance_ahead: Tensor | None
    target_weights: dict[str, Tensor]  # (B, H, n): e where each aim leads

    def normalize(self, summed: Tensor) -> Tensor:
        """Sums of e as parts of the row: (B, H, n, …); nothing for padding and for a row that sees nothing."""
        return summed * self._inverse.reshape(*self._inverse.shape, *[1] * (summed.ndim - self._inverse.ndim))

    def feature_sum(self, feature: str) -> Tensor:
        """Σ e · column, (B, H, n)."""
        return self.feature_sums[..., self.batch_context.layout.feature_index[feature]]

    def feature_fraction(self, feature: str) -> Tensor:
        """The same as a part of the row."""
        return self._fractions[..., self.batch_context.layout.feature_index[feature]]

    def value_weighted_sum(self, feature: str) -> Tensor:
        """Σ p · column · what each key writes, (B, H, n), of a mark."""
        return self._fractions[..., self.batch_context.layout.value_weighted_index[feature]]

    def visible_feature_sum(self, feature: str) -> Tensor:
        """What the visible keys have of a mark, (B, 1 or H, n)."""
        return self.visible_features[..., self.batch_context.layout.feature_names.index(feature)]

    def has_target(self, key_target: str) -> Tensor:
        """Which rows have a key to look at, seen or not, (B, 1, n)."""
        return (self.batch_context.key_targets[key_target][:, self.positions] >= 0)[:, None]

    def weights_and_value_shares_at(self, key_target: str) -> tuple[Tensor, Tensor]:
        """The weight where an aim leads, and the share of what is fetched that comes from there, (B, H, n) each."""
        e = self.target_weights[key_target]
        return self.normalize(e), e * self._value_norms_at(key_target) * self.inverse_value_weighted_total

    @cached_property
    def target_hits(self) -> dict[str, tuple[Tensor, Tensor]]:
        """For each aim whether the largest weight is there, and the largest of what is fetched: (B, H, n) each."""
        raise HeadwiseError(
            "the largest weights are known only after a walk over every cell; give the measure full=True, which leaves it "
            "out of a light pass."
        )

    @cached_property
    def inverse_value_weighted_total(self) -> Tensor:
        """1 / Σ e·norm of each row that counts, (B, H, n)."""
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


@dataclass(frozen=True, eq=False)
class FullDetailRowStats(RowStats):
    """And what only a walk over all cells can tell."""

    max_non_special: Tensor  # (B, H, n): the largest e at a key that is no special token
    far_bins: Tensor  # (B, H, n, bins): by powers of two beyond the window
    remainder_bin: Tensor  # (n,): the bin that has what is left over; -1: none
    repeat_counts: Tensor  # (B, 1, n): far keys that repeat the query's token or follow one that does
    repeat_weights: Tensor  # (2, B, H, n): e on the repeats, and e times the length of what it fetches
    max_ties: Tensor | None  # (B, H, n): how many keys have the largest e; where hits are asked
    value_weighted_max: Tensor | None  # (2, B, H, n): the largest e times what is fetched, and how many keys have it

    @cached_property
    def target_hits(self) -> dict[str, tuple[Tensor, Tensor]]:
        """For each aim whether the largest weight is there, and the largest of what is fetched: (B, H, n) each. Of equals
        each has its share."""
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


def blockwise_row_stats(
    call: AttentionCallContext, row_stride: int = 1, listeners: Sequence[BlockListener] = ()
) -> FullDetailRowStats:
    """Walk over a call, or over one block of rows in so many; `listeners` are shown each block as it goes by."""
    attention_call, batch_context, norms, key_features = (
        call.attention_call,
        call.batch_context,
        call.value_output_norms,
        call.key_features,
    )
    (B, H, T, _), S, device = attention_call.q.shape, attention_call.k.shape[2], key_features.device
    n, ahead = (
        count_sampled_rows(T, row_stride),
        any_future_keys_visible(attention_call.params, T, S, key_features.device),
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
    return FullDetailRowStats(
        attention_call, batch_context, call.output_gram, norms, **visibility, sees_future_keys=ahead, total=total,
        energy=energy,
        feature_sums=features, square=square.square_(), near=near, distance_ahead=beyond, target_weights=target_weights,
        max_non_special=top, far_bins=far, remainder_bin=last, repeat_counts=repeats, repeat_weights=repeated,
        max_ties=max_ties, value_weighted_max=value_weighted_max,
    )  # fmt: skip


def any_future_keys_visible(params: ScoreParams, T: int, S: int, device: torch.device) -> bool:
    """Whether any row sees a key that comes after it. What is causal by its make is known without reading a mask."""
    past = S - T
    if all(params.key_range(range(i, i + 1), T, S).stop <= i + past + 1 for i in {0, T // 2}):
        return False
    return any(visible.sees_future_keys for visible in visible_blocks(params, T, S, device))


def _max_non_special(block: RowBlock, ordinary: Tensor) -> Tensor:
    """The largest e at an ordinary key, (B, h, R), where special tokens stand within texts; `ordinary` (B, S)."""
    mask = ordinary[:, None, None, block.cols.start : block.cols.stop].to(block.e)
    return torch.mul(block.e, mask, out=block.scratch).amax(-1)


def _add_distance_bins(block: RowBlock, ahead: bool, out: Tensor, last: Tensor) -> None:
    """Sums beyond the window, by powers of two, into (B, h, R, bins). What a causal row has left is not summed: it is what
    all the rest leaves over, and `last` (R,) says to which bin it belongs."""
    back = block.rows.stop + block.past - block.cols.start  # the farthest a row of this block can look, and ahead
    after = block.cols.stop - block.rows.start - block.past
    common_back = back - len(block.rows)  # so far back every row can look
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
    """How far ahead rows look, into (B, h, R)."""
    start = block.rows.start + block.past  # what stands before the first query is ahead of none
    cols = slice(max(0, start - block.cols.start), None)
    keys = torch.arange(block.cols.start, block.cols.stop, device=out.device)[cols]
    queries = torch.arange(len(block.rows), device=out.device)[:, None] + start
    steps = (keys - queries).clamp(min=0).to(block.e)  # (R, C')
    torch.sum(torch.mul(block.e[..., cols], steps, out=block.scratch[..., cols]), -1, out=out)


def _add_repeated(block: RowBlock, pairs: FarRepeatPairs | None, norms: Tensor, out: Tensor) -> None:
    """The weight on repeated tokens, and what it fetches, into (2, B, h, R)."""
    if pairs is None or not len(pairs.row):
        return
    b, r, c = pairs.example, pairs.row, pairs.column
    picked = block.e[b, :, r, c]  # (pairs, h)
    stacked = torch.stack((picked, picked * norms[:, block.heads][b, :, c + block.cols.start]), 1)
    out.permute(1, 3, 0, 2).index_put_((b, r), stacked, accumulate=True)


def _at_target(block: RowBlock, target: Tensor) -> Tensor:
    """e where each row should look, (B, h, R); 0 where that is not in the block. `target` (B, R)."""
    column = target - block.cols.start
    inside = (column >= 0) & (column < len(block.cols))
    index = column.clamp(0, len(block.cols) - 1)[:, None, :, None].expand(-1, block.e.shape[1], -1, 1)
    return block.e.gather(-1, index)[..., 0] * inside[:, None]


def _add_max_value_weighted(block: RowBlock, norms: Tensor, out: Tensor) -> None:
    """The largest e times what is fetched, and how many keys have it, into (2, B, h, R)."""
    key_norms = norms[:, block.heads, None, block.cols.start : block.cols.stop]
    weighted = torch.mul(block.e, key_norms, out=block.scratch)
    torch.amax(weighted, -1, out=out[0])
    out[1] = (weighted == out[0][..., None]).sum(-1).to(out)
