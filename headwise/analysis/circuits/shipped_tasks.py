"""Shipped tasks: prompts made from templates with the words that are single tokens of the model, if possible."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headwise.analysis.circuits.circuit_task import CircuitTask, EncodedPrompt, PromptEncoder, PromptPair
from headwise.analysis.circuits.task_templates import (
    AGREEMENT,
    BRACKET_PAIRS,
    BRACKETS,
    GREATER_THAN,
    INDIRECT_OBJECT,
    INDUCTION,
    KEY_VALUE,
    NAMES,
    NOUNS,
    PEOPLE,
    PLURAL_VERBS,
    SINGULAR_VERBS,
    SUCCESSOR,
    WORDS,
)
from headwise.errors import ArgumentError, HeadwiseError

MAX_TRIES = 60  # random prompts per prompt that fits


@dataclass(frozen=True)
class ShippedTask:
    """A shipped task.

    Attributes:
        name: Name of the task.
        description: One sentence.
        num_templates: Number of templates.
        make: Function from the number of a template, a random generator and the encoder to a random prompt.
    """

    name: str
    description: str
    num_templates: int
    make: Callable[[int, np.random.Generator, PromptEncoder], PromptPair]


def _draw(rng: np.random.Generator, words: Sequence[str], count: int) -> list[str]:
    return [words[int(i)] for i in rng.choice(len(words), count, replace=False)]


def _make_induction(template: int, rng: np.random.Generator, encoder: PromptEncoder) -> PromptPair:
    """The corrupted prompt exchanges the words before the right and the wrong answer, so that keys change, not values."""
    opening, separator, length, repeated = INDUCTION[template]
    words = _draw(rng, WORDS, length)
    wrong = int(rng.integers(repeated + 2, length))

    def text(sequence: list[str]) -> str:
        joined = separator.join([*sequence, *words[:repeated]])
        return f"{opening} {joined}".strip() + separator.rstrip()

    exchanged = list(words)
    exchanged[repeated - 1], exchanged[wrong - 1] = words[wrong - 1], words[repeated - 1]
    return PromptPair(text(words), text(exchanged), (f" {words[repeated]}",), (f" {words[wrong]}",))


def _make_indirect_object(template: int, rng: np.random.Generator, encoder: PromptEncoder) -> PromptPair:
    first, second = _draw(rng, NAMES, 2)
    subject, receiver = (first, second) if rng.random() < 0.5 else (second, first)
    frame = INDIRECT_OBJECT[template]
    clean, corrupted = (frame.format(A=first, B=second, S=name) for name in (subject, receiver))
    return PromptPair(clean, corrupted, (f" {receiver}",), (f" {subject}",))


def _make_agreement(template: int, rng: np.random.Generator, encoder: PromptEncoder) -> PromptPair:
    noun, person = NOUNS[int(rng.integers(len(NOUNS)))], PEOPLE[int(rng.integers(len(PEOPLE)))]
    plural, other_plural = int(rng.integers(2)), int(rng.integers(2))
    frame = AGREEMENT[template]
    clean, corrupted = (frame.format(N=noun[number], M=person[other_plural]) for number in (plural, 1 - plural))
    verbs = (SINGULAR_VERBS, PLURAL_VERBS)
    return PromptPair(clean, corrupted, verbs[plural], verbs[1 - plural])


def _make_greater_than(template: int, rng: np.random.Generator, encoder: PromptEncoder) -> PromptPair:
    """Two-digit answers if they are one token, otherwise only their first digit."""
    century, year, low = int(rng.integers(11, 19)), int(rng.integers(20, 80)), int(rng.integers(1, 9))
    frame = GREATER_THAN[template]
    clean, corrupted = (frame.format(Y=f"{century}{part:02}", C=century) for part in (year, low))
    added = encoder.answer_ids(clean, "55")
    if added is not None and len(added) == 1:
        right, wrong = range(year + 1, 100), range(2, year + 1)
        return PromptPair(clean, corrupted, tuple(f"{y:02}" for y in right), tuple(f"{y:02}" for y in wrong))
    tens = year // 10
    return PromptPair(clean, corrupted, tuple(str(d) for d in range(tens + 1, 10)), tuple(str(d) for d in range(tens)))


def _make_brackets(template: int, rng: np.random.Generator, encoder: PromptEncoder) -> PromptPair:
    words = dict(zip("abcd", _draw(rng, WORDS, 4), strict=True))
    (opened, closed), (other, other_closed) = (BRACKET_PAIRS[int(i)] for i in rng.choice(3, 2, replace=False))
    clean, corrupted = (BRACKETS[template].format(O=bracket, **words) for bracket in (opened, other))
    return PromptPair(clean, corrupted, (closed,), (other_closed,))


def _make_key_value(template: int, rng: np.random.Generator, encoder: PromptEncoder) -> PromptPair:
    entry, separator, opening, query, count = KEY_VALUE[template]
    keys, values = _draw(rng, NAMES, count), _draw(rng, WORDS, count)
    target, other = (int(i) for i in rng.choice(count, 2, replace=False))
    listed = separator.join(entry.format(k=k, v=v) for k, v in zip(keys, values, strict=True))
    clean, corrupted = (f"{opening}{listed}{separator}{query.format(k=keys[i])}" for i in (target, other))
    return PromptPair(clean, corrupted, (f" {values[target]}",), (f" {values[other]}",))


def _make_successor(template: int, rng: np.random.Generator, encoder: PromptEncoder) -> PromptPair:
    series, frame = SUCCESSOR[template]
    position, other = (1 + int(i) for i in rng.choice(len(series) - 2, 2, replace=False))
    clean, corrupted = (frame.format(p=series[i - 1], x=series[i]) for i in (position, other))
    return PromptPair(clean, corrupted, (f" {series[position + 1]}",), (f" {series[other + 1]}",))


SHIPPED_TASKS = {
    generator.name: generator
    for generator in (
        ShippedTask("induction", "Continue a sequence of words that is repeated.", len(INDUCTION), _make_induction),
        ShippedTask(
            "indirect-object", "Name the person who receives something.", len(INDIRECT_OBJECT), _make_indirect_object
        ),
        ShippedTask(
            "agreement", "Number of the verb, with a clause between subject and verb.", len(AGREEMENT), _make_agreement
        ),
        ShippedTask("greater-than", "A year after the first year.", len(GREATER_THAN), _make_greater_than),
        ShippedTask("brackets", "Close the open bracket.", len(BRACKETS), _make_brackets),
        ShippedTask("key-value", "Value that a list assigns to a key.", len(KEY_VALUE), _make_key_value),
        ShippedTask("successor", "Next item of a known series.", len(SUCCESSOR), _make_successor),
    )
}


def make_shipped_task(name: str, prompts: int, encoder: PromptEncoder, seed: int) -> CircuitTask:
    """Make the prompts of a shipped task for the tokenizer of a model.

    Prompts whose answers are single tokens are preferred. Templates that the tokenizer cannot express are left out.

    Args:
        name: Name of the task.
        prompts: Number of prompts.
        encoder: Encoder with the tokenizer of the model.
        seed: Seed of the words.
    """
    generator, pairs = SHIPPED_TASKS[name], list[PromptPair]()
    per_template = -(-prompts // generator.num_templates)
    for template in range(generator.num_templates):
        rng = np.random.default_rng([seed, template])
        used: set[str] = set()
        for _ in range(per_template):
            pair = _fitting_prompt(generator, template, rng, encoder, used)
            if pair is not None:
                used.add(pair.clean)
                pairs.append(pair)
    if not pairs:
        raise ArgumentError(
            f"task={name!r}: no prompt fits the tokenizer of the model, because clean and corrupted prompts differ in their "
            f"number of tokens. Use a task of your own."
        )
    return CircuitTask(name, pairs[: max(prompts, 1)] if per_template == 1 else pairs)


def _fitting_prompt(
    generator: ShippedTask, template: int, rng: np.random.Generator, encoder: PromptEncoder, used: set[str]
) -> PromptPair | None:
    """Return a new prompt with single-token answers, or with answers of several tokens if there is none."""
    fallback: PromptPair | None = None
    for _ in range(MAX_TRIES):
        draft = generator.make(template, rng, encoder)
        pair = PromptPair(draft.clean, draft.corrupted, draft.right, draft.wrong, f"{generator.name} {template}")
        if pair.clean in used or pair.clean == pair.corrupted:
            continue
        try:
            encoded: EncodedPrompt = encoder.encode(pair)
        except HeadwiseError:
            continue
        if encoded.is_single_token:
            return pair
        fallback = fallback or pair
    return fallback
