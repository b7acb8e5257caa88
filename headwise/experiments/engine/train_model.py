"""Train one point and measure it, once: what is there is taken from the store, what was interrupted goes on."""

import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from headwise.distillation.distill import lesson_of
from headwise.distillation.distill_config import Lesson
from headwise.experiments.engine.experiment_config import STARTS, Made, Point
from headwise.experiments.engine.memory import is_known, rise
from headwise.experiments.engine.store import DONE, Store
from headwise.experiments.engine.threads import one_thread
from headwise.experiments.engine.versions import VERSIONS
from headwise.model import Transformer
from headwise.text.build_tokenizers import make_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.synthetic import LittleLanguage
from headwise.training import train
from headwise.training.loop import Diverged, Trained
from headwise.training.loss import LanguageLoss, MakeLoss
from headwise.training.synthetic_eval import Mark, exam

HELD_OUT = 500  # documents of the little language the loss is measured on; no more than are learned from
EXAMINED = 600  # and those of the exam,
EXAM = 20_000  # whose seed is that of the point and so much more


def make(point: Point, store: Store) -> Made:
    """A trained point; trained now if it is not there. Raises KeyboardInterrupt if training was told to stop."""
    place = store.place(point)
    with store.holding(place):
        found = store.made(point)
        if found is not None:
            return found
        with one_thread():  # so that it is the same bits whoever trains it
            told = _train(point, place, store)
        store.write(place / DONE, told)
        for litter in (place / "tokens", place / "checkpoints", *place.glob(".step-*")):  # a finished run needs none
            shutil.rmtree(litter, ignore_errors=True)
    return Made(point, place, told)


def _train(point: Point, place: Path, store: Store) -> dict[str, Any]:
    recipe, runs = point.recipe, list[Trained]()
    corpus, valid = _texts(point, store)

    def keep(model: Transformer, step: int) -> None:
        if step in point.watch:
            model.save(place / f"step-{step}")

    def run() -> None:
        every = int(np.gcd.reduce([*point.watch, recipe.steps]))
        made = train(
            _beginning(point, corpus), corpus, recipe, out=place, valid=valid, tokenizer=point.tokenizer,
            loss=_loss(point, corpus, store), call=keep if point.watch else None, every=every, progress=False,
        )  # fmt: skip
        runs.append(made)

    try:
        memory = rise(run) if is_known() else run()
    except Diverged:
        return {"loss": None, "curve": [], "marks": {}, "tokens": 0, "speed": None, "memory": None}
    if runs[0].stopped == "interrupted":
        raise KeyboardInterrupt
    return _measure(point, runs[0]) | {"memory": memory}


def _loss(point: Point, corpus: Corpus, store: Store) -> MakeLoss:
    """What it learns from: the text, or a teacher that is trained first."""
    if point.teacher is None:
        return LanguageLoss
    teacher = make(point.teacher, store).model()
    losses, pairs = [], "best"
    for part in point.by.split("+"):
        name, _, paired = part.partition(" ")
        losses.append(name)
        pairs = paired or pairs
    given = _first_layers(point, teacher) if pairs == "first" else pairs
    return lesson_of(teacher, Lesson(tuple(losses), pairs=given), corpus)


def _first_layers(point: Point, teacher: Transformer) -> list[tuple[str, str]]:
    """Every layer with the teacher's of the same number, its heads in order."""
    own = point.spec.addresses
    theirs = set(teacher.spec.addresses)
    return [(str(head), str(head)) for head in own if head in theirs]


def _measure(point: Point, run: Trained) -> dict[str, Any]:
    model, asked = run.model.eval(), min(EXAMINED, point.recipe.steps * point.recipe.batch)
    speeds = [row["tokens_per_second"] for row in run.history if "tokens_per_second" in row]
    return {
        "loss": run.valid_loss,
        "curve": [(row["step"], row["valid_loss"]) for row in run.history if "valid_loss" in row],
        "marks": {} if point.text else {mark.quiz: mark.right for mark in examine(model, point.recipe.seed, asked)},
        "tokens": run.tokens,
        "speed": median(speeds) if speeds else None,
    }


def examine(model: Transformer, seed: int, documents: int = EXAMINED) -> tuple[Mark, ...]:
    """The exam of a seed: documents that other seeds are not asked about."""
    return exam(model, documents=documents, seed=EXAM + seed)


def _beginning(point: Point, corpus: Corpus) -> Any:
    """The spec, for a model begun as usual; else a new model, changed before its first step."""
    begin = STARTS[point.start]
    if begin is None:
        return point.spec
    tokenizer = make_tokenizer(point.tokenizer, corpus)
    with torch.random.fork_rng():
        torch.manual_seed(point.recipe.seed)
        model = Transformer(replace(point.spec, vocab=len(tokenizer)))
    model.tokenizer = tokenizer
    begin(model)
    return model


def _texts(point: Point, store: Store) -> tuple[Corpus, Corpus | None]:
    """What is learned and what is held out. Documents of the little language are written once for all points of a seed."""
    if point.text:
        return Corpus.of(Path(point.text)), None
    recipe = point.recipe
    documents = recipe.steps * recipe.batch
    path = store.folder / "texts" / f"little-{recipe.seed}-{documents}-v{VERSIONS['texts']}.json"
    with store.holding(path):
        texts = store.read(path)
        if texts is None:
            texts = [document.text for document in islice(LittleLanguage(recipe.seed), documents)]
            store.write(path, texts)
    held_out = Corpus.little("held-out", documents=min(HELD_OUT, documents), seed=recipe.seed)
    return Corpus.of(texts), held_out
