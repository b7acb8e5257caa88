"""Claims that were put to the test, as the page shows them: what was found, what is drawn of it, how to do it again."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise.experiments.run_claims import ClaimResult

REPORT_VERSION = 2  # of the report data


def claim_dicts(results: Iterable["ClaimResult"]) -> list[dict[str, Any]]:
    """Each result as plain data, ready for JSON, with its plot."""
    return [{**result.to_dict(), "plot": _plot_data(result)} for result in results]


def claims_report_data(results: Iterable["ClaimResult"]) -> dict[str, Any]:
    """Report data without heads, for a page of claims alone.

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
    """Lines where every figure that is drawn was measured at a number, else bars; what was not measured is left out."""
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
        log = plot_spec.log_x and all(row["condition"] > 0 for row in rows)  # nothing has a place at 0 on such an axis
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
    """What has no place in a picture, as inf, is not there."""
    return None if isinstance(value, str) else value
