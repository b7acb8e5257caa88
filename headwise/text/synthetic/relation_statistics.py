"""What the synthetic language is like, measured: how far one offset gets with each relation, and examples."""

from itertools import islice
from typing import NamedTuple

from headwise.errors import HeadwiseError
from headwise.text.annotated_document import Document, Relation, best_offset, count_relation_offsets
from headwise.text.synthetic.generator import SyntheticLanguage
from headwise.text.synthetic.max_offset_accuracy import MAX_OFFSET_FRACTIONS


class RelationSummary(NamedTuple):
    """A relation: how many arcs, its best offset, the share of arcs that hits, the limit of that share, one arc."""

    relation: str
    arcs: int
    best_offset: int
    fraction: float
    max_fraction: float
    example: str


class RelationOffsetSummary(NamedTuple):
    """The table, one row per relation, and one whole document."""

    rows: tuple[RelationSummary, ...]
    document: Document


def describe_language(documents: int = 2000, split: str = "train", seed: int = 0) -> RelationOffsetSummary:
    """Measure the first so many documents.

    >>> rows, document = describe_language(documents=200)
    >>> all(row.fraction <= 0.6 for row in rows)
    True
    >>> rows[0].relation, rows[0].best_offset
    ('determiner-noun', 1)
    """
    if documents < 1:
        raise HeadwiseError(f"the number of documents must be at least 1, got {documents}.")
    sampled = list(islice(SyntheticLanguage(seed, split), documents))
    table = count_relation_offsets(sampled)
    rows = []
    for name, max_fraction in MAX_OFFSET_FRACTIONS.items():
        if name in table:
            best, fraction = best_offset(table[name])
            rows.append(
                RelationSummary(name, table[name].total(), best, fraction, max_fraction, _example(sampled, name, best))
            )
    return RelationOffsetSummary(tuple(rows), sampled[0])


def _example(documents: list[Document], name: str, top_offset: int) -> str:
    """The shortest of the first arcs that the best offset misses; any, if it misses none."""
    arcs = ((document, arc) for document in documents for arc in document.relations if arc.name == name)
    first = list(islice(arcs, 20))
    missed = [pair for pair in first if pair[1].target - pair[1].source != top_offset]
    return mark_arc(*min(missed or first, key=lambda pair: abs(pair[1].target - pair[1].source)))


def mark_arc(document: Document, arc: Relation) -> str:
    """The words from one end of an arc to the other, both ends between stars.

    >>> mark_arc(Document.of(["the", "old", "cat", "sat"]), Relation("determiner-noun", 0, 2))
    '*the* old *cat*'
    """
    ends = (arc.source, arc.target)
    words = [f"*{word}*" if index in ends else word for index, word in enumerate(document.words)]
    return " ".join(words[min(ends) : max(ends) + 1])
