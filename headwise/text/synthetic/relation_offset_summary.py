"""Statistics of the synthetic language: accuracy of the best fixed offset for each relation, with examples."""

from itertools import islice
from typing import NamedTuple

from headwise.errors import ArgumentError
from headwise.text.annotated_document import Document, Relation, best_offset, count_relation_offsets
from headwise.text.synthetic.generator import SyntheticLanguage
from headwise.text.synthetic.max_allowed_fixed_offset_accuracy import FIXED_OFFSET_ACCURACY_LIMITS


class RelationSummary(NamedTuple):
    """Statistics of one relation.

    Attributes:
        relation: Name of the relation.
        arcs: Number of arcs.
        best_offset: Most frequent offset from source to target.
        fraction: Fraction of the arcs with that offset.
        max_fraction: Limit of that fraction.
        example: Words of one arc, with its ends between stars.
    """

    relation: str
    arcs: int
    best_offset: int
    fraction: float
    max_fraction: float
    example: str


class SyntheticRelationSummary(NamedTuple):
    """Statistics of all relations, and one example document.

    Attributes:
        rows: One row per relation.
        document: The first document.
    """

    rows: tuple[RelationSummary, ...]
    document: Document


def describe_language(documents: int = 2000, split: str = "train", seed: int = 0) -> SyntheticRelationSummary:
    """Measure the first documents of the synthetic language.

    >>> rows, document = describe_language(documents=200)
    >>> all(row.fraction <= 0.6 for row in rows)
    True
    >>> rows[0].relation, rows[0].best_offset
    ('determiner-noun', 1)
    """
    if documents < 1:
        raise ArgumentError(f"documents: must be at least 1. Got {documents}. Use documents=2000, for example.")
    sampled = list(islice(SyntheticLanguage(seed, split), documents))
    table = count_relation_offsets(sampled)
    rows = []
    for name, max_fraction in FIXED_OFFSET_ACCURACY_LIMITS.items():
        if name in table:
            best, fraction = best_offset(table[name])
            rows.append(
                RelationSummary(name, table[name].total(), best, fraction, max_fraction, _example(sampled, name, best))
            )
    return SyntheticRelationSummary(tuple(rows), sampled[0])


def _example(documents: list[Document], name: str, top_offset: int) -> str:
    """Return the shortest of the first arcs that the best offset misses, or of all arcs if it misses none."""
    arcs = ((document, arc) for document in documents for arc in document.relations if arc.name == name)
    first = list(islice(arcs, 20))
    missed = [pair for pair in first if pair[1].target - pair[1].source != top_offset]
    return mark_arc(*min(missed or first, key=lambda pair: abs(pair[1].target - pair[1].source)))


def mark_arc(document: Document, arc: Relation) -> str:
    """Return the words from one end of an arc to the other, with both ends between stars.

    >>> mark_arc(Document.of(["the", "old", "cat", "sat"]), Relation("determiner-noun", 0, 2))
    '*the* old *cat*'
    """
    ends = (arc.source, arc.target)
    words = [f"*{word}*" if index in ends else word for index, word in enumerate(document.words)]
    return " ".join(words[min(ends) : max(ends) + 1])
