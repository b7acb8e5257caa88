"""Quantize the weights of a model per head and part, and dequantize them."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from headwise.errors import UnsupportedModelError
from headwise.heads.balanced_basis import LayerHeadMatrices, change_basis
from headwise.heads.quantized_layers import QuantizedWeight
from headwise.model import ModelProtocol, Transformer, check_model
from headwise.model.prune import rebuild_like
from headwise.model.quantize_state_dict import quantize_state_dict
from headwise.spec import ModelSpec
from headwise.spec.weight_bits import FULL_PRECISION, GROUP_SIZE, Basis, BitAllocation, check_basis

M = TypeVar("M", bound=ModelProtocol)


@torch.no_grad()
def quantize(
    model: M,
    weights: BitAllocation,
    *,
    group_size: int = GROUP_SIZE,
    activation_bits: int = FULL_PRECISION,
    basis: Basis = "given",
    in_place: bool = False,
) -> M:
    """Return a model whose weights are stored at 16, 8, 4, 3 or 2 bits. The given model is not changed.

    Quantization is symmetric, in groups along the input dimension of each head. `quantized` quantizes weights only while a
    context is open.

    Args:
        model: Native or attached model.
        weights: Bits. One number applies to heads, MLPs and vocabulary. A dict sets them by head and part,
            `{"*": 8, "5.1": 4, "5.2:qk": 3, "mlp": 8, "vocabulary": 8}`: later entries override earlier ones, and weights
            that no entry names keep their precision.
        group_size: Number of consecutive input weights that share a scale.
        activation_bits: 8 also quantizes the activations that these weights are multiplied by, row by row. The default
            leaves them at full precision.
        basis: "given" quantizes heads in their own basis, "balanced" in their balanced basis
            (`headwise.heads.balanced_basis`), "random" in a random basis (a baseline for the effect of the basis). Attached
            models support "given" only.
        in_place: Quantize the given attached model instead of a copy. `dequantize(model, in_place=True)` gives it floats
            again, but not its original weights.

    Returns:
        The model with quantized weights.

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
    check_basis(basis)
    spec = model.spec.quantized(weights, group_size=group_size, activation_bits=activation_bits)
    return quantize_to_spec(model, spec, basis, in_place=in_place)


def quantize_to_spec(model: M, spec: ModelSpec, basis: Basis = "given", *, in_place: bool = False) -> M:
    """Return the model with the weight bits of `spec`."""
    check_supported_basis(model, basis)
    if not model.is_native:
        changed = model if in_place else copy.deepcopy(model.copy_offloaded_to_memory())
        changed.quantize(spec)  # pyright: ignore[reportAttributeAccessIssue]
        return changed
    _check_not_in_place(in_place=in_place)
    return _quantize_native(model, spec, basis)  # pyright: ignore


def check_supported_basis(model: ModelProtocol, basis: Basis) -> None:
    """Raise if the heads of a model cannot be quantized in a basis."""
    if basis != "given" and not model.is_native:
        raise UnsupportedModelError(
            f"basis={basis!r}: not supported for attached models, because their position encoding is unknown. "
            "Use basis='given'."
        )


def _check_not_in_place(*, in_place: bool) -> None:
    if in_place:
        raise UnsupportedModelError(
            "in_place=True: only attached models can be quantized in place. Leave out in_place; the result is a new model."
        )


def _quantize_native(model: Transformer, spec: ModelSpec, basis: Basis) -> Transformer:
    state = dict(model.state_dict())  # projections are split and have a head axis
    if basis != "given":
        _apply_basis(model, spec, state, basis)
    return rebuild_like(spec, quantize_state_dict(spec, state), model)


@contextmanager
def quantized(
    model: ModelProtocol,
    weights: BitAllocation,
    *,
    group_size: int = GROUP_SIZE,
    activation_bits: int = FULL_PRECISION,
) -> Iterator[None]:
    """Quantize the weights of an attached model inside the context, and restore them bitwise after it.

    Args:
        model: Attached model. For a native model, `quantize` returns a new model.
        weights: Bits, as in `quantize`.
        group_size: Number of consecutive input weights that share a scale.
        activation_bits: Bits of the activations, as in `quantize`.

    Yields:
        Nothing. The given model computes with the quantized weights inside the context.

    Raises:
        UnsupportedModelError: The model is native, or a selected weight cannot be quantized.

    >>> import transformers
    >>> from headwise.attached import attach
    >>> sizes = dict(n_embd=16, n_layer=2, n_head=4, vocab_size=31, bos_token_id=0, eos_token_id=0)
    >>> attached = attach(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval())
    >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
    >>> before = attached(ids)
    >>> with quantized(attached, {"*": 4, "1.2": 8}):
    ...     torch.equal(attached(ids), before)
    False
    >>> torch.equal(attached(ids), before)
    True
    """
    check_model(model)
    spec = model.spec.quantized(weights, group_size=group_size, activation_bits=activation_bits)
    if model.is_native:
        raise UnsupportedModelError(
            "model: a native model cannot be quantized in place. Use hw.quantize(model, weights), which returns a new model."
        )
    restore = model.quantize(spec)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        restore()


@torch.no_grad()
def dequantize(model: M, *, in_place: bool = False) -> M:
    """Return the model with its quantized weights as floats, to train, export, prune or quantize it again.

    The values stay those of the quantized weights. The given model is not changed.

    Args:
        model: Native or attached model with quantized weights.
        in_place: Dequantize the given attached model instead of a copy.

    Returns:
        The model without quantized weights.

    >>> from headwise.spec import preset
    >>> small = quantize(Transformer(preset("nano")), 4)
    >>> torch.equal(dequantize(small).heads["5.1"].W_O, small.heads["5.1"].W_O)
    True
    """
    check_model(model)
    if not model.is_native:
        changed = model if in_place else copy.deepcopy(model)
        changed.dequantize()  # pyright: ignore[reportAttributeAccessIssue]
        return changed
    _check_not_in_place(in_place=in_place)
    return _dequantize_native(model)  # pyright: ignore


def _dequantize_native(model: Transformer) -> Transformer:
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


def weight_footprints(model: ModelProtocol) -> list[ModelPartFootprint]:
    """Return the sizes of the stored weights of heads, MLPs, vocabulary, other parts, and all together.

    >>> from headwise.spec import preset
    >>> footprints = weight_footprints(quantize(Transformer(preset("nano")), 4))
    >>> [(footprint.part, footprint.parameters, round(footprint.bits, 2)) for footprint in footprints[:2]]
    [('heads', 3538944, 5.0), ('MLPs', 7089408, 5.04)]
    """
    counts = {"heads": [0, 0], "MLPs": [0, 0], "vocabulary": [0, 0], "other": [0, 0]}
    paths = {} if model.is_native else model.weight_paths_by_part()  # pyright: ignore[reportAttributeAccessIssue]
    counted = set[int]()
    for name, module in model.named_modules():  # pyright: ignore[reportAttributeAccessIssue]
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        tensors = [
            value for value in tensors if id(value) not in counted
        ]  # tied weights count once, with the embedding
        counted |= {id(value) for value in tensors}
        if isinstance(module, QuantizedWeight):
            parameters = len(module.bits) * module.rows * module.inputs if tensors else 0
            parameters += sum(value.numel() for value in module.parameters(recurse=False))
        else:
            parameters = sum(value.numel() for value in tensors)
        model_part = _native_part(name) if model.is_native else _attached_part(name.removeprefix("model."), paths)
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


def _native_part(name: str) -> str:
    if any(part in name for part in (".attention.", ".cross.")) or name.endswith((".attention", ".cross")):
        return "heads"
    if ".mlp." in name:
        return "MLPs"
    return "vocabulary" if name in ("embed.tokens", "output.vocabulary") else "other"


def _attached_part(name: str, paths: dict[str, tuple[str, ...]]) -> str:
    for part, prefixes in paths.items():
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes):
            return part
    return "other"
