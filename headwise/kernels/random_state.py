"""Random numbers on any device: the state of its generator, and generators with a seed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def get_rng_state(device: torch.device) -> Tensor:
    """Return the state of the default generator of a device."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Set the state of the default generator of a device."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def fork_rng(device: torch.device, *, enabled: bool = True) -> Iterator[None]:
    """Restore the default generators of the CPU and of a device after the block."""
    devices, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
    with torch.random.fork_rng(devices, enabled=enabled, device_type=kind):
        yield


def make_generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a generator with a seed, on the device if its backend has generators, otherwise on the CPU."""
    try:
        return torch.Generator(device).manual_seed(seed)
    except (NotImplementedError, RuntimeError):
        return torch.Generator().manual_seed(seed)
