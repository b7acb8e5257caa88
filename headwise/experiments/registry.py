"""Registry of all claims, by number and by name."""

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path

from headwise.errors import ArgumentError, suggest_names
from headwise.experiments.claim import Claim

CLAIMS_FOLDER = Path(__file__).parent / "claim_tests"


@cache
def all_claims() -> tuple[Claim, ...]:
    """Return all claims, ordered by number."""
    files = sorted(path.stem for path in CLAIMS_FOLDER.glob("*.py") if path.stem != "__init__")
    claims = (import_module(f"headwise.experiments.claim_tests.{name}").CLAIM for name in files)
    return tuple(sorted(claims, key=lambda claim: claim.number))


def find_claims(names: Iterable[str] = ()) -> tuple[Claim, ...]:
    """Return claims by name or number, or all claims if no name is given.

    >>> [claim.number for claim in find_claims(["2", "same-numbers"])]
    [2, 1]
    """
    by_name = {claim.name: claim for claim in all_claims()}
    by_number = {str(claim.number): claim for claim in all_claims()}
    selected = []
    for name in names:
        claim = by_name.get(name) or by_number.get(name)
        if claim is None:
            raise ArgumentError(
                f"claim {name!r} does not exist: {suggest_names(name, by_name)} Run `headwise claims --list` for all names."
            )
        selected.append(claim)
    return tuple(dict.fromkeys(selected)) or all_claims()
