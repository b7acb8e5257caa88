"""What each process of a team runs: python -m tests.distillation.team_script FOLDER [STOP_AT]."""

import json
import sys
from pathlib import Path

import headwise as hw
from headwise.model import Transformer
from headwise.training import Recipe
from headwise.training.loop import Trained
from tests.distillation.tiny import make
from tests.training.tiny import Stop

TEXT = "to be or not to be that is the question " * 40
RECIPE = Recipe(
    steps=6,
    batch=4,
    accumulate=2,
    context=16,
    warmup=1,
    rate=3e-3,
    evaluate_every=6,
    save_every=3,
    log_every=1,
    holdout=0.1,
)


def run(out: Path | None, stop: int = -1) -> Trained:
    """A narrower student, by everything a teacher has."""

    def look(model: Transformer, step: int) -> None:
        if step == stop:
            raise Stop

    spec = make().spec.resized(layers=1, width=8, heads=2)
    by = ("logits", "hidden", "maps", "qkv")
    return hw.distil(spec, make(), TEXT, RECIPE, by=by, out=out, call=look, every=1, progress=False)


def tell(out: str, stop: int = -1) -> dict[str, float | None]:
    made = run(Path(out), stop)
    weight = float(sum(value.detach().double().abs().sum() for value in made.model.parameters()))
    return {"loss": made.loss, "valid": made.valid_loss, "weight": weight}


def main() -> None:
    sys.stdout.write(json.dumps(tell(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else -1)) + "\n")


if __name__ == "__main__":
    main()
