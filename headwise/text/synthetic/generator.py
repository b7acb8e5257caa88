"""Documents without end. Document i depends on the seed, the split and i alone, so an order of reading can be resumed."""

from collections.abc import Iterator
from itertools import pairwise
from random import Random

from headwise.text.documents import Document, Relation
from headwise.text.synthetic.fragments import Fragment, Word, join
from headwise.text.synthetic.grammar import PATTERNS
from headwise.text.synthetic.phrases import Setting
from headwise.text.synthetic.splits import check_split
from headwise.text.synthetic.vocabulary import Noun

SHORTEST, LONGEST = 20, 80  # words of a document
_PATTERNS = [pattern for pattern, times in PATTERNS.items() for _ in range(times)]


class LittleLanguage:
    """English-like documents with gold relations, seeded and endless; `held-out` ones pair words training never pairs.

    >>> language = LittleLanguage(seed=0)
    >>> language.document(5) == LittleLanguage(seed=0).document(5)
    True
    >>> first = next(iter(language))
    >>> first == language.document(0), len(first.words) == len(first.classes)
    (True, True)
    """

    def __init__(self, seed: int = 0, split: str = "train") -> None:
        check_split(split)
        self.seed = seed
        self.split = split

    def __iter__(self) -> Iterator[Document]:
        number = 0
        while True:
            yield self.document(number)
            number += 1

    def document(self, number: int) -> Document:
        """The document of this number, the same whenever it is asked for."""
        scene = Setting(Random(f"{self.seed} {self.split} {number}").random, self.split)
        return finish(tell(scene))


def tell(scene: Setting) -> Fragment:
    """Sentence after sentence, now about one topic, now about the other, until the document is long enough."""
    target = SHORTEST + scene.random() * (LONGEST - SHORTEST) * 0.75
    told = _sentence(scene)
    while len(told.words) < target:
        more = _sentence(scene)
        if len(told.words) + len(more.words) <= LONGEST:
            told = join(told, more)
    return told


def finish(fragment: Fragment) -> Document:
    """Give every word its place, add the relations that run through the whole document, and turn arcs into places."""
    for place, word in enumerate(fragment.words):
        word.place = place
    arcs = [*fragment.arcs, *_copies(fragment.words), *_related(fragment.words), *_delimiters(fragment.words)]
    relations = sorted(Relation(name, source.place, target.place) for name, source, target in arcs)
    words = tuple(word.text for word in fragment.words)
    classes = tuple(word.kind for word in fragment.words)
    phrases = sorted((first.place, last.place + 1) for first, last in fragment.phrases)
    return Document(" ".join(words), words, tuple(relations), classes, tuple(phrases))


def _sentence(scene: Setting) -> Fragment:
    scene.turn()
    return scene.pick(_PATTERNS)(scene)


def _copies(words: list[Word]) -> Iterator[tuple[str, Word, Word]]:
    """A surname that was there before points at where it was first."""
    first: dict[str, Word] = {}
    for word in words:
        if word.kind == "name" and word.noun:
            if word.text in first:
                yield "copy", word, first[word.text]
            else:
                first[word.text] = word


def _related(words: list[Word]) -> Iterator[tuple[str, Word, Word]]:
    """A noun points at the nearest earlier noun of its topic that is another word."""
    earlier: list[tuple[Word, Noun]] = []
    for word in words:
        if word.kind == "noun" and word.noun:
            for other, noun in reversed(earlier):
                if noun.topic == word.noun.topic and noun.lemma != word.noun.lemma:
                    yield "related", word, other
                    break
            earlier.append((word, word.noun))


def _delimiters(words: list[Word]) -> Iterator[tuple[str, Word, Word]]:
    """The end of a sentence points at the end of the one before."""
    ends = [word for word in words if word.text in (".", "?")]
    for earlier, word in pairwise(ends):
        yield "delimiter", word, earlier
