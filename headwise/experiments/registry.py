"""Every claim there is, by number and by name."""

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path

from headwise.errors import HeadwiseError, suggest_names
from headwise.experiments.claim import Claim

CLAIMS_FOLDER = Path(__file__).parent / "claim_tests"


@cache
def all_claims() -> tuple[Claim, ...]:
    """In the order of their numbers."""
    files = sorted(path.stem for path in CLAIMS_FOLDER.glob("*.py") if path.stem != "__init__")
    claims = (import_module(f"headwise.experiments.claim_tests.{name}").CLAIM for name in files)
    return tuple(sorted(claims, key=lambda claim: claim.number))


def find_claims(names: Iterable[str] = ()) -> tuple[Claim, ...]:
    """Claims by name or number; none asked for: all.

    >>> [claim.number for claim in find_claims(["2", "same-numbers"])]
    [2, 1]
    """
    by_name = {claim.name: claim for claim in all_claims()}
    by_number = {str(claim.number): claim for claim in all_claims()}
    selected = []
    for name in names:
        claim = by_name.get(name) or by_number.get(name)
        if claim is None:
            raise HeadwiseError(f"there is no claim {name!r}; {suggest_names(name, by_name)} `headwise claims --list`")
        selected.append(claim)
    return tuple(dict.fromkeys(selected)) or all_claims()
