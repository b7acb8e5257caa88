"""Text with gold relations: words, their classes, and who belongs to whom."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headwise.errors import HeadwiseError
from headwise.text.token_alignment import find_word_spans


class Relation(NamedTuple):
    """A named arc from one word to another, by their places: the pronoun at 7 stands for the noun at 1."""

    name: str
    source: int
    target: int


@dataclass(frozen=True)
class Document:
    """One text, cut into words. `classes` are parts of speech, one per word, or none; `phrases` are (first, last + 1).

    >>> d = Document.of(["the", "cat", "sat"], [Relation("determiner", 0, 1)])
    >>> d.text, d.relations[0].target
    ('the cat sat', 1)
    """

    text: str
    words: tuple[str, ...]
    relations: tuple[Relation, ...] = ()
    classes: tuple[str, ...] = ()
    phrases: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        n = len(self.words)
        find_word_spans(self.text, self.words)  # each word stands in the text, in order
        for name, source, target in self.relations:
            for index in (source, target):
                if not 0 <= index < n:
                    raise HeadwiseError(
                        f"the relation {name!r} points at word {index}, but there are {n} words (0-{n - 1})."
                    )
        if self.classes and len(self.classes) != n:
            raise HeadwiseError(f"there are {n} words and {len(self.classes)} classes; give one class per word.")
        for first, end in self.phrases:
            if not 0 <= first < end <= n:
                raise HeadwiseError(f"the phrase {first}-{end} does not lie within the {n} words.")

    @staticmethod
    def of(words: Sequence[str], relations: Iterable[Relation] = (), classes: Sequence[str] = ()) -> "Document":
        """A document whose text is its words with spaces between."""
        return Document(" ".join(words), tuple(words), tuple(relations), tuple(classes))


def count_relation_offsets(documents: Iterable[Document]) -> dict[str, Counter[int]]:
    """For each relation, how often its target stands at each offset from its source (target − source).

    >>> count_relation_offsets([Document.of(["the", "old", "cat"], [Relation("determiner", 0, 2)])])
    {'determiner': Counter({2: 1})}
    """
    table: dict[str, Counter[int]] = {}
    for document in documents:
        for name, source, target in document.relations:
            table.setdefault(name, Counter())[target - source] += 1
    return table


def best_offset(counts: Counter[int]) -> tuple[int, float]:
    """The fixed offset that hits most arcs, and the share it hits: what a head must beat to be more than a position.

    >>> best_offset(Counter({1: 3, 2: 1}))
    (1, 0.75)
    """
    offset, hits = counts.most_common(1)[0]
    return offset, hits / counts.total()
