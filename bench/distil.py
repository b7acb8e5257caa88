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
from headwise.compression import PruneRequest
from headwise.compression.paired_evaluation import PairedEvaluator
from headwise.compression.recovery_finetune import recover
from headwise.io.atomic_write import write_atomic
from headwise.ui.progress import show_progress
from headwise.ui.terminal_table import make_table

DATA = Path(os.environ.get("HEADWISE_DATA", "../shared/data"))
DISTILL_TARGETS = ("logits", "qkv", "maps")  # what a cut model learns from the whole one
METHODS = ("text", *DISTILL_TARGETS)
FULL_TRAINED = "whole, text"  # the whole model, trained alike
TOKENS, BATCH = 128, 4  # 512 tokens a step
MIN_GAIN, LEVEL = 0.01, 1 - 0.05 / len(DISTILL_TARGETS)
EVALUATION_CORPUS, CONTROL_CORPUS = "Shakespeare", "WikiText-2, held out"


def shakespeare_texts(count: int, model: hw.Transformer) -> list[str]:
    """Pieces of text of another kind."""
    paths = sorted(path for path in DATA.glob("*shakespeare*/*.txt")) or sorted(DATA.glob("*shakespeare*.txt"))
    text = paths[0].read_text(encoding="utf-8")
    size = len(text) // count
    tokenizer = model.tokenizer
    assert tokenizer is not None
    return [tokenizer.decode(tokenizer.encode(text[i * size : i * size + 6 * TOKENS])[:TOKENS]) for i in range(count)]


class DistillBenchmark:
    """The models, the texts they are judged on, and what was found."""

    def __init__(self, folder: Path, num_texts: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        model = hw.load("smollm2")
        assert isinstance(model, hw.Transformer)
        self.full_model = model
        part = "validation.txt" if (DATA / "wikitext-2" / "validation.txt").is_file() else "valid.txt"
        saved = folder / "half.json"
        if not saved.is_file():
            with show_progress() as progress:
                selection = paragraphs(part, 16, TOKENS, model)
                hw.plan_pruning(
                    model, PruneRequest(keep=0.5, ranking="gradient", corpus=selection), progress=progress
                ).save(saved)
        self.plan = hw.Plan.load(saved)
        self.text = (DATA / "wikitext-2" / part).read_text(encoding="utf-8")
        texts = {
            CONTROL_CORPUS: paragraphs("test.txt", num_texts // 2, TOKENS, model),
            EVALUATION_CORPUS: shakespeare_texts(num_texts, model),
        }
        self.trials = {name: PairedEvaluator.of(model, corpus) for name, corpus in texts.items()}

    def result_path(self, method: str, seed: int | None) -> Path:
        """Where the losses of a model are kept."""
        return self.folder / f"{method}{'' if seed is None else f', seed {seed}'}.json"

    def run(self, method: str, seed: int | None, steps: int) -> None:
        """Heal one model and judge it, unless that was done."""
        if self.result_path(method, seed).is_file():
            return
        model = (
            copy.deepcopy(self.full_model)
            if method in ("whole", FULL_TRAINED)
            else hw.apply(self.plan, self.full_model)
        )
        if seed is not None:
            teacher_options = {"teacher": self.full_model, "learn": method} if method in DISTILL_TARGETS else {}
            result = recover(
                model, self.text, steps=steps, batch=BATCH, context=TOKENS, holdout=0.0, seed=seed, precision="bfloat16",
                progress=False, **teacher_options,
            )  # fmt: skip
            if result.stop_reason == "interrupted":
                raise KeyboardInterrupt
        losses = {corpus: trial.losses_per_text(model).tolist() for corpus, trial in self.trials.items()}
        write_atomic(self.result_path(method, seed), json.dumps(losses).encode())
        print(
            self.result_path(method, seed).stem,
            {corpus: round(self.mean(corpus, values), 4) for corpus, values in losses.items()},
            flush=True,
        )

    def mean(self, corpus: str, losses: list[float]) -> float:
        """Nats a token."""
        return float(np.sum(losses) / self.trials[corpus].counts.sum())

    def load_losses(self, corpus: str, method: str, seeds: range) -> list[np.ndarray]:
        """The loss of every text, (texts,), for each seed that is there."""
        paths = [self.result_path(method, seed) for seed in seeds]
        return [np.array(json.loads(path.read_text())[corpus]) for path in paths if path.is_file()]

    def table(self, seeds: range) -> list[tuple[str, ...]]:
        """A row for each model: its loss, and what it loses beside the one that was healed by text."""
        rows = []
        for method in ("whole", FULL_TRAINED, "cut", *METHODS):
            cells = []
            for corpus, trial in self.trials.items():
                if method in ("whole", "cut"):
                    cells += [
                        f"{self.mean(corpus, json.loads(self.result_path(method, None).read_text())[corpus]):.3f}",
                        "",
                    ]
                    continue
                losses = self.load_losses(corpus, method, seeds)
                means = [self.mean(corpus, list(values)) for values in losses]
                spread = f"{np.mean(means):.3f} ({min(means):.3f} to {max(means):.3f})" if losses else ""
                text_losses = self.load_losses(corpus, "text", seeds)
                gap_text = ""
                if method in DISTILL_TARGETS and len(losses) == len(text_losses) > 0:
                    gaps = [values - other for values, other in zip(text_losses, losses, strict=True)]
                    gap = trial.difference_from_random(np.zeros_like(trial.counts, dtype=float), gaps, LEVEL)
                    gap_text = f"{gap.mean:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})"
                    if corpus == EVALUATION_CORPUS and gap.mean < -MIN_GAIN and gap.high < 0:
                        gap_text += ", beats text"
                cells += [spread, gap_text]
            rows.append((f"cut, healed by {method}" if method in METHODS else method, *cells))
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument(
        "--evaluation-texts", type=int, default=32, help="texts of another kind; half as many of WikiText"
    )
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    steps, seeds, judge = (2, 1, 4) if options.quick else (options.steps, options.seeds, options.evaluation_texts)
    bench = DistillBenchmark(options.out, judge)
    print(f"half of SmolLM2's heads, {steps} steps of {BATCH * TOKENS} tokens; {machine()}", flush=True)
    bench.run("whole", None, steps)
    bench.run("cut", None, steps)
    for seed in range(seeds) if options.seed is None else [options.seed]:
        for method in (*METHODS, FULL_TRAINED):
            bench.run(method, seed, steps)
    heads = [cell for corpus in bench.trials for cell in (corpus, "minus text")]
    title = (
        f"Loss, nats a token: mean over seeds, least and most; what it is above healing by text, {LEVEL:.1%} interval"
    )
    Console(width=160).print(make_table(title, ["model", *heads], bench.table(range(seeds))))


if __name__ == "__main__":
    main()
