"""Healing half a cut model: from text, or from the whole model by logits, relations or maps; judged on text of another kind.

python -m bench.distil --out F          SmolLM2, three seeds: 15 trainings of 50 steps in bfloat16, about an hour of one core
python -m bench.distil --out F --seed 1 this seed alone: several can run side by side
python -m bench.distil --quick --out F  a few steps of one seed, to see that it runs
Reads $HEADWISE_DATA/wikitext-2, which heads are ranked on (by the gradient) and models are healed on, and
$HEADWISE_DATA/tinyshakespeare, which they are judged on: healing also teaches its text (Minitron's teacher correction,
https://arxiv.org/abs/2408.11796), so beside them stands the whole model, trained alike on the same text.
Products are made in bfloat16 (autocast), logits and all that is judged in float32. In F: half.json, and a file for each model
with its loss on every text; what is there is not done again.

Which way is the default of healing is decided so (written before a healed model was judged): the loss on Shakespeare by each
way minus that by text, paired by seed and text; its interval is over seeds and over texts (Student's for each, squares of
half-widths added), and the three intervals hold together with 95 % (Bonferroni). A way beats text if its mean lies below −.01
nats a token and its interval below 0. Of those that beat text the one with the least mean wins; if none does, it is text.
"""

import argparse
import copy
import json
import os
from pathlib import Path

import numpy as np
from rich.console import Console

import headwise as hw
from bench.measure import machine
from bench.prune import paragraphs
from headwise.compression.evaluation import PairedEvaluation
from headwise.compression.recovery import heal
from headwise.io.atomic_write import whole_file
from headwise.ui.progress import show_progress
from headwise.ui.tables import make_table

DATA = Path(os.environ.get("HEADWISE_DATA", "../shared/data"))
TAUGHT = ("logits", "qkv", "maps")  # what a cut model learns from the whole one
WAYS = ("text", *TAUGHT)
ALIKE = "whole, text"  # the whole model, trained alike
TOKENS, BATCH = 128, 4  # 512 tokens a step
MATTERS, LEVEL = 0.01, 1 - 0.05 / len(TAUGHT)
JUDGE, BESIDE = "Shakespeare", "WikiText-2, held out"


def other_text(count: int, model: hw.Transformer) -> list[str]:
    """Pieces of text of another kind."""
    found = sorted(path for path in DATA.glob("*shakespeare*/*.txt")) or sorted(DATA.glob("*shakespeare*.txt"))
    text = found[0].read_text(encoding="utf-8")
    size = len(text) // count
    tokenizer = model.tokenizer
    assert tokenizer is not None
    return [tokenizer.decode(tokenizer.encode(text[i * size : i * size + 6 * TOKENS])[:TOKENS]) for i in range(count)]


class Bench:
    """The models, the texts they are judged on, and what was found."""

    def __init__(self, folder: Path, judge: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        model = hw.load("smollm2")
        assert isinstance(model, hw.Transformer)
        self.whole = model
        part = "validation.txt" if (DATA / "wikitext-2" / "validation.txt").is_file() else "valid.txt"
        saved = folder / "half.json"
        if not saved.is_file():
            with show_progress() as progress:
                choosing = paragraphs(part, 16, TOKENS, model)
                hw.Plan.make(model, keep=0.5, by="gradient", on=choosing, progress=progress).save(saved)
        self.plan = hw.Plan.load(saved)
        self.text = (DATA / "wikitext-2" / part).read_text(encoding="utf-8")
        texts = {BESIDE: paragraphs("test.txt", judge // 2, TOKENS, model), JUDGE: other_text(judge, model)}
        self.trials = {name: PairedEvaluation.of(model, some) for name, some in texts.items()}

    def place(self, way: str, seed: int | None) -> Path:
        """Where the losses of a model are kept."""
        return self.folder / f"{way}{'' if seed is None else f', seed {seed}'}.json"

    def run(self, way: str, seed: int | None, steps: int) -> None:
        """Heal one model and judge it, unless that was done."""
        if self.place(way, seed).is_file():
            return
        model = copy.deepcopy(self.whole) if way in ("whole", ALIKE) else self.plan.apply(self.whole)
        if seed is not None:
            taught = {"teacher": self.whole, "learn": way} if way in TAUGHT else {}
            made = heal(
                model, self.text, steps=steps, batch=BATCH, context=TOKENS, holdout=0.0, seed=seed, precision="bfloat16",
                progress=False, **taught,
            )  # fmt: skip
            if made.stopped == "interrupted":
                raise KeyboardInterrupt
        losses = {on: trial.losses(model).tolist() for on, trial in self.trials.items()}
        whole_file(self.place(way, seed), json.dumps(losses).encode())
        print(self.place(way, seed).stem, {on: round(self.mean(on, one), 4) for on, one in losses.items()}, flush=True)

    def mean(self, on: str, losses: list[float]) -> float:
        """Nats a token."""
        return float(np.sum(losses) / self.trials[on].counts.sum())

    def found(self, on: str, way: str, seeds: range) -> list[np.ndarray]:
        """The loss of every text, (texts,), for each seed that is there."""
        places = [self.place(way, seed) for seed in seeds]
        return [np.array(json.loads(place.read_text())[on]) for place in places if place.is_file()]

    def table(self, seeds: range) -> list[tuple[str, ...]]:
        """A row for each model: its loss, and what it loses beside the one that was healed by text."""
        rows = []
        for way in ("whole", ALIKE, "cut", *WAYS):
            cells = []
            for on, trial in self.trials.items():
                if way in ("whole", "cut"):
                    cells += [f"{self.mean(on, json.loads(self.place(way, None).read_text())[on]):.3f}", ""]
                    continue
                found = self.found(on, way, seeds)
                means = [self.mean(on, list(one)) for one in found]
                spread = f"{np.mean(means):.3f} ({min(means):.3f} to {max(means):.3f})" if found else ""
                text = self.found(on, "text", seeds)
                beside = ""
                if way in TAUGHT and len(found) == len(text) > 0:
                    gaps = [one - other for one, other in zip(text, found, strict=True)]
                    gap = trial.difference_from_draws(np.zeros_like(trial.counts, dtype=float), gaps, LEVEL)
                    beside = f"{gap.mean:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})"
                    if on == JUDGE and gap.mean < -MATTERS and gap.high < 0:
                        beside += ", beats text"
                cells += [spread, beside]
            rows.append((f"cut, healed by {way}" if way in WAYS else way, *cells))
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--judge", type=int, default=32, help="texts of another kind; half as many of WikiText")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    steps, seeds, judge = (2, 1, 4) if options.quick else (options.steps, options.seeds, options.judge)
    bench = Bench(options.out, judge)
    print(f"half of SmolLM2's heads, {steps} steps of {BATCH * TOKENS} tokens; {machine()}", flush=True)
    bench.run("whole", None, steps)
    bench.run("cut", None, steps)
    for seed in range(seeds) if options.seed is None else [options.seed]:
        for way in (*WAYS, ALIKE):
            bench.run(way, seed, steps)
    heads = [cell for on in bench.trials for cell in (on, "minus text")]
    title = (
        f"Loss, nats a token: mean over seeds, least and most; what it is above healing by text, {LEVEL:.1%} interval"
    )
    Console(width=160).print(make_table(title, ["model", *heads], bench.table(range(seeds))))


if __name__ == "__main__":
    main()
