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

# what norms call the number that keeps them from dividing by nothing
EPS_ATTRIBUTES = ("eps", "variance_epsilon", "epsilon")
# on how many rows it is tried whether a module is a norm, and how near its numbers must come
PROBE_ROWS, PROBE_TOLERANCE = (6, 1e-5)


@dataclass(frozen=True, eq=False)
class LinearizedNorm:
    """A norm as what it is once its scale is frozen: scale · gain · (x − mean) + bias, the mean only where `centered`.

    >>> norm, x = LinearizedNorm.from_module(nn.LayerNorm(4)), torch.tensor([3.0, 2.0, 0.0, 0.0])
    >>> torch.allclose(norm.center_and_apply_gain(x) * norm.scale(x).float(), norm.module(x))
    True
    """

    module: Any
    centered: bool
    weight_offset: float = 0.0  # what the gain is above the weight: 1 where a weight of 0 changes nothing, as in Gemma

    @staticmethod
    def from_module(module: nn.Module) -> "LinearizedNorm":
        """One of torch's."""
        return LinearizedNorm(module, centered=isinstance(module, nn.LayerNorm))

    @staticmethod
    @torch.no_grad()
    def infer(module: nn.Module, width: int) -> "LinearizedNorm | None":
        """A module as a norm, if one of the known ways to compute norms gives its numbers: tried on a copy, in float64.

        >>> LinearizedNorm.infer(nn.RMSNorm(8, eps=1e-6), 8).centered, LinearizedNorm.infer(nn.Linear(8, 8), 8)
        (False, None)
        """
        weight = getattr(module, "weight", None)
        if not any(hasattr(module, name) for name in EPS_ATTRIBUTES) or (
            weight is not None and weight.shape != (width,)
        ):
            return None
        module_copy: Any = copy.deepcopy(module).double().cpu()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(PROBE_ROWS, width, generator=generator, dtype=torch.double)
        x = (x + 1) * torch.logspace(-3, 2, PROBE_ROWS)[
            :, None
        ]  # (rows, D): a mean that shows, and rows so small that eps does
        expected = module_copy(x).double()
        for centered, weight_offset in ((True, 0.0), (False, 0.0), (True, 1.0), (False, 1.0)):
            norm = LinearizedNorm(module_copy, centered, weight_offset)
            bias = 0.0 if norm.bias is None else norm.bias
            if (
                norm.center_and_apply_gain(x) * norm.scale(x) + bias - expected
            ).abs().max() <= PROBE_TOLERANCE * expected.abs().max():
                return LinearizedNorm(module, centered, weight_offset)
        return None

    @property
    def gain(self) -> Tensor:
        """(D,), or 1 where there is no weight; in float64."""
        weight = getattr(self.module, "weight", None)
        return torch.ones((), dtype=torch.double) if weight is None else weight.double() + self.weight_offset

    @property
    def bias(self) -> Tensor | None:
        """(D,)"""
        return getattr(self.module, "bias", None)

    def scale(self, x: Tensor) -> Tensor:
        """What the norm multiplies by at x: (…, D) → (…, 1)"""
        eps = next((value for name in EPS_ATTRIBUTES if (value := getattr(self.module, name, None)) is not None), None)
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        x64 = x.double()
        x64 = x64 - x64.mean(-1, keepdim=True) if self.centered else x64
        return (x64.square().mean(-1, keepdim=True) + eps).rsqrt()

    def center_and_apply_gain(self, x: Tensor) -> Tensor:
        """What becomes of x but for scale and bias: (…, D) → (…, D)"""
        return (x - x.mean(-1, keepdim=True) if self.centered else x) * self.gain.to(x)

    def pull_back(self, direction: Tensor, x: Tensor) -> Tensor:
        """The direction before the norm that is `direction` after it, at the scale set by x: (D,), (D,) → (D,) in float64."""
        scaled = direction.double() * self.gain.to(direction.device) * self.scale(x)
        return scaled - scaled.mean() if self.centered else scaled  # the mean out of x is the mean out of what reads x


@dataclass(frozen=True, eq=False)
class ResidualLayer:
    """One layer: what its heads read through, what their writes pass on their way, and what else adds to the stream."""

    norm: nn.Module | None  # None: heads read the stream as it is
    post_norm: LinearizedNorm | None  # a norm between what attention writes and the stream
    mlp: nn.Module  # whatever gives the layer's other addition
    unsupported_reason: str = ""  # why what heads bring does not follow from the stream; empty where it does


@dataclass(frozen=True, eq=False)
class ResidualStream:
    """A stream that is a sum: first + Σ (attention + MLP), then one norm, then logits that are linear in what it gives."""

    first_module: nn.Module  # is given the stream as it begins
    layers: dict[int, ResidualLayer]  # by layer
    norm: LinearizedNorm
    vocabulary: Any  # a linear layer, (D) → (V)
    embed: Callable[[Tensor], Tensor] | None  # ids (n,) → the stream at its beginning, (n, D), positions left out
    logit_scale: float = 1.0  # what logits are multiplied by behind the vocabulary

    def unembed(self, x: Tensor) -> Tensor:
        """What a part of the last norm's output adds to the logits: (…, D) → (…, V)"""
        return x @ self.vocabulary.weight.to(x).mT * self.logit_scale


def residual_stream(model: "Transformer") -> ResidualStream:
    """How the stream of a decoder of ours is put together; refused where it is not a sum that ends in logits."""
    if (
        model.spec.kind != "decoder"
        or model.spec.norm_placement == "post"
        or model.norm is None
        or model.output is None
    ):
        raise HeadwiseError(
            f"a {model.spec.kind} of norm placement {model.spec.norm_placement} and output {model.spec.output} has no sum of "
            f"its own layers that ends in logits."
        )
    blocks: list[Any] = list(model.blocks)
    layers = {layer: ResidualLayer(block.norm_attention, None, block.mlp) for layer, block in enumerate(blocks)}
    return ResidualStream(
        blocks[0], layers, LinearizedNorm.from_module(model.norm), model.output.vocabulary, partial(_embed, model)
    )


def input_norms(model: "Transformer") -> Norms:
    """For each layer of ours the norm before what its heads ask, and before what they are asked with."""
    norms_by_layer: Norms = {}
    blocks: list[Any] = [*model.encoder_blocks, *model.blocks]
    for block in blocks:
        input_norm = None if block.norm_placement == "post" else block.norm_attention
        norms_by_layer[str(block.attention.hook_point.address)] = input_norm, input_norm
        if block.cross is not None:
            cross_norm = None if block.norm_placement == "post" else block.norm_cross
            norms_by_layer[str(block.cross.hook_point.address)] = cross_norm, model.encoder_norm
    return norms_by_layer


def _embed(model: "Transformer", ids: Tensor) -> Tensor:
    embed = model.embed
    x = embed.embed_tokens(ids) * model.spec.embed_scale  # (n, D)
    x = x if embed.types is None else x + embed.types.weight[0]
    return x if embed.norm is None else embed.norm(x)
