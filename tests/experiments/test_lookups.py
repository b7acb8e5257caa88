"""Readers whose weights are set by hand: a head for each look-up is right everywhere, one for two cannot be."""

import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.experiments.offset_lookup_task import (
    LookupModel,
    OffsetLookupTask,
    mean_and_joint_lookup_accuracy,
    train_and_evaluate_lookups,
)

SYMBOLS, LENGTH = 5, 6
SHARP = 30.0  # a score that leaves nothing to the other places


@torch.no_grad()
def make_lookup_model(offsets: tuple[int, ...], offsets_by_head: tuple[tuple[int, ...], ...]) -> LookupModel:
    """One-hot symbols and places; head h looks at offsets `looks[h]` in equal parts, look-up i reads head i, or the last."""
    task = OffsetLookupTask(offsets, SYMBOLS, LENGTH)
    heads, d = len(offsets_by_head), SYMBOLS + LENGTH
    lookup_model = LookupModel(task, heads, width=heads * d)
    for weight in lookup_model.parameters():
        weight.zero_()
    lookup_model.symbols.weight[:, :SYMBOLS] = torch.eye(SYMBOLS)
    lookup_model.positions.weight[:, SYMBOLS:d] = torch.eye(LENGTH)
    for index, head_offsets in enumerate(offsets_by_head):
        head = lookup_model.attention.heads[index]
        for position in range(LENGTH):
            for target in (position - offset for offset in head_offsets if offset <= position):
                head.W_Q[SYMBOLS + position, target] = SHARP * d**0.5
            head.W_K[SYMBOLS + position, position] = 1
        head.W_V[:SYMBOLS, :SYMBOLS] = torch.eye(SYMBOLS)
        head.W_O[:, index * d : (index + 1) * d] = torch.eye(d)
    for i in range(len(offsets)):
        start = min(i, heads - 1) * d
        lookup_model.readout.weight[i * SYMBOLS : (i + 1) * SYMBOLS, start : start + SYMBOLS] = torch.eye(SYMBOLS)
    return lookup_model


def test_lookup_task_answers_at_offsets():
    task = OffsetLookupTask((1, 3), symbols=9, length=5)
    assert task.targets(torch.tensor([[4, 5, 6, 7, 8]])).tolist() == [[[6, 4], [7, 5]]]


def test_lookup_accuracy_one_head_per_lookup_is_one():
    lookup_model = make_lookup_model((1, 2), ((1,), (2,)))
    ids = lookup_model.task.sample(40, torch.Generator().manual_seed(0))
    assert mean_and_joint_lookup_accuracy(lookup_model, ids) == (1.0, 1.0)


def test_lookup_accuracy_one_head_for_two_lookups():
    lookup_model = make_lookup_model((1, 2), ((1, 2),))
    ids = lookup_model.task.sample(40, torch.Generator().manual_seed(0))
    answers = lookup_model.task.targets(ids)
    same = float((answers[..., 0] == answers[..., 1]).float().mean())
    assert mean_and_joint_lookup_accuracy(lookup_model, ids) == pytest.approx((0.5 + same / 2, same))


def test_learn_lookups_needs_one_head_per_lookup():
    task = OffsetLookupTask((1, 2), symbols=16, length=6)
    assert train_and_evaluate_lookups(2, task, width=32, steps=120)[1] > 0.9
    assert train_and_evaluate_lookups(1, task, width=32, steps=120)[1] < 0.5


def test_lookup_task_invalid_offsets_raise():
    with pytest.raises(HeadwiseError, match="between 1 and 5"):
        OffsetLookupTask((0, 2), length=6)
