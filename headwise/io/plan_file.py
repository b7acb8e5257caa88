"""Plans in files. `Plan.save` and `Plan.load` call these functions."""

from pathlib import Path

from headwise.io.atomic_write import write_atomic
from headwise.io.resolve_path import read_text
from headwise.spec import Plan


def save_plan(plan: Plan, path: str | Path) -> Path:
    """Write a plan to a JSON file. On an error the file is unchanged."""
    return write_atomic(path, plan.to_json().encode())


def load_plan(path: str | Path) -> Plan:
    """Read a plan from a JSON file."""
    return Plan.from_json(read_text(Path(path)))
