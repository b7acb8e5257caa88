import torch

from headwise.experiments.engine.memory import rise
from headwise.experiments.engine.pool import apart

MB = 2**18  # numbers of float32


def tell(megabytes: int) -> float:
    return rise(lambda: torch.ones(megabytes * MB), lambda: torch.ones(MB))


def test_as_much_as_was_filled():
    big = torch.ones(200 * MB)  # what the asking process holds must not count
    assert abs(apart(tell, 100) - 100) < 8
    del big


def tell_behind_a_peak(megabytes: int) -> float:
    torch.ones(3 * megabytes * MB)
    return tell(megabytes)


def test_forgets_what_was_freed():
    assert abs(apart(tell_behind_a_peak, 50) - 50) < 8
