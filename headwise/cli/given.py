"""What a verb is given to read: a text or files, or pairs of files for an encoder-decoder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCE = "What an encoder-decoder reads, a file; TEXT is then a file with what it shall write, line by line."


def read_from(texts: Sequence[str | Path] | None, source: Path | None = None) -> Any:
    """What `Corpus.of` takes: None, a text, or files; with a source, the pairs it makes with the one file of texts."""
    from headwise.errors import HeadwiseError
    from headwise.text.corpus import Corpus

    if source is not None:
        if not texts or len(texts) != 1:
            raise HeadwiseError(
                f"--source is what an encoder-decoder reads, line by line; give one file with what it shall write, got "
                f"{len(texts or ())}."
            )
        return Corpus.pairs(source, Path(texts[0]))
    if not texts:
        return None
    return texts[0] if len(texts) == 1 else [Path(text) for text in texts]
