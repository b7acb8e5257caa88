"""Activation checkpointing trades time for memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from headwise.analysis import TokenizedCorpus, default_corpus
from headwise.distributed import run_in_subprocess
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, PlotSpec, Verdict, statistic_key_selector
from headwise.experiments.engine.paired_timing import interleaved_timing
from headwise.experiments.engine.peak_memory import peak_memory
from headwise.experiments.engine.single_thread import one_thread
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.experiment_context import ExperimentContext
from headwise.model import ModelProtocol, Transformer, check_model
from headwise.training import LanguageLoss

DEPTHS = (2, 8)  # layers
MAX_MEMORY_RATIO, MIN_TIME_RATIO = 0.8, 1.1  # of the memory, and times as long: the least that is called a trade
ROUNDS, MEMORY_RUNS = 9, 5  # of the clock, and of memory: each of these in two fresh processes
MAX_LENGTH = 128  # tokens in a row of a text that is given
# and at least and at most so many rows: so many that rows times weights come near this
ROW_LIMITS, TARGET_WORK = ((2, 16), 6e7)


@dataclass(frozen=True)
class CheckpointingMeasurement:
    """A training step with everything kept, and with the insides of blocks computed again."""

    stored: Statistic  # megabytes above weights and gradients
    recomputed: Statistic
    time_ratio: Statistic  # of the second over the first

    @property
    def memory_ratio(self) -> Statistic:
        """Of the second over the first, measurement by measurement."""
        pairs = zip(self.recomputed.values, self.stored.values, strict=True)
        return Statistic.mean_of([recomputed / stored for recomputed, stored in pairs])


def measure_checkpointing(
    model: ModelProtocol, ids: Tensor, rounds: int = ROUNDS, memory_runs: int = MEMORY_RUNS
) -> CheckpointingMeasurement:
    """What checkpointing costs and saves a model in a training step (loss and gradients) on tokens (B, T).

    The model is left alone: copies of it are measured, for memory in fresh processes.
    """
    check_model(model)
    LanguageLoss(model)  # refuses what has no loss
    if model.spec.kind == "encoder-decoder":
        raise HeadwiseError(
            "a step is taken on texts alone, which an encoder-decoder cannot; give a decoder or an encoder."
        )
    with TemporaryDirectory() as scratch:
        folder = str(Path(scratch) / "model")
        model.save(folder)
        saved = (type(model), folder, ids.tolist())
        megabytes = [
            [run_in_subprocess(_measure_memory, *saved, checkpointing) for checkpointing in (False, True)]
            for _ in range(memory_runs)
        ]
        stored, recomputed = (Statistic.mean_of(values) for values in zip(*megabytes, strict=True))
        copy = type(model).reopen(folder).train()
        steps = {name: _make_step(copy, ids.cpu(), name == "recomputed") for name in ("kept", "recomputed")}
        with one_thread():
            ratio = interleaved_timing(steps, "kept", rounds)["recomputed"]
    return CheckpointingMeasurement(stored, recomputed, ratio)


def _measure_memory(model_class: type[ModelProtocol], folder: str, ids: list[list[int]], checkpointing: bool) -> float:
    model, batch = model_class.reopen(folder).train(), torch.tensor(ids)
    small = batch[:1, :4]  # leaves gradients behind, which then count no more
    return peak_memory(_make_step(model, batch, checkpointing), _make_step(model, small, checkpointing))


def _make_step(model: ModelProtocol, ids: Tensor, checkpointing: bool) -> Callable[[], None]:
    def step() -> None:
        model.checkpointing = checkpointing
        LanguageLoss(model)(ids, ids.roll(-1, 1)).backward()

    return step


def measure(
    experiment: ExperimentContext, depths: Sequence[int] = DEPTHS, rounds: int = ROUNDS, memory_runs: int = MEMORY_RUNS
) -> StatisticTable:
    """Untrained models of the lab's size, shallow and deep: what a step takes does not hang on what was learned."""
    statistics, size = StatisticTable(), experiment.size
    for layers in depths:
        torch.manual_seed(0)
        spec = experiment.make_config(0, layers=layers).spec
        ids = torch.randint(spec.vocab, (size.batch_size, size.context))
        _add_cost(statistics, layers, measure_checkpointing(Transformer(spec), ids, rounds, memory_runs))
    return statistics


def measure_model(
    model: ModelProtocol, text: Any = None, rounds: int = ROUNDS, memory_runs: int = MEMORY_RUNS
) -> StatisticTable:
    """The model itself, on the beginning of a text."""
    max_length, weights = min(MAX_LENGTH, model.spec.context), sum(weight.numel() for weight in model.parameters())
    max_rows = min(ROW_LIMITS[1], max(ROW_LIMITS[0], int(TARGET_WORK // weights)))
    corpus = TokenizedCorpus.of(model, default_corpus(model) if text is None else text)
    tokens = list(islice(chain.from_iterable(sample.ids for sample in corpus), max_rows * max_length))
    rows = max(1, len(tokens) // max_length)
    ids = torch.tensor(tokens[: rows * max_length]).view(rows, -1)  # (B, T)
    statistics = StatisticTable()
    _add_cost(statistics, model.spec.layers, measure_checkpointing(model, ids, rounds, memory_runs))
    return statistics


def _add_cost(statistics: StatisticTable, layers: int, cost: CheckpointingMeasurement) -> None:
    statistics.add("MB kept", layers, cost.stored).add("MB recomputed", layers, cost.recomputed)
    statistics.add("memory ratio", layers, cost.memory_ratio).add("time ratio", layers, cost.time_ratio)


def judge(statistics: StatisticTable) -> Verdict:
    """By `rule`."""
    memory, time = statistics.by_condition("memory ratio"), statistics.by_condition("time ratio")
    confirmed = [
        layers
        for layers in memory
        if memory[layers].is_interval_below(MAX_MEMORY_RATIO) and time[layers].is_interval_above(MIN_TIME_RATIO)
    ]
    shortfalls = {
        layers: [
            shortfall
            for shortfall, is_short in (
                ("saved", memory[layers].is_interval_above(MAX_MEMORY_RATIO)),
                ("paid", time[layers].is_interval_below(MIN_TIME_RATIO)),
            )
            if is_short
        ]
        for layers in memory
    }
    refuted = [layers for layers, shortfall in shortfalls.items() if shortfall]
    unsure = [layers for layers in memory if layers not in (*confirmed, *refuted)]
    if len(confirmed) == len(memory):
        return Verdict("holds")
    if len(refuted) == len(memory):
        return Verdict("does not hold")
    details = [f"at {layers} layers little is {' and '.join(shortfalls[layers])}" for layers in refuted]
    details += [f"at {layers} layers it stays open" for layers in unsure]
    return Verdict("depends", f"on the {'measurement' if unsure else 'depth'}: {'; '.join(details)}")


CLAIM = Claim(
    number=18,
    name="checkpointing",
    statement="Activation checkpointing trades time for memory.",
    counterevidence="A training step that takes about as much memory with checkpointing as without, or that takes no longer.",
    setup="Models of the lab's width with few layers and with many: the peak memory of a training step above weights "
    "and gradients, in fresh processes, and its time, in turns on one thread, with the insides of blocks kept or "
    "computed again in the backward pass. Ratios are of the second over the first: of memory the mean of several "
    "measurements, of time the median over turns.",
    rule=f"It is a trade where memory surely falls below {MAX_MEMORY_RATIO:g} times and time surely rises above "
    f"{MIN_TIME_RATIO:g} times, and none where one of these surely is not so. Holds if it is one at every depth, does "
    "not hold if at none; else depends, on the measurement if some depth stays open, or on the depth.",
    judged=statistic_key_selector("memory ratio", "time ratio"),
    measure=measure,
    judge=judge,
    plot=PlotSpec(("memory ratio", "time ratio"), x="layers", y="computed again, kept = 1"),
    timed=True,
    measure_model=measure_model,
)
