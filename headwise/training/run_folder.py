"""The folder of a run: what was asked for, what was measured.

run.json            spec, recipe and text of the run: running it again goes on only if they are the same
metrics.jsonl       one line per logged step and per evaluation
tokens/             the text as token ids
checkpoints/        step-00000250/ and so on
model/              the finished model
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError

RUN_FILE, METRICS_FILE = "run.json", "metrics.jsonl"
RUN_FORMAT = 2  # of the run folder: run.json, tokens and checkpoints
TEMP_PREFIXES = (".run.json-", ".metrics.jsonl-", ".tokens-", ".model-", ".heads.npz-")


def check_run_folder(folder: Path, run_record: dict[str, Any]) -> bool:
    """Whether a folder holds this very run. One that holds another, or something else, is refused; litter is swept up."""
    run_file = folder / RUN_FILE
    if folder.is_file():
        raise HeadwiseError(f"{folder} is a file, something else than a run; choose another folder.")
    for leftover in folder.glob(".*"):  # what a killed run was writing
        if leftover.name.startswith(TEMP_PREFIXES):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    if not run_file.is_file():
        if folder.is_dir() and {path.name for path in folder.iterdir()} - {"tokens"}:
            raise HeadwiseError(f"{folder} is there already and holds something else; choose another folder.")
        return False  # new, or never got as far as a first step
    previous = read_run_json(folder)
    differing = [key for key in run_record if previous.get(key) != run_record[key]]
    if differing:
        differences = "; ".join(
            f"{key} was {_describe_difference(previous.get(key), run_record[key])}" for key in differing
        )
        raise HeadwiseError(f"{folder} holds another run ({differences}); choose another folder, or ask for the same.")
    return True


def last_logged_step(folder: Path) -> int:
    """Return the step of the last line of a run's metrics; 0 if there is none or the line is being written."""
    try:
        with open(folder / METRICS_FILE, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 400))
            rows = file.read().splitlines()
        return int(json.loads(rows[-1])["step"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def read_run_json(folder: Path) -> dict[str, Any]:
    """What a folder's run was asked for."""
    run_file = folder / RUN_FILE
    if not run_file.is_file():
        raise HeadwiseError(
            f"there is no run in {folder}: it has no {RUN_FILE}. Give the folder headwise train wrote into."
        )
    try:
        run_record = json.loads(run_file.read_text(encoding="utf-8"))
        run_record = {**run_record, **{key: run_record[key] for key in ("spec", "recipe", "weights")}}
    except (ValueError, KeyError, TypeError):
        raise HeadwiseError(f"{run_file} is damaged; choose another folder.") from None
    if run_record.get("format") != RUN_FORMAT:
        raise HeadwiseError(
            f"{folder}: this run folder has format {run_record.get('format', 1)}, this version of Headwise reads format "
            f"{RUN_FORMAT}. Start the run again in a new folder."
        )
    return run_record


def write_run_json_if_missing(folder: Path, run_record: dict[str, Any]) -> None:
    """Make a folder the home of this run."""
    if not (folder / RUN_FILE).is_file():
        try:
            _write_atomic(folder / RUN_FILE, json.dumps(run_record, indent=2))
        except OSError as error:
            raise HeadwiseError(f"{folder} could not be written ({error}).") from None


def _describe_difference(previous: Any, current: Any) -> str:
    """What differs between two records, as few words as will do."""
    previous, current = _parse_record(previous), _parse_record(current)
    if isinstance(previous, dict) and isinstance(current, dict):
        keys = [key for key in {**previous, **current} if previous.get(key) != current.get(key)]
        return ", ".join(f"{key} {previous.get(key)!r}, now {current.get(key)!r}" for key in keys[:3])
    return f"{previous!r}, now {current!r}"


def _parse_record(stored: Any) -> Any:
    """What decides a loss is told as a line of JSON."""
    return json.loads(stored) if isinstance(stored, str) and stored.startswith("{") else stored


class MetricsLog:
    """Rows of numbers, kept in memory and, if there is a folder, in a JSON Lines file."""

    def __init__(self, folder: Path | None, last_step: int) -> None:
        self.path = None if folder is None else folder / METRICS_FILE
        self.rows: list[dict[str, float]] = []
        if self.path is not None and self.path.is_file():
            # what comes after is done again
            self.rows = [row for row in _read_rows(self.path) if (row["step"] or 0) <= last_step]
            self._checked_write(lambda path: _write_atomic(path, "".join(json.dumps(row) + "\n" for row in self.rows)))

    def add(self, row: dict[str, float]) -> None:
        """One more row, on the disk at once."""
        self.rows.append(row)
        self._checked_write(lambda path: _append(path, json.dumps(row) + "\n"))

    def _checked_write(self, write: Any) -> None:
        try:
            if self.path is not None:
                write(self.path)
        except OSError as error:
            raise HeadwiseError(f"{self.path} could not be written ({error}); checkpoints are as they were.") from None


def _append(path: Path, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def _read_rows(path: Path) -> list[dict[str, float]]:
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break  # the line a killed run was writing
    return rows


def _write_atomic(path: Path, text: str) -> None:
    """A small file, whole or not at all."""
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
