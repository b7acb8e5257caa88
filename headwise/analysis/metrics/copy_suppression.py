"""Copy suppression: who looks at the token the model is about to say, and writes against it?

    the old man saw a dog . the old man saw a  →  dog      (https://arxiv.org/abs/2310.04625)

The beginning of a text is said twice, so the model says it again. The score of a head is its weight on the token that is
being foretold, where it stood the first time, counted where the head writes less for it than for the other tokens of the
text on average. The baseline is the same at the same places when another text follows, in which that token is not being
foretold; and besides the weight there when the head writes for it. So a head that writes against whatever it looks at,
wherever that is, scores no more than the baseline; nor does an induction head, which looks there and writes for the token,
or now for and now against it. A token counts if the model itself would say it.
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
from headwise.analysis.metrics.role_examples import ExampleStore
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.recording.tokenized_corpus import default_corpus
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol
from headwise.text.corpus import Corpus

TEXTS, LENGTH, CUE = 64, 8, 3  # beginnings; their tokens; and those that must have been said again before one is due


class CopySuppressionMetric(PromptMetric):
    """`hw.profile(model, prompts=True)`.

    >>> CopySuppressionMetric().score_spec.label
    'weight on the token being foretold, where it writes against it'
    """

    def __init__(self, corpus: Any = None) -> None:
        self.corpus = corpus  # whose texts are begun; none: as for a profile
        super().__init__(
            "copy suppression", "weight on the token being foretold, where it writes against it",
            "holds back what is about to be said again", "beginnings of texts said twice",
        )  # fmt: skip

    def measure(self, model: ModelProtocol, seed: int) -> tuple[SampleTotals, ExampleStore]:
        """Beginnings said twice, and the same with another behind them."""
        residual = require_lm_residual_stream(model, "copy suppression")
        prompts = make_repeat_prompts(model, self.corpus, seed)
        responses = run_prompts(model, prompts, residual, self.score_spec.name)
        return copy_suppression_totals(responses).require_enough_samples(
            "beginnings said twice", "the model goes on with"
        ), responses.examples


def copy_suppression_totals(responses: HeadResponses) -> SampleTotals:
    """From what heads did at the dues of texts said twice and, behind each, of its twin."""
    against = responses.logit_difference < 0
    shape = (-1, 2, LENGTH - CUE, responses.weight.shape[1])
    correct = responses.correct.reshape(shape[:3])[:, 0, :, None]  # (texts, dues, 1)
    arrays = (responses.weight * against, responses.value_weighted * against, responses.weight * ~against)
    # (texts, 2, heads)
    score, value_weighted, written_for = ((x.reshape(shape) * correct[:, None]).sum(2) for x in arrays)
    return SampleTotals(score[:, 0], score[:, 1] + written_for[:, 0], value_weighted[:, 0], correct.sum((1, 2)))


def make_repeat_prompts(
    model: ModelProtocol, corpus: Any = None, seed: int = 0, texts: int = TEXTS
) -> list[PromptWithTargets]:
    """Two prompts for each beginning: it is said twice; and another is said behind it, asked about at the same places."""
    tokenizer, documents = tokenizer_of(model), default_corpus(model) if corpus is None else Corpus.of(corpus)
    prefix = tokenizer.template_ids[0]
    max_context = model.spec.max_input_tokens
    token_ids = [tokenizer.encode(item.text, add_special_tokens=False)[:LENGTH] for item in documents.items()]
    beginnings = list(dict.fromkeys(tuple(ids) for ids in token_ids if len(set(ids)) == LENGTH))
    if len(beginnings) < 2 * MIN_SAMPLES or max_context < len(prefix) + 2 * LENGTH:
        raise HeadwiseError(
            f"too few texts begin with {LENGTH} different tokens, or there is no room to say them twice; "
            f"{len(beginnings)} do."
        )
    prompts: list[PromptWithTargets] = []
    rng = np.random.default_rng(seed)
    for index in rng.permutation(len(beginnings))[:texts]:
        beginning = beginnings[index]
        # nor is what comes before them said again
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
    """A beginning, and what is said behind it but for its last token: each token of the beginning is asked about."""
    start, token_set = len(prefix), {*beginning}
    targets = [
        ExpectedToken(start + LENGTH + i - 1, start + i, beginning[i], tuple(sorted(token_set - {beginning[i]})))
        for i in range(CUE, LENGTH)
    ]
    return PromptWithTargets((*prefix, *beginning, *continuation[:-1]), tuple(targets), sample)
