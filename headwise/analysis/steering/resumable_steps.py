"""File of finished steps of a long run: JSON Lines, one line per step, appended as soon as the step ends."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise.errors import FileFormatError, HeadwiseError
from headwise.io.atomic_write import write_atomic
from headwise.io.resolve_path import read_text
from headwise.progress import Progress


class ResumableStepRunner:
    """Run named steps once. With a file, finished steps are read from it when the run is repeated.

    Args:
        path: File of finished steps, or None to store nothing.
        settings: Settings of the run. A file with other settings is an error.
        progress: Called with a label, the number of finished steps and the total.
        total: Number of steps, for `progress`.
        label: Label for `progress`.
    """

    def __init__(
        self,
        path: str | Path | None,
        settings: dict[str, Any],
        progress: Progress | None = None,
        total: int | None = None,
        label: str = "steering",
    ) -> None:
        self.path, self.progress, self.total, self.label = None if path is None else Path(path), progress, total, label
        self.used: set[str] = set()  # steps of this run so far
        self.finished: dict[str, Any] = {}
        if self.path is None:
            return
        settings = json.loads(json.dumps(settings))
        lines = _read_lines(self.path) if self.path.exists() else []
        if lines and lines[0].get("settings") != settings:
            raise FileFormatError(
                f"{self.path}: has the steps of another run (other model, texts or settings). Choose another file, or delete "
                f"this one."
            )
        self.finished = {line["step"]: line["value"] for line in lines[1:]}
        stored = [{"settings": settings}, *({"step": step, "value": value} for step, value in self.finished.items())]
        write_atomic(self.path, "".join(json.dumps(line) + "\n" for line in stored).encode())

    def run(self, step: str, compute: Callable[[], Any]) -> Any:
        """Return the stored value of a step, or compute and store it. Values are plain data."""
        if step not in self.finished:
            self.finished[step] = compute()
            self._append({"step": step, "value": self.finished[step]})
        self.used.add(step)
        if self.progress is not None:
            done = len(self.used)
            self.progress(self.label, done, None if self.total is None else max(self.total, done))
        return self.finished[step]

    def expect(self, total: int) -> None:
        """Set the number of steps, if it is known only after the first of them."""
        self.total = total

    def _append(self, line: dict[str, Any]) -> None:
        if self.path is None:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise HeadwiseError(
                f"{self.path}: cannot be written ({error}). Finished steps are intact. Free space or fix the permissions, "
                f"then repeat the call to resume."
            ) from error


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the settings and the steps. A line truncated by a crash, and the lines after it, are ignored."""
    lines: list[Any] = []
    for text in read_text(path).splitlines():
        try:
            lines.append(json.loads(text))
        except (json.JSONDecodeError, RecursionError):
            break
    is_valid = all(isinstance(line, dict) for line in lines) and all(
        {"step", "value"} <= line.keys() for line in lines[1:]
    )
    if not is_valid or (lines and "settings" not in lines[0]):
        raise FileFormatError(f"{path}: not a file of finished steps. Choose another file.")
    return lines
