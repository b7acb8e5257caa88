"""What counts heads in an attention module: numbers it keeps, rows of its projections, fields of its configuration.

A table of names, no architecture: a number is told anew where it has such a name and holds such a count. Whether that is all
a module goes by is not taken for granted: a cut is tried, and undone where the model without heads is not the model with
them silenced (`prove.py`).
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from headwise.attached.discover import is_turned, out_size
from headwise.attached.layer import Layer
from headwise.attached.pruned_head_hooks import TABLE, shares_bias
from headwise.errors import HeadwiseError

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "num_q_heads", "heads", "attention_heads",
         "num_local_heads")  # fmt: skip
KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "num_local_key_value_heads")
CHANNELS = ("all_head_size", "inner_dim", "embed_dim", "split_size", "dim", "hidden_size", "attention_dim", "q_dim", "q_size",
            "num_heads_dim", "attention_hidden_size", "d_attn")  # fmt: skip
KEY_CHANNELS = ("kv_dim", "kv_size", "kv_hidden_size")
GROUPS = ("num_key_value_groups", "n_rep", "num_queries_per_kv")
# Parts that have rows for every head, besides those that read: gates, and what makes q, k and v of something smaller.
PARTS = (
    *("q_proj", "q_gate_proj", "q_b_proj", "kv_b_proj", "k_b_proj", "v_b_proj", "q_up_proj", "kv_up_proj", "gate_proj"),
    *("g_proj", "gate", "attn_gate", "gate_layer", "g_b_proj", "o_gate", "output_gate", "to_gate_logits", "linear_pos"),
    *("relative_k_proj", "r_proj", "pos_key_proj", "pos_query_proj"),
)
NUMBERS = ("bias_u", "bias_v", "pos_bias_u", "pos_bias_v", "gate_bias", "sinks")  # parameters with a row for every head
NORMS = {"q_norm": False, "k_norm": True, "q_layernorm": False, "k_layernorm": True, "v_norm": True}  # of keys?


@dataclass(frozen=True)
class Slice:
    """What stays of one tensor: some places on one axis."""

    holder: nn.Module
    name: str
    axis: int
    places: list[int]


@dataclass(frozen=True)
class Stand:
    """Where numbers of all heads meet: some of so many heads go on from there."""

    at: nn.Module
    chosen: list[int]
    count: int


def stands(layer: Layer, heads: list[int], keys: list[int]) -> list[Stand]:
    """Where a layer's module goes on to see heads that are cut: norms over all of them, a bias shared with other layers."""
    module, H, K = layer.found.module, len(layer.spec.head_ids), len(layer.spec.kv_ids)
    made = [Stand(norm, keys if of_keys else heads, K if of_keys else H) for norm, of_keys in _norms_of_all(layer)]
    return [*made, Stand(module, heads, H)] if shares_bias(module) else made


def _norms_of_all(layer: Layer) -> Iterator[tuple[nn.Module, bool]]:
    """Norms over what a projection gives for all heads, and whether these are key heads."""
    for number, name in enumerate(("q_norm", "k_norm")):
        norm = getattr(layer.found.module, name, None)
        weight = getattr(norm, "weight", None)
        if layer.found.reads is None or len(layer.found.reads[1]) != 3 or norm is None or weight is None:
            continue
        if weight.ndim == 1 and len(weight) == out_size(layer.found.reader(number)) != layer.spec.head_dim:
            yield norm, number == 1


def slices(layer: Layer, heads: list[int], keys: list[int]) -> list[Slice]:
    """What stays of a layer's tensors where these of its heads and of its key/value heads do, each by its place."""
    found, H, K = layer.found, len(layer.spec.head_ids), len(layer.spec.kv_ids)
    whole = "".join("k" if of_keys else "q" for _, of_keys in _norms_of_all(layer))
    if found.writes is None:
        raise HeadwiseError(f"which part of {found.name} writes is not known, so its heads cannot be cut.")
    kept = _columns(found.writes, _blocks(_width(found.writes, 1), H, heads))
    counts = {"q": (H, heads), "k": (K, keys), "v": (K, keys)}
    names = () if found.reads is None else found.reads[1]
    if len(names) == 3:
        for letter, name in zip("qkv", names, strict=True):
            if letter in whole:
                continue
            part = getattr(found.module, name)
            kept += _rows(part, _of_letter(layer, letter, out_size(part), *counts[letter]))
    elif names:
        kept += _rows(found.reader(0), _joined(layer, counts))
    for name in PARTS:
        part = getattr(found.module, name, None)
        if isinstance(part, nn.Linear) and name not in names and part is not found.writes:
            kept += _rows(part, _blocks(out_size(part), H, heads)) if out_size(part) % H == 0 else []
    for name, of_keys in NORMS.items():
        count, chosen = (K, keys) if of_keys else (H, heads)
        norm = getattr(found.module, name, None)
        for what in ("weight", "bias"):
            weight = getattr(norm, what, None)
            if isinstance(weight, Tensor) and weight.ndim == 2 and len(weight) == count:
                kept.append(Slice(getattr(found.module, name), what, 0, chosen))
    for name in NUMBERS:
        if isinstance(weight := getattr(found.module, name, None), nn.Parameter) and len(weight) == H:
            kept.append(Slice(found.module, name, 0, heads))
    table = getattr(found.module, TABLE, None)
    if isinstance(table, nn.Embedding) and table.embedding_dim == H and not shares_bias(found.module):
        kept.append(Slice(table, "weight", 1, heads))
    return kept


def _of_letter(layer: Layer, letter: str, rows: int, count: int, chosen: list[int]) -> list[int]:
    """Rows of one letter in a projection of its own."""
    own = count * (layer.spec.value_dim if letter == "v" else layer.spec.head_dim)
    if layer.layouts[letter] != "first" or rows == own:
        return _blocks(rows, count, chosen)
    more = range(own, rows) if (rows - own) % count else [own + row for row in _blocks(rows - own, count, chosen)]
    return [*_blocks(own, count, chosen), *more]


def _joined(layer: Layer, counts: dict[str, tuple[int, list[int]]]) -> list[int]:
    """Rows in one projection of all three letters."""
    layouts, (H, heads) = set(layer.layouts.values()), counts["q"]
    rows = out_size(layer.found.reader(0))
    if layouts == {"by head"}:
        return _blocks(rows, H, heads)
    sizes = {letter: layer.spec.value_dim if letter == "v" else layer.spec.head_dim for letter in "qkv"}
    kept, start = [], 0
    for letter, (count, chosen) in counts.items():
        kept += [start + row for row in _blocks(count * sizes[letter], count, chosen)]
        start += count * sizes[letter]
    if layouts != {"joined"} or start != rows:
        raise HeadwiseError(
            f"how rows of {layer.found.name} are shared out among heads is not known, so none can be cut."
        )
    return kept


def _blocks(size: int, count: int, chosen: list[int]) -> list[int]:
    """The places of some of equal blocks."""
    each, rest = divmod(size, count)
    if rest:
        raise HeadwiseError(f"{size} rows cannot be shared out among {count} heads, so none can be cut.")
    return [block * each + place for block in chosen for place in range(each)]


def _rows(part: nn.Module, places: list[int]) -> list[Slice]:
    made = [Slice(part, "weight", 1 if is_turned(part) else 0, places)]
    return made + ([Slice(part, "bias", 0, places)] if getattr(part, "bias", None) is not None else [])


def _columns(part: nn.Module, places: list[int]) -> list[Slice]:
    return [Slice(part, "weight", 0 if is_turned(part) else 1, places)]


def _width(part: nn.Module, axis: int) -> int:
    weight: Any = part.weight
    return weight.shape[1 - axis if is_turned(part) else axis]


def tell(layer: Layer, before: tuple[int, int]) -> None:
    """Tell a module how many heads, and how many key/value heads, it has now instead of before."""
    module, spec = layer.module, layer.spec
    now = len(spec.head_ids), len(spec.kv_ids)
    for names, place, each in (
        (HEADS, 0, 1),
        (KEYS, 1, 1),
        (CHANNELS, 0, spec.value_dim),
        (KEY_CHANNELS, 1, spec.value_dim),
    ):
        for name in names:
            if type(module.__dict__.get(name)) is int and module.__dict__[name] == before[place] * each:
                setattr(module, name, now[place] * each)
    for name in GROUPS:
        if name in module.__dict__:
            setattr(module, name, 1 if layer.uneven else now[0] // now[1])
    told = {
        name: now[place] for names, place in ((HEADS, 0), (KEYS, 1)) for name in names if name in _asks(type(module))
    }
    if told:
        config: Any = module.config
        module.config = Fewer(config.of if isinstance(config, Fewer) else config, told)  # pyright: ignore


@cache
def _asks(kind: type[nn.Module]) -> frozenset[str]:
    """The counts that a module asks its configuration for when it is called."""
    try:
        source = inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return frozenset()
    return frozenset(name for name in (*HEADS, *KEYS) if f"self.config.{name}" in source)


class Fewer:
    """A configuration as one layer sees it: the model's own, live, but for how many heads there are."""

    def __init__(self, of: Any, counts: dict[str, int]) -> None:
        self.__dict__.update(counts, of=of)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "of":
            raise AttributeError(name)
        return getattr(self.of, name)
