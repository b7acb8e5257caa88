"""Measures of heads that look at pictures: tokens are patches, distance is two-dimensional, and there are no words.

Rows that count are those of patches; class tokens and registers are looked at, and their own looks are not counted.
`WeightIn` is for sets of patches of anybody's own, as those here are made.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from headwise.analysis.metrics.attention_call import Call
from headwise.analysis.metrics.metric import Measure, Number, Taker
from headwise.analysis.metrics.row_blocks import RowBlock
from headwise.analysis.metrics.row_shape import DISTANCE, ENTROPY, RELATIVE, Confidence, Shape, Writes
from headwise.analysis.metrics.row_stats import Rows
from headwise.spec.patch_grid import Grid

Cells = Callable[[Grid], Tensor]  # for each token and each it may look at a number, (T, T); mostly 0 and 1
NEAR = 1  # patches away, straight or aslant, that are still local
TINY = 1e-30


@cache
def apart(grid: Grid) -> tuple[Tensor, Tensor]:
    """How many rows and columns apart two tokens are, (T, T) each; NaN where one of them is no patch."""
    cells = torch.tensor(grid.cells)
    nowhere = torch.where(cells < 0, torch.nan, 0.0)
    down, across = cells // grid.columns + nowhere, cells % grid.columns + nowhere
    return down - down[:, None], across - across[:, None]


def distances(grid: Grid) -> Tensor:
    """How far two patches are apart, (T, T), as the crow flies; NaN where one is none."""
    down, across = apart(grid)
    return (down.square() + across.square()).sqrt()


def near(grid: Grid) -> Tensor:
    """Patches around a patch, without itself."""
    down, across = apart(grid)
    steps = torch.maximum(down.abs(), across.abs())
    return ((steps > 0) & (steps <= NEAR)).float()


def in_row(grid: Grid) -> Tensor:
    """Patches of the same row, without itself."""
    down, across = apart(grid)
    return ((down == 0) & (across != 0)).float()


def in_column(grid: Grid) -> Tensor:
    """Patches of the same column, without itself."""
    down, across = apart(grid)
    return ((across == 0) & (down != 0)).float()


def far(grid: Grid) -> Tensor:
    """Patches farther away than half of the longer side."""
    return (distances(grid) > max(grid.rows, grid.columns) / 2).float()


def of_kind(kind: str) -> Cells:
    """All tokens of a kind, for every patch."""

    def cells(grid: Grid) -> Tensor:
        columns = torch.tensor([one == kind for one in grid.kinds], dtype=torch.float32)
        rows = torch.tensor([one == "patch" for one in grid.kinds], dtype=torch.float32)
        return rows[:, None] * columns

    return cells


def same_way(cells: Cells) -> Cells:
    """What a head would have that looks as far as this one, in all directions alike: of all patches as far away as a patch,
    the share that is in the set."""

    @cache
    def made(grid: Grid) -> Tensor:
        inside = cells(grid)
        far_apart = apart(grid)[0].square() + apart(grid)[1].square()  # (T, T); NaN is equal to nothing
        told = torch.zeros_like(inside)
        for square in far_apart[far_apart.isfinite()].unique().tolist():
            alike = (far_apart == square).float()
            share = (inside * alike).sum(1) / alike.sum(1).clamp(min=1)  # (T,)
            told += alike * share[:, None]
        return told

    return made


class WeightIn(Measure):
    """The weight on a set of patches of each row's own, over the patches that have and see one.

    `cells` gives for a grid which token may count for which, (T, T). Its null is their share among what is visible; or, with
    `alike`, what that table gives for where the head does look.

    >>> from headwise.spec.patch_grid import Grid
    >>> left = WeightIn("left", lambda grid: ((apart(grid)[0] == 0) & (apart(grid)[1] == -1)).float())
    >>> left.names
    ('left', 'left null', 'left valued')
    """

    def __init__(
        self, name: str, cells: Cells, *, alike: Cells | None = None, label: str = "", more: str = "", hue: int | None = None,
        column: bool = True,
    ) -> None:  # fmt: skip
        self.cells, self.alike = cells, alike
        told = Number(name, label or f"weight on {name}", more=more, hue=hue, placed=True, column=column)
        self.numbers = told.three()

    def at(self, call: Call) -> Taker:
        """All blocks of rows, one after the other."""
        return _Inside(self, call)


class _Inside(Taker):
    def __init__(self, measure: WeightIn, call: Call) -> None:
        grid, device = grid_of(call), call.norms.device
        self.call, self.cells = call, measure.cells(grid).to(device)
        self.alike = None if measure.alike is None else measure.alike(grid).to(device)
        self.asked = (self.cells > 0).any(1) & _is_patch(grid).to(device)  # (T,)
        B, H = call.seen.q.shape[:2]
        self.sums = call.norms.new_zeros(B, H, 3)

    def see(self, block: RowBlock) -> None:
        """One block: the weight, the null, the weight of what is fetched."""
        rows, cols = (slice(some.start, some.stop) for some in (block.rows, block.cols))
        cells, asked = self.cells[rows, cols], self.asked[rows].to(block.e)
        fetched = block.e * self.call.norms[:, block.heads, None, cols]  # (B, h, R, C)
        valued = (fetched * cells).sum(-1) / fetched.sum(-1).clamp(min=TINY)
        weight = block.share((block.e * cells).sum(-1))
        if self.alike is None:
            seen = (block.sight.allowed() * cells).sum(-1) / block.sight.visible.clamp(min=1)
            null = seen.to(weight).expand_as(weight)
        else:
            null = block.share((block.e * self.alike[rows, cols]).sum(-1))
        made = torch.stack([(one * asked).sum(2) for one in (weight, null, valued)], -1)  # (B, h, 3)
        self.sums[:, block.heads] += made

    def take(self) -> tuple[Tensor, Tensor]:
        """Sums and counts."""
        return self.sums, self.asked.sum().to(self.sums).expand(len(self.sums), 1, 1)


class OnePatch(Measure):
    """The weight on one patch that all look at, whoever looks: chosen, for each head and picture, by every other patch, as on
    a chessboard, and told by the rest. Patches that draw all looks were seen in large models without registers
    (https://arxiv.org/abs/2309.16588). Its null is one patch in all that is visible."""

    numbers = Number(
        "one patch", "weight on the one patch that the others look at most", more="all patches look at one", placed=True,
        column=True,
    ).three()  # fmt: skip

    def at(self, call: Call) -> Taker:
        """All blocks of rows, one after the other."""
        return _Columns(call)


class _Columns(Taker):
    def __init__(self, call: Call) -> None:
        self.call, grid = call, grid_of(call)
        cells, device = torch.tensor(grid.cells), call.norms.device
        colour = (cells // grid.columns + cells % grid.columns) % 2
        self.rows = torch.stack([(cells >= 0) & (colour == one) for one in (0, 1)]).float().to(device)  # (2, T)
        self.patch = _is_patch(grid).to(device)
        B, H, _ = call.norms.shape
        self.weights, self.valued = (call.norms.new_zeros(2, B, H, len(grid)) for _ in range(2))
        self.visible = call.norms.new_zeros(len(grid))

    def see(self, block: RowBlock) -> None:
        """One block: what every key is given, by the rows of either colour."""
        rows, cols = (slice(some.start, some.stop) for some in (block.rows, block.cols))
        fetched = block.e * self.call.norms[:, block.heads, None, cols]  # (B, h, R, C)
        shares = block.share(block.e), fetched / fetched.sum(-1, keepdim=True).clamp(min=TINY)
        for into, share in zip((self.weights, self.valued), shares, strict=True):
            into[:, :, block.heads, cols] += torch.einsum("kr,bhrc->kbhc", self.rows[:, rows], share)
        self.visible[rows] = block.sight.visible.float().mean((0, 1))

    def take(self) -> tuple[Tensor, Tensor]:
        """Sums over the rows of both colours, each at the patch that the other colour looks at most; and how many rows."""
        sums = []
        for chosen, told in ((0, 1), (1, 0)):
            best = self.weights[chosen].masked_fill(~self.patch, -1.0).argmax(-1, keepdim=True)  # (B, H, 1)
            sums.append([one[told].gather(-1, best)[..., 0] for one in (self.weights, self.valued)])
        (weight, valued), rows = (a + b for a, b in zip(*sums, strict=True)), self.rows.sum(0)
        null = (rows / self.visible.clamp(min=1)).sum().expand_as(weight)
        return torch.stack((weight, null, valued), -1), rows.sum().expand(len(weight), 1, 1)


class Spread(Measure):
    """The shape of a row, whatever it looks at; class tokens and registers have rows too."""

    numbers = (
        ENTROPY, RELATIVE, Number("participation", "patches a row is spread over, 1 / Σp²", "patches", "looks at more alike"),
    )  # fmt: skip

    def take(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """(B, H, 3)"""
        sums, counts = Shape().take(rows)
        names = list(Shape().names)
        kept = [names.index(name) for name in ("entropy", "relative entropy", "participation")]
        return sums[..., kept], counts[..., kept]


class HowFar(Measure):
    """How far away patches look, of what they give to patches."""

    numbers = (
        Number(DISTANCE.name, "how far away it looks, as the crow flies", "patches", "looks farther", 195, placed=True),
        Number("uniform distance", "how far it would look if it looked at all patches alike", "patches", placed=True),
    )  # fmt: skip

    def at(self, call: Call) -> Taker:
        """All blocks of rows, one after the other."""
        return _Distances(call)


class _Distances(Taker):
    def __init__(self, call: Call) -> None:
        grid = grid_of(call)
        told, device = distances(grid).to(call.norms.device), call.norms.device
        self.between, self.distance = told.isfinite().to(call.norms), told.nan_to_num(0.0)
        self.patch = _is_patch(grid).to(device)
        B, H = call.seen.q.shape[:2]
        self.sums = call.norms.new_zeros(B, H, 2)

    def see(self, block: RowBlock) -> None:
        """One block."""
        rows, cols = (slice(some.start, some.stop) for some in (block.rows, block.cols))
        between, distance, asked = self.between[rows, cols], self.distance[rows, cols], self.patch[rows].to(block.e)
        far = (block.e * distance).sum(-1) / (block.e * between).sum(-1).clamp(min=TINY)  # (B, h, R)
        alike = (distance.sum(-1) / between.sum(-1).clamp(min=1)).expand_as(far)
        self.sums[:, block.heads] += torch.stack([(one * asked).sum(2) for one in (far, alike)], -1)

    def take(self) -> tuple[Tensor, Tensor]:
        """Sums and counts."""
        return self.sums, self.patch.sum().to(self.sums).expand(len(self.sums), 1, 1)


def grid_of(call: Call) -> Grid:
    """How the tokens of a batch of pictures lie."""
    return call.scene.batch.units[0].picture.grid


def _is_patch(grid: Grid) -> Tensor:
    return torch.tensor(grid.cells) >= 0


LOCAL = WeightIn("near patches", near, label="weight on the patches around", more="looks around itself", hue=170)
ROW = WeightIn(
    "same row",
    in_row,
    alike=same_way(in_row),
    label="weight on patches of the same row",
    more="looks along its row",
    hue=205,
)
COLUMN = WeightIn(
    "same column", in_column, alike=same_way(in_column), label="weight on patches of the same column",
    more="looks up and down", hue=260,
)  # fmt: skip
FAR = WeightIn("far patches", far, label="weight beyond half of the picture", more="looks at what is far", hue=230)
CLASS = WeightIn("class token", of_kind("class"), more="looks at the class token", hue=45)
REGISTER = WeightIn("registers", of_kind("register"), more="looks at registers", hue=35)
ONE = OnePatch()


def picture_measures(grid: Grid) -> list[Measure]:
    """What is taken of every head from pictures; of class tokens and registers where there are some."""
    others: list[Measure] = [one for one, kind in ((CLASS, "class"), (REGISTER, "register")) if kind in grid.kinds]
    return [Writes(), Confidence(), Spread(), HowFar(), LOCAL, ROW, COLUMN, FAR, ONE, *others]
