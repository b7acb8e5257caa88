"""Time of the ablation sweep compared with one full forward pass per head, with equal results.

python -m bench.importance              both metrics, 15 rounds
python -m bench.importance --rounds 5   faster
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from bench.measure import BenchmarkReport, add_json_option, interleaved_timing, machine
from headwise.analysis.ablation.ablate import ablated, make_replacement_fn
from headwise.analysis.ablation.ablation_sweep import ablation_sweep, sweep_cost
from headwise.analysis.ablation.eval_targets import TargetBatch
from headwise.model.chunked_cross_entropy import IGNORE_INDEX

B, T = 4, 128
SPEC = hw.ModelSpec(vocab=2000, context=T, layers=6, attention=hw.AttentionSpec(width=256, heads=8))
NAIVE = "a forward pass per head"


def make_targets(ids: Tensor, metric: str) -> TargetBatch:
    """Return the next-token targets, or only the last one."""
    targets = ids[:, 1:].clone()
    if metric == "last":
        targets[:, :-1] = IGNORE_INDEX
    return TargetBatch(ids[:, :-1], torch.ones_like(ids[:, 1:], dtype=torch.bool), targets, None)


def fast_sweep(model: hw.Transformer, batch: TargetBatch) -> Callable[[], Tensor]:
    """Return the loss increase of each text without each head, (heads, B)."""
    return lambda: ablation_sweep(
        model,
        batch,
        model.spec.head_addresses,
        lambda hook_point, heads: make_replacement_fn(hook_point, heads, "zero"),
    )[0]


def naive_sweep(model: hw.Transformer, batch: TargetBatch) -> Callable[[], Tensor]:
    """Compute the sweep naively: silence each head, run the full model and take the loss at the targets."""
    assert batch.targets is not None
    output, targets = model.output, batch.targets[:, -1:] if batch.target_positions is not None else batch.targets
    assert output is not None

    def loss() -> Tensor:
        logits = output(model(batch.ids, hidden=True)[:, -targets.shape[1] :])
        return F.cross_entropy(logits.mT, targets, reduction="none").sum(1)

    @torch.no_grad()
    def step() -> Tensor:
        clean, lost = loss(), []
        for head in model.spec.head_addresses:
            with ablated(model, head, "zero"):
                lost.append(loss() - clean)
        return torch.stack(lost)

    return step


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=15)
    add_json_option(arguments)
    options = arguments.parse_args()
    rounds, report = options.rounds, BenchmarkReport("importance", options.json, width=110)
    torch.manual_seed(0)
    model = hw.Transformer(SPEC).eval()
    ids = torch.randint(SPEC.vocab, (B, T + 1))
    rows = []
    for metric in ("loss", "last"):
        batch = make_targets(ids, metric)
        candidates = {"the sweep": fast_sweep(model, batch), NAIVE: naive_sweep(model, batch)}
        max_difference = (candidates["the sweep"]() - candidates[NAIVE]()).abs().max() / float(
            batch.targets_per_text.max()
        )
        timings = interleaved_timing(candidates, NAIVE, rounds)
        cost = sweep_cost(SPEC, T, 1 if metric == "last" else None)
        sweep_timing, naive_timing = timings["the sweep"], timings[NAIVE]
        spread = f"{1 / sweep_timing.high:.2f} – {1 / sweep_timing.low:.2f}"
        rows.append(
            [
                metric,
                1e3 * naive_timing.median,
                1e3 * sweep_timing.median,
                1 / sweep_timing.speed,
                spread,
                cost.ratio,
                f"{max_difference:.0e}",
            ]
        )
    heads = len(SPEC.head_addresses)
    report.console.print(f"{machine()}. share below 1: faster than {NAIVE}.")
    title = f"all {heads} heads, batch {B}, {T} tokens, width {SPEC.width}, vocabulary {SPEC.vocab} ({rounds} rounds)"
    columns = ["metric", "naive ms", "sweep ms", "share", "quartiles", "share of FLOPs", "apart, nats"]
    report.add("sweep", title, columns, rows)
    report.write()


if __name__ == "__main__":
    main()
