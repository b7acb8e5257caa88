"""Small runs, and functions that compare their results."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.training import Recipe, TrainResult, train

WORDS = tuple("the old dog saw a small cat near that green tree and it ran to them under our house".split())  # noqa: SIM905


def random_words(count: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


TEXT = random_words(400)
PLAIN = ModelSpec(vocab=257, context=8, layers=1, attention=AttentionSpec(width=16, heads=2))
NOISY = ModelSpec(
    vocab=257,
    context=8,
    layers=2,
    dropout=0.1,
    attention=AttentionSpec(width=16, heads=4, dropout=0.1, head_dropout=0.3, head_dropout_schedule="v"),
)
ODD = replace(
    PLAIN,
    tied=False,
    norm="rms",
    activation="swiglu",
    attention=AttentionSpec(width=16, heads=4, kv_heads=2, bias=True, gated=True, softmax="sink", head_dropout=0.2),
)
MASKED = replace(NOISY, kind="encoder", output="mlm")
SHORT = Recipe(
    steps=20,
    batch_size=4,
    learning_rate=1e-2,
    warmup=3,
    save_every=4,
    log_every=3,
    evaluate_every=7,
    evaluate_tokens=64,
    seed=5,
)


class RunInterrupted(Exception):  # noqa: N818
    """Raised by a callback to interrupt a run."""


def run(spec: ModelSpec | Transformer, recipe: Recipe, out: Path | None = None, **options: Any) -> TrainResult:
    return train(spec, options.pop("text", TEXT), recipe, out=out, progress=False, **options)


def run_interrupted(spec: ModelSpec | Transformer, recipe: Recipe, out: Path, stop_step: int, **options: Any) -> None:
    """Start a run and interrupt it after a step, before anything of that step is saved."""

    def stop(model: Transformer, step: int) -> None:
        if step == stop_step:
            raise RunInterrupted

    try:
        run(spec, recipe, out, callback=stop, callback_every=1, **options)
    except RunInterrupted:
        return
    raise AssertionError(f"step {stop_step} was never reached")


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def max_weight_difference(first: nn.Module, second: nn.Module) -> float:
    """Return the largest difference between the weights of two models."""
    a, b = first.state_dict(), second.state_dict()
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a if a[name].numel())


def same_tensors(first: Path, second: Path) -> bool:
    a, b = load_file(first), load_file(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def checkpoint_folder(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps with a checkpoint."""
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def drop_timing(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return logged rows without times and speeds."""
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows]


def assert_same_run(first: TrainResult, second: TrainResult) -> None:
    """Check that two runs with a folder have bitwise equal results."""
    assert first.folder is not None
    assert second.folder is not None
    assert first.step == second.step
    assert same_weights(first.model, second.model)
    assert same_tensors(first.folder / "model" / "model.safetensors", second.folder / "model" / "model.safetensors")
    last = checkpoint_steps(first.folder)[-1]
    assert checkpoint_steps(first.folder) == checkpoint_steps(second.folder)
    name = "optimizer.safetensors"
    assert (checkpoint_folder(first.folder, last) / name).read_bytes() == (
        checkpoint_folder(second.folder, last) / name
    ).read_bytes()
    name = "model.safetensors"  # the order of its metadata entries may differ, so the tensors are compared
    assert same_tensors(checkpoint_folder(first.folder, last) / name, checkpoint_folder(second.folder, last) / name)
    assert drop_timing(first.history) == drop_timing(second.history)
    assert (first.loss, first.valid_loss, first.best_step, first.stop_reason) == (
        second.loss,
        second.valid_loss,
        second.best_step,
        second.stop_reason,
    )
