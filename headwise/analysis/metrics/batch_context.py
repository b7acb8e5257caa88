"""Data of a batch that all layers share: token features, key targets and visibility. Computed once per batch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.metrics.host_copy_queue import HostCopyQueue
from headwise.analysis.metrics.metric import KeyTarget, Metric, TokenFeature
from headwise.analysis.metrics.row_blocks import VisibilityCache, VisibleBlock, column_chunks, visible_blocks
from headwise.analysis.recording.batching import TokenBatch
from headwise.errors import ArgumentError
from headwise.kernels import Mask
from headwise.kernels.score_params import ScoreParams

WINDOW = 32  # offsets measured individually: 0 to 31 back, and as many ahead; larger distances are long range
# Built-in features: 1 for every key, position in the text, whether the key is the first token, norm of the value output.
ALL, POSITION, FIRST, NORM = "all", "place", "first", "norm"
MAX_CACHED_PAIRS = 1 << 20  # pairs of repeated tokens that are cached for the next layer; others are computed again
SPECIAL = "special"  # feature of special tokens, which are excluded from the confidence score

# whether rows see later keys, number of rows, queries and keys of the call
OffsetKey = tuple[bool, int, int, int]
RowKey = tuple[Mask | None, range, int]  # mask, rows and past length: layers with equal keys have equal visibility


@dataclass(frozen=True, eq=False)
class RowVisibility:
    """Statistics of a block of rows that do not depend on the attention weights."""

    positions: Tensor  # (R,)
    visible_keys: Tensor  # (1 or B, 1 or H, R): number of visible keys
    visible_features: Tensor  # (B, 1 or H, R, c): feature sums over the visible keys
    sees_first: Tensor  # (B, 1 or H, R): whether the first token is visible
    sees: dict[str, Tensor]  # (B, 1 or H, R) per key target: whether the row has a target and sees it


@dataclass(frozen=True, eq=False)
class FarRepeatPairs:
    """Keys outside the window that repeat the token of the query, or follow such a key."""

    example: Tensor  # (pairs,)
    row: Tensor  # (pairs,): row of the block
    column: Tensor  # (pairs,)
    repeat_counts: Tensor  # (B, 1, R): number of pairs per row


@dataclass(frozen=True, eq=False)
class OffsetTargets:
    """Offsets at which a row has a token. They do not depend on the attention weights."""

    present: Tensor  # (B, n, o): 1 if the row has a token at the offset
    eligible: Tensor  # (B, n, o): 1 if that token is not the first
    rows_near_first: Tensor  # rows whose window contains the first token


@dataclass(frozen=True, eq=False)
class TokenFeatureColumns:
    """Order of the features that are summed over the keys: the built-in ones, the token features, the norm of the value
    output, and each token feature times that norm."""

    features: tuple[TokenFeature, ...]
    key_targets: tuple[KeyTarget, ...]

    @staticmethod
    def of(metrics: Iterable[Metric]) -> "TokenFeatureColumns":
        """Collect the features and key targets that some metrics need."""
        metrics = list(metrics)
        layout = TokenFeatureColumns(
            tuple(feature for metric in metrics for feature in metric.features),
            tuple(key_target for metric in metrics for key_target in metric.key_targets),
        )
        for kind, names in (
            ("features", layout.feature_names),
            ("key targets", [key_target.name for key_target in layout.key_targets]),
        ):
            duplicates = {name for name in names if list(names).count(name) > 1}
            reserved = {ALL, POSITION, FIRST, NORM} & {*names}
            if duplicates or reserved:
                problem = "is used twice" if duplicates else "is reserved"
                raise ArgumentError(
                    f"metrics: the name {sorted(duplicates or reserved)[0]!r} {problem} for {kind}. Give each metric its own "
                    f"name."
                )
        return layout

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the token features."""
        return tuple(feature.name for feature in self.features)

    @cached_property
    def feature_index(self) -> dict[str, int]:
        """Index of each feature."""
        return {name: index for index, name in enumerate((ALL, POSITION, FIRST, *self.feature_names, NORM))}

    @cached_property
    def value_weighted_column_by_feature(self) -> dict[str, int]:
        """Index of each token feature times the norm of the value output."""
        return {name: len(self.feature_index) + index for index, name in enumerate(self.feature_names)}


@dataclass(eq=False)
class BatchContext:
    """A batch with its token features, key targets and cached visibility."""

    batch: TokenBatch
    layout: TokenFeatureColumns
    visibility: VisibilityCache = field(default_factory=VisibilityCache)
    host_copies: HostCopyQueue = field(default_factory=HostCopyQueue)
    _row_visibility: dict[RowKey, RowVisibility] = field(default_factory=dict)
    _far_repeats: dict[RowKey, FarRepeatPairs] = field(default_factory=dict)
    _cached_pairs: int = 0  # number of pairs in _far_repeats
    _offset_targets: dict[OffsetKey, OffsetTargets] = field(default_factory=dict)

    @cached_property
    def feature_values(self) -> Tensor:
        """Token features of the keys, (B, S, c)."""
        values = [feature.batch_values(self.batch) for feature in self.layout.features]
        empty = torch.zeros(*self.batch.ids.shape, 0, device=self.batch.ids.device, dtype=torch.float32)
        return torch.stack(values, -1) if values else empty

    @cached_property
    def key_targets(self) -> dict[str, Tensor]:
        """Target column of each row, (B, S) per key target. -1 means that the row has no target."""
        return {key_target.name: key_target.batch_positions(self.batch) for key_target in self.layout.key_targets}

    @cached_property
    def non_special_mask(self) -> Tensor:
        """Mask of the tokens that are not special, (B, S)."""
        names = self.layout.feature_names
        special = (
            self.feature_values[..., names.index(SPECIAL)]
            if SPECIAL in names
            else torch.zeros_like(self.batch.real_tokens)
        )
        return (special == 0) & self.batch.real_tokens

    @cached_property
    def non_special_column_range(self) -> range | None:
        """Columns without special tokens, if special tokens occur only at the start and end of the texts, otherwise None.
        The columns may include padding, which no row sees."""
        special = (~self.non_special_mask & self.batch.real_tokens).cpu()  # (B, S)
        columns = (~special.any(0)).nonzero()[:, 0].tolist() or [0, -1]
        between = range(columns[0], columns[-1] + 1)
        return None if bool(special[:, between.start : between.stop].any()) else between

    def key_features(self, norms: Tensor) -> Tensor:
        """Return all features of the keys, (B, H, S, f). `norms` are the norms of the value outputs, (B, H, S)."""
        position = (
            torch.arange(norms.shape[2], device=norms.device) - self.batch.first_token_positions[:, None]
        )  # (B, S)
        base_features = torch.stack((torch.ones_like(position), position, position == 0), -1)
        common = torch.cat((base_features.to(norms), self.feature_values.to(norms)), -1)[:, None].expand(
            -1, norms.shape[1], -1, -1
        )
        return torch.cat((common, norms[..., None], self.feature_values[:, None] * norms[..., None]), -1)

    def visible_blocks(self, params: ScoreParams, T: int, S: int, row_stride: int = 1) -> Iterator[VisibleBlock]:
        """Iterate over the visible keys of a call, in blocks of rows."""
        return visible_blocks(params, T, S, self.batch.ids.device, row_stride, self.visibility)

    def row_visibility(self, params: ScoreParams, T: int, S: int, row_stride: int = 1) -> dict[str, Any]:
        """Compute the statistics of all rows of a call that do not depend on the attention weights.

        Call it before the blocks are computed, not once per block. Blocks grow, so cached tensors allocated between them
        would fragment the memory, quadratically in the length of the text.
        """
        visibility = [self._row_visibility_of(visible) for visible in self.visible_blocks(params, T, S, row_stride)]
        positions = torch.cat([block.positions for block in visibility])  # (n,)

        def concat(tensors: list[Tensor]) -> Tensor:
            max_sizes = [max(tensor.shape[axis] for tensor in tensors) for axis in (0, 1)]
            return torch.cat([tensor.expand(*max_sizes, *tensor.shape[2:]) for tensor in tensors], 2)

        return {
            "positions": positions, "counted": self.batch.real_tokens[:, positions],
            "visible_keys": concat([block.visible_keys for block in visibility]),
            "visible_features": concat([block.visible_features for block in visibility]),
            "sees_first": concat([block.sees_first for block in visibility]),
            "sees": {name: concat([block.sees[name] for block in visibility]) for name in visibility[0].sees},
        }  # fmt: skip

    def _row_visibility_of(self, visible: VisibleBlock) -> RowVisibility:
        key = (visible.mask, visible.rows, visible.past)
        if key not in self._row_visibility:
            self._row_visibility[key] = self._compute_row_visibility(visible)
        return self._row_visibility[key]

    def far_repeat_pairs(self, visible: VisibleBlock) -> FarRepeatPairs:
        """Return the keys outside the window that repeat tokens. At most MAX_CACHED_PAIRS pairs are cached for the next
        layer, because their number grows quadratically with the length of the text."""
        key = (visible.mask, visible.rows, visible.past)
        if key in self._far_repeats:
            return self._far_repeats[key]
        pairs = _far_repeat_pairs(visible, self.batch)
        if self._cached_pairs + len(pairs.row) <= MAX_CACHED_PAIRS:
            self._far_repeats[key] = pairs
            self._cached_pairs += len(pairs.row)
        return pairs

    @cached_property
    def feature_values_on_host(self) -> Tensor:
        """Token features of the keys on the host, (B, S, c)."""
        return self.feature_values.cpu()

    @cached_property
    def key_targets_on_host(self) -> Tensor:
        """Target column of each row on the host, (key targets, B, S)."""
        targets = [*self.key_targets.values()]
        return (
            torch.stack(targets).cpu()
            if targets
            else torch.zeros(0, *self.batch.ids.shape, dtype=torch.long, device="cpu")
        )

    def offset_targets(
        self, positions: Tensor, counted: Tensor, offsets: Sequence[int], key: OffsetKey
    ) -> OffsetTargets:
        """Return the offsets at which rows have tokens. `key` identifies the rows, so that layers share the result."""
        if key not in self._offset_targets:
            S, real_tokens = self.batch.real_tokens.shape[1], self.batch.real_tokens
            target = positions[:, None] - torch.tensor(offsets, device=positions.device)  # (n, o)
            first = self.batch.first_token_positions[:, None, None]
            inside = (target >= first) & (target < S) & real_tokens[:, target.clamp(0, S - 1)] & counted[..., None]
            is_first = (inside & (target == first)).any(0).any(1)  # (n,)
            self._offset_targets[key] = OffsetTargets(
                inside.float(), (inside & (target > first)).float(), is_first.nonzero()[:, 0]
            )
        return self._offset_targets[key]

    def _compute_row_visibility(self, visible: VisibleBlock) -> RowVisibility:
        device = self.batch.ids.device
        positions = torch.arange(visible.rows.start, visible.rows.stop, device=device) + visible.past  # (R,)
        feature_sums = visible.visible_sums(self.feature_values)  # (B, 1 or H, R, c)
        sees = {
            name: visible.sees_keys(target_positions[:, positions])
            for name, target_positions in self.key_targets.items()
        }
        return RowVisibility(
            positions,
            visible.visible_keys,
            feature_sums,
            visible.sees_keys(self.batch.first_token_positions[:, None]).to(feature_sums),
            sees,
        )


def _far_repeat_pairs(visible: VisibleBlock, batch: TokenBatch) -> FarRepeatPairs:
    device, start = batch.ids.device, visible.cols.start
    positions = torch.arange(visible.rows.start, visible.rows.stop, device=device) + visible.past  # (R,)
    ids = batch.ids.masked_fill(~batch.real_tokens, -1)
    previous_ids = torch.nn.functional.pad(ids, (1, 0), value=-2)  # (B, S + 1): id before each key
    query = ids[:, positions, None]  # (B, R, 1)
    matches, repeats = [], torch.zeros(len(ids), len(positions), dtype=torch.long, device=device)
    for chunk in column_chunks(visible.cols):
        cols = slice(chunk.start, chunk.stop)
        keys = torch.arange(chunk.start, chunk.stop, device=device)  # (c,)
        far = (positions[:, None] - keys).abs() >= WINDOW  # (R, c)
        same = ((ids[:, None, cols] == query) | (previous_ids[:, None, cols] == query)) & far  # (B, R, c)
        same = same & batch.real_tokens[:, positions, None] & (keys > batch.first_token_positions[:, None, None])
        if visible.partial_mask.shape[1] == 1:
            same = same & visible.allowed_mask(slice(chunk.start - start, chunk.stop - start))[:, 0]
        matches.append(same.nonzero() + torch.tensor([0, 0, chunk.start - start], device=device))  # (pairs, 3)
        repeats += same.sum(-1)
    example, row, column = torch.cat(matches).unbind(1)
    return FarRepeatPairs(example, row, column, repeats[:, None])
