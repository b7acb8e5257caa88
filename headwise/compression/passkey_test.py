"""Pass-key test: retrieve a number hidden in a long text. A head that evicts tokens may fail it at nearly the same loss.

Only cases that the full model answers correctly are evaluated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headwise.analysis.recording.batching import tokenizer_of
from headwise.errors import ArgumentError
from headwise.model import ModelProtocol
from headwise.text.corpus import Corpus

KEY_TEMPLATE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
KEY_DIGITS = 5


@dataclass(frozen=True)
class PasskeyCase:
    """A pass-key prompt.

    Attributes:
        ids: Token ids of the prompt.
        key: Digits that should follow.
        depth: Relative position of the key in the text, from 0 (start) to 1 (end).
    """

    ids: tuple[int, ...]
    key: str
    depth: float


@dataclass(frozen=True)
class PasskeyResults:
    """Results of a model on pass-key prompts.

    Attributes:
        cases: The prompts.
        correct: Whether the model generated the key, for each prompt.
    """

    cases: tuple[PasskeyCase, ...]
    correct: tuple[bool, ...]

    def count_retained(self, full: "PasskeyResults") -> tuple[int, int]:
        """Return how many of the cases that the full model answers this model answers too, and how many the full one does."""
        if self.cases != full.cases:
            raise ArgumentError(
                "full: the results of the full model are on other cases than the results of this model. "
                "Run both models on the same cases: run_passkeys(model, cases)."
            )
        answered = [
            own_correct for own_correct, full_correct in zip(self.correct, full.correct, strict=True) if full_correct
        ]
        return sum(answered), len(answered)

    def __str__(self) -> str:
        return f"{sum(self.correct)} of {len(self.correct)} pass keys found"


def make_passkey_cases(
    model: ModelProtocol, corpus: Any, length: int, count: int = 10, seed: int = 0
) -> tuple[PasskeyCase, ...]:
    """Return prompts of exactly `length` tokens with a pass key each, at depths from start to end of the text."""
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
            raise ArgumentError(
                f"length: a prompt of {length} tokens needs a pass key, its question and {max(2, hay_tokens)} tokens of "
                f"other text. Got a text of {len(haystack)} tokens. Give more text, or a length that fits."
            )
        start = int(rng.integers(0, len(haystack) - hay_tokens + 1))
        depth = (index + 0.5) / count
        split = round(depth * hay_tokens)
        filler = haystack[start : start + hay_tokens]
        cases.append(PasskeyCase((*prefix, *filler[:split], *needle, *filler[split:], *question), key, depth))
    return tuple(cases)


@torch.no_grad()
def run_passkeys(
    model: Any, cases: Sequence[PasskeyCase], make_cache: Callable[[], Any] | None = None
) -> PasskeyResults:
    """Generate tokens after each prompt. A case is correct if the text starts with the digits of the key.

    Args:
        model: A decoder with a tokenizer, native or attached.
        cases: Prompts from `make_passkey_cases`.
        make_cache: Function that makes the cache for each case. None: the cache of the model's spec.

    Returns:
        Whether each case is correct.
    """
    tokenizer, correct = tokenizer_of(model), []
    for case in cases:
        cache = model.cache() if make_cache is None else make_cache()
        ids = torch.tensor([case.ids], device=model.device)
        generated = model.generate(ids, max_new_tokens=KEY_DIGITS + 3, cache=cache)[0, len(case.ids) :]
        correct.append(tokenizer.decode(generated.tolist()).strip().startswith(case.key))
    return PasskeyResults(tuple(cases), tuple(correct))
