"""What processes check about training together."""

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
from headwise.distributed.parallel_strategy import local
from headwise.model.shard import Shard, part_of
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.training import Recipe, Trained, loop, train
from headwise.training.sharded_checkpoint import _moments, _weights
from tests.training.tiny import NOISY, TEXT, Stop

SPECS = {
    "grouped": ModelSpec(
        vocab=257, context=8, layers=3, hidden=22, activation="swiglu", norm="rms", positions="none",
        attention=AttentionSpec(width=36, heads=9, kv_heads=3, rotary=Rotary()), kept={"1": (0, 1, 4, 5, 8), "2": ()},
    ),
    "one key": ModelSpec(
        vocab=257, context=8, layers=2, tied=False,
        attention=AttentionSpec(width=16, heads=4, kv_heads=1, bias=True, out_bias=True, gated=True, softmax="sink"),
    ),
    "noisy": NOISY,
}  # fmt: skip
RECIPE = Recipe(
    steps=15, batch=8, accumulate=2, rate=1e-3, warmup=2, save_every=5, log_every=1, evaluate_every=5, seed=4, clip=0.5
)


def recipe_of(parallel: str, **more: Any) -> Recipe:
    return replace(RECIPE, parallel=parallel, **more)


def trained(folder: str, name: str, parallel: str, stop: int = -1, **more: Any) -> Trained | None:
    def look(model: hw.Transformer, step: int) -> None:
        if step == stop:
            raise Stop

    try:
        how = recipe_of(parallel, **more)
        return train(SPECS[name], TEXT, how, out=folder, call=look, every=1, progress=False)
    except Stop:
        return None


def run(folder: str, name: str, parallel: str, stop: int = -1) -> dict[str, Any]:
    """Train, and see that what lies in the last checkpoint is what is here, bit by bit."""
    made = trained(folder, name, parallel, stop)
    if made is None:
        return {}
    whole = hw.load(Path(folder) / "checkpoints" / f"step-{made.step:08d}")
    assert isinstance(whole, hw.Transformer)
    model = made.model
    other = part_of(whole, model.shares, model.together) if isinstance(model, Shard) else whole
    same = True
    for own, there in zip(model.parameters(), other.parameters(), strict=True):
        here = own.full_tensor() if isinstance(own, DTensor) else own
        same &= torch.equal(here, there)
    return {"loss": made.loss, "valid": made.valid_loss, "step": made.step, "same": same, "kind": type(model).__name__}


def loss(folder: str, name: str, parallel: str, how: dict[str, Any]) -> float:
    """What a run ends at."""
    return train(SPECS[name], TEXT, recipe_of(parallel, **how), out=folder, progress=False).loss


def memory(folder: str, parallel: str) -> int:
    """Bytes of weights, gradients and what the optimizer remembers, in this process."""
    found: list[int] = []
    step = loop.Loop._step

    def measured(self: Any, module: Any) -> float:
        length = step(self, module)
        values = list(self.model.parameters())
        held = [*values, *(value.grad for value in values if value.grad is not None)]
        held += [x for kept in self.optimizer.state.values() for x in kept.values()]
        found.append(sum(local(x).nbytes for x in held))
        return length

    loop.Loop._step = measured  # pyright: ignore[reportAttributeAccessIssue]
    try:
        spec = ModelSpec(vocab=512, context=8, layers=4, attention=AttentionSpec(width=64, heads=8))
        train(spec, TEXT, replace(RECIPE, steps=2, parallel=parallel), out=folder, progress=False)  # pyright: ignore
    finally:
        loop.Loop._step = step
    return max(found)


@contextmanager
def instead(name: str, work: Callable[[loop.Loop], Any]) -> Iterator[None]:
    """Something before a part of the loop."""
    usual = getattr(loop.Loop, name)

    def both(self: loop.Loop, *given: Any) -> Any:
        work(self)
        return usual(self, *given)

    setattr(loop.Loop, name, both)
    try:
        yield
    finally:
        setattr(loop.Loop, name, usual)


def kept(folder: str, name: str, parallel: str) -> None:
    """Train, break off behind the first checkpoint, and leave what this process held at that checkpoint beside it."""

    def keep(self: loop.Loop) -> None:
        if self.step == RECIPE.save_every:
            held = {**_weights(self.learns_from), **_moments(self.learns_from, self.optimizer)}
            places = {name: json.dumps([piece.offsets, piece.shape]) for name, piece in held.items()}
            tensors = {name: piece.tensor.clone(memory_format=torch.contiguous_format) for name, piece in held.items()}
            save_file(tensors, f"{folder}-held-{dist.get_rank()}", metadata=places)

    with instead("_save", keep):
        trained(folder, name, parallel, RECIPE.save_every + 2)


def as_loaded(folder: str, held: str, name: str, parallel: str) -> list[int]:
    """Go on, on another number of processes: of how many numbers that are here how many are not the bits they were there."""
    wholes: dict[str, torch.Tensor] = {}
    for path in Path(held).parent.glob(f"{Path(held).name}-held-*"):
        with safe_open(path, "pt") as file:
            for key, place in file.metadata().items():
                offsets, shape = json.loads(place)
                tensor = file.get_tensor(key)
                whole = wholes.setdefault(key, torch.full(shape, torch.nan))
                whole[_slices(offsets, tensor)] = tensor
    counts = [0, 0]

    def compare(self: loop.Loop) -> None:
        assert self.step == RECIPE.save_every
        for key, piece in {**_weights(self.learns_from), **_moments(self.learns_from, self.optimizer)}.items():
            there = wholes[key][_slices(piece.offsets, piece.tensor)]
            counts[0] += there.numel()
            counts[1] += int((there != piece.tensor).sum())
        raise Stop

    with instead("_step", compare):
        trained(folder, name, parallel)
    return counts


def _slices(offsets: Sequence[int], tensor: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, tensor.shape, strict=True))


def disagree(folder: str) -> list[str]:
    """Texts that differ; a run of one layout is taken up with another; a batch that cannot be shared out."""
    told = []
    try:
        train(SPECS["grouped"], TEXT * (1 + dist.get_rank()), recipe_of("fsdp"), out=f"{folder}-other", progress=False)
    except hw.HeadwiseError as error:
        told.append(str(error))
    for how in (recipe_of("ddp"), recipe_of("fsdp", batch=9, accumulate=1)):
        try:
            train(SPECS["grouped"], TEXT, how, out=folder, progress=False)
        except hw.HeadwiseError as error:
            told.append(str(error))
        dist.barrier()
    return told


def vanish(folder: str) -> str:
    """One process goes away in the middle of a step; the other says so."""

    def look(model: hw.Transformer, step: int) -> None:
        if step == 6 and dist.get_rank() == 1:
            os._exit(1)

    try:
        train(SPECS["grouped"], TEXT, recipe_of("heads"), out=folder, call=look, every=1, progress=False)
    except hw.HeadwiseError as error:
        return str(error)
    return ""
