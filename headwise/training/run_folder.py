"""The folder of a run.

run.json            spec, recipe and corpus of the run; a run is resumed only if they are equal
metrics.jsonl       one line per logged step and per evaluation
tokens/             token ids of the corpus
checkpoints/        step-00000250/ and so on
model/              the final model
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from headwise.errors import FileFormatError, HeadwiseError

RUN_FILE, METRICS_FILE = "run.json", "metrics.jsonl"
RUN_FORMAT = 2  # of the run folder: run.json, tokens and checkpoints
TEMP_PREFIXES = (".run.json-", ".metrics.jsonl-", ".tokens-", ".model-", ".heads.npz-")


def check_run_folder(folder: Path, run_record: dict[str, Any]) -> bool:
    """Return whether a folder contains this run. Raise if it contains something else. Remove temporary files."""
    run_file = folder / RUN_FILE
    if folder.is_file():
        raise FileFormatError(f"{folder}: it is a file, not a run folder. Use another folder.")
    for leftover in folder.glob(".*"):  # temporary files of a killed run
        if leftover.name.startswith(TEMP_PREFIXES):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    if not run_file.is_file():
        if folder.is_dir() and {path.name for path in folder.iterdir()} - {"tokens"}:
            raise FileFormatError(
                f"{folder}: this folder exists and contains other files, but no training run. Use an empty or a new folder."
            )
        return False  # a new folder, or a run that was killed before its first step
    previous = read_run_json(folder)
    differing = [key for key in run_record if previous.get(key) != run_record[key]]
    if differing:
        differences = "; ".join(
            f"{key} was {_describe_difference(previous.get(key), run_record[key])}" for key in differing
        )
        raise FileFormatError(
            f"{folder}: this folder contains another run, with other arguments ({differences}). "
            "Use another folder, or pass the same arguments to resume that run."
        )
    return True


def last_logged_step(folder: Path) -> int:
    """Return the step of the last line of the metrics of a run. 0 without a complete line."""
    try:
        with open(folder / METRICS_FILE, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 400))
            rows = file.read().splitlines()
        return int(json.loads(rows[-1])["step"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def read_run_json(folder: Path) -> dict[str, Any]:
    """Return the record of the run in a folder."""
    run_file = folder / RUN_FILE
    if not run_file.is_file():
        raise FileFormatError(
            f"{folder}: it has no run, because {RUN_FILE} is missing. Give a folder written by headwise train --out."
        )
    try:
        run_record = json.loads(run_file.read_text(encoding="utf-8"))
        run_record = {**run_record, **{key: run_record[key] for key in ("spec", "recipe", "weights")}}
    except (ValueError, KeyError, TypeError):
        raise FileFormatError(f"{run_file}: the file is damaged. Start the run again in another folder.") from None
    if run_record.get("format") != RUN_FORMAT:
        raise FileFormatError(
            f"{folder}: this run folder has format {run_record.get('format', 1)}, this version of Headwise reads format "
            f"{RUN_FORMAT}. Start the run again in a new folder."
        )
    return run_record


def write_run_json_if_missing(folder: Path, run_record: dict[str, Any]) -> None:
    """Write the record of a run into its folder."""
    if not (folder / RUN_FILE).is_file():
        try:
            _write_atomic(folder / RUN_FILE, json.dumps(run_record, indent=2))
        except OSError as error:
            raise HeadwiseError(
                f"{folder}: it cannot be written ({error}). Check permissions and disk space, or use another folder."
            ) from None


def _describe_difference(previous: Any, current: Any) -> str:
    """Describe the difference between two records in a few words."""
    previous, current = _parse_if_json(previous), _parse_if_json(current)
    if isinstance(previous, dict) and isinstance(current, dict):
        keys = [key for key in {**previous, **current} if previous.get(key) != current.get(key)]
        return ", ".join(f"{key} {previous.get(key)!r}, now {current.get(key)!r}" for key in keys[:3])
    return f"{previous!r}, now {current!r}"


def _parse_if_json(stored: Any) -> Any:
    """Parse a record that is stored as a JSON string, such as the name of a loss."""
    return json.loads(stored) if isinstance(stored, str) and stored.startswith("{") else stored


class MetricsLog:
    """Rows of metrics in memory and, if there is a folder, in a JSON Lines file."""

    def __init__(self, folder: Path | None, last_step: int) -> None:
        self.path = None if folder is None else folder / METRICS_FILE
        self.rows: list[dict[str, float]] = []
        if self.path is not None and self.path.is_file():
            # Later rows belong to steps that are repeated.
            self.rows = [row for row in _read_rows(self.path) if (row["step"] or 0) <= last_step]
            self._checked_write(lambda path: _write_atomic(path, "".join(json.dumps(row) + "\n" for row in self.rows)))

    def add(self, row: dict[str, float]) -> None:
        """Add a row and write it to disk."""
        self.rows.append(row)
        self._checked_write(lambda path: _append(path, json.dumps(row) + "\n"))

    def _checked_write(self, write: Any) -> None:
        try:
            if self.path is not None:
                write(self.path)
        except OSError as error:
            raise HeadwiseError(
                f"{self.path}: it cannot be written ({error}). Checkpoints are not affected. Free disk space and run again."
            ) from None


def _append(path: Path, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def _read_rows(path: Path) -> list[dict[str, float]]:
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break  # incomplete last line of a killed run
    return rows


def _write_atomic(path: Path, text: str) -> None:
    """Write a small file atomically."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
