"""Two profiles of one model in the terminal: what changed."""

from typing import Any

from rich.console import Console

from headwise.analysis.roles.profile_result import SHOWN, Profile
from headwise.ui.tables import make_table


def show_diff(before: Profile, after: Profile, rows: list[dict[str, Any]], most: int) -> None:
    """Print how many roles were won, lost and changed, and the heads that changed most."""
    console = Console()
    for name in ("texts", "tokens"):
        if before.about[name] != after.about[name]:
            told = f"measured on {before.about[name]:,} {name} before and {after.about[name]:,} after"
            console.print(told, highlight=False)
    kinds = {"won a role": 0, "lost its role": 0, "has another role": 0, "is gone": 0, "is new": 0}
    for row in rows:
        if (kind := _kind(row)) is not None:
            kinds[kind] += 1
    same = len(rows) - sum(kinds.values())
    told = [f"{count} {kind}" for kind, count in kinds.items() if count]
    console.print(f"of {len(rows)} heads {same} have the role they had" + "; ".join(["", *told]), highlight=False)
    changed = sorted(rows, key=lambda row: (_kind(row) is None, -abs(_largest(row)[1])))[:most]
    columns = ["head", "before", "after", "what moved most", "by"]
    shown = [[row["head"], _role(row, "before"), _role(row, "after"), *_largest(row)] for row in changed]
    console.print(make_table(f"The {len(shown)} heads that changed most", columns, shown))


def _kind(row: dict[str, Any]) -> str | None:
    """What happened to a head's role; None: nothing."""
    before, after = row["before"], row["after"]
    if before == after:
        return None
    if after == "absent":
        return "is gone"
    if before == "absent":
        return "is new"
    return "won a role" if before == "unclear" else "lost its role" if after == "unclear" else "has another role"


def _largest(row: dict[str, Any]) -> tuple[str, float]:
    """The measure that moved most, as a share of what it may be: of those shown, only shares of weight are alike."""
    moved = [(name, row[name]) for name in SHOWN if name in row and row[name] == row[name] and name in SHARES]
    return max(moved, key=lambda one: abs(one[1]), default=("", 0.0))


def _role(row: dict[str, Any], when: str) -> str:
    return f"{row[when]} ({row[f'rung {when}']})" if row[f"rung {when}"] not in ("", "unclear") else row[when]


SHARES = frozenset(SHOWN) - {"entropy", "distance", "participation"}
