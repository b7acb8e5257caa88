"""How far apart the heads of a layer are."""

from typing import Any

import numpy as np

from headwise.analysis import compare_heads
from headwise.model import Transformer

ROWS = 256  # of text, on which maps are compared


def head_diversity(model: Transformer, corpus: Any = None, rows: int = ROWS) -> dict[str, float]:
    """Over pairs of heads of a layer, then over layers: how far their maps are apart, how far they write to the same space.

    Nothing for layers of one head, which differs from none.
    """
    if len(model.spec.attention.head_ids) < 2:
        return {}
    within_layer = compare_heads(model, corpus, rows=rows, max_length=model.spec.context).mean_by_layer().values()
    return {name: float(np.mean([layer[name] for layer in within_layer])) for name in ("js", "write")}
