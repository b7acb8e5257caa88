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

from headwise.analysis.metrics.prompts import (
    ENOUGH,
    Due,
    DuePrompt,
    Looks,
    PromptMeasure,
    UnitSums,
    ask_prompts,
    check_reads_words,
)
from headwise.analysis.metrics.role_examples import Cases
from headwise.analysis.recording.batching import tokenizer_of
from headwise.analysis.recording.tokenized_corpus import documents_for
from headwise.errors import HeadwiseError
from headwise.model import AnyModel
from headwise.text.corpus import Corpus

TEXTS, LENGTH, CUE = 64, 8, 3  # beginnings; their tokens; and those that must have been said again before one is due


class CopySuppression(PromptMeasure):
    """`hw.profile(model, prompts=True)`.

    >>> CopySuppression().score.label
    'weight on the token being foretold, where it writes against it'
    """

    def __init__(self, corpus: Any = None) -> None:
        self.corpus = corpus  # whose texts are begun; none: as for a profile
        super().__init__(
            "copy suppression", "weight on the token being foretold, where it writes against it",
            "holds back what is about to be said again", "beginnings of texts said twice",
        )  # fmt: skip

    def measure(self, model: AnyModel, seed: int) -> tuple[UnitSums, Cases]:
        """Beginnings said twice, and the same with another behind them."""
        wiring = check_reads_words(model, "copy suppression")
        prompts = make_echoes(model, self.corpus, seed)
        looks = ask_prompts(model, prompts, wiring, self.score.name)
        return suppression_sums(looks).checked("beginnings said twice", "the model goes on with"), looks.cases


def suppression_sums(looks: Looks) -> UnitSums:
    """From what heads did at the dues of texts said twice and, behind each, of its twin."""
    against = looks.lead < 0
    shape = (-1, 2, LENGTH - CUE, looks.weight.shape[1])
    right = looks.right.reshape(shape[:3])[:, 0, :, None]  # (texts, dues, 1)
    made = (looks.weight * against, looks.fetched * against, looks.weight * ~against)
    score, valued, said = ((x.reshape(shape) * right[:, None]).sum(2) for x in made)  # (texts, 2, heads)
    return UnitSums(score[:, 0], score[:, 1] + said[:, 0], valued[:, 0], right.sum((1, 2)))


def make_echoes(model: AnyModel, corpus: Any = None, seed: int = 0, texts: int = TEXTS) -> list[DuePrompt]:
    """Two prompts for each beginning: it is said twice; and another is said behind it, asked about at the same places."""
    tokenizer, given = tokenizer_of(model), documents_for(model) if corpus is None else Corpus.of(corpus)
    before = tokenizer.around[0]
    room = model.spec.room
    bare = [tokenizer.encode(item.text, special=False)[:LENGTH] for item in given.items()]
    fit = list(dict.fromkeys(tuple(ids) for ids in bare if len(set(ids)) == LENGTH))
    if len(fit) < 2 * ENOUGH or room < len(before) + 2 * LENGTH:
        raise HeadwiseError(
            f"too few texts begin with {LENGTH} different tokens, or there is no room to say them twice; {len(fit)} do."
        )
    made: list[DuePrompt] = []
    dice = np.random.default_rng(seed)
    for number in dice.permutation(len(fit))[:texts]:
        one = fit[number]
        others = [ids for ids in fit if not {*ids} & {*one[CUE - 1 :]}]  # nor is what comes before them said again
        if others:
            other = others[int(dice.integers(len(others)))]
            made += [_prompt(before, one, said, unit) for said, unit in ((one, len(made) // 2), (other, None))]
    return made


def _prompt(before: tuple[int, ...], one: tuple[int, ...], said: tuple[int, ...], unit: int | None) -> DuePrompt:
    """A beginning, and what is said behind it but for its last token: each token of the beginning is asked about."""
    start, rest = len(before), {*one}
    dues = [Due(start + LENGTH + i - 1, start + i, one[i], tuple(sorted(rest - {one[i]}))) for i in range(CUE, LENGTH)]
    return DuePrompt((*before, *one, *said[:-1]), tuple(dues), unit)
