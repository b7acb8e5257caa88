"""Characters of Shakespeare, 2000 steps on a CPU: nanoGPT's own setting, and a recipe of ours at the same number of tokens.

python -m bench.shakespeare             three seeds each, minutes; reads $HEADWISE_DATA/tinyshakespeare/input.txt
python -m bench.shakespeare --seeds 1   quicker
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console

import headwise as hw
from bench.measure import machine
from headwise.ui.tables import make_table

# https://github.com/karpathy/nanoGPT, config/train_shakespeare_char.py with the README's overrides for a CPU
THEIRS = hw.ModelSpec(vocab=65, context=64, layers=4, attention=hw.AttentionSpec(width=128, heads=4), mlp_bias=False)
NANOGPT = hw.Recipe(
    steps=2000, batch=12, rate=1e-3, floor=0.1, warmup=100, weight_decay=0.1, beta1=0.9, beta2=0.99, clip=1.0,
    evaluate_every=2000, rows="random",
)  # fmt: skip
OURS = replace(
    THEIRS,
    attention=replace(THEIRS.attention, rotary=hw.Rotary()),
    positions="none",
    norm="rms",
    activation="swiglu",
    hidden=344,
)
BETTER = replace(NANOGPT, rate=4e-3, floor=0.0, warmup=50, rows="windows")


def run(spec: hw.ModelSpec, recipe: hw.Recipe, text: Path, seeds: int) -> list[object]:
    made = [hw.train(spec, text, replace(recipe, seed=seed), tokenizer="character") for seed in range(seeds)]
    losses = [one.valid_loss or float("nan") for one in made]
    spread = stdev(losses) if seeds > 1 else float("nan")
    return [made[0].model.spec.parameters, mean(losses), spread, min(one.seconds for one in made)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    text = Path(os.environ.get("HEADWISE_DATA", "../shared/data")) / "tinyshakespeare" / "input.txt"
    if not text.is_file():
        raise SystemExit(f"{text} is not there; set HEADWISE_DATA to a folder that has tinyshakespeare/input.txt.")
    tokens = NANOGPT.steps * NANOGPT.batch * THEIRS.context
    rows = [
        ["nanoGPT's setting", *run(THEIRS, NANOGPT, text, seeds)],
        ["rotary, RMS, SwiGLU, a higher rate", *run(OURS, BETTER, text, seeds)],
    ]
    columns = ["", "parameters", "loss", "sd", "seconds"]
    title = f"Loss on the whole validation split, {seeds} seeds, {tokens:,} training tokens; {machine()}"
    Console().print(make_table(title, columns, rows))


if __name__ == "__main__":
    main()
