"""Terminal table of the differences between two profiles of a model."""

from typing import Any

from rich.console import Console

from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.profile_tables import DEFAULT_COLUMNS
from headwise.ui.terminal_table import make_table


def show_diff(before: Profile, after: Profile, rows: list[dict[str, Any]], max_rows: int) -> None:
    """Print the numbers of gained, lost and changed roles, and the heads with the largest changes."""
    console = Console()
    for name in ("texts", "tokens"):
        if before.metadata[name] != after.metadata[name]:
            description = f"Measured on {before.metadata[name]:,} {name} before and {after.metadata[name]:,} after"
            console.print(description, highlight=False)
    counts = {"gained a role": 0, "lost the role": 0, "changed the role": 0, "removed": 0, "added": 0}
    for row in rows:
        if (change := _role_change(row)) is not None:
            counts[change] += 1
    num_unchanged = len(rows) - sum(counts.values())
    description = [f"{count} {change}" for change, count in counts.items() if count]
    console.print(
        f"{num_unchanged} of {len(rows)} heads have the same role" + "; ".join(["", *description]), highlight=False
    )
    changed = sorted(rows, key=lambda row: (_role_change(row) is None, -abs(_largest_change(row)[1])))[:max_rows]
    columns = ["head", "role before", "role after", "metric with the largest change", "change"]
    table_rows = [
        [row["head"], _format_role(row, "before"), _format_role(row, "after"), *_largest_change(row)] for row in changed
    ]
    console.print(make_table(f"The {len(table_rows)} heads with the largest changes", columns, table_rows))


def _role_change(row: dict[str, Any]) -> str | None:
    """Return the change of the role of a head, or None if it is unchanged."""
    before, after = row["before"], row["after"]
    if before == after:
        return None
    if after == "absent":
        return "removed"
    if before == "absent":
        return "added"
    return "gained a role" if before == "unclear" else "lost the role" if after == "unclear" else "changed the role"


def _largest_change(row: dict[str, Any]) -> tuple[str, float]:
    """Return the metric with the largest change. Only fractions of attention are compared, as they share a scale."""
    changes = [
        (name, row[name])
        for name in DEFAULT_COLUMNS
        if name in row and row[name] == row[name] and name in FRACTION_METRICS
    ]
    return max(changes, key=lambda change: abs(change[1]), default=("", 0.0))


def _format_role(row: dict[str, Any], when: str) -> str:
    level = row[f"evidence_level {when}"]
    return f"{row[when]} ({level})" if level not in ("", "none") else row[when]


FRACTION_METRICS = frozenset(DEFAULT_COLUMNS) - {"entropy", "distance", "participation"}
