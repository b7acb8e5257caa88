"""Circuits of programs that a compiler turned into checkpoints: true nodes and edges are those of its schedule."""

from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("torchwright") is None or find_spec("ortools") is None, reason="needs torchwright: make truth"
)
@pytest.mark.parametrize("task", ["recent B", "offset"])
def test_exact_patching_finds_nodes_and_edges_of_a_compiled_program(task: str, tmp_path: Path) -> None:
    from bench.compiled_circuits import circuit_counts
    from bench.compiled_programs import compile_program

    counts = circuit_counts(tmp_path, compile_program(8300, tmp_path), task, 8300)
    for name, (hits, reported, expected) in counts.items():
        assert hits >= 0.95 * max(reported, expected), name
