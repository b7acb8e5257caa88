"""A folder that transformers loads: the family's configuration and names, our weights.

A pruned model goes out in its full shape, with zeros where heads were cut: the numbers are the same, the size is not.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from headwise.errors import HeadwiseError, close_names
from headwise.io.aligned_safetensors import write_tensors
from headwise.io.atomic_write import EXPORTED, whole_folder
from headwise.model import AnyModel, Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.weights.families import FAMILIES, Family
from headwise.weights.keymap import lines_for


def export(model: AnyModel, folder: str | Path, family: str | None = None) -> Path:
    """Write a model for transformers, as the family it came from, the one named, or the first that can hold it."""
    return model.export(folder, family)


def export_own(model: Transformer, folder: str | Path, family: str | None = None) -> Path:
    """The same for a model of ours."""
    if model.spec.weights:
        raise HeadwiseError(
            "other tools do not know weights packed by head; export the numbers: hw.export(hw.dequantise(model), …)."
        )
    whole = replace(model.spec, kept=())
    chosen, config = _family(whole, family or model.family)
    state = whole_state(model)
    tensors = {}
    for found in lines_for(whole, chosen.lines):
        tensor = _assembled(found.ours, state)
        if found.line.rotated and whole.attention.rotary is not None and whole.attention.rotary.layout == "interleaved":
            tensor = to_half_order(tensor, whole.attention.head_dim)
        name = found.theirs[1:] if found.theirs.startswith("/") else chosen.export_prefix(whole) + found.theirs
        tensors[name] = found.line.turn(tensor)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    special = {} if model.tokenizer is None else model.tokenizer.special
    config |= {"dtype": dtype} | {
        f"{role}_token_id": special[role] for role in ("bos", "eos", "pad") if special.get(role) is not None
    }
    with whole_folder(folder, (EXPORTED,)) as new:
        (new / EXPORTED).write_text(json.dumps({"to": "transformers", "family": chosen.name}), encoding="utf-8")
        (new / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        write_tensors(tensors, new / "model.safetensors", {"format": "pt"})
        if model.tokenizer is not None:
            model.tokenizer.save(new)
    return Path(folder)


def _family(spec: ModelSpec, name: str | None) -> tuple[Family, dict]:
    """The family and its configuration; an error tells why none will do."""
    if spec.cache:
        raise HeadwiseError(
            "no family can say that heads keep caches of their own, and without them the model says other things; use "
            "model.save(folder)."
        )
    if name is not None:
        for family in FAMILIES:
            if name in (family.name, *family.model_types):
                return family, family.config(spec)
        raise HeadwiseError(f"there is no family {name!r}; {close_names(name, [f.name for f in FAMILIES])}")
    reasons = []
    for family in FAMILIES:
        try:
            return family, family.config(spec)
        except HeadwiseError as error:
            reasons.append(str(error).split(";")[0])
    raise HeadwiseError(f"no family can hold this model: {'; '.join(reasons)}. Use model.save(folder).")


def whole_state(model: Transformer) -> dict[str, Tensor]:
    """The model's weights in full shape, in the canonical split layout: zeros where heads were cut."""
    state = dict(model.state_dict())
    for layer in model.attention_layers():
        if layer.spec.kept is None:
            continue
        prefix = next(name for name, module in model.named_modules() if module is layer)
        for key in [key for key in state if key.startswith(f"{prefix}.")]:
            state[key] = _with_zeros(key.removeprefix(f"{prefix}."), state[key], layer.spec)
    return state


def _with_zeros(name: str, tensor: Tensor, spec: AttentionSpec) -> Tensor:
    part = name.split(".")
    if part[0] == "read":
        present, total, axis = (spec.head_ids, spec.heads, 0) if part[1] == "q" else (spec.kv_ids, spec.kv_heads, 0)
    elif name == "write.weight":
        present, total, axis = spec.head_ids, spec.heads, 1
    else:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = total
    whole = tensor.new_zeros(shape)
    return whole.index_copy(axis, torch.tensor(present, dtype=torch.long, device=tensor.device), tensor)


def _assembled(ours: str, state: dict[str, Tensor]) -> Tensor:
    """One of our parameters from the split layout: read.qkv_weight is read.q.weight, read.k.weight and read.v.weight."""
    if ".read." not in ours:
        return state[ours].flatten(1) if ours.endswith("write.weight") else state[ours]
    prefix, slab = ours.rsplit(".", 1)
    letters, kind = slab.split("_")
    pieces = [state[f"{prefix}.{letter}.{kind}"] for letter in letters]
    return torch.cat([piece.flatten(0, 1) if kind == "weight" else piece.flatten() for piece in pieces])


def to_half_order(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of q or k from the interleaved rotary order to the half-split one: channels 0, 2, 4 …, then 1, 3, 5 …

    >>> to_half_order(torch.arange(4), 4)
    tensor([0, 2, 1, 3])
    """
    pairs = rows.unflatten(0, (-1, head_dim // 2, 2))  # (heads, d/2, 2, …)
    return pairs.transpose(1, 2).flatten(0, 2)
