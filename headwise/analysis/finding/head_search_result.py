"""Result of `find_heads`: heads with evidence, comparison with the result of another model, export."""

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.analysis.finding.job_examples import LabeledExample
from headwise.analysis.finding.per_input_scores import BestHeadComparison, JobEvidence, PerInputScores
from headwise.analysis.metrics.statistics import bootstrap_difference_interval, max_t_test
from headwise.analysis.recording.text_hash_split import REPORTING
from headwise.errors import ArgumentError, FileFormatError
from headwise.io.atomic_write import write_atomic
from headwise.io.json_values import nonfinite_to_none
from headwise.io.resolve_path import read_json
from headwise.spec import Address

if TYPE_CHECKING:
    from headwise.analysis.finding.example_job_metric import HeadJobMetric
    from headwise.analysis.roles.roles import Role
    from headwise.ui.figures.head_search_plot import FigureWithData

VERSION = 1
INTERVALS = ("interval", "excess_interval", "cost_interval", "cost_excess_interval")


@dataclass(frozen=True)
class LayerBestHead:
    """The best head of one layer, on the reporting half.

    Attributes:
        layer: Address of the layer.
        address: Head with the largest score.
        score: Its score.
        next_address: Head with the second largest score.
        next_score: Score of that head.
        margin: Difference of the two scores.
    """

    layer: str
    address: str
    score: float
    next_address: str
    next_score: float
    margin: float


@dataclass(frozen=True)
class BeforeAfterScoreDifference:
    """Change of the score of one head between two models.

    Attributes:
        address: Address of the head.
        before: Score in this result.
        after: Score in the other result.
        difference: `after` minus `before`.
        interval: 95% confidence interval of the difference, paired by input.
        p: p-value of the difference, corrected for all heads and both signs.
        level_before: Evidence level in this result.
        level_after: Evidence level in the other result.
    """

    address: str
    before: float
    after: float
    difference: float
    interval: tuple[float, float]
    p: float
    level_before: str
    level_after: str

    @property
    def change(self) -> str:
        """`gained`, `lost`, `kept` or an empty text, by evidence level."""
        return {(False, True): "gained", (True, False): "lost", (True, True): "kept"}.get(
            (self.level_before != "none", self.level_after != "none"), ""
        )


@dataclass(frozen=True, eq=False)
class HeadSearchResult:
    """Heads that were tried for a job, best first. Iterating yields `JobEvidence`; `result["5.1"]` is that of one head.

    Attributes:
        metadata: Job, settings, numbers of examples and heads, family size.
        heads: Evidence for each head, highest evidence level first, then largest gain.
        control: Comparison of the head chosen on the selection half with random heads.
        table: Sums by input and head.
        examples: The examples. Empty for a result that was loaded from a file.
    """

    metadata: dict[str, Any]
    heads: tuple[JobEvidence, ...]
    control: BestHeadComparison
    table: PerInputScores
    examples: tuple[LabeledExample, ...] = ()

    @property
    def job(self) -> str:
        """Name of the job."""
        return self.metadata["job"]

    @property
    def supported_heads(self) -> tuple[str, ...]:
        """Addresses of the heads that do the job, best first. Empty if there is none."""
        return tuple(item.address for item in self.heads if item.is_supported)

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[JobEvidence]:
        return iter(self.heads)

    def __getitem__(self, head: str | Address) -> JobEvidence:
        for item in self.heads:
            if item.address == str(head):
                return item
        listed = ", ".join(item.address for item in self.heads[:8])
        raise ArgumentError(f"head {head}: was not tried. Tried heads: {listed}, …")

    def __repr__(self) -> str:
        from headwise.ui.result_text import head_search_table

        return head_search_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import head_search_table

        return head_search_table(self).as_html()

    def by_layer(self) -> list[LayerBestHead]:
        """Return the best head of each layer and how far it is above the next, in the order of the layers."""
        scores = {address: self[address].score for address in self.metadata["addresses"]}
        layers: dict[str, list[str]] = {}
        for address in scores:
            layers.setdefault(str(Address.parse(address).layer_address), []).append(address)
        summaries = []
        for layer, members in layers.items():
            first, *others = sorted(members, key=lambda address: -scores[address])
            second = others[0] if others else ""
            next_score = scores[second] if second else float("nan")
            summaries.append(LayerBestHead(layer, first, scores[first], second, next_score, scores[first] - next_score))
        return summaries

    def table_rows(self) -> list[list[Any]]:
        """Return one row per head. Columns are those of `COLUMNS`."""
        return [
            [
                item.address, item.evidence_level, item.score, _range_text(item.interval), item.baseline_name, item.baseline,
                item.gain, item.p, item.value_weighted, item.weight, item.detail, *_cost_cells(item),
            ]
            for item in self.heads
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: settings, heads (best first), layers, control, and scores by input."""
        units = {
            "keys": list(self.table.keys), "halves": self.table.halves.tolist(), "counts": self.table.counts.tolist(),
            "scores": self.table.scores.tolist(), "bounded": self.table.is_bounded,
        }  # fmt: skip
        return nonfinite_to_none(
            {"version": VERSION} | self.metadata
            | {
                "supported_heads": list(self.supported_heads), "heads": [asdict(item) for item in self.heads],
                "layers": [asdict(item) for item in self.by_layer()], "control": asdict(self.control), "units": units,
            }
        )  # fmt: skip

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the result as JSON, and write it to a file if a path is given. `HeadSearchResult.load` reads it."""
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            write_atomic(path, text.encode())
        return text

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return one line per head as CSV, and write it to a file if a path is given."""
        buffer = StringIO()
        names = [field.name for field in fields(JobEvidence)]
        columns = [
            column for name in names for column in ([f"{name}_low", f"{name}_high"] if name in INTERVALS else [name])
        ]
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(columns)
        for item in self.heads:
            values: list[Any] = []
            for name in names:
                value = getattr(item, name)
                values += (value or (None, None)) if name in INTERVALS else [value]
            writer.writerow(nonfinite_to_none(values))
        if path is not None:
            write_atomic(path, buffer.getvalue().encode())
        return buffer.getvalue()

    def plot(self) -> "FigureWithData":
        """Draw the scores of all heads, layer by layer. `.save("heads.svg")` writes an image or the data."""
        from headwise.ui.figures.head_search_plot import draw_head_search

        return draw_head_search(self)

    def metric(self, name: str = "job") -> "HeadJobMetric":
        """Return a metric that scores this job on these examples, for `hw.profile(…, metrics=[…])`.

        Args:
            name: Unique name of the metric.
        """
        from headwise.analysis.finding.example_job_metric import HeadJobMetric

        if not self.examples:
            raise ArgumentError("metric: a result that was loaded from a file has no examples. Run find_heads again.")
        return HeadJobMetric(name, self.examples, self.job)

    def role(self, name: str = "job") -> "Role":
        """Return the role of heads that do this job, for `hw.profile(…, metrics=[result.metric()], roles=[result.role()])`.

        Args:
            name: Name of the role and of its metric.
        """
        from headwise.analysis.roles.roles import Role

        threshold = self.metadata["threshold"] or 0.1
        return Role(
            name, self.metric(name).score_spec, threshold, separate_family=True, is_hit_rate=self.job == "pairs"
        )

    def compare(self, other: "HeadSearchResult", *, seed: int = 0) -> list[BeforeAfterScoreDifference]:
        """Compare the scores of heads with those in another model, on the same examples, largest change first.

        Args:
            other: Result of the other model, for example the fine-tuned one.
            seed: Seed of the bootstrap and of the permutation test.
        """
        for name, label in (("job", "job"), ("examples_digest", "examples")):
            if self.metadata[name] != other.metadata[name]:
                raise ArgumentError(
                    f"other: was measured with another {label}. Run both searches with the same {label}."
                )
        before, after = (_input_scores_by_head(result) for result in (self, other))
        keys = [key for key in before if key in after]
        common = [address for address in self.metadata["addresses"] if address in other.metadata["addresses"]]
        if not common or not keys:
            raise ArgumentError(
                "other: has no heads or inputs in common with this result. Compare models of equal shape."
            )
        counts = np.array([[before[key][1]] for key in keys])
        first, second = (
            np.array([[scores[key][0][address] for address in common] for key in keys]) for scores in (before, after)
        )
        other_counts = np.array([[after[key][1]] for key in keys])
        second = second / np.where(other_counts > 0, other_counts, 1) * counts  # rows that only one tokenizer can score
        counts = np.broadcast_to(counts, first.shape)
        low, high = bootstrap_difference_interval(second, counts, first, counts, seed=seed)
        p, _ = max_t_test(
            np.concatenate((second, first), 1), np.concatenate((first, second), 1), np.concatenate((counts, counts), 1),
            seed=seed,
        )  # fmt: skip
        p = np.minimum(p[: len(common)], p[len(common) :])
        changes = [
            BeforeAfterScoreDifference(
                address, float(first[:, h].sum() / counts[:, h].sum()), float(second[:, h].sum() / counts[:, h].sum()),
                float((second - first)[:, h].sum() / counts[:, h].sum()), (float(low[h]), float(high[h])), float(p[h]),
                self[address].evidence_level, other[address].evidence_level,
            )
            for h, address in enumerate(common)
        ]  # fmt: skip
        return sorted(changes, key=lambda item: (item.change not in ("gained", "lost"), -abs(item.difference)))

    @staticmethod
    def load(path: str | Path) -> "HeadSearchResult":
        """Load a file that `to_json` wrote."""
        data = read_json(Path(path))
        try:
            if data.pop("version") != VERSION:
                raise ValueError
            units, control = data.pop("units"), _restore(data.pop("control"), BestHeadComparison)
            heads = tuple(_restore(item, JobEvidence) for item in data.pop("heads"))
            data.pop("layers")
            data.pop("supported_heads")
            scores = np.array(units["scores"], float)
            nan = np.full(scores.shape, np.nan)
            table = PerInputScores(
                tuple(units["keys"]), np.array(units["halves"]), np.array(units["counts"], float), scores, nan, nan, {},
                bool(units["bounded"]),
            )  # fmt: skip
            addresses = data["addresses"]
            if scores.shape != (len(table.keys), len(addresses)) or {item.address for item in heads} != set(addresses):
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError):
            raise FileFormatError(
                f"{path}: not a result of headwise find, damaged, or of another version. Create it with headwise find MODEL "
                f"--save FILE.json."
            ) from None
        return HeadSearchResult(data, heads, control, table)


COLUMNS = (
    "head", "evidence", "score", "95% CI", "baseline is", "baseline", "gain", "p", "value-weighted", "weight", "feature",
    "cost", "cost CI", "cost of others",
)  # fmt: skip


def _input_scores_by_head(result: HeadSearchResult) -> dict[str, tuple[dict[str, float], float]]:
    """Return the scores of each input of the reporting half, by key and head, and its number of rows."""
    table = result.table
    return {
        key: (dict(zip(result.metadata["addresses"], table.scores[i], strict=False)), float(table.counts[i]))
        for i, key in enumerate(table.keys)
        if table.halves[i] == REPORTING and table.counts[i] > 0
    }


def _cost_cells(item: JobEvidence) -> list[Any]:
    if item.cost is None or item.cost_interval is None or item.other_cost is None:
        return ["", "", ""]
    return [item.cost, _range_text(item.cost_interval), item.other_cost]


def _range_text(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.3f}–{interval[1]:.3f}" if math.isfinite(interval[0]) else ""


def _restore(item: dict[str, Any], kind: Any) -> Any:
    """Create a dataclass from JSON. None becomes NaN for numbers, and lists become tuples."""
    values = {}
    for field in fields(kind):
        value = item[field.name]
        if isinstance(value, list):
            value = tuple(float("nan") if end is None else end for end in value)
        elif value is None and "None" not in str(field.type):
            value = float("nan")
        values[field.name] = value
    return kind(**values)
