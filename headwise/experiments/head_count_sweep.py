"""The trade-off of heads: one model for each head count and seed, all else equal."""

import hashlib
import json
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.distributed import check_executor, run_jobs_as_completed
from headwise.errors import HeadwiseError
from headwise.experiments.engine.declared_code_versions import version_string
from headwise.experiments.engine.experiment_config import ExperimentConfig, TrainedModel
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.engine.statistic import Statistic
from headwise.experiments.engine.training_pool import train_all
from headwise.experiments.equal_parameter_specs import reduce_layers_or_heads
from headwise.experiments.experiment_context import SYNTHETIC_VOCAB_SIZE, default_config, default_recipe
from headwise.experiments.head_diversity import head_diversity
from headwise.progress import Progress
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text import Corpus

MIN_CONTEXT = 128  # context that holds every document of the synthetic language
HELD_OUT_DOCUMENTS = 100  # held out, on which the maps of heads are compared


@dataclass(frozen=True)
class SweepRow:
    """One head count: its sizes, and what its models came to, over seeds."""

    name: str
    heads: int
    head_dim: int
    layers: int
    parameters: int
    loss: Statistic  # held out, nats a token
    probe_accuracy: dict[str, Statistic]  # right answers by kind of quiz, on the synthetic language
    # js: how far the maps of a layer's heads are apart; write: how far they write alike
    diversity: dict[str, Statistic]
    speed: Statistic  # tokens a second, with the other points running beside
    memory: Statistic  # megabytes at the peak of training, above what the process held before


@dataclass(frozen=True)
class HeadSweep:
    """Every row, in the order asked for. `constant` says what stayed the same."""

    constant: str
    width: int
    steps: int
    seeds: int
    rows: tuple[SweepRow, ...]
    curves: dict[str, list[dict[str, Any]]]  # the held-out loss through training, by the name of a row

    @property
    def best(self) -> SweepRow:
        """The row with the lowest loss."""
        return min(self.rows, key=lambda row: row.loss.mean)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return json.loads(json.dumps(asdict(self)), parse_constant=str)  # NaN is a word there


def head_sweep(
    heads: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    *,
    width: int = 64,
    head_dim: int | None = None,
    layers: int = 2,
    context: int = 128,
    corpus: str | Path | None = None,
    tokenizer: str | None = None,
    steps: int = 2000,
    batch_size: int = 16,
    learning_rate: float = 2e-3,
    seeds: int = 3,
    cache: str | Path | None = None,
    processes: int | None = None,
    executor: Executor | str | None = None,
    progress: Progress | None = None,
) -> HeadSweep:
    """Train a model for each head count and seed, at constant heads × head_dim, or with `head_dim` at that constant.

    All points have learned positions: heads of one channel cannot rotate. `corpus` is a file or a folder; none is the
    synthetic language. Points are trained in so many processes, or by an `executor` ("dask", "slurm", any of
    `concurrent.futures`), and kept in the cache; those that are there are not trained again.
    """
    specs = {}
    for count in check_heads(heads, width, head_dim):
        attention = AttentionSpec(width=width, heads=count, head_dim=head_dim or 0)
        specs[str(count)] = ModelSpec(vocab=SYNTHETIC_VOCAB_SIZE, context=context, layers=layers, attention=attention)
    constant = "heads × head_dim" if head_dim is None else f"head_dim {head_dim}"
    return compare_specs(
        specs, constant, corpus=corpus, tokenizer=tokenizer, steps=steps, batch_size=batch_size,
        learning_rate=learning_rate, seeds=seeds, cache=cache, processes=processes, executor=executor, progress=progress,
    )  # fmt: skip


def depth_vs_heads_sweep(
    *, width: int = 64, heads: int = 8, layers: int = 6, context: int = 128, **training: Any
) -> HeadSweep:
    """The same parameters taken from layers or from heads: the whole model, one block less, and fewer heads everywhere.

    `training` is what `compare_specs` takes: corpus, steps, seeds and so on.
    """
    attention = AttentionSpec(width=width, heads=heads)
    full = ModelSpec(vocab=SYNTHETIC_VOCAB_SIZE, context=context, layers=layers, attention=attention)
    shallow, narrow = reduce_layers_or_heads(full)
    specs = {"whole": full, "fewer layers": shallow, "fewer heads": narrow}
    return compare_specs(specs, "what is cut, in parameters", **training)


def compare_specs(
    specs: dict[str, ModelSpec],
    constant: str,
    *,
    corpus: str | Path | None = None,
    tokenizer: str | None = None,
    steps: int = 2000,
    batch_size: int = 16,
    learning_rate: float = 2e-3,
    seeds: int = 3,
    cache: str | Path | None = None,
    processes: int | None = None,
    executor: Executor | str | None = None,
    progress: Progress | None = None,
) -> HeadSweep:
    """Train any models side by side, each with every seed, and measure them alike."""
    if seeds < 1:
        raise HeadwiseError(f"a sweep needs at least one seed, got {seeds}.")
    check_executor(executor)
    if corpus is None:
        _check_synthetic(specs, tokenizer)
    store = ExperimentStore(cache)
    rows = "texts" if corpus is None else "windows"
    corpus_and_tokenizer = str(corpus or ""), tokenizer or ("word" if corpus is None else "byte")
    recipes = [
        default_recipe(steps, seed=seed, batch_size=batch_size, learning_rate=learning_rate, rows=rows)
        for seed in range(seeds)
    ]
    configs = {
        name: [default_config(spec, recipe, "default", *corpus_and_tokenizer) for recipe in recipes]
        for name, spec in specs.items()
    }
    train_all([config for group in configs.values() for config in group], store, processes, progress, executor)
    trained = {name: [_load_trained(store, config) for config in group] for name, group in configs.items()}
    diversities = _measure_diversities(
        [run for group in trained.values() for run in group], store, processes, progress, executor
    )
    sweep_rows = tuple(
        _row(name, group, [diversities[run.folder.name] for run in group]) for name, group in trained.items()
    )
    width = next(iter(specs.values())).width
    return HeadSweep(
        constant, width, steps, seeds, sweep_rows, {name: _curve(group) for name, group in trained.items()}
    )


def _check_synthetic(specs: dict[str, ModelSpec], tokenizer: str | None) -> None:
    """The synthetic language is read word by word, and a row is a whole document."""
    if tokenizer not in (None, "word"):
        raise HeadwiseError(
            f"the synthetic language is read in words, got tokenizer {tokenizer!r}; give a text of your own."
        )
    min_context = min(spec.context for spec in specs.values())
    if min_context < MIN_CONTEXT:
        raise HeadwiseError(
            f"documents of the synthetic language need a context of {MIN_CONTEXT} tokens, got {min_context}."
        )


def check_heads(heads: Sequence[int], width: int, head_dim: int | None = None) -> list[int]:
    """Head counts that divide the width, each once; others are refused, with the nearest that do.

    >>> check_heads([1, 8, 8], 64)
    [1, 8]
    """
    counts = list(dict.fromkeys(heads))
    if width < 1 or (head_dim is not None and head_dim < 1):
        raise HeadwiseError(f"width and head_dim must be at least 1, got {width} and {head_dim}.")
    if not counts or any(type(count) is not int or count < 1 for count in counts):
        raise HeadwiseError(f"head counts are whole numbers of at least 1, e.g. 1,2,4,8; got {list(heads)}.")
    for count in counts:
        if head_dim is None and width % count:
            divisors = [d for d in range(1, width + 1) if width % d == 0]
            nearest = [max(d for d in divisors if d < count), *[d for d in divisors if d > count][:1]]
            nearest_text = " and ".join(map(str, nearest))
            raise HeadwiseError(
                f"{count} heads do not divide a width of {width}; nearest to it {nearest_text} would. "
                f"Or keep the size of a head with head_dim."
            )
    return counts


def _load_trained(store: ExperimentStore, config: ExperimentConfig) -> TrainedModel:
    trained = store.load_trained(config)
    if trained is None:
        raise HeadwiseError(f"{store.folder_of(config)} was taken away meanwhile; run the same again.")
    return trained


def _measure_diversities(
    trained: list[TrainedModel],
    store: ExperimentStore,
    processes: int | None,
    progress: Progress | None,
    executor: Executor | str | None,
) -> dict[str, dict[str, float]]:
    """How far apart the heads of each model are, by the name of its point; what was measured before is taken as it is."""
    version = hashlib.sha256(version_string("metrics").encode()).hexdigest()[:16]
    results = {run.folder.name: store.load_result("diversity", f"{run.folder.name}-{version}") for run in trained}
    pending = [run for run in trained if results[run.folder.name] is None]

    def report_progress() -> None:
        if progress is not None:
            progress("comparing heads", sum(values is not None for values in results.values()), len(results))

    jobs = [(run.config.to_json(), str(store.folder)) for run in pending]
    for index, values in run_jobs_as_completed(
        _diversity, jobs, processes, report_progress, executor=executor, folder=store.folder
    ):
        name = pending[index].folder.name
        results[name] = values
        store.save_result("diversity", f"{name}-{version}", values)
    return results


def _diversity(config_json: str, folder: str) -> dict[str, float]:
    trained = _load_trained(ExperimentStore(folder), ExperimentConfig.from_json(config_json))
    if trained.has_diverged:
        return {}
    text, seed = trained.config.text, trained.config.recipe.seed
    corpus = Corpus.of(Path(text)) if text else Corpus.synthetic("held-out", documents=HELD_OUT_DOCUMENTS, seed=seed)
    return head_diversity(trained.load_model(), corpus)


def _row(name: str, trained: list[TrainedModel], diversities: list[dict[str, float]]) -> SweepRow:
    finished = [run for run in trained if not run.has_diverged]
    spec = finished[0].load_model().spec if finished else trained[0].config.spec
    measured = [values for values in diversities if values]
    return SweepRow(
        name, spec.attention.heads, spec.attention.head_dim, spec.layers, spec.num_parameters,
        Statistic.mean_of([run.loss for run in trained]),
        {
            kind: Statistic.mean_of([run.probe_accuracy[kind] for run in finished])
            for kind in (finished[0].probe_accuracy if finished else ())
        },
        {kind: Statistic.mean_of([values[kind] for values in measured]) for kind in (measured[0] if measured else ())},
        *(Statistic.mean_of([_nan_if_none(run.results[field]) for run in trained]) for field in ("speed", "memory")),
    )  # fmt: skip


def _nan_if_none(value: float | None) -> float:
    return math.nan if value is None else value


def _curve(trained: list[TrainedModel]) -> list[dict[str, Any]]:
    """Of the runs that came to an end."""
    curves = [dict(run.loss_curve) for run in trained if not run.has_diverged]
    losses = {step: Statistic.mean_of([curve[step] for curve in curves]) for step in (curves[0] if curves else ())}
    return [
        {"step": step, "mean": statistic.mean, "low": statistic.low, "high": statistic.high}
        for step, statistic in losses.items()
    ]
