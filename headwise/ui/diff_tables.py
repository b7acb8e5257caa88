"""Two profiles of one model in the terminal: what changed."""

from typing import Any

from rich.console import Console

from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.profile_tables import DEFAULT_COLUMNS
from headwise.ui.terminal_table import make_table


def show_diff(before: Profile, after: Profile, rows: list[dict[str, Any]], max_rows: int) -> None:
    """Print how many roles were won, lost and changed, and the heads that changed most."""
    console = Console()
    for name in ("texts", "tokens"):
        if before.metadata[name] != after.metadata[name]:
            description = f"measured on {before.metadata[name]:,} {name} before and {after.metadata[name]:,} after"
            console.print(description, highlight=False)
    counts = {"won a role": 0, "lost its role": 0, "has another role": 0, "is gone": 0, "is new": 0}
    for row in rows:
        if (change := _role_change(row)) is not None:
            counts[change] += 1
    num_unchanged = len(rows) - sum(counts.values())
    description = [f"{count} {change}" for change, count in counts.items() if count]
    console.print(
        f"of {len(rows)} heads {num_unchanged} have the role they had" + "; ".join(["", *description]), highlight=False
    )
    changed = sorted(rows, key=lambda row: (_role_change(row) is None, -abs(_largest_change(row)[1])))[:max_rows]
    columns = ["head", "before", "after", "what moved most", "by"]
    table_rows = [
        [row["head"], _format_role(row, "before"), _format_role(row, "after"), *_largest_change(row)] for row in changed
    ]
    console.print(make_table(f"The {len(table_rows)} heads that changed most", columns, table_rows))


def _role_change(row: dict[str, Any]) -> str | None:
    """What happened to a head's role; None: nothing."""
    before, after = row["before"], row["after"]
    if before == after:
        return None
    if after == "absent":
        return "is gone"
    if before == "absent":
        return "is new"
    return "won a role" if before == "unclear" else "lost its role" if after == "unclear" else "has another role"


def _largest_change(row: dict[str, Any]) -> tuple[str, float]:
    """The metric that moved most, as a share of what it may be: of those shown, only shares of weight are alike."""
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
