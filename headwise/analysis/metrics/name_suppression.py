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

from headwise.analysis.metrics.name_movers import NameSentence, SingleNameSentence, make_name_pairs
from headwise.analysis.metrics.prompt_metric import (
    MIN_SAMPLES,
    ExpectedToken,
    HeadResponses,
    PromptMetric,
    PromptWithTargets,
    SampleTotals,
    require_lm_residual_stream,
    run_prompts,
    too_few_single_tokens_error,
)
from headwise.analysis.metrics.role_examples import ExampleStore
from headwise.analysis.recording.batching import tokenizer_of
from headwise.model import ModelProtocol
from headwise.text import Tokenizer

PAIR = 8  # dues of a pair with its two single-name sentences


class NameSuppressionMetric(PromptMetric):
    """`hw.profile(model, prompts=True)`.

    >>> NameSuppressionMetric().names
    ('name suppression', 'name suppression baseline', 'name suppression value-weighted')
    """

    def __init__(self) -> None:
        super().__init__(
            "name suppression", "weight on the name not due, where it writes against it",
            "finds the name that is not due and writes against it", "sentences about two people",
        )  # fmt: skip

    def measure(self, model: ModelProtocol, seed: int) -> tuple[SampleTotals, ExampleStore]:
        """Both sentences of each pair, and each name alone."""
        residual = require_lm_residual_stream(model, "name suppression")
        responses = run_prompts(
            model, make_suppression_prompts(tokenizer_of(model), seed), residual, self.score_spec.name
        )
        sums = name_suppression_totals(responses)
        return sums.require_enough_samples(
            "pairs of sentences about two people", "the model ends rightly"
        ), responses.examples


def name_suppression_totals(responses: HeadResponses) -> SampleTotals:
    """Sum over the eight dues of each pair: the wrong candidate twice and the name due in each sentence; each name alone."""
    against = responses.logit_difference < 0
    weight, value_weighted, not_against = (
        x.reshape(-1, PAIR, x.shape[-1])
        for x in (responses.weight * against, responses.value_weighted * against, responses.weight * ~against)
    )
    correct = responses.correct.reshape(-1, PAIR)
    wrong, expected, alone = [0, 1, 3, 4], [2, 5], [6, 7]
    baseline = weight[:, expected].sum(1) + weight[:, alone].sum(1) + not_against[:, wrong].sum(1)
    return SampleTotals(
        weight[:, wrong].sum(1), baseline, value_weighted[:, wrong].sum(1), 2 * (correct[:, expected].sum(1) == 2)
    )


def make_suppression_prompts(tokenizer: Tokenizer, seed: int = 0) -> list[PromptWithTargets]:
    """Four prompts for each pair: both sentences about two people, and both names alone. The first two ask for the wrong
    candidate at its second and at its first mention, then for the name due."""
    pairs = [pair for pair in make_name_pairs(tokenizer, seed) if None not in pair.singles]
    if len(pairs) < MIN_SAMPLES:
        raise too_few_single_tokens_error("pairs of names", len(pairs), MIN_SAMPLES)
    names = {sentence.answer for pair in pairs for sentence in pair.sentences}
    prompts: list[PromptWithTargets] = []
    for number, pair in enumerate(pairs):
        samples = (number, None) if number % 2 else (None, number)  # which of the two is shown
        for sentence, sample in zip(pair.sentences, samples, strict=True):
            prompts.append(_pair_prompt(sentence, names, sample))
        prompts += [_single_prompt(single, names) for single in pair.singles if single is not None]
    return prompts


def _pair_prompt(sentence: NameSentence, names: set[int], sample: int | None) -> PromptWithTargets:
    row, absent = len(sentence.ids) - 1, tuple(sorted(names - {sentence.answer, sentence.other}))
    first, second = sentence.other_positions
    candidates = ((second, sentence.other), (first, sentence.other), (sentence.answer_position, sentence.answer))
    return PromptWithTargets(
        sentence.ids, tuple(ExpectedToken(row, position, name, absent) for position, name in candidates), sample
    )


def _single_prompt(single: SingleNameSentence, names: set[int]) -> PromptWithTargets:
    absent = tuple(sorted(names - {single.answer}))
    return PromptWithTargets(single.ids, (ExpectedToken(len(single.ids) - 1, single.position, single.answer, absent),))
