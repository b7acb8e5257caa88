"""Checkpoints: written whole or not at all, with checksums; a damaged one is noticed and the one before it used.

A checkpoint is a model folder, so `headwise.load` reads it, with three files more: optimizer.safetensors, training.json (the
step, and what the loop knows) and checksums.json; and loss.safetensors where the loss has
parameters of its own. Random numbers need no file: they follow from the seed and the step.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.io.aligned_safetensors import read_tensors, write_tensors
from headwise.io.atomic_write import whole_folder
from headwise.training.loss import Loss
from headwise.training.optimizer import optimizer_state, restore_optimizer

CHECKSUMS = "checksums.json"


class Checkpoints:
    """The checkpoints of a run, one folder per step."""

    together = False  # whether all processes write them, or one for all

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None]) -> None:
        self.folder, self.keep, self.say = folder, keep, say

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first."""
        return sorted(int(path.name[5:]) for path in self.folder.glob("step-" + "[0-9]" * 8))

    def save(self, loss: Loss, optimizer: torch.optim.Optimizer, state: dict[str, Any], step: int, best: int) -> None:
        """Write one, then drop those that are neither among the newest nor the best."""
        with whole_folder(self.path(step), ("training.json", CHECKSUMS)) as new:
            loss.model.save(new)  # pyright: ignore[reportAttributeAccessIssue]
            learning = loss.learning()
            write_tensors(optimizer_state(learning, optimizer), new / "optimizer.safetensors")
            if own := _own(learning):
                write_tensors(own, new / "loss.safetensors")
            (new / "training.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
            (new / CHECKSUMS).write_text(json.dumps(sums_of(new), indent=2), encoding="utf-8")
        self.drop_old(best)

    def drop_old(self, best: int) -> None:
        """Keep the newest, and the best."""
        for old in self.steps()[: -self.keep]:
            if old != best:
                _remove(self.path(old))

    def newest(self) -> int | None:
        """The newest step whose checkpoint is whole; damaged ones are put aside, aloud. None: there is none yet."""
        for stray in self.folder.glob(".*"):  # what a killed run was writing or removing
            shutil.rmtree(stray, ignore_errors=True)
        steps = self.steps()
        for step in reversed(steps):
            wrong = check(self.path(step))
            if wrong is None:
                return step
            aside = self.folder / f"damaged-{self.path(step).name}"
            shutil.rmtree(aside, ignore_errors=True)
            self.path(step).rename(aside)
            self.say(
                f"the checkpoint of step {step} is damaged ({wrong}); it is now {aside.name}, and the one before is used."
            )
        if steps:
            raise HeadwiseError(f"every checkpoint in {self.folder} is damaged; begin anew in another folder.")
        return None

    def restore(self, step: int, loss: Loss, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Put a model, its loss and its optimizer back to where they were; returns what the loop knew."""
        folder, model, learning = self.path(step), loss.model, loss.learning()
        if not (folder / "model.safetensors").is_file():
            raise HeadwiseError(f"the checkpoint {folder} is of another layout; go on with the recipe it was made by.")
        unknown = model.restore(load_file(folder / "model.safetensors"))
        if unknown:
            raise HeadwiseError(
                f"the checkpoint {folder} is of another model: {', '.join(unknown[:3])} is not in this one."
            )
        if optimizer is not None:
            restore_optimizer(learning, optimizer, read_tensors(folder / "optimizer.safetensors"))
        own = _own(learning)
        kept = read_tensors(folder / "loss.safetensors") if (folder / "loss.safetensors").is_file() else {}
        if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in kept.items()}:
            raise HeadwiseError(f"the checkpoint {folder} is of another loss; give the one this run began with.")
        for name, value in kept.items():
            own[name].copy_(value)
        return json.loads((folder / "training.json").read_text(encoding="utf-8"))


def _own(learning: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """What learns and belongs to the loss, not to the model."""
    return {name: value.detach() for name, value in learning.items() if name.startswith("loss.")}


def check(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        sums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        for name, digest in sums.items():
            if _digest(folder / name) != digest:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, AttributeError) as error:
        return str(error)
    return None if "training.json" in sums else f"{CHECKSUMS} is not complete"


def sums_of(folder: Path) -> dict[str, str]:
    """The checksum of every file of a folder."""
    return {str(path.relative_to(folder)): _digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(folder: Path) -> None:
    """Take a folder out of sight in one step, then delete it: a kill half-way leaves no half checkpoint."""
    hidden = folder.with_name(f".{folder.name}")
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
