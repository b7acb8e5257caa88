"""Every claim there is, by number and by name."""

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path

from headwise.errors import HeadwiseError, close_names
from headwise.experiments.claim import Claim

FOLDER = Path(__file__).parent / "experiments" / "claims"


@cache
def all_claims() -> tuple[Claim, ...]:
    """In the order of their numbers."""
    files = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
    claims = (import_module(f"headwise.experiments.claims.{name}").CLAIM for name in files)
    return tuple(sorted(claims, key=lambda claim: claim.number))


def find_claims(names: Iterable[str] = ()) -> tuple[Claim, ...]:
    """Claims by name or number; none asked for: all.

    >>> [claim.number for claim in find_claims(["2", "same-numbers"])]
    [2, 1]
    """
    known = {claim.name: claim for claim in all_claims()}
    numbered = {str(claim.number): claim for claim in all_claims()}
    chosen = []
    for name in names:
        claim = known.get(name) or numbered.get(name)
        if claim is None:
            raise HeadwiseError(f"there is no claim {name!r}; {close_names(name, known)} `headwise claims --list`")
        chosen.append(claim)
    return tuple(dict.fromkeys(chosen)) or all_claims()
