"""Readers whose weights are set by hand: a head for each look-up is right everywhere, one for two cannot be."""

import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.experiments.lookups import LookupModel, LookUps, learn_lookups, marks

SYMBOLS, LENGTH = 5, 6
SHARP = 30.0  # a score that leaves nothing to the other places


@torch.no_grad()
def by_hand(offsets: tuple[int, ...], looks: tuple[tuple[int, ...], ...]) -> LookupModel:
    """One-hot symbols and places; head h looks at offsets `looks[h]` in equal parts, look-up i reads head i, or the last."""
    task = LookUps(offsets, SYMBOLS, LENGTH)
    heads, d = len(looks), SYMBOLS + LENGTH
    reader = LookupModel(task, heads, width=heads * d)
    for weight in reader.parameters():
        weight.zero_()
    reader.symbols.weight[:, :SYMBOLS] = torch.eye(SYMBOLS)
    reader.places.weight[:, SYMBOLS:d] = torch.eye(LENGTH)
    for number, back in enumerate(looks):
        head = reader.attention.heads[number]
        for place in range(LENGTH):
            for other in (place - one for one in back if one <= place):
                head.W_Q[SYMBOLS + place, other] = SHARP * d**0.5
            head.W_K[SYMBOLS + place, place] = 1
        head.W_V[:SYMBOLS, :SYMBOLS] = torch.eye(SYMBOLS)
        head.W_O[:, number * d : (number + 1) * d] = torch.eye(d)
    for i in range(len(offsets)):
        start = min(i, heads - 1) * d
        reader.readout.weight[i * SYMBOLS : (i + 1) * SYMBOLS, start : start + SYMBOLS] = torch.eye(SYMBOLS)
    return reader


def test_answers_stood_where_they_should():
    task = LookUps((1, 3), symbols=9, length=5)
    assert task.answers(torch.tensor([[4, 5, 6, 7, 8]])).tolist() == [[[6, 4], [7, 5]]]


def test_a_head_for_each_look_up_is_right_everywhere():
    reader = by_hand((1, 2), ((1,), (2,)))
    ids = reader.task.draw(40, torch.Generator().manual_seed(0))
    assert marks(reader, ids) == (1.0, 1.0)


def test_one_head_for_two_is_right_once_where_they_differ():
    reader = by_hand((1, 2), ((1, 2),))
    ids = reader.task.draw(40, torch.Generator().manual_seed(0))
    answers = reader.task.answers(ids)
    same = float((answers[..., 0] == answers[..., 1]).float().mean())
    assert marks(reader, ids) == pytest.approx((0.5 + same / 2, same))


def test_heads_are_learned_one_for_each():
    task = LookUps((1, 2), symbols=16, length=6)
    assert learn_lookups(2, task, width=32, steps=120)[1] > 0.9
    assert learn_lookups(1, task, width=32, steps=120)[1] < 0.5


def test_offsets_outside_the_row_are_refused():
    with pytest.raises(HeadwiseError, match="between 1 and 5"):
        LookUps((0, 2), length=6)
