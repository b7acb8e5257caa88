"""Infinite sequence of documents. Document i depends only on the seed, the split and i, so that reading can be resumed."""

from collections.abc import Iterator
from itertools import pairwise
from random import Random

from headwise.text.annotated_document import Document, Relation
from headwise.text.synthetic.annotated_fragment import AnnotatedFragment, Word, join_fragments
from headwise.text.synthetic.grammar import SENTENCE_WEIGHTS
from headwise.text.synthetic.phrases import DocumentState
from headwise.text.synthetic.vocabulary import Noun
from headwise.text.synthetic.word_pair_splits import check_split

MIN_WORDS, MAX_WORDS = 20, 80  # per document
_WEIGHTED_SENTENCES = [pattern for pattern, weight in SENTENCE_WEIGHTS.items() for _ in range(weight)]


class SyntheticLanguage:
    """English-like documents with gold relations. `held-out` documents have word pairs that never occur in training.

    >>> language = SyntheticLanguage(seed=0)
    >>> language.document(5) == SyntheticLanguage(seed=0).document(5)
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
        index = 0
        while True:
            yield self.document(index)
            index += 1

    def document(self, index: int) -> Document:
        """Return the document with this index. It is always the same."""
        doc = DocumentState(Random(f"{self.seed} {self.split} {index}").random, self.split)
        return to_document(generate_two_topic_document(doc))


def generate_two_topic_document(doc: DocumentState) -> AnnotatedFragment:
    """Generate sentences about two topics until the document is long enough."""
    target_words = MIN_WORDS + doc.random() * (MAX_WORDS - MIN_WORDS) * 0.75
    fragment = _generate_sentence(doc)
    while len(fragment.words) < target_words:
        sentence = _generate_sentence(doc)
        if len(fragment.words) + len(sentence.words) <= MAX_WORDS:
            fragment = join_fragments(fragment, sentence)
    return fragment


def to_document(fragment: AnnotatedFragment) -> Document:
    """Convert a fragment to a document, and add the relations that span the document."""
    for index, word in enumerate(fragment.words):
        word.index = index
    arcs = [
        *fragment.arcs,
        *_copy_arcs(fragment.words),
        *_same_topic_noun_arcs(fragment.words),
        *_sentence_end_arcs(fragment.words),
    ]
    relations = sorted(Relation(name, source.index, target.index) for name, source, target in arcs)
    words = tuple(word.text for word in fragment.words)
    classes = tuple(word.kind for word in fragment.words)
    phrases = sorted((first.index, last.index + 1) for first, last in fragment.phrases)
    return Document(" ".join(words), words, tuple(relations), classes, tuple(phrases))


def _generate_sentence(doc: DocumentState) -> AnnotatedFragment:
    doc.start_sentence()
    return doc.choice(_WEIGHTED_SENTENCES)(doc)


def _copy_arcs(words: list[Word]) -> Iterator[tuple[str, Word, Word]]:
    """Yield an arc from each repeated surname to its first occurrence."""
    first: dict[str, Word] = {}
    for word in words:
        if word.kind == "name" and word.noun:
            if word.text in first:
                yield "copy", word, first[word.text]
            else:
                first[word.text] = word


def _same_topic_noun_arcs(words: list[Word]) -> Iterator[tuple[str, Word, Word]]:
    """Yield an arc from each noun to the nearest earlier noun of its topic with another lemma."""
    earlier: list[tuple[Word, Noun]] = []
    for word in words:
        if word.kind == "noun" and word.noun:
            for other, noun in reversed(earlier):
                if noun.topic == word.noun.topic and noun.lemma != word.noun.lemma:
                    yield "related", word, other
                    break
            earlier.append((word, word.noun))


def _sentence_end_arcs(words: list[Word]) -> Iterator[tuple[str, Word, Word]]:
    """Yield an arc from the end of each sentence to the end of the previous one."""
    ends = [word for word in words if word.text in (".", "?")]
    for earlier, word in pairwise(ends):
        yield "delimiter", word, earlier
