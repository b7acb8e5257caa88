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
from headwise.errors import UnsupportedModelError
from headwise.experiments.claim import Claim, PlotSpec, Verdict, statistic_key_selector
from headwise.experiments.engine.paired_timing import interleaved_timing
from headwise.experiments.engine.peak_process_memory import peak_memory
from headwise.experiments.engine.single_thread import one_thread
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.model import ModelProtocol, Transformer, check_model
from headwise.training import LanguageLoss

DEPTHS = (2, 8)  # layers
MAX_MEMORY_RATIO, MIN_TIME_RATIO = 0.8, 1.1  # largest memory ratio and smallest time ratio that count as a trade
ROUNDS, MEMORY_RUNS = 9, 5  # timing rounds, and memory measurements (each in two fresh processes)
MAX_LENGTH = 128  # tokens per row of a given text
# Smallest and largest number of rows, and target for rows × weights.
ROW_LIMITS, TARGET_WORK = ((2, 16), 6e7)


@dataclass(frozen=True)
class CheckpointingMeasurement:
    """Memory and time of a training step, with activations stored and with activations recomputed.

    Attributes:
        stored: Megabytes above weights and gradients, with stored activations.
        recomputed: Megabytes above weights and gradients, with recomputed activations.
        time_ratio: Time with recomputed activations over time with stored ones.
    """

    stored: Statistic
    recomputed: Statistic
    time_ratio: Statistic

    @property
    def memory_ratio(self) -> Statistic:
        """Memory with recomputed activations over memory with stored ones, paired by measurement."""
        pairs = zip(self.recomputed.values, self.stored.values, strict=True)
        return Statistic.mean_of([recomputed / stored for recomputed, stored in pairs])


def measure_checkpointing(
    model: ModelProtocol, ids: Tensor, rounds: int = ROUNDS, memory_runs: int = MEMORY_RUNS
) -> CheckpointingMeasurement:
    """Measure the memory and time of a training step (loss and gradients) on tokens (B, T), with and without checkpointing.

    The given model is not changed: copies are measured, in fresh processes for memory.
    """
    check_model(model)
    LanguageLoss(model)  # raises an error if the model has no loss
    if model.spec.kind == "encoder-decoder":
        raise UnsupportedModelError(
            "model: an encoder-decoder is not supported because the training step uses texts without sources. "
            "Use a decoder or an encoder."
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
        steps = {
            name: _make_step(copy, ids.cpu(), checkpointing=name == "recomputed") for name in ("kept", "recomputed")
        }
        with one_thread():
            ratio = interleaved_timing(steps, "kept", rounds)["recomputed"]
    return CheckpointingMeasurement(stored, recomputed, ratio)


def _measure_memory(model_class: type[ModelProtocol], folder: str, ids: list[list[int]], checkpointing: bool) -> float:
    model, batch = model_class.reopen(folder).train(), torch.tensor(ids)
    small = batch[:1, :4]  # allocates the gradients, which are then not counted
    return peak_memory(
        _make_step(model, batch, checkpointing=checkpointing), _make_step(model, small, checkpointing=checkpointing)
    )


def _make_step(model: ModelProtocol, ids: Tensor, *, checkpointing: bool) -> Callable[[], None]:
    def step() -> None:
        model.checkpointing = checkpointing
        LanguageLoss(model)(ids, ids.roll(-1, 1)).backward()

    return step


def measure(
    experiment: TrainedModelProvider,
    depths: Sequence[int] = DEPTHS,
    rounds: int = ROUNDS,
    memory_runs: int = MEMORY_RUNS,
) -> StatisticTable:
    """Measure untrained models, shallow and deep. Memory and time do not depend on the values of the weights."""
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
    """Measure the given model on the first tokens of a text."""
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
    """Apply the rule of CLAIM."""
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
    details += [f"at {layers} layers the result is inconclusive" for layers in unsure]
    return Verdict("undecided" if unsure else "depends", f"{'' if unsure else 'on the depth: '}{'; '.join(details)}")


CLAIM = Claim(
    number=18,
    name="checkpointing",
    statement="Activation checkpointing trades time for memory.",
    counterevidence="A training step that needs about as much memory with checkpointing as without, or that takes no longer.",
    setup="Models of the default width with few layers and with many. The peak memory of a training step above weights "
    "and gradients is measured in fresh processes, and its time in interleaved runs on one thread, with the activations "
    "inside blocks stored or recomputed in the backward pass. Ratios are recomputed over stored: for memory the mean of "
    "several measurements, for time the median over rounds.",
    rule=f"A depth shows a trade if memory is significantly below {MAX_MEMORY_RATIO:g} times and time significantly above "
    f"{MIN_TIME_RATIO:g} times, and shows none if one of these is significantly false. Holds if every depth shows a trade, "
    "does not hold if none does. Otherwise depends: undecided if some depth is inconclusive, else on the depth.",
    judged=statistic_key_selector("memory ratio", "time ratio"),
    measure=measure,
    judge=judge,
    plot=PlotSpec(("memory ratio", "time ratio"), x="layers", y="recomputed, stored = 1"),
    timed=True,
    measure_model=measure_model,
)
