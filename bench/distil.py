"""Recovery of a half-pruned model by text, or by distillation of logits, relations or maps; evaluated on other text.

python -m bench.distil --out F          SmolLM2, three seeds: 15 trainings of 50 steps in bfloat16, about an hour on one core
python -m bench.distil --out F --seed 1 this seed only; several seeds can run in parallel
python -m bench.distil --quick --out F  a few steps of one seed, to check that it runs

Heads are ranked (by gradient) and models are trained on $HEADWISE_DATA/wikitext-2. Models are evaluated on
$HEADWISE_DATA/tinyshakespeare. Recovery also adapts a model to its training text (teacher correction of Minitron,
https://arxiv.org/abs/2408.11796), so the full model trained on the same text is a control. Training uses bfloat16 autocast,
logits and evaluation float32. F contains half.json and one file per model with its loss on every text; both are reused.

Rule for the default loss of recovery, fixed before any evaluation: the difference of the loss on Shakespeare between each
method and text, paired by seed and text, with an interval over seeds and texts (Student's t for each, half-widths added in
quadrature) and 95% joint coverage of the three intervals (Bonferroni). A method is better than text if its mean is below
−0.01 nats per token and its interval is below 0. The best such method is the default; without one, text is.
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
DISTILL_TARGETS = ("logits", "qkv", "maps")  # distillation losses
METHODS = ("text", *DISTILL_TARGETS)
FULL_TRAINED = "whole, text"  # the full model with the same training
TOKENS, BATCH = 128, 4  # 512 tokens per step
MIN_GAIN, LEVEL = 0.01, 1 - 0.05 / len(DISTILL_TARGETS)
EVALUATION_CORPUS, CONTROL_CORPUS = "Shakespeare", "WikiText-2, held out"


def shakespeare_texts(count: int, model: hw.Transformer) -> list[str]:
    """Return evaluation texts of another domain."""
    paths = sorted(path for path in DATA.glob("*shakespeare*/*.txt")) or sorted(DATA.glob("*shakespeare*.txt"))
    text = paths[0].read_text(encoding="utf-8")
    size = len(text) // count
    tokenizer = model.tokenizer
    assert tokenizer is not None
    return [tokenizer.decode(tokenizer.encode(text[i * size : i * size + 6 * TOKENS])[:TOKENS]) for i in range(count)]


class DistillBenchmark:
    """Models, evaluation texts and stored losses."""

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
        """Return the path of the losses of a model."""
        return self.folder / f"{method}{'' if seed is None else f', seed {seed}'}.json"

    def run(self, method: str, seed: int | None, steps: int) -> None:
        """Train and evaluate one model, unless its losses are stored."""
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
        """Return the loss per token in nats."""
        return float(np.sum(losses) / self.trials[corpus].counts.sum())

    def load_losses(self, corpus: str, method: str, seeds: range) -> list[np.ndarray]:
        """Return the loss of every text, (texts,), for each stored seed."""
        paths = [self.result_path(method, seed) for seed in seeds]
        return [np.array(json.loads(path.read_text())[corpus]) for path in paths if path.is_file()]

    def table(self, seeds: range) -> list[tuple[str, ...]]:
        """Return one row per model: its loss, and the difference from the model trained on text."""
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
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument(
        "--evaluation-texts", type=int, default=32, help="texts of Shakespeare; half as many of WikiText"
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
        f"Loss, nats per token: mean over seeds, least and most; what it is above healing by text, {LEVEL:.1%} interval"
    )
    Console(width=160).print(make_table(title, ["model", *heads], bench.table(range(seeds))))


if __name__ == "__main__":
    main()
