"""Name suppression: two people are named, one of them again, and the other is due. Which heads attend to the wrong
candidate, the name said again, and write against it?

    Then Mary and John went home. John gave a book to  →  Mary, not John

Compare indirect object identification (https://arxiv.org/abs/2211.00593): S-inhibition heads attend to the name said again,
and negative name movers write against the name due. A head with this role attends as the first do and writes against that
name itself.

The score of a head is its weight on both mentions of the wrong candidate, counted if the head writes less for that name than
for names that are not in the sentence, on average. The baseline is the sum of three weights: that on a name where it is due
among the two, and that on a name where it is the only one, each counted if the head writes against it; and that on the wrong
candidate if the head does not write against it. So a head that writes against any name, against the last name, against a
name at a fixed place, or against the name due scores no more than its baseline. A pair counts if the model gets both
sentences right.
"""

from headwise.analysis.metrics.name_movers import NameSentence, SingleName, make_name_pairs
from headwise.analysis.metrics.prompts import (
    ENOUGH,
    Due,
    DuePrompt,
    Looks,
    PromptMeasure,
    UnitSums,
    ask_prompts,
    check_reads_words,
    too_few,
)
from headwise.analysis.metrics.role_examples import Cases
from headwise.analysis.recording.batching import tokenizer_of
from headwise.model import AnyModel
from headwise.text import Tokenizer

PAIR = 8  # dues of a pair with its two single-name sentences


class NameSuppression(PromptMeasure):
    """`hw.profile(model, prompts=True)`.

    >>> NameSuppression().names
    ('name suppression', 'name suppression null', 'name suppression valued')
    """

    def __init__(self) -> None:
        super().__init__(
            "name suppression", "weight on the name not due, where it writes against it",
            "finds the name that is not due and writes against it", "sentences about two people",
        )  # fmt: skip

    def measure(self, model: AnyModel, seed: int) -> tuple[UnitSums, Cases]:
        """Both sentences of each pair, and each name alone."""
        wiring = check_reads_words(model, "name suppression")
        looks = ask_prompts(model, make_suppression_prompts(tokenizer_of(model), seed), wiring, self.score.name)
        sums = suppression_sums(looks)
        return sums.checked("pairs of sentences about two people", "the model ends rightly"), looks.cases


def suppression_sums(looks: Looks) -> UnitSums:
    """Sum over the eight dues of each pair: the wrong candidate twice and the name due in each sentence; each name alone."""
    against = looks.lead < 0
    weight, fetched, kept = (
        x.reshape(-1, PAIR, x.shape[-1])
        for x in (looks.weight * against, looks.fetched * against, looks.weight * ~against)
    )
    right = looks.right.reshape(-1, PAIR)
    wrong, due, alone = [0, 1, 3, 4], [2, 5], [6, 7]
    null = weight[:, due].sum(1) + weight[:, alone].sum(1) + kept[:, wrong].sum(1)
    return UnitSums(weight[:, wrong].sum(1), null, fetched[:, wrong].sum(1), 2 * (right[:, due].sum(1) == 2))


def make_suppression_prompts(tokenizer: Tokenizer, seed: int = 0) -> list[DuePrompt]:
    """Four prompts for each pair: both sentences about two people, and both names alone. The first two ask for the wrong
    candidate at its second and at its first mention, then for the name due."""
    pairs = [pair for pair in make_name_pairs(tokenizer, seed) if None not in pair.singles]
    if len(pairs) < ENOUGH:
        raise too_few("pairs of names", len(pairs), ENOUGH)
    names = {sentence.due for pair in pairs for sentence in pair.sentences}
    made: list[DuePrompt] = []
    for number, pair in enumerate(pairs):
        units = (number, None) if number % 2 else (None, number)  # which of the two is shown
        for sentence, unit in zip(pair.sentences, units, strict=True):
            made.append(_pair_prompt(sentence, names, unit))
        made += [_single_prompt(single, names) for single in pair.singles if single is not None]
    return made


def _pair_prompt(sentence: NameSentence, names: set[int], unit: int | None) -> DuePrompt:
    row, absent = len(sentence.ids) - 1, tuple(sorted(names - {sentence.due, sentence.other}))
    first, second = sentence.other_places
    asked = ((second, sentence.other), (first, sentence.other), (sentence.due_place, sentence.due))
    return DuePrompt(sentence.ids, tuple(Due(row, place, name, absent) for place, name in asked), unit)


def _single_prompt(single: SingleName, names: set[int]) -> DuePrompt:
    absent = tuple(sorted(names - {single.due}))
    return DuePrompt(single.ids, (Due(len(single.ids) - 1, single.place, single.due, absent),))
