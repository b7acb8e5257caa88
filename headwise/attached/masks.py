"""Conversion of transformers' mask tensors to `Mask`, once per tensor for all layers that share it."""

import weakref

import torch
from torch import Tensor

from headwise.kernels.masks import AndMask, CausalMask, DenseMask, Mask


class MaskConverter:
    """Converts mask tensors. Layers with the same tensor get the same `Mask` object."""

    def __init__(self) -> None:
        self._cache: list[tuple[weakref.ref[Tensor], int | None, weakref.ref[Tensor], weakref.ref[Mask]]] = []

    def convert(self, mask: Tensor, T: int, S: int) -> Mask:
        """Convert a tensor (B or 1, H or 1, T, S), True or near 0 at visible keys. Later changes of it have no effect."""
        self._cache = [entry for entry in self._cache if entry[0]() is not None and entry[3]() is not None]
        state = None if mask.is_inference() else mask._version  # a mask may be modified between two calls
        for tensor_ref, version, allowed_ref, mask_ref in self._cache:
            cached, cached_allowed = mask_ref(), allowed_ref()
            if tensor_ref() is not mask or version != state or cached is None or cached_allowed is None:
                continue
            if state is not None or torch.equal(cached_allowed, _allowed(mask, S)):  # no versions in inference mode
                return cached
        allowed = _allowed(mask, S)
        allowed = allowed.clone() if mask.dtype == torch.bool else allowed
        converted: Mask = DenseMask(allowed)
        if allowed.shape[-2:] == (T, S) and S >= T and not bool(allowed.triu(S - T + 1).any()):
            converted = AndMask(CausalMask(), converted)  # later keys are never visible, so the kernel can skip them
        self._cache.append((weakref.ref(mask), state, weakref.ref(allowed), weakref.ref(converted)))
        return converted


def _allowed(mask: Tensor, S: int) -> Tensor:
    """Return which keys each query may attend to. The mask may be longer than the keys."""
    return (mask if mask.dtype == torch.bool else mask > mask_dtype_min(mask) / 2)[..., :S]


def mask_dtype_min(mask: Tensor) -> float:
    """Return the value that represents minus infinity in a float mask."""
    return torch.finfo(mask.dtype).min
