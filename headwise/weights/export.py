"""Export to a transformers folder: config.json and tensors in the layout of a model family.

A pruned model is exported in its full shape, with zeros for pruned heads: outputs are the same, but the size is not reduced.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from headwise.errors import ArgumentError, HeadwiseError, UnsupportedModelError, suggest_names
from headwise.heads import MultiHeadAttention
from headwise.io.aligned_safetensors import write_tensors
from headwise.io.atomic_write import EXPORT_MARKER, atomic_folder
from headwise.model import ModelProtocol, Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.weights.families import FAMILIES, ModelFamilySpec
from headwise.weights.keymap import expand_mappings


def export(model: ModelProtocol, folder: str | Path, family: str | None = None) -> Path:
    """Write a model as a transformers folder.

    Args:
        model: Native or attached model.
        folder: Output folder. An earlier export is replaced.
        family: Model family. Default: the family that the model was loaded from, or the first that can represent it.

    Returns:
        The folder.
    """
    return model.export(folder, family)


def export_native(model: Transformer, folder: str | Path, family: str | None = None) -> Path:
    """Write a native model as a transformers folder."""
    if model.spec.weight_rules:
        raise UnsupportedModelError(
            "weights quantized per head cannot be exported. Dequantize the model first: hw.dequantize(model)."
        )
    full_spec = replace(model.spec, kept_heads=())
    full_spec, chosen_family, config = _choose_family(full_spec, family or model.family)
    state = full_shape_state(model)
    if full_spec.attention.bias and not model.spec.attention.bias:
        state |= _make_zero_qkv_biases(state)
    tensors = {}
    state |= _merged_position_biases(model, state, chosen_family)
    for mapped in expand_mappings(full_spec, chosen_family.mappings):
        tensor = _assemble(mapped.native_name, state)
        if (
            mapped.mapping.is_rotary
            and full_spec.attention.rotary is not None
            and full_spec.attention.rotary.layout == "interleaved"
        ):
            tensor = to_half_split_rotary(tensor, full_spec.attention.head_dim)
        name = (
            mapped.external_name[1:]
            if mapped.external_name.startswith("/")
            else chosen_family.export_prefix(full_spec) + mapped.external_name
        )
        tensor = mapped.mapping.convert(tensor)
        tensors[name] = torch.cat((tensors[name], tensor)) if mapped.mapping.part[0] else tensor
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    special = {} if model.tokenizer is None else model.tokenizer.special
    special_ids = {f"{role}_token_id": special[role] for role in ("bos", "eos", "pad") if special.get(role) is not None}
    config = special_ids | config | {"dtype": dtype}
    with atomic_folder(folder, (EXPORT_MARKER,)) as temp_folder:
        (temp_folder / EXPORT_MARKER).write_text(
            json.dumps({"to": "transformers", "family": chosen_family.name}), encoding="utf-8"
        )
        (temp_folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        write_tensors(tensors, temp_folder / "model.safetensors", {"format": "pt"})
        if model.tokenizer is not None:
            model.tokenizer.save(temp_folder)
    return Path(folder)


def _choose_family(spec: ModelSpec, name: str | None) -> tuple[ModelSpec, ModelFamilySpec, dict]:
    """Return the spec to write, the family and its configuration.

    A family that represents output biases only together with biases of q, k and v gets zeros for them. If no family
    can represent the spec, the error lists the reasons.
    """
    if spec.cache:
        raise UnsupportedModelError(
            "per-head cache policies cannot be exported, and the model computes different outputs without them. Use "
            "model.save(folder)."
        )
    if name is not None:
        for family in FAMILIES:
            if name in (family.name, *family.model_types):
                return _spec_and_config(family, spec)
        raise ArgumentError(f"family={name!r}: unknown model family; {suggest_names(name, [f.name for f in FAMILIES])}")
    reasons = []
    for family in FAMILIES:
        try:
            return _spec_and_config(family, spec)
        except HeadwiseError as error:
            reasons.append(str(error).split(". ")[0])
    raise UnsupportedModelError(
        f"model: cannot be exported, because no model family of transformers can represent it: {'; '.join(reasons)}. Save it "
        f"in Headwise's own format: model.save(folder)."
    )


def _spec_and_config(family: ModelFamilySpec, spec: ModelSpec) -> tuple[ModelSpec, ModelFamilySpec, dict]:
    """Return the spec to write, the family and its configuration, with biases of q, k and v if the family needs them."""
    try:
        return spec, family, family.config_from_spec(spec)
    except HeadwiseError as error:
        if not spec.attention.out_bias or spec.attention.bias:
            raise
        with_biases = replace(spec, attention=replace(spec.attention, bias=True))
        try:
            return with_biases, family, family.config_from_spec(with_biases)
        except HeadwiseError:
            raise error from None  # the reasons of the spec as it is


def _make_zero_qkv_biases(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return zero biases for q, k and v of every layer, or for their latents, by name."""
    by_head = tuple(f".qkv.{projection}.weight" for projection in "qkv")  # (heads, channels, width)
    latent = (".qkv.q_down.weight", ".qkv.kv_down.weight")  # (rank, width)
    return {
        name.removesuffix("weight") + "bias": tensor.new_zeros(tensor.shape[: 2 if name.endswith(by_head) else 1])
        for name, tensor in state.items()
        if name.endswith((*by_head, *latent))
    }


def full_shape_state(model: Transformer) -> dict[str, Tensor]:
    """Return the model's weights in full shape, in the canonical split layout, with zeros for pruned heads."""
    state = dict(model.state_dict())
    for prefix, layer in _attention_modules(model):
        if layer.spec.kept_heads is None:
            continue
        spec = layer.spec
        heads, kv_heads = (spec.head_ids, spec.heads), (spec.kv_head_ids, spec.kv_heads)
        _pad_layer(state, prefix, heads, kv_heads)
        _restore_pruned_qk_rows(state, prefix, spec)
    return state


def compact_state(model: Transformer) -> tuple[dict[str, Tensor], int]:
    """Return the weights with as many heads per layer as the largest layer has, and that number.

    The remaining heads of a layer come first, and zeros follow. If a layer has all heads, heads keep their numbers. Every
    head must have its own KV head.
    """
    count = max((len(layer.spec.head_ids) for layer in model.attention_layers()), default=0) or 1
    if count == model.spec.attention.heads:
        return full_shape_state(model), count
    state = dict(model.state_dict())
    for prefix, layer in _attention_modules(model):
        if len(layer.spec.head_ids) < count:
            heads = (tuple(range(len(layer.spec.head_ids))), count)
            _pad_layer(state, prefix, heads, heads)
    return state, count


def _attention_modules(model: Transformer) -> list[tuple[str, MultiHeadAttention]]:
    """Return the attention layers by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, MultiHeadAttention)]


HeadPositions = tuple[tuple[int, ...], int]  # positions of the heads that a layer has, and the number of all heads


def _pad_layer(state: dict[str, Tensor], prefix: str, heads: HeadPositions, kv_heads: HeadPositions) -> None:
    """Pad the weights of a layer with zero heads."""
    for key in [key for key in state if key.startswith(f"{prefix}.")]:
        state[key] = _pad_pruned(key.removeprefix(f"{prefix}."), state[key], heads, kv_heads)


def _restore_pruned_qk_rows(state: dict[str, Tensor], prefix: str, spec: AttentionSpec) -> None:
    """Put the rows of W_Q and W_K back that a norm over all heads reads. The heads still write nothing."""
    for projection, pruned in spec.pruned_norm_rows.items():
        for kind in ("weight", "bias"):
            rows = state.pop(f"{prefix}.{projection}_norm.pruned_{kind}", None)
            if rows is not None:
                key = f"{prefix}.qkv.{projection}.{kind}"
                index = torch.tensor(pruned, dtype=torch.long, device=rows.device)
                state[key] = state[key].index_copy(0, index, rows)


def _merged_position_biases(model: Transformer, state: dict[str, Tensor], family: ModelFamilySpec) -> dict[str, Tensor]:
    """Return the position biases of layers that share one table in the family (T5), with the rows of all their heads.

    Raises an error if the layers have different numbers for one head, as after training.
    """
    layers = {
        f"{name}.position_bias": module.spec.head_ids
        for name, module in model.named_modules()
        if isinstance(module, MultiHeadAttention)
    }
    tables: dict[str, Tensor] = {}
    merged: dict[str, str] = {}
    for mapped in expand_mappings(model.spec, family.mappings):
        if mapped.native_name not in layers or mapped.native_name not in state:
            continue
        merged[mapped.native_name] = mapped.external_name
        own, ids = state[mapped.native_name], list(layers[mapped.native_name])
        empty = own.new_full((model.spec.attention.heads, own.shape[1]), torch.nan)
        table = tables.setdefault(mapped.external_name, empty)
        if not torch.where(table[ids].isnan(), own, table[ids]).equal(own):
            raise UnsupportedModelError(
                f"{mapped.native_name}: differs from the position bias of an earlier layer, but the {family.name} format "
                f"stores one table for all layers. Use model.save(folder)."
            )
        table[ids] = own
    return {name: tables[external_name].nan_to_num() for name, external_name in merged.items()}


def _pad_pruned(name: str, tensor: Tensor, heads: HeadPositions, kv_heads: HeadPositions) -> Tensor:
    name_parts = name.split(".")
    if name_parts[:2] == ["qkv", "kv"]:
        (present, total), axis = heads, 0
    elif name_parts[0] == "qkv" and name_parts[1] in "qkv":
        (present, total), axis = heads if name_parts[1] == "q" else kv_heads, 0
    elif name == "output_projection.weight":
        (present, total), axis = heads, 1
    elif name in ("q_norm.weight", "k_norm.weight") and tensor.ndim == 2:
        (present, total), axis = heads if name.startswith("q") else kv_heads, 0
    else:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = total
    padded = tensor.new_zeros(shape)
    return padded.index_copy(axis, torch.tensor(present, dtype=torch.long, device=tensor.device), tensor)


def _assemble(native_name: str, state: dict[str, Tensor]) -> Tensor:
    """Assemble a parameter from the split layout, such as qkv.qkv_weight from qkv.q.weight, qkv.k.weight and qkv.v.weight."""
    if native_name.endswith(("q_norm.weight", "k_norm.weight")):
        return state[native_name].flatten()
    if ".qkv." not in native_name:
        return state[native_name].flatten(1) if native_name.endswith("output_projection.weight") else state[native_name]
    prefix, fused_name = native_name.rsplit(".", 1)
    projections, _, kind = fused_name.rpartition("_")
    if f"{prefix}.{projections}.{kind}" in state:
        tensor = state[f"{prefix}.{projections}.{kind}"]
        return (
            tensor
            if projections.endswith(("_down", "_norm"))
            else tensor.flatten(0, 1)
            if kind == "weight"
            else tensor.flatten()
        )
    pieces = [state[f"{prefix}.{projection}.{kind}"] for projection in projections]
    return torch.cat([piece.flatten(0, 1) if kind == "weight" else piece.flatten() for piece in pieces])


def to_half_split_rotary(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of q or k from the interleaved to the half-split rotary layout: channels 0, 2, 4 …, then 1, 3, 5 …

    >>> to_half_split_rotary(torch.arange(4), 4)
    tensor([0, 2, 1, 3])
    """
    pairs = rows.unflatten(0, (-1, head_dim // 2, 2))  # (heads, d/2, 2, …)
    return pairs.transpose(1, 2).flatten(0, 2)
