"""`quantize`: the same model with its weights at few bits, by head and part; `dequantize` makes them numbers again."""

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
    """A new model whose weights are stored at 16, 8, 4, 3 or 2 bits; the given one stays as it is.

    One number is for heads, MLPs and vocabulary; `{"*": 8, "5.1": 4, "5.2:qk": 3, "mlp": 8, "vocabulary": 8}` goes by head
    and part, the later of two that name the same counts, and what is not named stays as it is. Rounding is symmetric, in
    groups of `group_size` numbers along the input, inside a head. `activation_bits=8` also rounds what these weights are
    multiplied by, row by row. `basis="balanced"` first brings heads into their balanced basis
    (`headwise.heads.balanced_basis`), "random" into one that is drawn by chance, to see what the basis matters.

    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> small = quantize(model, {"*": 4, "5.1": 8, "mlp": 8})
    >>> small.spec.weight_bytes() < model.spec.weight_bytes() / 3
    True
    >>> small.heads["5.1"].W_Q.shape
    torch.Size([384, 64])
    """
    check_model(model)
    model.check_native("weights are packed by head in headwise's own models")
    check_basis(basis)
    spec = model.spec.quantized(weights, group_size=group_size, activation_bits=activation_bits)
    return quantize_to_spec(model, spec, basis)


def quantize_to_spec(model: Transformer, spec: ModelSpec, basis: Basis = "given") -> Transformer:
    """The model as a spec of its own, with weights at few bits, says."""
    state = dict(model.state_dict())  # split, with a head axis
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
    """The same numbers as floats again, to train, to export, to prune and quantize again; the given model stays as it is.

    >>> from headwise.spec import preset
    >>> small = quantize(Transformer(preset("nano")), 4)
    >>> torch.equal(dequantize(small).heads["5.1"].W_O, small.heads["5.1"].W_O)
    True
    """
    check_model(model)
    model.check_native("weights are packed by head in headwise's own models")
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
    """A weight as the matrices it is rounded as, (units, rows, inputs): its heads, or itself."""
    if name.endswith(".quantized"):
        return weight.transpose(0, 1)  # W_O, (D, H, e): rounded along each head's own channels
    return weight if ".qkv." in name else weight[None]


def _apply_basis(model: Transformer, spec: ModelSpec, state: dict[str, Tensor], basis: Basis) -> None:
    """Put heads of layers with weights at few bits into another basis."""
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
class WeightFootprint:
    """What some part of a model takes: numbers, bytes as they lie in memory and on disk, and bits a number."""

    part: str
    parameters: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits a number, scales among them."""
        return 8 * self.nbytes / self.parameters if self.parameters else 0.0


def weight_footprints(model: Transformer) -> list[WeightFootprint]:
    """What a model's weights take, counted as they lie there: heads, MLPs, vocabulary, the rest, and all together.

    >>> from headwise.spec import preset
    >>> footprints = weight_footprints(quantize(Transformer(preset("nano")), 4))
    >>> [(footprint.part, footprint.parameters, round(footprint.bits, 2)) for footprint in footprints[:2]]
    [('heads', 3538944, 5.0), ('MLPs', 7089408, 5.04)]
    """
    counts = {"heads": [0, 0], "MLPs": [0, 0], "vocabulary": [0, 0], "the rest": [0, 0]}
    for name, module in model.named_modules():
        model_part = _model_part(name)
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if name == "output.vocabulary" and model.spec.tied:
            tensors = [value for value in tensors if value.ndim == 1]  # its weight is the embedding
        if isinstance(module, QuantizedWeight):
            parameters = len(module.bits) * module.rows * module.inputs
            parameters += sum(value.numel() for value in module.parameters(recurse=False))
        else:
            parameters = sum(value.numel() for value in tensors)
        counts[model_part][0] += parameters
        counts[model_part][1] += sum(value.nbytes for value in tensors)
    footprints = [WeightFootprint(part, *count_and_bytes) for part, count_and_bytes in counts.items()]
    return [
        *footprints,
        WeightFootprint(
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
    return "vocabulary" if name in ("embed.tokens", "output.vocabulary") else "the rest"
