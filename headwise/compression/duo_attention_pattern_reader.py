"""Read attention patterns in the format that DuoAttention publishes: a score per layer and KV head (.tsv).

A score near 1 means that the KV head needs all tokens, near 0 that it may stream (https://arxiv.org/abs/2410.10819).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import ArgumentError, FileFormatError
from headwise.io.resolve_path import read_json
from headwise.spec import Address

MAX_BYTES = 1 << 24
CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class PatternFileScores:
    """Scores of KV heads from a file.

    Attributes:
        scores: Scores by layer and KV head.
        sink_tokens: Sink tokens of a streaming head, from the configuration next to the file. None if there is none.
        window: Window of a streaming head, from the configuration next to the file. None if there is none.
    """

    scores: tuple[tuple[float, ...], ...]
    sink_tokens: int | None = None
    window: int | None = None

    def scores_of(self, heads: tuple[Address, ...]) -> dict[Address, float]:
        """Return the score of each KV head of a model; raise if the pattern is for another model."""
        layers, counts = len(self.scores), {len(row) for row in self.scores}
        expected = {head.layer for head in heads}
        if expected != set(range(layers)) or len(heads) != sum(map(len, self.scores)):
            raise ArgumentError(
                f"pattern: it has {layers} layers and {layers * max(counts, default=0)} KV heads, but the model has "
                f"{len(expected)} layers and {len(heads)} KV heads. Use the pattern of this model."
            )
        indices = {layer: [head for head in heads if head.layer == layer] for layer in expected}
        return {head: self.scores[head.layer][indices[head.layer].index(head)] for head in heads}


def read_attention_pattern(path: str | Path) -> PatternFileScores:
    """Read a file such as DuoAttention's `full_attention_heads.tsv`, and the `config.json` next to it if there is one.

    Args:
        path: A table of numbers, a line per layer and a tab-separated column per KV head.

    Raises:
        FileFormatError: The file does not exist or is not such a table.
    """
    path = Path(path)
    if not path.is_file():
        raise FileFormatError(f"{path}: no such file. Use the file full_attention_heads.tsv of an attention pattern.")
    if path.stat().st_size > MAX_BYTES:
        raise FileFormatError(
            f"{path}: has {path.stat().st_size} bytes, too many for a score per KV head. Check the file."
        )
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if line.strip():
            try:
                rows.append(tuple(float(field) for field in line.split("\t")))
            except ValueError:
                raise FileFormatError(
                    f"{path}: line {number} is not a list of tab-separated numbers. Got {line[:60]!r}. Use the file "
                    f"full_attention_heads.tsv of an attention pattern."
                ) from None
    if not rows or len({len(row) for row in rows}) > 1 or not all(math.isfinite(x) for row in rows for x in row):
        raise FileFormatError(
            f"{path}: must have one finite number per layer and KV head, with as many numbers on each line. Check the file."
        )
    config: Any = read_json(path.parent / CONFIG_FILE) if (path.parent / CONFIG_FILE).is_file() else {}
    sizes = [config.get(name) if isinstance(config, dict) else None for name in ("sink_size", "recent_size")]
    sink_tokens, window = (size if type(size) is int and size >= 0 else None for size in sizes)
    return PatternFileScores(tuple(rows), sink_tokens, window)
