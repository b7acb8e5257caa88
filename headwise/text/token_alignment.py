"""Tokens, words and characters of one text, aligned through character spans."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from headwise.errors import ArgumentError

Span = tuple[int, int]

_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


@dataclass(frozen=True)
class Alignment:
    """Tokens and words of a text. Special tokens belong to no word and have an empty span.

    A token belongs to every word that it overlaps: `,"` to the comma and to the quote.

    Attributes:
        text: The text.
        ids: Token ids.
        tokens: Token strings.
        spans: Character span of each token.
        words: Words.
        word_spans: Character span of each word.
        words_of_token: Indices of the words of each token: usually one, none for special tokens.

    >>> a = Alignment.of("don't go", ids=[1, 2, 3], tokens=["don", "'t", "go"], spans=[(0, 3), (3, 5), (6, 8)])
    >>> a.words, a.words_of_token, a.tokens_of_word
    (("don't", 'go'), ((0,), (0,), (1,)), ((0, 1), (2,)))
    >>> Alignment.of('go,"', ids=[1, 2], tokens=["go", ',"'], spans=[(0, 2), (2, 4)]).tokens_of_word
    ((0,), (1,), (1,))
    """

    text: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    spans: tuple[Span, ...]
    words: tuple[str, ...]
    word_spans: tuple[Span, ...]
    words_of_token: tuple[tuple[int, ...], ...]

    @property
    def tokens_of_word(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the tokens of each word."""
        token_indices: list[list[int]] = [[] for _ in self.words]
        for token, words in enumerate(self.words_of_token):
            for word in words:
                token_indices[word].append(token)
        return tuple(map(tuple, token_indices))

    @staticmethod
    def of(
        text: str,
        ids: Sequence[int],
        tokens: Sequence[str],
        spans: Sequence[Span],
        words: Sequence[str] | None = None,
    ) -> "Alignment":
        """Align tokens with words by their spans. `words` are in the order of the text; None splits the text."""
        word_spans = split_word_spans(text) if words is None else find_word_spans(text, words)
        word_at_char = {char: index for index, (start, end) in enumerate(word_spans) for char in range(start, end)}
        words_of_token = [tuple(sorted({word_at_char[c] for c in range(*span) if c in word_at_char})) for span in spans]
        return Alignment(
            text,
            tuple(ids),
            tuple(tokens),
            tuple((start, end) for start, end in spans),
            tuple(text[start:end] for start, end in word_spans),
            tuple(word_spans),
            tuple(words_of_token),
        )


def split_word_spans(text: str) -> list[Span]:
    """Return the spans of words and punctuation marks.

    >>> [text[a:b] for text in ["It didn't, no."] for a, b in split_word_spans(text)]
    ['It', "didn't", ',', 'no', '.']
    """
    return [match.span() for match in _WORD.finditer(text)]


def find_word_spans(text: str, words: Sequence[str]) -> list[Span]:
    """Return the spans of words, each searched after the previous one.

    >>> find_word_spans("a ba a", ["a", "a", "a"])
    [(0, 1), (3, 4), (5, 6)]
    """
    spans, start = [], 0
    for word in words:
        position = text.find(word, start)
        if position < 0 or not word:
            raise ArgumentError(
                f"words: the word {word!r} is not in the text after character {start}. Give words in the order of the text."
            )
        spans.append((position, position + len(word)))
        start = position + len(word)
    return spans
