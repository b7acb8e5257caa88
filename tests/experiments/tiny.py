"""Experiment context with untrained models: random weights, different for every step."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from headwise.experiments.engine.experiment_config import INITIALIZERS, ExperimentConfig, TrainedModel
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.trained_model_provider import ExperimentSize, TrainedModelProvider
from headwise.model import Transformer
from headwise.text.build_tokenizers import add_bos_eos, make_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.synthetic import VOCABULARY

SIZE = ExperimentSize(width=16, heads=4, layers=2, steps=8, batch_size=4, documents=20)
DEFAULT_RESULTS = {"loss": 3.0, "curve": [], "probe_accuracy": {}, "tokens": 0, "speed": None, "memory": None}


class UntrainedExperiment(TrainedModelProvider):
    """Return random models without training them."""

    def train_or_load(self, config: ExperimentConfig) -> TrainedModel:
        root = self.store.folder_of(config)
        for step in (*config.checkpoint_steps, config.recipe.steps):
            folder = root / ("model" if step == config.recipe.steps else f"step-{step}")
            if not folder.is_dir():
                root.mkdir(exist_ok=True)
                _random_model(config, 1000 * config.recipe.seed + step).save(folder)
        return TrainedModel(config, root, json.loads(json.dumps(DEFAULT_RESULTS)))


def tiny_experiment(folder: Path, seeds: tuple[int, ...] = (0,)) -> TrainedModelProvider:
    """One for a test's own folder."""
    return UntrainedExperiment(ExperimentStore(folder), seeds, SIZE)


@torch.no_grad()
def copy_first_head(model: Transformer) -> None:
    """Copy the first head of each layer to all others."""
    for layer in model.attention_layers():
        for head in list(layer.heads)[1:]:
            for matrix in "QKVO":
                getattr(head, f"W_{matrix}").copy_(getattr(layer.heads[0], f"W_{matrix}"))


def _random_model(config: ExperimentConfig, seed: int) -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(replace(config.spec, vocab=len(_word_tokenizer())))
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(4 if value.ndim > 1 else 1)  # so that heads look somewhere
    apply_start = INITIALIZERS[config.init]
    if apply_start is not None:
        apply_start(model)
    model.tokenizer = _word_tokenizer()
    return model


@cache
def _word_tokenizer():
    return add_bos_eos(make_tokenizer("word", Corpus.of([" ".join(VOCABULARY)])))  # as training leaves it
