"""Do the QK fix and GradDrop bring gradient rankings of nodes closer to exact patching?

    python -m bench.circuit_rankings --out FOLDER             # effects of each task as .npz; resumes
    python -m bench.circuit_rankings --out FOLDER --report

The rule is in docs/research/circuit-notes.md. It was committed before the run.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import headwise as hw
from headwise.analysis.circuits.circuit_statistics import TemplateBootstrapSampler
from headwise.analysis.circuits.circuit_task import PromptEncoder
from headwise.analysis.circuits.model_nodes import ModelNodes
from headwise.analysis.circuits.node_evaluator import NodeEvaluator
from headwise.analysis.circuits.node_ranking import exact_effects, gradient_effects
from headwise.analysis.circuits.shipped_tasks import make_shipped_task
from headwise.analysis.recording.batching import tokenizer_of
from headwise.model import ModelProtocol

MODEL, TASKS, PROMPTS, TOP = "smollm2", ("induction", "agreement"), 10, 64
# (corrected ranking, ranking without the correction)
COMPARISONS = (
    ("attribution, QK fix", "attribution"),
    ("eap-ig, QK fix", "eap-ig"),
    ("attribution, GradDrop", "attribution"),
)
INTERVALS = len(TASKS) * len(COMPARISONS) * 2  # each holds with 1 − 0.05 / INTERVALS


def rankings(evaluator: NodeEvaluator) -> dict[str, Callable[[], np.ndarray]]:
    """Return functions that compute the effects of all nodes on all prompts, (N, P)."""
    base = np.ones(len(evaluator.nodes), bool)
    return {
        "attribution": lambda: gradient_effects(evaluator, base),
        "attribution, QK fix": lambda: gradient_effects(evaluator, base, qk_fix=True),
        "eap-ig": lambda: gradient_effects(evaluator, base, 5),
        "eap-ig, QK fix": lambda: gradient_effects(evaluator, base, 5, qk_fix=True),
        "attribution, GradDrop": lambda: gradient_effects(evaluator, base, grad_drop=True),
        "exact": lambda: exact_effects(evaluator, range(len(base)), base),
    }


def measure(model: ModelProtocol, task: str, folder: Path) -> None:
    """Compute all rankings of one task, and store each when it is finished."""
    encoder = PromptEncoder(tokenizer_of(model))
    pairs = make_shipped_task(task, PROMPTS, encoder, 0).prompts[:PROMPTS]
    evaluator = NodeEvaluator(model, ModelNodes.of(model), [encoder.encode(pair) for pair in pairs])
    for name, compute in rankings(evaluator).items():
        file = folder / f"circuit-rankings-{task}-{name.replace(', ', '-').replace(' ', '-')}.npz"
        if not file.exists():
            start = time.process_time()
            effects = compute()
            seconds = time.process_time() - start
            np.savez(file, effects=effects, seconds=seconds, templates=[pair.template for pair in pairs])
            print(f"{task}, {name}: {seconds:.0f} s of processor time", flush=True)


def quantities(scores: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """Return the correlation with exact effects, and the share of the exact top nodes in the top: scores (N,), exact (N,)."""
    best = [set(np.argsort(-np.abs(values), kind="stable")[:TOP].tolist()) for values in (scores, exact)]
    return float(np.corrcoef(scores, exact)[0, 1]), len(best[0] & best[1]) / TOP


def report(folder: Path) -> None:
    """Print the quantities of each ranking, and the intervals of the improvements."""
    for task in TASKS:
        names = [*sorted({name for pair in COMPARISONS for name in pair}), "exact"]
        files = {name: f"circuit-rankings-{task}-{name.replace(', ', '-').replace(' ', '-')}.npz" for name in names}
        data = {name: dict(np.load(folder / file)) for name, file in files.items()}
        sampler = TemplateBootstrapSampler(data["exact"]["templates"].tolist(), 0)
        draws = {name: sampler.weights @ values["effects"].T for name, values in data.items()}  # (draws, N)
        for name in names:
            correlation, share = quantities(data[name]["effects"].mean(1), data["exact"]["effects"].mean(1))
            seconds = float(data[name]["seconds"])
            print(f"{task}, {name}: correlation {correlation:.3f}, top {TOP} {share:.2f}, {seconds:.0f} s")
        for corrected, plain in COMPARISONS:
            values = [
                np.array([quantities(row, exact) for row, exact in zip(draws[name], draws["exact"], strict=True)])
                for name in (corrected, plain)
            ]
            tail = 0.025 / INTERVALS
            for label, change in zip(("correlation", f"top {TOP}"), (values[0] - values[1]).T, strict=True):
                low, high = np.quantile(change, [tail, 1 - tail])
                print(f"{task}, {corrected} − {plain}: {label} {low:+.3f} to {high:+.3f}")


def main() -> None:
    """Compute the rankings of all tasks, or print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    if options.report:
        report(options.out)
        return
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    model = hw.load(MODEL)
    for task in TASKS:
        measure(model, task, options.out)


if __name__ == "__main__":
    main()
