"""The measures that every profile has of its texts."""

from torch import Tensor

from headwise.look.measure.classes import class_measures
from headwise.look.measure.diagonals import Far, Largest, LongRange, Near
from headwise.look.measure.measure import Measure
from headwise.look.measure.shape import Confidence, Shape, Writes


def usual_measures(flags: Tensor) -> list[Measure]:
    """All that is taken from the rows of texts; `flags` (V, c) are the classes of tokens."""
    return [Writes(), Confidence(), Largest(), Far(), LongRange(), Shape(), *class_measures(flags), Near()]
