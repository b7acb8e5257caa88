"""A lab whose points are made in no time: models of random weights, other ones for every step, that were never trained."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from headwise.experiments.engine.experiment_config import STARTS, Made, Point
from headwise.experiments.engine.store import Store
from headwise.experiments.experiment import Lab, LabSize
from headwise.model import Transformer
from headwise.text.build_tokenizers import add_frame, make_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.synthetic import VOCABULARY

SIZE = LabSize(width=16, heads=4, layers=2, steps=8, batch=4, documents=20)
TOLD = {"loss": 3.0, "curve": [], "marks": {}, "tokens": 0, "speed": None, "memory": None}


class Untrained(Lab):
    """`made` gives a point without training it."""

    def made(self, point: Point) -> Made:
        place = self.store.place(point)
        for step in (*point.watch, point.recipe.steps):
            folder = place / ("model" if step == point.recipe.steps else f"step-{step}")
            if not folder.is_dir():
                place.mkdir(exist_ok=True)
                _drawn(point, 1000 * point.recipe.seed + step).save(folder)
        return Made(point, place, json.loads(json.dumps(TOLD)))


def tiny_lab(folder: Path, seeds: tuple[int, ...] = (0,)) -> Lab:
    """One for a test's own folder."""
    return Untrained(Store(folder), seeds, SIZE)


@torch.no_grad()
def make_copies(model: Transformer) -> None:
    """Every head of a layer becomes its first."""
    for layer in model.attention_layers():
        for head in list(layer.heads)[1:]:
            for letter in "QKVO":
                getattr(head, f"W_{letter}").copy_(getattr(layer.heads[0], f"W_{letter}"))


def _drawn(point: Point, seed: int) -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(replace(point.spec, vocab=len(_words())))
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(4 if value.ndim > 1 else 1)  # so that heads look somewhere
    begin = STARTS[point.start]
    if begin is not None:
        begin(model)
    model.tokenizer = _words()
    return model


@cache
def _words():
    return add_frame(make_tokenizer("word", Corpus.of([" ".join(VOCABULARY)])))  # as training leaves it
