"""Pair each student head with a teacher head: by address, by order, or by the distance of their attention maps."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.distillation.activations import ActivationExtractor
from headwise.distillation.distill_losses import even_layer_pairs
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol, eval_mode
from headwise.spec import Address
from headwise.text.corpus import Corpus

HeadPair = tuple[Address, Address]
SAMPLE_TEXTS, SAMPLE_TOKENS = 16, 64  # texts, and tokens per text, on which attention maps are compared
SAMPLE_CHARS = 16 * SAMPLE_TOKENS  # characters that contain at least SAMPLE_TOKENS tokens


def parse_pairs(student: ModelProtocol, teacher: ModelProtocol, pairs: Sequence[tuple[str, str]]) -> list[HeadPair]:
    """Parse pairs of head addresses. Raise if a head does not exist."""
    parsed = []
    for pair in pairs:
        try:
            student_head, teacher_head = (Address.parse(str(head)) for head in pair)
        except (ValueError, TypeError):
            raise ArgumentError(
                f'head_pairs: a pair is a student head and a teacher head. Got {pair!r}. Use ("1.0", "5.2").'
            ) from None
        for model, head, owner in ((student, student_head, "student"), (teacher, teacher_head, "teacher")):
            if head not in model.spec.head_addresses:
                raise ArgumentError(
                    f"head_pairs: the {owner} has no head {head}; it has {_describe_range(model)}. Use one of its heads."
                )
        if student_head.stack != teacher_head.stack:
            raise ArgumentError(
                f"head_pairs: {student_head} and {teacher_head} belong to different stacks. Pair heads of the same stack."
            )
        parsed.append((student_head, teacher_head))
    if not parsed:
        raise ArgumentError(
            'head_pairs: at least one pair is needed. Got none. Use "order", "best" or a list: [("1.0", "5.2")].'
        )
    return parsed


def pair_heads_by_order(student: ModelProtocol, teacher: ModelProtocol) -> list[HeadPair]:
    """Pair layers evenly with teacher layers, and the heads of a layer evenly with the heads of its teacher layer."""
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
        raise UnsupportedModelError(
            "student, teacher: no heads can be paired, because the models have no attention stack in common (such as the "
            "decoder of an encoder-decoder). Use a teacher of the same kind as the student."
        )
    return pairs


@torch.no_grad()
def pair_heads_by_attention(
    student: ModelProtocol, teacher: ModelProtocol, texts: Sequence[Sequence[int]]
) -> list[HeadPair]:
    """Pair each student head with a teacher head so that the sum of attention map distances on these texts is minimal.

    This is the linear assignment problem (https://doi.org/10.1002/nav.3800020109). A teacher head is paired twice only if the
    student has more heads than the teacher.
    """
    from scipy.optimize import linear_sum_assignment

    if student.spec.kind == "encoder-decoder":
        raise UnsupportedModelError(
            'head_pairs: "best" does not support encoder-decoders, which have several stacks. '
            'Use "order" or a list of pairs: [("cross.0.0", "cross.0.1")].'
        )
    student_heads, teacher_heads = list(student.spec.head_addresses), list(teacher.spec.head_addresses)
    if not student_heads or not teacher_heads:
        raise UnsupportedModelError("head_pairs: student and teacher both need heads. Use models with heads.")
    max_length = min(SAMPLE_TOKENS, student.spec.context, teacher.spec.context)
    distances = np.zeros((len(student_heads), len(teacher_heads)))
    for ids in texts:
        row = torch.tensor([list(ids)[:max_length]], device="cpu")
        distances += _distances(
            _attention_maps(student, row, student_heads), _attention_maps(teacher, row, teacher_heads)
        )
    matches = {}
    while len(matches) < len(student_heads):  # more than one round only if the student has more heads
        unmatched = [i for i in range(len(student_heads)) if i not in matches]
        matches |= {unmatched[i]: int(k) for i, k in zip(*linear_sum_assignment(distances[unmatched]), strict=True)}
    return [(head, teacher_heads[matches[i]]) for i, head in enumerate(student_heads)]


def sample_texts(corpus: Any) -> list[str]:
    """Return excerpts of the first sixteen texts. If there are fewer texts, return up to sixteen excerpts, evenly spaced.

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
    """Return mean Jensen–Shannon divergences of the rows of two sets of maps, in bits: (H, T, S), (K, T, S) → (H, K)"""
    distances = np.empty((len(student_maps), len(teacher_maps)))
    for i, student_map in enumerate(student_maps):
        mixture = (student_map + teacher_maps) / 2  # (K, T, S)
        divergence = _entropy(mixture) - (_entropy(student_map) + _entropy(teacher_maps)) / 2  # (K, T)
        distances[i] = divergence.mean(-1).cpu().numpy() / np.log(2)
    return distances


def _entropy(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p).sum(-1)


def _attention_maps(model: ModelProtocol, ids: Tensor, heads: Sequence[Address]) -> Tensor:
    """Return attention maps of one text, (H, T, S)."""
    capture = ActivationExtractor(model, layer_addresses={head.layer_address for head in heads})
    with eval_mode(model):
        calls = capture(ids.to(model.device)).calls
    maps = {layer_address: to_float64(call.maps()[0]) for layer_address, call in calls.items()}
    return torch.stack(
        [maps[head.layer_address][calls[head.layer_address].hook_point.head_index(head)] for head in heads]
    )


def _heads_by_layer(model: ModelProtocol, stack: str) -> list[list[Address]]:
    """Return the heads of one stack by layer, without layers that have no heads."""
    layers: dict[int, list[Address]] = {}
    for head in model.spec.head_addresses:
        if head.stack == stack:
            layers.setdefault(head.layer, []).append(head)
    return list(layers.values())


def _describe_range(model: ModelProtocol) -> str:
    heads = model.spec.head_addresses
    return f"{heads[0]} to {heads[-1]}" if heads else "none"
