"""The shape of a row, whatever it looks at: entropy, distance, where it rests; the largest weight; what a head writes."""

import torch
from torch import Tensor

from headwise.analysis.metrics.batch_context import ALL, FIRST, PLACE
from headwise.analysis.metrics.metric import Measure, Number
from headwise.analysis.metrics.row_stats import Full, Rows
from headwise.heads.per_head_output import lengths

ENTROPY = Number("entropy", "entropy of a row", "nats", "looks at more tokens alike", 215)
RELATIVE = Number(
    "relative entropy", "entropy as a share of the most there could be", more="looks at all it sees alike"
)
CONFIDENCE = Number("confidence", "largest weight of a row, special tokens left out", more="looks at one token", hue=15)
DISTANCE = Number("distance", "how far away it looks", "tokens", "looks farther", 195, placed=True)
RESTING = Number("first", "weight on the first token", more="rests", hue=45)
SHARE = Number("write share", "its share in what its layer writes", more="writes more than its neighbours", hue=305)


class Shape(Measure):
    """The shape of a row, whatever it looks at."""

    numbers = (
        ENTROPY, RELATIVE,
        Number("participation", "tokens a row is spread over, 1 / Σp²", "tokens", "looks at more tokens alike"),
        # how far from itself a query looks, |i − j|; and i − j, so that what lies ahead counts below 0
        DISTANCE,
        RESTING,
        Number("abstention", "what a sink takes", more="looks nowhere"),
        Number("uniform", "weight of a token if all were alike", shown=False),
        Number("signed distance", "how far back it looks, ahead counting below 0", "tokens", "looks back", placed=True),
    )  # fmt: skip

    def take(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Everything that is one number a row: (B, H, 8)."""
        mass = rows.part(ALL)  # 1, but for what a sink takes: (B, H, n)
        counted = rows.counted.to(mass)[:, None]  # (B, 1, n)
        tiny = torch.finfo(mass.dtype).tiny
        entropy = (rows.total.clamp(min=tiny).log() * mass - rows.share(rows.energy)).clamp(min=0)  # (B, H, n)
        visible = rows.visible.to(mass)  # (1 or B, 1 or H, n)
        many = visible > 1
        square = rows.share(rows.share(rows.square))  # Σp²
        place = (rows.places - rows.scene.batch.first[:, None])[:, None]  # (B, 1, n)
        signed = place * mass - rows.part(PLACE)
        away = signed if rows.beyond is None else signed + 2 * rows.share(rows.beyond)
        values = [
            entropy, torch.where(many, entropy / visible.clamp(min=2).log(), 0.0), 1 / square.clamp(min=1e-12),
            away, rows.part(FIRST), 1 - mass, (1 / visible.clamp(min=1)).expand_as(mass), signed,
        ]  # fmt: skip
        sums = torch.stack([(value * counted).sum(2) for value in values], -1)  # (B, H, 8)
        counts = counted.sum(2).expand(sums.shape[:2])[..., None].repeat(1, 1, len(values))
        counts[..., self.numbers.index(RELATIVE)] = (many * counted).sum(
            2
        )  # where there is no choice, nothing is relative
        return sums, counts


class Confidence(Measure):
    """The largest weight, special tokens excluded: neither their rows count nor what others give them."""

    numbers = (CONFIDENCE,)
    full = True

    def take(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """(B, H, 1)"""
        assert isinstance(rows, Full)
        ordinary = rows.counted & rows.scene.ordinary[:, rows.places]  # (B, n)
        counts = (ordinary[:, None] & (rows.top > 0)).to(rows.top)  # (B, H, n): rows that see an ordinary token
        return (rows.share(rows.top) * counts).sum(2)[..., None], counts.sum(2)[..., None]


class Writes(Measure):
    """The length of what a head writes, and its share among those of its layer."""

    numbers = (Number("write", "length of what it writes", "length", "writes more"), SHARE)

    def take(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """(B, H, 2)"""
        long, real = lengths(rows.seen.z, rows.gram), rows.scene.batch.real  # (B, H, T)
        shares = long / long.sum(1, keepdim=True).clamp(min=1e-30)
        return (torch.stack((long, shares), -1) * real[:, None, :, None]).sum(2), real.sum(1)[:, None, None]
