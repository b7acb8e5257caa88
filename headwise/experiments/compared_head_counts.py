"""Head counts that claims compare, and the trend of a quantity over them."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

HEAD_COUNTS = (1, 2, 4, 8, 16, 32, 64)


def head_counts(width: int, min_heads: int = 1) -> list[int]:
    """Return the powers of two up to 64 that divide the width.

    >>> head_counts(16, min_heads=2)
    [2, 4, 8, 16]
    """
    return [heads for heads in HEAD_COUNTS if heads >= min_heads and width % heads == 0]


def fit_log2_slopes(values: Mapping[int, Sequence[float]]) -> list[float]:
    """Return the least-squares slope per doubling of the condition, one per seed.

    >>> fit_log2_slopes({1: [3.0], 2: [5.0], 4: [7.0]})
    [2.0]
    """
    x = [math.log2(condition) for condition in values]
    return [round(float(np.polyfit(x, seed_values, 1)[0]), 9) for seed_values in zip(*values.values(), strict=True)]
