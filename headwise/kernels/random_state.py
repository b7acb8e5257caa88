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


@contextmanager
def replayed_rng(rng_state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Draw the random numbers of a device that followed a state again. None changes nothing.

    Args:
        rng_state: Result of `get_rng_state`.
        device: Device of the state. Its current state is restored after the block.
    """
    with fork_rng(device, enabled=rng_state is not None):
        if rng_state is not None:
            set_rng_state(rng_state, device)
        yield


def checkpoint_restores_rng(device: torch.device) -> bool:
    """Return whether `torch.utils.checkpoint` restores the random numbers of a device. For MPS it does not."""
    return device.type == "cpu" or getattr(torch.get_device_module(device), "_initialized", False)


def make_generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a generator with a seed, on the device if its backend has generators, otherwise on the CPU."""
    try:
        return torch.Generator(device).manual_seed(seed)
    except (NotImplementedError, RuntimeError):
        return torch.Generator().manual_seed(seed)
