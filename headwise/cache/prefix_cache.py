"""Keys and values of a prefix that many forward passes share, for as many copies of its batch as each pass has."""

import torch
from torch import Tensor

from headwise.cache.layer_cache import SharedKVCache
from headwise.cache.model_cache import ModelCache
from headwise.spec import ModelSpec


class PrefixCache(SharedKVCache):
    """Stores the tokens of the first call, the prefix. Later calls attend to the prefix and to their own tokens.

    The tokens of later calls are not stored, so that all of them follow the prefix. Their batch may be several copies of the
    batch of the prefix.
    """

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the prefix, or return it before the new tokens: (B, K, P, ·), or (n·B, K, T, ·) → (n·B, K, P + T, ·)."""
        if self._k is None or self._v is None:
            self._k, self._v, self.length = k.detach(), v.detach(), k.shape[2]
            return k, v
        copies = len(k) // len(self._k)
        prefix_k, prefix_v = (x.repeat(copies, 1, 1, 1) for x in (self._k, self._v))  # (n·B, K, P, ·)
        return torch.cat((prefix_k, k), 2), torch.cat((prefix_v, v), 2)


class PrefixModelCache(ModelCache):
    """One `PrefixCache` per layer. All texts of the batch have a prefix of the same length, without padding.

    Args:
        spec: Configuration of a decoder without cache policies.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.layers = {address: PrefixCache() for address in self.layers}

    def advance_length_and_mask(self, ids: Tensor, attention_mask: Tensor | None) -> tuple[int, Tensor | None]:
        """Count the tokens of the prefix. Return the number of earlier tokens and no attention mask."""
        if self.length:
            return self.length, None
        return super().advance_length_and_mask(ids, None)
