"""What few bits cost: uniform bits, the basis, and a mix at 3.5 mean bits beside ten random ones.

python -m bench.bits smollm2 --out F   decoder, next tokens of WikiText-2, weights of attention alone
python -m bench.bits minilm --out F    encoder, 1 − cosine of what it says of a text
python -m bench.bits little --out F    a little model of the little language, trained here, never quantised before
The rule, set before the first run: sensitivities at 3 bits, in the basis whose uniform 3 bits cost less on the paragraphs of
the choice (validation); choices 4 and 3 bits, 3.5 on average, by drift; random mixes are seeds 0 to 9; all judged on other
paragraphs (test). In F: sensitivity.jsonl, which is gone on with, and bits.json.
"""

import argparse
import json
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import headwise as hw
from bench.measure import machine
from bench.prune import DATA, paragraphs
from headwise.analysis.ablation.sensitivity import sensitivity
from headwise.compression.allocate_bits import allocate, report_allocation
from headwise.compression.evaluation import PairedEvaluation
from headwise.compression.quantize import quantise
from headwise.heads.balanced_basis import BASES
from headwise.io.atomic_write import whole_file
from headwise.training.default_recipe import LITTLE, little_texts
from headwise.ui.progress import show_progress

BITS, CHOICES, MEAN, SEEDS = 3, (4, 3), 3.5, 10


def little() -> Any:
    """A small model of the little language, as `headwise train` makes it, but shorter."""
    recipe = replace(LITTLE, steps=600)
    texts, _ = little_texts(recipe)
    return hw.train(hw.preset("little"), texts, recipe, progress=False).model


def little_documents(seed: int, count: int) -> list[str]:
    """Documents of held-out word pairs, each seed others."""
    documents = islice(hw.Corpus.little("held-out", documents=count, seed=seed).items(), count)
    return [one if isinstance(one, str) else one.text for one in documents]  # pyright: ignore[reportAttributeAccessIssue]


def weights(name: str, out: Path, choose: int, judge: int, tokens: int, seeds: int) -> None:
    model: Any = little() if name == "little" else hw.load(name)
    if name == "little":
        choosing, judging = little_documents(101, choose), little_documents(102, judge)
    else:
        part = ("validation" if (DATA / "validation.txt").is_file() else "valid") + ".txt"
        choosing, judging = paragraphs(part, choose, tokens, model), paragraphs("test.txt", judge, tokens, model)
    print(f"{name}: chosen on {choose}, judged by {judge} paragraphs of {tokens} tokens; {machine()}", flush=True)
    told: dict[str, Any] = {"choose": choose, "judge": judge, "tokens": tokens, "machine": machine()}
    trial = PairedEvaluation.of(model, choosing)
    told["basis"] = {}
    for basis in BASES:
        for bits in (4, 3):
            more = trial.difference(trial.losses(quantise(model, {"*": bits}, basis=basis)), trial.full)
            told["basis"][f"{basis}, {bits}"] = vars(more)
            print(f"basis {basis}, {bits} bits: {more.mean:+.4f} ({more.low:.4f} to {more.high:.4f})", flush=True)
    basis = min(("given", "balanced"), key=lambda one: told["basis"][f"{one}, {BITS}"]["mean"])
    print(f"so the basis is {basis}", flush=True)
    began = time.time()
    with show_progress() as progress:
        found = sensitivity(
            model, choosing, bits=(BITS,), basis=basis, out=out / "sensitivity.jsonl",
            progress=progress,
        )  # fmt: skip
    told["sensitivity"] = found.to_dict() | {"seconds": time.time() - began}
    made = allocate(model, found, mean_bits=MEAN, choices=CHOICES)
    with show_progress() as progress:
        report = report_allocation(model, made, judging, uniform=CHOICES, seeds=seeds, basis=basis, progress=progress)
    told["report"] = report.to_dict() | {"basis": basis}
    for row in report.rows():
        print(*row, flush=True)
    print("outside the range of random mixes:", report.outside, flush=True)
    whole_file(out / "bits.json", json.dumps(told, indent=1).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("smollm2", "minilm", "little"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--choose", type=int, default=4, help="paragraphs that bits are chosen on")
    parser.add_argument("--judge", type=int, default=12, help="other paragraphs, that the choice is judged by")
    parser.add_argument("--tokens", type=int, default=96, help="of a paragraph")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="random mixes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    weights(options.model, options.out, options.choose, options.judge, options.tokens, options.seeds)


if __name__ == "__main__":
    main()
