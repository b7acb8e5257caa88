"""Effect of head dropout on the dependence on single heads, on characters of Shakespeare, on a CPU.

python -m bench.head_dropout             three rates, three seeds, minutes; reads $HEADWISE_DATA/tinyshakespeare/input.txt
python -m bench.head_dropout --seeds 1   faster

Each head of each model is ablated on validation text, by zero and by its mean. The results are the largest and the mean
increase of the loss over all heads.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

from rich.console import Console

import headwise as hw
from bench.measure import machine
from headwise.ui.terminal_table import make_table

RATES = (0.0, 0.2, 0.4)
SPEC = hw.ModelSpec(
    vocab=65, context=64, layers=4, attention=hw.AttentionSpec(width=128, heads=8, rotary=hw.Rotary()), positions="none"
)
RECIPE = hw.Recipe(batch_size=16, learning_rate=2e-3, warmup=50, evaluate_every=1000)
TEXTS = 128  # as long as a training sequence, evenly spaced over the validation split


def run(rate: float, seed: int, steps: int, text: Path) -> list[float]:
    """Train a model. Return its validation loss, and the largest and mean loss increase by zero and by mean ablation."""
    spec = replace(SPEC, attention=replace(SPEC.attention, head_dropout=rate))
    result = hw.train(spec, text, replace(RECIPE, seed=seed, steps=steps), tokenizer="character", progress=False)
    held_out = text.read_text(encoding="utf-8")[-int(RECIPE.holdout * text.stat().st_size) :]
    stride = len(held_out) // TEXTS
    texts = [held_out[start : start + SPEC.context] for start in range(0, stride * TEXTS, stride)]
    values = [result.valid_loss or float("nan")]
    for replacement in ("zero", "mean"):
        damage = hw.importance(result.model, texts, ablation=replacement).mean  # (heads,)
        values += [float(damage.max()), float(damage.mean())]
    return values


def mean_and_range(values: list[float]) -> str:
    """Return the mean and the range over seeds."""
    return f"{sum(values) / len(values):.3f} ({min(values):.3f} – {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    text = Path(os.environ.get("HEADWISE_DATA", "../shared/data")) / "tinyshakespeare" / "input.txt"
    if not text.is_file():
        raise SystemExit(f"{text}: file not found. Set HEADWISE_DATA to a folder with tinyshakespeare/input.txt.")
    rows = []
    for rate in RATES:
        runs = [run(rate, seed, arguments.steps, text) for seed in range(arguments.seeds)]
        rows.append([rate, *(mean_and_range(list(values)) for values in zip(*runs, strict=True))])
    columns = ["head dropout", "validation loss", "zero: worst head", "mean head", "mean: worst head", "mean head"]
    heads = len(SPEC.head_addresses)
    title = f"Loss increase in nats without one of {heads} heads: mean and range of {arguments.seeds} seeds, "
    title += f"{arguments.steps} steps"
    Console(width=140).print(make_table(f"{title}; {machine()}", columns, rows))


if __name__ == "__main__":
    main()
