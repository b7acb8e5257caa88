"""Store of trained models and results, keyed by their configuration and the versions of the code (code_versions.py)."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.experiments.engine.declared_code_versions import version_string
from headwise.experiments.engine.experiment_config import ExperimentConfig, TrainedModel
from headwise.io import write_atomic
from headwise.text import Corpus

RESULTS_FILE = "done.json"
EXTRA_BYTES = 16 << 20  # bytes a point takes beside its weights: tokens, metrics


def default_folder() -> Path:
    """`$HEADWISE_CACHE`, or the user's cache folder."""
    cache_root = os.environ.get("HEADWISE_CACHE")
    if cache_root:
        return Path(cache_root) / "experiments"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwise" / "experiments"


class ExperimentStore:
    """A folder of points and results. Another version of the code finds nothing here and makes its own."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self._folders: dict[ExperimentConfig, Path] = {}  # finding one may mean reading a text
        try:
            for subfolder in ("models", "results", "texts"):
                (self.folder / subfolder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HeadwiseError(
                f"the lab keeps what it made in {self.folder}, which cannot be written ({error}); "
                f"give another folder with --cache, or in HEADWISE_CACHE."
            ) from None

    def folder_of(self, config: ExperimentConfig) -> Path:
        """Where a point is, or will be."""
        if config not in self._folders:
            # a file may change under its name
            fingerprint = Corpus.of(Path(config.text)).fingerprint if config.text else ""
            self._folders[config] = (
                self.folder / "models" / config.key(version_string("texts", "training"), fingerprint)
            )
        return self._folders[config]

    def load_trained(self, config: ExperimentConfig) -> TrainedModel | None:
        """A point that was trained, or None."""
        results = self.read_json(self.folder_of(config) / RESULTS_FILE)
        return None if results is None else TrainedModel(config, self.folder_of(config), results)

    def load_result(self, name: str, key: str) -> Any:
        """What was found before, or None."""
        return self.read_json(self.folder / "results" / f"{name}-{key}.json")

    def save_result(self, name: str, key: str, data: Any) -> None:
        """Keep a result."""
        self.write_json(self.folder / "results" / f"{name}-{key}.json", data)

    def write_json(self, path: Path, data: Any) -> None:
        """Keep plain data, whole or not at all."""
        try:
            write_atomic(path, json.dumps(data, indent=1).encode())
        except HeadwiseError as error:
            raise HeadwiseError(f"{error} Make room, or give another folder with --cache.") from None

    def read_json(self, path: Path) -> Any:
        """Plain data that was kept; None if there is none."""
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise HeadwiseError(f"{path} cannot be read; delete it, and it is made anew.") from None

    def check_disk_space(self, configs: Sequence[ExperimentConfig]) -> None:
        """Whether the disk can hold points not yet trained; asked before long work."""
        # weights for the model and each watched step, and while it runs three checkpoints with the optimizer's two moments
        needed = sum(
            4 * config.spec.num_parameters * (1 + len(config.checkpoint_steps)) + EXTRA_BYTES
            for config in configs
            if self.load_trained(config) is None
        )
        needed += max(
            (2 * 36 * config.spec.num_parameters for config in configs if self.load_trained(config) is None), default=0
        )
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise HeadwiseError(
                f"there is no space for the cache: {self.folder} needs about {needed / 1e6:,.0f} MB for models to be "
                f"trained and has {free / 1e6:,.0f} MB; make room, or give another folder with --cache."
            )

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """One process at a time; whoever dies lets go."""
        try:
            import fcntl
        except ImportError:  # no such locks on Windows
            yield
            return
        with open(path.with_suffix(".lock"), "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
