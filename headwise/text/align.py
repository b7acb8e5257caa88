"""Tokens, words and characters of one text, aligned through character spans."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from headwise.errors import HeadwiseError

Span = tuple[int, int]

_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


@dataclass(frozen=True)
class Alignment:
    """A text cut into tokens and words. Special tokens belong to no word and have an empty span.

    A token belongs to every word it touches: `,"` to the comma and to the quote.

    >>> a = Alignment.of("don't go", ids=[1, 2, 3], tokens=["don", "'t", "go"], spans=[(0, 3), (3, 5), (6, 8)])
    >>> a.words, a.words_of_token, a.tokens_of_word
    (("don't", 'go'), ((0,), (0,), (1,)), ((0, 1), (2,)))
    >>> Alignment.of('go,"', ids=[1, 2], tokens=["go", ',"'], spans=[(0, 2), (2, 4)]).tokens_of_word
    ((0,), (1,), (1,))
    """

    text: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    spans: tuple[Span, ...]  # of the tokens, in characters
    words: tuple[str, ...]
    word_spans: tuple[Span, ...]
    words_of_token: tuple[tuple[int, ...], ...]  # those a token touches: mostly one; none for special tokens

    @property
    def tokens_of_word(self) -> tuple[tuple[int, ...], ...]:
        """For each word, the places of its tokens."""
        places: list[list[int]] = [[] for _ in self.words]
        for token, words in enumerate(self.words_of_token):
            for word in words:
                places[word].append(token)
        return tuple(map(tuple, places))

    @staticmethod
    def of(
        text: str,
        ids: Sequence[int],
        tokens: Sequence[str],
        spans: Sequence[Span],
        words: Sequence[str] | None = None,
    ) -> "Alignment":
        """Align tokens, by their spans, with words: those given, in the order of the text, or those of `split_words`."""
        word_spans = split_words(text) if words is None else find_words(text, words)
        owner = {place: number for number, (start, end) in enumerate(word_spans) for place in range(start, end)}
        words_of_token = [tuple(sorted({owner[p] for p in range(*span) if p in owner})) for span in spans]
        return Alignment(
            text,
            tuple(ids),
            tuple(tokens),
            tuple((start, end) for start, end in spans),
            tuple(text[start:end] for start, end in word_spans),
            tuple(word_spans),
            tuple(words_of_token),
        )


def split_words(text: str) -> list[Span]:
    """Words and punctuation marks by their spans.

    >>> [text[a:b] for text in ["It didn't, no."] for a, b in split_words(text)]
    ['It', "didn't", ',', 'no', '.']
    """
    return [found.span() for found in _WORD.finditer(text)]


def find_words(text: str, words: Sequence[str]) -> list[Span]:
    """The spans of given words, each searched behind the one before.

    >>> find_words("a ba a", ["a", "a", "a"])
    [(0, 1), (3, 4), (5, 6)]
    """
    spans, start = [], 0
    for word in words:
        place = text.find(word, start)
        if place < 0 or not word:
            raise HeadwiseError(f"the word {word!r} is not in the text behind character {start}; give words in order.")
        spans.append((place, place + len(word)))
        start = place + len(word)
    return spans
