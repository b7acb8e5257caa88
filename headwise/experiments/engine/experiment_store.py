"""Store of trained models and results, keyed by configuration and code versions (declared_code_versions.py)."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwise.errors import FileFormatError, HeadwiseError
from headwise.experiments.engine.declared_code_versions import version_string
from headwise.experiments.engine.experiment_config import ExperimentConfig, TrainedModel
from headwise.io import write_atomic
from headwise.text import Corpus

RESULTS_FILE = "done.json"
EXTRA_BYTES = 16 << 20  # disk space of a run in addition to its weights: tokens, metrics


def default_folder() -> Path:
    """Return `$HEADWISE_CACHE/experiments`, or the default folder in the user's cache."""
    cache_root = os.environ.get("HEADWISE_CACHE")
    if cache_root:
        return Path(cache_root) / "experiments"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwise" / "experiments"


class ExperimentStore:
    """Folder of trained models and results. Other versions of the code use other keys, so that they never share entries."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self._folders: dict[ExperimentConfig, Path] = {}  # memo, because the key may require reading a text
        try:
            for subfolder in ("models", "results", "texts"):
                (self.folder / subfolder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HeadwiseError(
                f"{self.folder}: the experiment cache cannot be written ({error}). "
                "Choose another folder with --cache or the variable HEADWISE_CACHE."
            ) from None

    def folder_of(self, config: ExperimentConfig) -> Path:
        """Return the folder of a run, which may not exist yet."""
        if config not in self._folders:
            # a file may change without changing its name
            fingerprint = Corpus.of(Path(config.text)).fingerprint if config.text else ""
            self._folders[config] = (
                self.folder / "models" / config.key(version_string("texts", "training"), fingerprint)
            )
        return self._folders[config]

    def load_trained(self, config: ExperimentConfig) -> TrainedModel | None:
        """Return the trained model, or None if it is not in the store."""
        results = self.read_json(self.folder_of(config) / RESULTS_FILE)
        return None if results is None else TrainedModel(config, self.folder_of(config), results)

    def load_result(self, name: str, key: str) -> Any:
        """Return a stored result, or None."""
        return self.read_json(self.folder / "results" / f"{name}-{key}.json")

    def save_result(self, name: str, key: str, data: Any) -> None:
        """Store a result."""
        self.write_json(self.folder / "results" / f"{name}-{key}.json", data)

    def write_json(self, path: Path, data: Any) -> None:
        """Write JSON data atomically."""
        try:
            write_atomic(path, json.dumps(data, indent=1).encode())
        except HeadwiseError as error:
            raise HeadwiseError(f"{error} Free disk space, or choose another folder with --cache.") from None

    def read_json(self, path: Path) -> Any:
        """Return stored JSON data, or None if the file does not exist."""
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise FileFormatError(f"{path}: the file cannot be read. Delete it, and it is computed again.") from None

    def check_disk_space(self, configs: Sequence[ExperimentConfig]) -> None:
        """Raise an error if the disk has no space for the models that are not trained yet."""
        # Weights of the model and of each checkpoint step. During training also three resumable checkpoints, which contain
        # the two moments of the optimizer.
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
                f"{self.folder}: not enough disk space for the models to train. Needed: about {needed / 1e6:,.0f} MB. "
                f"Free: {free / 1e6:,.0f} MB. Free disk space, or choose another folder with --cache."
            )

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Hold an exclusive lock on the path. The operating system releases it if the process dies."""
        try:
            import fcntl
        except ImportError:  # Windows has no fcntl
            yield
            return
        with open(path.with_suffix(".lock"), "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
