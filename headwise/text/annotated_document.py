"""Texts with gold relations between words, and word classes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headwise.errors import ArgumentError
from headwise.text.token_alignment import find_word_spans


class Relation(NamedTuple):
    """A named arc from one word to another, by their indices: the pronoun at 7 refers to the noun at 1.

    Attributes:
        name: Name of the relation.
        source: Index of the source word.
        target: Index of the target word.
    """

    name: str
    source: int
    target: int


@dataclass(frozen=True)
class Document:
    """A text with its words and relations.

    Attributes:
        text: The text.
        words: Words in the order of the text.
        relations: Arcs between words.
        classes: Part of speech of each word. May be empty.
        phrases: Spans of phrases as (first word, last word + 1).

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
        find_word_spans(self.text, self.words)  # raises if words are not in the text, in order
        for name, source, target in self.relations:
            for index in (source, target):
                if not 0 <= index < n:
                    raise ArgumentError(
                        f"relations: the relation {name!r} refers to word {index}. Got {n} words. Use indices 0 to {n - 1}."
                    )
        if self.classes and len(self.classes) != n:
            raise ArgumentError(
                f"classes: one class per word is needed. Got {n} words and {len(self.classes)} classes. Give {n} classes."
            )
        for first, end in self.phrases:
            if not 0 <= first < end <= n:
                raise ArgumentError(
                    f"phrases: a phrase must lie within the {n} words. Got {first}-{end}. Use 0 <= first < end <= {n}."
                )

    @staticmethod
    def of(words: Sequence[str], relations: Iterable[Relation] = (), classes: Sequence[str] = ()) -> "Document":
        """Return a document whose text is its words, separated by spaces."""
        return Document(" ".join(words), tuple(words), tuple(relations), tuple(classes))


def count_relation_offsets(documents: Iterable[Document]) -> dict[str, Counter[int]]:
    """Count the offsets from source to target (target − source) of each relation.

    >>> count_relation_offsets([Document.of(["the", "old", "cat"], [Relation("determiner", 0, 2)])])
    {'determiner': Counter({2: 1})}
    """
    table: dict[str, Counter[int]] = {}
    for document in documents:
        for name, source, target in document.relations:
            table.setdefault(name, Counter())[target - source] += 1
    return table


def best_offset(counts: Counter[int]) -> tuple[int, float]:
    """Return the most frequent offset and its fraction of the arcs: the baseline of a purely positional head.

    >>> best_offset(Counter({1: 3, 2: 1}))
    (1, 0.75)
    """
    offset, hits = counts.most_common(1)[0]
    return offset, hits / counts.total()
