"""Masks as transformers hands them over, a tensor per call, as masks of ours: made once for all layers that share it."""

import weakref

import torch
from torch import Tensor

from headwise.kernels.masks import Allow, Both, Causal, Mask


class Masks:
    """The masks of a pass as `Mask`s, the same one for all layers that were given the same tensor."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Tensor], weakref.ref[Mask]]] = []

    def of(self, mask: Tensor, T: int, S: int) -> Mask:
        """A tensor (B or 1, H or 1, T, S), True or near 0 where a query may look."""
        self._known = [pair for pair in self._known if pair[0]() is not None and pair[1]() is not None]
        for tensor, known in self._known:
            there = known()
            if tensor() is mask and there is not None:
                return there
        allowed = mask if mask.dtype == torch.bool else mask > lowest(mask) / 2
        allowed = allowed[..., :S]  # a mask may be longer than the keys there are
        made: Mask = Allow(allowed)
        if allowed.shape[-2:] == (T, S) and S >= T and not bool(allowed.triu(S - T + 1).any()):
            made = Both(Causal(), made)  # nothing ahead is seen, so nothing ahead need be computed
        self._known.append((weakref.ref(mask), weakref.ref(made)))
        return made


def lowest(mask: Tensor) -> float:
    """What stands for minus infinity in a mask of numbers."""
    return torch.finfo(mask.dtype).min
