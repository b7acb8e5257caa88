"""Attention by distance: offsets one by one near the query, by powers of two farther away, and what is long range."""

import torch
from torch import Tensor

from headwise.look.gather import EDGES, WINDOW, Full, Rows
from headwise.look.inputs import Batch

OFFSETS = tuple(range(WINDOW - 1, -WINDOW, -1))  # farthest back first, as the diagonals lie

# At each offset: the mean weight there; and, over rows whose target is not the first token (a sink would collect those), the
# mean weight, what a uniform head would have, and the weight times the length of what it fetches, as a share of the row.
NEAR = ("offset", "aimed", "aimed null", "aimed valued")
BINS = tuple(f"distance {low}-{2 * low - 1}" for low in EDGES)
# Beyond the window, the first token and repeated tokens left out: the weight, a uniform head's, and the valued weight.
LONG = ("long range", "long range null", "long range valued")
# Within three tokens of the query but at itself and at the first token: the same three.
LOCAL = ("local", "local null", "local valued")
_AROUND = [OFFSETS.index(offset) for offset in (3, 2, 1, -1, -2, -3)]


def near_names(kind: str) -> tuple[str, ...]:
    """The measures of one kind at each offset: `offset 1` is one back, `offset -1` one ahead."""
    return tuple(f"{kind} {offset}" for offset in OFFSETS)


def near(rows: Rows, batch: Batch, norms: Tensor, valued_total: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Sums and counts at each offset of the window, (B, H, offsets) each. e is 0 wherever there is no token to see."""
    inside, aimed = _targets(rows, batch)  # (B, n, o)
    p = rows.share(rows.near)  # (B, H, n, o)
    valued = rows.near * _along(norms, rows) * _inverse(valued_total, rows)[..., None]
    on_first = (inside - aimed)[:, None]  # (B, 1, n, o): 1 where the target is the first token
    early = on_first.any((0, 1, 3)).nonzero()[:, 0]  # only the first rows of a text have it in their window
    some = on_first[:, :, early]
    uniform = (1 / rows.visible.clamp(min=1)).to(p)  # (1 or B, 1 or H, n)
    null = (uniform.expand(len(p), -1, -1)[:, :, None] @ aimed[:, None])[:, :, 0]  # (B, 1 or H, o)
    offset = p.sum(2)  # (B, H, o)
    counts, targets = inside.sum(1)[:, None], aimed.sum(1)[:, None]  # (B, 1, o)
    return {
        "offset": (offset, counts),
        "aimed": (offset - (p[:, :, early] * some).sum(2), targets),
        "aimed null": (null.expand_as(offset), targets),
        "aimed valued": (valued.sum(2) - (valued[:, :, early] * some).sum(2), targets),
    }


def local(found: dict[str, tuple[Tensor, Tensor]], rows: Rows, batch: Batch) -> tuple[Tensor, Tensor]:
    """What `near` found around the query, (B, H, 3), and how many rows have a target there, (B, 1, 1)."""
    here = [place for place in _AROUND if place < rows.near.shape[-1]]
    sums = [found[kind][0][..., here].sum(-1) for kind in ("aimed", "aimed null", "aimed valued")]
    could = _targets(rows, batch)[1][..., here].any(-1)  # (B, n)
    return torch.stack(sums, -1), could.sum(1)[:, None, None]


def argmax(rows: Full, batch: Batch) -> tuple[Tensor, Tensor]:
    """In how many rows each offset has the largest weight, (B, H, offsets); a tie is shared out."""
    hits = rows.near.floor() * rows.counted[:, None, :, None]  # the largest e is 1, and no other
    tied = hits.sum(-1, keepdim=True)  # (B, H, n, 1)
    if bool((tied > 1).any()):
        hits = hits / tied.clamp(min=1)
    return hits.sum(2), _targets(rows, batch)[0].sum(1)[:, None]


def bins(rows: Full, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sums by powers of two beyond the window, and how many rows reach that far: (B, H, bins), (B, 1, bins)."""
    far = rows.far
    left = rows.features[..., 0] - rows.near.sum(-1) - far.sum(-1)  # (B, H, n)
    has = rows.last >= 0
    place = rows.last.clamp(min=0)[:, None]  # (n, 1)
    far = far.scatter_add(-1, place.expand(*far.shape[:3], 1), (left * has)[..., None])
    back, ahead = _reach(rows, batch)
    edges = torch.tensor(EDGES, device=far.device)
    reached = (torch.maximum(back, ahead) if rows.ahead else back)[..., None] >= edges  # (B, n, bins)
    return rows.share(far).sum(2), (reached & rows.counted[..., None]).sum(1)[:, None]


def long_range(rows: Full, batch: Batch, norms: Tensor, valued_total: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of each row when the near, the first token and repeated tokens are taken away: (B, H, 3), counts."""
    back, ahead = _reach(rows, batch)
    far_first = ((back >= WINDOW) & rows.counted).to(norms)[:, None]  # (B, 1, n): the first token is not among the near
    e_first = rows.features[..., 2] * far_first
    norm_first = norms.gather(-1, batch.first[:, None, None].expand(-1, norms.shape[1], -1))  # (B, H, 1)
    heavy = _inverse(valued_total, rows)  # (B, H, n)
    valued = 1 - ((rows.near * _along(norms, rows)).sum(-1) + e_first * norm_first + rows.repeated[1]) * heavy
    weight = rows.share(rows.features[..., 0] - rows.near.sum(-1) - e_first - rows.repeated[0])
    visible, inside = rows.visible.to(norms), _targets(rows, batch)[0].sum(-1)[:, None]
    targets = visible - inside - far_first * rows.sees_first - rows.repeats
    null = targets / visible.clamp(min=1)
    far = ((back > WINDOW) | ((ahead >= WINDOW) & rows.ahead))[:, None]
    # (B, 1 or H, n): rows that have something far to look at; of some, all that is far is repeated
    counts = (rows.counted[:, None] & far & (targets > 0)).to(norms)
    made = [(values.clamp(min=0) * counts).sum(2) for values in (weight, null.expand_as(weight), valued)]
    return torch.stack(made, -1), counts.sum(2)[..., None]


def _targets(rows: Rows, batch: Batch) -> tuple[Tensor, Tensor]:
    """Which offsets of each row lead to a token, and which of those not to the first: (B, n, o) of 0 and 1."""
    key = ("targets", rows.ahead, len(rows.places), int(rows.places[-1]) if len(rows.places) else 0)
    if key not in batch.memo:
        S = batch.real.shape[1]
        offsets = torch.tensor(OFFSETS[: rows.near.shape[-1]], device=rows.places.device)
        target = rows.places[:, None] - offsets  # (n, o)
        first = batch.first[:, None, None]
        inside = (target >= first) & (target < S) & batch.real[:, target.clamp(0, S - 1)] & rows.counted[..., None]
        batch.memo[key] = tuple(x.to(rows.near) for x in (inside, inside & (target > first)))
    return batch.memo[key]


def _along(norms: Tensor, rows: Rows) -> Tensor:
    """The length of what each key of the window writes: (B, H, S) → (B, H, n, o), a view where all rows are there."""
    B, H, S = norms.shape
    o = rows.near.shape[-1]
    padded = torch.nn.functional.pad(norms, (WINDOW - 1, WINDOW))  # column j stands at j + WINDOW − 1
    if len(rows.places) == S:
        return padded.as_strided((B, H, S, o), (*padded.stride()[:2], 1, 1))
    return padded[..., rows.places[:, None] + torch.arange(o, device=norms.device)]


def _inverse(total: Tensor, rows: Rows) -> Tensor:
    """1 / Σ e·norm of each row that counts, (B, H, n)."""
    return rows.counted[:, None] / total.clamp(min=1e-30)


def _reach(rows: Rows, batch: Batch) -> tuple[Tensor, Tensor]:
    """How many tokens of its text stand before each row, and how many behind: (B, n)."""
    back = rows.places - batch.first[:, None]
    return back, batch.real.sum(1)[:, None] - 1 - back
