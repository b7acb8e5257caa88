"""Train and measure one configuration. Finished runs are loaded from the store, interrupted runs are resumed."""

import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from headwise.distillation import DistillConfig, distill_loss_factory
from headwise.experiments.engine.declared_code_versions import VERSIONS
from headwise.experiments.engine.experiment_config import INITIALIZERS, ExperimentConfig, TrainedModel
from headwise.experiments.engine.experiment_store import RESULTS_FILE, ExperimentStore
from headwise.experiments.engine.peak_process_memory import peak_memory, peak_memory_available
from headwise.experiments.engine.single_thread import one_thread
from headwise.model import Transformer
from headwise.text import Corpus, make_tokenizer
from headwise.text.synthetic import SyntheticLanguage
from headwise.training import ClozeScore, DivergenceError, LanguageLoss, MakeLoss, TrainResult, synthetic_eval, train

HELD_OUT_DOCUMENTS = 500  # documents for the held-out loss, at most as many as are trained on
EVAL_DOCUMENTS = 600  # documents of the synthetic evaluation
EVAL_SEED_OFFSET = 20_000  # added to the seed of the run to get the seed of the evaluation


def train_or_load(config: ExperimentConfig, store: ExperimentStore) -> TrainedModel:
    """Return the trained model, and train it if it is not in the store. Raises KeyboardInterrupt if training is stopped."""
    folder = store.folder_of(config)
    with store.locked(folder):
        existing = store.load_trained(config)
        if existing is not None:
            return existing
        with one_thread():  # so that the result does not depend on the number of cores
            results = _train(config, folder, store)
        store.write_json(folder / RESULTS_FILE, results)
        for leftover in (
            folder / "tokens",
            folder / "checkpoints",
            *folder.glob(".step-*"),
        ):  # not needed after training
            shutil.rmtree(leftover, ignore_errors=True)
    return TrainedModel(config, folder, results)


def _train(config: ExperimentConfig, folder: Path, store: ExperimentStore) -> dict[str, Any]:
    recipe, runs = config.recipe, list[TrainResult]()
    corpus, valid = _corpora(config, store)

    def save_step(model: Transformer, step: int) -> None:
        if step in config.checkpoint_steps:
            model.save(folder / f"step-{step}")

    def run() -> None:
        callback_every = int(np.gcd.reduce([*config.checkpoint_steps, recipe.steps]))
        result = train(
            _spec_or_initialized_model(config, corpus), corpus, recipe, out=folder, valid=valid, tokenizer=config.tokenizer,
            loss=_loss_factory(config, corpus, store), callback=save_step if config.checkpoint_steps else None,
            callback_every=callback_every, progress=False,
        )  # fmt: skip
        runs.append(result)

    try:
        memory = peak_memory(run) if peak_memory_available() else run()
    except DivergenceError:
        return {"loss": None, "curve": [], "probe_accuracy": {}, "tokens": 0, "speed": None, "memory": None}
    if runs[0].stop_reason == "interrupted":
        raise KeyboardInterrupt
    return _measure(config, runs[0]) | {"memory": memory}


def _loss_factory(config: ExperimentConfig, corpus: Corpus, store: ExperimentStore) -> MakeLoss:
    """Return the training loss: language modeling, or distillation from a teacher that is trained first."""
    if config.teacher is None:
        return LanguageLoss
    teacher = train_or_load(config.teacher, store).load_model()
    losses, pairs = [], "best"
    for term in config.distill_losses.split("+"):
        name, _, pairing = term.partition(" ")
        losses.append(name)
        pairs = pairing or pairs
    head_pairs = _pair_same_address_heads(config, teacher) if pairs == "first" else pairs
    return distill_loss_factory(teacher, DistillConfig(tuple(losses), head_pairs=head_pairs), corpus)


def _pair_same_address_heads(config: ExperimentConfig, teacher: Transformer) -> list[tuple[str, str]]:
    """Pair each head with the teacher's head of the same layer and number."""
    student_heads = config.spec.head_addresses
    teacher_heads = set(teacher.spec.head_addresses)
    return [(str(head), str(head)) for head in student_heads if head in teacher_heads]


def _measure(config: ExperimentConfig, run: TrainResult) -> dict[str, Any]:
    model, num_documents = run.model.eval(), min(EVAL_DOCUMENTS, config.recipe.steps * config.recipe.batch_size)
    speeds = [row["tokens_per_second"] for row in run.history if "tokens_per_second" in row]
    return {
        "loss": run.valid_loss,
        "curve": [(row["step"], row["valid_loss"]) for row in run.history if "valid_loss" in row],
        "probe_accuracy": {}
        if config.text
        else {score.probe: score.accuracy for score in evaluate_synthetic(model, config.recipe.seed, num_documents)},
        "tokens": run.tokens,
        "speed": median(speeds) if speeds else None,
    }


def evaluate_synthetic(model: Transformer, seed: int, documents: int = EVAL_DOCUMENTS) -> tuple[ClozeScore, ...]:
    """Run the synthetic evaluation on documents that are different for each seed."""
    return synthetic_eval(model, documents=documents, seed=EVAL_SEED_OFFSET + seed)


def _spec_or_initialized_model(config: ExperimentConfig, corpus: Corpus) -> Any:
    """Return the spec for the default initialization, else a new model with the custom initialization applied."""
    initialize = INITIALIZERS[config.init]
    if initialize is None:
        return config.spec
    tokenizer = make_tokenizer(config.tokenizer, corpus)
    with torch.random.fork_rng():
        torch.manual_seed(config.recipe.seed)
        model = Transformer(replace(config.spec, vocab=len(tokenizer)))
    model.tokenizer = tokenizer
    initialize(model)
    return model


def _corpora(config: ExperimentConfig, store: ExperimentStore) -> tuple[Corpus, Corpus | None]:
    """Return the training and held-out corpus. Training documents are generated once and shared by all runs of a seed."""
    if config.text:
        return Corpus.of(Path(config.text)), None
    recipe = config.recipe
    documents = recipe.steps * recipe.batch_size
    path = store.folder / "texts" / f"synthetic-{recipe.seed}-{documents}-v{VERSIONS['texts']}.json"
    with store.locked(path):
        texts = store.read_json(path)
        if texts is None:
            texts = [document.text for document in islice(SyntheticLanguage(recipe.seed), documents)]
            store.write_json(path, texts)
    held_out = Corpus.synthetic("held-out", documents=min(HELD_OUT_DOCUMENTS, documents), seed=recipe.seed)
    return Corpus.of(texts), held_out
