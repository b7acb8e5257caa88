"""Score attribution of the induction heads of SmolLM2 on repeated random tokens, compared with the theory.

python -m bench.why
python -m bench.why --heads 18.6 --texts 2    a part of it

Expected result, fixed before the first run: the largest pair is the output of the previous-token head 16.0 at the key and the
token embedding at the query.
"""

import argparse

import numpy as np
import torch

import headwise as hw
from bench.measure import machine
from headwise.ui.terminal_table import make_table

PREVIOUS_TOKEN_HEAD = "16.0"
REPEAT_LENGTH = 24  # length of the repeated sequence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="18.6", help="induction heads, e.g. 18.6,21.1")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=31)
    options = parser.parse_args()
    model = hw.load("smollm2")
    generator = torch.Generator().manual_seed(options.seed)
    rows = []
    for head in options.heads.split(","):
        for lead in (False, True):
            ranks, fractions, sides, side_fractions, first = [], [], [], [], []
            for _ in range(options.texts):
                once = torch.randint(1000, model.spec.vocab, (REPEAT_LENGTH,), generator=generator)
                at = REPEAT_LENGTH + int(torch.randint(4, REPEAT_LENGTH - 1, (), generator=generator))
                attribution = hw.explain(
                    model, torch.cat((once, once)), head, query=at, key=at - REPEAT_LENGTH + 1, relative_to_mean=lead
                )
                assert attribution.is_complete, attribution.relative_error
                ranks.append(attribution.pair_rank("embedding", PREVIOUS_TOKEN_HEAD))
                fractions.append(attribution.pairs[0].score / attribution.total)
                keys = attribution.side_totals("key")
                sides.append(1 + [name for name, _ in keys].index(PREVIOUS_TOKEN_HEAD))
                side_fractions.append(dict(keys)[PREVIOUS_TOKEN_HEAD] / attribution.total)
                first.append(f"{attribution.pairs[0].query} · {attribution.pairs[0].key}")
            common = max(set(first), key=first.count)
            rows.append(
                (
                    head, "lead" if lead else "score", f"{np.median(ranks):.0f} ({min(ranks)} to {max(ranks)})",
                    f"{np.median(sides):.0f} ({min(sides)} to {max(sides)})", f"{np.median(side_fractions):.2f}",
                    f"{common} ({first.count(common)} of {len(first)})", f"{np.median(fractions):.2f}",
                )
            )  # fmt: skip
    from rich.console import Console

    columns = [
        "head", "of the", "rank of the pair", f"rank of {PREVIOUS_TOKEN_HEAD} at the key", "its part",
        "most often first", "its part",
    ]  # fmt: skip
    title = f"The token at the query against what {PREVIOUS_TOKEN_HEAD} wrote at the key"
    title += f"; median of {options.texts} texts; {machine()}"
    Console(width=140).print(make_table(title, columns, rows))


if __name__ == "__main__":
    main()
