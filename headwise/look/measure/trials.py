"""Trials: measures on texts of their own, whatever the corpus is."""

from abc import abstractmethod

import numpy as np

from headwise.look.measure.listening import read_texts
from headwise.look.measure.measure import Measure
from headwise.look.measure.surface import Surface
from headwise.look.measure.tally import Tally
from headwise.look.record.units import Unit, make_batches
from headwise.model import AnyModel

TOKENS = 2048  # in a batch


class Trial(Measure):
    """A measure of three numbers, the score, its null and its twin, on texts of its own.

    The score and the twin are taken from some texts; the null is the score at the same places of others, which have
    everything but what is looked for. Each pair of texts is a unit of the statistics.
    """

    @abstractmethod
    def texts(self, model: AnyModel, seed: int) -> tuple[list[Unit], list[Unit]]:
        """The texts, and the others, one for each. None at all where the model cannot be asked."""


def run_trial(model: AnyModel, trial: Trial, tally: Tally, seed: int = 0) -> None:
    """Read the texts of a trial and add up what it takes."""
    tally.expect(trial.names)
    group, found = trial.names[0], []
    for units in trial.texts(model, seed):
        counted = Tally(tally.heads)
        read_texts(model, make_batches(units, TOKENS, device=model.device), Surface(counted, None, [trial]))
        found.append(counted)
    score, valued = 0, 2  # of the three numbers
    for kind in ("sums", "counts"):
        here, there = (getattr(made, kind)[group] for made in found)  # (buckets, heads, 3)
        getattr(tally, kind)[group] += np.stack((here[..., score], there[..., score], here[..., valued]), -1)
