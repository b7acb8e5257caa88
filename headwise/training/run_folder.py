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

RUN, METRICS = "run.json", "metrics.jsonl"
LITTER = (".run.json-", ".metrics.jsonl-", ".tokens-", ".model-", ".heads.npz-")


def is_same(folder: Path, request: dict[str, Any]) -> bool:
    """Whether a folder holds this very run. One that holds another, or something else, is refused; litter is swept up."""
    noted = folder / RUN
    if folder.is_file():
        raise HeadwiseError(f"{folder} is a file, something else than a run; choose another folder.")
    for stray in folder.glob(".*"):  # what a killed run was writing
        if stray.name.startswith(LITTER):
            shutil.rmtree(stray) if stray.is_dir() else stray.unlink()
    if not noted.is_file():
        if folder.is_dir() and {path.name for path in folder.iterdir()} - {"tokens"}:
            raise HeadwiseError(f"{folder} is there already and holds something else; choose another folder.")
        return False  # new, or never got as far as a first step
    before = earlier_request(folder)
    differing = [key for key in request if before.get(key) != request[key]]
    if differing:
        told = "; ".join(f"{key} was {_short(before.get(key), request[key])}" for key in differing)
        raise HeadwiseError(f"{folder} holds another run ({told}); choose another folder, or ask for the same.")
    return True


def earlier_request(folder: Path) -> dict[str, Any]:
    """What a folder's run was asked for."""
    noted = folder / RUN
    if not noted.is_file():
        raise HeadwiseError(f"there is no run in {folder}: it has no {RUN}. Give the folder headwise train wrote into.")
    try:
        asked = json.loads(noted.read_text(encoding="utf-8"))
        return {**asked, **{key: asked[key] for key in ("spec", "recipe", "weights")}}
    except (ValueError, KeyError, TypeError):
        raise HeadwiseError(f"{noted} is damaged; choose another folder.") from None


def note(folder: Path, request: dict[str, Any]) -> None:
    """Make a folder the home of this run."""
    if not (folder / RUN).is_file():
        try:
            _write(folder / RUN, json.dumps(request, indent=2))
        except OSError as error:
            raise HeadwiseError(f"{folder} could not be written ({error}).") from None


def _short(before: Any, now: Any) -> str:
    """What differs between two records, as few words as will do."""
    before, now = _record(before), _record(now)
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        return ", ".join(f"{key} {before.get(key)!r}, now {now.get(key)!r}" for key in keys[:3])
    return f"{before!r}, now {now!r}"


def _record(stored: Any) -> Any:
    """What decides a loss is told as a line of JSON."""
    return json.loads(stored) if isinstance(stored, str) and stored.startswith("{") else stored


class Metrics:
    """Rows of numbers, kept in memory and, if there is a folder, in a JSON Lines file."""

    def __init__(self, folder: Path | None, upto: int) -> None:
        self.path = None if folder is None else folder / METRICS
        self.rows: list[dict[str, float]] = []
        if self.path is not None and self.path.is_file():
            self.rows = [
                row for row in _read(self.path) if (row["step"] or 0) <= upto
            ]  # what comes after is done again
            self._guard(lambda path: _write(path, "".join(json.dumps(row) + "\n" for row in self.rows)))

    def add(self, row: dict[str, float]) -> None:
        """One more row, on the disk at once."""
        self.rows.append(row)
        self._guard(lambda path: _append(path, json.dumps(row) + "\n"))

    def _guard(self, write: Any) -> None:
        try:
            if self.path is not None:
                write(self.path)
        except OSError as error:
            raise HeadwiseError(f"{self.path} could not be written ({error}); checkpoints are as they were.") from None


def _append(path: Path, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def _read(path: Path) -> list[dict[str, float]]:
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break  # the line a killed run was writing
    return rows


def _write(path: Path, text: str) -> None:
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
