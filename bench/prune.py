"""How many heads a real model can lose: the curve of loss against heads kept, and a half cut healed.

python -m bench.prune smollm2 --out F   decoder, next tokens of WikiText-2; the better part of an hour on one core
python -m bench.prune minilm --out F    encoder, 1 − cosine of what it says of a text
Both read $HEADWISE_DATA/wikitext-2. In F: rankings, curve.json, curve.svg; what is there already is not done again.
"""

import argparse
import json
import os
from functools import partial
from pathlib import Path

import headwise as hw
from bench.measure import machine
from headwise.analysis.ablation.head_outputs import mean_activations
from headwise.compression.curve import curve
from headwise.compression.recovery import heal
from headwise.compression.report import report
from headwise.io.atomic_write import whole_file
from headwise.model import AnyModel
from headwise.ui.figures.tradeoff import draw_pruning
from headwise.ui.progress import show_progress
from headwise.ui.prune_view import show_curve, show_report

DATA = Path(os.environ.get("HEADWISE_DATA", "../shared/data")) / "wikitext-2"
HALF = 0.5


def paragraphs(part: str, count: int, tokens: int, model: AnyModel) -> list[str]:
    """So many paragraphs, spread evenly over the articles, each cut to so many tokens."""
    long = [line.strip() for line in (DATA / part).read_text(encoding="utf-8").splitlines() if len(line) > 5 * tokens]
    tokenizer = model.tokenizer
    assert tokenizer is not None
    return [tokenizer.decode(tokenizer.encode(long[i * len(long) // count])[:tokens]) for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("smollm2", "minilm"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--choose", type=int, default=16, help="paragraphs that heads are ranked on")
    parser.add_argument("--judge", type=int, default=48, help="other paragraphs, that cuts are judged by")
    parser.add_argument("--tokens", type=int, default=128, help="of a paragraph")
    parser.add_argument("--seeds", type=int, default=3, help="random cuts at each share")
    parser.add_argument("--heal", type=int, default=100, help="steps; 0: none")
    options = parser.parse_args()
    model = hw.load(options.model)
    part = (("validation" if (DATA / "validation.txt").is_file() else "valid") + ".txt", "test.txt")
    choosing, judging = (
        hw.Reading.of(model, paragraphs(name, count, options.tokens, model))
        for name, count in zip(part, (options.choose, options.judge), strict=True)
    )
    print(
        f"{options.model}: ranked on {choosing.texts}, judged by {judging.texts} paragraphs of {options.tokens}; {machine()}"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    means = mean_activations(model, choosing)
    with show_progress() as progress:
        saved = options.out / "half.json"
        plan = hw.Plan.load(saved) if saved.is_file() else hw.Plan.make(
            model, keep=HALF, on=choosing, means=means, progress=progress
        )  # fmt: skip
        plan.save(saved)
        drawn = curve(
            model,
            choosing,
            judging,
            means=means,
            scores={"ablation": plan.worth},
            seeds=options.seeds,
            progress=progress,
        )
    whole_file(options.out / "curve.json", json.dumps(drawn.to_dict(), indent=1).encode())
    draw_pruning(drawn).save(options.out / "curve.svg")
    show_curve(drawn)
    how = None
    if options.heal and model.output is not None:
        text = (DATA / part[0]).read_text(encoding="utf-8")
        recipe = {"steps": options.heal, "batch": 4, "context": options.tokens, "holdout": 0.02, "progress": False}
        how = partial(heal, corpus=text, **recipe)
        print(f"Healed is trained {options.heal} steps of {4 * options.tokens} tokens of the validation text.")
    with show_progress() as progress:
        told = report(model, plan.apply(model), judging, means=means, seeds=options.seeds, heal=how, progress=progress)
    whole_file(options.out / "report.json", json.dumps(told.to_dict(), indent=1).encode())
    show_report(told)


if __name__ == "__main__":
    main()
