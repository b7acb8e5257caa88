"""Metrics of every text profile."""

from torch import Tensor

from headwise.analysis.metrics.metric import Metric
from headwise.analysis.metrics.offsets import (
    ArgmaxOffsetMetric,
    DistanceBinMetric,
    LongRangeMetric,
    WeightPerOffsetMetric,
)
from headwise.analysis.metrics.row_shape import ConfidenceMetric, OutputNormMetric, RowShapeMetric
from headwise.analysis.metrics.token_classes import token_class_metrics


def token_free_metrics() -> list[Metric]:
    """Return the metrics that need no tokens, only positions and weights."""
    return [
        OutputNormMetric(),
        ConfidenceMetric(),
        ArgmaxOffsetMetric(),
        DistanceBinMetric(),
        LongRangeMetric(),
        RowShapeMetric(),
        WeightPerOffsetMetric(),
    ]


def default_metrics(flags: Tensor) -> list[Metric]:
    """Return the metrics of a text profile. `flags` (V, c) are the token classes."""
    return [
        OutputNormMetric(),
        ConfidenceMetric(),
        ArgmaxOffsetMetric(),
        DistanceBinMetric(),
        LongRangeMetric(),
        RowShapeMetric(),
        *token_class_metrics(flags),
        WeightPerOffsetMetric(),
    ]
