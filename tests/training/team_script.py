"""Script of each process of a process group: python -m tests.training.team_script FOLDER|- KIND [STOP_AT]."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from headwise.model import Transformer
from headwise.spec import ModelSpec
from headwise.training import Recipe
from tests.training.tiny import NOISY, RunInterrupted, run

NO_DROPOUT = replace(NOISY, dropout=0.0, attention=replace(NOISY.attention, dropout=0.0, head_dropout=0.0))
SPECS: dict[str, ModelSpec] = {
    "causal": NO_DROPOUT,
    "masked": replace(NO_DROPOUT, kind="encoder", output="mlm"),
    "pooler": replace(NO_DROPOUT, kind="encoder", output="mlm", pooler=True),
    "noisy": NOISY,
}
RECIPE = Recipe(
    steps=10, batch_size=8, learning_rate=1e-3, warmup=2, save_every=4, log_every=3, evaluate_every=5, seed=4
)


def main() -> None:
    folder, kind = sys.argv[1:3]
    stop_step = int(sys.argv[3]) if len(sys.argv) > 3 else -1

    def stop_at_step(model: Transformer, step: int) -> None:
        if step == stop_step:
            raise RunInterrupted

    recipe = replace(RECIPE, accumulation_steps=2) if kind == "causal" else RECIPE
    result = run(SPECS[kind], recipe, None if folder == "-" else Path(folder), callback=stop_at_step, callback_every=1)
    summary = {
        "rank": int(os.environ.get("RANK", "0")),
        "loss": result.loss,
        "valid": result.valid_loss,
        "step": result.step,
    }
    summary["weight"] = float(sum(value.detach().double().abs().sum() for value in result.model.parameters()))
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
