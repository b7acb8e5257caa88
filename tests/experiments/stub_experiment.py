"""A lab whose points tell what a test says: any loss, any marks, so that what is measured of them is known beforehand."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headwise.experiments.engine.experiment_config import Made, Point
from headwise.experiments.engine.store import Store
from headwise.experiments.experiment import Lab
from tests.experiments.tiny import SIZE, TOLD, tiny_lab

Tell = Callable[[Point], dict[str, Any]]  # what a point tells beside the usual: {"loss": 2.5}


@dataclass(frozen=True)
class Told(Lab):
    """What is told of each point comes from `tell`; with `models` there are some as well, as in a tiny lab."""

    tell: Tell = lambda point: {}
    models: bool = False

    def made(self, point: Point) -> Made:
        made = tiny_lab(self.store.folder).made(point) if self.models else Made(point, self.store.folder, TOLD)
        return replace(made, results={**made.results, **self.tell(point)})


def told_lab(folder: Path, tell: Tell, seeds: tuple[int, ...] = (0,), models: bool = False) -> Told:
    """One for a test's own folder."""
    return Told(Store(folder), seeds, SIZE, tell, models)
