"""`python -m tests.parity` prints the largest differences from transformers of every family as a table.

The exit code is 1 if a difference exceeds its limit.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from headwise.ui.terminal_table import make_table
from tests.parity.silence_logging import quiet_transformers

quiet_transformers()

from tests.parity.cases import CASES, Result, measure_case  # noqa: E402 (transformers is told to be quiet first)
from tests.parity.real import measure_minilm, measure_smollm2  # noqa: E402


def results() -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as folder:
        for index, case in enumerate(CASES):
            yield from measure_case(case, Path(folder) / str(index))
    yield from measure_minilm()
    yield from measure_smollm2()


def main() -> int:
    by_case: dict[str, list[Result]] = {}
    for result in results():
        by_case.setdefault(result.case, []).append(result)
    rows = []
    for case, case_results in by_case.items():
        lengths = [result.tokens for result in case_results]
        limit = f"{case_results[0].logits_limit:.0e}/{case_results[0].maps_limit:.0e}"
        logits, weights = max(result.logits for result in case_results), max(result.maps for result in case_results)
        ok = all(result.ok for result in case_results)
        length_range = f"{min(lengths)}-{max(lengths)}"
        rows.append([case, length_range, f"{logits:.1e}", f"{weights:.1e}", limit, "yes" if ok else "NO"])
    columns = ["case", "tokens", "|Δlogits|", "|Δmap|", "limits", "ok"]
    Console().print(make_table("Parity with transformers, float32: largest differences", columns, rows))
    return 0 if all(row[-1] == "yes" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
