"""Find the attention modules of a transformers model: addresses, sizes and projections.

A module is on transformers' attention interface if its forward requests an attention function there. Names and layouts of
projections come from tables of names. Nothing here depends on a particular architecture.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from torch import Tensor, nn

from headwise.errors import HeadwiseError, UnsupportedModelError
from headwise.spec import LayerAddress

# q, k and v: three modules, or one module with q, k, v in sequence ("fused") or interleaved by head ("per_head").
QKV_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("separate", ("q_proj", "k_proj", "v_proj")),
    ("separate", ("query", "key", "value")),
    ("separate", ("q_lin", "k_lin", "v_lin")),
    ("separate", ("q", "k", "v")),
    ("separate", ("linear_q", "linear_k", "linear_v")),
    ("separate", ("Wq", "Wk", "Wv")),
    ("separate", ("query_proj", "key_proj", "value_proj")),
    ("fused", ("c_attn",)),
    ("fused", ("qkv",)),
    ("fused", ("qkv_proj",)),
    ("fused", ("Wqkv",)),
    ("per_head", ("query_key_value",)),
)
# W_O: inside the attention module, or in its parent.
OUTPUT_NAMES = ("o_proj", "out_proj", "c_proj", "out_lin", "dense", "o", "Wo", "wo", "proj", "projection_layer", "projection",
          "out", "linear_out")  # fmt: skip
PARENT_OUTPUT_NAMES = ("output.dense",)
CROSS_ATTENTION_NAMES = (
    "encoder_attn",
    "EncDecAttention",
    "crossattention",
    "cross_attn",
    "encoder_attention",
    "cross_attention",
)
PRUNED_ATTRIBUTE = "_headwise_pruned"  # attribute of a pruned module that stores its AttentionModuleInfo
WINDOW_MASK_NAMES = ("sliding_window_causal_mask", "bidirectional_sliding_window_mask", "masks_for_generate")
# Attention classes that are not on the interface, but whose softmax and matmuls can be traced. Each was tested.
TRACED_CLASSES = {
    "bloom": "BloomAttention", "bros": "BrosSelfAttention", "codegen": "CodeGenAttention",
    "deberta": "DisentangledSelfAttention", "deberta_v2": "DisentangledSelfAttention", "falcon": "FalconAttention",
    "flaubert": "MultiHeadAttention", "gpt_neo": "GPTNeoSelfAttention", "gpt_neox_japanese": "GPTNeoXJapaneseAttention",
    "gptj": "GPTJAttention", "imagegpt": "ImageGPTAttention", "layoutlmv3": "LayoutLMv3SelfAttention",
    "luke": "LukeSelfAttention", "megatron_bert": "MegatronBertSelfAttention", "mgp_str": "MgpstrAttention",
    "mpnet": "MPNetSelfAttention", "mpt": "MptAttention", "mvp": "MvpAttention",
    "openai": "Attention", "rembert": "RemBertSelfAttention", "roformer": "RoFormerSelfAttention",
    "speecht5": "SpeechT5Attention", "tapas": "TapasSelfAttention",
    "visual_bert": "VisualBertSelfAttention", "xglm": "XGLMAttention",
    "xlm": "MultiHeadAttention",
}  # fmt: skip
AttentionBackend = Literal["sdpa", "eager", "traced"]  # how attention runs and how its heads are accessed
TOWER_ORDER = ("vision", "audio", "query", "text")  # in forward order
# Words in the path of a tower that give its input modality; the first match counts.
TOWER_KEYWORDS = {
    "query": ("qformer", "resampler", "perceiver"), "vision": ("vision", "visual", "image", "vit", "video", "sam_"),
    "audio": ("audio", "speech", "sound"), "text": ("text", "language", "llm", "lm", "decoder"),
}  # fmt: skip
HEAD_COUNT_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head")
HEAD_DIM_NAMES = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")


@dataclass(frozen=True, eq=False)
class AttentionModuleInfo:
    """Description of one attention module of a model.

    Attributes:
        name: Path of the module.
        module: The attention module.
        parent: Module that contains it.
        address: Address of its layer.
        heads: Number of heads before pruning.
        kv_heads: Number of KV heads before pruning.
        head_dim: Size of queries and keys.
        value_dim: Size of values.
        qkv_modules: Layout and names of the q, k, v projections; None if they were not found.
        output_module: The output projection W_O; None if it was not found.
        rotary: Whether queries and keys are rotated by position.
        window: Size of the attention window; None for full attention.
        kept_heads: Remaining heads, by number, if the module was pruned.
        kv_expanded: Whether heads of a KV group have received keys and values of their own.
        layouts: Layouts of q, k and v as found by the probe, if the module was pruned.
        backend: How attention runs.
        tower_path: Path of the submodel that contains the tower, for models with several towers.
        num_outputs: Length of the module's output tuple, in which all entries but the first are None; 0 for a plain tensor.
    """

    name: str
    module: nn.Module
    parent: nn.Module
    address: LayerAddress
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    qkv_modules: tuple[str, tuple[str, ...]] | None
    output_module: nn.Module | None
    rotary: bool = False
    window: int | None = None
    kept_heads: tuple[int, ...] | None = None
    kv_expanded: bool = False
    layouts: tuple[str, ...] = ()
    backend: AttentionBackend = "sdpa"
    tower_path: str = ""
    num_outputs: int = 2

    def qkv_module(self, index: int) -> nn.Module:
        """Return one of the q, k, v projections."""
        assert self.qkv_modules is not None
        return getattr(self.module, self.qkv_modules[1][index])


def find_attention_modules(model: nn.Module, *, allow_towers: bool = True) -> list[AttentionModuleInfo]:
    """Return the attention modules of a model.

    Encoder layers come first. In a block, self-attention comes before cross-attention. Towers are in forward order.
    """
    candidates = [
        (name, module)
        for name, module in model.named_modules()
        if PRUNED_ATTRIBUTE in module.__dict__ or _calls_interface(type(module)) or uses_traced_backend(type(module))
    ]
    stacks = {_stack_path(name) for name, _ in candidates}
    is_encoder_decoder = _is_encoder_decoder(stacks)
    if len(stacks) > 1 and not is_encoder_decoder:
        return _find_tower_attention_modules(model, sorted(stacks), allowed=allow_towers)
    by_address: dict[LayerAddress, AttentionModuleInfo] = {}
    addresses = _assign_addresses(candidates, is_encoder_decoder=is_encoder_decoder)
    for name, module in candidates:
        pruned_info = module.__dict__.get(PRUNED_ATTRIBUTE)
        info = inspect_attention_module(model, name, module, addresses[name]) if pruned_info is None else pruned_info
        info = replace(info, name=name, address=addresses[name], tower_path="", backend=_backend_of(model, module))
        if info.address in by_address:
            raise UnsupportedModelError(
                f"{name} and {by_address[info.address].name} are both attention of layer {info.address}. Blocks with several "
                f"attention modules of the same kind are not supported."
            )
        by_address[info.address] = info
    # In an encoder-decoder, cross-attention follows self-attention in each block; otherwise it comes after all layers.
    sort_keys = {
        info: (info.address.stack != "enc", info.address.stack == "cross", info.address.layer)
        for info in by_address.values()
    }
    return sorted(
        by_address.values(),
        key=lambda info: (
            (sort_keys[info][0], sort_keys[info][2], sort_keys[info][1]) if is_encoder_decoder else sort_keys[info]
        ),
    )


def _find_tower_attention_modules(model: nn.Module, stacks: list[str], *, allowed: bool) -> list[AttentionModuleInfo]:
    """Return the modules of all towers, each tower under its own name."""
    part_paths = {stack: _attachable_part_path(model, stack) for stack in stacks}
    paths = list(dict.fromkeys(path for stack_paths in part_paths.values() for path in stack_paths))
    if not allowed or not all(part_paths.values()):
        suggestions = " or ".join(f"hw.attach(model.{path})" for path in paths)
        hint = f"Attach one of them: {suggestions}." if paths else "None of them can be attached by itself."
        raise UnsupportedModelError(
            f"model: {type(model).__name__} has {len(stacks)} towers ({', '.join(stacks)}), which cannot be attached "
            f"together. {hint}"
        )
    tower_names = {path: _tower_name(model, path) for path in paths}
    paths.sort(key=lambda path: (TOWER_ORDER.index(tower_names[path]), path))
    by_address: dict[LayerAddress, AttentionModuleInfo] = {}
    counts: dict[str, int] = {}
    for path in paths:
        counts[tower_names[path]] = occurrence = counts.get(tower_names[path], 0) + 1
        name = f"{tower_names[path]}{occurrence if occurrence > 1 else ''}"
        for info in find_attention_modules(model.get_submodule(path), allow_towers=False):
            stack = info.address.stack or name
            address = LayerAddress(stack, info.address.layer)
            if address in by_address:
                raise UnsupportedModelError(
                    f"model: {path}.{info.name} and {by_address[address].name} are both attention of a layer with the "
                    f"address {address}, so the whole model cannot be attached. Attach a part of it: hw.attach(model.{path})."
                )
            by_address[address] = replace(info, name=f"{path}.{info.name}", address=address, tower_path=path)
    return list(by_address.values())


def _tower_name(model: nn.Module, path: str) -> str:
    """Return the input modality of a tower, by the words of its path or by its main input."""
    for name, words in TOWER_KEYWORDS.items():
        if any(word in part for part in path.split(".") for word in words):
            return name
    input_name = getattr(model.get_submodule(path), "main_input_name", "")
    return {"pixel_values": "vision", "input_features": "audio", "input_values": "audio"}.get(input_name, "text")


@cache
def _calls_interface(module_class: type[nn.Module]) -> bool:
    try:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(module_class.forward)
    except (OSError, TypeError):
        return False


def uses_traced_backend(module_class: type[nn.Module]) -> bool:
    """Return whether attention of this class is accessed by tracing."""
    package, _, family = module_class.__module__.rpartition(".")[0].rpartition(".")
    return package == "transformers.models" and TRACED_CLASSES.get(family) == module_class.__name__


def _backend_of(model: Any, module: nn.Module) -> AttentionBackend:
    if uses_traced_backend(type(module)):
        return "traced"
    return "eager" if config_of(model, module)._attn_implementation == "eager" else "sdpa"


def config_of(model: Any, module: nn.Module) -> Any:
    """Return the configuration that selects the attention implementation of a module."""
    module_config = getattr(module, "config", None)
    return module_config if hasattr(module_config, "_attn_implementation_internal") else model.config


def check_no_sinks_or_softcap(name: str, info: AttentionModuleInfo) -> None:
    """Raise an error if a module on SDPA has learned sinks or soft-capped scores, which SDPA would ignore."""
    module = info.module
    if info.backend != "sdpa":
        return
    if isinstance(getattr(module, "sinks", None), Tensor):
        raise UnsupportedModelError(
            f"model: {name} has learned attention sinks, which SDPA does not support. Load it with "
            f'attn_implementation="eager".'
        )
    if getattr(module, "attn_logit_softcapping", None) is not None:
        raise UnsupportedModelError(
            f"model: {name} soft-caps its attention scores, which SDPA does not support. Load it with "
            f'attn_implementation="eager".'
        )


def _stack_path(name: str) -> str:
    """Return the part of a module's path before its layer number."""
    return re.split(r"\.\d+(?:\.|$)", f".{name}", maxsplit=1)[0].removeprefix(".")


def _attachable_part_path(model: nn.Module, stack: str) -> list[str]:
    """Return the path of the largest submodel that contains this tower alone and can be attached; empty if none can."""
    from transformers import PreTrainedModel

    names = stack.split(".")
    for end in range(1, len(names) + 1):
        path = ".".join(names[:end])
        part = model.get_submodule(path)
        if isinstance(part, PreTrainedModel) and part._supports_sdpa:
            try:
                infos = find_attention_modules(part, allow_towers=False)
                for info in infos:
                    check_no_sinks_or_softcap(type(part).__name__, info)
                if infos:
                    return [path]
            except HeadwiseError:
                continue
    return []


def _is_encoder_decoder(stacks: set[str]) -> bool:
    sides = sorted("enc" if "encoder" in s.split(".") else "dec" if "decoder" in s.split(".") else s for s in stacks)
    return sides == ["dec", "enc"]


def _assign_addresses(modules: list[tuple[str, nn.Module]], *, is_encoder_decoder: bool) -> dict[str, LayerAddress]:
    """Assign an address to each module, by layer number.

    If layer numbers are not unique, as in `layers.0.blocks.1`, modules are numbered consecutively.
    """
    numbers_by_stack: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, module in modules:
        numbers = tuple(int(digits) for digits in re.findall(r"(?<=\.)\d+(?=\.|$)", f".{name}")) or (0,)
        numbers_by_stack.setdefault(_stack_of_module(name, module, is_encoder_decoder=is_encoder_decoder), {})[name] = (
            numbers
        )
    addresses = {}
    for stack, numbers_by_name in numbers_by_stack.items():
        has_duplicates = len({numbers[0] for numbers in numbers_by_name.values()}) < len(numbers_by_name)
        ordered = sorted(set(numbers_by_name.values()))
        for name, numbers in numbers_by_name.items():
            addresses[name] = LayerAddress(stack, ordered.index(numbers) if has_duplicates else numbers[0])
    return addresses


def _stack_of_module(name: str, module: nn.Module, *, is_encoder_decoder: bool) -> str:
    """Return the stack of a module. A standalone decoder may have cross-attention, too."""
    if any(part in CROSS_ATTENTION_NAMES for part in name.split(".")) or getattr(module, "is_cross_attention", False):
        return "cross"
    return ("enc" if "encoder" in _stack_path(name).split(".") else "dec") if is_encoder_decoder else ""


def inspect_attention_module(
    model: nn.Module, name: str, module: nn.Module, address: LayerAddress
) -> AttentionModuleInfo:
    """Describe an attention module by its attributes and the names of its projections."""
    parent = model.get_submodule(name.rpartition(".")[0])
    heads, head_dim = _read_size(module, HEAD_COUNT_NAMES), _read_size(module, HEAD_DIM_NAMES, required=False)
    group_size = getattr(module, "num_key_value_groups", 1)
    qkv_modules = next(
        (candidate for candidate in QKV_NAMES if all(_is_matrix(getattr(module, part, None)) for part in candidate[1])),
        None,
    )
    if hasattr(module, "q_attn"):
        qkv_modules = None  # cross-attention of GPT-2: c_attn projects only keys and values
    output_module = next(_output_modules(module, parent, heads), None)
    value_dim = head_dim if output_module is None else in_size(output_module) // heads
    kv_heads, head_dim = heads // max(1, group_size), head_dim or value_dim
    if (
        uses_traced_backend(type(module))
        and getattr(module, "multi_query", False)
        and not module.new_decoder_architecture
    ):
        kv_heads = 1
    uses_rotary = has_rotary(model) and address.stack != "cross"
    sizes = (heads, kv_heads, head_dim, value_dim or head_dim)
    return AttentionModuleInfo(
        name, module, parent, address, *sizes, qkv_modules, output_module, uses_rotary, _window(module, address)
    )


def _window(module: nn.Module, address: LayerAddress) -> int | None:
    """Return the window of a module, from the module or else from its configuration."""
    config: Any = getattr(module, "config", None)
    if type(module).__name__ == "GPTNeoSelfAttention":
        return config.window_size if getattr(module, "attention_type", "") == "local" else None
    layer_types = getattr(config, "layer_types", None) or ()
    is_full_attention = len(layer_types) > address.layer and layer_types[address.layer] != "sliding_attention"
    size = None if is_full_attention else getattr(config, "sliding_window", None)
    size = getattr(module, "sliding_window", size)
    if getattr(module, "is_sliding", True) is False:  # EXAONE 4 stores the size in full layers too
        size = None
    is_window = isinstance(size, int) and size > 0 and address.stack != "cross"
    return size if is_window and _uses_standard_windows(type(module)) else None


@cache
def _uses_standard_windows(module_class: type[nn.Module]) -> bool:
    """Return whether a model builds window masks with transformers' functions. Otherwise a window may mean something else."""
    try:
        source = inspect.getsource(sys.modules[module_class.__module__])
    except (OSError, TypeError, KeyError):
        return False
    return any(f"create_{name}" in source for name in WINDOW_MASK_NAMES)


def has_rotary(model: nn.Module) -> bool:
    """Return whether queries and keys are rotated by position."""
    return any("Rotary" in type(part).__name__ for part in model.modules())


def _read_size(module: nn.Module, names: tuple[str, ...], *, required: bool = True) -> int:
    config: Any = getattr(module, "config", None)
    for owner in (module, config):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return value
    if required:
        raise UnsupportedModelError(
            f"{type(module).__name__}: the number of heads was not found. Tried the attributes {', '.join(names)}."
        )
    return 0


def _output_modules(module: nn.Module, parent: nn.Module, heads: int) -> Iterator[nn.Module]:
    return (part for part in _named_output_modules(module, parent) if _is_matrix(part) and in_size(part) % heads == 0)


def output_projection_candidates(info: AttentionModuleInfo) -> list[nn.Module]:
    """Return the modules with a usual name of an output projection."""
    return list(_named_output_modules(info.module, info.parent))


def _named_output_modules(module: nn.Module, parent: nn.Module) -> Iterator[nn.Module]:
    for owner, names in ((module, OUTPUT_NAMES), (parent, PARENT_OUTPUT_NAMES)):
        for name in names:
            submodule: Any = owner
            for part in name.split("."):
                submodule = getattr(submodule, part, None)
            if isinstance(submodule, nn.Module):
                yield submodule


def _is_matrix(module: Any) -> bool:
    if not isinstance(module, nn.Module):
        return False
    weight = getattr(getattr(module, "base_layer", module), "weight", None)
    return (isinstance(weight, Tensor) and weight.ndim == 2) or _packed_shape(module) is not None


def _packed_shape(module: nn.Module) -> tuple[int, int] | None:
    """Return (out, in) of a linear layer whose weight is quantized, as in bitsandbytes, GPTQ and AWQ, or None."""
    base: Any = getattr(module, "base_layer", module)
    weight = getattr(base, "weight", None)
    if isinstance(weight, Tensor) and (weight.is_floating_point() or weight.ndim != 2):
        return None
    out_features, in_features = getattr(base, "out_features", None), getattr(base, "in_features", None)
    has_data = isinstance(weight, Tensor) or isinstance(getattr(base, "qweight", None), Tensor)
    if not has_data or not isinstance(out_features, int) or not isinstance(in_features, int):
        return None
    return out_features, in_features


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a projection stores its weight as (in, out), as transformers' Conv1D does."""
    return type(getattr(module, "base_layer", module)).__name__ == "Conv1D"


def in_size(module: nn.Module) -> int:
    """Return the input size of a projection."""
    return _weight_shape(module)[1]


def out_size(module: nn.Module) -> int:
    """Return the output size of a projection."""
    return _weight_shape(module)[0]


def _weight_shape(module: nn.Module) -> tuple[int, int]:
    packed = _packed_shape(module)
    if packed is not None:
        return packed
    weight: Any = getattr(module, "base_layer", module).weight  # pyright: ignore[reportAttributeAccessIssue]
    rows, columns = weight.shape
    return (int(columns), int(rows)) if is_conv1d(module) else (int(rows), int(columns))
