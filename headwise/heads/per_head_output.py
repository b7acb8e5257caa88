"""What each head writes, one head at a time. Nothing of the shape (B, T, H, d, D) is ever built."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from headwise.kernels.rounding_tolerance import at_least_float32


@dataclass(frozen=True, eq=False)
class PerHeadOutput:
    """A layer's output, head by head. The guide's small example, three heads of two numbers, concatenates to six:

    >>> import torch
    >>> z = torch.tensor([[.2, .5], [.8, .1], [.3, .9]])[None, :, None]  # (B=1, H=3, T=1, d=2)
    >>> PerHeadOutput(z, torch.eye(6).unflatten(0, (3, 2)), None).concatenated()
    tensor([[[0.2000, 0.5000, 0.8000, 0.1000, 0.3000, 0.9000]]])
    """

    z: Tensor  # (B, H, T, e)
    W_O: Tensor  # (H, e, D)
    b_O: Tensor | None  # noqa: N815  # (D,)

    def concatenated(self) -> Tensor:
        """The heads side by side, as they enter W_O: (B, T, H·e)."""
        return self.z.transpose(1, 2).flatten(2)

    def head_output(self, index: int) -> Tensor:
        """What one head, by its place on the head axis, adds to the stream: z W_O[h], (B, T, D)."""
        return self.z[:, index] @ self.W_O[index]

    def head_outputs(self) -> Iterator[Tensor]:
        """The same for every head in turn; only one is held at a time."""
        return (self.head_output(index) for index in range(self.z.shape[1]))

    def head_norms(self) -> Tensor:
        """The length of every write, ‖z W_O[h]‖: (B, H, T)."""
        return output_norms(self.z, gram(self.W_O))

    def layer_output(self) -> Tensor:
        """The layer's output as the sum over heads: (B, T, D)."""
        total = self.z.new_zeros(self.z.shape[0], self.z.shape[2], self.W_O.shape[-1])
        for head_output in self.head_outputs():
            total = total + head_output
        return total if self.b_O is None else total + self.b_O


def gram(W_O: Tensor) -> Tensor:
    """W_O W_Oᵀ of each head: all that lengths depend on, (H, e, D) → (H, e, e); at least float32."""
    W_O = at_least_float32(W_O)
    return W_O @ W_O.mT


def output_norms(x: Tensor, gram: Tensor) -> Tensor:
    """‖x W_O[h]‖ without writing anything: (B, H, T, e), (H, e, e) → (B, H, T); at least float32."""
    gram = at_least_float32(gram)
    by_head = x.transpose(0, 1).to(gram)  # one product a head: one for each text too would be many small ones
    rows = by_head.flatten(1, 2)  # (H, B·T, e)
    squares = (rows @ gram).mul_(rows).sum(-1).unflatten(1, by_head.shape[1:3]).transpose(0, 1)  # (B, H, T)
    is_zero = squares <= 0  # and NaN, where weights are not known, stays NaN
    return squares.where(~is_zero, 1.0).sqrt() * ~is_zero  # what is silent has length 0 and gradient 0, not NaN
