"""Successor heads: shown a Monday, who writes Tuesday? (https://arxiv.org/abs/2312.09230)

Of days, months, numbers and letters each that is followed by another is one case, if the model itself goes on with a list
that ends with it: `Sunday, Monday,` with Tuesday. Two things make a hit. By weights: what the head would write if it looked
at the word and nothing else (W_V, W_O, the last norm's gain, the unembedding) is largest, of all members of its class, for
the one that comes next. And in the list: what the head does write there is largest for it as well, so that a head which
rests elsewhere does not score. By weights, what it looks at is the word as the first layer leaves it, where it stands behind
one other: what a model knows of a token's identity is there, and not yet what later layers expect to follow it. Heads of the
first layer read the embedding. The baseline are shuffled pairs: the chance that a member drawn from the others, but for the
word itself, is the one written most by weights. So a head that copies scores 0, and one that always writes the same member
no more than its baseline. The valued score is the second condition alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.metrics.prompts import (
    ENOUGH,
    Due,
    DuePrompt,
    PromptMeasure,
    UnitSums,
    ask_prompts,
    check_reads_words,
    next_token,
    to_words,
    too_few,
)
from headwise.analysis.metrics.role_examples import Cases
from headwise.analysis.recording.batching import read, tokenizer_of
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Site
from headwise.kernels.precision import at_least_float32
from headwise.model import AnyModel, Wiring
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
SMALL = tuple("abcdefghijklmnopqrstuvwxyz")
CLASSES = (DAYS, MONTHS, NUMBERS, ORDINALS, LETTERS, SMALL)
ROUND = (DAYS, MONTHS)  # the last is followed by the first
BEFORE, SAID = "The", 3  # the word before one that stands alone; members of a list that is gone on with


class Member(NamedTuple):
    """A word that is followed by another, by its class."""

    text: str  # a list that ends with it
    token: int
    next: int
    others: tuple[int, ...]  # the class but for the next


class Successor(PromptMeasure):
    """`hw.profile(model, prompts=True)`.

    >>> Successor().names
    ('successor', 'successor null', 'successor valued')
    """

    def __init__(self) -> None:
        super().__init__(
            "successor", "words of a list for which it writes the next", "writes what comes next in a list",
            "days, months, numbers and letters",
        )  # fmt: skip

    def measure(self, model: AnyModel, seed: int) -> tuple[UnitSums, Cases]:
        """Each member alone, and at the end of a list."""
        wiring, tokenizer = check_reads_words(model, "a successor head"), tokenizer_of(model)
        members = find_members(tokenizer)
        if len(members) < ENOUGH:
            raise too_few(f"{sum(map(len, CLASSES))} days, months, numbers and letters", len(members), ENOUGH)
        prompts = [replace(list_prompt(tokenizer, one), unit=unit) for unit, one in enumerate(members)]
        listed = ask_prompts(model, prompts, wiring, self.score.name)
        score, null = written(model, wiring, members)
        right = listed.right[:, None]
        score = score * listed.wins  # a head that would write it and never looks there does nothing
        made = UnitSums(score * right, null * right, listed.wins * right, listed.right.astype(int))
        return made.checked("lists of days, months, numbers and letters", "the model goes on with"), listed.cases


def find_members(tokenizer: Tokenizer) -> list[Member]:
    """All whose list, whose next and who are single tokens; a class with fewer than three of them is left out."""
    made: list[Member] = []
    for words in CLASSES:
        tokens = {word: next_token(tokenizer, BEFORE, word) for word in words}
        known = {word: token for word, token in tokens.items() if token is not None}
        if len(known) < SAID or len({*known.values()}) < len(known):
            continue
        for place, word in enumerate(words):
            run = [words[(place + step) % len(words)] for step in range(1 - SAID, 2)]
            wraps = place + 1 - SAID < 0 or place + 1 == len(words)
            if (wraps and words not in ROUND) or not {word, run[-1]} <= {*known}:
                continue
            text = ", ".join(run[:-1]) + ","
            if next_token(tokenizer, text, run[-1]) == known[run[-1]]:
                others = tuple(token for other, token in known.items() if other != run[-1])
                made.append(Member(text, known[word], known[run[-1]], others))
    return made


def written(model: AnyModel, wiring: Wiring, members: Sequence[Member]) -> tuple[np.ndarray, np.ndarray]:
    """Whether each head writes most for the next of each member when it looks at nothing else, and how often it would by
    shuffled pairs: (members, heads) each."""
    first, second = _streams(model, wiring, members)  # (members, D) each
    score, null = [], []
    for site in model.all_sites():
        step = wiring.steps[site.address.layer]
        if step.unread:
            raise HeadwiseError(f"what a head would write cannot be read off: {step.unread}")
        x = first if site.address.layer == min(wiring.steps) else second
        x = x if step.norm is None else step.norm(x)
        values = []
        for address in site.addresses:
            head = model.heads[address]
            value = at_least_float32(x) @ at_least_float32(head.W_V)
            values.append(value if head.b_V is None else value + head.b_V)
        if not values:
            continue
        hits, chance = _most(members, torch.stack(values, 1), site, wiring)
        score.append(hits)
        null.append(chance)
    return np.concatenate(score, 1), np.concatenate(null, 1)


def _most(members: Sequence[Member], values: Tensor, site: Site, wiring: Wiring) -> tuple[np.ndarray, np.ndarray]:
    """The same for the heads of a site, from the values they would fetch, (members, H, e)."""
    words = sorted({token for one in members for token in (one.next, *one.others)})
    place = {token: number for number, token in enumerate(words)}
    tokens = torch.tensor(words, device=values.device)
    said = torch.einsum("nhe,hec->nhc", values, to_words(wiring, site, tokens)).double().cpu().numpy()
    score, null = np.zeros(said.shape[:2]), np.zeros(said.shape[:2])
    for number, one in enumerate(members):
        among = said[number][:, [place[token] for token in (one.next, *one.others)]]  # (H, class)
        best = among == among.max(1, keepdims=True)
        best = best / best.sum(1, keepdims=True)  # of equals each has its share
        itself = best[:, 1 + one.others.index(one.token)]
        score[number], null[number] = best[:, 0], (1 - itself) / len(one.others)
    return score, null


def _streams(model: AnyModel, wiring: Wiring, members: Sequence[Member]) -> tuple[Tensor, Tensor]:
    """The stream where each member stands behind one other word, as it begins and as the first layer leaves it."""
    tokenizer = tokenizer_of(model)
    before = [*tokenizer.around[0], *tokenizer.encode(BEFORE, special=False)]
    ids = torch.tensor([[*before, one.token] for one in members], device=model.device)
    layers = sorted(wiring.steps)[:2]
    with _entering(wiring, layers) as caught:
        read(model, ids)
    made = [caught[layer].reshape(len(members), -1, model.spec.width)[:, -1] for layer in layers]
    return made[0], made[-1]


@contextmanager
def _entering(wiring: Wiring, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """What enters the norms of some layers, while open."""
    caught: dict[int, Tensor] = {}
    hooks = []

    def keep(module: nn.Module, given: tuple[Tensor, ...], layer: int) -> None:
        caught[layer] = given[0]

    for layer in layers:
        norm = wiring.steps[layer].norm
        if norm is None:
            raise HeadwiseError("what a head would write cannot be read off: the stream is read without a norm.")
        hooks.append(norm.register_forward_pre_hook(partial(keep, layer=layer)))
    try:
        yield caught
    finally:
        for hook in hooks:
            hook.remove()


def list_prompt(tokenizer: Tokenizer, member: Member) -> DuePrompt:
    """A list that ends with a member: its next is due, against the rest of the class."""
    ids = (*tokenizer.around[0], *tokenizer.encode(member.text, special=False))
    row = len(ids) - 1
    place = row - 1 if ids[row - 1] == member.token else row  # its comma is a token, or a part of it
    return DuePrompt(ids, (Due(row, place, member.next, member.others),))
