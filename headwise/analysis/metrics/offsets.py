"""Attention by distance: offsets one by one near the query, by powers of two farther away, and what is long range."""

import torch
from torch import Tensor

from headwise.analysis.metrics.batch_context import ALL, FIRST, WINDOW
from headwise.analysis.metrics.metric import Measure, Number, Target
from headwise.analysis.metrics.row_stats import EDGES, Full, Rows

OFFSETS = tuple(range(WINDOW - 1, -WINDOW, -1))  # farthest back first, as the diagonals lie
_AROUND = [OFFSETS.index(offset) for offset in (3, 2, 1, -1, -2, -3)]


def _words_for(offset: int) -> str:
    return "itself" if offset == 0 else f"{abs(offset)} {'back' if offset > 0 else 'ahead'}"


# The mean weight at each offset: `offset 1` is one back, `offset -1` one ahead.
OFFSET = {o: Number(f"offset {o}", f"weight {_words_for(o)}", placed=True, series="offset") for o in OFFSETS}
# The same over rows whose target is not the first token (a sink would collect those), with what a uniform head would have,
# and the weight times the length of what it fetches, as a share of the row.
_THREE = {
    o: Number(f"aimed {o}", f"weight {_words_for(o)}", shown=False, placed=True, target=Target("offset", o)).three(
        f"aimed null {o}", f"aimed valued {o}"
    )
    for o in OFFSETS
}
AIMED = {offset: three[0] for offset, three in _THREE.items()}
ARGMAX = tuple(
    Number(f"argmax {o}", f"rows whose largest weight is {_words_for(o)}", placed=True, series="argmax")
    for o in OFFSETS
)
BINS = tuple(
    Number(
        f"distance {low}-{2 * low - 1}", f"weight {low} to {2 * low - 1} tokens away", placed=True, series="distance"
    )
    for low in EDGES
)
# Within three tokens of the query but at itself and at the first token.
LOCAL = Number("local", "weight within 3 tokens", placed=True, target=Target("within", 3)).three()
# Beyond the window, the first token and repeated tokens left out.
LONG = Number(
    "long range", f"weight {WINDOW} tokens away or more", placed=True, target=Target("beyond", WINDOW)
).three()


class Near(Measure):
    """The window: weight at each offset, and around the query."""

    numbers = (*OFFSET.values(), *(three[kind] for kind in range(3) for three in _THREE.values()), *LOCAL)

    def take(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Sums and counts at each offset, and within three. e is 0 wherever there is no token to see."""
        inside, aimed = _targets(rows)  # (B, n, o)
        p = rows.share(rows.near)  # (B, H, n, o)
        valued = rows.near * _along(rows) * rows.inverse_valued[..., None]
        on_first = (inside - aimed)[:, None]  # (B, 1, n, o): 1 where the target is the first token
        early = on_first.any((0, 1, 3)).nonzero()[:, 0]  # only the first rows of a text have it in their window
        some = on_first[:, :, early]
        uniform = (1 / rows.visible.clamp(min=1)).to(p)  # (1 or B, 1 or H, n)
        null = (uniform.expand(len(p), -1, -1)[:, :, None] @ aimed[:, None])[:, :, 0]  # (B, 1 or H, o)
        offset = p.sum(2)  # (B, H, o)
        there, targets = inside.sum(1)[:, None], aimed.sum(1)[:, None]  # (B, 1, o)
        three = (
            offset - (p[:, :, early] * some).sum(2),
            null.expand_as(offset),
            valued.sum(2) - (valued[:, :, early] * some).sum(2),
        )
        here = [place for place in _AROUND if place < rows.near.shape[-1]]
        local = torch.stack([sums[..., here].sum(-1) for sums in three], -1)  # (B, H, 3)
        could = aimed[..., here].any(-1).sum(1)[:, None, None].to(targets)  # (B, 1, 1): rows with a target there
        sums = [_whole(made) for made in (offset, *three)]
        counts = [_whole(made) for made in (there, targets, targets, targets)]
        return torch.cat((*sums, local), -1), torch.cat((*counts, could.expand(-1, -1, 3)), -1)


class Largest(Measure):
    """In how many rows each offset has the largest weight; a tie is shared out."""

    numbers = ARGMAX
    full = True

    def take(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Hits at each offset."""
        hits = rows.near.floor() * rows.counted[:, None, :, None]  # the largest e is 1, and no other
        tied = hits.sum(-1, keepdim=True)  # (B, H, n, 1)
        if bool((tied > 1).any()):
            hits = hits / tied.clamp(min=1)
        return _whole(hits.sum(2)), _whole(_targets(rows)[0].sum(1)[:, None])


class Far(Measure):
    """Weight by powers of two beyond the window, over the rows that reach that far."""

    numbers = BINS
    full = True

    def take(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Sums in each bin, (B, H, bins), and rows, (B, 1, bins)."""
        assert isinstance(rows, Full)
        far = rows.far
        left = rows.on(ALL) - rows.near.sum(-1) - far.sum(-1)  # (B, H, n)
        has = rows.last >= 0
        place = rows.last.clamp(min=0)[:, None]  # (n, 1)
        far = far.scatter_add(-1, place.expand(*far.shape[:3], 1), (left * has)[..., None])
        back, ahead = _reach(rows)
        edges = torch.tensor(EDGES, device=far.device)
        reached = (torch.maximum(back, ahead) if rows.ahead else back)[..., None] >= edges  # (B, n, bins)
        return rows.share(far).sum(2), (reached & rows.counted[..., None]).sum(1)[:, None]


class LongRange(Measure):
    """What is left of each row when the near, the first token and repeated tokens are taken away."""

    numbers = LONG
    full = True

    def take(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """The weight, a uniform head's, the valued weight: (B, H, 3)."""
        assert isinstance(rows, Full)
        back, ahead = _reach(rows)
        norms, first = rows.norms, rows.scene.batch.first
        far_first = ((back >= WINDOW) & rows.counted).to(norms)[:, None]  # (B, 1, n): the first is not among the near
        e_first = rows.on(FIRST) * far_first
        norm_first = norms.gather(-1, first[:, None, None].expand(-1, norms.shape[1], -1))  # (B, H, 1)
        near = (rows.near * _along(rows)).sum(-1)
        valued = 1 - (near + e_first * norm_first + rows.repeated[1]) * rows.inverse_valued
        weight = rows.share(rows.on(ALL) - rows.near.sum(-1) - e_first - rows.repeated[0])
        visible, inside = rows.visible.to(norms), _targets(rows)[0].sum(-1)[:, None]
        targets = visible - inside - far_first * rows.sees_first - rows.repeats
        null = targets / visible.clamp(min=1)
        far = ((back > WINDOW) | ((ahead >= WINDOW) & rows.ahead))[:, None]
        # (B, 1 or H, n): rows that have something far to look at; of some, all that is far is repeated
        counts = (rows.counted[:, None] & far & (targets > 0)).to(norms)
        made = [(values.clamp(min=0) * counts).sum(2) for values in (weight, null.expand_as(weight), valued)]
        return torch.stack(made, -1), counts.sum(2)[..., None]


def _whole(made: Tensor) -> Tensor:
    """The window of a causal head has no offsets ahead: zeros, never counted."""
    return torch.nn.functional.pad(made, (0, len(OFFSETS) - made.shape[-1]))


def _targets(rows: Rows) -> tuple[Tensor, Tensor]:
    """Which offsets of each row lead to a token, and which of those not to the first: (B, n, o) of 0 and 1."""
    inside, aimed = rows.scene.targets(rows.places, rows.counted, OFFSETS[: rows.near.shape[-1]], rows.ahead)
    return inside.to(rows.near), aimed.to(rows.near)


def _along(rows: Rows) -> Tensor:
    """The length of what each key of the window writes: (B, H, n, o), a view where all rows are there."""
    norms = rows.norms
    B, H, S = norms.shape
    o = rows.near.shape[-1]
    padded = torch.nn.functional.pad(norms, (WINDOW - 1, WINDOW))  # column j stands at j + WINDOW − 1
    if len(rows.places) == S:
        return padded.as_strided((B, H, S, o), (*padded.stride()[:2], 1, 1))
    return padded[..., rows.places[:, None] + torch.arange(o, device=norms.device)]


def _reach(rows: Rows) -> tuple[Tensor, Tensor]:
    """How many tokens of its text stand before each row, and how many behind: (B, n)."""
    back = rows.places - rows.scene.batch.first[:, None]
    return back, rows.scene.batch.real.sum(1)[:, None] - 1 - back
