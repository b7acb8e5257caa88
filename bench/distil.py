"""Healing half a cut model: from text, or from the whole model by logits, relations or maps; judged on text of another kind.

python -m bench.distil --out F          SmolLM2, three seeds; about an hour on two idle cores
python -m bench.distil --quick --out F  a few steps of one seed, to see that it runs
Reads $HEADWISE_DATA/wikitext-2, which heads are ranked on and models are healed on, and $HEADWISE_DATA/tinyshakespeare,
which they are judged on: healing also teaches its text (Minitron's teacher correction, https://arxiv.org/abs/2408.11796),
so beside them stands the whole model, trained alike on the same text. In F: half.json, results.json; what is there is not
done again.
"""

import argparse
import copy
import json
import os
from pathlib import Path

import numpy as np

import headwise as hw
from bench.measure import machine
from bench.prune import paragraphs
from headwise.change.heal import heal
from headwise.change.trial import Trial
from headwise.files.whole import whole_file
from headwise.show.progress import show_progress
from headwise.show.tables import make_table

DATA = Path(os.environ.get("HEADWISE_DATA", "../shared/data"))
WAYS = {"text": None, "logits": "logits", "qkv": "qkv", "maps": "maps"}  # what a cut model is healed by
TOKENS, BATCH = 128, 4  # 512 tokens a step


def other_text(count: int, model: hw.Transformer) -> list[str]:
    """Pieces of text of another kind."""
    found = sorted(path for path in DATA.glob("*shakespeare*/*.txt")) or sorted(DATA.glob("*shakespeare*.txt"))
    text = found[0].read_text(encoding="utf-8")
    size = len(text) // count
    tokenizer = model.tokenizer
    assert tokenizer is not None
    return [tokenizer.decode(tokenizer.encode(text[i * size : i * size + 6 * TOKENS])[:TOKENS]) for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--judge", type=int, default=32, help="texts of each kind")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    steps, seeds, judge = (2, 1, 4) if options.quick else (options.steps, options.seeds, options.judge)
    model = hw.load("smollm2")
    assert isinstance(model, hw.Transformer)
    part = "validation.txt" if (DATA / "wikitext-2" / "validation.txt").is_file() else "valid.txt"
    choosing = paragraphs(part, 16, TOKENS, model)
    judging = {
        "WikiText-2, held out": paragraphs("test.txt", judge, TOKENS, model),
        "Shakespeare": other_text(judge, model),
    }
    trials = {name: Trial.of(model, texts) for name, texts in judging.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    saved, kept = options.out / "half.json", options.out / "results.json"
    with show_progress() as progress:
        plan = hw.Plan.load(saved) if saved.is_file() else hw.Plan.make(model, keep=0.5, on=choosing, progress=progress)
    plan.save(saved)
    small = plan.apply(model)
    text = (DATA / "wikitext-2" / part).read_text(encoding="utf-8")
    results = json.loads(kept.read_text()) if kept.is_file() else {}
    print(f"half of SmolLM2's heads, {steps} steps of {BATCH * TOKENS} tokens; {machine()}")

    def record(name: str, one: hw.Transformer) -> None:
        results[name] = {on: float(trial.losses(one).sum() / trial.counts.sum()) for on, trial in trials.items()}
        whole_file(kept, json.dumps(results, indent=1).encode())
        print(name, {on: round(loss, 4) for on, loss in results[name].items()}, flush=True)

    for name, one in (("whole", model), ("cut", small)):
        if name not in results:
            record(name, one)
    for seed in range(seeds):
        for way in ("whole, text", *WAYS):
            name = f"{way}, seed {seed}"
            if name in results:
                continue
            one = copy.deepcopy(model if way == "whole, text" else small)
            taught = {} if WAYS.get(way) is None else {"teacher": model, "learn": WAYS[way]}
            how = {"steps": steps, "batch": BATCH, "context": TOKENS, "holdout": 0.02, "seed": seed, "progress": False}
            heal(one, text, **how, **taught)
            record(name, one)
    rows = []
    for way in ("whole", "cut", "whole, text", *WAYS):
        found = [value for name, value in results.items() if name == way or name.startswith(f"{way}, seed")]
        cells = []
        for on in trials:
            losses = np.array([one[on] for one in found])
            cells.append(
                f"{losses.mean():.3f}" + (f" ({losses.min():.3f} to {losses.max():.3f})" if len(losses) > 1 else "")
            )
        rows.append((way if way in ("whole", "cut", "whole, text") else f"cut, healed by {way}", *cells))
    from rich.console import Console

    Console().print(make_table("Loss, nats a token: mean over seeds, least and most", ["model", *trials], rows))


if __name__ == "__main__":
    main()
