"""Training on characters of Shakespeare, 2000 steps on a CPU: the setting of nanoGPT and a recipe with as many tokens.

python -m bench.shakespeare             three seeds each, minutes; reads $HEADWISE_DATA/tinyshakespeare/input.txt
python -m bench.shakespeare --seeds 1   faster
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console

import headwise as hw
from bench.measure import machine
from headwise.ui.terminal_table import make_table

# https://github.com/karpathy/nanoGPT, config/train_shakespeare_char.py with the README's overrides for a CPU
NANOGPT_SPEC = hw.ModelSpec(
    vocab=65, context=64, layers=4, attention=hw.AttentionSpec(width=128, heads=4), mlp_bias=False
)
NANOGPT_RECIPE = hw.Recipe(
    steps=2000, batch_size=12, learning_rate=1e-3, final_lr_fraction=0.1, warmup=100, weight_decay=0.1, beta1=0.9,
    beta2=0.99, max_grad_norm=1.0,
    evaluate_every=2000, rows="random",
)  # fmt: skip
ROTARY_SPEC = replace(
    NANOGPT_SPEC,
    attention=replace(NANOGPT_SPEC.attention, rotary=hw.Rotary()),
    positions="none",
    norm="rms",
    activation="swiglu",
    mlp_width=344,
)
TUNED_RECIPE = replace(NANOGPT_RECIPE, learning_rate=4e-3, final_lr_fraction=0.0, warmup=50, rows="windows")


def run(spec: hw.ModelSpec, recipe: hw.Recipe, text: Path, seeds: int) -> list[object]:
    results = [hw.train(spec, text, replace(recipe, seed=seed), tokenizer="character") for seed in range(seeds)]
    losses = [result.valid_loss or float("nan") for result in results]
    spread = stdev(losses) if seeds > 1 else float("nan")
    return [results[0].model.spec.num_parameters, mean(losses), spread, min(result.seconds for result in results)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    text = Path(os.environ.get("HEADWISE_DATA", "../shared/data")) / "tinyshakespeare" / "input.txt"
    if not text.is_file():
        raise SystemExit(f"{text} is not there; set HEADWISE_DATA to a folder that has tinyshakespeare/input.txt.")
    tokens = NANOGPT_RECIPE.steps * NANOGPT_RECIPE.batch_size * NANOGPT_SPEC.context
    rows = [
        ["nanoGPT's setting", *run(NANOGPT_SPEC, NANOGPT_RECIPE, text, seeds)],
        ["rotary, RMS, SwiGLU, a higher rate", *run(ROTARY_SPEC, TUNED_RECIPE, text, seeds)],
    ]
    columns = ["", "parameters", "loss", "sd", "seconds"]
    title = f"Loss on the whole validation split, {seeds} seeds, {tokens:,} training tokens; {machine()}"
    Console().print(make_table(title, columns, rows))


if __name__ == "__main__":
    main()
