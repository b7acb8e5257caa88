"""Surface measures: what attention looks like, row by row, summed as it streams by. No n×n map is held.

Each measure is a mean over rows, so what is kept is sums and counts, per unit and head. Sums add up, whatever the batches,
blocks, padding or processes were.
"""

import torch
from torch import Tensor

from headwise.heads.site import Seen
from headwise.heads.writes import PerHead
from headwise.look.classes import CLASSES
from headwise.look.diagonals import BINS, LONG, NEAR, Diagonals, near_names
from headwise.look.evidence import Evidence
from headwise.look.inputs import Batch
from headwise.look.rows import Block, walk
from headwise.look.tally import Tally

SHAPE = ("entropy", "relative entropy", "participation", "confidence", "distance", "first", "abstention", "uniform")
ROWS = (*SHAPE, *CLASSES, *(f"{name} null" for name in CLASSES), *(f"{name} valued" for name in CLASSES))
_C = len(CLASSES)
_NORM = 3 + _C  # where, among the features, the length of a key's write stands
WRITES = ("write", "write share")  # the length of what a head writes, and its share among those of its layer
NAMES = {"rows": ROWS, "writes": WRITES, "bins": BINS, "long": LONG, **{kind: near_names(kind) for kind in NEAR}}


class Surface:
    """Listens at the sites of a model and adds up. `every`: only one block of rows in so many."""

    def __init__(self, tally: Tally, evidence: Evidence | None, flags: Tensor, every: int = 1) -> None:
        self.tally, self.evidence, self.flags, self.every = tally, evidence, flags, every

    def see(self, seen: Seen, batch: Batch, first_head: int) -> None:
        """One call at one site; its heads are counted from `first_head` on."""
        B, H = seen.q.shape[:2]
        inputs, norms = self._features(seen, batch)
        sums = {name: inputs.new_zeros(2, B, H, len(fields)) for name, fields in NAMES.items()}
        for block in walk(seen, inputs, self.every):
            here = {name: both[:, :, block.heads] for name, both in sums.items()}
            real = batch.real[:, block.rows.start : block.rows.stop]  # (B, R)
            self._rows(block, batch, real, here["rows"])
            diagonals = Diagonals(block, batch, real, norms[:, block.heads], block.features[..., _NORM])
            resting = diagonals.near(here)
            if self.evidence is not None:
                heads = slice(first_head + block.heads.start, first_head + block.heads.stop)
                self.evidence.add(heads, block, resting | ~real[:, None], batch.units, batch.first)
        self._writes(seen, batch, sums["writes"])
        numbers = [unit.number for unit in batch.units]
        for name, (summed, counted) in sums.items():
            self.tally.add(NAMES[name], slice(first_head, first_head + H), numbers, summed, counted)

    def _features(self, seen: Seen, batch: Batch) -> tuple[Tensor, Tensor]:
        """What is summed over the keys, (B, H, S, 3 + c + 1 + c), and the length of what each key would write, (B, H, S)."""
        place = torch.arange(seen.k.shape[2], device=batch.ids.device) - batch.first[:, None]  # (B, S)
        flags = self._flags(batch)[:, None]  # (B, 1, S, c)
        common = torch.stack((torch.ones_like(place), place, place == 0), -1)[:, None]
        W_O = seen.site.W_O
        v = seen.v[:, list(seen.terms.groups)]  # (B, H, S, e)
        norms = ((v @ (W_O @ W_O.mT)) * v).sum(-1, keepdim=True).clamp(min=0).sqrt()  # (B, H, S, 1)
        common = torch.cat((common.to(norms), flags.to(norms)), -1).expand(-1, norms.shape[1], -1, -1)
        return torch.cat((common, norms, flags * norms), -1), norms[..., 0]

    def _flags(self, batch: Batch) -> Tensor:
        """Classes of the keys, (B, S, c). The first token is in none but `special`: a sink is no interest in capitals."""
        flags = self.flags.to(batch.ids.device)[batch.ids] * batch.real[..., None]
        place = torch.arange(batch.ids.shape[1], device=batch.ids.device) - batch.first[:, None]
        keep = (place != 0)[..., None] | torch.tensor([name == "special" for name in CLASSES], device=place.device)
        return flags * keep

    def _rows(self, block: Block, batch: Batch, real: Tensor, out: Tensor) -> None:
        """Everything that is one number a row."""
        share = block.share(block.features)  # (B, h, R, f)
        mass = share[..., 0]  # 1, but for what a sink takes
        entropy = (block.log_total * mass - block.share(block.energy)).clamp(min=0)
        visible = block.visible.to(mass)  # (1 or B, 1 or h, R)
        many = visible > 1
        square = block.share(torch.linalg.vector_norm(block.e, dim=-1)).square()  # Σp²
        rows = torch.arange(block.rows.start, block.rows.stop, device=mass.device)
        place = (rows + block.past - batch.first[:, None])[:, None]  # (B, 1, R)
        values = [
            entropy, torch.where(many, entropy / visible.clamp(min=2).log(), 0.0), 1 / square.clamp(min=1e-12),
            block.share((mass > 0).to(mass)), place * mass - share[..., 1], share[..., 2], 1 - mass,
            (1 / visible.clamp(min=1)).expand_as(mass),
        ]  # fmt: skip
        valued = share[..., _NORM + 1 :] / share[..., _NORM, None].clamp(min=1e-30)
        null = self._class_share(block, batch).to(mass).expand(*mass.shape, _C)
        made = torch.cat((torch.stack(values, -1), share[..., 3:_NORM], null, valued), -1)  # (B, h, R, rows)
        weight = real[:, None, :, None].to(made)  # (B, 1, R, 1)
        out[0] += (made * weight).sum(2)
        out[1] += weight.sum(2)
        out[1, ..., 1] -= (~many * real[:, None]).sum(2)  # where there is no choice, nothing is relative

    def _writes(self, seen: Seen, batch: Batch, out: Tensor) -> None:
        lengths = PerHead(seen.z, seen.site.W_O, None).norms()  # (B, H, T)
        shares = lengths / lengths.sum(1, keepdim=True).clamp(min=1e-30)
        out[0] += (torch.stack((lengths, shares), -1) * batch.real[:, None, :, None]).sum(2)
        out[1] += batch.real.sum(1)[:, None, None]

    def _class_share(self, block: Block, batch: Batch) -> Tensor:
        """How frequent each class is among the keys a row may see: (B, 1 or h, R, c)."""
        flags = self._flags(batch)[:, None, block.cols.start : block.cols.stop]  # (B, 1, C, c)
        if block.allowed is None:
            counts = flags.sum(2, keepdim=True).expand(-1, -1, len(block.rows), -1)
        else:
            counts = block.allowed.to(flags) @ flags
        return counts / block.visible.clamp(min=1)[..., None]
