"""The pretend device itself: mixed devices, float64, random numbers, threads, shapes, and counted copies."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headwise.kernels.random_state import fork_rng, make_generator
from tests.devices.pretend_device import DEVICE, pretend_device

ON: Any = {"device": "pretend"}
MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda x, host: x + host,
    "matmul": lambda x, host: x @ host,
    "cat": lambda x, host: torch.cat((x, host)),
    "where": lambda x, host: torch.where(x > 0, x, host),
    "values of an index": lambda x, host: x.index_put((torch.tensor([0, 1, 2]),), host),
    "embedding": lambda x, host: torch.embedding(x, torch.tensor([0, 1])),
    "number on the host changed in place": lambda x, host: torch.zeros(()).add_(x.sum()),
    "generator of the host": lambda x, host: torch.rand(3, generator=torch.Generator("cpu"), **ON),
}
ALLOWED: dict[str, Callable[[Tensor], Any]] = {
    "number": lambda x: x * torch.tensor(2.0),
    "positions on the host": lambda x: x[torch.tensor([0, 2])],
    "mask on the host": lambda x: x[torch.tensor([True, False, True])],
    "written positions on the host": lambda x: x.index_put((torch.tensor([0]),), torch.ones(1, 3, **ON)),
    "list": lambda x: x[[0, 2]],
    "copy": lambda x: x.copy_(torch.ones(3, 3)),
}
# Each creates a tensor on the device, of three numbers or 3 × 3.
CREATED: dict[str, Callable[[], Tensor]] = {
    "arange": lambda: torch.arange(3, **ON),
    "arange, step": lambda: torch.arange(0, 6, 2, **ON),
    "eye": lambda: torch.eye(3, **ON),
    "linspace": lambda: torch.linspace(0, 1, 3, **ON),
    "full": lambda: torch.full((3,), 2.0, **ON),
    "tensor": lambda: torch.tensor([1, 2, 3], **ON),
    "array": lambda: torch.as_tensor(np.ones(3), **ON),
    "moved": lambda: torch.ones(3).to("pretend"),
    "rand": lambda: torch.rand(3, **ON),
    "randperm": lambda: torch.randperm(3, **ON),
    "new_tensor": lambda: torch.ones(2, **ON).new_tensor([1, 2, 3]),
    "changed in place": lambda: torch.ones(1, 3, **ON).squeeze_(0),
    "result of out": lambda: torch.add(torch.ones(3, **ON), 1, out=torch.empty(0, **ON)),
}
TRANSFERS: dict[str, tuple[int, Callable[[Tensor], Any]]] = {
    "cpu": (1, lambda x: x.cpu()),
    "item": (1, lambda x: x[0, 0].item()),
    "tolist": (1, lambda x: x.tolist()),
    "comparison": (1, lambda x: bool((x > 0).all())),
    "nonzero": (1, lambda x: x.nonzero()),
    "mask": (1, lambda x: x[x > 0]),
    "copy into a tensor of the host": (1, lambda x: torch.zeros(3, 3).copy_(x)),
    "computation": (0, lambda x: (x @ x).softmax(-1)[torch.tensor([0, 1])]),
    "to the device": (0, lambda x: torch.ones(3).to("pretend")),
}


@pytest.mark.parametrize("operation", MIXED)
def test_operation_on_two_devices_raises(operation: str) -> None:
    with pretend_device(), pytest.raises(RuntimeError, match=r"same device|device type for generator"):
        MIXED[operation](torch.ones(3, 3, **ON), torch.ones(3, 3))


@pytest.mark.parametrize("operation", ALLOWED)
def test_operation_with_number_or_positions_of_host_runs(operation: str) -> None:
    with pretend_device():
        assert ALLOWED[operation](torch.ones(3, 3, **ON)).device == DEVICE


def test_float64_forbidden_raises() -> None:
    with pretend_device(float64=False), pytest.raises(TypeError, match="float64"):
        torch.ones(3, **ON).double()
    with pretend_device():
        assert torch.ones(3, **ON).double().dtype == torch.float64


@pytest.mark.parametrize("kind", CREATED)
def test_new_tensor_has_shape_of_its_data_in_any_thread(kind: str) -> None:
    results: list[Any] = []
    with pretend_device():
        thread = threading.Thread(target=lambda: results.append(CREATED[kind]()))
        thread.start()
        thread.join()
        results.append(CREATED[kind]())
    assert len(results) == 2
    for tensor in results:
        assert tensor.device == DEVICE
        assert tensor.shape == tensor.cpu_data.shape == ((3, 3) if kind == "eye" else (3,))
        assert tensor.stride() == tensor.cpu_data.stride()


def test_random_numbers_of_device_leave_those_of_host() -> None:
    with pretend_device():
        torch.manual_seed(4)
        expected = torch.rand(2).tolist()
        torch.manual_seed(4)
        first = torch.rand(3, **ON).tolist()
        assert torch.rand(2).tolist() == expected
        with fork_rng(DEVICE):
            second = torch.rand(3, **ON).tolist()
        assert torch.rand(3, **ON).tolist() == second != first
        torch.manual_seed(4)
        assert torch.rand(3, **ON).tolist() == first
    with pytest.raises(NotImplementedError):  # torch has no generators for this device
        torch.Generator("pretend")
    assert make_generator(DEVICE, 3).initial_seed() == 3


@pytest.mark.parametrize("operation", TRANSFERS)
def test_copies_to_host_are_counted(operation: str) -> None:
    count, function = TRANSFERS[operation]
    with pretend_device() as device:
        x = torch.ones(3, 3, **ON)
        device.reset_counts()
        function(x)
        assert device.transfers == count
