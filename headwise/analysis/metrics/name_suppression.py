"""Name suppression: heads that attend to the wrong name in indirect object identification and reduce its logit.

    Then Mary and John went home. John gave a book to  →  Mary, not John

Two people are named, one of them is repeated (the wrong name), and the other is the answer. In the terms of indirect object
identification (https://arxiv.org/abs/2211.00593): S-inhibition heads attend to the repeated name, and negative name movers
reduce the logit of the answer. A head with this role attends like the former and reduces the logit of the repeated name
itself.

The score of a head is its weight on both mentions of the wrong name, counted if the head gives this name a lower logit than
the mean of names that are not in the sentence. The baseline is the sum of three weights: the weight on a name that is the
answer, and the weight on a name that is the only one in its sentence, each counted if the head reduces the logit of that
name; and the weight on the wrong name if the head does not reduce its logit. So a head that suppresses any name, the last
name, a name at a fixed position, or the answer scores no more than its baseline. A pair of sentences counts if the model
completes both correctly.
"""

from headwise.analysis.metrics.name_movers import NameSentence, SingleNameSentence, make_name_sentence_pairs
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
from headwise.analysis.metrics.role_example_positions import ExampleStore
from headwise.analysis.recording.batching import tokenizer_of
from headwise.model import ModelProtocol
from headwise.text import Tokenizer

PAIR = 8  # targets of a pair with its two single-name sentences


class NameSuppressionMetric(PromptMetric):
    """Name suppression score. Computed by `hw.profile(model, prompts=True)`.

    >>> NameSuppressionMetric().names
    ('name suppression', 'name suppression baseline', 'name suppression value-weighted')
    """

    def __init__(self) -> None:
        super().__init__(
            "name suppression", "weight on the wrong name, if the head writes against it",
            "finds the wrong name and writes against it", "sentences about two people",
        )  # fmt: skip

    def measure(self, model: ModelProtocol, seed: int) -> tuple[SampleTotals, ExampleStore]:
        """Run both sentences of each pair, and a sentence with each name alone."""
        residual = require_lm_residual_stream(model, "name suppression")
        responses = run_prompts(
            model, make_suppression_prompts(tokenizer_of(model), seed), residual, self.score_spec.name
        )
        sums = name_suppression_totals(responses)
        return sums.require_enough_samples(
            "pairs of sentences about two people", "correctly completes"
        ), responses.examples


def name_suppression_totals(responses: HeadResponses) -> SampleTotals:
    """Sum over the eight targets of each pair: in each sentence two mentions of the wrong name and one of the answer; and
    each name alone."""
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
    """Make four prompts per pair: both sentences about two people, and both names alone.

    The targets of the first two are the second mention of the wrong name, its first mention, and the answer.
    """
    pairs = [pair for pair in make_name_sentence_pairs(tokenizer, seed) if None not in pair.singles]
    if len(pairs) < MIN_SAMPLES:
        raise too_few_single_tokens_error("pairs of names", len(pairs), MIN_SAMPLES)
    names = {sentence.answer for pair in pairs for sentence in pair.sentences}
    prompts: list[PromptWithTargets] = []
    for number, pair in enumerate(pairs):
        samples = (number, None) if number % 2 else (None, number)  # one of the two sentences is shown as an example
        for sentence, sample in zip(pair.sentences, samples, strict=True):
            prompts.append(_pair_prompt(sentence, names, sample))
        prompts += [_make_single_name_prompt(single, names) for single in pair.singles if single is not None]
    return prompts


def _pair_prompt(sentence: NameSentence, names: set[int], sample: int | None) -> PromptWithTargets:
    row, absent = len(sentence.ids) - 1, tuple(sorted(names - {sentence.answer, sentence.other}))
    first, second = sentence.other_positions
    candidates = ((second, sentence.other), (first, sentence.other), (sentence.answer_position, sentence.answer))
    return PromptWithTargets(
        sentence.ids, tuple(ExpectedToken(row, position, name, absent) for position, name in candidates), sample
    )


def _make_single_name_prompt(single: SingleNameSentence, names: set[int]) -> PromptWithTargets:
    absent = tuple(sorted(names - {single.answer}))
    return PromptWithTargets(single.ids, (ExpectedToken(len(single.ids) - 1, single.position, single.answer, absent),))
