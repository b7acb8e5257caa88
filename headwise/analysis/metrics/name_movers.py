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

from headwise.analysis.metrics.prompt_metric import (
    MIN_SAMPLES,
    ExpectedToken,
    HeadResponses,
    PromptMetric,
    PromptWithTargets,
    SampleTotals,
    require_lm_residual_stream,
    run_prompts,
    single_token_of_word,
    too_few_single_tokens_error,
)
from headwise.analysis.metrics.role_examples import ExampleStore
from headwise.analysis.recording.batching import tokenizer_of
from headwise.model import ModelProtocol
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
MIN_NAMES = 3  # of which six couples can be made, for each template


class NameMoverMetric(PromptMetric):
    """`hw.profile(model, prompts=True)`.

    >>> NameMoverMetric().names
    ('name mover', 'name mover baseline', 'name mover value-weighted')
    """

    def __init__(self) -> None:
        super().__init__(
            "name mover", "weight on the name due, where it is written", "finds the other name and says it",
            "sentences about two people",
        )  # fmt: skip

    def measure(self, model: ModelProtocol, seed: int) -> tuple[SampleTotals, ExampleStore]:
        """Both sentences of each pair, both names of each."""
        residual = require_lm_residual_stream(model, "a name mover")
        prompts = make_name_prompts(tokenizer_of(model), seed)
        responses = run_prompts(model, prompts, residual, self.score_spec.name)
        return name_mover_totals(responses).require_enough_samples(
            "pairs of sentences about two people", "the model ends rightly"
        ), responses.examples


def name_mover_totals(responses: HeadResponses) -> SampleTotals:
    """From what heads did at the four dues of each pair: each name where it is due, and where the other is."""
    favors_answer = responses.logit_difference > 0
    score, value_weighted, against = (
        _group_by_pair(x)
        for x in (
            responses.weight * favors_answer,
            responses.value_weighted * favors_answer,
            responses.weight * ~favors_answer,
        )
    )
    correct = _group_by_pair(responses.correct[:, None].astype(float))[..., 0]  # (pairs, 4)
    expected, not_expected = [0, 2], [1, 3]
    counts = 2 * (correct[:, expected].sum(1) == 2)
    baseline = score[:, not_expected].sum(1) + against[:, expected].sum(1)
    return SampleTotals(score[:, expected].sum(1), baseline, value_weighted[:, expected].sum(1), counts)


class NameSentence(NamedTuple):
    """A sentence about two people that breaks off where one of them is due: tokens of both names and where they stand."""

    ids: tuple[int, ...]
    answer: int
    other: int  # said twice
    answer_position: int
    other_positions: tuple[int, int]

    def to_prompt(self) -> PromptWithTargets:
        """Ask for the name due, then for the one that is not."""
        row = len(self.ids) - 1
        expected = ExpectedToken(row, self.answer_position, self.answer, (self.other,))
        return PromptWithTargets(
            self.ids, (expected, ExpectedToken(row, self.other_positions[0], self.other, (self.answer,)))
        )


class SingleNameSentence(NamedTuple):
    """A sentence that names one person, who is due where it breaks off."""

    ids: tuple[int, ...]
    answer: int
    position: int


class NameSentencePair(NamedTuple):
    """Two sentences that differ in who is named again: in the first the name said first is due, in the second the other."""

    sentences: tuple[NameSentence, NameSentence]
    # the name due in each, alone; None if it is several tokens there
    singles: tuple[SingleNameSentence | None, SingleNameSentence | None]


def make_name_prompts(tokenizer: Tokenizer, seed: int = 0, pairs: int = PAIRS) -> list[PromptWithTargets]:
    """Two prompts for each pair, one after the other: each asks for the name due, and then for the one that is not. Names of
    several tokens are left out."""
    prompt_pairs: list[PromptWithTargets] = []
    for number, pair in enumerate(make_name_pairs(tokenizer, seed, pairs)):
        first, second = (sentence.to_prompt() for sentence in pair.sentences)
        prompt_pairs += (
            (replace(first, sample=number), second) if number % 2 else (first, replace(second, sample=number))
        )
    return prompt_pairs


def make_name_pairs(tokenizer: Tokenizer, seed: int = 0, pairs: int = PAIRS) -> list[NameSentencePair]:
    """Pairs of sentences about two people, with the single-name sentences of both, drawn by a seed."""
    single = [name for name in NAMES if single_token_of_word(tokenizer, "Then", name) is not None]
    couples, rng = list(permutations(single, 2)), np.random.default_rng(seed)
    name_pairs: list[NameSentencePair] = []
    for number in range(len(TEMPLATES)):
        shuffled = (couples[i] for i in rng.permutation(len(couples)))
        name_pairs += islice(_prompt_pairs(tokenizer, number, shuffled), pairs // len(TEMPLATES))
    if len(name_pairs) < MIN_SAMPLES:
        raise too_few_single_tokens_error(f"{len(NAMES)} names", len(single), MIN_NAMES)
    return name_pairs


def _prompt_pairs(
    tokenizer: Tokenizer, template: int, couples: Iterable[tuple[str, str]]
) -> Iterator[NameSentencePair]:
    """Those in which both names are one token wherever they stand."""
    for couple in couples:
        first, second = (_sentence(tokenizer, TEMPLATES[template], couple, again) for again in (1, 0))
        if first is not None and second is not None and len(first.ids) == len(second.ids):
            single_first, single_second = (_single(tokenizer, SINGLES[template], name) for name in couple)
            yield NameSentencePair((first, second), (single_first, single_second))


def _sentence(tokenizer: Tokenizer, template: str, names: tuple[str, str], again: int) -> NameSentence | None:
    """One of two names is said again; the other is due."""
    mentions = _find_names(tokenizer, template.format(*names, names[again]), names)
    if mentions is None or [len(positions) for positions in mentions.positions] != [1 + (i == again) for i in range(2)]:
        return None
    first, second = mentions.positions[again]
    return NameSentence(
        mentions.ids,
        mentions.answers[1 - again],
        mentions.answers[again],
        mentions.positions[1 - again][0],
        (first, second),
    )


def _single(tokenizer: Tokenizer, template: str, name: str) -> SingleNameSentence | None:
    """A sentence in which one name stands, once."""
    mentions = _find_names(tokenizer, template.format(name), (name,))
    if mentions is None or len(mentions.positions[0]) != 1:
        return None
    return SingleNameSentence(mentions.ids, mentions.answers[0], mentions.positions[0][0])


class _NameMentions(NamedTuple):
    ids: tuple[int, ...]
    answers: list[int]  # the token of each name where the text breaks off
    positions: list[list[int]]  # of each name


def _find_names(tokenizer: Tokenizer, text: str, names: Sequence[str]) -> _NameMentions | None:
    """Find names in a text. None if one is several tokens, is the first token, or shares a token with another word."""
    aligned, suffix = tokenizer.align(text), tokenizer.template_ids[1]
    ids = aligned.ids[: len(aligned.ids) - len(suffix)]
    answers = [token for name in names if (token := single_token_of_word(tokenizer, text, name)) is not None]
    tokens, words = aligned.tokens_of_word, aligned.words
    mentions = [[tokens[i] for i, word in enumerate(words) if word == name] for name in names]
    if len(answers) < len(names) or tokenizer.special["unk"] in ids:
        return None
    if not all(
        len(where) == 1 and len(aligned.words_of_token[where[0]]) == 1
        for name_mentions in mentions
        for where in name_mentions
    ):
        return None
    positions = [[where[0] for where in name_mentions] for name_mentions in mentions]
    return None if any(0 in name_positions for name_positions in positions) else _NameMentions(ids, answers, positions)


def _group_by_pair(values: np.ndarray) -> np.ndarray:
    """The dues of each pair: (dues, heads) → (pairs, 4, heads)"""
    return values.reshape(-1, 4, values.shape[-1])
