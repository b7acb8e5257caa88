"""Name movers: two people are named, one of them again, and the other is due. Who looks at the other, and says so?

    Then Mary and John went home. John gave a book to  →  Mary

(indirect object identification: https://arxiv.org/abs/2211.00593). The score of a head, where the name is due, is its
weight on the name due, counted where it writes more for that name than for the other. The baseline is the same for the same
name at the same place when the other sentence is asked, in which it is not due, `… Mary gave a book to`; and besides the
weight on the name due where the head writes more for the other. So whoever looks at names, at the first name or at a fixed
place, or looks at the right one and writes now this and now that, scores no more than the baseline. A pair counts if the
model gets both sentences right.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice, permutations

import numpy as np

from headwise.look.measure.cases import Cases
from headwise.look.measure.prompts import (
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
from headwise.look.record.units import tokenizer_of
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


def make_pairs(tokenizer: Tokenizer, seed: int = 0, pairs: int = PAIRS) -> list[DuePrompt]:
    """Two prompts for each pair, one after the other: each asks for the name due, and then for the one that is not. Names of
    several tokens are left out."""
    single = [name for name in NAMES if next_token(tokenizer, "Then", name) is not None]
    couples, dice, made = list(permutations(single, 2)), np.random.default_rng(seed), []
    for template in TEMPLATES:
        drawn = (couples[i] for i in dice.permutation(len(couples)))
        made += islice(_pairs(tokenizer, template, drawn), pairs // len(TEMPLATES))
    if len(made) < ENOUGH:
        raise too_few(f"{len(NAMES)} names", len(single), FEWEST_NAMES)
    shown = [
        (replace(one, unit=i), other) if i % 2 else (one, replace(other, unit=i)) for i, (one, other) in enumerate(made)
    ]
    return [prompt for pair in shown for prompt in pair]


def _pairs(
    tokenizer: Tokenizer, template: str, couples: Iterable[tuple[str, str]]
) -> Iterator[tuple[DuePrompt, DuePrompt]]:
    """Those in which both names are one token wherever they stand."""
    for couple in couples:
        one, other = (_prompt(tokenizer, template, couple, again) for again in (1, 0))
        if one is not None and other is not None and len(one.ids) == len(other.ids):
            yield one, other


def _prompt(tokenizer: Tokenizer, template: str, names: tuple[str, str], again: int) -> DuePrompt | None:
    """One of two names is said again. The other is due, and comes first among what is asked; then the one that is not."""
    text = template.format(*names, names[again])
    aligned, behind = tokenizer.align(text), tokenizer.around[1]
    ids = aligned.ids[: len(aligned.ids) - len(behind)]
    answers = [next_token(tokenizer, text, name) for name in names]
    tokens, words = aligned.tokens_of_word, aligned.words
    said = [[tokens[i] for i, word in enumerate(words) if word == name] for name in names]  # where each stands
    if None in answers or sorted(map(len, said)) != [1, 2] or tokenizer.special["unk"] in ids:
        return None
    single = all(len(where) == 1 and len(aligned.words_of_token[where[0]]) == 1 for some in said for where in some)
    places = [some[0][0] for some in said] if single else [0]
    if 0 in places:  # the first token is no target
        return None
    row, due, other = len(ids) - 1, int(answers[1 - again] or 0), int(answers[again] or 0)
    return DuePrompt(ids, (Due(row, places[1 - again], due, (other,)), Due(row, places[again], other, (due,))))


def _fours(made: np.ndarray) -> np.ndarray:
    """The dues of each pair: (dues, heads) → (pairs, 4, heads)"""
    return made.reshape(-1, 4, made.shape[-1])
