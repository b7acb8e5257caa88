"""Head count sweep: train one model per head count and seed, with all other settings equal."""

import hashlib
import json
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.distributed import check_executor, run_jobs_as_completed
from headwise.errors import ArgumentError, FileFormatError
from headwise.experiments.engine.declared_code_versions import version_string
from headwise.experiments.engine.experiment_config import ExperimentConfig, TrainedModel
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.engine.statistic import Statistic
from headwise.experiments.engine.training_pool import train_all
from headwise.experiments.layers_or_heads_specs import reduce_layers_or_heads
from headwise.experiments.mean_head_diversity import mean_head_diversity
from headwise.experiments.trained_model_provider import SYNTHETIC_VOCAB_SIZE, default_config, default_recipe
from headwise.progress import Progress, ProgressOption, callback_of, shows_progress
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text import Corpus

MIN_CONTEXT = 128  # fits every document of the synthetic language
HELD_OUT_DOCUMENTS = 100  # number of held-out documents on which attention maps are compared


@dataclass(frozen=True)
class SweepRow:
    """Sizes and results of one head count, over all seeds.

    Attributes:
        name: Name of the row.
        heads: Heads per layer.
        head_dim: Channels per head.
        layers: Number of layers.
        parameters: Parameter count of the model.
        loss: Held-out loss, nats per token.
        probe_accuracy: Accuracy by kind of cloze probe. Empty if the corpus is not the synthetic language.
        diversity: Head diversity: "js" is the Jensen-Shannon distance between the maps of a layer's heads, "write" is
            the similarity of the subspaces that they write to.
        speed: Training tokens per second, measured while other models train in parallel.
        memory: Peak memory of training in megabytes, above the memory before training.
    """

    name: str
    heads: int
    head_dim: int
    layers: int
    parameters: int
    loss: Statistic
    probe_accuracy: dict[str, Statistic]
    diversity: dict[str, Statistic]
    speed: Statistic
    memory: Statistic


@dataclass(frozen=True)
class HeadSweep:
    """Result of a sweep.

    Attributes:
        constant: The quantity that is equal in all rows.
        width: Width of the residual stream.
        steps: Training steps.
        seeds: Number of seeds.
        rows: One row per model, in the requested order.
        curves: Held-out loss during training, by row name.
    """

    constant: str
    width: int
    steps: int
    seeds: int
    rows: tuple[SweepRow, ...]
    curves: dict[str, list[dict[str, Any]]]

    @property
    def best(self) -> SweepRow:
        """Row with the lowest loss."""
        return min(self.rows, key=lambda row: row.loss.mean)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON-compatible data."""
        return json.loads(json.dumps(asdict(self)), parse_constant=str)  # NaN becomes a string


@shows_progress
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
    progress: ProgressOption = None,
) -> HeadSweep:
    """Train one model per head count and seed, and compare loss, probe accuracy, head diversity, speed and memory.

    All models use learned positions, because a head of one channel cannot use rotary positions. Trained models are
    cached and not trained again.

    Args:
        heads: Head counts.
        width: Width of the residual stream.
        head_dim: Channels per head. Default: width / heads, so that heads × head_dim is constant.
        layers: Number of layers.
        context: Context length in tokens.
        corpus: Text file or folder. Default: the synthetic language.
        tokenizer: Tokenizer name. Default: "word" for the synthetic language, "byte" for other text.
        steps: Training steps per model.
        batch_size: Rows per step.
        learning_rate: Peak learning rate.
        seeds: Number of seeds per head count.
        cache: Folder for trained models. Default: `$HEADWISE_CACHE` or the user's cache folder.
        processes: Number of worker processes.
        executor: "dask", "slurm" or a `concurrent.futures` executor, used in place of local processes.
        progress: Called with a label, the work done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        One row per head count, with means and confidence intervals over the seeds.

    Raises:
        ArgumentError: A head count does not divide the width, or an argument is out of range.
    """
    progress = callback_of(progress)
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
    """Compare the full model, a model with one block less, and a model with fewer heads and about as many parameters.

    Args:
        width: Width of the residual stream.
        heads: Heads per layer of the full model.
        layers: Layers of the full model.
        context: Context length in tokens.
        **training: Further arguments of `compare_specs`, such as corpus, steps and seeds.
    """
    attention = AttentionSpec(width=width, heads=heads)
    full = ModelSpec(vocab=SYNTHETIC_VOCAB_SIZE, context=context, layers=layers, attention=attention)
    shallow, narrow = reduce_layers_or_heads(full)
    specs = {"whole": full, "fewer layers": shallow, "fewer heads": narrow}
    return compare_specs(specs, "number of removed parameters", **training)


@shows_progress
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
    progress: ProgressOption = None,
) -> HeadSweep:
    """Train each spec with every seed and measure all models in the same way. See `head_sweep` for the arguments."""
    progress = callback_of(progress)
    if seeds < 1:
        raise ArgumentError(f"seeds: a sweep needs at least one seed. Got {seeds}. Use seeds=1 or more.")
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
    trained = {name: [_require_trained(store, config) for config in group] for name, group in configs.items()}
    diversities = _measure_diversities(
        [run for group in trained.values() for run in group], store, processes, progress, executor
    )
    sweep_rows = tuple(
        _row(name, group, [diversities[run.folder.name] for run in group]) for name, group in trained.items()
    )
    width = next(iter(specs.values())).width
    return HeadSweep(
        constant, width, steps, seeds, sweep_rows, {name: _mean_loss_curve(group) for name, group in trained.items()}
    )


def _check_synthetic(specs: dict[str, ModelSpec], tokenizer: str | None) -> None:
    """Check that the tokenizer splits words and that every row fits a full document."""
    if tokenizer not in (None, "word"):
        raise ArgumentError(
            "tokenizer: without corpus=, the models are trained on the synthetic language, which requires the 'word' "
            f"tokenizer. Got {tokenizer!r}. Omit tokenizer, or set corpus to a text file."
        )
    min_context = min(spec.context for spec in specs.values())
    if min_context < MIN_CONTEXT:
        raise ArgumentError(
            f"context: documents of the synthetic language need at least {MIN_CONTEXT} tokens. Got {min_context}. "
            f"Use context={MIN_CONTEXT} or more."
        )


def check_heads(heads: Sequence[int], width: int, head_dim: int | None = None) -> list[int]:
    """Return the distinct head counts. Raise ArgumentError if one does not divide the width and head_dim is not given.

    >>> check_heads([1, 8, 8], 64)
    [1, 8]
    """
    counts = list(dict.fromkeys(heads))
    if width < 1 or (head_dim is not None and head_dim < 1):
        raise ArgumentError(f"width and head_dim must be at least 1. Got width={width}, head_dim={head_dim}.")
    if not counts or any(type(count) is not int or count < 1 for count in counts):
        raise ArgumentError(f"heads: head counts must be integers of at least 1, e.g. 1,2,4,8. Got {list(heads)}.")
    for count in counts:
        if head_dim is None and width % count:
            divisors = [d for d in range(1, width + 1) if width % d == 0]
            nearest = [max(d for d in divisors if d < count), *[d for d in divisors if d > count][:1]]
            nearest_text = " or ".join(map(str, nearest))
            raise ArgumentError(
                f"heads={count}: width {width} is not divisible by {count}. Use {nearest_text}, "
                "or set head_dim to fix the size of a head."
            )
    return counts


def _require_trained(store: ExperimentStore, config: ExperimentConfig) -> TrainedModel:
    trained = store.load_trained(config)
    if trained is None:
        raise FileFormatError(
            f"{store.folder_of(config)}: the trained model was deleted during the run. Run the command again."
        )
    return trained


def _measure_diversities(
    trained: list[TrainedModel],
    store: ExperimentStore,
    processes: int | None,
    progress: Progress | None,
    executor: Executor | str | None,
) -> dict[str, dict[str, float]]:
    """Return the head diversity of each model by folder name. Results in the store are not measured again."""
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
    trained = _require_trained(ExperimentStore(folder), ExperimentConfig.from_json(config_json))
    if trained.has_diverged:
        return {}
    text, seed = trained.config.text, trained.config.recipe.seed
    corpus = Corpus.of(Path(text)) if text else Corpus.synthetic("held-out", documents=HELD_OUT_DOCUMENTS, seed=seed)
    return mean_head_diversity(trained.load_model(), corpus)


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


def _mean_loss_curve(trained: list[TrainedModel]) -> list[dict[str, Any]]:
    """Return the mean held-out loss per step over the runs that did not diverge."""
    curves = [dict(run.loss_curve) for run in trained if not run.has_diverged]
    losses = {step: Statistic.mean_of([curve[step] for curve in curves]) for step in (curves[0] if curves else ())}
    return [
        {"step": step, "mean": statistic.mean, "low": statistic.low, "high": statistic.high}
        for step, statistic in losses.items()
    ]
