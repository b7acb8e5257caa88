"""The measures that every profile has of its texts."""

from torch import Tensor

from headwise.analysis.metrics.metric import Measure
from headwise.analysis.metrics.offsets import Far, Largest, LongRange, Near
from headwise.analysis.metrics.row_shape import Confidence, Shape, Writes
from headwise.analysis.metrics.token_classes import class_measures


def usual_measures(flags: Tensor) -> list[Measure]:
    """All that is taken from the rows of texts; `flags` (V, c) are the classes of tokens."""
    return [Writes(), Confidence(), Largest(), Far(), LongRange(), Shape(), *class_measures(flags), Near()]
