"""Small runs, and ways to compare what they leave."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.training import Recipe, Trained, train

WORDS = tuple("the old dog saw a small cat near that green tree and it ran to them under our house".split())  # noqa: SIM905


def words(count: int, seed: int = 0) -> str:
    dice = random.Random(seed)
    return " ".join(dice.choice(WORDS) for _ in range(count))


TEXT = words(400)
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
    steps=20, batch=4, rate=1e-2, warmup=3, save_every=4, log_every=3, evaluate_every=7, evaluate_tokens=64, seed=5
)


class Stop(Exception):  # noqa: N818
    """Raised from a call to break a run off."""


def run(spec: ModelSpec | Transformer, recipe: Recipe, out: Path | None = None, **more: Any) -> Trained:
    return train(spec, more.pop("text", TEXT), recipe, out=out, progress=False, **more)


def broken(spec: ModelSpec | Transformer, recipe: Recipe, out: Path, at: int, **more: Any) -> None:
    """The same run, broken off right behind a step, before anything of that step is saved."""

    def stop(model: Transformer, step: int) -> None:
        if step == at:
            raise Stop

    try:
        run(spec, recipe, out, call=stop, every=1, **more)
    except Stop:
        return
    raise AssertionError(f"step {at} was never reached")


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two models' weights."""
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a if a[name].numel())


def same_file(one: Path, other: Path) -> bool:
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def there(folder: Path) -> list[int]:
    """The steps that have a checkpoint."""
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def timeless(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Logged rows without what a clock said."""
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows]


def same_run(one: Trained, other: Trained) -> None:
    """Two runs with a folder ended in the same bits."""
    assert one.folder is not None
    assert other.folder is not None
    assert one.step == other.step
    assert same_weights(one.model, other.model)
    assert same_file(one.folder / "model" / "model.safetensors", other.folder / "model" / "model.safetensors")
    last = there(one.folder)[-1]
    assert there(one.folder) == there(other.folder)
    name = "optimizer.safetensors"
    assert (checkpoint(one.folder, last) / name).read_bytes() == (checkpoint(other.folder, last) / name).read_bytes()
    name = "model.safetensors"  # the order of its two notes may differ, so the tensors are compared
    assert same_file(checkpoint(one.folder, last) / name, checkpoint(other.folder, last) / name)
    assert timeless(one.history) == timeless(other.history)
    assert (one.loss, one.valid_loss, one.best_step, one.stopped) == (
        other.loss,
        other.valid_loss,
        other.best_step,
        other.stopped,
    )
