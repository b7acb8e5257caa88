"""Masks as transformers hands them over, a tensor per call, as masks of ours: made once for all layers that share it."""

import weakref

import torch
from torch import Tensor

from headwise.kernels.masks import AndMask, CausalMask, DenseMask, Mask


class MaskConverter:
    """The masks of a pass as `Mask`s, the same one for all layers that were given the same tensor."""

    def __init__(self) -> None:
        self._cache: list[tuple[weakref.ref[Tensor], int | None, weakref.ref[Tensor], weakref.ref[Mask]]] = []

    def convert(self, mask: Tensor, T: int, S: int) -> Mask:
        """A tensor (B or 1, H or 1, T, S), True or near 0 where a query may look; kept as it is now."""
        self._cache = [entry for entry in self._cache if entry[0]() is not None and entry[3]() is not None]
        state = None if mask.is_inference() else mask._version  # a mask may be written into between two calls
        for tensor_ref, version, allowed_ref, mask_ref in self._cache:
            cached, cached_allowed = mask_ref(), allowed_ref()
            if tensor_ref() is not mask or version != state or cached is None or cached_allowed is None:
                continue
            if state is not None or torch.equal(cached_allowed, _allowed(mask, S)):  # inference mode counts no versions
                return cached
        allowed = _allowed(mask, S)
        allowed = allowed.clone() if mask.dtype == torch.bool else allowed
        converted: Mask = DenseMask(allowed)
        if allowed.shape[-2:] == (T, S) and S >= T and not bool(allowed.triu(S - T + 1).any()):
            converted = AndMask(CausalMask(), converted)  # nothing ahead is seen, so nothing ahead need be computed
        self._cache.append((weakref.ref(mask), state, weakref.ref(allowed), weakref.ref(converted)))
        return converted


def _allowed(mask: Tensor, S: int) -> Tensor:
    """Where a query may look; a mask may be longer than the keys there are."""
    return (mask if mask.dtype == torch.bool else mask > mask_dtype_min(mask) / 2)[..., :S]


def mask_dtype_min(mask: Tensor) -> float:
    """What stands for minus infinity in a mask of numbers."""
    return torch.finfo(mask.dtype).min
