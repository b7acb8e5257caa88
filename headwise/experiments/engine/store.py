"""Where the lab keeps what it made: trained points and results, named by what decides them, code included (versions.py)."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.experiments.engine.experiment_config import Made, Point
from headwise.experiments.engine.versions import declared
from headwise.io.atomic_write import whole_file
from headwise.text.corpus import Corpus

DONE = "done.json"
ROOM = 16 << 20  # bytes a point takes beside its weights: tokens, metrics


def default_folder() -> Path:
    """`$HEADWISE_CACHE`, or the user's cache folder."""
    given = os.environ.get("HEADWISE_CACHE")
    if given:
        return Path(given) / "lab"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwise" / "lab"


class Store:
    """A folder of points and results. Another version of the code finds nothing here and makes its own."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self._places: dict[Point, Path] = {}  # finding one may mean reading a text
        try:
            for room in ("points", "results", "texts"):
                (self.folder / room).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HeadwiseError(
                f"the lab keeps what it made in {self.folder}, which cannot be written ({error}); "
                f"give another folder with --cache, or in HEADWISE_CACHE."
            ) from None

    def place(self, point: Point) -> Path:
        """Where a point is, or will be."""
        if point not in self._places:
            read = Corpus.of(Path(point.text)).fingerprint if point.text else ""  # a file may change under its name
            self._places[point] = self.folder / "points" / point.key(declared("texts", "training"), read)
        return self._places[point]

    def made(self, point: Point) -> Made | None:
        """A point that was trained, or None."""
        told = self.read(self.place(point) / DONE)
        return None if told is None else Made(point, self.place(point), told)

    def result(self, name: str, key: str) -> Any:
        """What was found before, or None."""
        return self.read(self.folder / "results" / f"{name}-{key}.json")

    def keep(self, name: str, key: str, data: Any) -> None:
        """Keep a result."""
        self.write(self.folder / "results" / f"{name}-{key}.json", data)

    def write(self, path: Path, data: Any) -> None:
        """Keep plain data, whole or not at all."""
        try:
            whole_file(path, json.dumps(data, indent=1).encode())
        except HeadwiseError as error:
            raise HeadwiseError(f"{error} Make room, or give another folder with --cache.") from None

    def read(self, path: Path) -> Any:
        """Plain data that was kept; None if there is none."""
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise HeadwiseError(f"{path} cannot be read; delete it, and it is made anew.") from None

    def check_room(self, points: Sequence[Point]) -> None:
        """Whether the disk can hold points not yet trained; asked before long work."""
        # weights for the model and each watched step, and while it runs three checkpoints with the optimizer's two moments
        needed = sum(4 * p.spec.parameters * (1 + len(p.watch)) + ROOM for p in points if self.made(p) is None)
        needed += max((2 * 36 * p.spec.parameters for p in points if self.made(p) is None), default=0)
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise HeadwiseError(
                f"there is no space for the cache: {self.folder} needs about {needed / 1e6:,.0f} MB for models to be "
                f"trained and has {free / 1e6:,.0f} MB; make room, or give another folder with --cache."
            )

    @contextmanager
    def holding(self, path: Path) -> Iterator[None]:
        """One process at a time; whoever dies lets go."""
        try:
            import fcntl
        except ImportError:  # no such locks on Windows
            yield
            return
        with open(path.with_suffix(".lock"), "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
