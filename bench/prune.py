"""Pruning curve of a pretrained model, and recovery after pruning half of its heads.

python -m bench.prune smollm2 --out F   decoder, next-token loss on WikiText-2; almost an hour on one core
python -m bench.prune minilm --out F    encoder, 1 − cosine of its text embeddings
Both read $HEADWISE_DATA/wikitext-2. F contains the rankings, curve.json and curve.svg, which are reused.
"""

import argparse
import json
import os
from functools import partial
from pathlib import Path

import headwise as hw
from bench.measure import machine
from headwise.analysis.ablation.recorded_head_outputs import mean_activations
from headwise.compression import PruneRequest
from headwise.compression.plan_report import report
from headwise.compression.pruning_curve import pruning_curve
from headwise.compression.recovery_finetune import recover
from headwise.io.atomic_write import write_atomic
from headwise.model import ModelProtocol
from headwise.ui.figures.tradeoff_curves import draw_pruning
from headwise.ui.print_pruning import show_prune_report, show_pruning_curve
from headwise.ui.progress import show_progress

DATA = Path(os.environ.get("HEADWISE_DATA", "../shared/data")) / "wikitext-2"
HALF = 0.5


def paragraphs(part: str, count: int, tokens: int, model: ModelProtocol) -> list[str]:
    """Return evenly spaced paragraphs, truncated to a number of tokens."""
    lines = [line.strip() for line in (DATA / part).read_text(encoding="utf-8").splitlines() if len(line) > 5 * tokens]
    tokenizer = model.tokenizer
    assert tokenizer is not None
    return [tokenizer.decode(tokenizer.encode(lines[i * len(lines) // count])[:tokens]) for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("smollm2", "minilm"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--selection-texts", type=int, default=16, help="paragraphs on which heads are ranked")
    parser.add_argument("--evaluation-texts", type=int, default=48, help="other paragraphs for the evaluation")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per paragraph")
    parser.add_argument("--seeds", type=int, default=3, help="random prunings per fraction")
    parser.add_argument("--recover-steps", type=int, default=100, help="steps of recovery fine-tuning; 0: none")
    options = parser.parse_args()
    model = hw.load(options.model)
    part = (("validation" if (DATA / "validation.txt").is_file() else "valid") + ".txt", "test.txt")
    selection, evaluation = (
        hw.TokenizedCorpus.of(model, paragraphs(name, count, options.tokens, model))
        for name, count in zip(part, (options.selection_texts, options.evaluation_texts), strict=True)
    )
    print(
        f"{options.model}: ranked on {selection.num_samples}, judged by {evaluation.num_samples} paragraphs of "
        f"{options.tokens}; {machine()}"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    means = mean_activations(model, selection)
    with show_progress() as progress:
        saved = options.out / "half.json"
        request = PruneRequest(keep=HALF, corpus=selection)
        plan = (
            hw.Plan.load(saved) if saved.is_file() else hw.plan_pruning(model, request, means=means, progress=progress)
        )
        plan.save(saved)
        curve = pruning_curve(
            model,
            selection,
            evaluation,
            means=means,
            scores={"ablation": plan.head_scores},
            seeds=options.seeds,
            progress=progress,
        )
    write_atomic(options.out / "curve.json", json.dumps(curve.to_dict(), indent=1).encode())
    draw_pruning(curve).save(options.out / "curve.svg")
    show_pruning_curve(curve)
    recovery = None
    if options.recover_steps and model.output is not None:
        text = (DATA / part[0]).read_text(encoding="utf-8")
        recipe = {
            "steps": options.recover_steps,
            "batch_size": 4,
            "context": options.tokens,
            "holdout": 0.02,
            "progress": False,
        }
        recovery = partial(recover, corpus=text, **recipe)
        print(f"Recovery: {options.recover_steps} steps of {4 * options.tokens} tokens of the validation text.")
    with show_progress() as progress:
        pruning_report = report(
            model,
            hw.apply(plan, model),
            evaluation,
            means=means,
            seeds=options.seeds,
            recover=recovery,
            progress=progress,
        )
    write_atomic(options.out / "report.json", json.dumps(pruning_report.to_dict(), indent=1).encode())
    show_prune_report(pruning_report)


if __name__ == "__main__":
    main()
