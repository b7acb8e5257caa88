"""What the demo says is what the model does."""

import pytest
import torch

from headwise.show.demo import demo, small_decoder


def test_the_numbers_of_a_head_are_right() -> None:
    result = demo("abc", seed=3)
    assert result.parameters == small_decoder().parameters
    assert [row.head for row in result.heads] == [f"{layer}.{head}" for layer in range(4) for head in range(4)]
    for row in result.heads:
        assert 1 / 3 <= row.weight <= 1  # the largest of three weights
        assert (
            0 <= row.entropy <= (torch.tensor(2.0).log() + torch.tensor(3.0).log()).item() / 3 + 1e-6
        )  # rows of 1, 2, 3 keys
        assert row.write > 0
        assert 0 < row.effect < 1


def test_the_seed_is_the_callers_and_the_global_one_is_left_alone() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert demo("abc", seed=1) == demo("abc", seed=1)
    assert demo("abc", seed=1) != demo("abc", seed=2)
    assert torch.equal(before, torch.get_rng_state())


def test_one_byte_sees_itself() -> None:
    row = demo("a").heads[0]
    assert (row.looks_at, row.weight, row.entropy) == ("'a' at 0", pytest.approx(1.0), pytest.approx(0.0))
