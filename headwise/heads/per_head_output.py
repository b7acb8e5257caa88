"""Output of each head of a layer, computed one head at a time, without a (B, T, H, D) tensor."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from headwise.kernels.rounding_tolerance import at_least_float32


@dataclass(frozen=True, eq=False)
class PerHeadOutput:
    """Outputs of the heads of one layer.

    Attributes:
        z: Head outputs before W_O, (B, H, T, e).
        W_O: Output weights of each head, (H, e, D).
        b_O: Output bias of the layer, (D,), or None.

    Three heads with two channels each concatenate to six channels:

    >>> import torch
    >>> z = torch.tensor([[.2, .5], [.8, .1], [.3, .9]])[None, :, None]  # (B=1, H=3, T=1, d=2)
    >>> PerHeadOutput(z, torch.eye(6).unflatten(0, (3, 2)), None).concatenated()
    tensor([[[0.2000, 0.5000, 0.8000, 0.1000, 0.3000, 0.9000]]])
    """

    z: Tensor
    W_O: Tensor
    b_O: Tensor | None  # noqa: N815

    def concatenated(self) -> Tensor:
        """Return z of all heads concatenated, (B, T, H·e)."""
        return self.z.transpose(1, 2).flatten(2)

    def head_output(self, index: int) -> Tensor:
        """Return the output z W_O of the head at an index of the head axis, (B, T, D)."""
        return self.z[:, index] @ self.W_O[index]

    def head_outputs(self) -> Iterator[Tensor]:
        """Yield the output of each head, (B, T, D), one at a time."""
        return (self.head_output(index) for index in range(self.z.shape[1]))

    def head_norms(self) -> Tensor:
        """Return the norm of each head output, ‖z W_O[h]‖: (B, H, T)."""
        return output_norms(self.z, gram(self.W_O))

    def layer_output(self) -> Tensor:
        """Return the output of the layer as the sum over heads plus b_O: (B, T, D)."""
        total = self.z.new_zeros(self.z.shape[0], self.z.shape[2], self.W_O.shape[-1])
        for head_output in self.head_outputs():
            total = total + head_output
        return total if self.b_O is None else total + self.b_O


def gram(W_O: Tensor) -> Tensor:
    """Return the Gram matrix W_O W_Oᵀ of each head in at least float32: (H, e, D) → (H, e, e)."""
    W_O = at_least_float32(W_O)
    return W_O @ W_O.mT


def output_norms(x: Tensor, gram: Tensor) -> Tensor:
    """Return ‖x W_O[h]‖ in at least float32, without computing x W_O: (B, H, T, e), (H, e, e) → (B, H, T)."""
    gram = at_least_float32(gram)
    by_head = x.transpose(0, 1).to(gram)  # one large product per head is faster than one per head and text
    rows = by_head.flatten(1, 2)  # (H, B·T, e)
    squares = (rows @ gram).mul_(rows).sum(-1).unflatten(1, by_head.shape[1:3]).transpose(0, 1)  # (B, H, T)
    is_zero = squares <= 0  # False for NaN, so that unknown weights give NaN norms
    return squares.where(~is_zero, 1.0).sqrt() * ~is_zero  # a silenced head has norm 0 and gradient 0, not NaN
