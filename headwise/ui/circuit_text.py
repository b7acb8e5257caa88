"""Text of a circuit result: sentences and tables for the terminal."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headwise.ui.terminal_table import TextTable, make_table

if TYPE_CHECKING:
    from headwise.analysis.circuits.circuit_result import CircuitResult, EvaluatedCircuit

MAX_NODES = 20  # nodes listed one by one
MAX_NAMES = 24  # nodes in a sentence


def circuit_parts(result: "CircuitResult", max_rows: int = MAX_NODES) -> Iterator[TextTable | str]:
    """Yield the sentences and tables of a result.

    Args:
        result: The result.
        max_rows: Maximum number of nodes in the table.
    """
    yield from _summary(result)
    yield member_table(result, max_rows)
    yield faithfulness_by_ablation_table(result)
    yield curve_area_table(result)
    if result.edges:
        yield edge_table(result, max_rows)
    if result.check is not None:
        yield ranking_check_text(result)
    yield from (f"Note: {note}" for note in result.notes)


def circuit_text(result: "CircuitResult") -> str:
    """Return the sentences of a result with its nodes, without tables."""
    lines = [*_summary(result), *(f"Note: {note}" for note in result.notes)]
    return "\n".join(
        [*lines, 'More: result.circuit, .alternative, .scores, .curves, .to_json("circuit.json"), .to_csv()']
    )


def _summary(result: "CircuitResult") -> Iterator[str]:
    yield from (f"{name:<15}{value}" if name else value for name, value in summary_rows(result))


def summary_rows(result: "CircuitResult") -> list[tuple[str, str]]:
    """Return name and text of each statement. The first, without a name, is the title."""
    settings, effect = result.settings, result.circuit.effect()
    accuracy = "" if result.accuracy is None else f", right on {result.accuracy:.0%} of {sum(settings.prompts)} prompts"
    judged = f"{settings.prompts[2]} judged prompts of {settings.templates[2]} templates"
    rows = [
        ("", f"Circuit of {settings.task!r} in {settings.model}{accuracy}"),
        ("size", f"{result.circuit.size} of {settings.nodes} nodes ({settings.size_rule})"),
        ("nodes", names_text(result.circuit.nodes)),
        ("faithfulness", f"{effect.faithfulness} on {judged}"),
        ("random sets", random_text(result.circuit)),
        ("completeness", f"{effect.completeness} without the circuit (0: nothing else does the task)"),
    ]
    drops = result.circuit.drops
    if drops:
        needed, smallest = sum(item.drop.low > 0 for item in drops), drops[-1]
        rows.append(
            (
                "minimality",
                f"{needed} of {len(drops)} members have a drop above 0; smallest: {smallest.node} {smallest.drop}",
            )
        )
    rows.append(("stability", stability_text(result)))
    other = result.alternative
    if other is None:
        return [*rows, ("alternative", "not searched")]
    shared = len(set(other.nodes) & set(result.circuit.nodes))
    text = (
        f"{other.size} nodes without the heads of the circuit ({shared} shared): faithfulness "
        f"{other.effect().faithfulness}; random sets {random_text(other)}"
    )
    return [*rows, ("alternative", text)]


def ranking_check_text(result: "CircuitResult") -> str:
    """Return the comparison of the ranking with exact patching. Empty if the ranking is exact."""
    check = result.check
    if check is None:
        return ""
    return (
        f"Ranking against exact patching on {check.top_nodes} top and {check.random_nodes} random nodes: correlation "
        f"{check.correlation:.2f}. Worst miss: {check.worst_node}, {check.worst_score:+.3f} by {result.settings.ranking}, "
        f"{check.worst_exact:+.3f} exact."
    )


def names_text(names: tuple[str, ...]) -> str:
    """Return the names of nodes, at most 24."""
    more = f", … {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def random_text(circuit: "EvaluatedCircuit") -> str:
    """Return the comparison with random sets."""
    test = circuit.random_sets
    if test is None:
        return "none requested"
    low, high = min(test.faithfulness), max(test.faithfulness)
    return (
        f"{len(test.faithfulness)} matched by size, kind and layer: F {low:.2f} to {high:.2f}, p = {test.p_value:.2f} "
        f"({test.adjusted_p:.2f} corrected), {test.shared:.0%} of the nodes shared"
    )


def stability_text(result: "CircuitResult") -> str:
    """Return how many members are in all, some and no bootstrap discoveries."""
    shares = {item.node: item.stability for item in result.scores}
    if any(math.isnan(value) for value in shares.values()):
        return "not available for learned gates"
    members = [shares[node] for node in result.circuit.nodes]
    others = [value for node, value in shares.items() if node not in result.circuit.nodes]
    return (
        f"{sum(value > 1 - 1e-9 for value in members)} of {len(members)} members are in all bootstrap discoveries; "
        f"{sum(value > 1e-9 for value in others)} other nodes are in at least one"
    )


def member_table(result: "CircuitResult", max_rows: int = MAX_NODES) -> TextTable:
    """Return the members with score, drop and stability, best first."""
    scores = {item.node: item for item in result.scores}
    drops = {item.node: item.drop for item in result.circuit.drops}
    rows = [
        (
            node, scores[node].kind, scores[node].score, str(drops[node]) if node in drops else "",
            "" if math.isnan(scores[node].stability) else f"{scores[node].stability:.0%}",
        )
        for node in result.circuit.nodes[:max_rows]
    ]  # fmt: skip
    title = f"Members, best first ({min(max_rows, result.circuit.size)} of {result.circuit.size})"
    return make_table(title, ("node", "kind", "score", "drop of F without it", "in discoveries"), rows)


def faithfulness_by_ablation_table(result: "CircuitResult") -> TextTable:
    """Return faithfulness and completeness of both circuits under each ablation."""
    rows = [
        (label, item.ablation, str(item.faithfulness), str(item.completeness))
        for label, circuit in (("circuit", result.circuit), ("alternative", result.alternative))
        if circuit is not None
        for item in circuit.effects
    ]
    return make_table(
        "Ablations side by side, judged prompts", ("nodes", "ablation", "faithfulness", "completeness"), rows
    )


def curve_area_table(result: "CircuitResult") -> TextTable:
    """Return CPR and CMD under each ablation."""
    rows = [
        (curve.ablation, str(curve.cpr), str(curve.cmd), str(curve.log_cpr), str(curve.log_cmd))
        for curve in result.curves
    ]
    return make_table(
        "Areas under faithfulness over sizes", ("ablation", "CPR", "CMD", "CPR, log size", "CMD, log size"), rows
    )


def edge_table(result: "CircuitResult", max_rows: int = MAX_NODES) -> TextTable:
    """Return the largest edges between members."""
    rows = [(edge.sender, edge.receiver, str(edge.effect)) for edge in result.edges[:max_rows]]
    title = f"Edges, largest first ({len(rows)} of {len(result.edges)}), exact path patching, judged prompts"
    return make_table(title, ("from", "to", "effect"), rows)
