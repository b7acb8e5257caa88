"""Positions of the nodes of a circuit in a drawing: layers from bottom to top, heads in columns by number."""

from collections.abc import Sequence
from dataclasses import dataclass

from headwise.analysis.circuits.circuit_result import CircuitResult, EdgeEffect, node_kind

OUTPUT = "logits"


@dataclass(frozen=True)
class NodePosition:
    """A node of a drawing.

    Attributes:
        node: Name of the node.
        kind: "head", "kv", "mlp", "embedding" or "logits".
        column: Column, from the left.
        row: Row, from the bottom.
    """

    node: str
    kind: str
    column: int
    row: int


@dataclass(frozen=True)
class CircuitLayout:
    """Nodes with their positions, and the labels of the rows.

    Attributes:
        nodes: Placed nodes by name.
        rows: Label of each row, from the bottom.
        columns: Number of columns.
    """

    nodes: dict[str, NodePosition]
    rows: tuple[str, ...]
    columns: int


def place_nodes(result: CircuitResult) -> CircuitLayout:
    """Place the members of the circuit and the logits. Only rows and columns with members are kept.

    Args:
        result: The result.
    """
    layers = {item.node: item.layer for item in result.scores}
    members = sorted(result.circuit.nodes, key=lambda node: (_row_key(node, layers[node]), _node_order_key(node)))
    row_keys = sorted({_row_key(node, layers[node]) for node in members})
    column_keys = sorted({_node_order_key(node) for node in members if node_kind(node) in ("kv", "head")})
    has_mlp = any(node_kind(node) == "mlp" for node in members)
    columns = max(1, len(column_keys) + has_mlp)
    placed = {}
    for node in members:
        kind = node_kind(node)
        key = _node_order_key(node)
        column = columns - 1 if kind == "mlp" else columns // 2 if kind == "embedding" else column_keys.index(key)
        placed[node] = NodePosition(node, kind, column, row_keys.index(_row_key(node, layers[node])))
    placed[OUTPUT] = NodePosition(OUTPUT, OUTPUT, columns // 2, len(row_keys))
    labels = [_row_label(*key) for key in row_keys]
    return CircuitLayout(placed, (*labels, "output"), columns)


def drawn_edges(result: CircuitResult) -> list[tuple[str, str, EdgeEffect]]:
    """Return sender, receiving node and effect of each edge whose interval excludes 0, largest first."""
    edges = []
    for edge in result.edges:
        if edge.effect.low <= 0 <= edge.effect.high:
            continue
        receiver = edge.receiver
        if receiver.rpartition(".")[2] in ("q", "k", "v"):
            receiver = receiver.rpartition(".")[0]
        edges.append((edge.sender, receiver, edge))
    return edges


def names_input(edge: EdgeEffect) -> str:
    """Return the input that an edge enters: queries, keys, values, or empty for MLPs and logits."""
    return {"q": "queries", "k": "keys", "v": "values"}.get(edge.receiver.rpartition(".")[2], "")


def largest_effect(edges: Sequence[tuple[str, str, EdgeEffect]]) -> float:
    """Return the largest absolute effect, at least a tiny positive number."""
    return max((abs(edge.effect.value) for _, _, edge in edges), default=0.0) or 1.0


def _row_key(node: str, layer: int) -> tuple[int, int]:
    return layer, int(node_kind(node) == "mlp")


def _node_order_key(node: str) -> tuple[int, int]:
    """Return a sort key: KV heads before query heads, by number."""
    number = node.rpartition(".")[2].removeprefix("kv")
    return int("kv" not in node), int(number) if number.isdigit() else -1


def _row_label(layer: int, is_mlp: int) -> str:
    return "embedding" if layer < 0 else f"MLP {layer}" if is_mlp else f"layer {layer}"
