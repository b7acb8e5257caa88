"""Scores of the attention distribution (entropy, distance, attention sink, largest weight) and of the head output norm."""

import torch
from torch import Tensor

from headwise.analysis.metrics.batch_context import ALL, FIRST, POSITION
from headwise.analysis.metrics.metric import Metric, MetricSpec
from headwise.analysis.metrics.row_stats import RowStats
from headwise.heads.per_head_output import output_norms

ENTROPY = MetricSpec("entropy", "entropy of a row", "nats", "attends evenly to more tokens", 215)
RELATIVE_ENTROPY = MetricSpec(
    "relative entropy", "entropy divided by its maximum", high_means="attends evenly to all visible tokens"
)
CONFIDENCE = MetricSpec(
    "confidence", "largest weight of a row, without special tokens", high_means="attends to one token", hue=15
)
DISTANCE = MetricSpec("distance", "mean distance of attention", "tokens", "attends farther away", 195, positional=True)
FIRST_TOKEN = MetricSpec(
    "first", "weight on the first token", high_means="uses the first token as attention sink", hue=45
)
OUTPUT_SHARE = MetricSpec(
    "output share", "its share of the output norms of its layer", high_means="writes more than the other heads", hue=305
)


class RowShapeMetric(Metric):
    """Scores of the attention distribution of a row: entropy, distance, first token, attention sink."""

    metric_specs = (
        ENTROPY, RELATIVE_ENTROPY,
        MetricSpec(
            "participation", "effective number of tokens per row, 1 / Σp²", "tokens", "attends evenly to more tokens"
        ),
        # distance is the mean of |i − j|; signed distance the mean of i − j, which is negative for later keys
        DISTANCE, FIRST_TOKEN, MetricSpec("abstention", "weight on the learned sink", high_means="attends to no token"),
        MetricSpec("uniform", "weight of a token under uniform attention", displayed=False),
        MetricSpec(
            "signed distance", "mean distance back, negative for later tokens", "tokens", "attends back", positional=True
        ),
    )  # fmt: skip

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """Compute all scores, (B, H, 8)."""
        mass = rows.feature_fraction(ALL)  # 1 minus the weight on the attention sink: (B, H, n)
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
        # relative entropy is undefined for rows with a single visible key
        counts[..., self.metric_specs.index(RELATIVE_ENTROPY)] = (has_choice * counted).sum(2)
        return sums, counts


class ConfidenceMetric(Metric):
    """Largest weight of a row. Special tokens are excluded both as queries and as keys."""

    metric_specs = (CONFIDENCE,)

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """Compute the largest weight, (B, H, 1)."""
        ordinary = rows.counted & rows.batch_context.non_special_mask[:, rows.positions]  # (B, n)
        # (B, H, n): rows that see an ordinary token
        counts = (ordinary[:, None] & (rows.max_non_special > 0)).to(rows.max_non_special)
        return (rows.normalize(rows.max_non_special) * counts).sum(2)[..., None], counts.sum(2)[..., None]


class OutputNormMetric(Metric):
    """Norm of the head output, and its share of the sum over the heads of the layer."""

    metric_specs = (MetricSpec("output norm", "norm of the head output", "length", "writes more"), OUTPUT_SHARE)

    def compute(self, rows: RowStats) -> tuple[Tensor, Tensor]:
        """Compute the norm and its share, (B, H, 2)."""
        # (B, H, T)
        norms, real_tokens = (
            output_norms(rows.attention_call.z, rows.output_gram),
            rows.batch_context.batch.real_tokens[:, -rows.attention_call.z.shape[2] :],  # queries are the last tokens
        )
        fractions = norms / norms.sum(1, keepdim=True).clamp(min=1e-30)
        return (torch.stack((norms, fractions), -1) * real_tokens[:, None, :, None]).sum(2), real_tokens.sum(1)[
            :, None, None
        ]
