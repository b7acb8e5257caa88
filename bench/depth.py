"""Roles of SmolLM2 on three sets of texts: which of those found on one are found on another; and its heads for syntax.

    python -m bench.depth --data DATA --out depth     # parts are kept in depth/; started again it goes on

The probe set; the first 80,000 characters of WikiText-2's test text; UD English-EWT's test sentences, all or the first. A
role is found where it stands above its baseline on held-out texts (selective or better). It holds on other texts if the same
head has it there too, corrected there for all heads and roles again. By chance so many would hold as if the heads were drawn
anew. Relations have other names in a treebank: see SAME. Repeated tokens are the same in all three, so induction and
duplicate token are left out.
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
from headwise.text.treebank import read_conllu
from headwise.ui.terminal_table import make_table

CHARACTERS, BATCH_SENTENCES = 80_000, 700  # of the text; sentences of the treebank at once
EWT, WIKITEXT = "ud-english-ewt/en_ewt-ud-test.conllu", "wikitext-2/test.txt"
ROLE_NAMES = {
    "nsubj": "subject-verb", "obj": "verb-object", "amod": "adjective-noun", "det": "determiner-noun",
    "nmod:poss": "possessive",
}  # fmt: skip
EXCLUDED_ROLES = {"induction", "duplicate token"}


def make_profiles(data: Path, out: Path, sentences: int | None) -> dict[str, Profile]:
    """One for each set of texts, part by part; what is in `out` is not made again."""
    text = (data / WIKITEXT).read_text("utf-8")[:CHARACTERS]
    trees = list(islice(read_conllu(data / EWT), sentences))
    parts: dict[str, list[dict[str, Any]]] = {
        "probe set": [{}],
        "WikiText-2": [{"corpus": text, "relations": False, "longest": 256}],
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
    """The heads that have each role, by the name it has in the probe set."""
    by_role: dict[str, set[str]] = {}
    for role, heads in profile.heads_by_role().items():
        if role not in EXCLUDED_ROLES:
            by_role.setdefault(ROLE_NAMES.get(role, role), set()).update(map(str, heads))
    return by_role


def testable_roles(profile: Profile) -> set[str]:
    """The roles that could have been found."""
    scores = score(profile.accumulator, profile.relation_metric)
    return {ROLE_NAMES.get(score.role.name, score.role.name) for score in scores} - EXCLUDED_ROLES


def main() -> None:
    """The profiles, and both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with ud-english-ewt/ and wikitext-2/")
    parser.add_argument("--out", type=Path, default=Path("depth"))
    parser.add_argument("--sentences", type=int, help="so many of the treebank; all unless said")
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
            "heads have a role, those of repeated tokens left out",
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
            cells = [len(hold), f"{chance:.1f}"] if role in testable else ["not asked", ""]
            rows.append([role, len(heads), *cells, " ".join(sorted(hold)), " ".join(sorted(heads - hold))])
        columns = ["role", f"on {source}", f"hold on {other}", "by chance", "which", "which not"]
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
