"""Profiles, importance and explanations in half precision, compared with the same rounded weights in float32.

python -m bench.precision minilm
python -m bench.precision smollm2 --texts 12 --dtype bfloat16 --out F.json

The rules were fixed before the first run. eps is that of the half precision (2⁻⁷ for bfloat16, 2⁻¹⁰ for float16).

- A metric is within its bound if it differs by at most 16 eps times its size (at least 1), in every head. A metric that
  counts where the largest weight lies (hits, argmax) has 64 eps.
- A head is at the threshold of a role if, in float32, its gain on either half of the texts is within 4 eps of the threshold,
  or its value-weighted gain is within 4 eps of half the threshold. Other heads must have the same roles at the same evidence
  level.
- Importance is compared by Spearman's rank correlation over heads.
- An explanation is complete if its parts add up to the score within the bound on rounding that `hw.explain` reports.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from scipy.stats import spearmanr

import headwise as hw
from bench.measure import machine
from headwise.analysis.recording.text_hash_split import REPORTING, SELECTION
from headwise.analysis.roles.profile_result import Profile
from headwise.text.annotated_document import Document
from headwise.ui.terminal_table import make_table
from tests.parity.real import minilm_folder, smollm2_folder

UNITS, JUMP_UNITS, THRESHOLD_UNITS = 16, 64, 4
JUMPS = ("hits", "argmax")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
EXPLAINED = ("18.6", "16.0", "5.1", "0.3", "29.8")


def load_model(name: str, kind: str, dtype: torch.dtype, *, wide: bool) -> Any:
    """Return a model with weights rounded to a dtype, in that dtype or (`wide`) in float32."""
    native: Any = hw.load(name).eval()
    if kind == "native":
        model: Any = native.to(dtype)
        return model.float() if wide else model
    import transformers

    kinds = {
        "smollm2": (transformers.AutoModelForCausalLM, smollm2_folder),
        "minilm": (transformers.AutoModel, minilm_folder),
    }
    automodel, folder = kinds[name]
    inner: Any = automodel.from_pretrained(folder(), dtype=torch.float32).eval().to(dtype)
    return hw.attach(inner.float() if wide else inner, native.tokenizer)


def analyze(model: Any, documents: list[Document]) -> dict[str, Any]:
    """Profile a model, rank its heads and explain some scores."""
    texts = [document.text for document in documents]
    with torch.no_grad():
        profile = hw.profile(model, documents, causal=False)
    if model.spec.kind == "encoder":  # its cosine distance has gradient 0
        return {
            "profile": profile, "importance": {"ablation": hw.importance(model, texts[:4]).mean}, "explanations": []
        }  # fmt: skip
    importance = {
        "gradient": hw.importance(model, texts[:2], ranking="gradient").mean,
        "ablation": hw.importance(model, texts[:1], heads="0.*,2.*,5.*").mean,
    }
    explanations = []
    if model.output is not None:
        words = len(texts[0].split())
        explanations = [hw.explain(model, texts[0], head, query=words - 2) for head in EXPLAINED]
    return {"profile": profile, "importance": importance, "explanations": explanations}


def metric_rows(half: Profile, full: Profile, eps: float) -> list[dict[str, Any]]:
    """Return the largest difference of each metric over the heads, in units of eps and of its size."""
    rows = []
    for name in full.accumulator.fields:
        a, b = half.accumulator.mean(name), full.accumulator.mean(name)
        same_pattern = bool((np.isfinite(a) == np.isfinite(b)).all())
        difference = np.abs(np.nan_to_num(a) - np.nan_to_num(b))
        units = float((difference / np.maximum(1, np.abs(np.nan_to_num(b))) / eps).max())
        bound = JUMP_UNITS if any(jump in name for jump in JUMPS) else UNITS
        rows.append(
            {
                "metric": name,
                "difference": float(difference.max()),
                "units": units,
                "bound": bound,
                "finite": same_pattern,
            }
        )
    return rows


def role_rows(half: Profile, full: Profile, eps: float) -> list[dict[str, Any]]:
    """Return the heads whose roles differ, and whether they are at the threshold."""
    rows = []
    for index, head in enumerate(full):
        levels = [
            {(role.role, role.detail): role.evidence_level for role in profile[head.address].roles}
            for profile in (half, full)
        ]
        for key in sorted({*levels[0], *levels[1]}):
            half_level, full_level = (level.get(key, "none") for level in levels)
            if half_level != full_level:
                scores = full.scores[key]
                threshold = scores.role.threshold
                margins = [abs(scores.gain(side)[index] - threshold) for side in (SELECTION, REPORTING)]
                margins.append(abs(scores.gain(REPORTING, value_weighted=True)[index] - threshold / 2))
                margin = float(np.nanmin(margins))
                rows.append(
                    {
                        "head": str(head.address), "role": " ".join(filter(None, key)), "half": half_level,
                        "float32": full_level,
                        "margin": margin, "at_threshold": margin <= THRESHOLD_UNITS * eps,
                    }
                )  # fmt: skip
    return rows


def compare(half: dict[str, Any], full: dict[str, Any], eps: float) -> dict[str, Any]:
    """Compare the results of `analyze` in two dtypes."""
    profiles = half["profile"], full["profile"]
    return {
        "heads": len(profiles[0]),
        "metrics": metric_rows(*profiles, eps),
        "roles": role_rows(*profiles, eps),
        "same best role": sum(profiles[0][head.address].role == head.role for head in profiles[1]),
        "rank correlation": {
            name: _rank_correlation(half["importance"][name], values) for name, values in full["importance"].items()
        },
        "explanations": [
            {
                "head": a.head, "complete": a.is_complete, "relative_error": a.relative_error,
                "score": a.score, "float32 score": b.score, "same largest pair": a.pairs[0][:2] == b.pairs[0][:2],
            }
            for a, b in zip(half["explanations"], full["explanations"], strict=True)
        ],
    }  # fmt: skip


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    result: Any = spearmanr(a, b)
    return float(result.statistic)


def show(console: Console, label: str, result: dict[str, Any]) -> None:
    """Print the comparison of one model and dtype."""
    outside = [row for row in result["metrics"] if row["units"] > row["bound"] or not row["finite"]]
    worst = sorted(result["metrics"], key=lambda row: -row["units"] / row["bound"])[:6]
    title = f"{label}: {len(result['metrics'])} metrics of {result['heads']} heads, {len(outside)} outside their bound"
    rows = [(row["metric"], f"{row['difference']:.4f}", f"{row['units']:.1f}", row["bound"]) for row in worst]
    console.print(make_table(title, ["metric", "largest difference", "in eps", "bound in eps"], rows))
    console.print(f"same best role: {result['same best role']} of {result['heads']} heads", highlight=False)
    rows = [tuple(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()) for row in result["roles"]]
    console.print(make_table("roles that differ", ["head", "role", "half", "float32", "margin", "at threshold"], rows))
    correlations = ", ".join(f"{name} {value:.4f}" for name, value in result["rank correlation"].items())
    console.print(f"rank correlation of importance: {correlations}", highlight=False)
    for row in result["explanations"]:
        console.print(str(row), highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("smollm2", "minilm"))
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--kind", choices=("native", "attached"), action="append", help="default: both")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--out", type=Path, help="JSON file of all figures")
    options = parser.parse_args()
    documents = [item for item in hw.Corpus.probe_set().items() if isinstance(item, Document)]
    documents = documents[:: max(1, len(documents) // options.texts)][: options.texts]
    console, results = Console(width=120), {}
    for name in options.dtype or DTYPES:
        dtype, eps = DTYPES[name], torch.finfo(DTYPES[name]).eps
        for kind in options.kind or ("native", "attached"):
            full = analyze(load_model(options.model, kind, dtype, wide=True), documents)
            half = analyze(load_model(options.model, kind, dtype, wide=False), documents)
            label = f"{options.model}, {kind}, {name}"
            results[label] = compare(half, full, eps)
            show(console, label, results[label])
            if options.out:
                options.out.write_text(json.dumps(results, indent=1))
    console.print(machine())


if __name__ == "__main__":
    main()
