"""Which head of a student imitates which head of its teacher: as given, by order, or by where they look today."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.distillation.activations import ActivationCapture
from headwise.distillation.distill_losses import even_layer_pairs
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import Address
from headwise.text.corpus import Corpus

HeadPair = tuple[Address, Address]
SAMPLE_TEXTS, SAMPLE_TOKENS = 16, 64  # what heads are compared on
SAMPLE_CHARS = 16 * SAMPLE_TOKENS  # which hold so many tokens


def parse_pairs(student: ModelProtocol, teacher: ModelProtocol, pairs: Sequence[tuple[str, str]]) -> list[HeadPair]:
    """Pairs by address; heads that are not there are refused."""
    parsed = []
    for pair in pairs:
        try:
            student_head, teacher_head = (Address.parse(str(head)) for head in pair)
        except (ValueError, TypeError):
            raise HeadwiseError(f'a pair is two heads, ("1.0", "5.2"), the student\'s first; got {pair!r}.') from None
        for model, head, owner in ((student, student_head, "student"), (teacher, teacher_head, "teacher")):
            if head not in model.spec.head_addresses:
                raise HeadwiseError(f"the {owner} has no head {head}; it has {_describe_range(model)}.")
        if student_head.stack != teacher_head.stack:
            raise HeadwiseError(
                f"{student_head} and {teacher_head} look at different things; both must be of one stack."
            )
        parsed.append((student_head, teacher_head))
    if not parsed:
        raise HeadwiseError('there is no pair of heads to learn from; give some, or "order" or "best".')
    return parsed


def pair_heads_by_order(student: ModelProtocol, teacher: ModelProtocol) -> list[HeadPair]:
    """Layers spread evenly over the teacher's, and the heads of a layer over its heads."""
    pairs = []
    for stack in dict.fromkeys(layer_address.stack for layer_address in student.spec.layer_addresses):
        student_layers, teacher_layers = _heads_by_layer(student, stack), _heads_by_layer(teacher, stack)
        if not student_layers or not teacher_layers:
            continue
        for i, k in even_layer_pairs(len(student_layers), len(teacher_layers)):
            pairs += [
                (student_layers[i][a], teacher_layers[k][b])
                for a, b in even_layer_pairs(len(student_layers[i]), len(teacher_layers[k]))
            ]
    if not pairs:
        raise HeadwiseError("student and teacher have no stack of heads in common.")
    return pairs


@torch.no_grad()
def pair_heads_by_attention(
    student: ModelProtocol, teacher: ModelProtocol, texts: Sequence[Sequence[int]]
) -> list[HeadPair]:
    """Each of the student's heads with one of the teacher's, so that on these texts they look as much alike as may be.

    The sum of distances is the smallest there is (the assignment of https://doi.org/10.1002/nav.3800020109); a teacher's
    head is taken twice only where the student has more heads than it.
    """
    from scipy.optimize import linear_sum_assignment

    if student.spec.kind == "encoder-decoder":
        raise HeadwiseError(
            'heads of an encoder-decoder are paired by "order", or as you say; "best" is for one stack.'
        )
    student_heads, teacher_heads = list(student.spec.head_addresses), list(teacher.spec.head_addresses)
    if not student_heads or not teacher_heads:
        raise HeadwiseError("student and teacher both need heads, to be paired.")
    max_length = min(SAMPLE_TOKENS, student.spec.context, teacher.spec.context)
    distances = np.zeros((len(student_heads), len(teacher_heads)))
    for ids in texts:
        row = torch.tensor([list(ids)[:max_length]])
        distances += _distances(
            _attention_maps(student, row, student_heads), _attention_maps(teacher, row, teacher_heads)
        )
    matches = {}
    while len(matches) < len(student_heads):  # a second round only where there are more heads than teachers
        unmatched = [i for i in range(len(student_heads)) if i not in matches]
        matches |= {unmatched[i]: int(k) for i, k in zip(*linear_sum_assignment(distances[unmatched]), strict=True)}
    return [(head, teacher_heads[matches[i]]) for i, head in enumerate(student_heads)]


def sample_texts(corpus: Any) -> list[str]:
    """Where texts begin, the first sixteen; of fewer, long ones, as many places spread over them.

    >>> len(sample_texts("to be or not to be " * 2000)), sample_texts(["one text", "another"])
    (16, ['one text', 'another'])
    """
    texts = [chunk.text for chunk in islice(Corpus.of(corpus).chunks(), SAMPLE_TEXTS)]
    if len(texts) == SAMPLE_TEXTS:
        return [text[:SAMPLE_CHARS] for text in texts]
    excerpts = [text[i : i + SAMPLE_CHARS] for text in texts for i in range(0, len(text), SAMPLE_CHARS)]
    return [
        excerpts[i * len(excerpts) // min(SAMPLE_TEXTS, len(excerpts))] for i in range(min(SAMPLE_TEXTS, len(excerpts)))
    ]


def _distances(student_maps: Tensor, teacher_maps: Tensor) -> np.ndarray:
    """Jensen–Shannon divergences, in bits, of the rows of two sets of maps, averaged: (H, T, S), (K, T, S) → (H, K)"""
    distances = np.empty((len(student_maps), len(teacher_maps)))
    for i, student_map in enumerate(student_maps):
        mixture = (student_map + teacher_maps) / 2  # (K, T, S)
        divergence = _entropy(mixture) - (_entropy(student_map) + _entropy(teacher_maps)) / 2  # (K, T)
        distances[i] = divergence.mean(-1).cpu().numpy() / np.log(2)
    return distances


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)


def _attention_maps(model: ModelProtocol, ids: Tensor, heads: Sequence[Address]) -> Tensor:
    """(H, T, S) of one text."""
    capture = ActivationCapture(model, layer_addresses={head.layer_address for head in heads})
    with eval_mode(model):
        calls = capture(ids.to(model.device)).calls
    maps = {layer_address: call.maps()[0].double() for layer_address, call in calls.items()}
    return torch.stack(
        [maps[head.layer_address][calls[head.layer_address].hook_point.head_index(head)] for head in heads]
    )


def _heads_by_layer(model: ModelProtocol, stack: str) -> list[list[Address]]:
    """Heads by layer, of one stack; emptied layers are left out."""
    layers: dict[int, list[Address]] = {}
    for head in model.spec.head_addresses:
        if head.stack == stack:
            layers.setdefault(head.layer, []).append(head)
    return list(layers.values())


def _describe_range(model: ModelProtocol) -> str:
    heads = model.spec.head_addresses
    return f"{heads[0]} to {heads[-1]}" if heads else "none"
