"""Which tokens a step reads, counted."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import HeadwiseError
from headwise.model.loss import IGNORE
from headwise.training.batches import Anywhere, Texts, Windows, causal, in_order, masked

sizes = st.tuples(st.integers(1, 9), st.integers(0, 60)).map(lambda pair: (pair[0], pair[0] + 1 + pair[1]))


@given(sizes, st.integers(0, 2**31 - 1), st.integers(0, 3))
def test_an_epoch_reads_each_window_once(size: tuple[int, int], seed: int, epoch: int) -> None:
    context, tokens = size
    windows = Windows(np.arange(tokens), context, seed)
    rows = windows.rows(epoch * windows.count, windows.count)
    assert rows.shape == (windows.count, context + 1)
    assert (np.diff(rows, axis=1) == 1).all()  # neighbours in the text
    starts = np.sort(rows[:, 0])
    assert (np.diff(starts) == context).all()  # side by side: no token is asked for twice
    assert starts[0] >= 0
    assert rows.max() <= tokens - 1
    asked = rows[:, 1:].ravel()
    assert len(set(asked.tolist())) == len(asked)
    assert len(asked) > tokens - 1 - 2 * context  # at most the rim is left out


def test_over_epochs_every_token_is_read() -> None:
    windows = Windows(np.arange(103), 8, 0)
    read = {int(t) for epoch in range(40) for t in windows.rows(epoch * windows.count, windows.count).ravel()}
    assert read == set(range(103))


def test_the_order_changes_with_the_epoch_and_the_seed() -> None:
    windows = Windows(np.arange(1000), 8, 3)
    n = windows.count
    epochs = [tuple(windows.rows(epoch * n, n)[:, 0] // 8) for epoch in range(4)]
    assert len(set(epochs)) == 4
    assert tuple(Windows(np.arange(1000), 8, 4).rows(0, n)[:, 0] // 8) not in epochs
    assert tuple(Windows(np.arange(1000), 8, 3).rows(0, n)[:, 0] // 8) == epochs[0]
    assert epochs[0] != tuple(sorted(epochs[0]))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=12), st.integers(0, 50))
def test_rows_do_not_depend_on_how_they_are_asked_for(groups: list[int], first: int) -> None:
    windows = Windows(np.arange(47), 4, 1)
    whole = windows.rows(first, sum(groups))
    starts = np.cumsum([0, *groups[:-1]]) + first
    parts = [windows.rows(int(start), count) for start, count in zip(starts, groups, strict=True)]
    assert np.array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_too_few_tokens_are_told(tokens: int) -> None:
    with pytest.raises(HeadwiseError, match=f"{tokens} tokens to train on.*context of 8"):
        Windows(np.arange(tokens), 8, 0)
    assert Windows(np.arange(9), 8, 0).rows(0, 3).tolist() == [list(range(9))] * 3


def test_causal_asks_for_the_next_token() -> None:
    ids, targets = causal(torch.arange(20).view(2, 10))
    assert ids.tolist() == [list(range(9)), list(range(10, 19))]
    assert torch.equal(targets, ids + 1)


@given(st.integers(2, 70), st.integers(1, 9))
def test_in_order_asks_for_every_token_once(tokens: int, context: int) -> None:
    rows = list(in_order(np.arange(tokens), context))
    assert [int(t) for row in rows for t in row[1:]] == list(range(1, tokens))
    assert all(2 <= len(row) <= context + 1 for row in rows)
    assert all((np.diff(row) == 1).all() for row in rows)


@given(st.integers(2, 200), st.integers(1, 9), st.integers(1, 300))
def test_in_order_within_a_limit_reads_no_more_and_from_everywhere(tokens: int, context: int, most: int) -> None:
    rows = list(in_order(np.arange(tokens), context, most))
    asked = [int(t) for row in rows for t in row[1:]]
    assert len(set(asked)) == len(asked)
    assert 1 <= len(asked) <= max(most, context)
    if most >= tokens + context:
        assert len(asked) == tokens - 1
    gaps = np.diff([int(row[0]) for row in rows])
    assert len(set(gaps.tolist())) <= 1  # evenly


def test_in_order_of_nothing_is_nothing() -> None:
    assert list(in_order(np.arange(1), 4)) == []
    assert list(in_order(np.arange(0), 4)) == []


# Hiding tokens.

MASK, VOCAB = 1000, 1001


@given(st.integers(1, 5), st.integers(1, 40), st.floats(0, 1), st.integers(0, 1000))
def test_each_row_hides_equally_many(B: int, T: int, share: float, seed: int) -> None:
    rows = torch.arange(B * (T + 1)).view(B, T + 1)
    ids, targets = masked(rows, share, MASK, VOCAB, [seed])
    hidden = targets != IGNORE
    expected = max(1, round(share * T))
    assert hidden.sum(1).tolist() == [expected] * B
    assert torch.equal(targets[hidden], rows[:, :-1][hidden])
    assert torch.equal(ids[~hidden], rows[:, :-1][~hidden])
    assert ids.shape == targets.shape == (B, T)


def test_of_the_hidden_80_10_10() -> None:
    rows = torch.randint(0, 1000, (400, 101), generator=torch.Generator().manual_seed(0))
    before = rows.clone()
    ids, targets = masked(rows, 0.15, MASK, VOCAB, [7, 3])
    assert torch.equal(rows, before)
    hidden = targets != IGNORE
    n = int(hidden.sum())
    assert n == 400 * 15
    share_masked = float((ids[hidden] == MASK).float().mean())
    share_same = float((ids[hidden] == targets[hidden]).float().mean())
    share_other = 1 - share_masked - share_same
    deviation = 4 * (0.8 * 0.2 / n) ** 0.5  # four standard deviations of a binomial share
    assert abs(share_masked - 0.8) < deviation + 0.001
    assert abs(share_same - 0.1) < deviation
    assert abs(share_other - 0.1) < deviation
    others = ids[hidden & (ids != MASK) & (ids != targets)]
    assert len(set(others.tolist())) > 0.3 * len(others)  # from all over the vocabulary
    assert abs(float(others.float().mean()) - 500) < 4 * 1000 / (12 * len(others)) ** 0.5
    places = hidden.float().mean(0)  # every place is hidden equally often
    assert float((places - 0.15).abs().max()) < 5 * (0.15 * 0.85 / 400) ** 0.5


def test_hiding_follows_from_the_seed() -> None:
    rows = torch.arange(66).view(6, 11)
    one, same, other = (masked(rows, 0.3, MASK, VOCAB, seed) for seed in ([1, 2], [1, 2], [1, 3]))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[1], other[1])


def test_windows_drawn_anywhere_depend_on_their_number_alone_and_reach_everything() -> None:
    windows = Anywhere(np.arange(30), 4, 1)
    rows = windows.rows(0, 600)
    assert rows.shape == (600, 5)
    assert (np.diff(rows, axis=1) == 1).all()
    assert np.array_equal(rows[7:11], windows.rows(7, 4))
    assert set(rows[:, 0]) == set(range(26))


def test_texts_are_whole_rows_each_once_an_epoch() -> None:
    tokens = np.array([5, 6, 0, 7, 0, 8, 9, 8, 9, 0])
    texts = Texts(tokens, 3, 0, end=0, before=(1,), behind=(0,))
    assert texts.count == 3
    rows = {tuple(row) for row in texts.rows(0, 3).tolist()}
    assert rows == {(1, 5, 6, 0), (1, 7, 0, -1), (1, 8, 9, 8)}  # the long one is cut
    ids, targets = causal(torch.tensor([[0, 7, 0, -1]]))
    assert ids.tolist() == [[0, 7, 0]]
    assert targets.tolist() == [[7, 0, IGNORE]]
    with pytest.raises(HeadwiseError, match="no text that ends"):
        Texts(np.array([1, 2, 3]), 3, 0, end=0, before=(), behind=())
