"""Surface measures: what attention looks like, row by row, summed as it streams by. No n×n map is held.

Each measure is a mean over rows, so what is kept is sums and counts, per unit and head. Sums add up, whatever the batches,
blocks, padding or processes were.
"""

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.site import Seen, Site
from headwise.heads.writes import gram, lengths
from headwise.look import diagonals
from headwise.look.cases import Cases
from headwise.look.classes import CLASSES
from headwise.look.evidence import Evidence
from headwise.look.gather import Full, Rows, See, gather
from headwise.look.inputs import Batch
from headwise.look.light import glance
from headwise.look.rows import Block, fetched
from headwise.look.tally import Tally

# `distance` is how far from itself a query looks, |i − j|; `signed distance` is i − j, so what lies ahead counts below 0.
SHAPE = (
    "entropy", "relative entropy", "participation", "distance", "first", "abstention", "uniform", "signed distance",
)  # fmt: skip
ROWS = (*SHAPE, *CLASSES, *(f"{name} null" for name in CLASSES), *(f"{name} valued" for name in CLASSES))
# What is told by distances, of which there are none between two texts.
PLACED = {
    "distance", "signed distance", *diagonals.BINS, *diagonals.LONG, *diagonals.LOCAL,
    *(name for kind in ("argmax", *diagonals.NEAR) for name in diagonals.near_names(kind)),
}  # fmt: skip
_NORM = 3 + len(CLASSES)  # where, among the features, the length of a key's write stands
WRITES = ("write", "write share")  # the length of what a head writes, and its share among those of its layer


class Surface:
    """Listens at the sites of a model and adds up.

    `full` walks over every cell, or, with `every`, over one block of rows in so many and takes from all rows what `light`
    can tell: what the fused kernel gives without showing a map. That is everything but the largest weights (confidence,
    argmax, evidence), far distances and long range.
    """

    def __init__(
        self,
        tally: Tally,
        evidence: Evidence | None,
        flags: Tensor,
        every: int = 1,
        detail: str = "full",
        cases: Cases | None = None,
    ) -> None:
        self.tally, self.evidence, self.flags, self.every, self.detail = tally, evidence, flags, every, detail
        self.cases = cases
        self._grams: dict[Site, tuple[tuple[int, int], Tensor]] = {}

    def see(self, seen: Seen, batch: Batch, first_head: int) -> None:
        """One call at one site; its heads are counted from `first_head` on."""
        heads = slice(first_head, first_head + seen.q.shape[1])
        buckets = [unit.bucket for unit in batch.units]

        across = seen.site.address.stack == "cross"

        def add(names: tuple[str, ...], sums: Tensor, counts: Tensor) -> None:
            if across:
                told = torch.tensor([name not in PLACED for name in names], device=sums.device)
                sums, counts = sums * told, counts * told
            self.tally.add(names, heads, buckets, sums, counts)

        own = self._gram(seen)
        add(WRITES, *_writes(seen, batch, own))
        if not seen.q.shape[1]:
            return
        flags = self._flags(batch)
        if self.cases is not None:
            self.cases.see_tokens(seen, batch, flags, first_head)
        inputs, norms = _features(seen, batch, flags, own)
        rows = None
        if self.detail == "full":
            rows = gather(seen, batch, inputs, flags, norms, self.every, self._keep(batch, first_head, across))
            valued = rows.features[..., _NORM]
            add(("confidence",), *_confidence(rows, flags))
            add(diagonals.near_names("argmax"), *_whole(diagonals.argmax(rows, batch)))
            add(diagonals.BINS, *diagonals.bins(rows, batch))
            add(diagonals.LONG, *diagonals.long_range(rows, batch, norms, valued))
        whole = rows if rows is not None and self.every == 1 else glance(seen, batch, inputs, flags, norms)
        add(ROWS, *_measures(whole, batch))
        near = diagonals.near(whole, batch, norms, whole.features[..., _NORM])
        for kind, both in near.items():
            add(diagonals.near_names(kind), *_whole(both))
        add(diagonals.LOCAL, *diagonals.local(near, whole, batch))

    def _keep(self, batch: Batch, first_head: int, across: bool) -> See | None:
        """Shows evidence the rows of each block that do not rest, on the first token or on themselves."""
        evidence = self.evidence
        if evidence is None:
            return None

        def see(block: Block, rows: Full, slot: slice) -> None:
            itself = rows.near[:, block.heads, slot, diagonals.WINDOW - 1]
            real = batch.real[:, block.rows.start : block.rows.stop]
            resting = ((itself == 1) & (not across)) | (block.features[..., 2] == 1) | ~real[:, None]
            heads = slice(first_head + block.heads.start, first_head + block.heads.stop)
            evidence.add(heads, block, resting, batch.units, batch.first)

        return see

    def _gram(self, seen: Seen) -> Tensor:
        """W_O W_Oᵀ, (H, e, e), until the weights change; NaN, and so what is made of it, where W_O cannot be shown."""
        site = seen.site
        try:
            W_O = site.W_O
        except HeadwiseError:
            e = seen.z.shape[-1]
            return seen.z.new_full((seen.z.shape[1], e, e), torch.nan)
        state = (W_O.data_ptr(), W_O._version)
        if self._grams.get(site, (None,))[0] != state:
            self._grams[site] = state, gram(W_O)
        return self._grams[site][1]

    def _flags(self, batch: Batch) -> Tensor:
        """Classes of the keys, (B, S, c). The first token is in none but `special`: a sink is no interest in capitals."""
        if "flags" not in batch.memo:
            flags = self.flags.to(batch.ids.device)[batch.ids] * batch.real[..., None]
            place = torch.arange(batch.ids.shape[1], device=batch.ids.device) - batch.first[:, None]
            keep = torch.tensor([name == "special" for name in CLASSES], device=place.device)
            batch.memo["flags"] = flags * ((place != 0)[..., None] | keep)
        return batch.memo["flags"]


def _features(seen: Seen, batch: Batch, flags: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """What is summed over the keys, (B, H, S, 3 + c + 1 + c), and the length of what each key would write, (B, H, S)."""
    place = torch.arange(seen.k.shape[2], device=batch.ids.device) - batch.first[:, None]  # (B, S)
    common = torch.stack((torch.ones_like(place), place, place == 0), -1)
    norms = fetched(seen, gram)[..., None]  # (B, H, S, 1)
    common = torch.cat((common.to(norms), flags.to(norms)), -1)[:, None].expand(-1, norms.shape[1], -1, -1)
    return torch.cat((common, norms, flags[:, None] * norms), -1), norms[..., 0]


def _measures(rows: Rows, batch: Batch) -> tuple[Tensor, Tensor]:
    """Everything that is one number a row: sums (B, H, rows), counts."""
    share = rows.share(rows.features)  # (B, H, n, f)
    mass = share[..., 0]  # 1, but for what a sink takes
    counted = rows.counted.to(mass)[:, None]  # (B, 1, n)
    tiny = torch.finfo(mass.dtype).tiny
    entropy = (rows.total.clamp(min=tiny).log() * mass - rows.share(rows.energy)).clamp(min=0)  # (B, H, n)
    visible = rows.visible.to(mass)  # (1 or B, 1 or H, n)
    many = visible > 1
    square = rows.share(rows.share(rows.square))  # Σp²
    place = (rows.places - batch.first[:, None])[:, None]  # (B, 1, n)
    signed = place * mass - share[..., 1]
    away = signed if rows.beyond is None else signed + 2 * rows.share(rows.beyond)
    values = [
        entropy, torch.where(many, entropy / visible.clamp(min=2).log(), 0.0), 1 / square.clamp(min=1e-12),
        away, share[..., 2], 1 - mass, (1 / visible.clamp(min=1)).expand_as(mass), signed,
    ]  # fmt: skip
    sums = torch.stack([(value * counted).sum(2) for value in values], -1)  # (B, H, 8)
    null = ((rows.classes / visible.clamp(min=1)[..., None]) * counted[..., None]).sum(2).to(mass)  # (B, 1 or H, c)
    heavy = share[..., _NORM + 1 :] / share[..., _NORM, None].clamp(min=1e-30)
    made = [sums, share[..., 3:_NORM].sum(2), null.expand(-1, sums.shape[1], -1), heavy.sum(2)]
    counts = counted.sum(2).expand(-1, sums.shape[1])[..., None].repeat(1, 1, len(ROWS))  # (B, H, rows)
    counts[..., 1] = (many * counted).sum(2)  # where there is no choice, nothing is relative
    could = ((rows.classes > 0) * counted[..., None]).sum(2)  # (B, 1 or H, c): rows that see a token of the class
    for c, name in enumerate(CLASSES):
        if name != "special":  # where a head rests is asked of all rows
            counts[..., [ROWS.index(name + kind) for kind in ("", " null", " valued")]] = could[..., c, None]
    return torch.cat(made, -1), counts


def _confidence(rows: Full, flags: Tensor) -> tuple[Tensor, Tensor]:
    """The largest weight, special tokens excluded: neither their rows count nor what others give them. (B, H, 1)"""
    ordinary = rows.counted & (flags[:, rows.places, 1] == 0)  # (B, n)
    counts = (ordinary[:, None] & (rows.top > 0)).to(rows.top)  # (B, H, n): rows that see an ordinary token
    return (rows.share(rows.top) * counts).sum(2)[..., None], counts.sum(2)[..., None]


def _writes(seen: Seen, batch: Batch, gram: Tensor) -> tuple[Tensor, Tensor]:
    long = lengths(seen.z, gram)  # (B, H, T)
    shares = long / long.sum(1, keepdim=True).clamp(min=1e-30)
    sums = (torch.stack((long, shares), -1) * batch.real[:, None, :, None]).sum(2)
    return sums, batch.real.sum(1)[:, None, None]


def _whole(both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The window of a causal head has no offsets ahead: zeros, never counted."""
    missing = len(diagonals.OFFSETS) - both[0].shape[-1]
    sums, counts = (torch.nn.functional.pad(x, (0, missing)) for x in both)
    return sums, counts
