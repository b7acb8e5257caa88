"""Evaluate models on tasks, with bootstrap intervals over items, and compare two models on the same items.

The lm-evaluation-harness builds the prompts and scores the answers. Intervals resample items, for two models the same ones,
so that the interval of a difference leaves out the variance that the models share.
"""

import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headwise.errors import ArgumentError, HeadwiseError
from headwise.io.json_values import nonfinite_to_none
from headwise.model import ModelProtocol
from headwise.progress import ProgressOption, callback_of, shows_progress

DRAWS = 1000  # resamples of a bootstrap interval
GROUP_FIELDS = ("phenomenon",)  # fields of a document by which results are split
Aggregation = Callable[[Sequence[Any]], float]


@dataclass(frozen=True)
class MetricResult:
    """One metric of one task.

    Attributes:
        task: Name of the task.
        metric: Name of the metric.
        value: Value over all items.
        low: Lower end of the 95% bootstrap interval over items. NaN for fewer than two items.
        high: Upper end.
        items: Number of items.
        by_group: Value in each group of items, if the task has groups (the phenomena of `minimal_pairs`).
        item_values: Value of each item, or log-likelihood and size for perplexities.
        item_hashes: Hash of each item. Two models are compared only on equal items.
        aggregation: Function from the values of items to the value of the metric.
    """

    task: str
    metric: str
    value: float
    low: float
    high: float
    items: int
    by_group: Mapping[str, float]
    item_values: tuple[Any, ...] = field(repr=False)
    item_hashes: tuple[str, ...] = field(repr=False)
    aggregation: Aggregation = field(repr=False, compare=False)


@dataclass(frozen=True)
class MetricDifference:
    """Difference of two models in one metric on the same items: the model minus the reference.

    Attributes:
        task: Name of the task.
        metric: Name of the metric.
        value: Value of the model.
        reference: Value of the reference.
        difference: Value minus reference.
        low: Lower end of the 95% paired bootstrap interval. NaN for fewer than two items.
        high: Upper end.
        items: Number of items.
    """

    task: str
    metric: str
    value: float
    reference: float
    difference: float
    low: float
    high: float
    items: int


@dataclass(frozen=True)
class EvaluationResult:
    """Results of a model on some tasks.

    Attributes:
        metrics: One entry per task and metric.
        differences: Differences to the reference, if one was given.
    """

    metrics: tuple[MetricResult, ...]
    differences: tuple[MetricDifference, ...] = ()

    def __getitem__(self, task: str) -> dict[str, MetricResult]:
        """Return the metrics of a task by name."""
        by_name = {item.metric: item for item in self.metrics if item.task == task}
        if not by_name:
            names = ", ".join(dict.fromkeys(item.task for item in self.metrics))
            raise ArgumentError(f"task: no result for {task!r}. Use one of {names}.")
        return by_name

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, without the values of items."""
        names = ("task", "metric", "value", "low", "high", "items", "by_group")
        metrics = [{name: getattr(item, name) for name in names} for item in self.metrics]
        return nonfinite_to_none({"metrics": metrics, "differences": [asdict(item) for item in self.differences]})

    def __repr__(self) -> str:
        from headwise.ui.result_text import evaluation_table

        return evaluation_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import evaluation_table

        return evaluation_table(self).as_html()


@shows_progress
def evaluate(
    model: ModelProtocol,
    tasks: str | Sequence[str] = "minimal_pairs",
    *,
    reference: "ModelProtocol | EvaluationResult | None" = None,
    max_items: int | None = None,
    num_fewshot: int | None = None,
    include_path: str | Path | None = None,
    batch_tokens: int = 4096,
    max_length: int | None = None,
    seed: int = 0,
    progress: ProgressOption = None,
) -> EvaluationResult:
    """Evaluate a model in memory on tasks of the lm-evaluation-harness and on local tasks.

    The model may be native, attached, silenced, pruned, quantized or streaming. To evaluate silenced heads, call it inside
    `with model.heads["5.1"].silenced():` and pass the earlier result of the full model as `reference`.

    Args:
        model: A decoder with an output layer and a tokenizer.
        tasks: `minimal_pairs` (120 sentence pairs, offline), paths of text files (.txt) for perplexity, or names of tasks of
            the harness, which downloads their data.
        reference: Model, or result of an earlier evaluation, to compare with on the same items.
        max_items: Maximum number of items per task. None evaluates all.
        num_fewshot: Number of examples in each prompt. None takes that of the task.
        include_path: Folder with task files (.yaml) of your own. They may run code.
        batch_tokens: Maximum number of tokens per batch, padding included.
        max_length: Maximum number of tokens that the model reads at once. None takes the context of the model.
        seed: Seed of the few-shot examples and of the bootstrap.
        progress: Called with stage, done and total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        Metrics of each task with 95% intervals, and the differences to the reference.

    Raises:
        ArgumentError: If a task does not exist, or if the reference was evaluated on other items.
        MissingDependencyError: If lm_eval is not installed.

    >>> import headwise as hw
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = hw.Transformer(hw.ModelSpec(vocab=257, context=128, layers=1, attention=hw.AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> result = evaluate(model, max_items=4)
    >>> result["minimal_pairs"]["acc"].items
    4
    """
    progress = callback_of(progress)
    from headwise.analysis.evaluation.harness_model import HarnessModel

    names = [tasks] if isinstance(tasks, str) else list(tasks)
    if not names or (max_items is not None and max_items < 1):
        raise ArgumentError(
            f"tasks, max_items: needs at least one task and one item. Got tasks={tasks!r} and max_items={max_items}."
        )
    options: dict[str, Any] = {"batch_tokens": batch_tokens, "max_length": max_length, "progress": progress}

    def run(evaluated: ModelProtocol) -> tuple[MetricResult, ...]:
        harness_model = HarnessModel(evaluated, **options)
        with _harness_context():
            loaded = _load_tasks(names, num_fewshot, include_path, seed)
            return _run_tasks(harness_model, loaded, max_items, seed)

    metrics = run(model)
    if reference is None:
        return EvaluationResult(metrics)
    others = reference.metrics if isinstance(reference, EvaluationResult) else run(reference)
    return EvaluationResult(metrics, _differences(metrics, others, seed))


@contextmanager
def _harness_context() -> Iterator[None]:
    """Show only errors of the harness and of datasets. Restore log levels and global random states afterwards."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _load_tasks(
    names: Sequence[str], num_fewshot: int | None, include_path: str | Path | None, seed: int
) -> dict[str, Any]:
    """Load tasks as the harness does for `simple_evaluate`, without changing the global random states."""
    from lm_eval.tasks import TaskManager

    from headwise.analysis.evaluation.local_harness_tasks import local_task

    configs = [local_task(name) for name in names]
    is_local = [config is not None for config in configs]
    specs = [name if config is None else config for name, config in zip(names, configs, strict=True)]
    try:
        folder = None if include_path is None else str(include_path)
        manager = TaskManager(include_path=folder, include_defaults=False)
        if not all(local or name in manager.all_tasks for local, name in zip(is_local, names, strict=True)):
            manager = TaskManager(include_path=folder)  # reads thousands of files
        loaded: dict[str, Any] = dict(manager.load(specs))
    except HeadwiseError:
        raise
    except Exception as error:  # the harness and datasets raise errors of many classes
        raise ArgumentError(
            f"tasks: {', '.join(names)} could not be loaded ({type(error).__name__}: {error}). Use minimal_pairs, a text "
            f"file (.txt), or a task that `lm_eval ls tasks` lists; its data is downloaded."
        ) from error
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        task.set_config(key="num_fewshot", value=own or 0 if num_fewshot is None or own == 0 else num_fewshot)
        task.set_fewshot_seed(seed=seed)
    return loaded


def _run_tasks(
    harness_model: Any, loaded: dict[str, Any], max_items: int | None, seed: int
) -> tuple[MetricResult, ...]:
    from lm_eval.evaluator import evaluate as run_harness

    results: Any = run_harness(
        lm=harness_model,
        task_dict=loaded,
        limit=max_items,
        bootstrap_iters=0,
        log_samples=True,  # pyright: ignore[reportArgumentType]
    )
    aggregations = {name: task.aggregation() for name, task in loaded["tasks"].items()}
    metrics = []
    for task, samples in results["samples"].items():
        for filter_name in dict.fromkeys(sample["filter"] for sample in samples):
            rows = [sample for sample in samples if sample["filter"] == filter_name]
            for metric in rows[0]["metrics"]:
                label = metric if filter_name == "none" else f"{metric},{filter_name}"
                metrics.append(_metric_result(task, label, rows, metric, aggregations[task][metric], seed))
    return tuple(metrics)


def _metric_result(
    task: str, label: str, rows: list[dict[str, Any]], metric: str, aggregation: Aggregation, seed: int
) -> MetricResult:
    values = [row[metric] for row in rows]
    low, high = _bootstrap(len(values), partial(_resampled, values, aggregation), seed)
    groups: dict[str, list[Any]] = {}
    for row, value in zip(rows, values, strict=True):
        for name in GROUP_FIELDS:
            if isinstance(row["doc"], Mapping) and name in row["doc"]:
                groups.setdefault(str(row["doc"][name]), []).append(value)
    by_group = {name: float(aggregation(items)) for name, items in groups.items()}
    hashes = tuple(f"{row['doc_id']}:{row['doc_hash']}:{row['prompt_hash']}" for row in rows)
    value = float(aggregation(values))
    return MetricResult(task, label, value, low, high, len(values), by_group, tuple(values), hashes, aggregation)


def _resampled(values: Sequence[Any], aggregation: Aggregation, indices: np.ndarray) -> np.ndarray:
    """Compute the metric on resampled items: indices (draws, items) → (draws,)."""
    if getattr(aggregation, "__name__", "") == "mean" and all(isinstance(value, int | float) for value in values):
        return np.asarray(values, dtype=float)[indices].mean(1)
    return np.array([float(aggregation([values[i] for i in row])) for row in indices])


def _bootstrap(count: int, metric: Callable[[np.ndarray], np.ndarray], seed: int) -> tuple[float, float]:
    """Return the 95% percentile interval of a metric over resampled items."""
    if count < 2:
        return math.nan, math.nan
    draws = metric(np.random.default_rng(seed).integers(count, size=(DRAWS, count)))
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(low), float(high)


def _differences(
    metrics: Sequence[MetricResult], references: Sequence[MetricResult], seed: int
) -> tuple[MetricDifference, ...]:
    """Compare two models metric by metric on the same items."""
    others = {(item.task, item.metric): item for item in references}
    return tuple(_difference(item, others.get((item.task, item.metric)), seed) for item in metrics)


def _difference(item: MetricResult, other: MetricResult | None, seed: int) -> MetricDifference:
    if other is None or other.item_hashes != item.item_hashes:
        raise ArgumentError(
            f"reference: it was not evaluated on the same items of {item.task}. Evaluate both with equal tasks and options."
        )

    def difference(indices: np.ndarray) -> np.ndarray:
        values, other_values = (_resampled(part.item_values, item.aggregation, indices) for part in (item, other))
        return values - other_values

    low, high = _bootstrap(item.items, difference, seed)
    return MetricDifference(
        item.task, item.metric, item.value, other.value, item.value - other.value, low, high, item.items
    )
