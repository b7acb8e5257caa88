import math

import pytest

from headwise.experiments.claim_tests.depth_vs_heads import (
    CLAIM,
    GAP,
    MODELS,
    equal_parameter_configs,
    final_and_mean_gap,
    judge,
    measure,
)
from headwise.experiments.engine.experiment_config import ExperimentConfig, TrainedModel
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.trained_model_provider import ExperimentSize, TrainedModelProvider
from headwise.text.synthetic import VOCABULARY

CASES = {
    "holds": [(GAP, "at the end", [0.05, 0.06, 0.055]), (GAP, "over training", [0.04, 0.045, 0.05])],
    "does not hold": [(GAP, "at the end", [-0.05, -0.06, -0.055]), (GAP, "over training", [0.0, 0.001, -0.001])],
    "depends": [(GAP, "at the end", [0.05, 0.06, 0.055]), (GAP, "over training", [-0.04, -0.05, -0.045])],
}


def test_curve_gap_equals_closed_form():
    # 0 at the first step and 1 at the last, in a straight line: half.
    assert final_and_mean_gap({0: 1.0, 10: 1.5, 20: 2.0}, {0: 1.0, 10: 1.0, 20: 1.0}) == (1.0, 0.5)
    assert final_and_mean_gap({0: 1.0, 30: 1.0, 40: 2.0}, {0: 1.0, 30: 1.0, 40: 1.0})[1] == pytest.approx(1 / 8)
    assert final_and_mean_gap({5: 3.0}, {5: 1.0}) == (2.0, 2.0)


def test_model_triple_differs_in_layers_or_heads(tmp_path):
    full, fewer_layers, fewer_heads = equal_parameter_configs(
        TrainedModelProvider(ExperimentStore(tmp_path)), 1
    ).values()
    assert [p.spec.layers for p in (full, fewer_layers, fewer_heads)] == [6, 5, 6]
    assert [p.spec.attention.heads for p in (full, fewer_layers, fewer_heads)] == [8, 8, 4]
    assert full.recipe == fewer_layers.recipe == fewer_heads.recipe
    assert full.recipe.steps == 1200


class CurveStubExperiment(TrainedModelProvider):
    """The loss starts at 4 and falls by 1 nat per step for the full model, by half of that for smaller ones."""

    def train_or_load(self, config: ExperimentConfig) -> TrainedModel:
        reduced = {
            name for name, candidate in equal_parameter_configs(self, config.recipe.seed).items() if candidate == config
        } - {"full"}
        curve = [(step, 4 - step / (2 if reduced else 1)) for step in range(1, config.recipe.steps + 1)]
        return TrainedModel(
            config, self.store.folder, {"loss": curve[-1][1], "curve": [] if self.size.learning_rate > 1 else curve}
        )


def test_depth_curves_are_compared_per_seed(tmp_path):
    # 3 steps for these
    experiment = CurveStubExperiment(ExperimentStore(tmp_path), (0, 1), ExperimentSize(width=16, heads=4, steps=5))
    statistics = measure(experiment)
    assert [[statistics[name, step].mean for step in (1, 2, 3)] for name in MODELS] == [[3, 2, 1], *[[3.5, 3, 2.5]] * 2]
    assert statistics["nats above the full model, at the end", "fewer heads"].values == (1.5, 1.5)
    assert statistics["nats above the full model, over training", "fewer layers"].mean == 1
    assert statistics[GAP, "at the end"].mean == statistics[GAP, "over training"].mean == 0
    assert judge(statistics).word == "does not hold"
    assert set(CLAIM.training_configs(experiment)) == {
        config for seed in (0, 1) for config in equal_parameter_configs(experiment, seed).values()
    }


def test_depth_diverged_run_counts_as_uniform_guess(tmp_path):
    experiment = CurveStubExperiment(
        ExperimentStore(tmp_path), (0,), ExperimentSize(width=16, heads=4, steps=5, learning_rate=2.0)
    )
    assert measure(experiment)["fewer heads", 3].mean == math.log(len(VOCABULARY))
