"""Diversity of the heads of a layer."""

from typing import Any

import numpy as np

from headwise.analysis import compare_heads
from headwise.model import Transformer

ROWS = 256  # text rows on which maps are compared


def mean_head_diversity(model: Transformer, corpus: Any = None, rows: int = ROWS) -> dict[str, float]:
    """Return the mean over layers and head pairs of the map distance ("js") and of the write-subspace similarity ("write").

    Returns an empty dict if layers have a single head.
    """
    if len(model.spec.attention.head_ids) < 2:
        return {}
    within_layer = compare_heads(model, corpus, rows=rows, max_length=model.spec.context).mean_by_layer().values()
    return {name: float(np.mean([layer[name] for layer in within_layer])) for name in ("js", "write")}
