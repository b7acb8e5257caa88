"""A number hidden in a long text and asked for at its end: what a loss hardly shows, and a head that forgets may lose.

Judged on the cases the whole model answers: what it cannot do, nothing can be said about.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headwise.analysis.recording.batching import tokenizer_of
from headwise.cache import ModelCache
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.text.corpus import Corpus

KEY_TEMPLATE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
KEY_DIGITS = 5


@dataclass(frozen=True)
class PasskeyCase:
    """A prompt of token ids, the digits that should follow, and how deep they were hidden, 0 being the beginning."""

    ids: tuple[int, ...]
    key: str
    depth: float


@dataclass(frozen=True)
class PasskeyResults:
    """Which cases a model answered; `retained` compares with the whole model's."""

    cases: tuple[PasskeyCase, ...]
    correct: tuple[bool, ...]

    def count_retained(self, full: "PasskeyResults") -> tuple[int, int]:
        """Of the cases the whole model answers, how many this one answers too; and how many those are."""
        if self.cases != full.cases:
            raise HeadwiseError("two models are compared on the same cases; ask both for the same ones.")
        answered = [
            own_correct for own_correct, full_correct in zip(self.correct, full.correct, strict=True) if full_correct
        ]
        return sum(answered), len(answered)

    def __str__(self) -> str:
        return f"{sum(self.correct)} of {len(self.correct)} pass keys found"


def make_passkey_cases(
    model: Transformer, corpus: Any, length: int, count: int = 10, seed: int = 0
) -> tuple[PasskeyCase, ...]:
    """Prompts of just `length` tokens out of a corpus, a pass key in each, at depths from beginning to end."""
    tokenizer = tokenizer_of(model)
    prefix, suffix = tokenizer.template_ids

    def encode_bare(passage: str) -> list[int]:
        ids = tokenizer.encode(passage)
        return ids[len(prefix) : len(ids) - len(suffix)]

    haystack = encode_bare(" ".join(item.text for item in Corpus.of(corpus).items()))
    rng, cases = np.random.default_rng(seed), []
    for index in range(count):
        key = "".join(map(str, rng.integers(0, 10, KEY_DIGITS)))
        needle, question = encode_bare(KEY_TEMPLATE.format(key=key)), encode_bare(QUESTION)
        hay_tokens = length - len(prefix) - len(needle) - len(question)
        if hay_tokens < 2 or len(haystack) < hay_tokens:
            raise HeadwiseError(
                f"a prompt of {length} tokens holds a pass key, and at least {max(2, hay_tokens)} tokens of text around it; "
                f"the text has {len(haystack)}."
            )
        start = int(rng.integers(0, len(haystack) - hay_tokens + 1))
        depth = (index + 0.5) / count
        split = round(depth * hay_tokens)
        filler = haystack[start : start + hay_tokens]
        cases.append(PasskeyCase((*prefix, *filler[:split], *needle, *filler[split:], *question), key, depth))
    return tuple(cases)


@torch.no_grad()
def run_passkeys(
    model: Transformer, cases: Sequence[PasskeyCase], make_cache: Callable[[], ModelCache] | None = None
) -> PasskeyResults:
    """Let a model write on after each prompt; right is who writes the digits of the key first.

    `make_cache` makes the cache of each case; None: what the model's spec says.
    """
    tokenizer, correct = tokenizer_of(model), []
    for case in cases:
        cache = model.cache() if make_cache is None else make_cache()
        ids = torch.tensor([case.ids], device=model.device)
        generated = model.generate(ids, max_new_tokens=KEY_DIGITS + 3, cache=cache)[0, len(case.ids) :]
        correct.append(tokenizer.decode(generated.tolist()).strip().startswith(case.key))
    return PasskeyResults(tuple(cases), tuple(correct))
