"""A number hidden in a long text and asked for at its end: what a loss hardly shows, and a head that forgets may lose.

Judged on the cases the whole model answers: what it cannot do, nothing can be said about.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headwise.analysis.recording.batching import tokenizer_of
from headwise.errors import HeadwiseError
from headwise.model import ModelCache, Transformer
from headwise.text.corpus import Corpus

HIDDEN = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
DIGITS = 5


@dataclass(frozen=True)
class PasskeyCase:
    """A prompt of token ids, the digits that should follow, and how deep they were hidden, 0 being the beginning."""

    ids: tuple[int, ...]
    key: str
    depth: float


@dataclass(frozen=True)
class Passkeys:
    """Which cases a model answered; `kept` compares with the whole model's."""

    cases: tuple[PasskeyCase, ...]
    right: tuple[bool, ...]

    def kept(self, whole: "Passkeys") -> tuple[int, int]:
        """Of the cases the whole model answers, how many this one answers too; and how many those are."""
        if self.cases != whole.cases:
            raise HeadwiseError("two models are compared on the same cases; ask both for the same ones.")
        both = [mine for mine, theirs in zip(self.right, whole.right, strict=True) if theirs]
        return sum(both), len(both)

    def __str__(self) -> str:
        return f"{sum(self.right)} of {len(self.right)} pass keys found"


def make_cases(model: Transformer, text: Any, length: int, count: int = 10, seed: int = 0) -> tuple[PasskeyCase, ...]:
    """Prompts of just `length` tokens out of a corpus, a pass key in each, at depths from beginning to end."""
    tokenizer = tokenizer_of(model)
    before, behind = tokenizer.around

    def bare(words: str) -> list[int]:
        ids = tokenizer.encode(words)
        return ids[len(before) : len(ids) - len(behind)]

    hay = bare(" ".join(item.text for item in Corpus.of(text).items()))
    dice, made = np.random.default_rng(seed), []
    for number in range(count):
        key = "".join(map(str, dice.integers(0, 10, DIGITS)))
        needle, asked = bare(HIDDEN.format(key=key)), bare(QUESTION)
        around = length - len(before) - len(needle) - len(asked)
        if around < 2 or len(hay) < around:
            raise HeadwiseError(
                f"a prompt of {length} tokens holds a pass key, and at least {max(2, around)} tokens of text around it; "
                f"the text has {len(hay)}."
            )
        start = int(dice.integers(0, len(hay) - around + 1))
        depth = (number + 0.5) / count
        split = round(depth * around)
        some = hay[start : start + around]
        made.append(PasskeyCase((*before, *some[:split], *needle, *some[split:], *asked), key, depth))
    return tuple(made)


@torch.no_grad()
def ask_passkeys(
    model: Transformer, cases: Sequence[PasskeyCase], cache: Callable[[], ModelCache] | None = None
) -> Passkeys:
    """Let a model write on after each prompt; right is who writes the digits of the key first.

    `cache` makes the cache of each case; None: what the model's spec says.
    """
    tokenizer, right = tokenizer_of(model), []
    for case in cases:
        kept = model.cache() if cache is None else cache()
        ids = torch.tensor([case.ids], device=model.device)
        made = model.generate(ids, tokens=DIGITS + 3, cache=kept)[0, len(case.ids) :]
        right.append(tokenizer.decode(made.tolist()).strip().startswith(case.key))
    return Passkeys(tuple(cases), tuple(right))
