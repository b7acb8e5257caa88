"""Replication of the roles of SmolLM2 on three sets of texts, and its heads for syntactic relations.

    python -m bench.depth --data DATA --out depth     # parts are stored in depth/; run again to resume

The sets are the probe set, the first 80,000 characters of the test text of WikiText-2, and test sentences of UD English-EWT.
A role is found if it is above its baseline on held-out texts. It replicates on another set if the same head has it there,
with the correction for all heads and roles of that set. "By chance" is the expected number for heads drawn at random.
Relations have other names in a treebank, see ROLE_NAMES. Induction and duplicate token are left out, because all three sets
use the same repeated tokens.
"""

import argparse
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import headwise as hw
from headwise.analysis.roles.best_relation_heads import best_relation_heads
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.roles import score
from headwise.text.annotated_documents import read_conllu
from headwise.ui.terminal_table import make_table

CHARACTERS, BATCH_SENTENCES = 80_000, 700  # of the text, and treebank sentences per part
EWT, WIKITEXT = "ud-english-ewt/en_ewt-ud-test.conllu", "wikitext-2/test.txt"
ROLE_NAMES = {
    "nsubj": "subject-verb", "obj": "verb-object", "amod": "adjective-noun", "det": "determiner-noun",
    "nmod:poss": "possessive",
}  # fmt: skip
EXCLUDED_ROLES = {"induction", "duplicate token"}


def make_profiles(data: Path, out: Path, sentences: int | None) -> dict[str, Profile]:
    """Return the profile of each set of texts. Parts stored in `out` are loaded."""
    text = (data / WIKITEXT).read_text("utf-8")[:CHARACTERS]
    trees = list(islice(read_conllu(data / EWT), sentences))
    parts: dict[str, list[dict[str, Any]]] = {
        "probe set": [{}],
        "WikiText-2": [{"corpus": text, "relations": False, "max_length": 256}],
        "UD-EWT": [
            {"corpus": trees[start : start + BATCH_SENTENCES]} for start in range(0, len(trees), BATCH_SENTENCES)
        ],
    }
    profiles: dict[str, Profile] = {}
    for name, runs in parts.items():
        for index, options in enumerate(runs):
            path = out / f"{name} {index}.npz"
            if not path.exists():
                hw.profile(hw.load("smollm2"), causal=False, **options).save(path)
            part = Profile.load(path)
            profiles[name] = profiles[name].merge(part) if index else part
    return profiles


def heads_by_role(profile: Profile) -> dict[str, set[str]]:
    """Return the heads of each role, under its name in the probe set."""
    by_role: dict[str, set[str]] = {}
    for role, heads in profile.heads_by_role().items():
        if role not in EXCLUDED_ROLES:
            by_role.setdefault(ROLE_NAMES.get(role, role), set()).update(map(str, heads))
    return by_role


def testable_roles(profile: Profile) -> set[str]:
    """Return the roles that were tested."""
    scores = score(profile.accumulator, profile.relation_metric)
    return {ROLE_NAMES.get(score.role.name, score.role.name) for score in scores} - EXCLUDED_ROLES


def main() -> None:
    """Compute the profiles and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with ud-english-ewt/ and wikitext-2/")
    parser.add_argument("--out", type=Path, default=Path("depth"))
    parser.add_argument("--sentences", type=int, help="number of treebank sentences; default: all")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    profiles, console = make_profiles(options.data, options.out, options.sentences), Console(width=200)
    for name, source in profiles.items():
        about = source.metadata
        having = sum(bool({*(role.role for role in head.roles)} - EXCLUDED_ROLES) for head in source)
        console.print(
            f"{name}: {about['texts']:,} texts, {about['tokens']:,} tokens, {source.family_size:,} tests; "
            f"{having} of {len(source)} "
            "heads have a role, without the roles of repeated tokens",
            highlight=False,
        )
    for source, other in permutations(profiles, 2):
        source_roles, other_roles, testable = (
            heads_by_role(profiles[source]),
            heads_by_role(profiles[other]),
            testable_roles(profiles[other]),
        )
        rows = []
        for role, heads in sorted(source_roles.items()):
            hold = heads & other_roles.get(role, set())
            chance = len(heads) * len(other_roles.get(role, ())) / len(profiles[other])
            cells = [len(hold), f"{chance:.1f}"] if role in testable else ["not tested", ""]
            rows.append([role, len(heads), *cells, " ".join(sorted(hold)), " ".join(sorted(heads - hold))])
        columns = ["role", f"heads on {source}", f"also on {other}", "by chance", "replicated heads", "other heads"]
        console.print(make_table(f"Found on {source}", columns, rows))
    rows = [
        [
            *(
                f"{row.relation} {row.direction}",
                row.arcs,
                row.head,
                f"{row.accuracy:.2f} ({row.low:.2f}–{row.high:.2f})",
            ),
            *(f"{row.offset_accuracy:.2f} ({row.offset:+d})", f"{row.excess:+.2f}", row.coverage, f"{row.p:.4f}"),
        ]
        for row in best_relation_heads(profiles["UD-EWT"])
    ]
    columns = ["relation", "words", "head", "accuracy", "best offset", "excess", "coverage", "p"]
    console.print(make_table("SmolLM2 on UD English-EWT test: words that lead back", columns, rows))


if __name__ == "__main__":
    main()
