"""Cost of quantization: uniform bits, both bases, and an allocation of 3.5 mean bits compared with ten random ones.

python -m bench.bits smollm2 --out F   decoder, next-token loss on WikiText-2, attention weights only
python -m bench.bits minilm --out F    encoder, 1 − cosine of its text embeddings
python -m bench.bits little --out F    a small model of the synthetic language, trained here

Protocol, fixed before the first run: sensitivities at 3 bits, in the basis with the lower cost of uniform 3 bits on the
selection paragraphs (validation); 4 or 3 bits per part with a mean of 3.5, by KL divergence; random allocations with seeds 0
to 9; evaluation on other paragraphs (test). F contains sensitivity.jsonl, which is resumed, and bits.json.
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
from headwise.analysis.ablation.quantization_sensitivity import sensitivity
from headwise.compression.allocate_bits import allocate_bits, report_allocation
from headwise.compression.paired_evaluation import PairedEvaluator
from headwise.compression.quantize import quantize
from headwise.io.atomic_write import write_atomic
from headwise.spec.weight_bits import BASES
from headwise.training.default_synthetic_run import DEFAULT_RECIPE, default_corpora
from headwise.ui.progress import show_progress

BITS, CHOICES, MEAN_BITS, SEEDS = 3, (4, 3), 3.5, 10


def train_synthetic_model() -> Any:
    """Train a small model of the synthetic language with fewer steps than `headwise train`."""
    recipe = replace(DEFAULT_RECIPE, steps=600)
    texts, _ = default_corpora(recipe)
    return hw.train(hw.preset("synthetic"), texts, recipe, progress=False).model


def synthetic_documents(seed: int, count: int) -> list[str]:
    """Return documents with held-out word pairs for a seed."""
    documents = islice(hw.Corpus.synthetic("held-out", documents=count, seed=seed).items(), count)
    return [document if isinstance(document, str) else document.text for document in documents]  # pyright: ignore[reportAttributeAccessIssue]


def measure_weight_bits(name: str, out: Path, num_selection: int, num_evaluation: int, tokens: int, seeds: int) -> None:
    model: Any = train_synthetic_model() if name == "little" else hw.load(name)
    if name == "little":
        selection, evaluation = synthetic_documents(101, num_selection), synthetic_documents(102, num_evaluation)
    else:
        part = ("validation" if (DATA / "validation.txt").is_file() else "valid") + ".txt"
        selection, evaluation = (
            paragraphs(part, num_selection, tokens, model),
            paragraphs("test.txt", num_evaluation, tokens, model),
        )
    print(
        f"{name}: chosen on {num_selection}, judged by {num_evaluation} paragraphs of {tokens} tokens; {machine()}",
        flush=True,
    )
    results: dict[str, Any] = {"choose": num_selection, "judge": num_evaluation, "tokens": tokens, "machine": machine()}
    paired = PairedEvaluator.of(model, selection)
    results["basis"] = {}
    for basis in BASES:
        for bits in (4, 3):
            increase = paired.difference(
                paired.losses_per_text(quantize(model, {"*": bits}, basis=basis)), paired.full_losses_per_text
            )
            results["basis"][f"{basis}, {bits}"] = vars(increase)
            print(
                f"basis {basis}, {bits} bits: {increase.mean:+.4f} ({increase.low:.4f} to {increase.high:.4f})",
                flush=True,
            )
    basis = min(("given", "balanced"), key=lambda candidate: results["basis"][f"{candidate}, {BITS}"]["mean"])
    print(f"selected basis: {basis}", flush=True)
    began = time.time()
    with show_progress() as progress:
        sensitivities = sensitivity(
            model, selection, bits=(BITS,), basis=basis, out=out / "sensitivity.jsonl",
            progress=progress,
        )  # fmt: skip
    results["sensitivity"] = sensitivities.to_dict() | {"seconds": time.time() - began}
    allocation = allocate_bits(model, sensitivities, mean_bits=MEAN_BITS, choices=CHOICES)
    with show_progress() as progress:
        report = report_allocation(
            model, allocation, evaluation, uniform=CHOICES, seeds=seeds, basis=basis, progress=progress
        )
    results["report"] = report.to_dict() | {"basis": basis}
    for row in report.loss_rows():
        print(*row, flush=True)
    print("outside the range of random allocations:", report.beats_random, flush=True)
    write_atomic(out / "bits.json", json.dumps(results, indent=1).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("smollm2", "minilm", "little"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--selection-texts", type=int, default=4, help="paragraphs on which bits are allocated")
    parser.add_argument("--evaluation-texts", type=int, default=12, help="other paragraphs for the evaluation")
    parser.add_argument("--tokens", type=int, default=96, help="tokens per paragraph")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of random allocations")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    texts = options.selection_texts, options.evaluation_texts
    measure_weight_bits(options.model, options.out, *texts, options.tokens, options.seeds)


if __name__ == "__main__":
    main()
