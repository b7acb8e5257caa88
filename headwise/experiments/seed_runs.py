"""Test claims one seed at a time. Each seed leaves a small JSON file, and the files of all seeds are judged together.

A file has the figures of its claims as one value per statistic. It is written after each claim, so that a run that stops
loses at most one claim. Trained models stay in the experiment store.
"""

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.errors import ArgumentError, FileFormatError
from headwise.experiments.claim import Claim
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.registry import find_claims
from headwise.experiments.run_claims import ClaimResult, claims
from headwise.experiments.trained_model_provider import ExperimentSize
from headwise.io import write_atomic
from headwise.progress import ProgressOption, callback_of, shows_progress

FORMAT = 1


@dataclass(frozen=True)
class SeedFile:
    """Figures of one seed.

    Attributes:
        seed: The seed.
        claims: Claims that were measured. Each has `rows` (statistic, condition, value, kind), `seconds` and `commit`.
        path: The file.
        size: Size of the models, as JSON.
    """

    seed: int
    claims: dict[str, dict[str, Any]]
    path: Path
    size: str

    def save(self) -> None:
        """Write the file."""
        data = {"format": FORMAT, "seed": self.seed, "size": json.loads(self.size), "claims": self.claims}
        text = json.dumps(data, indent=1)
        write_atomic(self.path, text.encode())


@dataclass(frozen=True)
class ClaimSeedStatus:
    """Progress of one claim.

    Attributes:
        name: Name of the claim.
        planned: Number of seeds by the power calculation, or None without a primary quantity.
        finished: Seeds with figures.
    """

    name: str
    planned: int | None
    finished: tuple[int, ...]


def seed_path(folder: str | Path, seed: int) -> Path:
    """Return the file of a seed."""
    return Path(folder) / f"claims-seed-{seed}.json"


def load_seed_files(folder: str | Path) -> list[SeedFile]:
    """Read the files of all seeds in a folder, in the order of the seeds."""
    files = []
    for path in Path(folder).glob("claims-seed-*.json"):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            files.append(SeedFile(int(data["seed"]), dict(data["claims"]), path, json.dumps(data["size"])))
        except (ValueError, KeyError, TypeError) as error:
            raise FileFormatError(
                f"{path}: not a file of claim figures ({error}). Delete it, and run the command again."
            ) from None
    return sorted(files, key=lambda file: file.seed)


@shows_progress
def run_seeds(
    names: Sequence[str],
    folder: str | Path,
    *,
    seeds: int,
    first_seed: int,
    size: ExperimentSize | None = None,
    cache: str | Path | None = None,
    processes: int | None = None,
    progress: ProgressOption = None,
) -> list[ClaimResult]:
    """Test claims with several seeds, one seed after the other, and judge all seeds of the folder together.

    Figures that are in the folder are not measured again.

    Args:
        names: Names or numbers of claims. Default: all claims with a primary quantity.
        folder: Folder of the files, one per seed.
        seeds: Number of seeds.
        first_seed: First seed.
        size: Size of the trained models and training settings.
        cache: Folder of the trained models.
        processes: Number of worker processes.
        progress: Called with a label, the work done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        One result per claim, over all seeds in the folder.
    """
    progress = callback_of(progress)
    if seeds < 1:
        raise ArgumentError(f"seeds: at least one seed is needed. Got {seeds}. Use seeds=1 or more.")
    selected = _selected(names)
    Path(folder).mkdir(parents=True, exist_ok=True)
    size_json = json.dumps(asdict(size or ExperimentSize()))
    for seed in range(first_seed, first_seed + seeds):
        existing = {file.seed: file for file in load_seed_files(folder)}
        file = existing.get(seed) or SeedFile(seed, {}, seed_path(folder, seed), size_json)
        if json.loads(file.size) != json.loads(size_json):
            raise ArgumentError(f"{file.path}: has figures of models of another size. Choose another folder.")
        for claim in selected:
            if file.claims.get(claim.name, {}).get("version") == claim.version:
                continue
            start = time.perf_counter()
            (result,) = claims(
                [claim.name], seeds=1, first_seed=seed, size=size, cache=cache, processes=processes, progress=progress
            )
            file.claims[claim.name] = {
                "version": claim.version, "commit": current_commit(), "seconds": round(time.perf_counter() - start, 1),
                "rows": _rows(result.statistics),
            }  # fmt: skip
            file.save()
    return judge_seeds(folder, names)


def judge_seeds(folder: str | Path, names: Sequence[str] = ()) -> list[ClaimResult]:
    """Judge the figures of all seeds in a folder together.

    Args:
        folder: Folder of the files, one per seed.
        names: Names or numbers of claims. Default: all claims with a primary quantity.

    Returns:
        One result per claim that has figures.
    """
    files, results = load_seed_files(folder), []
    for claim in _selected(names):
        with_claim = [file for file in files if claim.name in file.claims]
        if not with_claim:
            continue
        statistics = merge_seeds([file.claims[claim.name]["rows"] for file in with_claim])
        seeds = tuple(file.seed for file in with_claim)
        command = f"headwise claims {claim.name} --seed-files {folder}"
        results.append(ClaimResult(claim, *claim.correct_and_judge(statistics), seeds, rerun_command=command))
    return results


def merge_seeds(tables: Sequence[Sequence[Sequence[Any]]]) -> StatisticTable:
    """Merge the rows of several seeds into one table, with one value per seed.

    >>> table = merge_seeds([[["loss", 8, 2.0, "mean"]], [["loss", 8, 3.0, "mean"]]])
    >>> table["loss", 8].values
    (2.0, 3.0)
    """
    values: dict[tuple[Any, Any], list[float]] = {}
    kinds: dict[tuple[Any, Any], str] = {}
    for rows in tables:
        for name, condition, value, kind in rows:
            values.setdefault((name, condition), []).append(float(value))
            kinds[name, condition] = kind
    merged = StatisticTable()
    for (name, condition), row in values.items():
        of_proportions = kinds[name, condition] == "proportion"
        merged.add(name, condition, (Statistic.proportion_of if of_proportions else Statistic.mean_of)(row))
    return merged


def planned_and_finished_seeds(folder: str | Path, names: Sequence[str] = ()) -> list[ClaimSeedStatus]:
    """Return for each claim the planned number of seeds and the seeds with figures.

    Args:
        folder: Folder of the files, one per seed.
        names: Names or numbers of claims. Default: all claims with a primary quantity.
    """
    files = load_seed_files(folder)
    return [
        ClaimSeedStatus(
            claim.name,
            None if claim.primary is None else claim.primary.planned_seeds,
            tuple(file.seed for file in files if claim.name in file.claims),
        )
        for claim in _selected(names)
    ]


def current_commit() -> str:
    """Return the commit of the code, or an empty string outside a repository."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _selected(names: Sequence[str]) -> list[Claim]:
    selected = find_claims(names)
    timed = [claim.name for claim in selected if claim.timed]
    if names and timed:
        raise ArgumentError(
            f"claims {', '.join(timed)}: measure time or memory, which does not depend on a seed. Test them without seed "
            "files."
        )
    return [claim for claim in selected if not claim.timed and (names or claim.primary is not None)]


def _rows(statistics: StatisticTable) -> list[list[Any]]:
    """Return one row per statistic: name, condition, value with 7 digits, kind of interval."""
    return [
        [name, condition, float(f"{statistic.mean:.7g}"), statistic.interval_kind]
        for name, condition, statistic in statistics
    ]
