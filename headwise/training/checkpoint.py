"""Checkpoints, written atomically and with checksums. If one is damaged, the previous one is used.

A checkpoint is a model folder that `headwise.load` reads, with more files: optimizer.safetensors, training.json (the step and
the state of the loop), checksums.json, and loss.safetensors if the loss has parameters. RNG state needs no file, because it
follows from the seed and the step.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from headwise.distributed.distributed_checkpoint_reader import MODEL_PREFIX, tensor_names
from headwise.distributed.parallel_strategies import local_tensor
from headwise.distributed.process_group import ProcessGroup
from headwise.distributed.sharded_checkpoint import (
    LOSS_PREFIX,
    MOMENTS,
    load_shards,
    moment_shards,
    save_shards,
    tensor_shards,
    weight_shards,
)
from headwise.errors import ArgumentError, FileFormatError
from headwise.io.aligned_safetensors import read_tensors, write_tensors
from headwise.io.atomic_write import atomic_folder
from headwise.model.transformer import Transformer
from headwise.training.model_with_loss import ModelWithLoss
from headwise.training.optimizer import optimizer_state, restore_optimizer
from headwise.weights.save import write_metadata

CHECKSUMS_FILE = "checksums.json"
SHARDS_FOLDER = "shards"


class CheckpointFolder:
    """The checkpoints of a run, one folder per step."""

    is_collective = False  # whether all processes write the checkpoint, or only rank zero

    def __init__(self, folder: Path, keep_newest: int, log: Callable[[str], None]) -> None:
        self.folder, self.keep_newest, self.log = folder, keep_newest, log

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint, oldest first."""
        return sorted(int(path.name[5:]) for path in self.folder.glob("step-" + "[0-9]" * 8))

    def save(
        self, loss: ModelWithLoss, optimizer: torch.optim.Optimizer, state: dict[str, Any], step: int, best_step: int
    ) -> None:
        """Write a checkpoint atomically, then drop those that are neither among the newest nor the best."""
        with atomic_folder(self.path(step), ("training.json", CHECKSUMS_FILE)) as new_folder:
            loss.model.save(new_folder)  # pyright: ignore[reportAttributeAccessIssue]
            parameters = loss.trainable_parameters()
            write_tensors(optimizer_state(parameters, optimizer), new_folder / "optimizer.safetensors")
            if loss_parameters := _loss_parameters(parameters):
                write_tensors(loss_parameters, new_folder / "loss.safetensors")
            _write_state(new_folder, state)
        self.drop_old(best_step)

    def drop_old(self, best_step: int) -> None:
        """Drop all checkpoints except the newest and the best."""
        for old_step in self.steps()[: -self.keep_newest]:
            if old_step != best_step:
                _remove(self.path(old_step))

    def newest_valid_step(self) -> int | None:
        """Return the newest step with a valid checkpoint, or None. Damaged checkpoints are renamed and logged."""
        for stray in self.folder.glob(".*"):  # temporary folders of a killed run
            shutil.rmtree(stray, ignore_errors=True)
        steps = self.steps()
        for step in reversed(steps):
            problem = checkpoint_problem(self.path(step))
            if problem is None:
                return step
            damaged_folder = self.folder / f"damaged-{self.path(step).name}"
            shutil.rmtree(damaged_folder, ignore_errors=True)
            self.path(step).rename(damaged_folder)
            self.log(
                f"the checkpoint of step {step} is damaged ({problem}). It was renamed to {damaged_folder.name}, and the "
                f"previous checkpoint is used."
            )
        if steps:
            raise FileFormatError(f"{self.folder}: every checkpoint is damaged. Start the run again in another folder.")
        return None

    def restore(self, step: int, loss: ModelWithLoss, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Restore a model, its loss and its optimizer. Return the state of the loop."""
        folder, model, parameters = self.path(step), loss.model, loss.trainable_parameters()
        if not (folder / "model.safetensors").is_file():
            raise FileFormatError(
                f"{folder}: the checkpoint was written with a sharded `parallel` setting, and the current setting differs. "
                "Resume with the `parallel` setting of the original run."
            )
        unknown = model.load_weights(load_file(folder / "model.safetensors"))
        if unknown:
            raise FileFormatError(
                f"{folder}: the checkpoint is of another model. Got the weight {', '.join(unknown[:3])}, which this model "
                "does not have. Resume with the model of the run."
            )
        if optimizer is not None:
            restore_optimizer(parameters, optimizer, read_tensors(folder / "optimizer.safetensors"))
        loss_parameters = _loss_parameters(parameters)
        saved = read_tensors(folder / "loss.safetensors") if (folder / "loss.safetensors").is_file() else {}
        if {name: value.shape for name, value in loss_parameters.items()} != {
            name: value.shape for name, value in saved.items()
        }:
            raise ArgumentError(
                f"loss: its parameters differ from those of the checkpoint {folder}. Use the loss that the run started with."
            )
        for name, value in saved.items():
            loss_parameters[name].copy_(value)
        return json.loads((folder / "training.json").read_text(encoding="utf-8"))


class ShardedCheckpointFolder(CheckpointFolder):
    """Checkpoints that all processes write and read together (`headwise.distributed.sharded_checkpoint`)."""

    is_collective = True

    def __init__(self, folder: Path, keep_newest: int, log: Callable[[str], None], process_group: ProcessGroup) -> None:
        super().__init__(folder, keep_newest, log)
        self.process_group = process_group.all_processes

    def save(
        self, loss: ModelWithLoss, optimizer: torch.optim.Optimizer, state: dict[str, Any], step: int, best_step: int
    ) -> None:
        """Write a checkpoint atomically, then drop those that are neither among the newest nor the best."""
        model, parameters = _native_model(loss), loss.trainable_parameters()
        shards = {**weight_shards(model, parameters), **moment_shards(model, parameters, optimizer)}
        with ExitStack() as stack:
            atomic = atomic_folder(self.path(step), ("training.json", CHECKSUMS_FILE))
            new_folder = Path(self.process_group.run_on_rank_zero(lambda: str(stack.enter_context(atomic))))
            save_shards(shards, new_folder / SHARDS_FOLDER, self.process_group)
            self.process_group.barrier()
            if self.process_group.is_rank_zero:
                write_metadata(model, new_folder)
                _write_state(new_folder, state)
        if self.process_group.is_rank_zero:
            self.drop_old(best_step)

    def restore(self, step: int, loss: ModelWithLoss, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Restore a model and its optimizer for any number of processes. Return the state of the loop."""
        folder, model, parameters = self.path(step), _native_model(loss), loss.trainable_parameters()
        if not (folder / SHARDS_FOLDER).is_dir():
            raise FileFormatError(
                f"{folder}: the checkpoint has another layout, written with parallel='ddp'. Resume with parallel='ddp'."
            )
        shards = weight_shards(model, parameters)
        saved_names = tensor_names((folder / SHARDS_FOLDER).glob("*.safetensors"))
        if missing := sorted(set(shards) - saved_names):
            raise FileFormatError(
                f"{folder}: the checkpoint is of another model; it has no weight {missing[0].removeprefix(MODEL_PREFIX)}. "
                "Resume with the model of the run."
            )
        training_state = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        if optimizer is not None:
            for name, value in parameters.items():
                if any(f"{MOMENTS[0]}:{shard}" in saved_names for shard, _ in tensor_shards(model, name, value)):
                    count = torch.tensor(float(training_state["step"]), device=local_tensor(value).device)
                    optimizer.state[value] = {"step": count, **{moment: torch.zeros_like(value) for moment in MOMENTS}}
            shards |= moment_shards(model, parameters, optimizer)
        load_shards(shards, folder / SHARDS_FOLDER, self.process_group)
        return training_state


def _native_model(loss: ModelWithLoss) -> Transformer:
    return loss.model  # pyright: ignore[reportReturnType]


def _write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the state of the loop, then the checksums of all files."""
    (folder / "training.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
    (folder / CHECKSUMS_FILE).write_text(json.dumps(folder_checksums(folder), indent=2), encoding="utf-8")


def _loss_parameters(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the trainable parameters of the loss that do not belong to the model."""
    return {name: value.detach() for name, value in parameters.items() if name.startswith(LOSS_PREFIX)}


def checkpoint_problem(folder: Path) -> str | None:
    """Return a description of the damage of a checkpoint, or None if it is valid."""
    try:
        checksums = json.loads((folder / CHECKSUMS_FILE).read_text(encoding="utf-8"))
        for name, digest in checksums.items():
            if _digest(folder / name) != digest:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, AttributeError) as error:
        return str(error)
    return None if "training.json" in checksums else f"{CHECKSUMS_FILE} is incomplete"


def folder_checksums(folder: Path) -> dict[str, str]:
    """Return the checksum of every file of a folder."""
    return {str(path.relative_to(folder)): _digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(folder: Path) -> None:
    """Rename a folder to a hidden name, then delete it, so that a kill leaves no partial checkpoint."""
    hidden_folder = folder.with_name(f".{folder.name}")
    folder.rename(hidden_folder)
    shutil.rmtree(hidden_folder, ignore_errors=True)
