"""Find the attention modules of a plain torch module, and give each an address.

`nn.MultiheadAttention` is found by its class. Other modules are found by a number of heads, projections of q, k and v, and an
output projection, with the names of `discover.py` (timm, nanoGPT and others).
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from headwise.attached.discover import (
    CROSS_ATTENTION_NAMES,
    HEAD_COUNT_NAMES,
    PRUNED_ATTRIBUTE,
    TOWER_KEYWORDS,
    AttentionModuleInfo,
    inspect_attention_module,
)
from headwise.attached.infer_spec import DEFAULT_CONTEXT, kept_heads_by_layer
from headwise.attached.layer import AttachedLayer
from headwise.attached.pruned_mha import PrunedMultiheadAttention
from headwise.errors import HeadwiseError, UnsupportedModelError
from headwise.spec import AttentionSpec, LayerAddress, ModelSpec

MAX_STACKS = 9  # of the same kind: addresses end in one digit, `enc9.0.1`
TorchMHA = nn.MultiheadAttention | PrunedMultiheadAttention


def find_module_attention(model: nn.Module) -> list[AttentionModuleInfo]:
    """Return the attention modules of a torch module, in the order of its submodules."""
    names = [name for name, module in model.named_modules() if _is_attention(module)]
    if not names:
        raise UnsupportedModelError(
            f"model: no attention was found. Got {type(model).__name__}. hw.attach finds transformers models, "
            f"nn.MultiheadAttention, and modules with a number of heads (num_heads), projections of q, k and v (qkv, or q, k "
            f"and v) and an output projection (proj, out_proj)."
        )
    addresses = _assign_addresses(model, names)
    return [_inspect(model, name, addresses[name]) for name in names]


def _is_attention(module: nn.Module) -> bool:
    if isinstance(module, TorchMHA) or PRUNED_ATTRIBUTE in module.__dict__:
        return True
    if not any(type(getattr(module, name, None)) is int for name in HEAD_COUNT_NAMES):
        return False
    try:
        info = inspect_attention_module(nn.ModuleDict({"part": module}), "part", module, LayerAddress("", 0))
    except (HeadwiseError, RuntimeError):
        return False
    return info.qkv_modules is not None and info.output_module is not None


def _inspect(model: nn.Module, name: str, address: LayerAddress) -> AttentionModuleInfo:
    module: Any = model.get_submodule(name)
    if PRUNED_ATTRIBUTE in module.__dict__:
        return replace(module.__dict__[PRUNED_ATTRIBUTE], name=name, address=address)
    if not isinstance(module, TorchMHA):
        return replace(inspect_attention_module(model, name, module, address), backend="traced")
    parent = model.get_submodule(name.rpartition(".")[0])
    is_pruned = isinstance(module, PrunedMultiheadAttention)
    heads, kept_heads = (module.original_heads, module.kept_heads) if is_pruned else (module.num_heads, None)
    return AttentionModuleInfo(
        name or type(module).__name__, module, parent, address, heads, heads, module.head_dim, module.head_dim, None,
        module.out_proj, kept_heads=kept_heads,
    )  # fmt: skip


def _assign_addresses(model: nn.Module, names: Sequence[str]) -> dict[str, LayerAddress]:
    """Give each module a stack and a layer. Modules whose paths differ only in their numbers belong to one stack."""
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in names:
        numbers = tuple(int(part) for part in name.split(".") if part.isdigit()) or (0,)
        key = ".".join(part for part in name.split(".") if not part.isdigit())
        groups.setdefault(key, {})[name] = numbers
    is_cross = {key: _is_cross_attention(model, next(iter(group))) for key, group in groups.items()}
    stacks = _name_stacks([key for key in groups if not is_cross[key]], [key for key in groups if is_cross[key]])
    addresses = {}
    for key, group in groups.items():
        first_numbers = [numbers[0] for numbers in group.values()]
        ordered = sorted(group.values())
        for name, numbers in group.items():
            layer = numbers[0] if len(set(first_numbers)) == len(group) else ordered.index(numbers)
            addresses[name] = LayerAddress(stacks[key], layer)
    return addresses


def _is_cross_attention(model: nn.Module, name: str) -> bool:
    """Return whether the names of a module say that it attends to another sequence."""
    parts = name.split(".")
    for index in range(len(parts) - 1, -1, -1):
        part = parts[index]
        if "self" in part:
            return False
        if part in CROSS_ATTENTION_NAMES or "cross" in part:
            return True
        if part == "multihead_attn" and hasattr(model.get_submodule(".".join(parts[:index])), "self_attn"):
            return True  # as in nn.TransformerDecoderLayer
    return False


def _name_stacks(self_keys: list[str], cross_keys: list[str]) -> dict[str, str]:
    """Return the name of each stack: none for a single one, `enc` and `dec` by their paths, or the input of a tower."""
    kinds = {self_keys[0]: ""} if len(self_keys) == 1 else {key: _stack_kind(key) for key in self_keys}
    kinds |= dict.fromkeys(cross_keys, "cross")
    names: dict[str, str] = {}
    for key, kind in kinds.items():
        number = 1 + sum(other == kind for other in list(kinds.values())[: list(kinds).index(key)])
        if number > MAX_STACKS:
            raise UnsupportedModelError(
                f"model: more than {MAX_STACKS} groups of attention modules of the same kind ({', '.join(kinds)}). Attach a "
                f"part of the model: hw.attach(model.{key.partition('.')[0]})."
            )
        names[key] = kind + (str(number) if number > 1 else "")
    return names


def _stack_kind(key: str) -> str:
    parts = key.lower().split(".")
    if any("decoder" in part for part in parts):
        return "dec"
    if any("encoder" in part for part in parts):
        return "enc"
    pattern = {name: rf"(^|_)({'|'.join(words)})" for name, words in TOWER_KEYWORDS.items()}
    return next((name for name in pattern if any(re.search(pattern[name], part) for part in parts)), "enc")


def infer_module_spec(layers: Sequence[AttachedLayer]) -> ModelSpec:
    """Infer the sizes of a torch module. If layers differ in their number of heads, missing heads count as pruned."""
    stacks = dict.fromkeys(layer.hook_point.address.stack for layer in layers)
    is_pair = set(stacks) in ({"enc", "dec", "cross"}, {"enc", "dec"})
    is_standard = is_pair or set(stacks) == {""}
    counts = {
        stack: 1 + max(layer.hook_point.address.layer for layer in layers if layer.hook_point.address.stack == stack)
        for stack in stacks
    }
    largest = max((layer.spec for layer in layers), key=lambda spec: spec.heads)
    kind = "encoder-decoder" if is_pair else "encoder"
    return ModelSpec(
        vocab=1, context=DEFAULT_CONTEXT, layers=counts.get("", counts.get("dec", max(counts.values()))),
        encoder_layers=counts.get("enc", 0) if is_pair else 0,
        attention=AttentionSpec(
            width=largest.width, heads=largest.heads, head_dim=largest.head_dim, value_dim=largest.value_dim,
            kv_heads=largest.kv_heads,
        ),
        kind=kind, positions="none", output="none", kept_heads=kept_heads_by_layer(layers, kind, counts),
        stacks=() if is_standard else tuple(counts.items()),
    )  # fmt: skip
