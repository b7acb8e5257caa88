"""How the stream of a decoder is put together: what adds to it, which norms it is read through, what reads it at the end."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.model.protocols import Norms

if TYPE_CHECKING:
    from headwise.model.transformer import Transformer

EPS = ("eps", "variance_epsilon", "epsilon")  # what norms call the number that keeps them from dividing by nothing
ROWS, CLOSE = 6, 1e-5  # on how many rows it is tried whether a module is a norm, and how near its numbers must come


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm as what it is once its scale is frozen: scale · gain · (x − mean) + bias, the mean only where `centred`.

    >>> norm, x = Norm.of(nn.LayerNorm(4)), torch.tensor([3.0, 2.0, 0.0, 0.0])
    >>> torch.allclose(norm.turn(x) * norm.scale(x).float(), norm.module(x))
    True
    """

    module: Any
    centred: bool
    above: float = 0.0  # what the gain is above the weight: 1 where a weight of 0 changes nothing, as in Gemma

    @staticmethod
    def of(module: nn.Module) -> "Norm":
        """One of torch's."""
        return Norm(module, centred=isinstance(module, nn.LayerNorm))

    @staticmethod
    @torch.no_grad()
    def tried(part: nn.Module, width: int) -> "Norm | None":
        """A module as a norm, if one of the known ways to compute norms gives its numbers: tried on a copy, in float64.

        >>> Norm.tried(nn.RMSNorm(8, eps=1e-6), 8).centred, Norm.tried(nn.Linear(8, 8), 8)
        (False, None)
        """
        weight = getattr(part, "weight", None)
        if not any(hasattr(part, name) for name in EPS) or (weight is not None and weight.shape != (width,)):
            return None
        own: Any = copy.deepcopy(part).double().cpu()
        dice = torch.Generator().manual_seed(0)
        x = torch.randn(ROWS, width, generator=dice, dtype=torch.double)
        x = (x + 1) * torch.logspace(-3, 2, ROWS)[
            :, None
        ]  # (rows, D): a mean that shows, and rows so small that eps does
        made = own(x).double()
        for centred, above in ((True, 0.0), (False, 0.0), (True, 1.0), (False, 1.0)):
            norm = Norm(own, centred, above)
            bias = 0.0 if norm.bias is None else norm.bias
            if (norm.turn(x) * norm.scale(x) + bias - made).abs().max() <= CLOSE * made.abs().max():
                return Norm(part, centred, above)
        return None

    @property
    def gain(self) -> Tensor:
        """(D,), or 1 where there is no weight; in float64."""
        weight = getattr(self.module, "weight", None)
        return torch.ones((), dtype=torch.double) if weight is None else weight.double() + self.above

    @property
    def bias(self) -> Tensor | None:
        """(D,)"""
        return getattr(self.module, "bias", None)

    def scale(self, x: Tensor) -> Tensor:
        """What the norm multiplies by at x: (…, D) → (…, 1)"""
        eps = next((value for name in EPS if (value := getattr(self.module, name, None)) is not None), None)
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        wide = x.double()
        wide = wide - wide.mean(-1, keepdim=True) if self.centred else wide
        return (wide.square().mean(-1, keepdim=True) + eps).rsqrt()

    def turn(self, x: Tensor) -> Tensor:
        """What becomes of x but for scale and bias: (…, D) → (…, D)"""
        return (x - x.mean(-1, keepdim=True) if self.centred else x) * self.gain.to(x)

    def back(self, read: Tensor, x: Tensor) -> Tensor:
        """The direction before the norm that `read` is behind it, at the scale that x sets: (D,), (D,) → (D,) in float64."""
        scaled = read.double() * self.gain.to(read.device) * self.scale(x)
        return scaled - scaled.mean() if self.centred else scaled  # the mean out of x is the mean out of what reads x


@dataclass(frozen=True, eq=False)
class Step:
    """One layer: what its heads read through, what their writes pass on their way, and what else adds to the stream."""

    norm: nn.Module | None  # None: heads read the stream as it is
    after: Norm | None  # a norm between what attention writes and the stream
    mlp: nn.Module  # whatever gives the layer's other addition
    unread: str = ""  # why what heads bring does not follow from the stream; empty where it does


@dataclass(frozen=True, eq=False)
class Wiring:
    """A stream that is a sum: first + Σ (attention + MLP), then one norm, then logits that are linear in what it gives."""

    first: nn.Module  # is given the stream as it begins
    steps: dict[int, Step]  # by layer
    norm: Norm
    vocabulary: Any  # a linear layer, (D) → (V)
    embed: Callable[[Tensor], Tensor] | None  # ids (n,) → the stream at its beginning, (n, D), positions left out
    scale: float = 1.0  # what logits are multiplied by behind the vocabulary

    def logits(self, x: Tensor) -> Tensor:
        """What a part of the last norm's output adds to the logits: (…, D) → (…, V)"""
        return x @ self.vocabulary.weight.to(x).mT * self.scale


def wiring(model: "Transformer") -> Wiring:
    """How the stream of a decoder of ours is put together; refused where it is not a sum that ends in logits."""
    if model.spec.kind != "decoder" or model.spec.form == "post" or model.norm is None or model.output is None:
        raise HeadwiseError(
            f"a {model.spec.kind} of form {model.spec.form} and output {model.spec.output} has no sum of its own layers that "
            f"ends in logits."
        )
    blocks: list[Any] = list(model.blocks)
    steps = {layer: Step(block.norm_attention, None, block.mlp) for layer, block in enumerate(blocks)}
    return Wiring(blocks[0], steps, Norm.of(model.norm), model.output.vocabulary, partial(_embed, model))


def norms(model: "Transformer") -> Norms:
    """For each layer of ours the norm before what its heads ask, and before what they are asked with."""
    made: Norms = {}
    blocks: list[Any] = [*model.encoder_blocks, *model.blocks]
    for block in blocks:
        before = None if block.form == "post" else block.norm_attention
        made[str(block.attention.site.address)] = before, before
        if block.cross is not None:
            here = None if block.form == "post" else block.norm_cross
            made[str(block.cross.site.address)] = here, model.encoder_norm
    return made


def _embed(model: "Transformer", ids: Tensor) -> Tensor:
    embed = model.embed
    x = embed.of_tokens(ids) * model.spec.embed_scale  # (n, D)
    x = x if embed.types is None else x + embed.types.weight[0]
    return x if embed.norm is None else embed.norm(x)
