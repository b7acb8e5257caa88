"""Result of `find_circuit`: a circuit, its held-out evaluation, and an alternative circuit. Plain data.

Names of nodes are texts: `18.6` a query head, `18.kv2` a KV head (its own node in grouped-query models), `mlp.18` an MLP, and
`embedding` (see `headwise.spec.parse_node`). Edges name the receiver: `18.6.q`, `18.kv2.k`, `18.kv2.v`, `mlp.18` or `logits`.

Faithfulness of a set of nodes C is F(C) = (m(C) − m(∅)) / (m(M) − m(∅)): m is the mean metric over prompts, M the full model,
and all nodes outside C have their value on the corrupted prompt (or their mean, or zero). The full model has F = 1, and the
model with all nodes replaced has F = 0. Intervals come from a bootstrap over templates, not over single prompts.
"""

import csv
import json
import math
from dataclasses import asdict, dataclass, fields
from io import StringIO
from pathlib import Path
from typing import Any

from headwise.errors import ArgumentError, FileFormatError
from headwise.io.atomic_write import write_atomic
from headwise.io.json_values import nonfinite_to_none
from headwise.io.resolve_path import read_json
from headwise.spec import Address, EmbeddingOrLogitsAddress, KVAddress, MLPAddress, parse_node

VERSION = 1


@dataclass(frozen=True)
class CircuitEstimate:
    """A number with its 95% interval over templates.

    Attributes:
        value: The number.
        low: Lower end of the interval. NaN if it cannot be computed.
        high: Upper end of the interval.
    """

    value: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        interval = f" [{self.low:.2f}, {self.high:.2f}]" if math.isfinite(self.low) else ""
        return f"{self.value:.2f}{interval}"


@dataclass(frozen=True)
class NodeScore:
    """One node of the model.

    Attributes:
        node: Name of the node.
        kind: "head", "kv", "mlp" or "embedding".
        layer: Number of its layer. −1 for the embedding.
        score: Effect by the chosen ranking on the score split. Exact: metric of the model minus the metric with this node
            replaced.
        exact: Effect by exact patching. None if it was not measured.
        stability: Share of bootstrap discoveries of this size that contain the node.
        example: Prompt of the score split on which the node has the largest effect. Empty for learned gates.
        example_effect: Effect of the node on that prompt.
    """

    node: str
    kind: str
    layer: int
    score: float
    exact: float | None
    stability: float
    example: str = ""
    example_effect: float = math.nan


@dataclass(frozen=True)
class FaithfulnessPoint:
    """Faithfulness of the circuit with the best-ranked nodes.

    Attributes:
        size: Number of nodes.
        faithfulness: F with its interval.
    """

    size: int
    faithfulness: CircuitEstimate


@dataclass(frozen=True)
class FaithfulnessCurve:
    """Faithfulness over sizes on the judged prompts, for one ablation.

    Attributes:
        ablation: Replacement of the nodes outside the circuit: "resample", "mean" or "zero".
        points: Points by size.
        cpr: Area under F over the fraction of nodes (MIB's circuit performance ratio, https://arxiv.org/abs/2504.13151).
        cmd: Area between F and 1 over the fraction of nodes (MIB's circuit-model distance).
        log_cpr: The area under F over the logarithm of the fraction, divided by the length of that axis.
        log_cmd: The area between F and 1 over the logarithm of the fraction, divided by the length of that axis.
    """

    ablation: str
    points: tuple[FaithfulnessPoint, ...]
    cpr: CircuitEstimate
    cmd: CircuitEstimate
    log_cpr: CircuitEstimate
    log_cmd: CircuitEstimate


@dataclass(frozen=True)
class RandomSetTest:
    """Comparison of a circuit with random sets that have as many nodes of each kind in each layer.

    Attributes:
        faithfulness: F of each random set on the judged prompts, resample ablation.
        p_value: (b + 1) / (B + 1), where b of B random sets reach F of the circuit.
        adjusted_p: The p-value after the Holm correction for the circuit and its alternative.
        above_mean: F of the circuit minus the mean F of the random sets, with its interval.
        shared: Mean share of the circuit's nodes that a random set contains. MLPs and embeddings are in every set.
    """

    faithfulness: tuple[float, ...]
    p_value: float
    adjusted_p: float
    above_mean: CircuitEstimate
    shared: float


@dataclass(frozen=True)
class FaithfulnessDrop:
    """Loss of faithfulness if one member is removed from a circuit.

    Attributes:
        node: Name of the node.
        drop: F of the circuit minus F without the node.
    """

    node: str
    drop: CircuitEstimate


@dataclass(frozen=True)
class CircuitEvaluation:
    """Evaluation of one circuit under one ablation, on the judged prompts.

    Attributes:
        ablation: "resample", "mean" or "zero".
        faithfulness: F of the circuit alone.
        completeness: F of the model without the circuit. 0 means that nothing outside the circuit does the task.
    """

    ablation: str
    faithfulness: CircuitEstimate
    completeness: CircuitEstimate


@dataclass(frozen=True)
class EvaluatedCircuit:
    """A set of nodes and its evaluation on the judged prompts.

    Attributes:
        nodes: Names of the nodes, best first.
        effects: Faithfulness and completeness, for resample, mean and zero ablation.
        random_sets: Comparison with random sets. None if no random sets were requested.
        drops: Minimality: the drop of each member, largest first. Empty if it was not measured.
    """

    nodes: tuple[str, ...]
    effects: tuple[CircuitEvaluation, ...]
    random_sets: RandomSetTest | None = None
    drops: tuple[FaithfulnessDrop, ...] = ()

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @property
    def heads(self) -> tuple[str, ...]:
        """Addresses of the query heads of the circuit, best first."""
        return tuple(node for node in self.nodes if node_kind(node) == "head")

    def effect(self, ablation: str = "resample") -> CircuitEvaluation:
        """Return the evaluation under one ablation.

        Args:
            ablation: "resample", "mean" or "zero".
        """
        for item in self.effects:
            if item.ablation == ablation:
                return item
        measured = ", ".join(item.ablation for item in self.effects)
        raise ArgumentError(f"ablation={ablation!r}: was not measured. Measured: {measured}.")


@dataclass(frozen=True)
class RankingCheck:
    """Comparison of a gradient-based ranking with exact patching, on the score split.

    Attributes:
        correlation: Pearson correlation over the checked nodes.
        top_nodes: Number of checked nodes from the top of the ranking.
        random_nodes: Number of checked nodes drawn at random from the others.
        worst_node: Node with the largest difference.
        worst_score: Its score by the ranking.
        worst_exact: Its exact effect.
    """

    correlation: float
    top_nodes: int
    random_nodes: int
    worst_node: str
    worst_score: float
    worst_exact: float


@dataclass(frozen=True)
class CircuitExample:
    """A judged prompt.

    Attributes:
        clean: The prompt.
        corrupted: Its corrupted version.
        right: Right answers.
        wrong: Wrong answers.
        template: Template of the prompt.
        clean_metric: Metric of the model on the prompt.
        corrupted_metric: Metric with all nodes replaced.
        circuit_metric: Metric of the circuit alone.
    """

    clean: str
    corrupted: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]
    template: str
    clean_metric: float
    corrupted_metric: float
    circuit_metric: float


@dataclass(frozen=True)
class EdgeEffect:
    """Direct effect of one node on another.

    Attributes:
        sender: Node that writes.
        receiver: Reader: `18.6.q`, `18.kv2.k`, `18.kv2.v`, `mlp.18` or `logits`.
        effect: Metric of the model minus the metric if only this edge carries the corrupted value.
        example: Judged prompt on which the edge has the largest effect.
        example_effect: Effect of the edge on that prompt.
    """

    sender: str
    receiver: str
    effect: CircuitEstimate
    example: str = ""
    example_effect: float = math.nan


@dataclass(frozen=True)
class CircuitSettings:
    """Settings and counts of a search.

    Attributes:
        task: Name of the task.
        model: Description of the model.
        metric: Description of the metric.
        ranking: "exact", "attribution", "eap-ig" or "gates".
        size_rule: How the size was chosen.
        target: Faithfulness that the size must reach on the size split.
        prompts: Number of prompts of the score, size and judge splits.
        templates: Number of templates of the three splits.
        nodes: Number of nodes of the model.
        seed: Seed.
    """

    task: str
    model: str
    metric: str
    ranking: str
    size_rule: str
    target: float
    prompts: tuple[int, int, int]
    templates: tuple[int, int, int]
    nodes: int
    seed: int


@dataclass(frozen=True, repr=False)
class CircuitResult:
    """A circuit with its evaluation on prompts that chose neither its nodes nor its size.

    Attributes:
        settings: Settings and counts.
        accuracy: Share of all prompts that the model answers correctly. None for a metric of the user.
        clean_metric: Mean metric of the model on the judged prompts.
        corrupted_metric: Mean metric with all nodes replaced by their value on the corrupted prompts.
        scores: All nodes, in the order of the ranking.
        circuit: The circuit.
        alternative: The circuit that is found if the heads of the circuit are excluded. None if it was not requested.
        curves: Faithfulness over sizes, for each ablation.
        size_points: Faithfulness over sizes on the size split, on which the size is chosen.
        check: Comparison of the ranking with exact patching. None if the ranking is exact.
        examples: The judged prompts.
        edges: Effects between nodes. Empty unless they were measured.
        notes: Limits of this result, such as a target that no size reaches.
    """

    settings: CircuitSettings
    accuracy: float | None
    clean_metric: float
    corrupted_metric: float
    scores: tuple[NodeScore, ...]
    circuit: EvaluatedCircuit
    alternative: EvaluatedCircuit | None = None
    curves: tuple[FaithfulnessCurve, ...] = ()
    size_points: tuple[FaithfulnessPoint, ...] = ()
    check: RankingCheck | None = None
    examples: tuple[CircuitExample, ...] = ()
    edges: tuple[EdgeEffect, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def heads(self) -> tuple[str, ...]:
        """Addresses of the query heads of the circuit, best first."""
        return self.circuit.heads

    def __repr__(self) -> str:
        from headwise.ui.circuit_text import circuit_text

        return circuit_text(self)

    def _repr_html_(self) -> str:
        from headwise.ui.circuit_page import circuit_html

        return circuit_html(self)

    def report(self, path: str | Path) -> Path:
        """Write a self-contained page: the graph by layers, faithfulness over sizes, and all tables.

        Args:
            path: Output file, such as `circuit.html`.
        """
        from headwise.ui.circuit_page import write_circuit_page

        return write_circuit_page(self, path)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON. Numbers that are not finite become None."""
        return {"version": VERSION, **nonfinite_to_none(asdict(self))}

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the result as JSON, and write it to a file if a path is given. `CircuitResult.from_json` reads it.

        Args:
            path: Output file.
        """
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            write_atomic(path, text.encode())
        return text

    @staticmethod
    def from_json(path: str | Path) -> "CircuitResult":
        """Load a file that `to_json` wrote.

        Args:
            path: The file.
        """
        data = read_json(Path(path))
        try:
            if data.pop("version") != VERSION:
                raise ValueError
            return _restore(data, CircuitResult)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise FileFormatError(
                f"{path}: not a result of headwise circuit, damaged, or of another version. Create it with headwise circuit "
                f"MODEL TASK --save FILE.json."
            ) from None

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return one line per node as CSV, and write it to a file if a path is given.

        Args:
            path: Output file.
        """
        buffer = StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        names = [field.name for field in fields(NodeScore)]
        writer.writerow([*names, "in_circuit", "in_alternative", "drop", "drop_low", "drop_high"])
        drops = {item.node: item.drop for item in self.circuit.drops}
        members = set(self.circuit.nodes)
        others = set(() if self.alternative is None else self.alternative.nodes)
        for item in self.scores:
            drop = drops.get(item.node)
            values = [None] * 3 if drop is None else [drop.value, drop.low, drop.high]
            row = [*(getattr(item, name) for name in names), item.node in members, item.node in others, *values]
            writer.writerow(nonfinite_to_none(row))
        if path is not None:
            write_atomic(path, buffer.getvalue().encode())
        return buffer.getvalue()


def node_kind(node: str) -> str:
    """Return the kind of a node by its name.

    >>> [node_kind(node) for node in ("18.6", "18.kv2", "mlp.18", "embedding")]
    ['head', 'kv', 'mlp', 'embedding']
    """
    kinds = {Address: "head", KVAddress: "kv", MLPAddress: "mlp", EmbeddingOrLogitsAddress: "embedding"}
    kind = kinds.get(type(parse_node(node)))
    if kind is None or node == "logits":
        raise ArgumentError(f"{node}: not a node of a circuit. Use 18.6, 18.kv2, mlp.18 or embedding.")
    return kind


# Dataclasses of fields with nested records: one record, or a list of records.
_RECORDS: dict[str, type] = {
    "settings": CircuitSettings,
    "scores": NodeScore,
    "circuit": EvaluatedCircuit,
    "alternative": EvaluatedCircuit,
    "curves": FaithfulnessCurve,
    "points": FaithfulnessPoint,
    "size_points": FaithfulnessPoint,
    "check": RankingCheck,
    "examples": CircuitExample,
    "edges": EdgeEffect,
    "effects": CircuitEvaluation,
    "random_sets": RandomSetTest,
    "drops": FaithfulnessDrop,
}


def _restore(data: dict[str, Any], kind: Any) -> Any:
    """Create a dataclass from JSON: nested records by field, None to NaN for numbers, lists to tuples."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        value = data[field.name]
        record = _RECORDS.get(field.name)
        if record is None and isinstance(value, dict):
            record = CircuitEstimate
        if value is None and "None" not in str(field.type):
            value = math.nan
        if isinstance(value, list):
            value = tuple(
                _restore(item, record) if record and isinstance(item, dict) else _from_json_value(item)
                for item in value
            )
        elif record is not None and isinstance(value, dict):
            value = _restore(value, record)
        values[field.name] = value
    return kind(**values)


def _from_json_value(value: Any) -> Any:
    """Return an item of a list: lists become tuples, None becomes NaN."""
    return tuple(value) if isinstance(value, list) else math.nan if value is None else value
