"""Page data of tested claims: result, plot and the command that reproduces it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise.experiments.run_claims import ClaimResult

REPORT_VERSION = 2  # format version of the report data


def claim_dicts(results: Iterable["ClaimResult"]) -> list[dict[str, Any]]:
    """Convert results to plain data for JSON, each with its plot."""
    return [{**result.to_dict(), "plot": _plot_data(result)} for result in results]


def claims_report_data(results: Iterable["ClaimResult"]) -> dict[str, Any]:
    """Build report data without heads, for a page that only shows claims.

    >>> report_data = claims_report_data([])
    >>> report_data["heads"], report_data["claims"]
    ([], [])
    """
    results = list(results)
    models = ", ".join(dict.fromkeys(result.model_name for result in results if result.model_name))
    return {
        "version": REPORT_VERSION,
        "model": {"name": models, "layers": [], "heads": 0},
        "metadata": {},
        "metrics": {},
        "glossary": {},
        "role_badges": {},
        "heads": [],
        "relations": None,
        "importance": None,
        "history": None,
        "curves": [],
        "plan": None,
        "claims": claim_dicts(results),
        "sentences": [],
    }


def _plot_data(result: "ClaimResult") -> dict[str, Any]:
    """Return lines if every condition is a number, otherwise bars. Missing statistics are left out."""
    plot_spec = result.claim.plot
    rows = [row for row in result.statistics.to_rows() if row["name"] in plot_spec.statistics]
    names = [name for name in plot_spec.statistics if any(row["name"] == name for row in rows)]
    points_by_name = {
        name: [
            [row["condition"], *(_number_or_none(row[column]) for column in ("mean", "low", "high"))]
            for row in rows
            if row["name"] == name
        ]
        for name in names
    }
    axes = {"x": plot_spec.x, "y": plot_spec.y}
    if rows and all(isinstance(row["condition"], int | float) for row in rows):
        log = plot_spec.log_x and all(row["condition"] > 0 for row in rows)  # 0 has no position on a log axis
        series = [
            {"name": name, "points": sorted(points, key=lambda point: point[0])}
            for name, points in points_by_name.items()
        ]
        return {**axes, "log": log, "series": series}
    bars = [
        {"name": name, "rows": [[name if at is None else str(at), *ends] for at, *ends in points]}
        for name, points in points_by_name.items()
    ]
    return {**axes, "bars": bars}


def _number_or_none(value: float | str | None) -> float | None:
    """Return None for values that cannot be plotted, such as "inf"."""
    return None if isinstance(value, str) else value
