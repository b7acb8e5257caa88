"""Masks as transformers hands them over, a tensor per call, as masks of ours: made once for all layers that share it."""

import weakref

import torch
from torch import Tensor

from headwise.kernels.masks import Allow, Both, Causal, Mask


class Masks:
    """The masks of a pass as `Mask`s, the same one for all layers that were given the same tensor."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Tensor], int | None, weakref.ref[Tensor], weakref.ref[Mask]]] = []

    def of(self, mask: Tensor, T: int, S: int) -> Mask:
        """A tensor (B or 1, H or 1, T, S), True or near 0 where a query may look; kept as it is now."""
        self._known = [one for one in self._known if one[0]() is not None and one[3]() is not None]
        state = None if mask.is_inference() else mask._version  # a mask may be written into between two calls
        for tensor, version, kept, known in self._known:
            there, was = known(), kept()
            if tensor() is not mask or version != state or there is None or was is None:
                continue
            if state is not None or torch.equal(was, _allowed(mask, S)):  # inference mode counts no versions
                return there
        allowed = _allowed(mask, S)
        allowed = allowed.clone() if mask.dtype == torch.bool else allowed
        made: Mask = Allow(allowed)
        if allowed.shape[-2:] == (T, S) and S >= T and not bool(allowed.triu(S - T + 1).any()):
            made = Both(Causal(), made)  # nothing ahead is seen, so nothing ahead need be computed
        self._known.append((weakref.ref(mask), state, weakref.ref(allowed), weakref.ref(made)))
        return made


def _allowed(mask: Tensor, S: int) -> Tensor:
    """Where a query may look; a mask may be longer than the keys there are."""
    return (mask if mask.dtype == torch.bool else mask > lowest(mask) / 2)[..., :S]


def lowest(mask: Tensor) -> float:
    """What stands for minus infinity in a mask of numbers."""
    return torch.finfo(mask.dtype).min
