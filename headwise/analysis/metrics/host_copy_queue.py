"""Results of a batch that the host needs: copied from the device once per batch, not once per layer and metric."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class HostCopyQueue:
    """Tensors that are copied to the host together, each group with a function that uses the copies.

    A copy makes the host wait until the device has finished, so one copy per tensor costs more than the computation.
    Tensors that are on the host are used at once.

    >>> queue, values = HostCopyQueue(), []
    >>> queue.copy_then_call([torch.tensor([1.0, 2.0])], lambda copied: values.extend(copied.tolist()))
    >>> values
    [1.0, 2.0]
    """

    _entries: list[tuple[Sequence[Tensor], Callable[..., Any]]] = field(default_factory=list)

    def copy_then_call(self, tensors: Sequence[Tensor], use: Callable[..., Any]) -> None:
        """Call `use` with host copies of the tensors: at once if they are on the host, otherwise in `flush`.

        The tensors must not be changed until then.
        """
        if all(tensor.device.type == "cpu" for tensor in tensors):
            use(*tensors)
        else:
            self._entries.append((tensors, use))

    def flush(self) -> None:
        """Copy all tensors, in one copy per device and dtype, and call the functions in the order of `add`."""
        entries, self._entries = self._entries, []
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensors, _ in entries:
            for tensor in tensors:
                groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        copies = {key: iter(_copy_together(tensors)) for key, tensors in groups.items()}
        for tensors, use in entries:
            use(*(next(copies[tensor.device, tensor.dtype]) for tensor in tensors))


def _copy_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of one dtype to the host as one flat tensor, and return them in their shapes."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors]).cpu()
    parts = flat.split([prod(tensor.shape) for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
