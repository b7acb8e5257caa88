"""Values of JSON files."""

import math
from typing import Any


def nonfinite_to_none(value: Any) -> Any:
    """Replace NaN and infinity with None, which JSON can store. Tuples become lists.

    >>> nonfinite_to_none({"values": (1.0, float("nan")), "low": float("-inf")})
    {'values': [1.0, None], 'low': None}
    """
    if isinstance(value, dict):
        return {name: nonfinite_to_none(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [nonfinite_to_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
