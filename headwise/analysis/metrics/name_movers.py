"""Name movers: two people are named, one of them again, and the other is due. Who looks at the other, and says so?

    Then Mary and John went home. John gave a book to  →  Mary

(indirect object identification: https://arxiv.org/abs/2211.00593). The score of a head, where the name is due, is its
weight on the name due, counted where it writes more for that name than for the other. The baseline is the same for the same
name at the same place when the other sentence is asked, in which it is not due, `… Mary gave a book to`; and besides the
weight on the name due where the head writes more for the other. So whoever looks at names, at the first name or at a fixed
place, or looks at the right one and writes now this and now that, scores no more than the baseline. A pair counts if the
model gets both sentences right.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, permutations
from typing import NamedTuple

import numpy as np

from headwise.analysis.metrics.prompts import (
    ENOUGH,
    Due,
    DuePrompt,
    Looks,
    PromptMeasure,
    UnitSums,
    ask_prompts,
    check_reads_words,
    next_token,
    too_few,
)
from headwise.analysis.metrics.role_examples import Cases
from headwise.analysis.recording.batching import tokenizer_of
from headwise.model import AnyModel
from headwise.text import Tokenizer

NAMES = (
    "Mary", "John", "Tom", "Anna", "James", "Alice", "Paul", "Kate", "Mark", "Sarah", "David", "Emma", "Peter", "Laura",
    "Jack", "Helen", "George", "Jane", "Simon", "Lucy", "Robert", "Maria", "Daniel", "Rose",
)  # fmt: skip
TEMPLATES = (
    "Then {0} and {1} went home. {2} gave a book to", "When {0} and {1} came in, {2} gave a drink to",
    "After {0} and {1} met, {2} sent a letter to", "While {0} and {1} were at school, {2} gave a pen to",
)  # fmt: skip
SINGLES = (  # the same with one name, who is due
    "Then {0} went home. Somebody gave a book to", "When {0} came in, somebody gave a drink to",
    "After {0} left, somebody sent a letter to", "While {0} was at school, somebody gave a pen to",
)  # fmt: skip
PAIRS = 64  # of sentences
FEWEST_NAMES = 3  # of which six couples can be made, for each template


class NameMover(PromptMeasure):
    """`hw.profile(model, prompts=True)`.

    >>> NameMover().names
    ('name mover', 'name mover null', 'name mover valued')
    """

    def __init__(self) -> None:
        super().__init__(
            "name mover", "weight on the name due, where it is written", "finds the other name and says it",
            "sentences about two people",
        )  # fmt: skip

    def measure(self, model: AnyModel, seed: int) -> tuple[UnitSums, Cases]:
        """Both sentences of each pair, both names of each."""
        wiring = check_reads_words(model, "a name mover")
        prompts = make_pairs(tokenizer_of(model), seed)
        looks = ask_prompts(model, prompts, wiring, self.score.name)
        return name_sums(looks).checked("pairs of sentences about two people", "the model ends rightly"), looks.cases


def name_sums(looks: Looks) -> UnitSums:
    """From what heads did at the four dues of each pair: each name where it is due, and where the other is."""
    said = looks.lead > 0
    score, valued, against = (_fours(x) for x in (looks.weight * said, looks.fetched * said, looks.weight * ~said))
    right = _fours(looks.right[:, None].astype(float))[..., 0]  # (pairs, 4)
    due, not_due = [0, 2], [1, 3]
    counts = 2 * (right[:, due].sum(1) == 2)
    null = score[:, not_due].sum(1) + against[:, due].sum(1)
    return UnitSums(score[:, due].sum(1), null, valued[:, due].sum(1), counts)


class NameSentence(NamedTuple):
    """A sentence about two people that breaks off where one of them is due: tokens of both names and where they stand."""

    ids: tuple[int, ...]
    due: int
    other: int  # said twice
    due_place: int
    other_places: tuple[int, int]

    def prompt(self) -> DuePrompt:
        """Ask for the name due, then for the one that is not."""
        row = len(self.ids) - 1
        due = Due(row, self.due_place, self.due, (self.other,))
        return DuePrompt(self.ids, (due, Due(row, self.other_places[0], self.other, (self.due,))))


class SingleName(NamedTuple):
    """A sentence that names one person, who is due where it breaks off."""

    ids: tuple[int, ...]
    due: int
    place: int


class NamePair(NamedTuple):
    """Two sentences that differ in who is named again: in the first the name said first is due, in the second the other."""

    sentences: tuple[NameSentence, NameSentence]
    singles: tuple[
        SingleName | None, SingleName | None
    ]  # the name due in each, alone; None if it is several tokens there


def make_pairs(tokenizer: Tokenizer, seed: int = 0, pairs: int = PAIRS) -> list[DuePrompt]:
    """Two prompts for each pair, one after the other: each asks for the name due, and then for the one that is not. Names of
    several tokens are left out."""
    made: list[DuePrompt] = []
    for number, pair in enumerate(make_name_pairs(tokenizer, seed, pairs)):
        one, other = (sentence.prompt() for sentence in pair.sentences)
        made += (replace(one, unit=number), other) if number % 2 else (one, replace(other, unit=number))
    return made


def make_name_pairs(tokenizer: Tokenizer, seed: int = 0, pairs: int = PAIRS) -> list[NamePair]:
    """Pairs of sentences about two people, with the single-name sentences of both, drawn by a seed."""
    single = [name for name in NAMES if next_token(tokenizer, "Then", name) is not None]
    couples, dice, made = list(permutations(single, 2)), np.random.default_rng(seed), []
    for number in range(len(TEMPLATES)):
        drawn = (couples[i] for i in dice.permutation(len(couples)))
        made += islice(_pairs(tokenizer, number, drawn), pairs // len(TEMPLATES))
    if len(made) < ENOUGH:
        raise too_few(f"{len(NAMES)} names", len(single), FEWEST_NAMES)
    return made


def _pairs(tokenizer: Tokenizer, template: int, couples: Iterable[tuple[str, str]]) -> Iterator[NamePair]:
    """Those in which both names are one token wherever they stand."""
    for couple in couples:
        one, other = (_sentence(tokenizer, TEMPLATES[template], couple, again) for again in (1, 0))
        if one is not None and other is not None and len(one.ids) == len(other.ids):
            first, second = (_single(tokenizer, SINGLES[template], name) for name in couple)
            yield NamePair((one, other), (first, second))


def _sentence(tokenizer: Tokenizer, template: str, names: tuple[str, str], again: int) -> NameSentence | None:
    """One of two names is said again; the other is due."""
    found = _find_names(tokenizer, template.format(*names, names[again]), names)
    if found is None or [len(places) for places in found.places] != [1 + (i == again) for i in range(2)]:
        return None
    first, second = found.places[again]
    return NameSentence(
        found.ids, found.answers[1 - again], found.answers[again], found.places[1 - again][0], (first, second)
    )


def _single(tokenizer: Tokenizer, template: str, name: str) -> SingleName | None:
    """A sentence in which one name stands, once."""
    found = _find_names(tokenizer, template.format(name), (name,))
    if found is None or len(found.places[0]) != 1:
        return None
    return SingleName(found.ids, found.answers[0], found.places[0][0])


class _FoundNames(NamedTuple):
    ids: tuple[int, ...]
    answers: list[int]  # the token of each name where the text breaks off
    places: list[list[int]]  # of each name


def _find_names(tokenizer: Tokenizer, text: str, names: Sequence[str]) -> _FoundNames | None:
    """Find names in a text. None if one is several tokens, is the first token, or shares a token with another word."""
    aligned, behind = tokenizer.align(text), tokenizer.around[1]
    ids = aligned.ids[: len(aligned.ids) - len(behind)]
    answers = [token for name in names if (token := next_token(tokenizer, text, name)) is not None]
    tokens, words = aligned.tokens_of_word, aligned.words
    said = [[tokens[i] for i, word in enumerate(words) if word == name] for name in names]
    if len(answers) < len(names) or tokenizer.special["unk"] in ids:
        return None
    if not all(len(where) == 1 and len(aligned.words_of_token[where[0]]) == 1 for some in said for where in some):
        return None
    places = [[where[0] for where in some] for some in said]
    return None if any(0 in some for some in places) else _FoundNames(ids, answers, places)


def _fours(made: np.ndarray) -> np.ndarray:
    """The dues of each pair: (dues, heads) → (pairs, 4, heads)"""
    return made.reshape(-1, 4, made.shape[-1])
