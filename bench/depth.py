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
from headwise.analysis.roles.best_heads import best_heads
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.roles import make_cases
from headwise.text.treebank import read_conllu
from headwise.ui.tables import make_table

CHARACTERS, PART = 80_000, 700  # of the text; sentences of the treebank at once
EWT, WIKITEXT = "ud-english-ewt/en_ewt-ud-test.conllu", "wikitext-2/test.txt"
SAME = {
    "nsubj": "subject-verb", "obj": "verb-object", "amod": "adjective-noun", "det": "determiner-noun",
    "nmod:poss": "possessive",
}  # fmt: skip
OWN_TEXTS = {"induction", "duplicate token"}


def make_profiles(data: Path, out: Path, sentences: int | None) -> dict[str, Profile]:
    """One for each set of texts, part by part; what is in `out` is not made again."""
    text = (data / WIKITEXT).read_text("utf-8")[:CHARACTERS]
    trees = list(islice(read_conllu(data / EWT), sentences))
    parts: dict[str, list[dict[str, Any]]] = {
        "probe set": [{}],
        "WikiText-2": [{"corpus": text, "relations": False, "longest": 256}],
        "UD-EWT": [{"corpus": trees[start : start + PART]} for start in range(0, len(trees), PART)],
    }
    made: dict[str, Profile] = {}
    for name, some in parts.items():
        for number, options in enumerate(some):
            path = out / f"{name} {number}.npz"
            if not path.exists():
                hw.profile(hw.load("smollm2"), causal=False, **options).save(path)
            part = Profile.load(path)
            made[name] = made[name].merge(part) if number else part
    return made


def roles_found(profile: Profile) -> dict[str, set[str]]:
    """The heads that have each role, by the name it has in the probe set."""
    found: dict[str, set[str]] = {}
    for role, heads in profile.roles().items():
        if role not in OWN_TEXTS:
            found.setdefault(SAME.get(role, role), set()).update(map(str, heads))
    return found


def roles_asked(profile: Profile) -> set[str]:
    """The roles that could have been found."""
    cases = make_cases(profile.tally, profile.relations)
    return {SAME.get(case.role.name, case.role.name) for case in cases} - OWN_TEXTS


def main() -> None:
    """The profiles, and both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with ud-english-ewt/ and wikitext-2/")
    parser.add_argument("--out", type=Path, default=Path("depth"))
    parser.add_argument("--sentences", type=int, help="so many of the treebank; all unless said")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    made, console = make_profiles(options.data, options.out, options.sentences), Console(width=200)
    for name, one in made.items():
        about = one.about
        having = sum(bool({*(role.role for role in head.roles)} - OWN_TEXTS) for head in one)
        console.print(
            f"{name}: {about['texts']:,} texts, {about['tokens']:,} tokens, {one.family:,} tests; {having} of {len(one)} "
            "heads have a role, those of repeated tokens left out",
            highlight=False,
        )
    for one, other in permutations(made, 2):
        here, there, askable = roles_found(made[one]), roles_found(made[other]), roles_asked(made[other])
        rows = []
        for role, heads in sorted(here.items()):
            hold = heads & there.get(role, set())
            chance = len(heads) * len(there.get(role, ())) / len(made[other])
            told = [len(hold), f"{chance:.1f}"] if role in askable else ["not asked", ""]
            rows.append([role, len(heads), *told, " ".join(sorted(hold)), " ".join(sorted(heads - hold))])
        columns = ["role", f"on {one}", f"hold on {other}", "by chance", "which", "which not"]
        console.print(make_table(f"Found on {one}", columns, rows))
    rows = [
        [
            *(f"{row.relation} {row.way}", row.arcs, row.head, f"{row.accuracy:.2f} ({row.low:.2f}–{row.high:.2f})"),
            *(f"{row.offset_accuracy:.2f} ({row.offset:+d})", f"{row.excess:+.2f}", row.coverage, f"{row.p:.4f}"),
        ]
        for row in best_heads(made["UD-EWT"])
    ]
    columns = ["relation", "words", "head", "accuracy", "best offset", "excess", "coverage", "p"]
    console.print(make_table("SmolLM2 on UD English-EWT test: words that lead back", columns, rows))


if __name__ == "__main__":
    main()
