"""What each process of a team runs: python -m tests.training.team_script FOLDER|- KIND [STOP_AT]."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from headwise.model import Transformer
from headwise.spec import ModelSpec
from headwise.training import Recipe
from tests.training.tiny import NOISY, Stop, run

STILL = replace(NOISY, dropout=0.0, attention=replace(NOISY.attention, dropout=0.0, head_dropout=0.0))
SPECS: dict[str, ModelSpec] = {
    "causal": STILL,
    "masked": replace(STILL, kind="encoder", output="mlm"),
    "pooler": replace(STILL, kind="encoder", output="mlm", pooler=True),
    "noisy": NOISY,
}
RECIPE = Recipe(steps=10, batch=8, rate=1e-3, warmup=2, save_every=4, log_every=3, evaluate_every=5, seed=4)


def main() -> None:
    folder, kind = sys.argv[1:3]
    at = int(sys.argv[3]) if len(sys.argv) > 3 else -1

    def look(model: Transformer, step: int) -> None:
        if step == at:
            raise Stop

    recipe = replace(RECIPE, accumulate=2) if kind == "causal" else RECIPE
    made = run(SPECS[kind], recipe, None if folder == "-" else Path(folder), call=look, every=1)
    told = {"rank": int(os.environ.get("RANK", "0")), "loss": made.loss, "valid": made.valid_loss, "step": made.step}
    told["weight"] = float(sum(value.detach().double().abs().sum() for value in made.model.parameters()))
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
