"""Measures of heads that look at pictures: tokens are patches, distance is two-dimensional, and there are no words.

Rows that count are those of patches; class tokens and registers are looked at, and their own looks are not counted.
`AttentionToPatches` is for sets of patches of anybody's own, as those here are made.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from headwise.analysis.metrics.attention_call import AttentionCallContext
from headwise.analysis.metrics.metric import BlockAccumulator, Metric, MetricSpec
from headwise.analysis.metrics.row_blocks import RowBlock
from headwise.analysis.metrics.row_shape import (
    DISTANCE,
    ENTROPY,
    RELATIVE_ENTROPY,
    ConfidenceMetric,
    OutputNormMetric,
    RowShapeMetric,
)
from headwise.analysis.metrics.row_stats import RowStats
from headwise.spec.patch_grid import PatchGrid

PairWeights = Callable[[PatchGrid], Tensor]  # for each token and each it may look at a number, (T, T); mostly 0 and 1
LOCAL_RADIUS = 1  # patches away, straight or aslant, that are still local
TINY = 1e-30


@cache
def patch_offsets(grid: PatchGrid) -> tuple[Tensor, Tensor]:
    """How many rows and columns apart two tokens are, (T, T) each; NaN where one of them is no patch."""
    cells = torch.tensor(grid.patch_of_token)
    nan_mask = torch.where(cells < 0, torch.nan, 0.0)
    down, across = cells // grid.columns + nan_mask, cells % grid.columns + nan_mask
    return down - down[:, None], across - across[:, None]


def patch_distances(grid: PatchGrid) -> Tensor:
    """How far two patches are apart, (T, T), as the crow flies; NaN where one is none."""
    down, across = patch_offsets(grid)
    return (down.square() + across.square()).sqrt()


def near_patches(grid: PatchGrid) -> Tensor:
    """Patches around a patch, without itself."""
    down, across = patch_offsets(grid)
    steps = torch.maximum(down.abs(), across.abs())
    return ((steps > 0) & (steps <= LOCAL_RADIUS)).float()


def same_row_patches(grid: PatchGrid) -> Tensor:
    """Patches of the same row, without itself."""
    down, across = patch_offsets(grid)
    return ((down == 0) & (across != 0)).float()


def same_column_patches(grid: PatchGrid) -> Tensor:
    """Patches of the same column, without itself."""
    down, across = patch_offsets(grid)
    return ((across == 0) & (down != 0)).float()


def far_patches(grid: PatchGrid) -> Tensor:
    """Patches farther away than half of the longer side."""
    return (patch_distances(grid) > max(grid.rows, grid.columns) / 2).float()


def make_token_kind_mask(kind: str) -> PairWeights:
    """All tokens of a kind, for every patch."""

    def cells(grid: PatchGrid) -> Tensor:
        columns = torch.tensor([token_kind == kind for token_kind in grid.kinds], dtype=torch.float32)
        rows = torch.tensor([token_kind == "patch" for token_kind in grid.kinds], dtype=torch.float32)
        return rows[:, None] * columns

    return cells


def make_isotropic_baseline(cells: PairWeights) -> PairWeights:
    """What a head would have that looks as far as this one, in all directions alike: of all patches as far away as a patch,
    the share that is in the set."""

    @cache
    def baseline(grid: PatchGrid) -> Tensor:
        in_set = cells(grid)
        # (T, T); NaN is equal to nothing
        squared_distances = patch_offsets(grid)[0].square() + patch_offsets(grid)[1].square()
        result = torch.zeros_like(in_set)
        for squared_distance in squared_distances[squared_distances.isfinite()].unique().tolist():
            same_distance = (squared_distances == squared_distance).float()
            fraction = (in_set * same_distance).sum(1) / same_distance.sum(1).clamp(min=1)  # (T,)
            result += same_distance * fraction[:, None]
        return result

    return baseline


class AttentionToPatches(Metric):
    """The weight on a set of patches of each row's own, over the patches that have and see one.

    `cells` gives for a grid which token may count for which, (T, T). Its baseline is their share among what is visible; or,
    with `baseline_cells`, what that table gives for where the head does look.

    >>> from headwise.spec.patch_grid import PatchGrid
    >>> left = AttentionToPatches(
    ...     "left", lambda grid: ((patch_offsets(grid)[0] == 0) & (patch_offsets(grid)[1] == -1)).float()
    ... )
    >>> left.names
    ('left', 'left baseline', 'left value-weighted')
    """

    def __init__(
        self, name: str, cells: PairWeights, *, baseline_cells: PairWeights | None = None, label: str = "",
        high_means: str = "", hue: int | None = None, in_table: bool = True,
    ) -> None:  # fmt: skip
        self.cells, self.baseline_cells = cells, baseline_cells
        metric_spec = MetricSpec(
            name, label or f"weight on {name}", high_means=high_means, hue=hue, positional=True, in_table=in_table
        )
        self.metric_specs = metric_spec.with_variants()

    def make_accumulator(self, call: AttentionCallContext) -> BlockAccumulator:
        """All blocks of rows, one after the other."""
        return _PatchSetAccumulator(self, call)


class _PatchSetAccumulator(BlockAccumulator):
    def __init__(self, metric: AttentionToPatches, call: AttentionCallContext) -> None:
        grid, device = patch_grid_of(call), call.value_output_norms.device
        self.call, self.cells = call, metric.cells(grid).to(device)
        self.baseline_cells = None if metric.baseline_cells is None else metric.baseline_cells(grid).to(device)
        self.eligible = (self.cells > 0).any(1) & _is_patch(grid).to(device)  # (T,)
        B, H = call.attention_call.q.shape[:2]
        self.sums = call.value_output_norms.new_zeros(B, H, 3)

    def add_block(self, block: RowBlock) -> None:
        """One block: the weight, the baseline, the weight of what is fetched."""
        rows, cols = (slice(span.start, span.stop) for span in (block.rows, block.cols))
        cells, eligible = self.cells[rows, cols], self.eligible[rows].to(block.e)
        weighted = block.e * self.call.value_output_norms[:, block.heads, None, cols]  # (B, h, R, C)
        value_weighted = (weighted * cells).sum(-1) / weighted.sum(-1).clamp(min=TINY)
        weight = block.normalize((block.e * cells).sum(-1))
        if self.baseline_cells is None:
            visible_fraction = (block.visible.allowed_mask() * cells).sum(-1) / block.visible.visible_keys.clamp(min=1)
            baseline = visible_fraction.to(weight).expand_as(weight)
        else:
            baseline = block.normalize((block.e * self.baseline_cells[rows, cols]).sum(-1))
        # (B, h, 3)
        block_sums = torch.stack([(values * eligible).sum(2) for values in (weight, baseline, value_weighted)], -1)
        self.sums[:, block.heads] += block_sums

    def sums_and_counts(self) -> tuple[Tensor, Tensor]:
        """Sums and counts."""
        return self.sums, self.eligible.sum().to(self.sums).expand(len(self.sums), 1, 1)


class SinglePatchMetric(Metric):
    """The weight on one patch that all look at, whoever looks: chosen, for each head and picture, by every other patch, as on
    a chessboard, and told by the rest. Patches that draw all looks were seen in large models without registers
    (https://arxiv.org/abs/2309.16588). Its baseline is one patch in all that is visible."""

    metric_specs = MetricSpec(
        "one patch", "weight on the one patch that the others look at most", high_means="all patches look at one",
        positional=True, in_table=True,
    ).with_variants()  # fmt: skip

    def make_accumulator(self, call: AttentionCallContext) -> BlockAccumulator:
        """All blocks of rows, one after the other."""
        return _SinglePatchAccumulator(call)


class _SinglePatchAccumulator(BlockAccumulator):
    def __init__(self, call: AttentionCallContext) -> None:
        self.call, grid = call, patch_grid_of(call)
        cells, device = torch.tensor(grid.patch_of_token), call.value_output_norms.device
        color = (cells // grid.columns + cells % grid.columns) % 2
        self.rows = torch.stack([(cells >= 0) & (color == parity) for parity in (0, 1)]).float().to(device)  # (2, T)
        self.is_patch = _is_patch(grid).to(device)
        B, H, _ = call.value_output_norms.shape
        self.weights, self.value_weighted = (call.value_output_norms.new_zeros(2, B, H, len(grid)) for _ in range(2))
        self.visible = call.value_output_norms.new_zeros(len(grid))

    def add_block(self, block: RowBlock) -> None:
        """One block: what every key is given, by the rows of either colour."""
        rows, cols = (slice(span.start, span.stop) for span in (block.rows, block.cols))
        weighted = block.e * self.call.value_output_norms[:, block.heads, None, cols]  # (B, h, R, C)
        fractions = block.normalize(block.e), weighted / weighted.sum(-1, keepdim=True).clamp(min=TINY)
        for totals, fraction in zip((self.weights, self.value_weighted), fractions, strict=True):
            totals[:, :, block.heads, cols] += torch.einsum("kr,bhrc->kbhc", self.rows[:, rows], fraction)
        self.visible[rows] = block.visible.visible_keys.float().mean((0, 1))

    def sums_and_counts(self) -> tuple[Tensor, Tensor]:
        """Sums over the rows of both colours, each at the patch that the other colour looks at most; and how many rows."""
        sums = []
        for choosing, counting in ((0, 1), (1, 0)):
            best = self.weights[choosing].masked_fill(~self.is_patch, -1.0).argmax(-1, keepdim=True)  # (B, H, 1)
            sums.append([totals[counting].gather(-1, best)[..., 0] for totals in (self.weights, self.value_weighted)])
        (weight, value_weighted), rows = (a + b for a, b in zip(*sums, strict=True)), self.rows.sum(0)
        baseline = (rows / self.visible.clamp(min=1)).sum().expand_as(weight)
        return torch.stack((weight, baseline, value_weighted), -1), rows.sum().expand(len(weight), 1, 1)


class RowEntropyMetric(Metric):
    """The shape of a row, whatever it looks at; class tokens and registers have rows too."""

    metric_specs = (
        ENTROPY, RELATIVE_ENTROPY,
        MetricSpec("participation", "patches a row is spread over, 1 / Σp²", "patches", "looks at more alike"),
    )  # fmt: skip

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """(B, H, 3)"""
        sums, counts = RowShapeMetric().compute(rows)
        names = list(RowShapeMetric().names)
        indices = [names.index(name) for name in ("entropy", "relative entropy", "participation")]
        return sums[..., indices], counts[..., indices]


class MeanPatchDistanceMetric(Metric):
    """How far away patches look, of what they give to patches."""

    metric_specs = (
        MetricSpec(
            DISTANCE.name, "how far away it looks, as the crow flies", "patches", "looks farther", 195, positional=True
        ),
        MetricSpec(
            "uniform distance", "how far it would look if it looked at all patches alike", "patches", positional=True
        ),
    )  # fmt: skip

    def make_accumulator(self, call: AttentionCallContext) -> BlockAccumulator:
        """All blocks of rows, one after the other."""
        return _PatchDistanceAccumulator(call)


class _PatchDistanceAccumulator(BlockAccumulator):
    def __init__(self, call: AttentionCallContext) -> None:
        grid = patch_grid_of(call)
        device = call.value_output_norms.device
        distances = patch_distances(grid).to(device)
        self.both_patches, self.distance = (
            distances.isfinite().to(call.value_output_norms),
            distances.nan_to_num(0.0),
        )
        self.is_patch = _is_patch(grid).to(device)
        B, H = call.attention_call.q.shape[:2]
        self.sums = call.value_output_norms.new_zeros(B, H, 2)

    def add_block(self, block: RowBlock) -> None:
        """One block."""
        rows, cols = (slice(span.start, span.stop) for span in (block.rows, block.cols))
        both_patches, distance, eligible = (
            self.both_patches[rows, cols],
            self.distance[rows, cols],
            self.is_patch[rows].to(block.e),
        )
        mean_distance = (block.e * distance).sum(-1) / (block.e * both_patches).sum(-1).clamp(min=TINY)  # (B, h, R)
        uniform_distance = (distance.sum(-1) / both_patches.sum(-1).clamp(min=1)).expand_as(mean_distance)
        self.sums[:, block.heads] += torch.stack(
            [(values * eligible).sum(2) for values in (mean_distance, uniform_distance)], -1
        )

    def sums_and_counts(self) -> tuple[Tensor, Tensor]:
        """Sums and counts."""
        return self.sums, self.is_patch.sum().to(self.sums).expand(len(self.sums), 1, 1)


def patch_grid_of(call: AttentionCallContext) -> PatchGrid:
    """How the tokens of a batch of pictures lie."""
    return call.batch_context.batch.samples[0].image.grid


def _is_patch(grid: PatchGrid) -> Tensor:
    return torch.tensor(grid.patch_of_token) >= 0


LOCAL_PATCHES = AttentionToPatches(
    "near patches", near_patches, label="weight on the patches around", high_means="looks around itself", hue=170
)
SAME_ROW = AttentionToPatches(
    "same row",
    same_row_patches,
    baseline_cells=make_isotropic_baseline(same_row_patches),
    label="weight on patches of the same row",
    high_means="looks along its row",
    hue=205,
)
SAME_COLUMN = AttentionToPatches(
    "same column", same_column_patches, baseline_cells=make_isotropic_baseline(same_column_patches),
    label="weight on patches of the same column", high_means="looks up and down", hue=260,
)  # fmt: skip
FAR_PATCHES = AttentionToPatches(
    "far patches", far_patches, label="weight beyond half of the picture", high_means="looks at what is far", hue=230
)
CLASS_TOKEN = AttentionToPatches(
    "class token", make_token_kind_mask("class"), high_means="looks at the class token", hue=45
)
REGISTERS = AttentionToPatches("registers", make_token_kind_mask("register"), high_means="looks at registers", hue=35)
SINGLE_PATCH = SinglePatchMetric()


def image_metrics(grid: PatchGrid) -> list[Metric]:
    """What is taken of every head from pictures; of class tokens and registers where there are some."""
    others: list[Metric] = [
        metric for metric, kind in ((CLASS_TOKEN, "class"), (REGISTERS, "register")) if kind in grid.kinds
    ]
    return [
        OutputNormMetric(),
        ConfidenceMetric(),
        RowEntropyMetric(),
        MeanPatchDistanceMetric(),
        LOCAL_PATCHES,
        SAME_ROW,
        SAME_COLUMN,
        FAR_PATCHES,
        SINGLE_PATCH,
        *others,
    ]
