"""Name movers: heads that attend to the correct name in indirect object identification and increase its logit.

    Then Mary and John went home. John gave a book to  →  Mary      (https://arxiv.org/abs/2211.00593)

Two people are named, one of them is repeated, and the other is the answer. The score of a head is its weight on the answer at
the last token, counted if the head gives the answer a higher logit than the other name. The baseline has two terms: the same
score for the same name at the same position in the other sentence of the pair, in which it is not the answer
(`… Mary gave a book to`), and the weight on the answer if the head gives the other name a higher logit. So a head that
attends to any name, to the first name or to a fixed position scores no more than the baseline, and neither does a head that
attends to the answer but favors either name. A pair of sentences counts if the model completes both correctly.
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
from headwise.analysis.metrics.role_example_positions import ExampleStore
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
SINGLES = (  # templates with a single name, which is the answer
    "Then {0} went home. Somebody gave a book to", "When {0} came in, somebody gave a drink to",
    "After {0} left, somebody sent a letter to", "While {0} was at school, somebody gave a pen to",
)  # fmt: skip
PAIRS = 64  # number of sentence pairs
MIN_NAMES = 3  # three names give six ordered pairs per template


class NameMoverMetric(PromptMetric):
    """Name mover score. Computed by `hw.profile(model, prompts=True)`.

    >>> NameMoverMetric().names
    ('name mover', 'name mover baseline', 'name mover value-weighted')
    """

    def __init__(self) -> None:
        super().__init__(
            "name mover", "weight on the correct name, if the head writes it", "finds the correct name and writes it",
            "sentences about two people",
        )  # fmt: skip

    def measure(self, model: ModelProtocol, seed: int) -> tuple[SampleTotals, ExampleStore]:
        """Run both sentences of each pair, with both names as targets."""
        residual = require_lm_residual_stream(model, "a name mover")
        prompts = make_name_prompts(tokenizer_of(model), seed)
        responses = run_prompts(model, prompts, residual, self.score_spec.name)
        return name_mover_totals(responses).require_enough_samples(
            "pairs of sentences about two people", "correctly completes"
        ), responses.examples


def name_mover_totals(responses: HeadResponses) -> SampleTotals:
    """Sum over the four targets of each pair: each name where it is the answer and where the other name is."""
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
    """A sentence about two people that ends before one of the names.

    Attributes:
        ids: Token ids.
        answer: Token of the correct name.
        other: Token of the other name, which occurs twice.
        answer_position: Position of the correct name.
        other_positions: Positions of the other name.
    """

    ids: tuple[int, ...]
    answer: int
    other: int
    answer_position: int
    other_positions: tuple[int, int]

    def to_prompt(self) -> PromptWithTargets:
        """Return a prompt with two targets: the correct name, then the other name."""
        row = len(self.ids) - 1
        expected = ExpectedToken(row, self.answer_position, self.answer, (self.other,))
        return PromptWithTargets(
            self.ids, (expected, ExpectedToken(row, self.other_positions[0], self.other, (self.answer,)))
        )


class SingleNameSentence(NamedTuple):
    """A sentence with a single name, which is the answer."""

    ids: tuple[int, ...]
    answer: int
    position: int


class NameSentencePair(NamedTuple):
    """Two sentences that differ in the repeated name. The answer is the first name in one and the second in the other.

    Attributes:
        sentences: The two sentences.
        singles: For each sentence, a sentence with its answer as the only name, or None if the name is not a single token
            there.
    """

    sentences: tuple[NameSentence, NameSentence]
    singles: tuple[SingleNameSentence | None, SingleNameSentence | None]


def make_name_prompts(tokenizer: Tokenizer, seed: int = 0, pairs: int = PAIRS) -> list[PromptWithTargets]:
    """Make two prompts per pair. The targets of each are the correct name and the other name. Names that are not single
    tokens are left out."""
    prompt_pairs: list[PromptWithTargets] = []
    for number, pair in enumerate(make_name_sentence_pairs(tokenizer, seed, pairs)):
        first, second = (sentence.to_prompt() for sentence in pair.sentences)
        prompt_pairs += (
            (replace(first, sample=number), second) if number % 2 else (first, replace(second, sample=number))
        )
    return prompt_pairs


def make_name_sentence_pairs(tokenizer: Tokenizer, seed: int = 0, pairs: int = PAIRS) -> list[NameSentencePair]:
    """Draw pairs of sentences about two people, with the single-name sentences of both names."""
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
    """Iterate over the pairs in which both names are single tokens everywhere."""
    for couple in couples:
        first, second = (_sentence(tokenizer, TEMPLATES[template], couple, again) for again in (1, 0))
        if first is not None and second is not None and len(first.ids) == len(second.ids):
            single_first, single_second = (_single(tokenizer, SINGLES[template], name) for name in couple)
            yield NameSentencePair((first, second), (single_first, single_second))


def _sentence(tokenizer: Tokenizer, template: str, names: tuple[str, str], again: int) -> NameSentence | None:
    """Make a sentence in which the name `names[again]` is repeated. None if the names are not single tokens."""
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
    """Make a sentence with a single name. None if the name is not a single token."""
    mentions = _find_names(tokenizer, template.format(name), (name,))
    if mentions is None or len(mentions.positions[0]) != 1:
        return None
    return SingleNameSentence(mentions.ids, mentions.answers[0], mentions.positions[0][0])


class _NameMentions(NamedTuple):
    ids: tuple[int, ...]
    answers: list[int]  # token of each name at the end of the text
    positions: list[list[int]]  # positions of each name


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
    """Group the targets by pair: (targets, heads) → (pairs, 4, heads)."""
    return values.reshape(-1, 4, values.shape[-1])
