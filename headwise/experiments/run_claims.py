"""Test claims: train the shared models, measure claims in parallel, then measure the timed claims one at a time."""

import hashlib
import shlex
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.distributed import check_executor, run_jobs_as_completed
from headwise.errors import ArgumentError, HeadwiseError
from headwise.experiments.claim import Claim, Verdict
from headwise.experiments.engine.declared_code_versions import version_string
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.engine.statistic import LEVEL, StatisticTable
from headwise.experiments.engine.training_pool import check_unchanged, train_all
from headwise.experiments.registry import find_claims
from headwise.experiments.trained_model_provider import (
    EXPLORED_SEEDS,
    FULL_SEEDS,
    QUICK_SEEDS,
    ExperimentSize,
    TrainedModelProvider,
)
from headwise.progress import Progress, ProgressOption, callback_of, shows_progress
from headwise.weights import load

if TYPE_CHECKING:
    import torch

    from headwise.model import ModelProtocol


@dataclass(frozen=True)
class RerunCommand:
    """Command that tests a claim on the given model again.

    Attributes:
        model: Name of the model, or the model.
        corpus: Corpus, or None.
        options: Further options of the command.
    """

    model: "ModelProtocol | str"
    corpus: Any = None
    options: str = ""

    @property
    def model_name(self) -> str:
        """Name of the model, or its class."""
        return self.model if isinstance(self.model, str) else type(self.model).__name__

    def for_claim(self, claim: str) -> str:
        """Return the command, or the Python call, for one claim."""
        if not isinstance(self.model, str):
            return f'claims(["{claim}"], model=model{"" if self.corpus is None else ", corpus=corpus"})'
        corpus = f" --corpus {shlex.quote(str(self.corpus))}" if self.corpus else ""
        return f"headwise claims {claim} --model {shlex.quote(self.model)}{corpus}{self.options}"


@dataclass(frozen=True)
class ClaimResult:
    """Result of one claim.

    Attributes:
        claim: The claim.
        statistics: Measurements, with corrected intervals for the ones that the rule uses.
        verdict: Verdict of the rule.
        seeds: Seeds of the trained models.
        model_name: Name of the given model. Empty if models were trained for the claim.
        rerun_command: Command or Python call that repeats the run.
    """

    claim: Claim
    statistics: StatisticTable
    verdict: Verdict
    seeds: tuple[int, ...]
    model_name: str = ""
    rerun_command: str = ""

    @property
    def has_few_seeds(self) -> bool:
        """Whether the verdict is preliminary: fewer than three seeds, or fewer than planned for the primary quantity."""
        return len(self.seeds) < max(3, self.planned_seeds)

    @property
    def planned_seeds(self) -> int:
        """Number of seeds by the power calculation. 0 without a primary quantity or on a given model."""
        primary = self.claim.primary
        return 0 if self.model_name or primary is None or primary.key not in self.statistics else primary.planned_seeds

    @property
    def few_seeds_note(self) -> str:
        """Why the verdict is preliminary. Empty if it is not."""
        if not self.has_few_seeds:
            return ""
        if len(self.seeds) == 1:
            return "one seed: indicative"
        of_planned = f" of {self.planned_seeds} planned" if self.planned_seeds else ""
        return f"{len(self.seeds)}{of_planned} seeds: indicative"

    @property
    def is_exploratory(self) -> bool:
        """Whether a seed was already used while the rules were designed."""
        return not self.model_name and any(seed in EXPLORED_SEEDS for seed in self.seeds)

    @property
    def interval_note(self) -> str:
        """Confidence levels of the intervals."""
        levels = [statistic.level for _, _, statistic in self.statistics if statistic.level != LEVEL]
        correction = f"; {100 * levels[0]:.4g}% each for the {len(levels)} that the rule uses" if levels else ""
        return f"{100 * LEVEL:g}%{correction}"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON-compatible data."""
        claim = self.claim
        return {
            "number": claim.number, "name": claim.name, "statement": claim.statement,
            "counterevidence": claim.counterevidence, "setup": claim.setup, "rule": claim.full_rule,
            "identity": claim.identity, "verdict": self.verdict.word,
            "depends_on": self.verdict.detail, "preliminary": self.has_few_seeds, "seeds": list(self.seeds),
            "exploratory": self.is_exploratory, "model": self.model_name, "command": self.rerun_command,
            "interval_note": self.interval_note, "statistics": self.statistics.to_rows(),
        }  # fmt: skip


@shows_progress
def claims(
    names: Iterable[str] = (),
    *,
    full: bool = False,
    seeds: int | None = None,
    first_seed: int = 0,
    model: "ModelProtocol | str | None" = None,
    corpus: Any = None,
    device: "torch.device | str" = "cpu",
    dtype: "torch.dtype | str | None" = None,
    size: ExperimentSize | None = None,
    cache: str | Path | None = None,
    processes: int | None = None,
    executor: Executor | str | None = None,
    progress: ProgressOption = None,
    log: Callable[[str], object] | None = None,
) -> list[ClaimResult]:
    """Test claims about heads.

    Results of the same code version are cached and not measured again.

    Args:
        names: Names or numbers of claims. Default: all claims.
        full: Use three seeds in place of one.
        seeds: Number of seeds. Cannot be combined with `full`.
        first_seed: First seed. Seeds below 10 were used to design the rules, so that their verdicts are exploratory.
        model: Model or model name. Only the claims that apply to a given model are tested, without seeds.
        corpus: Corpus for `model`.
        device: Device of a model given by name, as in `hw.load`.
        dtype: Data type of a model given by name, as in `hw.load`.
        size: Size of the trained models and training settings.
        cache: Folder for models and results. Default: `$HEADWISE_CACHE` or the user's cache folder.
        processes: Number of worker processes.
        executor: "dask", "slurm" or a `concurrent.futures` executor for training and measuring. Timed claims always run
            in this process.
        progress: Called with a label, the work done and the total.
            None shows one line in a terminal or notebook, False nothing.
        log: Function called with a message for each claim that is skipped because it does not apply to the model.

    Returns:
        One result per claim.

    Raises:
        ArgumentError: A claim does not exist, or two arguments contradict each other.
    """
    progress = callback_of(progress)
    names = list(names)
    selected = find_claims(names)
    check_executor(executor)
    if full and seeds is not None:
        raise ArgumentError(
            f"full and seeds={seeds} cannot be combined, because full uses {FULL_SEEDS} seeds. Use one of them."
        )
    if model is not None and (seeds is not None or first_seed):
        raise ArgumentError(
            f"seeds and first_seed apply only to models that are trained here. Got seeds={seeds}, first_seed={first_seed} "
            "and a model. Omit them, or omit model."
        )
    if model is not None:
        applicable = _applicable_claims(selected, by_name=bool(names))
        loaded = load(model, device=device, dtype=dtype) if isinstance(model, str) else model
        load_options = (f" --device {device}" if str(device) != "cpu" else "") + (
            f" --dtype {str(dtype).removeprefix('torch.')}" if dtype is not None else ""
        )
        rerun = RerunCommand(model, corpus, load_options)
        return _measure_on_model(applicable, loaded, rerun, corpus, by_name=bool(names), progress=progress, log=log)
    if seeds is not None and seeds < 1:
        raise ArgumentError(f"seeds: an experiment needs at least one seed. Got {seeds}. Use seeds=1 or more.")
    if first_seed < 0:
        raise ArgumentError(f"first_seed must be at least 0. Got {first_seed}.")
    num_seeds = seeds if seeds is not None else FULL_SEEDS if full else QUICK_SEEDS
    experiment = TrainedModelProvider(
        ExperimentStore(cache), tuple(range(first_seed, first_seed + num_seeds)), size or ExperimentSize()
    )
    results = {claim.name: _load_statistics(claim, experiment) for claim in selected}
    pending = [claim for claim in selected if results[claim.name] is None]
    train_all(
        [config for claim in pending for config in claim.training_configs(experiment)],
        experiment.store,
        processes,
        progress,
        executor,
    )
    results |= _measure_all(pending, experiment, processes, executor, progress)
    measured = ((claim, statistics) for claim in selected if (statistics := results[claim.name]) is not None)
    options = (f" --seeds {seeds}" if seeds is not None else " --full" * full) + f" --first-seed {first_seed}" * (
        first_seed > 0
    )
    return [
        _apply_rule(claim, statistics, experiment.seeds, rerun_command=f"headwise claims {claim.name}{options}")
        for claim, statistics in measured
    ]


def _measure_all(
    claims_to_measure: Sequence[Claim],
    experiment: TrainedModelProvider,
    processes: int | None,
    executor: Executor | str | None,
    progress: Progress | None,
) -> dict[str, StatisticTable]:
    """Measure claims in parallel, then the timed ones one after another, and save the statistics of each."""
    results: dict[str, StatisticTable] = {}
    parallel_claims, timed_claims = (
        [c for c in claims_to_measure if not c.timed],
        [c for c in claims_to_measure if c.timed],
    )
    done = 0

    def report_progress() -> None:
        if progress is not None:
            progress("measuring claims", done, len(claims_to_measure))

    jobs = [
        (
            claim.name,
            str(experiment.store.folder),
            experiment.seeds,
            experiment.size.to_json(),
            _result_key(claim, experiment),
        )
        for claim in parallel_claims
    ]
    for index, rows in run_jobs_as_completed(
        _measure, jobs, processes, report_progress, executor=executor, folder=experiment.store.folder
    ):
        results[parallel_claims[index].name] = StatisticTable.from_rows(rows)
        _save_statistics(parallel_claims[index], experiment, rows)
        done += 1
    for claim in timed_claims:
        report_progress()
        results[claim.name] = claim.measure(experiment)
        _save_statistics(claim, experiment, results[claim.name].to_rows())
        done += 1
    report_progress()
    return results


def _measure(name: str, folder: str, seeds: tuple[int, ...], size: str, key: str) -> list[dict[str, Any]]:
    """Measure one claim in a worker process."""
    (claim,) = find_claims([name])
    experiment = TrainedModelProvider(ExperimentStore(folder), seeds, ExperimentSize.from_json(size))
    check_unchanged(_result_key(claim, experiment), key)
    return claim.measure(experiment).to_rows()


def _apply_rule(
    claim: Claim, statistics: StatisticTable, seeds: tuple[int, ...], model_name: str = "", rerun_command: str = ""
) -> ClaimResult:
    """Apply the rule to the statistics. Verdicts are not cached, so that a changed rule takes effect."""
    return ClaimResult(claim, *claim.correct_and_judge(statistics), seeds, model_name, rerun_command)


def _result_key(claim: Claim, experiment: TrainedModelProvider) -> str:
    code = f"{version_string('texts', 'training', 'metrics')}, {claim.name} {claim.version}"
    key_text = f"{code} {experiment.seeds} {experiment.size.to_json()} {claim.extra_key()}"
    return hashlib.sha256(key_text.encode()).hexdigest()[:20]


def _load_statistics(claim: Claim, experiment: TrainedModelProvider) -> StatisticTable | None:
    rows = experiment.store.load_result(claim.name, _result_key(claim, experiment))
    return None if rows is None else StatisticTable.from_rows(rows)


def _save_statistics(claim: Claim, experiment: TrainedModelProvider, rows: list[dict[str, Any]]) -> None:
    experiment.store.save_result(claim.name, _result_key(claim, experiment), rows)


def _applicable_claims(selected: tuple[Claim, ...], *, by_name: bool) -> list[Claim]:
    """Return the claims that can be tested on a given model. Raise an error if a requested claim cannot."""
    not_applicable = [claim.name for claim in selected if claim.measure_model is None]
    if by_name and not_applicable:
        applicable = ", ".join(claim.name for claim in find_claims() if claim.measure_model is not None)
        raise ArgumentError(
            f"claims {', '.join(not_applicable)}: cannot be tested on a given model, because they train their own models. "
            f"Omit model, or choose from: {applicable}."
        )
    return [claim for claim in selected if claim.measure_model is not None]


def _measure_on_model(
    selected: list[Claim],
    model: "ModelProtocol",
    rerun: RerunCommand,
    corpus: Any,
    *,
    by_name: bool,
    progress: Progress | None,
    log: Callable[[str], object] | None,
) -> list[ClaimResult]:
    """Measure each claim on the model. A claim that does not apply is skipped, or raises if it was requested by name."""
    results = []
    for done, claim in enumerate(selected):
        if progress is not None:
            progress(f"claims on {rerun.model_name}", done, len(selected))
        try:
            assert claim.measure_model is not None
            statistics = claim.measure_model(model, corpus)
            results.append(_apply_rule(claim, statistics, (0,), rerun.model_name, rerun.for_claim(claim.name)))
        except HeadwiseError as error:
            if by_name:
                raise
            if log is not None:
                log(f"{claim.name} is skipped: {error}")
    return results
