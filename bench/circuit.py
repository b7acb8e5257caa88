"""Scores of all nodes of a circuit, compared with the attribution patching of TransformerLens 4.3: time, memory, agreement.

pip install transformer-lens==4.3.0
python -m bench.circuit              GPT-2 small with random weights, 12 prompt pairs of 16 tokens, processes in turn
python -m bench.circuit --rounds 1   faster

Each process loads the model and computes all scores twice (exact patching: once). The first time gives the peak memory, the
last one the time: processor time of one thread, so that other work on the machine matters less. TransformerLens takes the
gradient at its corrupted prompt, and Headwise at the clean one. So the prompts are exchanged for TransformerLens, and the
sign of its scores is reversed. Its scores by position are summed. Exact patching and EAP-IG run only in Headwise:
TransformerLens 4.3 does not implement EAP-IG, and its exact patching runs one forward pass per node.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

import headwise as hw
from bench.measure import machine
from headwise.analysis.circuits.circuit_task import EncodedPrompt, PromptPair
from headwise.analysis.circuits.model_nodes import ModelNodes
from headwise.analysis.circuits.node_evaluator import NodeEvaluator
from headwise.analysis.circuits.node_ranking import exact_effects, gradient_effects
from headwise.experiments.engine.peak_process_memory import peak_memory
from headwise.ui.terminal_table import make_table

PROMPTS, LENGTH, VOCAB, SEED = 12, 16, 50257, 0
LENS, ATTRIBUTION, EAP_IG, EXACT = "TransformerLens, attribution", "attribution", "eap-ig, 5 steps", "exact patching"
Scores = dict[str, float]


def make_ids() -> tuple[Tensor, Tensor, Tensor]:
    """Return clean ids (P, T), corrupted ids with another token in the middle (P, T), and right and wrong answers (P, 2)."""
    generator = torch.Generator().manual_seed(SEED)
    clean = torch.randint(VOCAB, (PROMPTS, LENGTH), generator=generator)
    corrupted = clean.clone()
    corrupted[:, LENGTH // 2] = torch.randint(VOCAB, (PROMPTS,), generator=generator)
    return clean, corrupted, torch.randint(VOCAB, (PROMPTS, 2), generator=generator)


def save_model(folder: Path) -> None:
    """Save GPT-2 small with random weights. Matrices are larger than at initialization, so that effects are not linear."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(SEED)
    model = GPT2LMHeadModel(GPT2Config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and name.startswith("transformer.h."):
                parameter.mul_(3)
    model.save_pretrained(folder)


def headwise_scores(folder: Path, ranking: str) -> Callable[[], Scores]:
    """Return a function that computes the scores of all nodes with Headwise."""
    model = hw.load(folder)
    clean, corrupted, answers = make_ids()
    prompts = [
        EncodedPrompt(PromptPair(""), LENGTH, (tuple(a),), (tuple(b),), ((right,), (wrong,)), 1)
        for a, b, (right, wrong) in zip(clean.tolist(), corrupted.tolist(), answers.tolist(), strict=True)
    ]
    nodes = ModelNodes.of(model)
    base = np.ones(len(nodes), bool)

    def compute() -> Scores:
        evaluator = NodeEvaluator(model, nodes, prompts)
        if ranking == EXACT:
            effects = exact_effects(evaluator, range(len(nodes)), base)
        else:
            effects = gradient_effects(evaluator, base, 5 if ranking == EAP_IG else 1)
        return dict(zip(nodes.names, effects.mean(1).tolist(), strict=True))

    return compute


def lens_scores(folder: Path) -> Callable[[], Scores]:
    """Return a function that computes the scores of all nodes with TransformerLens."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module  # pyright: ignore[reportMissingImports]
    from transformer_lens.tools.analysis.attribution_patching import attribution_patch  # pyright: ignore[reportMissingImports]
    from transformers import GPT2LMHeadModel

    loaded = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager")
    bridge: Any = build_bridge_from_module(loaded, "GPT2LMHeadModel", hf_config=loaded.config).eval()
    clean, corrupted, answers = make_ids()

    def compute() -> Scores:
        totals: Scores = {}
        for a, b, (right, wrong) in zip(clean, corrupted, answers.tolist(), strict=True):  # its metric gets no index
            result = attribution_patch(
                bridge, b[None], a[None], lambda logits, r=right, w=wrong: logits[0, -1, r] - logits[0, -1, w]
            )
            for node, score in result.node_scores.items():
                name = {"embed": "embedding", "mlp_out": f"mlp.{node.layer}"}.get(
                    node.kind, f"{node.layer}.{node.head}"
                )
                totals[name] = totals.get(name, 0.0) - score / PROMPTS
        return totals

    return compute


def work(candidate: str, folder: Path) -> None:
    """Print seconds, peak memory and scores of one candidate as JSON."""
    torch.set_num_threads(1)
    compute = lens_scores(folder) if candidate == LENS else headwise_scores(folder, candidate)
    runs: list[tuple[float, Scores]] = []

    def run() -> None:
        start = time.process_time()
        scores = compute()
        runs.append((time.process_time() - start, scores))

    memory = peak_memory(run)
    if candidate != EXACT:
        run()
    seconds, scores = runs[-1]
    print(json.dumps({"seconds": seconds, "memory": memory, "scores": scores}))


def run_process(candidate: str, folder: Path) -> dict[str, Any]:
    """Run one candidate in a process of its own."""
    command = [sys.executable, "-m", "bench.circuit", "--work", candidate, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> int:
    """Run all candidates in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", choices=(LENS, ATTRIBUTION, EAP_IG, EXACT), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.folder)
        return 0
    candidates = (LENS, ATTRIBUTION, EAP_IG, EXACT)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in candidates}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        for index in range(options.rounds):
            for candidate in (*candidates[index % 4 :], *candidates[: index % 4]):
                runs[candidate].append(run_process(candidate, folder))
    names = list(runs[EXACT][0]["scores"])
    scores = {key: np.array([results[0]["scores"][node] for node in names]) for key, results in runs.items()}
    rows = []
    for candidate, results in runs.items():
        ratios = [lens["seconds"] / own["seconds"] for lens, own in zip(runs[LENS], results, strict=True)]
        correlation = float(np.corrcoef(scores[candidate], scores[EXACT])[0, 1])
        rows.append(
            (
                candidate, f"{statistics.median(item['seconds'] for item in results):.1f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{statistics.median(item['memory'] for item in results):.0f}", f"{correlation:.3f}",
            )
        )  # fmt: skip
    difference = np.abs(scores[LENS] - scores[ATTRIBUTION]).max() / np.abs(scores[LENS]).max()
    columns = ("scores of all nodes", "seconds", "speed", "peak memory, MB", "correlation with exact")
    print(f"{machine()}; {len(names)} nodes, {PROMPTS} prompt pairs of {LENGTH} tokens, {options.rounds} rounds")
    Console().print(make_table("", columns, rows))
    print(f"Largest difference of the two attribution scores: {difference:.1e} of the largest score")
    return 0


if __name__ == "__main__":
    sys.exit(main())
