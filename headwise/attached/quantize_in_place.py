"""Quantize the weights of a transformers model in place, per head and part, and undo it.

Matrices are those of native models: W_Q, W_K, W_V and W_O of each head, the linear layers of the MLPs, and the vocabulary
(the token embedding and the output projection). Everything is checked before anything is changed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.discover import is_conv1d
from headwise.attached.layer import AttachedLayer, check_no_adapters
from headwise.attached.per_head_packed_weights import (
    PerHeadQuantizedMatrix,
    is_packed,
    pack_weight,
    unpack_weight_in_place,
)
from headwise.attached.train_mode_and_checkpointing_mixin import blocks_with_attention
from headwise.errors import UnsupportedModelError
from headwise.spec import ModelSpec
from headwise.spec.weight_bits import FULL_PRECISION, LayerBits, WeightRule

QUANTIZATION_ATTRIBUTE = "_headwise_quantization"  # attribute of a model: its weight rules and activation bits
ROUTER_NAMES = ("gate", "router", "wg", "shared_expert_gate", "classifier")  # linear layers that choose experts
Packing = tuple[nn.Module, Callable[[], PerHeadQuantizedMatrix]]


def quantization_of(model: Any) -> tuple[tuple[WeightRule, ...], int]:
    """Return the weight rules and activation bits of a model. A model that is not quantized has no rules."""
    return model.__dict__.get(QUANTIZATION_ATTRIBUTE, ((), FULL_PRECISION))


@torch.no_grad()
def quantize_in_place(
    model: Any, layers: Sequence[AttachedLayer], blocks: Sequence[nn.Module], spec: ModelSpec
) -> Callable[[], None]:
    """Pack the weights of a model as its spec says.

    Args:
        model: Transformers model.
        layers: Its attention layers.
        blocks: Its blocks, in which MLPs are searched.
        spec: Spec of the model with weight rules.

    Returns:
        A function that restores the weights that the model had before, bitwise.

    Raises:
        UnsupportedModelError: A selected weight cannot be quantized. The model is unchanged.
    """
    packings: list[Packing] = []
    for layer in layers:
        bits = spec.attention_at(layer.hook_point.address).weight_bits
        if bits is not None and layer.spec.head_ids:
            packings += _layer_packings(layer, bits)
    mlp_bits, group_size = spec.bits_and_group_size("mlp")
    if mlp_bits != FULL_PRECISION:
        for module in mlp_modules(layers, blocks):
            packings.append((module, _make_whole_matrix_packer(module, mlp_bits, group_size, spec.activation_bits)))
    vocabulary_bits, vocabulary_group_size = spec.bits_and_group_size("vocabulary")
    undo: list[Callable[[], None]] = []
    try:
        undo += [pack_weight(module, make_packed()) for module, make_packed in packings]
        if vocabulary_bits != FULL_PRECISION:
            undo += _pack_vocabulary(model, vocabulary_bits, vocabulary_group_size, spec.activation_bits)
    except BaseException:
        _run_all(undo)
        raise
    model.__dict__[QUANTIZATION_ATTRIBUTE] = spec.weight_rules, spec.activation_bits
    undo.append(lambda: model.__dict__.pop(QUANTIZATION_ATTRIBUTE, None))
    return lambda: _run_all(undo)


def _run_all(undo: list[Callable[[], None]]) -> None:
    for restore in reversed(undo):
        restore()


@torch.no_grad()
def dequantize_in_place(model: Any) -> None:
    """Replace all packed weights of a model by floats with the values of the quantized weights."""
    shared: dict[int, nn.Parameter] = {}
    for module in [module for module in model.modules() if is_packed(module)]:
        key = id(module.__dict__.get("headwise_packed", (module._modules.get("headwise_packed"),))[0])
        unpack_weight_in_place(module)
        if key in shared:  # tied weights stay tied
            module.weight = shared[key]
        shared[key] = module.weight
    model.__dict__.pop(QUANTIZATION_ATTRIBUTE, None)


def _layer_packings(layer: AttachedLayer, bits: LayerBits) -> list[Packing]:
    """Return how to pack q, k, v and W_O of a layer. Projections without a quantized head stay as they are."""
    spec, packings = layer.spec, []
    head_bits = {
        "q": [bits.q[head] for head in spec.head_ids],
        "k": [bits.k[_kv_head_index(head, spec.kv_heads, len(bits.k))] for head in spec.kv_head_ids],
        "v": [bits.v[_kv_head_index(head, spec.kv_heads, len(bits.v))] for head in spec.kv_head_ids],
    }
    projections_by_module: dict[nn.Module, list[str]] = {}
    for projection, part_bits in head_bits.items():
        if any(count != FULL_PRECISION for count in part_bits):
            module = layer.qkv.projection_module(projection)
            _check_plain(module, layer.info.name)
            projections_by_module.setdefault(module, []).append(projection)
    for module, projections in projections_by_module.items():
        parts = {projection: head_bits[projection] for projection in projections}
        packings.append((module, _make_row_packing_function(layer, module, parts, bits)))
    output_bits = [bits.o[head] for head in spec.head_ids]
    if any(count != FULL_PRECISION for count in output_bits):
        _ = layer.output_projection.head_output_weights  # raises if W_O cannot be split by head
        module = layer.info.output_module
        assert module is not None
        _check_plain(module, layer.info.name)
        packings.append((module, _make_output_packer(layer, module, output_bits, bits)))
    return packings


def _kv_head_index(head: int, count: int, bits_count: int) -> int:
    """Return the number of a KV head in the bits. Layers with expanded KV groups have one KV head per head.

    Bits are listed for as many KV heads as the widest layer has; layers with fewer heads (Swin) use the first ones.
    """
    return head if count <= bits_count else head * bits_count // count


def _check_plain(module: nn.Module, name: str) -> None:
    """Raise an error if the weight of a module cannot be replaced."""
    check_no_adapters(module, name, "quantized")
    weight = module._parameters.get("weight")
    if is_packed(module) or weight is None or not weight.is_floating_point():
        raise UnsupportedModelError(
            f"{name}: a weight of type {type(module).__name__} cannot be quantized, because it is quantized already or "
            f"computed. Use a model with plain weights."
        )


def _make_row_packing_function(
    layer: AttachedLayer, module: nn.Module, parts: dict[str, list[int]], bits: LayerBits
) -> Callable[[], PerHeadQuantizedMatrix]:
    def make_packed() -> PerHeadQuantizedMatrix:
        weight = _matrix(module)
        size = (weight.shape[0], weight.shape[1])
        packed = PerHeadQuantizedMatrix(size, transposed=is_conv1d(module), activation_bits=bits.activation_bits)
        numbers = torch.arange(size[0], device="cpu")
        for projection, part_bits in parts.items():
            rows = layer.qkv.split_heads(projection, numbers)  # (heads, channels): rows of each head
            values = weight[rows.flatten().to(weight.device)].unflatten(0, rows.shape)
            is_natural = torch.equal(rows.flatten(), numbers)
            packed.quantize_rows_or_columns(
                projection, values, part_bits, bits.group_size, None if is_natural else rows.flatten().tolist()
            )
        packed.keep_other_rows(weight)
        return packed

    return make_packed


def _make_output_packer(
    layer: AttachedLayer, module: nn.Module, head_bits: list[int], bits: LayerBits
) -> Callable[[], PerHeadQuantizedMatrix]:
    def make_packed() -> PerHeadQuantizedMatrix:
        weight = _matrix(module)
        size = (weight.shape[0], weight.shape[1])
        packed = PerHeadQuantizedMatrix(
            size, columns_by_head=True, transposed=is_conv1d(module), activation_bits=bits.activation_bits
        )
        by_head = weight.unflatten(1, (len(layer.spec.head_ids), layer.spec.value_dim)).permute(1, 0, 2)  # (H, D, e)
        packed.quantize_rows_or_columns("o", by_head, head_bits, bits.group_size)
        packed.keep_other_rows(weight)
        return packed

    return make_packed


def _make_whole_matrix_packer(
    module: nn.Module, bits: int, group_size: int, activation_bits: int
) -> Callable[[], PerHeadQuantizedMatrix]:
    def make_packed() -> PerHeadQuantizedMatrix:
        weight = _matrix(module)
        packed = PerHeadQuantizedMatrix(
            (weight.shape[0], weight.shape[1]), transposed=is_conv1d(module), activation_bits=activation_bits
        )
        packed.quantize_rows_or_columns("weight", weight[None], [bits], group_size)
        packed.keep_other_rows(weight)
        return packed

    return make_packed


def _matrix(module: Any) -> Tensor:
    """Return the weight as (out, in)."""
    return module.weight.detach().mT if is_conv1d(module) else module.weight.detach()


def blocks_with_mlps(model: nn.Module, layers: Sequence[AttachedLayer]) -> list[nn.Module]:
    """Return the blocks with attention, and the other blocks of the same lists (hybrid models have blocks without)."""
    blocks = blocks_with_attention(model, layers)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    siblings = [block for module in lists if any(block in blocks for block in module) for block in module]
    return list(dict.fromkeys([*blocks, *siblings]))


def non_attention_linear_layers(layers: Sequence[AttachedLayer], blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the linear layers of blocks, without those of attention, of recurrent mixers, and those that choose experts."""
    excluded = {module for layer in layers for module in layer.module.modules()}
    excluded |= {layer.info.output_module for layer in layers if layer.info.output_module is not None}
    excluded |= _recurrent_modules(blocks)
    modules = [
        module
        for block in blocks
        for name, module in block.named_modules()
        if module not in excluded
        and (isinstance(module, nn.Linear) or is_conv1d(module))
        and name.rpartition(".")[2] not in ROUTER_NAMES
    ]
    return list(dict.fromkeys(modules))


def _recurrent_modules(blocks: Sequence[nn.Module]) -> set[nn.Module]:
    """Return the modules of recurrent mixers (Mamba, delta nets, short convolutions): children of a block with a Conv1d.

    Their code reads weights without calling the linear layers, so packed weights would not be found.
    """
    mixers = [
        child
        for block in blocks
        for child in block.children()
        if any(isinstance(module, nn.Conv1d) for module in child.modules())
    ]
    return {module for mixer in mixers for module in mixer.modules()}


def mlp_modules(layers: Sequence[AttachedLayer], blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the linear layers of the MLPs. Raise an error if MLPs have other weights."""
    modules, recurrent = non_attention_linear_layers(layers, blocks), _recurrent_modules(blocks)
    for block in blocks:
        for name, module in block.named_modules():
            if module not in recurrent and any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)):
                raise UnsupportedModelError(
                    f"mlp: {name} of type {type(module).__name__} stores the weights of several experts in one tensor, which "
                    f"cannot be quantized. Leave out 'mlp', for example weights={{'*': 4}}."
                )
    if not modules:
        raise UnsupportedModelError(
            "mlp: no linear layers were found in the blocks besides attention. Leave out 'mlp', for example weights={'*': 4}."
        )
    for module in modules:
        _check_plain(module, "mlp")
    return modules


def _pack_vocabulary(model: Any, bits: int, group_size: int, activation_bits: int) -> list[Callable[[], None]]:
    try:
        embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # several towers
        raise UnsupportedModelError(
            f"vocabulary: {type(model).__name__} has no single table of token embeddings. Leave out 'vocabulary', for "
            f"example weights={{'*': 4, 'mlp': 4}}."
        ) from None
    for module in (embedding, *([] if output is None else [output])):
        if not isinstance(module, nn.Embedding | nn.Linear):
            raise UnsupportedModelError(
                f"vocabulary: {type(module).__name__} cannot be quantized. Leave out 'vocabulary', for example "
                f"weights={{'*': 4, 'mlp': 4}}."
            )
        _check_plain(module, "vocabulary")
    is_tied = output is not None and output.weight is embedding.weight
    packed = _make_whole_matrix_packer(embedding, bits, group_size, activation_bits)()
    if output is None:
        return [pack_weight(embedding, packed)]
    own = packed if is_tied else _make_whole_matrix_packer(output, bits, group_size, activation_bits)()
    return [pack_weight(embedding, packed), pack_weight(output, own, is_owner=not is_tied)]
