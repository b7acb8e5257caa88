"""Successor heads: heads that map Monday to Tuesday (https://arxiv.org/abs/2312.09230).

Each day, month, number and letter with a successor is a sample if the model correctly continues a list that ends with it
(`Sunday, Monday,` with Tuesday). A head scores a hit under two conditions:

- By weights: if the head attends only to the word, its direct effect on the logits (W_V, W_O, gain of the final norm,
  unembedding) is largest for the successor among all words of the class.
- In the list: the actual direct effect of the head at the end of the list is largest for the successor too. So a head that
  attends elsewhere does not score.

The first condition uses the residual stream after the first layer, at the word preceded by one other word. It contains the
identity of the token, and not yet the predictions of later layers. Heads of the first layer read the embedding.

The baseline is the chance that a random other word of the class, without the word itself, has the largest effect by weights.
So a head that copies scores 0, and a head that always writes the same word scores no more than its baseline. The
value-weighted score is the second condition alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.metrics.prompt_metric import (
    MIN_SAMPLES,
    ExpectedToken,
    PromptMetric,
    PromptWithTargets,
    SampleTotals,
    require_lm_residual_stream,
    run_prompts,
    single_token_of_word,
    too_few_single_tokens_error,
    z_to_logits_matrix,
)
from headwise.analysis.metrics.role_example_positions import ExampleStore
from headwise.analysis.recording.batching import forward_ids, tokenizer_of
from headwise.errors import UnsupportedModelError
from headwise.heads.hook_point import HookPoint
from headwise.kernels.rounding_tolerance import at_least_float32, to_float64
from headwise.model import ModelProtocol, ResidualStream
from headwise.text import Tokenizer

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December",
)  # fmt: skip
NUMBERS = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
LOWERCASE = tuple("abcdefghijklmnopqrstuvwxyz")
CLASSES = (DAYS, MONTHS, NUMBERS, ORDINALS, LETTERS, LOWERCASE)
CYCLIC = (DAYS, MONTHS)  # classes whose last word is followed by the first
PREFIX_WORD, LIST_LENGTH = "The", 3  # word before a single word; number of words in a list


class OrderedWord(NamedTuple):
    """A word with a successor.

    Attributes:
        text: List of words that ends with it.
        token: Its token.
        successor: Token of its successor.
        others: Tokens of all words of the class except the successor.
    """

    text: str
    token: int
    successor: int
    others: tuple[int, ...]


class SuccessorMetric(PromptMetric):
    """Successor score. Computed by `hw.profile(model, prompts=True)`.

    >>> SuccessorMetric().names
    ('successor', 'successor baseline', 'successor value-weighted')
    """

    def __init__(self) -> None:
        super().__init__(
            "successor", "words of lists whose successor it writes", "writes the next word of a list",
            "days, months, numbers and letters",
        )  # fmt: skip

    def measure(self, model: ModelProtocol, seed: int) -> tuple[SampleTotals, ExampleStore]:
        """Measure each word alone and at the end of a list."""
        residual, tokenizer = require_lm_residual_stream(model, "a successor head"), tokenizer_of(model)
        members = single_token_words(tokenizer)
        if len(members) < MIN_SAMPLES:
            raise too_few_single_tokens_error(
                f"{sum(map(len, CLASSES))} days, months, numbers and letters", len(members), MIN_SAMPLES
            )
        prompts = [replace(list_prompt(tokenizer, member), sample=sample) for sample, member in enumerate(members)]
        responses = run_prompts(model, prompts, residual, self.score_spec.name)
        score, baseline = writes_successor(model, residual, members)
        correct = responses.correct[:, None]
        score = score * responses.wins  # the head must also write the successor in the list
        totals = SampleTotals(
            score * correct, baseline * correct, responses.wins * correct, responses.correct.astype(int)
        )
        return totals.require_enough_samples(
            "lists of days, months, numbers and letters", "continues"
        ), responses.examples


def single_token_words(tokenizer: Tokenizer) -> list[OrderedWord]:
    """Return the words that are single tokens and whose successors are, too. Classes with fewer than three such words are
    left out."""
    members: list[OrderedWord] = []
    for words in CLASSES:
        tokens = {word: single_token_of_word(tokenizer, PREFIX_WORD, word) for word in words}
        single_tokens = {word: token for word, token in tokens.items() if token is not None}
        if len(single_tokens) < LIST_LENGTH or len({*single_tokens.values()}) < len(single_tokens):
            continue
        for index, word in enumerate(words):
            sequence = [words[(index + step) % len(words)] for step in range(1 - LIST_LENGTH, 2)]
            wraps = index + 1 - LIST_LENGTH < 0 or index + 1 == len(words)
            if (wraps and words not in CYCLIC) or not {word, sequence[-1]} <= {*single_tokens}:
                continue
            text = ", ".join(sequence[:-1]) + ","
            if single_token_of_word(tokenizer, text, sequence[-1]) == single_tokens[sequence[-1]]:
                others = tuple(token for other, token in single_tokens.items() if other != sequence[-1])
                members.append(OrderedWord(text, single_tokens[word], single_tokens[sequence[-1]], others))
    return members


def writes_successor(
    model: ModelProtocol, residual: ResidualStream, members: Sequence[OrderedWord]
) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each head writes the successor of each word by weights, and its baseline, (words, heads) each."""
    first, second = _residual_inputs(model, residual, members)  # (members, D) each
    score, baseline = [], []
    for hook_point in model.gathered_hook_points():
        step = residual.layers[hook_point.address.layer]
        if step.unsupported_reason:
            raise UnsupportedModelError(
                f"the direct effect of heads on logits cannot be computed for this model: {step.unsupported_reason}"
            )
        x = first if hook_point.address.layer == min(residual.layers) else second
        x = x if step.norm is None else step.norm(x)
        values = []
        for address in hook_point.head_addresses:
            head = model.heads[address]
            value = at_least_float32(x) @ at_least_float32(head.W_V)
            values.append(value if head.b_V is None else value + head.b_V)
        if not values:
            continue
        hits, chance = _successor_hits(members, torch.stack(values, 1), hook_point, residual)
        score.append(hits)
        baseline.append(chance)
    return np.concatenate(score, 1), np.concatenate(baseline, 1)


def _successor_hits(
    members: Sequence[OrderedWord], values: Tensor, hook_point: HookPoint, residual: ResidualStream
) -> tuple[np.ndarray, np.ndarray]:
    """Compute `writes_successor` for the heads of one hook point. `values` are their value vectors, (words, H, e)."""
    token_ids = sorted({token for member in members for token in (member.successor, *member.others)})
    column = {token: index for index, token in enumerate(token_ids)}
    tokens = torch.tensor(token_ids, device=values.device)
    token_scores = (
        to_float64(torch.einsum("nhe,hec->nhc", values, z_to_logits_matrix(residual, hook_point, tokens))).cpu().numpy()
    )
    score, baseline = np.zeros(token_scores.shape[:2]), np.zeros(token_scores.shape[:2])
    for index, member in enumerate(members):
        # (H, class)
        class_scores = token_scores[index][:, [column[token] for token in (member.successor, *member.others)]]
        best = class_scores == class_scores.max(1, keepdims=True)
        best = best / best.sum(1, keepdims=True)  # divide ties equally
        self_fraction = best[:, 1 + member.others.index(member.token)]
        score[index], baseline[index] = best[:, 0], (1 - self_fraction) / len(member.others)
    return score, baseline


def _residual_inputs(
    model: ModelProtocol, residual: ResidualStream, members: Sequence[OrderedWord]
) -> tuple[Tensor, Tensor]:
    """Return the residual stream at each word, preceded by one other word: the embedding and after the first layer."""
    tokenizer = tokenizer_of(model)
    prefix = [*tokenizer.template_ids[0], *tokenizer.encode(PREFIX_WORD, add_special_tokens=False)]
    ids = torch.tensor([[*prefix, member.token] for member in members], device=model.device)
    layers = sorted(residual.layers)[:2]
    with _capture_norm_inputs(residual, layers) as inputs:
        forward_ids(model, ids)
    states = [inputs[layer].reshape(len(members), -1, model.spec.width)[:, -1] for layer in layers]
    return states[0], states[-1]


@contextmanager
def _capture_norm_inputs(residual: ResidualStream, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Capture the inputs of the norms of some layers while the context is active."""
    inputs: dict[int, Tensor] = {}
    hooks = []

    def keep(module: nn.Module, arguments: tuple[Tensor, ...], layer: int) -> None:
        inputs[layer] = arguments[0]

    for layer in layers:
        norm = residual.layers[layer].norm
        if norm is None:
            raise UnsupportedModelError(
                "the direct effect of heads on logits cannot be computed for this model, because its layers read the "
                "residual stream without a norm."
            )
        hooks.append(norm.register_forward_pre_hook(partial(keep, layer=layer)))
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def list_prompt(tokenizer: Tokenizer, member: OrderedWord) -> PromptWithTargets:
    """Make a prompt from the list of a word. The target is its successor, the distractors are the rest of the class."""
    ids = (*tokenizer.template_ids[0], *tokenizer.encode(member.text, add_special_tokens=False))
    row = len(ids) - 1
    position = (
        row - 1 if ids[row - 1] == member.token else row
    )  # the comma is a token of its own, or part of the word's token
    return PromptWithTargets(ids, (ExpectedToken(row, position, member.successor, member.others),))
