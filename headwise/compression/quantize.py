"""Quantize the weights of a model per head and part, and dequantize them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.heads.balanced_basis import LayerHeadMatrices, change_basis
from headwise.heads.quantized_weights import QuantizedWeight
from headwise.model import Transformer, check_model
from headwise.model.prune import rebuild_like
from headwise.spec import ModelSpec
from headwise.spec.weight_bits import FULL_PRECISION, GROUP_SIZE, Basis, BitAllocation, check_basis


@torch.no_grad()
def quantize(
    model: Transformer,
    weights: BitAllocation,
    *,
    group_size: int = GROUP_SIZE,
    activation_bits: int = FULL_PRECISION,
    basis: Basis = "given",
) -> Transformer:
    """Return a model whose weights are stored at 16, 8, 4, 3 or 2 bits. The given model is not changed.

    Quantization is symmetric, in groups along the input dimension of each head.

    Args:
        model: A headwise model (not an attached model).
        weights: Bits. One number applies to heads, MLPs and vocabulary. A dict sets them by head and part,
            `{"*": 8, "5.1": 4, "5.2:qk": 3, "mlp": 8, "vocabulary": 8}`: later entries override earlier ones, and weights
            that no entry names keep their precision.
        group_size: Number of consecutive input weights that share a scale.
        activation_bits: 8 also quantizes the activations that these weights are multiplied by, row by row. The default
            leaves them at full precision.
        basis: "given" quantizes heads in their own basis, "balanced" in their balanced basis
            (`headwise.heads.balanced_basis`), "random" in a random basis (a baseline for the effect of the basis).

    Returns:
        A new model with quantized weights.

    Raises:
        HeadwiseError: If bits, names or group size are not valid, or the model is quantized already.

    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> small = quantize(model, {"*": 4, "5.1": 8, "mlp": 8})
    >>> small.spec.weight_bytes() < model.spec.weight_bytes() / 3
    True
    >>> small.heads["5.1"].W_Q.shape
    torch.Size([384, 64])
    """
    check_model(model)
    model.check_native("weights can be quantized per head only in headwise's own models")
    check_basis(basis)
    spec = model.spec.quantized(weights, group_size=group_size, activation_bits=activation_bits)
    return quantize_to_spec(model, spec, basis)


def quantize_to_spec(model: Transformer, spec: ModelSpec, basis: Basis = "given") -> Transformer:
    """Return the model with the weight bits of `spec`."""
    state = dict(model.state_dict())  # projections are split and have a head axis
    if basis != "given":
        _apply_basis(model, spec, state, basis)
    for name, module in Transformer(spec, device="meta").named_modules():
        if isinstance(module, QuantizedWeight):
            weight = state.pop(f"{name.removesuffix('.quantized')}.weight")
            state |= {
                f"{name}.{buffer}": tensor
                for buffer, tensor in module.quantize_to_buffers(_as_matrices(name, weight)).items()
            }
    return rebuild_like(spec, state, model)


@torch.no_grad()
def dequantize(model: Transformer) -> Transformer:
    """Return the model with its quantized weights as floats, to train, export, prune or quantize it again.

    The values stay those of the quantized weights. The given model is not changed.

    Args:
        model: A headwise model with quantized weights.

    Returns:
        A new model without quantized weights.

    >>> from headwise.spec import preset
    >>> small = quantize(Transformer(preset("nano")), 4)
    >>> torch.equal(dequantize(small).heads["5.1"].W_O, small.heads["5.1"].W_O)
    True
    """
    check_model(model)
    model.check_native("weights can be quantized per head only in headwise's own models")
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, QuantizedWeight):
            for buffer, _ in module.named_buffers():
                state.pop(f"{name}.{buffer}")
            values = module.dequantize()  # (units, rows, inputs)
            base_name = name.removesuffix(".quantized")
            if base_name != name:
                values = values.transpose(0, 1)  # W_O, (D, H, e)
            state[f"{base_name}.weight"] = values if ".qkv." in name or base_name != name else values[0]
    return rebuild_like(replace(model.spec, weight_rules=(), activation_bits=FULL_PRECISION), state, model)


def _as_matrices(name: str, weight: Tensor) -> Tensor:
    """Return a weight as the matrices that are quantized separately, (units, rows, inputs): one per head, or one."""
    if name.endswith(".quantized"):
        return weight.transpose(0, 1)  # W_O, (D, H, e): quantized along the channels of each head
    return weight if ".qkv." in name else weight[None]


def _apply_basis(model: Transformer, spec: ModelSpec, state: dict[str, Tensor], basis: Basis) -> None:
    """Change the basis of heads in layers with quantized weights."""
    names = {id(module): name for name, module in model.named_modules()}
    for layer in model.attention_layers():
        if spec.attention_at(layer.hook_point.address).weight_bits is None:
            continue
        matrices, prefix = change_basis(LayerHeadMatrices.from_layer(layer), layer.spec, basis), names[id(layer)]
        for projection in "qkv":
            state[f"{prefix}.qkv.{projection}.weight"] = getattr(matrices, projection)
            bias = getattr(matrices, f"b_{projection}")
            if bias is not None:
                state[f"{prefix}.qkv.{projection}.bias"] = bias
        state[f"{prefix}.output_projection.weight"] = matrices.o.permute(2, 0, 1)


@dataclass(frozen=True)
class ModelPartFootprint:
    """Size of the weights of one part of a model.

    Attributes:
        part: heads, MLPs, vocabulary, other or all.
        parameters: Number of weights.
        nbytes: Bytes in memory and on disk, including quantization scales.
    """

    part: str
    parameters: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits per weight, including scales."""
        return 8 * self.nbytes / self.parameters if self.parameters else 0.0


def weight_footprints(model: Transformer) -> list[ModelPartFootprint]:
    """Return the sizes of the stored weights of heads, MLPs, vocabulary, other parts, and all together.

    >>> from headwise.spec import preset
    >>> footprints = weight_footprints(quantize(Transformer(preset("nano")), 4))
    >>> [(footprint.part, footprint.parameters, round(footprint.bits, 2)) for footprint in footprints[:2]]
    [('heads', 3538944, 5.0), ('MLPs', 7089408, 5.04)]
    """
    counts = {"heads": [0, 0], "MLPs": [0, 0], "vocabulary": [0, 0], "other": [0, 0]}
    for name, module in model.named_modules():
        model_part = _model_part(name)
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if name == "output.vocabulary" and model.spec.tied:
            tensors = [value for value in tensors if value.ndim == 1]  # the weight is counted with the embedding
        if isinstance(module, QuantizedWeight):
            parameters = len(module.bits) * module.rows * module.inputs
            parameters += sum(value.numel() for value in module.parameters(recurse=False))
        else:
            parameters = sum(value.numel() for value in tensors)
        counts[model_part][0] += parameters
        counts[model_part][1] += sum(value.nbytes for value in tensors)
    footprints = [ModelPartFootprint(part, *count_and_bytes) for part, count_and_bytes in counts.items()]
    return [
        *footprints,
        ModelPartFootprint(
            "all",
            sum(footprint.parameters for footprint in footprints),
            sum(footprint.nbytes for footprint in footprints),
        ),
    ]


def _model_part(name: str) -> str:
    if any(part in name for part in (".attention.", ".cross.")) or name.endswith((".attention", ".cross")):
        return "heads"
    if ".mlp." in name:
        return "MLPs"
    return "vocabulary" if name in ("embed.tokens", "output.vocabulary") else "other"
