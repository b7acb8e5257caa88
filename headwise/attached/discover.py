"""Where attention is in somebody else's model: its modules, their addresses, sizes and projections.

A module is on the interface when its forward asks for an attention function there. What its projections are called, and how
they are laid out, is a table of names: nothing here knows an architecture.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.spec import SiteAddress

# What reads: three modules, or one that holds them all, one after the other ("joined") or head by head ("by head").
READS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("apart", ("q_proj", "k_proj", "v_proj")),
    ("apart", ("query", "key", "value")),
    ("apart", ("q_lin", "k_lin", "v_lin")),
    ("apart", ("q", "k", "v")),
    ("apart", ("linear_q", "linear_k", "linear_v")),
    ("apart", ("Wq", "Wk", "Wv")),
    ("apart", ("query_proj", "key_proj", "value_proj")),
    ("joined", ("c_attn",)),
    ("joined", ("qkv",)),
    ("joined", ("qkv_proj",)),
    ("joined", ("Wqkv",)),
    ("by head", ("query_key_value",)),
)
# What writes: inside the module, or beside it, as seen from the parent.
WRITES = ("o_proj", "out_proj", "c_proj", "out_lin", "dense", "o", "Wo", "wo", "proj", "projection_layer", "projection",
          "out", "linear_out")  # fmt: skip
BESIDE = ("output.dense",)
CROSS = ("encoder_attn", "EncDecAttention", "crossattention", "cross_attn", "encoder_attention", "cross_attention")
CUT = "_headwise_cut"  # where a module keeps what it was found to be when heads were cut from it
WINDOWS = ("sliding_window_causal_mask", "bidirectional_sliding_window_mask", "masks_for_generate")
# Classes of attention that are not on the interface, but whose softmax and products can be watched; each was walked over.
WATCHED = {
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
Way = Literal["sdpa", "eager", "watched"]  # how a module's attention runs, and is reached
TOWERS = ("vision", "audio", "query", "text")  # in the order data walks through them
# Words in a tower's path that say what it reads; the first that fits counts.
SAYS = {
    "query": ("qformer", "resampler", "perceiver"), "vision": ("vision", "visual", "image", "vit", "video", "sam_"),
    "audio": ("audio", "speech", "sound"), "text": ("text", "language", "llm", "lm", "decoder"),
}  # fmt: skip
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
HEAD_DIMS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")


@dataclass(frozen=True, eq=False)
class FoundAttention:
    """One attention module as it stands in a model."""

    name: str  # its path
    module: nn.Module
    parent: nn.Module
    address: SiteAddress
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    reads: tuple[str, tuple[str, ...]] | None  # how they are laid out, and their names; None: not known here
    writes: nn.Module | None
    rotary: bool = False  # whether positions turn its queries and keys
    window: int | None = None  # a query sees keys fewer than so many positions away
    kept: tuple[int, ...] | None = None  # the heads that are there, by number, if some were cut
    apart: bool = False  # whether heads that shared keys have been given keys of their own
    layouts: tuple[str, ...] = ()  # of q, k and v, once found out, where heads were cut
    way: Way = "sdpa"
    part: str = ""  # the path of the model that holds its tower, where there are several
    gives: int = 2  # how many things the module gives, None but for the first; 0: what it writes, as it is

    def reader(self, number: int) -> nn.Module:
        """One of the modules that read."""
        assert self.reads is not None
        return getattr(self.module, self.reads[1][number])


def find(model: nn.Module, towers: bool = True) -> list[FoundAttention]:
    """The attention modules of a model that are on the interface, encoder first, a block's own before its cross-attention; of
    several towers those that are read first."""
    there = [
        (name, module)
        for name, module in model.named_modules()
        if CUT in module.__dict__ or _calls_interface(type(module)) or is_watched(type(module))
    ]
    stacks = {_stack(name) for name, _ in there}
    two = _two_stacks(stacks)
    if len(stacks) > 1 and not two:
        return _find_towers(model, sorted(stacks), towers)
    found: dict[SiteAddress, FoundAttention] = {}
    addresses = _addresses(there, two)
    for name, module in there:
        cut = module.__dict__.get(CUT)
        one = _found(model, name, module, addresses[name]) if cut is None else cut
        one = replace(one, name=name, address=addresses[name], part="", way=_way(model, module))
        if one.address in found:
            raise HeadwiseError(
                f"{name} and {found[one.address].name} both are attention of layer {one.address}; "
                f"a block with several attentions has no addresses here."
            )
        found[one.address] = one
    # A block looks across behind its own attention; heads of a decoder by itself that do so are told behind all others.
    keys = {
        one: (one.address.stack != "enc", one.address.stack == "cross", one.address.layer) for one in found.values()
    }
    return sorted(found.values(), key=lambda one: (keys[one][0], keys[one][2], keys[one][1]) if two else keys[one])


def _find_towers(model: nn.Module, stacks: list[str], allowed: bool) -> list[FoundAttention]:
    """All towers of a model as one: each as it is found in the part that holds it alone, under a name of its own."""
    parts = {stack: _part_of(model, stack) for stack in stacks}
    paths = list(dict.fromkeys(path for there in parts.values() for path in there))
    if not allowed or not all(parts.values()):
        each = " or ".join(f"hw.attach(model.{path})" for path in paths)
        instead = f"attach one of them: {each}." if paths else "none of them can be attached by itself."
        raise HeadwiseError(f"{type(model).__name__} has {len(stacks)} towers ({', '.join(stacks)}); {instead}")
    told = {path: _tower(model, path) for path in paths}
    paths.sort(key=lambda path: (TOWERS.index(told[path]), path))
    made: dict[SiteAddress, FoundAttention] = {}
    met: dict[str, int] = {}
    for path in paths:
        met[told[path]] = often = met.get(told[path], 0) + 1
        name = f"{told[path]}{often if often > 1 else ''}"
        for one in find(model.get_submodule(path), towers=False):
            stack = one.address.stack or name
            address = SiteAddress(stack, one.address.layer)
            if address in made:
                raise HeadwiseError(
                    f"{path}.{one.name} and {made[address].name} both are attention of layer {address}."
                )
            made[address] = replace(one, name=f"{path}.{one.name}", address=address, part=path)
    return list(made.values())


def _tower(model: nn.Module, path: str) -> str:
    """What a tower reads: by the words of its path, or by what it is called with."""
    for name, words in SAYS.items():
        if any(word in part for part in path.split(".") for word in words):
            return name
    reads = getattr(model.get_submodule(path), "main_input_name", "")
    return {"pixel_values": "vision", "input_features": "audio", "input_values": "audio"}.get(reads, "text")


@cache
def _calls_interface(kind: type[nn.Module]) -> bool:
    try:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False


def is_watched(kind: type[nn.Module]) -> bool:
    """Whether attention of this class is reached by watching it."""
    house, _, family = kind.__module__.rpartition(".")[0].rpartition(".")
    return house == "transformers.models" and WATCHED.get(family) == kind.__name__


def _way(model: Any, module: nn.Module) -> Way:
    if is_watched(type(module)):
        return "watched"
    return "eager" if config_of(model, module)._attn_implementation == "eager" else "sdpa"


def config_of(model: Any, module: nn.Module) -> Any:
    """The configuration that says which attention a module runs."""
    own = getattr(module, "config", None)
    return own if hasattr(own, "_attn_implementation_internal") else model.config


def check_sums(name: str, found: FoundAttention) -> None:
    """Refuse what a module adds to its scores that SDPA, where it runs on that, knows nothing of."""
    module = found.module
    if found.way != "sdpa":
        return
    if isinstance(getattr(module, "sinks", None), Tensor):
        raise HeadwiseError(
            f"{name} has learned sinks, which plain scaled-dot-product attention would drop; it was refused."
        )
    if getattr(module, "attn_logit_softcapping", None) is not None:
        raise HeadwiseError(f"{name} caps its scores, which plain scaled-dot-product attention cannot; it was refused.")


def _stack(name: str) -> str:
    """What a module's path says before the number of its layer."""
    return re.split(r"\.\d+(?:\.|$)", f".{name}", maxsplit=1)[0].removeprefix(".")


def _part_of(model: nn.Module, stack: str) -> list[str]:
    """The largest part of a model that holds one tower and can be attached, by its path; none where there is none."""
    from transformers import PreTrainedModel

    names = stack.split(".")
    for end in range(1, len(names) + 1):
        path = ".".join(names[:end])
        part = model.get_submodule(path)
        if isinstance(part, PreTrainedModel) and part._supports_sdpa:
            try:
                there = find(part, towers=False)
                for one in there:
                    check_sums(type(part).__name__, one)
                if there:
                    return [path]
            except HeadwiseError:
                continue
    return []


def _two_stacks(stacks: set[str]) -> bool:
    sides = sorted("enc" if "encoder" in s.split(".") else "dec" if "decoder" in s.split(".") else s for s in stacks)
    return sides == ["dec", "enc"]


def _addresses(there: list[tuple[str, nn.Module]], two: bool) -> dict[str, SiteAddress]:
    """The address of each module: by the number of its layer; where layers hold blocks, or a block several attentions that
    are numbered (`layers.0.blocks.1`), all are counted through."""
    places: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, module in there:
        numbers = tuple(int(number) for number in re.findall(r"(?<=\.)\d+(?=\.|$)", f".{name}")) or (0,)
        places.setdefault(_kind(name, module, two), {})[name] = numbers
    made = {}
    for stack, found in places.items():
        twice = len({numbers[0] for numbers in found.values()}) < len(found)
        order = sorted(set(found.values()))
        for name, numbers in found.items():
            made[name] = SiteAddress(stack, order.index(numbers) if twice else numbers[0])
    return made


def _kind(name: str, module: nn.Module, two: bool) -> str:
    """The stack of a module; a decoder by itself may look across at what it is given from outside."""
    if any(part in CROSS for part in name.split(".")) or getattr(module, "is_cross_attention", False):
        return "cross"
    return ("enc" if "encoder" in _stack(name).split(".") else "dec") if two else ""


def _found(model: nn.Module, name: str, module: nn.Module, address: SiteAddress) -> FoundAttention:
    parent = model.get_submodule(name.rpartition(".")[0])
    heads, head_dim = _size(module, HEADS), _size(module, HEAD_DIMS, needed=False)
    groups = getattr(module, "num_key_value_groups", 1)
    reads = next((row for row in READS if all(_is_matrix(getattr(module, part, None)) for part in row[1])), None)
    if hasattr(module, "q_attn"):
        reads = None  # cross-attention of GPT-2: c_attn makes keys and values only
    writes = next(_writes(module, parent, heads), None)
    value_dim = head_dim if writes is None else in_size(writes) // heads
    keys, head_dim = heads // max(1, groups), head_dim or value_dim
    if is_watched(type(module)) and getattr(module, "multi_query", False) and not module.new_decoder_architecture:
        keys = 1
    turned = has_rotary(model) and address.stack != "cross"
    sizes = (heads, keys, head_dim, value_dim or head_dim)
    return FoundAttention(name, module, parent, address, *sizes, reads, writes, turned, _window(module, address))


def _window(module: nn.Module, address: SiteAddress) -> int | None:
    """How far a module sees: as it says, or where it does not, as its configuration does, for all layers or for this one."""
    config: Any = getattr(module, "config", None)
    if type(module).__name__ == "GPTNeoSelfAttention":
        return config.window_size if getattr(module, "attention_type", "") == "local" else None
    kinds = getattr(config, "layer_types", None) or ()
    far = len(kinds) > address.layer and kinds[address.layer] != "sliding_attention"
    size = None if far else getattr(config, "sliding_window", None)
    size = getattr(module, "sliding_window", size)
    known = isinstance(size, int) and size > 0 and address.stack != "cross"
    return size if known and _makes_windows(type(module)) else None


@cache
def _makes_windows(kind: type[nn.Module]) -> bool:
    """Whether a model's masks of a window are transformers' own: elsewhere the same word may mean chunks, or one side."""
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (OSError, TypeError, KeyError):
        return False
    return any(f"create_{name}" in source for name in WINDOWS)


def has_rotary(model: nn.Module) -> bool:
    """Whether positions turn queries and keys."""
    return any("Rotary" in type(part).__name__ for part in model.modules())


def _size(module: nn.Module, names: tuple[str, ...], needed: bool = True) -> int:
    config: Any = getattr(module, "config", None)
    for place in (module, config):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int):
                return value
    if needed:
        raise HeadwiseError(
            f"{type(module).__name__} does not say how many heads it has; looked for {', '.join(names)}."
        )
    return 0


def _writes(module: nn.Module, parent: nn.Module, heads: int) -> Iterator[nn.Module]:
    return (part for part in _named(module, parent) if _is_matrix(part) and in_size(part) % heads == 0)


def named_writers(found: FoundAttention) -> list[nn.Module]:
    """Modules that are called as one that writes is, whatever they hold."""
    return list(_named(found.module, found.parent))


def _named(module: nn.Module, parent: nn.Module) -> Iterator[nn.Module]:
    for place, names in ((module, WRITES), (parent, BESIDE)):
        for name in names:
            there: Any = place
            for part in name.split("."):
                there = getattr(there, part, None)
            if isinstance(there, nn.Module):
                yield there


def _is_matrix(module: Any) -> bool:
    weight = getattr(getattr(module, "base_layer", module), "weight", None)
    return isinstance(module, nn.Module) and isinstance(weight, Tensor) and weight.ndim == 2


def is_turned(module: nn.Module) -> bool:
    """Whether a projection keeps its weight as (in, out), as transformers' Conv1D does."""
    return type(getattr(module, "base_layer", module)).__name__ == "Conv1D"


def in_size(module: nn.Module) -> int:
    """How many numbers a projection takes."""
    return _sizes(module)[1]


def out_size(module: nn.Module) -> int:
    """How many numbers a projection gives."""
    return _sizes(module)[0]


def _sizes(module: nn.Module) -> tuple[int, int]:
    weight: Any = getattr(module, "base_layer", module).weight  # pyright: ignore[reportAttributeAccessIssue]
    rows, columns = weight.shape
    return (int(columns), int(rows)) if is_turned(module) else (int(rows), int(columns))
