"""Metrics of image models. Tokens are patches, and distance is two-dimensional.

Most metrics count only the rows of patches; class tokens and registers are keys, but their rows do not count. Use
`AttentionToPatches` to define a metric for your own set of patches.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from headwise.analysis.metrics.attention_call import AttentionCallContext
from headwise.analysis.metrics.metric import Metric, MetricSpec, RowBlockAccumulator
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

PairWeights = Callable[[PatchGrid], Tensor]  # a number for each query and key, (T, T), usually 0 or 1
LOCAL_RADIUS = 1  # maximum row and column distance of near patches
TINY = 1e-30


@cache
def patch_offsets(grid: PatchGrid) -> tuple[Tensor, Tensor]:
    """Return the row and column offsets from each query to each key, (T, T) each. NaN if one of them is not a patch."""
    cells = torch.tensor(grid.patch_of_token, device="cpu")
    nan_mask = torch.where(cells < 0, torch.nan, 0.0)
    down, across = cells // grid.columns + nan_mask, cells % grid.columns + nan_mask
    return down - down[:, None], across - across[:, None]


def patch_distances(grid: PatchGrid) -> Tensor:
    """Return the Euclidean distance between patches, (T, T). NaN if one of the tokens is not a patch."""
    down, across = patch_offsets(grid)
    return (down.square() + across.square()).sqrt()


def near_patches(grid: PatchGrid) -> Tensor:
    """Mark the eight neighbors of each patch."""
    down, across = patch_offsets(grid)
    steps = torch.maximum(down.abs(), across.abs())
    return ((steps > 0) & (steps <= LOCAL_RADIUS)).float()


def same_row_patches(grid: PatchGrid) -> Tensor:
    """Mark the other patches of the same row."""
    down, across = patch_offsets(grid)
    return ((down == 0) & (across != 0)).float()


def same_column_patches(grid: PatchGrid) -> Tensor:
    """Mark the other patches of the same column."""
    down, across = patch_offsets(grid)
    return ((across == 0) & (down != 0)).float()


def far_patches(grid: PatchGrid) -> Tensor:
    """Mark the patches farther away than half of the longer side of the grid."""
    return (patch_distances(grid) > max(grid.rows, grid.columns) / 2).float()


def make_token_kind_mask(kind: str) -> PairWeights:
    """Return a function that marks all tokens of a kind (`class` or `register`) for every patch."""

    def cells(grid: PatchGrid) -> Tensor:
        columns = torch.tensor([token_kind == kind for token_kind in grid.kinds], dtype=torch.float32, device="cpu")
        rows = torch.tensor([token_kind == "patch" for token_kind in grid.kinds], dtype=torch.float32, device="cpu")
        return rows[:, None] * columns

    return cells


def make_same_distance_baseline(cells: PairWeights) -> PairWeights:
    """Return the baseline of a head with the same attention distances but no preferred direction.

    The value for a query and a key is the fraction of patches at the same distance that are in the set.
    """

    @cache
    def baseline(grid: PatchGrid) -> Tensor:
        in_set = cells(grid)
        # (T, T); NaN never compares equal
        squared_distances = patch_offsets(grid)[0].square() + patch_offsets(grid)[1].square()
        result = torch.zeros_like(in_set)
        for squared_distance in squared_distances[squared_distances.isfinite()].unique().tolist():
            same_distance = (squared_distances == squared_distance).float()
            fraction = (in_set * same_distance).sum(1) / same_distance.sum(1).clamp(min=1)  # (T,)
            result += same_distance * fraction[:, None]
        return result

    return baseline


class AttentionToPatches(Metric):
    """Attention weight on a set of patches that depends on the query patch.

    The score is the mean over the patches that have at least one key in the set.

    Args:
        name: Unique name of the metric.
        cells: Function from a grid to the set: 1 if the key (column) belongs to the set of the query (row), else 0, (T, T).
        baseline_cells: Function from a grid to a table (T, T). The baseline is the attention-weighted mean of the table.
            None selects the fraction of visible keys in the set, which is the score of uniform attention.
        label: Short description. Default: `weight on {name}`.
        high_means: Meaning of a high score, in a few words.
        hue: Hue of its color in figures, in degrees.
        in_table: Whether it has a column in the table of heads.

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

    def make_accumulator(self, call: AttentionCallContext) -> RowBlockAccumulator:
        """Return an accumulator for the blocks of one attention call."""
        return _PatchSetAccumulator(self, call)


class _PatchSetAccumulator(RowBlockAccumulator):
    def __init__(self, metric: AttentionToPatches, call: AttentionCallContext) -> None:
        grid, device = patch_grid_of(call), call.value_output_norms.device
        self.call, self.cells = call, metric.cells(grid).to(device)
        self.baseline_cells = None if metric.baseline_cells is None else metric.baseline_cells(grid).to(device)
        self.eligible = (self.cells > 0).any(1) & _is_patch(grid).to(device)  # (T,)
        B, H = call.attention_call.q.shape[:2]
        self.sums = call.value_output_norms.new_zeros(B, H, 3)

    def add_block(self, block: RowBlock) -> None:
        """Add the weight, the baseline and the value-weighted score of one block."""
        rows, cols = (slice(span.start, span.stop) for span in (block.rows, block.cols))
        cells, eligible = self.cells[rows, cols], self.eligible[rows].to(block.e)
        weighted = block.e * self.call.value_output_norms[:, block.heads, None, cols]  # (B, h, R, C)
        value_weighted = (weighted * cells).sum(-1) / weighted.sum(-1).clamp(min=TINY)
        weight = block.normalize((block.e * cells).sum(-1))
        if self.baseline_cells is None:
            visible_fraction = (block.visible.allowed_mask() * cells).sum(-1) / block.visible.visible_keys.clamp(
                min=1
            ).float()
            baseline = visible_fraction.to(weight).expand_as(weight)
        else:
            baseline = block.normalize((block.e * self.baseline_cells[rows, cols]).sum(-1))
        # (B, h, 3)
        block_sums = torch.stack([(values * eligible).sum(2) for values in (weight, baseline, value_weighted)], -1)
        self.sums[:, block.heads] += block_sums

    def sums_and_counts(self) -> tuple[Tensor, Tensor]:
        """Return the sums, (B, H, 3), and the number of rows."""
        return self.sums, self.eligible.sum().to(self.sums).expand(len(self.sums), 1, 1)


class MostAttendedPatchMetric(Metric):
    """Attention weight on the patch that receives the most attention, for each head and image.

    Large models without registers have patches that attract the attention of all others (https://arxiv.org/abs/2309.16588).
    The patch is selected on the rows of one color of a checkerboard and the weight is measured on the other color, and vice
    versa. The baseline is 1 divided by the number of visible keys.
    """

    metric_specs = MetricSpec(
        "one patch", "weight on the most attended patch", high_means="all patches attend to the same patch",
        positional=True, in_table=True,
    ).with_variants()  # fmt: skip

    def make_accumulator(self, call: AttentionCallContext) -> RowBlockAccumulator:
        """Return an accumulator for the blocks of one attention call."""
        return _MostAttendedPatchAccumulator(call)


class _MostAttendedPatchAccumulator(RowBlockAccumulator):
    def __init__(self, call: AttentionCallContext) -> None:
        self.call, grid = call, patch_grid_of(call)
        cells, device = torch.tensor(grid.patch_of_token, device="cpu"), call.value_output_norms.device
        color = (cells // grid.columns + cells % grid.columns) % 2
        self.rows = torch.stack([(cells >= 0) & (color == parity) for parity in (0, 1)]).float().to(device)  # (2, T)
        self.is_patch = _is_patch(grid).to(device)
        B, H, _ = call.value_output_norms.shape
        self.weights, self.value_weighted = (call.value_output_norms.new_zeros(2, B, H, len(grid)) for _ in range(2))
        self.visible = call.value_output_norms.new_zeros(len(grid))

    def add_block(self, block: RowBlock) -> None:
        """Add the weight on every key from the rows of each color."""
        rows, cols = (slice(span.start, span.stop) for span in (block.rows, block.cols))
        weighted = block.e * self.call.value_output_norms[:, block.heads, None, cols]  # (B, h, R, C)
        fractions = block.normalize(block.e), weighted / weighted.sum(-1, keepdim=True).clamp(min=TINY)
        for totals, fraction in zip((self.weights, self.value_weighted), fractions, strict=True):
            totals[:, :, block.heads, cols] += torch.einsum("kr,bhrc->kbhc", self.rows[:, rows], fraction)
        self.visible[rows] = block.visible.visible_keys.float().mean((0, 1))

    def sums_and_counts(self) -> tuple[Tensor, Tensor]:
        """Return the sums at the patch that the other color attends to most, and the number of rows."""
        sums = []
        for choosing, counting in ((0, 1), (1, 0)):
            best = self.weights[choosing].masked_fill(~self.is_patch, -1.0).argmax(-1, keepdim=True)  # (B, H, 1)
            sums.append([totals[counting].gather(-1, best)[..., 0] for totals in (self.weights, self.value_weighted)])
        (weight, value_weighted), rows = (a + b for a, b in zip(*sums, strict=True)), self.rows.sum(0)
        baseline = (rows / self.visible.clamp(min=1)).sum().expand_as(weight)
        return torch.stack((weight, baseline, value_weighted), -1), rows.sum().expand(len(weight), 1, 1)


class PatchAttentionEntropyMetric(Metric):
    """Entropy of attention rows. The rows of class tokens and registers count too."""

    metric_specs = (
        ENTROPY, RELATIVE_ENTROPY,
        MetricSpec("participation", "effective number of patches per row, 1 / Σp²", "patches", "attends to more patches"),
    )  # fmt: skip

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """Compute entropy, relative entropy and participation, (B, H, 3)."""
        sums, counts = RowShapeMetric().compute(rows)
        names = list(RowShapeMetric().names)
        indices = [names.index(name) for name in ("entropy", "relative entropy", "participation")]
        return sums[..., indices], counts[..., indices]


class MeanPatchDistanceMetric(Metric):
    """Mean Euclidean distance of the attention between patches. Attention to other tokens is left out."""

    metric_specs = (
        MetricSpec(
            DISTANCE.name, "mean Euclidean distance of attention", "patches", "attends farther away", 195, positional=True
        ),
        MetricSpec("uniform distance", "mean distance of uniform attention", "patches", positional=True),
    )  # fmt: skip

    def make_accumulator(self, call: AttentionCallContext) -> RowBlockAccumulator:
        """Return an accumulator for the blocks of one attention call."""
        return _PatchDistanceAccumulator(call)


class _PatchDistanceAccumulator(RowBlockAccumulator):
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
        """Add the distances of one block."""
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
        """Return the sums, (B, H, 2), and the number of rows."""
        return self.sums, self.is_patch.sum().to(self.sums).expand(len(self.sums), 1, 1)


def patch_grid_of(call: AttentionCallContext) -> PatchGrid:
    """Return the patch grid of a batch of images."""
    return call.batch_context.batch.samples[0].image.grid


def _is_patch(grid: PatchGrid) -> Tensor:
    return torch.tensor(grid.patch_of_token, device="cpu") >= 0


LOCAL_PATCHES = AttentionToPatches(
    "near patches",
    near_patches,
    label="weight on neighboring patches",
    high_means="attends to neighboring patches",
    hue=170,
)
SAME_ROW = AttentionToPatches(
    "same row",
    same_row_patches,
    baseline_cells=make_same_distance_baseline(same_row_patches),
    label="weight on patches of the same row",
    high_means="attends along the row",
    hue=205,
)
SAME_COLUMN = AttentionToPatches(
    "same column", same_column_patches, baseline_cells=make_same_distance_baseline(same_column_patches),
    label="weight on patches of the same column", high_means="attends along the column", hue=260,
)  # fmt: skip
FAR_PATCHES = AttentionToPatches(
    "far patches",
    far_patches,
    label="weight beyond half of the image",
    high_means="attends to distant patches",
    hue=230,
)
CLASS_TOKEN = AttentionToPatches(
    "class token", make_token_kind_mask("class"), high_means="attends to the class token", hue=45
)
REGISTERS = AttentionToPatches("registers", make_token_kind_mask("register"), high_means="attends to registers", hue=35)
SINGLE_PATCH = MostAttendedPatchMetric()


def image_metrics(grid: PatchGrid) -> list[Metric]:
    """Return the metrics of an image profile. Class tokens and registers are included if the model has them."""
    others: list[Metric] = [
        metric for metric, kind in ((CLASS_TOKEN, "class"), (REGISTERS, "register")) if kind in grid.kinds
    ]
    return [
        OutputNormMetric(),
        ConfidenceMetric(),
        PatchAttentionEntropyMetric(),
        MeanPatchDistanceMetric(),
        LOCAL_PATCHES,
        SAME_ROW,
        SAME_COLUMN,
        FAR_PATCHES,
        SINGLE_PATCH,
        *others,
    ]
