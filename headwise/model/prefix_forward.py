"""Forward passes over the last tokens of a batch, which share the keys and values of its first tokens.

In a decoder, the tokens of a prefix do not depend on later tokens. So passes that differ only after a common prefix compute
it once.
"""

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from headwise.cache import PrefixModelCache

if TYPE_CHECKING:
    from headwise.model.transformer import Transformer


class PrefixForward(Protocol):
    """Forward passes after a prefix whose keys and values are stored."""

    def __call__(self, ids: Tensor, copies: int) -> Tensor:
        """Return the final hidden states of copies of the tokens after the prefix: (B, T) → (n·B, T, D)."""
        ...


class NativePrefixForward:
    """Forward passes of a native decoder after a prefix.

    Args:
        model: The model.
        prefix_ids: Token ids of the prefix of each text, (B, P), without padding.
    """

    def __init__(self, model: "Transformer", prefix_ids: Tensor) -> None:
        self.model, self.cache = model, PrefixModelCache(model.spec)
        model(prefix_ids, cache=self.cache, hidden=True)

    def __call__(self, ids: Tensor, copies: int) -> Tensor:
        """Return the final hidden states of copies of the tokens after the prefix: (B, T) → (n·B, T, D)."""
        return self.model(ids.repeat(copies, 1), cache=self.cache, hidden=True)


def prefix_forward(model: "Transformer", prefix_ids: Tensor) -> PrefixForward | None:
    """Return forward passes that share a prefix, (B, P). None if the model does not support them.

    Args:
        model: The model.
        prefix_ids: Token ids of the prefix of each text, (B, P), without padding.
    """
    if model.spec.kind != "decoder" or model.spec.cache:
        return None
    return NativePrefixForward(model, prefix_ids)
