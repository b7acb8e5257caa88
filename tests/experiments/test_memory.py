import torch

from headwise.distributed import run_in_subprocess
from headwise.experiments.engine.peak_process_memory import peak_memory

MB = 2**18  # numbers of float32


def allocate_and_measure(megabytes: int) -> float:
    return peak_memory(lambda: torch.ones(megabytes * MB), lambda: torch.ones(MB))


def test_peak_memory_equals_allocated_megabytes():
    big = torch.ones(200 * MB)  # memory of the parent process must not count
    assert abs(run_in_subprocess(allocate_and_measure, 100) - 100) < 8
    del big


def measure_after_peak(megabytes: int) -> float:
    torch.ones(3 * megabytes * MB)
    return allocate_and_measure(megabytes)


def test_peak_memory_ignores_freed_memory():
    assert abs(run_in_subprocess(measure_after_peak, 50) - 50) < 8
