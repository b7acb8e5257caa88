"""Causal tests of SmolLM2 with several seeds, and the heads that an earlier, weaker rule called causal.

`python -m bench.rung --out causal.jsonl`              stored seed by seed; run again to resume
`python -m bench.rung --prompts --out prompts.jsonl`   roles with prompts of their own, with other seeds

Roles are found once on the probe set. The causal test is repeated with each seed, which draws its texts and lists. The eleven
induction heads are those of an earlier rule: mean ablation increased the loss on the second copy of random tokens more than
ablation of the other heads of the layer, without further controls.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import torch

import headwise as hw
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.causal_test import causal_test
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.profile_sums import RetainedTextCollector
from headwise.model import ModelProtocol, eval_mode

SEEDS = (501, 502, 503, 504, 505)  # the table shows the first
PROMPT_SEEDS = (611, 612, 613, 614, 615)
EARLIER_CAUSAL = ("17.3", "18.6", "18.7", "20.3", "20.6", "21.7", "22.4", "22.7", "23.7", "23.8", "24.2")


def test_seed(
    model: ModelProtocol, profile: Profile, samples: RetainedTextCollector, seed: int, prompts: bool
) -> list[dict[str, object]]:
    """Return the causal test of every candidate head for one seed."""
    candidates = [
        [evidence for evidence in entries if bool(evidence.family_size) == prompts] for entries in profile.evidence
    ]
    with eval_mode(model), torch.no_grad():
        related = samples.relation_documents.samples.values()
        tested = causal_test(
            model, profile.addresses, candidates, related, samples.first_samples, seed, lambda stage, done, of: None
        )
    fields = ("role", "rung", "cost", "effect", "bar", "control", "beyond_interval", "mean_cost", "causal_p")
    return [
        {"seed": seed, "head": str(address), **{name: getattr(evidence, name) for name in fields}}
        for address, entries in zip(profile.addresses, tested, strict=True)
        for evidence in entries
        if evidence.cost is not None
    ]


def main() -> None:
    """Run the seeds without results, then print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("rung.jsonl"))
    parser.add_argument("--prompts", action="store_true")
    options = parser.parse_args()
    out, seeds = options.out, PROMPT_SEEDS if options.prompts else SEEDS
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    missing = [seed for seed in seeds if seed not in {row["seed"] for row in rows}]
    if missing:
        model = hw.load("smollm2")
        corpus = TokenizedCorpus.of(model, None)
        profile = hw.profile(model, corpus, causal=False, prompts=options.prompts)
        samples = RetainedTextCollector(keep_for_causal_test=True)
        for sample in corpus:
            samples.add_text(sample)
            samples.add_document(sample)
        for seed in missing:
            new = test_seed(model, profile, samples, seed, options.prompts)
            with out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in new)
            rows += new
    causal_counts = Counter((row["head"], row["role"]) for row in rows if row["rung"] == "causal")
    print(f"{'head':6}{'role':18}{'cost':>8}{'control':>9}{'cost - control':>18}{'mean':>8}{'p':>10}  causal in")
    for row in (row for row in rows if row["seed"] == seeds[0]):
        ends = "" if row["beyond_interval"] is None else "{:+.2f} to {:+.2f}".format(*row["beyond_interval"])
        values = [row["cost"], row["control"]]
        cost, control = ("-" if x is None else f"{x:.3f}" for x in values)
        mean = "-" if row["mean_cost"] is None else f"{row['mean_cost']:.3f}"
        p = "-" if row["causal_p"] is None else f"{row['causal_p']:.2g}"
        marker, count = " *" if row["head"] in EARLIER_CAUSAL else "", causal_counts[row["head"], row["role"]]
        print(f"{row['head']:6}{row['role']:18}{cost:>8}{control:>9}{ends:>18}{mean:>8}{p:>10}  {count}{marker}")
    for seed in seeds:
        seed_rows = [row for row in rows if row["seed"] == seed]
        tried = sum(row["causal_p"] is not None for row in seed_rows)
        if options.prompts:
            print(
                f"seed {seed}: {tried} tested; causal: {' '.join(r['head'] for r in seed_rows if r['rung'] == 'causal')}"
            )
            continue
        causal_heads = [
            head for head in EARLIER_CAUSAL if any(r["head"] == head and r["rung"] == "causal" for r in seed_rows)
        ]
        print(f"seed {seed}: {tried} tested; {len(causal_heads)} of the eleven are causal: {' '.join(causal_heads)}")


if __name__ == "__main__":
    main()
