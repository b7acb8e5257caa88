"""Tokens of each training step."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import HeadwiseError
from headwise.model.chunked_cross_entropy import IGNORE_INDEX
from headwise.training.batch_samplers import (
    DocumentSampler,
    RandomWindowSampler,
    ShuffledWindowSampler,
    causal_inputs_and_targets,
    masked_targets,
    sequential_windows,
)

sizes = st.tuples(st.integers(1, 9), st.integers(0, 60)).map(lambda pair: (pair[0], pair[0] + 1 + pair[1]))


@given(sizes, st.integers(0, 2**31 - 1), st.integers(0, 3))
def test_windows_one_epoch_reads_each_window_once(size: tuple[int, int], seed: int, epoch: int) -> None:
    context, tokens = size
    windows = ShuffledWindowSampler(np.arange(tokens), context, seed)
    rows = windows.training_rows(epoch * windows.rows_per_epoch, windows.rows_per_epoch)
    assert rows.shape == (windows.rows_per_epoch, context + 1)
    assert (np.diff(rows, axis=1) == 1).all()  # consecutive tokens
    starts = np.sort(rows[:, 0])
    assert (np.diff(starts) == context).all()  # adjacent windows: no token is a target twice
    assert starts[0] >= 0
    assert rows.max() <= tokens - 1
    target_ids = rows[:, 1:].ravel()
    assert len(set(target_ids.tolist())) == len(target_ids)
    assert len(target_ids) > tokens - 1 - 2 * context  # only tokens at both ends are left out


def test_windows_many_epochs_read_every_token() -> None:
    windows = ShuffledWindowSampler(np.arange(103), 8, 0)
    read_ids = {
        int(t)
        for epoch in range(40)
        for t in windows.training_rows(epoch * windows.rows_per_epoch, windows.rows_per_epoch).ravel()
    }
    assert read_ids == set(range(103))


def test_windows_order_depends_on_epoch_and_seed() -> None:
    windows = ShuffledWindowSampler(np.arange(1000), 8, 3)
    n = windows.rows_per_epoch
    epochs = [tuple(windows.training_rows(epoch * n, n)[:, 0] // 8) for epoch in range(4)]
    assert len(set(epochs)) == 4
    assert tuple(ShuffledWindowSampler(np.arange(1000), 8, 4).training_rows(0, n)[:, 0] // 8) not in epochs
    assert tuple(ShuffledWindowSampler(np.arange(1000), 8, 3).training_rows(0, n)[:, 0] // 8) == epochs[0]
    assert epochs[0] != tuple(sorted(epochs[0]))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=12), st.integers(0, 50))
def test_windows_rows_independent_of_request_size(groups: list[int], first: int) -> None:
    windows = ShuffledWindowSampler(np.arange(47), 4, 1)
    full = windows.training_rows(first, sum(groups))
    starts = np.cumsum([0, *groups[:-1]]) + first
    parts = [windows.training_rows(int(start), count) for start, count in zip(starts, groups, strict=True)]
    assert np.array_equal(full, np.concatenate(parts))


@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_windows_too_few_tokens_raises(tokens: int) -> None:
    with pytest.raises(HeadwiseError, match=f"{tokens} tokens to train on.*context of 8"):
        ShuffledWindowSampler(np.arange(tokens), 8, 0)
    assert ShuffledWindowSampler(np.arange(9), 8, 0).training_rows(0, 3).tolist() == [list(range(9))] * 3


def test_causal_targets_are_next_tokens() -> None:
    ids, targets = causal_inputs_and_targets(torch.arange(20).view(2, 10))
    assert ids.tolist() == [list(range(9)), list(range(10, 19))]
    assert torch.equal(targets, ids + 1)


@given(st.integers(2, 70), st.integers(1, 9))
def test_sequential_windows_target_every_token_once(tokens: int, context: int) -> None:
    rows = list(sequential_windows(np.arange(tokens), context))
    assert [int(t) for row in rows for t in row[1:]] == list(range(1, tokens))
    assert all(2 <= len(row) <= context + 1 for row in rows)
    assert all((np.diff(row) == 1).all() for row in rows)


@given(st.integers(2, 200), st.integers(1, 9), st.integers(1, 300))
def test_sequential_windows_limit_samples_evenly(tokens: int, context: int, max_tokens: int) -> None:
    rows = list(sequential_windows(np.arange(tokens), context, max_tokens))
    target_ids = [int(t) for row in rows for t in row[1:]]
    assert len(set(target_ids)) == len(target_ids)
    assert 1 <= len(target_ids) <= max(max_tokens, context)
    if max_tokens >= tokens + context:
        assert len(target_ids) == tokens - 1
    gaps = np.diff([int(row[0]) for row in rows])
    assert len(set(gaps.tolist())) <= 1  # evenly spaced


def test_sequential_windows_no_tokens_gives_no_rows() -> None:
    assert list(sequential_windows(np.arange(1), 4)) == []
    assert list(sequential_windows(np.arange(0), 4)) == []


# Masking.

MASK, VOCAB = 1000, 1001


@given(st.integers(1, 5), st.integers(1, 40), st.floats(0, 1), st.integers(0, 1000))
def test_masked_rows_have_equal_mask_counts(B: int, T: int, fraction: float, seed: int) -> None:
    rows = torch.arange(B * (T + 1)).view(B, T + 1)
    ids, targets = masked_targets(rows, fraction, MASK, VOCAB, [seed])
    hidden = targets != IGNORE_INDEX
    expected = max(1, round(fraction * T))
    assert hidden.sum(1).tolist() == [expected] * B
    assert torch.equal(targets[hidden], rows[:, :-1][hidden])
    assert torch.equal(ids[~hidden], rows[:, :-1][~hidden])
    assert ids.shape == targets.shape == (B, T)


def test_masked_replacements_follow_80_10_10() -> None:
    rows = torch.randint(0, 1000, (400, 101), generator=torch.Generator().manual_seed(0))
    before = rows.clone()
    ids, targets = masked_targets(rows, 0.15, MASK, VOCAB, [7, 3])
    assert torch.equal(rows, before)
    hidden = targets != IGNORE_INDEX
    n = int(hidden.sum())
    assert n == 400 * 15
    fraction_masked = float((ids[hidden] == MASK).float().mean())
    fraction_same = float((ids[hidden] == targets[hidden]).float().mean())
    fraction_other = 1 - fraction_masked - fraction_same
    deviation = 4 * (0.8 * 0.2 / n) ** 0.5  # four standard deviations of a binomial proportion
    assert abs(fraction_masked - 0.8) < deviation + 0.001
    assert abs(fraction_same - 0.1) < deviation
    assert abs(fraction_other - 0.1) < deviation
    others = ids[hidden & (ids != MASK) & (ids != targets)]
    assert len(set(others.tolist())) > 0.3 * len(others)  # random tokens cover the vocabulary
    assert abs(float(others.float().mean()) - 500) < 4 * 1000 / (12 * len(others)) ** 0.5
    mask_rate = hidden.float().mean(0)  # every position is masked equally often
    assert float((mask_rate - 0.15).abs().max()) < 5 * (0.15 * 0.85 / 400) ** 0.5


def test_masked_same_seed_gives_same_masks() -> None:
    rows = torch.arange(66).view(6, 11)
    first, same, other = (masked_targets(rows, 0.3, MASK, VOCAB, seed) for seed in ([1, 2], [1, 2], [1, 3]))
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not torch.equal(first[1], other[1])


def test_random_windows_deterministic_and_cover_all_starts() -> None:
    windows = RandomWindowSampler(np.arange(30), 4, 1)
    rows = windows.training_rows(0, 600)
    assert rows.shape == (600, 5)
    assert (np.diff(rows, axis=1) == 1).all()
    assert np.array_equal(rows[7:11], windows.training_rows(7, 4))
    assert set(rows[:, 0]) == set(range(26))


def test_document_sampler_one_document_per_row_once_per_epoch() -> None:
    tokens = np.array([5, 6, 0, 7, 0, 8, 9, 8, 9, 0])
    texts = DocumentSampler(tokens, 3, 0, end_id=0, prefix=(1,), suffix=(0,))
    assert texts.rows_per_epoch == 3
    rows = {tuple(row) for row in texts.training_rows(0, 3).tolist()}
    assert rows == {(1, 5, 6, 0), (1, 7, 0, -1), (1, 8, 9, 8)}  # the long text is truncated
    ids, targets = causal_inputs_and_targets(torch.tensor([[0, 7, 0, -1]]))
    assert ids.tolist() == [[0, 7, 0]]
    assert targets.tolist() == [[7, 0, IGNORE_INDEX]]
    with pytest.raises(HeadwiseError, match="no complete text"):
        DocumentSampler(np.array([1, 2, 3]), 3, 0, end_id=0, prefix=(), suffix=())
