"""Claims that were put to the test, as the page shows them: what was found, what is drawn of it, how to do it again."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise.experiments.run import Result

VERSION = 1  # of the book


def tell(results: Iterable["Result"]) -> list[dict[str, Any]]:
    """Each result as plain data, ready for JSON, with its picture."""
    return [{**result.to_dict(), "picture": _picture(result)} for result in results]


def claims_book(results: Iterable["Result"]) -> dict[str, Any]:
    """A book without heads, for a page of claims alone.

    >>> book = claims_book([])
    >>> book["heads"], book["claims"]
    ([], [])
    """
    results = list(results)
    models = ", ".join(dict.fromkeys(result.on for result in results if result.on))
    return {
        "version": VERSION,
        "model": {"name": models, "layers": [], "heads": 0},
        "about": {},
        "measures": {},
        "words": {},
        "signs": {},
        "heads": [],
        "relations": None,
        "importance": None,
        "history": None,
        "curves": [],
        "plan": None,
        "claims": tell(results),
        "sentences": [],
    }


def _picture(result: "Result") -> dict[str, Any]:
    """Lines where every figure that is drawn was measured at a number, else bars; what was not measured is left out."""
    asked = result.claim.picture
    rows = [row for row in result.figures.to_rows() if row["name"] in asked.figures]
    names = [name for name in asked.figures if any(row["name"] == name for row in rows)]
    drawn = {
        name: [
            [row["at"], *(_number(row[what]) for what in ("mean", "low", "high"))]
            for row in rows
            if row["name"] == name
        ]
        for name in names
    }
    axes = {"x": asked.x, "y": asked.y}
    if rows and all(isinstance(row["at"], int | float) for row in rows):
        log = asked.log and all(row["at"] > 0 for row in rows)  # nothing has a place at 0 on such an axis
        series = [
            {"name": name, "points": sorted(points, key=lambda point: point[0])} for name, points in drawn.items()
        ]
        return {**axes, "log": log, "series": series}
    bars = [
        {"name": name, "rows": [[name if at is None else str(at), *ends] for at, *ends in points]}
        for name, points in drawn.items()
    ]
    return {**axes, "bars": bars}


def _number(value: float | str | None) -> float | None:
    """What has no place in a picture, as inf, is not there."""
    return None if isinstance(value, str) else value
