"""Tasks for circuits: prompt pairs with answers, read, checked, tokenized and split by template."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headwise.errors import ArgumentError, FileFormatError
from headwise.io.resolve_path import read_text
from headwise.text import Tokenizer

FIELDS = ("clean", "corrupted", "right", "wrong", "template")
SPLITS = ("score", "size", "judge")
SPLIT_SHARES = (0.25, 0.25, 0.5)
MIN_TEMPLATES = 4  # one to score, one to choose the size, two to judge


@dataclass(frozen=True)
class PromptPair:
    """A prompt, its corrupted version, and answers.

    Attributes:
        clean: The prompt.
        corrupted: A prompt with as many tokens, from which the values of replaced nodes are taken. Empty: the next prompt of
            the same template with as many tokens.
        right: Answers that continue the prompt correctly, with their leading space. Empty with a metric of the user.
        wrong: Answers that do not.
        template: Name of the template. Prompts of one template are always in the same split.
    """

    clean: str
    corrupted: str = ""
    right: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    template: str = ""


# Logits at the last token (n, V) and the prompts (n) → metric of each prompt (n,), larger if the model does the task.
MetricFunction = Callable[[Tensor, Sequence[PromptPair]], Tensor]


@dataclass(frozen=True, eq=False)
class CircuitTask:
    """A task for `find_circuit`.

    Attributes:
        name: Name of the task.
        prompts: The prompts: `PromptPair` objects, or dicts with the same fields.
        metric: Function of the logits at the last token, (n, V), and the n prompts, that returns (n,). None: log-probability
            of the right answers minus that of the wrong ones.

    >>> task = CircuitTask("capital", [
    ...     {"clean": "Rome is in", "corrupted": "Oslo is in", "right": " Italy", "wrong": " Norway", "template": "in"},
    ... ])
    >>> task.prompts[0].right
    (' Italy',)
    """

    name: str
    prompts: Sequence[PromptPair]
    metric: MetricFunction | None = None

    def __post_init__(self) -> None:
        if isinstance(self.prompts, str | bytes | Mapping) or not isinstance(self.prompts, Iterable):
            raise ArgumentError(f"prompts: must be a list of prompts. Got {type(self.prompts).__name__}.")
        prompts = tuple(parse_prompt(item, f"prompts[{i}]") for i, item in enumerate(self.prompts))
        for i, prompt in enumerate(prompts):
            if self.metric is None and not (prompt.right and prompt.wrong):
                raise ArgumentError(
                    f"prompts[{i}]: needs right and wrong answers. Add the fields right and wrong, or pass a metric."
                )
        object.__setattr__(self, "prompts", prompts)


def parse_prompt(item: Any, where: str) -> PromptPair:
    """Return a prompt from a dict with the fields of `PromptPair`."""
    if isinstance(item, PromptPair):
        return item
    if not isinstance(item, Mapping):
        raise ArgumentError(f"{where}: must be an object with the fields {', '.join(FIELDS)}. Got {item!r:.60}.")
    unknown = [str(name) for name in item if name not in FIELDS]
    if unknown:
        raise ArgumentError(f"{where}: unknown field {unknown[0]!r}. Use {', '.join(FIELDS)}.")
    values: dict[str, Any] = {}
    for name, value in item.items():
        if name in ("right", "wrong"):
            value = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else value
            is_valid = isinstance(value, tuple) and all(isinstance(answer, str) and answer for answer in value)
        else:
            is_valid = isinstance(value, str)
        if not is_valid:
            raise ArgumentError(f"{where}: the field {name!r} must be text. Got {value!r:.60}.")
        values[name] = value
    if not values.get("clean"):
        raise ArgumentError(f"{where}: the field 'clean' is missing or empty. It is the prompt.")
    return PromptPair(**values)


def read_task(path: Path) -> CircuitTask:
    """Read a task from JSON Lines, one prompt per line."""
    prompts = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompts.append(parse_prompt(json.loads(line), f"{path}, line {number}"))
        except (json.JSONDecodeError, RecursionError):
            raise FileFormatError(
                f"{path}, line {number}: not JSON. Write one prompt per line as a JSON object."
            ) from None
    return CircuitTask(path.stem, prompts)


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """Token ids of a prompt: one row if all answers are single tokens, otherwise one row per answer.

    Attributes:
        pair: The prompt.
        num_tokens: Number of tokens of the prompt.
        clean_rows: Token ids of each row. A row ends with the prompt, or with all but the last token of an answer.
        corrupted_rows: Token ids of each row on the corrupted prompt.
        answers: Token ids of the answers, right ones first. Empty with a metric of the user.
        num_right: Number of right answers.
    """

    pair: PromptPair
    num_tokens: int
    clean_rows: tuple[tuple[int, ...], ...]
    corrupted_rows: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]
    num_right: int

    @property
    def is_single_token(self) -> bool:
        """True if every answer is one token."""
        return all(len(answer) == 1 for answer in self.answers)


class PromptEncoder:
    """Encodes prompts and their answers with the tokenizer of a model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def ids(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a prompt, with the special tokens that the model puts in front."""
        return tuple(self.tokenizer.encode(text))

    def answer_ids(self, prompt: str, answer: str) -> tuple[int, ...] | None:
        """Return the tokens that an answer adds to a prompt. None if it changes the tokens of the prompt."""
        prompt_ids, all_ids = self.ids(prompt), self.ids(prompt + answer)
        if len(all_ids) <= len(prompt_ids) or all_ids[: len(prompt_ids)] != prompt_ids:
            return None
        return all_ids[len(prompt_ids) :]

    def encode(self, pair: PromptPair, where: str = "prompt") -> EncodedPrompt:
        """Encode a prompt. Raise an error if the two versions differ in length, or if an answer is not separable."""
        clean, corrupted = self.ids(pair.clean), self.ids(pair.corrupted)
        if len(clean) != len(corrupted):
            raise ArgumentError(
                f"{where}: clean and corrupted must have the same number of tokens, because values are exchanged token by "
                f"token. Got {len(clean)} tokens in {pair.clean!r:.60} and {len(corrupted)} in {pair.corrupted!r:.60}. "
                f"Change a word."
            )
        answers: list[tuple[int, ...]] = []
        for answer in (*pair.right, *pair.wrong):
            added = self.answer_ids(pair.clean, answer)
            if added is None:
                raise ArgumentError(
                    f"{where}: the answer {answer!r} changes the tokens of the prompt, so it cannot be scored. Begin the "
                    f"answer with a space, or end the prompt before it."
                )
            answers.append(added)
        overlap = set(answers[: len(pair.right)]) & set(answers[len(pair.right) :])
        if overlap:
            raise ArgumentError(f"{where}: an answer is both right and wrong. Got {pair.right!r} and {pair.wrong!r}.")
        encoded = EncodedPrompt(pair, len(clean), (clean,), (corrupted,), tuple(answers), len(pair.right))
        if encoded.is_single_token:
            return encoded
        return replace(
            encoded, clean_rows=tuple(clean + answer[:-1] for answer in answers),
            corrupted_rows=tuple(corrupted + answer[:-1] for answer in answers),
        )  # fmt: skip


def add_partners(prompts: Sequence[PromptPair], encoder: PromptEncoder) -> list[PromptPair]:
    """Give each prompt without a corrupted version the next prompt of its template with as many tokens."""
    groups: dict[tuple[str, int], list[int]] = {}
    for i, prompt in enumerate(prompts):
        if not prompt.corrupted:
            groups.setdefault((prompt.template, len(encoder.ids(prompt.clean))), []).append(i)
    result = list(prompts)
    for (template, length), members in groups.items():
        if len({prompts[i].clean for i in members}) < 2:
            raise ArgumentError(
                f"prompts[{members[0]}]: has no corrupted version, and template {template!r} has no other prompt of "
                f"{length} tokens to take values from. Add the field corrupted."
            )
        for i, partner in zip(members, [*members[1:], members[0]], strict=True):
            result[i] = replace(prompts[i], corrupted=prompts[partner].clean)
    return result


def split_three_ways_by_template(prompts: Sequence[PromptPair], seed: int) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the prompts of the score, size and judge splits. No template is in two splits."""
    templates = sorted({prompt.template for prompt in prompts})
    if len(templates) < MIN_TEMPLATES:
        raise ArgumentError(
            f"task: has {len(templates)} templates, but needs at least {MIN_TEMPLATES}: one to score nodes, one to choose "
            f"the size, and two to judge. Add templates, or set the field template."
        )
    order = np.random.default_rng(seed).permutation(len(templates))
    counts = [max(1, round(share * len(templates))) for share in SPLIT_SHARES[:2]]
    ends = [counts[0], counts[0] + counts[1], len(templates)]
    split_of = {
        templates[int(t)]: next(split for split, end in enumerate(ends) if rank < end) for rank, t in enumerate(order)
    }
    return tuple(
        tuple(i for i, prompt in enumerate(prompts) if split_of[prompt.template] == split)
        for split in range(len(SPLITS))
    )
