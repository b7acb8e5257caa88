"""Copy suppression: heads that attend to the token the model is about to predict and reduce its logit.

    the old man saw a dog . the old man saw a  →  dog      (https://arxiv.org/abs/2310.04625)

Each prompt repeats the beginning of a text, so that the model predicts it again. The score of a head is its weight on the
first occurrence of the predicted token, counted if the head gives that token a lower logit than the mean of the other tokens
of the text. The baseline has two terms: the same score at the same positions if another text follows, in which the token is
not predicted, and the weight on the token if the head increases its logit. So a head that writes against any attended token
scores no more than the baseline, and neither does an induction head, which attends to the token and increases its logit. A
token counts if the model predicts it.
"""

from typing import Any

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
)
from headwise.analysis.metrics.role_example_positions import ExampleStore
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.recording.tokenized_corpus import default_corpus
from headwise.errors import ArgumentError
from headwise.model import ModelProtocol
from headwise.text.corpus import Corpus

TEXTS, LENGTH = 64, 8  # number of beginnings, and tokens of each
CUE = 3  # tokens that are repeated before the first target


class CopySuppressionMetric(PromptMetric):
    """Copy suppression score. Computed by `hw.profile(model, prompts=True)`.

    Args:
        corpus: Texts whose beginnings are used. None selects the default corpus of a profile.

    >>> CopySuppressionMetric().score_spec.label
    'weight on the predicted token, if the head writes against it'
    """

    def __init__(self, corpus: Any = None) -> None:
        self.corpus = corpus
        super().__init__(
            "copy suppression", "weight on the predicted token, if the head writes against it",
            "suppresses a token that the model is about to repeat", "beginnings of texts said twice",
        )  # fmt: skip

    def measure(self, model: ModelProtocol, seed: int) -> tuple[SampleTotals, ExampleStore]:
        """Run repeated beginnings, and beginnings followed by another text."""
        residual = require_lm_residual_stream(model, "copy suppression")
        prompts = make_repeat_prompts(model, self.corpus, seed)
        responses = run_prompts(model, prompts, residual, self.score_spec.name)
        return copy_suppression_totals(responses).require_enough_samples(
            "repeated beginnings of texts", "continues"
        ), responses.examples


def copy_suppression_totals(responses: HeadResponses) -> SampleTotals:
    """Sum the responses over the targets of each text. Each repeated text is followed by its control."""
    against = responses.logit_difference < 0
    shape = (-1, 2, LENGTH - CUE, responses.weight.shape[1])
    correct = responses.correct.reshape(shape[:3])[:, 0, :, None]  # (texts, targets, 1)
    arrays = (responses.weight * against, responses.value_weighted * against, responses.weight * ~against)
    # (texts, 2, heads)
    score, value_weighted, written_for = ((x.reshape(shape) * correct[:, None]).sum(2) for x in arrays)
    return SampleTotals(score[:, 0], score[:, 1] + written_for[:, 0], value_weighted[:, 0], correct.sum((1, 2)))


def make_repeat_prompts(
    model: ModelProtocol, corpus: Any = None, seed: int = 0, texts: int = TEXTS
) -> list[PromptWithTargets]:
    """Make two prompts per beginning: the beginning repeated, and followed by another one. Both have the same targets."""
    tokenizer, documents = tokenizer_of(model), default_corpus(model) if corpus is None else Corpus.of(corpus)
    prefix = tokenizer.template_ids[0]
    max_context = model.spec.max_input_tokens
    token_ids = [tokenizer.encode(item.text, add_special_tokens=False)[:LENGTH] for item in documents.items()]
    beginnings = list(dict.fromkeys(tuple(ids) for ids in token_ids if len(set(ids)) == LENGTH))
    if len(beginnings) < 2 * MIN_SAMPLES or max_context < len(prefix) + 2 * LENGTH:
        raise ArgumentError(
            f"copy suppression: it needs {2 * MIN_SAMPLES} texts that begin with {LENGTH} different tokens, and a context of "
            f"{len(prefix) + 2 * LENGTH} positions. Got {len(beginnings)} texts and {max_context} positions. Give more texts "
            f"or a model with a longer context."
        )
    prompts: list[PromptWithTargets] = []
    rng = np.random.default_rng(seed)
    for index in rng.permutation(len(beginnings))[:texts]:
        beginning = beginnings[index]
        # the control must not contain the targets, nor the token before the first target
        others = [ids for ids in beginnings if not {*ids} & {*beginning[CUE - 1 :]}]
        if others:
            other = others[int(rng.integers(len(others)))]
            prompts += [
                _prompt(prefix, beginning, continuation, sample)
                for continuation, sample in ((beginning, len(prompts) // 2), (other, None))
            ]
    return prompts


def _prompt(
    prefix: tuple[int, ...], beginning: tuple[int, ...], continuation: tuple[int, ...], sample: int | None
) -> PromptWithTargets:
    """Make a prompt from a beginning and its continuation without the last token. Tokens after the cue are targets."""
    start, token_set = len(prefix), {*beginning}
    targets = [
        ExpectedToken(start + LENGTH + i - 1, start + i, beginning[i], tuple(sorted(token_set - {beginning[i]})))
        for i in range(CUE, LENGTH)
    ]
    return PromptWithTargets((*prefix, *beginning, *continuation[:-1]), tuple(targets), sample)
