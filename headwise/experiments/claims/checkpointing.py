"""Activation checkpointing trades time for memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.recording.tokenized_corpus import Reading, documents_for
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, Picture, Verdict, every
from headwise.experiments.engine.memory import rise
from headwise.experiments.engine.pool import apart
from headwise.experiments.engine.statistic import Figure, Figures
from headwise.experiments.engine.threads import one_thread
from headwise.experiments.engine.timing import race
from headwise.experiments.experiment import Lab
from headwise.model import AnyModel, Transformer, check_model
from headwise.training.loss import LanguageLoss

DEPTHS = (2, 8)  # layers
LESS, LONGER = 0.8, 1.1  # of the memory, and times as long: the least that is called a trade
TURNS, MEASURED = 9, 5  # of the clock, and of memory: each of these in two fresh processes
LONGEST = 128  # tokens in a row of a text that is given
ROWS, WORK = (2, 16), 6e7  # and at least and at most so many rows: so many that rows times weights come near this


@dataclass(frozen=True)
class Trade:
    """A training step with everything kept, and with the insides of blocks computed again."""

    kept: Figure  # megabytes above weights and gradients
    recomputed: Figure
    time: Figure  # of the second over the first

    @property
    def memory(self) -> Figure:
        """Of the second over the first, measurement by measurement."""
        pairs = zip(self.recomputed.values, self.kept.values, strict=True)
        return Figure.over([some / all_of_it for some, all_of_it in pairs])


def trade(model: AnyModel, ids: Tensor, turns: int = TURNS, measured: int = MEASURED) -> Trade:
    """What checkpointing costs and saves a model in a training step (loss and gradients) on tokens (B, T).

    The model is left alone: copies of it are measured, for memory in fresh processes.
    """
    check_model(model)
    LanguageLoss(model)  # refuses what has no loss
    if model.spec.kind == "encoder-decoder":
        raise HeadwiseError(
            "a step is taken on texts alone, which an encoder-decoder cannot; give a decoder or an encoder."
        )
    with TemporaryDirectory() as place:
        folder = str(Path(place) / "model")
        model.save(folder)
        saved = (type(model), folder, ids.tolist())
        megabytes = [
            [apart(_memory, *saved, checkpointing) for checkpointing in (False, True)] for _ in range(measured)
        ]
        kept, recomputed = (Figure.over(some) for some in zip(*megabytes, strict=True))
        copy = type(model).reopen(folder).train()
        steps = {name: _step(copy, ids.cpu(), name == "recomputed") for name in ("kept", "recomputed")}
        with one_thread():
            ratio = race(steps, "kept", turns)["recomputed"]
    return Trade(kept, recomputed, ratio)


def _memory(kind: type[AnyModel], folder: str, ids: list[list[int]], checkpointing: bool) -> float:
    model, given = kind.reopen(folder).train(), torch.tensor(ids)
    small = given[:1, :4]  # leaves gradients behind, which then count no more
    return rise(_step(model, given, checkpointing), _step(model, small, checkpointing))


def _step(model: AnyModel, ids: Tensor, checkpointing: bool) -> Callable[[], None]:
    def step() -> None:
        model.checkpointing = checkpointing
        LanguageLoss(model)(ids, ids.roll(-1, 1)).backward()

    return step


def measure(lab: Lab, depths: Sequence[int] = DEPTHS, turns: int = TURNS, measured: int = MEASURED) -> Figures:
    """Untrained models of the lab's size, shallow and deep: what a step takes does not hang on what was learned."""
    figures, size = Figures(), lab.size
    for layers in depths:
        torch.manual_seed(0)
        spec = lab.point(0, layers=layers).spec
        ids = torch.randint(spec.vocab, (size.batch, size.context))
        _add(figures, layers, trade(Transformer(spec), ids, turns, measured))
    return figures


def on(model: AnyModel, text: Any = None, turns: int = TURNS, measured: int = MEASURED) -> Figures:
    """The model itself, on the beginning of a text."""
    longest, weights = min(LONGEST, model.spec.context), sum(weight.numel() for weight in model.parameters())
    most = min(ROWS[1], max(ROWS[0], int(WORK // weights)))
    units = Reading.of(model, documents_for(model) if text is None else text)
    tokens = list(islice(chain.from_iterable(unit.ids for unit in units), most * longest))
    rows = max(1, len(tokens) // longest)
    ids = torch.tensor(tokens[: rows * longest]).view(rows, -1)  # (B, T)
    figures = Figures()
    _add(figures, model.spec.layers, trade(model, ids, turns, measured))
    return figures


def _add(figures: Figures, layers: int, made: Trade) -> None:
    figures.add("MB kept", layers, made.kept).add("MB recomputed", layers, made.recomputed)
    figures.add("memory ratio", layers, made.memory).add("time ratio", layers, made.time)


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    memory, time = figures.at("memory ratio"), figures.at("time ratio")
    so = [layers for layers in memory if memory[layers].below(LESS) and time[layers].above(LONGER)]
    little = {
        layers: [
            what for what, few in (("saved", memory[layers].above(LESS)), ("paid", time[layers].below(LONGER))) if few
        ]
        for layers in memory
    }
    not_so = [layers for layers, what in little.items() if what]
    unsure = [layers for layers in memory if layers not in (*so, *not_so)]
    if len(so) == len(memory):
        return Verdict("holds")
    if len(not_so) == len(memory):
        return Verdict("does not hold")
    told = [f"at {layers} layers little is {' and '.join(little[layers])}" for layers in not_so]
    told += [f"at {layers} layers it stays open" for layers in unsure]
    return Verdict("depends", f"on the {'measurement' if unsure else 'depth'}: {'; '.join(told)}")


CLAIM = Claim(
    number=18,
    name="checkpointing",
    says="Activation checkpointing trades time for memory.",
    against="A training step that takes about as much memory with checkpointing as without, or that takes no longer.",
    setup="Models of the lab's width with few layers and with many: the peak memory of a training step above weights and "
    "gradients, in fresh processes, and its time, in turns on one thread, with the insides of blocks kept or computed again "
    "in the backward pass. Ratios are of the second over the first: of memory the mean of several measurements, of time the "
    "median over turns.",
    rule=f"It is a trade where memory surely falls below {LESS:g} times and time surely rises above {LONGER:g} times, and "
    "none where one of these surely is not so. Holds if it is one at every depth, does not hold if at none; else "
    "depends, on the "
    "measurement if some depth stays open, or on the depth.",
    asks=every("memory ratio", "time ratio"),
    measure=measure,
    judge=judge,
    picture=Picture(("memory ratio", "time ratio"), x="layers", y="computed again, kept = 1"),
    timed=True,
    on=on,
)
