"""Fragments of text with relations. Words are objects, so that arcs stay valid when fragments are joined."""

from dataclasses import dataclass, field

from headwise.text.synthetic.vocabulary import Noun


class Word:
    """One occurrence of a word: its text, its class, and its noun, if it names one."""

    __slots__ = ("index", "kind", "noun", "text")

    def __init__(self, text: str, kind: str, noun: Noun | None = None) -> None:
        self.text = text
        self.kind = kind
        self.noun = noun
        self.index = -1  # set when the document is complete


Arc = tuple[str, Word, Word]


@dataclass(slots=True)
class AnnotatedFragment:
    """A fragment of a document.

    Attributes:
        words: Words in order.
        head: Syntactic head.
        arcs: Relations of the words.
        phrases: First and last word of each phrase.
    """

    words: list[Word]
    head: Word
    arcs: list[Arc] = field(default_factory=list)
    phrases: list[tuple[Word, Word]] = field(default_factory=list)

    def add_relation(self, name: str, source: Word, target: Word) -> "AnnotatedFragment":
        """Add an arc from source to target. Both may be anywhere in the document."""
        self.arcs.append((name, source, target))
        return self


def join_fragments(*parts: Word | AnnotatedFragment, head: Word | None = None) -> AnnotatedFragment:
    """Join fragments in order. The head is that of the first part unless given.

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
