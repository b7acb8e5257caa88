"""The shape of a row, whatever it looks at: entropy, distance, where it rests; the largest weight; what a head writes."""

import torch
from torch import Tensor

from headwise.analysis.metrics.batch_context import ALL, FIRST, POSITION
from headwise.analysis.metrics.metric import Metric, MetricSpec
from headwise.analysis.metrics.row_stats import FullDetailRowStats, RowStats
from headwise.heads.per_head_output import output_norms

ENTROPY = MetricSpec("entropy", "entropy of a row", "nats", "looks at more tokens alike", 215)
RELATIVE_ENTROPY = MetricSpec(
    "relative entropy", "entropy as a share of the most there could be", high_means="looks at all it sees alike"
)
CONFIDENCE = MetricSpec(
    "confidence", "largest weight of a row, special tokens left out", high_means="looks at one token", hue=15
)
DISTANCE = MetricSpec("distance", "how far away it looks", "tokens", "looks farther", 195, positional=True)
FIRST_TOKEN = MetricSpec("first", "weight on the first token", high_means="rests", hue=45)
OUTPUT_SHARE = MetricSpec(
    "output share", "its share in what its layer writes", high_means="writes more than its neighbours", hue=305
)


class RowShapeMetric(Metric):
    """The shape of a row, whatever it looks at."""

    metric_specs = (
        ENTROPY, RELATIVE_ENTROPY,
        MetricSpec("participation", "tokens a row is spread over, 1 / Σp²", "tokens", "looks at more tokens alike"),
        # how far from itself a query looks, |i − j|; and i − j, so that what lies ahead counts below 0
        DISTANCE, FIRST_TOKEN, MetricSpec("abstention", "what a sink takes", high_means="looks nowhere"),
        MetricSpec("uniform", "weight of a token if all were alike", displayed=False),
        MetricSpec(
            "signed distance", "how far back it looks, ahead counting below 0", "tokens", "looks back", positional=True
        ),
    )  # fmt: skip

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """Everything that is one number a row: (B, H, 8)."""
        mass = rows.feature_fraction(ALL)  # 1, but for what a sink takes: (B, H, n)
        counted = rows.counted.to(mass)[:, None]  # (B, 1, n)
        tiny = torch.finfo(mass.dtype).tiny
        entropy = (rows.total.clamp(min=tiny).log() * mass - rows.normalize(rows.energy)).clamp(min=0)  # (B, H, n)
        visible = rows.visible_keys.to(mass)  # (1 or B, 1 or H, n)
        has_choice = visible > 1
        square = rows.normalize(rows.normalize(rows.square))  # Σp²
        position = (rows.positions - rows.batch_context.batch.first_token_positions[:, None])[:, None]  # (B, 1, n)
        signed = position * mass - rows.feature_fraction(POSITION)
        distance = signed if rows.distance_ahead is None else signed + 2 * rows.normalize(rows.distance_ahead)
        values = [
            entropy, torch.where(has_choice, entropy / visible.clamp(min=2).log(), 0.0), 1 / square.clamp(min=1e-12),
            distance, rows.feature_fraction(FIRST), 1 - mass, (1 / visible.clamp(min=1)).expand_as(mass), signed,
        ]  # fmt: skip
        sums = torch.stack([(value * counted).sum(2) for value in values], -1)  # (B, H, 8)
        counts = counted.sum(2).expand(sums.shape[:2])[..., None].repeat(1, 1, len(values))
        # where there is no choice, nothing is relative
        counts[..., self.metric_specs.index(RELATIVE_ENTROPY)] = (has_choice * counted).sum(2)
        return sums, counts


class ConfidenceMetric(Metric):
    """The largest weight, special tokens excluded: neither their rows count nor what others give them."""

    metric_specs = (CONFIDENCE,)
    needs_full_detail = True

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """(B, H, 1)"""
        assert isinstance(rows, FullDetailRowStats)
        ordinary = rows.counted & rows.batch_context.non_special_mask[:, rows.positions]  # (B, n)
        # (B, H, n): rows that see an ordinary token
        counts = (ordinary[:, None] & (rows.max_non_special > 0)).to(rows.max_non_special)
        return (rows.normalize(rows.max_non_special) * counts).sum(2)[..., None], counts.sum(2)[..., None]


class OutputNormMetric(Metric):
    """The length of what a head writes, and its share among those of its layer."""

    metric_specs = (MetricSpec("output norm", "length of what it writes", "length", "writes more"), OUTPUT_SHARE)

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """(B, H, 2)"""
        # (B, H, T)
        norms, real_tokens = (
            output_norms(rows.attention_call.z, rows.output_gram),
            rows.batch_context.batch.real_tokens,
        )
        fractions = norms / norms.sum(1, keepdim=True).clamp(min=1e-30)
        return (torch.stack((norms, fractions), -1) * real_tokens[:, None, :, None]).sum(2), real_tokens.sum(1)[
            :, None, None
        ]
