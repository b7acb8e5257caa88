"""Experiment context whose models have results given by the test, so that the expected statistics are known."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headwise.experiments.engine.experiment_config import ExperimentConfig, TrainedModel
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.trained_model_provider import TrainedModelProvider
from tests.experiments.tiny import DEFAULT_RESULTS, SIZE, tiny_experiment

ResultsFunction = Callable[[ExperimentConfig], dict[str, Any]]  # overrides of the default results: {"loss": 2.5}


@dataclass(frozen=True)
class StubExperiment(TrainedModelProvider):
    """Take the results of each run from `results_for`. With `models`, also create untrained models."""

    results_for: ResultsFunction = lambda config: {}
    models: bool = False

    def train_or_load(self, config: ExperimentConfig) -> TrainedModel:
        trained = (
            tiny_experiment(self.store.folder).train_or_load(config)
            if self.models
            else TrainedModel(config, self.store.folder, DEFAULT_RESULTS)
        )
        return replace(trained, results={**trained.results, **self.results_for(config)})


def stub_experiment(
    folder: Path, results_for: ResultsFunction, seeds: tuple[int, ...] = (0,), models: bool = False
) -> StubExperiment:
    """One for a test's own folder."""
    return StubExperiment(ExperimentStore(folder), seeds, SIZE, results_for, models)
