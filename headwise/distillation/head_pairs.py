"""Which head of a student imitates which head of its teacher: as given, by order, or by where they look today."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.distillation.activations import Watcher
from headwise.distillation.distill_losses import spread_layers
from headwise.errors import HeadwiseError
from headwise.model import AnyModel, quiet
from headwise.spec import Address
from headwise.text.corpus import Corpus

Pair = tuple[Address, Address]
TEXTS, TOKENS = 16, 64  # what heads are compared on
LETTERS = 16 * TOKENS  # which hold so many tokens


def given_pairs(student: AnyModel, teacher: AnyModel, pairs: Sequence[tuple[str, str]]) -> list[Pair]:
    """Pairs by address; heads that are not there are refused."""
    made = []
    for pair in pairs:
        try:
            one, other = (Address.parse(str(head)) for head in pair)
        except (ValueError, TypeError):
            raise HeadwiseError(f'a pair is two heads, ("1.0", "5.2"), the student\'s first; got {pair!r}.') from None
        for model, head, who in ((student, one, "student"), (teacher, other, "teacher")):
            if head not in model.spec.addresses:
                raise HeadwiseError(f"the {who} has no head {head}; it has {_range(model)}.")
        if one.stack != other.stack:
            raise HeadwiseError(f"{one} and {other} look at different things; both must be of one stack.")
        made.append((one, other))
    if not made:
        raise HeadwiseError('there is no pair of heads to learn from; give some, or "order" or "best".')
    return made


def ordered_pairs(student: AnyModel, teacher: AnyModel) -> list[Pair]:
    """Layers spread evenly over the teacher's, and the heads of a layer over its heads."""
    made = []
    for stack in dict.fromkeys(site.stack for site in student.spec.sites):
        ours, theirs = _layers(student, stack), _layers(teacher, stack)
        if not ours or not theirs:
            continue
        for i, k in spread_layers(len(ours), len(theirs)):
            made += [(ours[i][a], theirs[k][b]) for a, b in spread_layers(len(ours[i]), len(theirs[k]))]
    if not made:
        raise HeadwiseError("student and teacher have no stack of heads in common.")
    return made


@torch.no_grad()
def best_pairs(student: AnyModel, teacher: AnyModel, texts: Sequence[Sequence[int]]) -> list[Pair]:
    """Each of the student's heads with one of the teacher's, so that on these texts they look as much alike as may be.

    The sum of distances is the smallest there is (the assignment of https://doi.org/10.1002/nav.3800020109); a teacher's
    head is taken twice only where the student has more heads than it.
    """
    from scipy.optimize import linear_sum_assignment

    if student.spec.kind == "encoder-decoder":
        raise HeadwiseError(
            'heads of an encoder-decoder are paired by "order", or as you say; "best" is for one stack.'
        )
    ours, theirs = list(student.spec.addresses), list(teacher.spec.addresses)
    if not ours or not theirs:
        raise HeadwiseError("student and teacher both need heads, to be paired.")
    longest = min(TOKENS, student.spec.context, teacher.spec.context)
    apart = np.zeros((len(ours), len(theirs)))
    for ids in texts:
        row = torch.tensor([list(ids)[:longest]])
        apart += _distances(_maps(student, row, ours), _maps(teacher, row, theirs))
    made = {}
    while len(made) < len(ours):  # a second round only where there are more heads than teachers
        left = [i for i in range(len(ours)) if i not in made]
        made |= {left[i]: int(k) for i, k in zip(*linear_sum_assignment(apart[left]), strict=True)}
    return [(head, theirs[made[i]]) for i, head in enumerate(ours)]


def samples(corpus: Any) -> list[str]:
    """Where texts begin, the first sixteen; of fewer, long ones, as many places spread over them.

    >>> len(samples("to be or not to be " * 2000)), samples(["one text", "another"])
    (16, ['one text', 'another'])
    """
    texts = [piece.text for piece in islice(Corpus.of(corpus).pieces(), TEXTS)]
    if len(texts) == TEXTS:
        return [text[:LETTERS] for text in texts]
    places = [text[i : i + LETTERS] for text in texts for i in range(0, len(text), LETTERS)]
    return [places[i * len(places) // min(TEXTS, len(places))] for i in range(min(TEXTS, len(places)))]


def _distances(ours: Tensor, theirs: Tensor) -> np.ndarray:
    """Jensen–Shannon divergences, in bits, of the rows of two sets of maps, averaged: (H, T, S), (K, T, S) → (H, K)"""
    made = np.empty((len(ours), len(theirs)))
    for i, map in enumerate(ours):
        mixed = (map + theirs) / 2  # (K, T, S)
        shared = _entropy(mixed) - (_entropy(map) + _entropy(theirs)) / 2  # (K, T)
        made[i] = shared.mean(-1).cpu().numpy() / np.log(2)
    return made


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)


def _maps(model: AnyModel, ids: Tensor, heads: Sequence[Address]) -> Tensor:
    """(H, T, S) of one text."""
    watch = Watcher(model, sites={head.site for head in heads})
    with quiet(model):
        calls = watch(ids.to(model.device)).calls
    maps = {site: seen.maps()[0].double() for site, seen in calls.items()}
    return torch.stack([maps[head.site][calls[head.site].site.index(head)] for head in heads])


def _layers(model: AnyModel, stack: str) -> list[list[Address]]:
    """Heads by layer, of one stack; emptied layers are left out."""
    layers: dict[int, list[Address]] = {}
    for head in model.spec.addresses:
        if head.stack == stack:
            layers.setdefault(head.layer, []).append(head)
    return list(layers.values())


def _range(model: AnyModel) -> str:
    heads = model.spec.addresses
    return f"{heads[0]} to {heads[-1]}" if heads else "none"
