"""Script of each process of a process group: python -m tests.distillation.team_script FOLDER [STOP_AT]."""

import json
import sys
from pathlib import Path

import headwise as hw
from headwise.model import Transformer
from headwise.training import Recipe
from headwise.training.loop import TrainResult
from tests.distillation.tiny import make_model
from tests.training.tiny import RunInterrupted

TEXT = "to be or not to be that is the question " * 40
RECIPE = Recipe(
    steps=6,
    batch_size=4,
    accumulation_steps=2,
    context=16,
    warmup=1,
    learning_rate=3e-3,
    evaluate_every=6,
    save_every=3,
    log_every=1,
    holdout=0.1,
)


def distill_small_student(out: Path | None, stop: int = -1) -> TrainResult:
    """Distill into a narrower student with all losses."""

    def stop_at_step(model: Transformer, step: int) -> None:
        if step == stop:
            raise RunInterrupted

    spec = make_model().spec.resized(layers=1, width=8, heads=2)
    losses = ("logits", "hidden", "maps", "qkv")
    return hw.distill(
        spec,
        make_model(),
        TEXT,
        RECIPE,
        losses=losses,
        out=out,
        callback=stop_at_step,
        callback_every=1,
        progress=False,
    )


def run_and_summarize(out: str, stop: int = -1) -> dict[str, float | None]:
    result = distill_small_student(Path(out), stop)
    weight = float(sum(value.detach().double().abs().sum() for value in result.model.parameters()))
    return {"loss": result.loss, "valid": result.valid_loss, "weight": weight}


def main() -> None:
    sys.stdout.write(json.dumps(run_and_summarize(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else -1)) + "\n")


if __name__ == "__main__":
    main()
