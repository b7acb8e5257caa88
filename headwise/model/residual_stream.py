"""Structure of the residual stream of a decoder: its additive terms, the norms of its readers, and the output."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedModelError
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model.protocols import Norms

if TYPE_CHECKING:
    from headwise.model.transformer import Transformer

# names of the epsilon attribute of norms
EPS_ATTRIBUTES = ("eps", "variance_epsilon", "epsilon")
# number of test rows, and relative tolerance, in the test whether a module is a norm
PROBE_ROWS, PROBE_TOLERANCE = (6, 1e-5)


@dataclass(frozen=True, eq=False)
class LinearizedNorm:
    """A norm with frozen scale, which is a linear function: scale · gain · (x − mean) + bias.

    Attributes:
        module: The norm module.
        centered: Whether the norm subtracts the mean (LayerNorm) or not (RMSNorm).
        weight_offset: Gain minus weight. It is 1 if a weight of 0 means a gain of 1, as in Gemma.

    >>> norm, x = LinearizedNorm.from_module(nn.LayerNorm(4)), torch.tensor([3.0, 2.0, 0.0, 0.0])
    >>> torch.allclose(norm.center_and_apply_gain(x) * norm.scale(x).float(), norm.module(x))
    True
    """

    module: Any
    centered: bool
    weight_offset: float = 0.0

    @staticmethod
    def from_module(module: nn.Module) -> "LinearizedNorm":
        """Return the linearized norm of a LayerNorm or RMSNorm of torch, or of a native model."""
        return LinearizedNorm(module, isinstance(module, nn.LayerNorm), getattr(module, "weight_offset", 0.0))

    @staticmethod
    @torch.no_grad()
    def infer(module: nn.Module, width: int) -> "LinearizedNorm | None":
        """Return the linearized norm of any module, or None if its outputs are not those of a known kind of norm.

        The test runs a copy of the module on random rows in float64.

        >>> LinearizedNorm.infer(nn.RMSNorm(8, eps=1e-6), 8).centered, LinearizedNorm.infer(nn.Linear(8, 8), 8)
        (False, None)
        """
        weight = getattr(module, "weight", None)
        if not any(hasattr(module, name) for name in EPS_ATTRIBUTES) or (
            weight is not None and weight.shape != (width,)
        ):
            return None
        module_copy: Any = copy.deepcopy(module).cpu().double()
        if hasattr(module_copy, "_hf_hook"):
            vars(module_copy).pop("forward", None)  # accelerate's, which moves inputs to the device of the module
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(PROBE_ROWS, width, generator=generator, dtype=torch.double, device="cpu")
        # (rows, D), with a nonzero mean to detect centering, and with small rows to detect eps
        x = (x + 1) * torch.logspace(-3, 2, PROBE_ROWS, device="cpu", dtype=torch.float32)[:, None]
        expected = to_float64(module_copy(x))
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
        """Gain, (D,), or 1 if the norm has no weight, in float64."""
        weight = getattr(self.module, "weight", None)
        return (
            torch.ones((), dtype=torch.double, device="cpu")
            if weight is None
            else to_float64(weight) + self.weight_offset
        )

    @property
    def bias(self) -> Tensor | None:
        """Bias, (D,), or None."""
        return getattr(self.module, "bias", None)

    def scale(self, x: Tensor) -> Tensor:
        """Return the scale of the norm at x: (…, D) → (…, 1)."""
        eps = next((value for name in EPS_ATTRIBUTES if (value := getattr(self.module, name, None)) is not None), None)
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        x64 = to_float64(x)
        x64 = x64 - x64.mean(-1, keepdim=True) if self.centered else x64
        return (x64.square().mean(-1, keepdim=True) + eps).rsqrt()

    def center_and_apply_gain(self, x: Tensor) -> Tensor:
        """Apply the norm without scale and bias: (…, D) → (…, D)."""
        return (x - x.mean(-1, keepdim=True) if self.centered else x) * self.gain.to(x)

    def pull_back(self, direction: Tensor, x: Tensor) -> Tensor:
        """Map a direction after the norm to the direction before it, with the scale at x: (D,), (D,) → (D,) in float64."""
        scale = self.scale(x)  # on the CPU if the device has no float64
        scaled = to_float64(direction).to(scale.device) * self.gain.to(scale.device) * scale
        return scaled - scaled.mean() if self.centered else scaled  # centering is symmetric


@dataclass(frozen=True, eq=False)
class ResidualLayerModules:
    """One layer of a residual stream.

    Attributes:
        norm: Norm of the attention input. None if attention reads the residual stream directly.
        post_norm: Norm between the attention output and the residual stream, or None.
        mlp: Module whose output is the other term that the layer adds.
        block: Module that takes and returns the residual stream.
        unsupported_reason: Reason why head outputs are not a function of the residual stream. Empty if they are.
    """

    norm: nn.Module | None
    post_norm: LinearizedNorm | None
    mlp: nn.Module
    block: nn.Module
    unsupported_reason: str = ""


@dataclass(frozen=True, eq=False)
class ResidualStream:
    """A residual stream that is a sum: embedding + Σ (attention + MLP), followed by one norm and linear logits.

    Attributes:
        first_module: Module whose input is the residual stream before the first layer.
        layers: The layers by index.
        norm: Final norm.
        vocabulary: Linear output layer, (D) → (V).
        embed: Function from token ids (n,) to their embeddings without positions, (n, D). None if it is not known.
        logit_scale: Factor of the logits after the output layer.
    """

    first_module: nn.Module
    layers: dict[int, ResidualLayerModules]
    norm: LinearizedNorm
    vocabulary: Any
    embed: Callable[[Tensor], Tensor] | None
    logit_scale: float = 1.0

    def unembed(self, x: Tensor) -> Tensor:
        """Return the logits of a term of the final norm's output, without bias: (…, D) → (…, V)."""
        return x @ self.vocabulary.weight.to(x).mT * self.logit_scale


def residual_stream(model: "Transformer") -> ResidualStream:
    """Return the residual stream of a native decoder. Raise if it is not a sum that ends in logits."""
    if (
        model.spec.kind != "decoder"
        or model.spec.norm_placement == "post"
        or model.norm is None
        or model.output is None
    ):
        raise UnsupportedModelError(
            f"residual stream: needs a decoder with logits whose layers add to the residual stream. Got "
            f"kind={model.spec.kind!r}, norm_placement={model.spec.norm_placement!r}, output={model.spec.output!r}."
        )
    blocks: list[Any] = list(model.blocks)
    layers = {layer: _residual_layer(block) for layer, block in enumerate(blocks)}
    return ResidualStream(
        blocks[0],
        layers,
        LinearizedNorm.from_module(model.norm),
        model.output.vocabulary,
        partial(_embed, model),
        model.spec.logit_scale,
    )


def _residual_layer(block: Any) -> ResidualLayerModules:
    """Return the norms of a native block, and the module whose output is added to the residual stream after attention."""
    attention_norm, mlp_norm = block.output_norms
    return ResidualLayerModules(
        None if block.norm_placement == "output" else block.norm_attention,
        None if attention_norm is None else LinearizedNorm.from_module(attention_norm),
        block.mlp if mlp_norm is None else mlp_norm,
        block,
    )


def input_norms(model: "Transformer") -> Norms:
    """Return the input norms of q, and of k and v, for each layer of a native model."""
    norms_by_layer: Norms = {}
    blocks: list[Any] = [*model.encoder_blocks, *model.blocks]
    for block in blocks:
        input_norm = None if block.norm_placement in ("post", "output") else block.norm_attention
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
