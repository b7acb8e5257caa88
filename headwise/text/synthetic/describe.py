"""What the little language is like, measured: how far one offset gets with each relation, and examples."""

from itertools import islice
from typing import NamedTuple

from headwise.errors import HeadwiseError
from headwise.text.documents import Document, Relation, best_offset, offsets
from headwise.text.synthetic.generator import LittleLanguage
from headwise.text.synthetic.offset_limits import OFFSETS


class Row(NamedTuple):
    """A relation: how many arcs, its best offset, the share of arcs that hits, the limit of that share, one arc."""

    relation: str
    arcs: int
    best_offset: int
    share: float
    limit: float
    example: str


class Description(NamedTuple):
    """The table, one row per relation, and one whole document."""

    rows: tuple[Row, ...]
    document: Document


def describe(documents: int = 2000, split: str = "train", seed: int = 0) -> Description:
    """Measure the first so many documents.

    >>> rows, document = describe(documents=200)
    >>> all(row.share <= 0.6 for row in rows)
    True
    >>> rows[0].relation, rows[0].best_offset
    ('determiner-noun', 1)
    """
    if documents < 1:
        raise HeadwiseError(f"the number of documents must be at least 1, got {documents}.")
    read = list(islice(LittleLanguage(seed, split), documents))
    table = offsets(read)
    rows = []
    for name, limit in OFFSETS.items():
        if name in table:
            best, share = best_offset(table[name])
            rows.append(Row(name, table[name].total(), best, share, limit, _example(read, name, best)))
    return Description(tuple(rows), read[0])


def _example(documents: list[Document], name: str, best: int) -> str:
    """The shortest of the first arcs that the best offset misses; any, if it misses none."""
    arcs = ((document, arc) for document in documents for arc in document.relations if arc.name == name)
    first = list(islice(arcs, 20))
    missed = [pair for pair in first if pair[1].target - pair[1].source != best]
    return mark(*min(missed or first, key=lambda pair: abs(pair[1].target - pair[1].source)))


def mark(document: Document, arc: Relation) -> str:
    """The words from one end of an arc to the other, both ends between stars.

    >>> mark(Document.of(["the", "old", "cat", "sat"]), Relation("determiner-noun", 0, 2))
    '*the* old *cat*'
    """
    ends = (arc.source, arc.target)
    words = [f"*{word}*" if place in ends else word for place, word in enumerate(document.words)]
    return " ".join(words[min(ends) : max(ends) + 1])
