"""Pieces of text that know their relations. Words are objects, so arcs hold whatever the pieces are joined with."""

from dataclasses import dataclass, field

from headwise.text.synthetic.vocabulary import Noun


class Word:
    """One word in one place: its text, its class, and the noun it names, if it does."""

    __slots__ = ("index", "kind", "noun", "text")

    def __init__(self, text: str, kind: str, noun: Noun | None = None) -> None:
        self.text = text
        self.kind = kind
        self.noun = noun
        self.index = -1  # known once the document is whole


Arc = tuple[str, Word, Word]


@dataclass(slots=True)
class AnnotatedFragment:
    """Words, the arcs among them, the phrases in them (first and last word), and the word the rest depends on."""

    words: list[Word]
    head: Word
    arcs: list[Arc] = field(default_factory=list)
    phrases: list[tuple[Word, Word]] = field(default_factory=list)

    def add_relation(self, name: str, source: Word, target: Word) -> "AnnotatedFragment":
        """Add an arc, source → target; both may stand anywhere in the document."""
        self.arcs.append((name, source, target))
        return self


def join_fragments(*parts: Word | AnnotatedFragment, head: Word | None = None) -> AnnotatedFragment:
    """One fragment of several, in this order; its head is the first part's unless given.

    >>> dog, sees = Word("dog", "noun"), Word("sees", "verb")
    >>> phrase = join_fragments(Word("a", "determiner"), dog)
    >>> clause = join_fragments(phrase, sees, head=sees).add_relation("subject-verb", dog, sees)
    >>> [word.text for word in clause.words], clause.head.text
    (['a', 'dog', 'sees'], 'sees')
    """
    words: list[Word] = []
    arcs: list[Arc] = []
    phrases: list[tuple[Word, Word]] = []
    for part in parts:
        if isinstance(part, Word):
            words.append(part)
        else:
            words += part.words
            arcs += part.arcs
            phrases += part.phrases
    if head is None:
        head = parts[0] if isinstance(parts[0], Word) else parts[0].head
    return AnnotatedFragment(words, head, arcs, phrases)
