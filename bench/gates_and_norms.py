"""Does a gate per token remove the first-token sink? Does a QK norm keep attention from saturating? Small models, 12 seeds.

    python -m bench.gates_and_norms --out FOLDER [--first-seed 100] [--seeds 12]     # one JSON file per seed; resumes
    python -m bench.gates_and_norms --out FOLDER --report

The rules, the seeds and the correction are in docs/research/gates-and-norms.md. They were committed before the run.
"""

import argparse
import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

import headwise as hw

TOKENS, LENGTH, TRIGGERS = 32, 48, 3  # token ids below TRIGGERS are triggers; id TOKENS starts every text
STEPS, ROWS, WARMUP = 1500, 32, 100
HIGH_RATE, LOW_RATE = 3e-2, 3e-3
FIRST_QUERY = 8  # earlier queries see few keys, so that any map has weight on the first token
SINK, SATURATED = 0.3, 0.95  # mean weight on the first token; largest weight of a row
INTERVALS = 8  # intervals that the rules use: each holds with 1 − 0.05 / 8
MIN_SHARE, MAX_REMAINING, MAX_NO_EFFECT = 0.25, 0.1, 0.1


@dataclass(frozen=True)
class VariantConfig:
    """One kind of model: the learning rate and the fields of its attention layer."""

    rate: float = HIGH_RATE
    attention: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "plain": VariantConfig(),
    "gate per head": VariantConfig(attention={"output_gate": "head"}),
    "gate per channel": VariantConfig(attention={"output_gate": "channel"}),
    "off-by-one softmax": VariantConfig(attention={"softmax": "off_by_one"}),
    "QK norm": VariantConfig(attention={"qk_norm": hw.QKNorm()}),
    "plain, low rate": VariantConfig(LOW_RATE),
    "QK norm, low rate": VariantConfig(LOW_RATE, {"qk_norm": hw.QKNorm()}),
}


def bigram_table(seed: int) -> Tensor:
    """Return the transition probabilities of the language of a seed, (TOKENS, TOKENS)."""
    generator = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randn(TOKENS, TOKENS, generator=generator)).softmax(-1)


def sample_texts(table: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Return texts, (rows, LENGTH). A token follows its predecessor; after a trigger the token before it is repeated."""
    texts = torch.full((rows, LENGTH), TOKENS)
    texts[:, 1] = torch.randint(TOKENS, (rows,), generator=generator)
    for position in range(2, LENGTH):
        previous = texts[:, position - 1]
        following = torch.multinomial(table[previous], 1, generator=generator)[:, 0]
        if position > 2:
            following = torch.where(previous < TRIGGERS, texts[:, position - 2], following)
        texts[:, position] = following
    return texts


def train_variant(variant: VariantConfig, seed: int) -> tuple[hw.Transformer, Tensor]:
    """Return a trained model and the table of its language. Variants of a seed see the same texts in the same order."""
    torch.manual_seed(seed)
    spec = hw.ModelSpec(
        vocab=TOKENS + 1, context=LENGTH, layers=1, norm="rms", mlp_width=64,
        attention=hw.AttentionSpec(width=32, heads=4, **variant.attention),
    )  # fmt: skip
    model, table = hw.Transformer(spec), bigram_table(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=variant.rate, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    for _ in range(STEPS):
        texts = sample_texts(table, ROWS, generator)
        logits = model(texts[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval(), table


@torch.no_grad()
def measure(model: hw.Transformer, table: Tensor, seed: int) -> dict[str, float]:
    """Return the quantities of a model on 128 new texts."""
    texts = sample_texts(table, 128, torch.Generator().manual_seed(9000 + seed))
    calls: list[Any] = []
    with ExitStack() as stack:
        for point in model.hook_points():
            stack.enter_context(point.listen(calls.append))
        logits = model(texts[:, :-1])
    (call,) = calls
    rows = call.maps()[:, :, FIRST_QUERY:]  # (B, H, T, S)
    scores = (call.q @ call.k.mT)[:, :, FIRST_QUERY:] / call.q.shape[-1] ** 0.5
    visible = torch.ones(LENGTH - 1, LENGTH - 1).tril().bool()[FIRST_QUERY:]
    after_trigger = texts[:, 2:-1] < TRIGGERS
    first = rows[..., 0].mean((0, 2))  # (H,)
    gate = torch.ones(()) if call.token_gate is None else call.token_gate[:, :, FIRST_QUERY:].mean()
    return {
        "share of heads with a sink": float((first > SINK).float().mean()),
        "mean weight on the first token": float(first.mean()),
        "share of saturated rows": float((rows.amax(-1) > SATURATED).float().mean()),
        "99th percentile of |scores|": float(np.quantile(scores[:, :, visible].abs().numpy(), 0.99)),
        "mean gate": float(gate),
        "loss": float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())),
        "copied after a trigger": float(
            (logits[:, 2:].argmax(-1) == texts[:, 3:])[after_trigger].float().mean()
        ),
    }  # fmt: skip


def interval(values: list[float], tests: int = INTERVALS) -> tuple[float, float]:
    """Return Student's interval of a mean over seeds that holds together with `tests` − 1 others."""
    mean, error = float(np.mean(values)), float(stats.sem(values))
    if error == 0:
        return mean, mean
    low, high = stats.t.interval(1 - 0.05 / tests, len(values) - 1, mean, error)
    return float(low), float(high)


def judge_gate(plain: list[float], gated: list[float]) -> str:
    """Apply the rule of a gate to the shares of heads with a sink, by seed."""
    low, high = interval([a - b for a, b in zip(plain, gated, strict=True)])
    if interval(plain)[0] <= MIN_SHARE:
        return "not testable: too few heads of plain models have a sink"
    if interval(gated)[1] < MAX_REMAINING:
        return "removes the sink"
    if low > 0:
        return "reduces the sink, but does not remove it" if interval(gated)[0] > MAX_REMAINING else "reduces the sink"
    return "does not reduce the sink" if high < MAX_NO_EFFECT else "undecided"


def judge_norm(plain: list[float], normed: list[float]) -> str:
    """Apply the rule of the QK norm to the shares of saturated rows, by seed."""
    low, high = interval([a - b for a, b in zip(plain, normed, strict=True)])
    if interval(plain)[0] <= MIN_SHARE:
        return "not testable: too few rows of plain models are saturated"
    if interval(normed)[1] < MAX_REMAINING:
        return "keeps rows from saturating"
    if low > 0:
        return "reduces saturation, but does not prevent it"
    return "does not reduce saturation" if high < MAX_NO_EFFECT else "undecided"


def report(folder: Path) -> None:
    """Print the mean and the 95% interval of each quantity, and the verdicts."""
    files = sorted(folder.glob("gates-and-norms-seed-*.json"))
    seeds = [json.loads(file.read_text("utf-8")) for file in files]
    print(f"{len(seeds)} seeds")
    names = list(seeds[0]["plain"])
    print("| model | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1))
    for variant in VARIANTS:
        cells = []
        for name in names:
            values = [seed[variant][name] for seed in seeds]
            low, high = interval(values, 1)
            cells.append(f"{np.mean(values):.3f} ({low:.3f} to {high:.3f})")
        print(f"| {variant} | " + " | ".join(cells) + " |")
    sinks = {variant: [seed[variant]["share of heads with a sink"] for seed in seeds] for variant in VARIANTS}
    rows = {variant: [seed[variant]["share of saturated rows"] for seed in seeds] for variant in VARIANTS}
    for gate in ("gate per head", "gate per channel"):
        low, high = interval([a - b for a, b in zip(sinks["plain"], sinks[gate], strict=True)])
        print(f"{gate}: {judge_gate(sinks['plain'], sinks[gate])} (difference {low:.3f} to {high:.3f})")
    low, high = interval([a - b for a, b in zip(rows["plain"], rows["QK norm"], strict=True)])
    print(f"QK norm: {judge_norm(rows['plain'], rows['QK norm'])} (difference {low:.3f} to {high:.3f})")


def main() -> None:
    """Train and measure the models of each seed, or print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/research/data"))
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    if options.report:
        report(options.out)
        return
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        file = options.out / f"gates-and-norms-seed-{seed}.json"
        if not file.exists():
            quantities = {name: measure(*train_variant(variant, seed), seed) for name, variant in VARIANTS.items()}
            file.write_text(json.dumps(quantities, indent=1), "utf-8")
            print(f"seed {seed} finished", flush=True)


if __name__ == "__main__":
    main()
