"""What a model of the little language knows: at places where one word is right, is it the model's first choice?"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import NamedTuple

import torch

from headwise.errors import HeadwiseError
from headwise.model import Transformer, quiet
from headwise.text import Tokenizer
from headwise.text.documents import Document
from headwise.text.synthetic import VOCABULARY, LittleLanguage, Quiz, quizzes
from headwise.text.synthetic.cloze_probes import KINDS


class Mark(NamedTuple):
    """One kind of quiz: how many, the share answered rightly, and what guessing and a bigram model would get."""

    quiz: str
    questions: int
    right: float  # by the model's first choice among all words
    chance: float  # by guessing among the words that compete
    bigram: float  # by the one of those that follows the word before most often


def can_sit(model: Transformer) -> bool:
    """Whether the exam is for this model: a decoder that reads the words of the little language."""
    own = model.tokenizer
    return (
        model.spec.kind == "decoder" and isinstance(own, Tokenizer) and set(own.backend.get_vocab()) >= set(VOCABULARY)
    )


def exam(model: Transformer, *, documents: int = 1000, split: str = "held-out", seed: int = 1) -> tuple[Mark, ...]:
    """Put a model to the test on documents of the little language; by default on word pairs that training never has."""
    tokenizer = model.tokenizer
    if not isinstance(tokenizer, Tokenizer) or tokenizer.encode("the dog .", special=False) == [tokenizer.unk] * 3:
        raise HeadwiseError("the exam is for models of the little language, trained with its words.")
    guess = bigram(islice(LittleLanguage(seed + 1), 4 * documents))
    right, chance, known, asked = (defaultdict(float) for _ in range(4))
    for document, quiz, answer in _answers(model, tokenizer, islice(LittleLanguage(seed, split), documents)):
        word, before = document.words[quiz.place], document.words[quiz.place - 1]
        asked[quiz.kind] += 1
        right[quiz.kind] += answer == word
        chance[quiz.kind] += 1 / len(quiz.choices)
        known[quiz.kind] += max(quiz.choices, key=lambda choice: guess[before, choice]) == word
    return tuple(
        Mark(kind, int(asked[kind]), *(count[kind] / asked[kind] for count in (right, chance, known)))
        for kind in KINDS
        if asked[kind]
    )


def bigram(documents: Iterable[Document]) -> Counter[tuple[str, str]]:
    """How often each word follows each."""
    return Counter(pair for document in documents for pair in pairwise(document.words))


@torch.no_grad()
def _answers(
    model: Transformer, tokenizer: Tokenizer, documents: Iterable[Document]
) -> Iterator[tuple[Document, Quiz, str]]:
    """The model's first choice at each quiz; documents of like length are read together."""
    before = len(tokenizer.around[0])
    todo = sorted(((d, quizzes(d)) for d in documents), key=lambda pair: len(pair[0].words))
    for first in range(0, len(todo), 32):
        some = todo[first : first + 32]
        rows = [tokenizer.encode(document.text) for document, _ in some]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=model.device)
        with quiet(model):
            best = model(ids).argmax(-1).tolist()  # (B, T); what is behind a document's end is not asked for
        for (document, asked), row in zip(some, best, strict=True):
            for quiz in asked:
                yield document, quiz, tokenizer.token(row[before + quiz.place - 1])  # the word before it asks
