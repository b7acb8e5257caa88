"""Result file of a search: JSON Lines with a header and one line per measured example, appended as soon as it is measured.

An interrupted search continues with the lines that are in the file. Two files of the same examples can be compared.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headwise.analysis.finding.class_probes import ExampleFeatures
from headwise.analysis.finding.gold_pair_scores import ExampleScores
from headwise.errors import FileFormatError, HeadwiseError
from headwise.io.atomic_write import write_atomic
from headwise.io.resolve_path import read_text

FORMAT = "headwise find 1"
IDENTITY = ("format", "job", "model", "examples_digest", "addresses", "settings")


class HeadSearchResultsWriter:
    """Writer of a result file.

    Args:
        path: The file, or None to write nothing.
        header: Settings of the search. A file with other settings is an error.
    """

    def __init__(self, path: str | Path | None, header: dict[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self.records: list[dict[str, Any]] = []
        if self.path is None:
            return
        stored, records = read_head_search_results(self.path) if self.path.exists() else (None, [])
        if stored is not None:
            changed = [name for name in IDENTITY if stored.get(name) != header[name]]
            if changed:
                raise FileFormatError(
                    f"{self.path}: has the results of another search. Different: {', '.join(changed)}. Choose another file "
                    f"for out=, or delete this one."
                )
        self.records = records
        lines = [header, *records]
        write_atomic(self.path, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def stored_example_scores(self) -> dict[int, ExampleScores]:
        """Return the measured examples by their number."""
        return {record["index"]: scores_from_dict(record, self.path) for record in self.records if "index" in record}

    def stored_features(self, num_heads: int) -> dict[int, ExampleFeatures]:
        """Return the features of the measured examples of the job `classes` by their number."""
        return {
            record["features"]: ExampleFeatures.from_record(record, num_heads)
            for record in self.records
            if "features" in record
        }

    def stored_costs(self, label: str) -> dict[str, list[float]]:
        """Return the costs of ablated heads by address.

        Args:
            label: "ablated" for the job `effect`, "causal test" for the causal test of another job.
        """
        return {record[label]: record["values"] for record in self.records if label in record}

    def append(self, record: dict[str, Any]) -> None:
        """Append one line and flush it to disk."""
        if self.path is None:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise HeadwiseError(
                f"{self.path}: cannot be written ({error}). The results already in it are intact. Free space or fix the "
                f"permissions, then repeat the call to resume."
            ) from error

    def append_example_scores(self, index: int, scores: ExampleScores) -> None:
        """Append the scores of one example."""
        self.append({"index": index} | asdict(scores))


def read_head_search_results(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Read the header and the records. A line truncated by a crash, and the lines after it, are ignored."""
    lines: list[Any] = []
    for line in read_text(path).splitlines():
        try:
            lines.append(json.loads(line))
        except (json.JSONDecodeError, RecursionError):
            break
    if not lines:
        return None, []
    if not all(isinstance(line, dict) for line in lines) or lines[0].get("format") != FORMAT:
        raise FileFormatError(f"{path}: not a result file of headwise find. Choose another file.")
    return lines[0], lines[1:]


def scores_from_dict(record: dict[str, Any], path: Path | None) -> ExampleScores:
    """Return the scores of one record."""
    try:
        fields = {name: record[name] for name in ExampleScores.__dataclass_fields__}
        lengths = {len(fields[name]) for name in ("scores", "value_weighted", "weights")}
        if len(lengths) != 1 or not isinstance(fields["key"], str) or not fields["count"] >= 0:
            raise ValueError
        return ExampleScores(**fields)
    except (KeyError, TypeError, ValueError):
        raise FileFormatError(
            f"{path}: a result in this file is damaged. Delete the file and repeat the search."
        ) from None
