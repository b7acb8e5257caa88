"""Checks of training with several processes."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

import headwise as hw
from headwise.distributed.model_shard import ShardedTransformer, shard_of
from headwise.distributed.parallel_strategies import local_tensor
from headwise.distributed.sharded_checkpoint import TensorShard, moment_shards, weight_shards
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.training import Recipe, TrainResult, loop, train
from tests.training.tiny import NOISY, TEXT, RunInterrupted

SPECS = {
    "grouped": ModelSpec(
        vocab=257, context=8, layers=3, mlp_width=22, activation="swiglu", norm="rms", positions="none",
        attention=AttentionSpec(width=36, heads=9, kv_heads=3, rotary=Rotary()), kept_heads={"1": (0, 1, 4, 5, 8), "2": ()},
    ),
    "one key": ModelSpec(
        vocab=257, context=8, layers=2, tied=False,
        attention=AttentionSpec(width=16, heads=4, kv_heads=1, bias=True, out_bias=True, gated=True, softmax="sink"),
    ),
    "noisy": NOISY,
}  # fmt: skip
RECIPE = Recipe(
    steps=15,
    batch_size=8,
    accumulation_steps=2,
    learning_rate=1e-3,
    warmup=2,
    save_every=5,
    log_every=1,
    evaluate_every=5,
    seed=4,
    max_grad_norm=0.5,
)


def recipe_of(parallel: str, **overrides: Any) -> Recipe:
    return replace(RECIPE, parallel=parallel, **overrides)


def train_until(folder: str, name: str, parallel: str, stop: int = -1, **overrides: Any) -> TrainResult | None:
    def on_step(model: hw.Transformer, step: int) -> None:
        if step == stop:
            raise RunInterrupted

    try:
        recipe = recipe_of(parallel, **overrides)
        return train(SPECS[name], TEXT, recipe, out=folder, callback=on_step, callback_every=1, progress=False)
    except RunInterrupted:
        return None


def run(folder: str, name: str, parallel: str, stop: int = -1) -> dict[str, Any]:
    """Train, and check that the last checkpoint is bitwise equal to the local state."""
    result = train_until(folder, name, parallel, stop)
    if result is None:
        return {}
    full = hw.load(Path(folder) / "checkpoints" / f"step-{result.step:08d}")
    assert isinstance(full, hw.Transformer)
    model = result.model
    other = shard_of(full, model.partitions, model.collectives) if isinstance(model, ShardedTransformer) else full
    same = True
    for own, expected in zip(model.parameters(), other.parameters(), strict=True):
        actual = own.full_tensor() if isinstance(own, DTensor) else own
        same &= torch.equal(actual, expected)
    return {
        "loss": result.loss,
        "valid": result.valid_loss,
        "step": result.step,
        "same": same,
        "kind": type(model).__name__,
    }


def loss(folder: str, name: str, parallel: str, options: dict[str, Any]) -> float:
    """Return the final loss of a run."""
    return train(SPECS[name], TEXT, recipe_of(parallel, **options), out=folder, progress=False).loss


def memory(folder: str, parallel: str) -> int:
    """Return bytes of weights, gradients and optimizer state of this process."""
    sizes: list[int] = []
    step = loop.TrainLoop._train_step

    def measured_step(self: Any, module: Any) -> float:
        length = step(self, module)
        values = list(self.model.parameters())
        tensors = [*values, *(value.grad for value in values if value.grad is not None)]
        tensors += [x for state in self.optimizer.state.values() for x in state.values()]
        sizes.append(sum(local_tensor(x).nbytes for x in tensors))
        return length

    loop.TrainLoop._train_step = measured_step  # pyright: ignore[reportAttributeAccessIssue]
    try:
        spec = ModelSpec(vocab=512, context=8, layers=4, attention=AttentionSpec(width=64, heads=8))
        train(spec, TEXT, replace(RECIPE, steps=2, parallel=parallel), out=folder, progress=False)  # pyright: ignore
    finally:
        loop.TrainLoop._train_step = step
    return max(sizes)


@contextmanager
def run_before(name: str, work: Callable[[loop.TrainLoop], Any]) -> Iterator[None]:
    """Run a function before a method of the loop."""
    original = getattr(loop.TrainLoop, name)

    def wrapped(self: loop.TrainLoop, *args: Any) -> Any:
        work(self)
        return original(self, *args)

    setattr(loop.TrainLoop, name, wrapped)
    try:
        yield
    finally:
        setattr(loop.TrainLoop, name, original)


def save_at_checkpoint(folder: str, name: str, parallel: str) -> None:
    """Train, interrupt after the first checkpoint, and save the local state at that checkpoint next to it."""

    def save_state(self: loop.TrainLoop) -> None:
        if self.step == RECIPE.save_every:
            pieces = all_shards(self)
            metadata = {name: json.dumps([piece.offsets, piece.shape]) for name, piece in pieces.items()}
            tensors = {
                name: piece.tensor.clone(memory_format=torch.contiguous_format) for name, piece in pieces.items()
            }
            save_file(tensors, f"{folder}-held-{dist.get_rank()}", metadata=metadata)

    with run_before("_save", save_state):
        train_until(folder, name, parallel, RECIPE.save_every + 2)


def compare_loaded(folder: str, saved_prefix: str, name: str, parallel: str) -> list[int]:
    """Resume on another number of processes. Return the number of local values, and how many differ bitwise."""
    full_tensors: dict[str, torch.Tensor] = {}
    for path in Path(saved_prefix).parent.glob(f"{Path(saved_prefix).name}-held-*"):
        with safe_open(path, "pt") as file:
            for key, entry in file.metadata().items():
                offsets, shape = json.loads(entry)
                tensor = file.get_tensor(key)
                full = full_tensors.setdefault(key, torch.full(shape, torch.nan))
                full[_slices(offsets, tensor)] = tensor
    counts = [0, 0]

    def compare(self: loop.TrainLoop) -> None:
        assert self.step == RECIPE.save_every
        for key, piece in all_shards(self).items():
            expected = full_tensors[key][_slices(piece.offsets, piece.tensor)]
            counts[0] += expected.numel()
            counts[1] += int((expected != piece.tensor).sum())
        raise RunInterrupted

    with run_before("_train_step", compare):
        train_until(folder, name, parallel)
    return counts


def all_shards(training: loop.TrainLoop) -> dict[str, TensorShard]:
    """Return the weights and moments of this process."""
    model, parameters = training.model, training.loss_module.trainable_parameters()
    return {**weight_shards(model, parameters), **moment_shards(model, parameters, training.optimizer)}


def _slices(offsets: Sequence[int], tensor: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, tensor.shape, strict=True))


def conflicting_runs(folder: str) -> list[str]:
    """Return errors for different texts, for resuming with another parallel strategy, and for an indivisible batch."""
    messages = []
    try:
        train(SPECS["grouped"], TEXT * (1 + dist.get_rank()), recipe_of("fsdp"), out=f"{folder}-other", progress=False)
    except hw.HeadwiseError as error:
        messages.append(str(error))
    for recipe in (recipe_of("ddp"), recipe_of("fsdp", batch_size=9, accumulation_steps=1)):
        try:
            train(SPECS["grouped"], TEXT, recipe, out=folder, progress=False)
        except hw.HeadwiseError as error:
            messages.append(str(error))
        dist.barrier()
    return messages


def exit_process(folder: str) -> str:
    """Exit one process during a step, and return the error of the other."""

    def on_step(model: hw.Transformer, step: int) -> None:
        if step == 6 and dist.get_rank() == 1:
            os._exit(1)

    try:
        train(
            SPECS["grouped"], TEXT, recipe_of("heads"), out=folder, callback=on_step, callback_every=1, progress=False
        )
    except hw.HeadwiseError as error:
        return str(error)
    return ""
