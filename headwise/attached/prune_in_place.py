"""Cutting heads out of somebody else's model, in place: projections become smaller, and modules are told so.

Keys and values nobody reads any more go too. Where that leaves groups of different sizes, which transformers cannot share
out, our function does it while the model is attached. A layer without heads is replaced by one that writes its bias.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.discover import CUT, FoundAttention, is_turned, out_size
from headwise.attached.head_count_fields import Slice, slices, stands, tell
from headwise.attached.layer import Layer
from headwise.attached.pruned_head_hooks import BIAS, TABLE, shares_bias, stand_at, stand_behind
from headwise.errors import HeadwiseError
from headwise.spec import Address, AttentionSpec, SiteAddress


@torch.no_grad()
def cut_layers(layers: list[Layer], gone: Iterable[Address]) -> list[Layer]:
    """Take heads out of these layers; gives the layers there are now."""
    by_site = _by_site(gone)
    numbers = [by_site.get(layer.site.address) for layer in layers]
    return [
        _cut_layer(layer, layer.without(some)) if some else layer for layer, some in zip(layers, numbers, strict=True)
    ]


@torch.no_grad()
def fold_in(layers: Iterable[Layer], folded: Mapping[SiteAddress, Tensor]) -> None:
    """Add to output biases, (D,) each."""
    for layer in layers:
        more = folded.get(layer.site.address)
        if more is not None:
            _add_bias(layer, more)


def check_cut(layers: Iterable[Layer], gone: Iterable[Address]) -> None:
    """Refuse to cut what cannot be, before anything is touched."""
    by_site = _by_site(gone)
    for layer in layers:
        numbers = by_site.get(layer.site.address)
        if numbers and not isinstance(layer.found.module, Emptied):
            _check_layer(layer)
            if (
                hasattr(layer.found.module, TABLE)
                and shares_bias(layer.found.module)
                and not layer.without(numbers).head_ids
            ):
                raise HeadwiseError(
                    f"{layer.found.name} makes the position bias of all layers of its stack, so not all of its heads can be "
                    f"cut; keep one, or silence them: theirs.heads[…].silenced()."
                )


def _check_layer(layer: Layer) -> None:
    found, name = layer.found, type(layer.found.module).__name__
    instead = "silence them instead: theirs.heads[…].silenced()."
    if layer.site.is_open:
        raise HeadwiseError(
            f"somebody looks at {layer.site.address} or silences its heads now; end that before cutting."
        )
    if found.writes is None or layer.passes not in ("plain", "gated"):
        raise HeadwiseError(f"heads of {name} cannot be cut: z is not seen to enter W_O as heads gave it; {instead}")
    places = list(range(len(layer.spec.head_ids))), list(range(len(layer.spec.kv_ids)))
    try:
        parts = {kept.holder for kept in slices(layer, *places)}
    except HeadwiseError as error:
        raise HeadwiseError(f"heads of {name} cannot be cut: {str(error).rstrip('.')}; {instead}") from None
    for part in parts:
        if hasattr(part, "in_features") and not _is_linear(part):
            raise HeadwiseError(
                f"{found.name} projects with {type(part).__name__}, which cannot be cut here; {instead}"
            )


def _is_linear(part: nn.Module) -> bool:
    """Whether weights are rows and columns: torch's own, or a class of a model's own file, which the proof then tries."""
    kind = type(part)
    return kind is nn.Linear or (issubclass(kind, nn.Linear) and kind.__module__.startswith("transformers.models."))


def _by_site(gone: Iterable[Address]) -> dict[SiteAddress, set[int]]:
    by_site: dict[SiteAddress, set[int]] = {}
    for address in gone:
        by_site.setdefault(address.site, set()).add(address.head)
    return by_site


def _cut_layer(layer: Layer, after: AttentionSpec) -> Layer:
    found, before = layer.found, layer.spec
    heads = [before.head_ids.index(number) for number in after.head_ids]
    keys = [before.kv_ids.index(number) for number in after.kv_ids]
    _keep_all(layer, heads, keys)
    found = replace(found if after.head_ids else _emptied(layer), kept=after.head_ids)
    return _made_anew(layer, found)


@torch.no_grad()
def even_out(layer: Layer) -> Layer:
    """Give every head a key and a value of its own, so that plain transformers can run a layer of uneven groups."""
    spec = layer.spec
    _keep_all(layer, list(range(len(spec.head_ids))), list(spec.kv_of_head))
    return _made_anew(layer, replace(layer.found, kv_heads=layer.found.heads, apart=True))


def _keep_all(layer: Layer, heads: list[int], keys: list[int]) -> None:
    for stand in stands(layer, heads, keys):
        (stand_at if stand.at is layer.found.module else stand_behind)(stand.at, stand.chosen, stand.count)
    for kept in slices(layer, heads, keys):
        keep(kept)


def _made_anew(layer: Layer, found: FoundAttention) -> Layer:
    """The layer that a module is now."""
    found = replace(found, layouts=tuple(layer.layouts[letter] for letter in "qkv"), gives=layer.gives)
    found.module.__dict__[CUT] = found  # whoever attaches to it again finds its numbers
    made = Layer(found, layer.masks)
    made.learned_of(layer)
    for stand in stands(layer, [], []):
        if stand.at is not layer.found.module:
            made.withheld |= dict.fromkeys("qk", "a norm over all heads goes on to see those that were cut")
    if made.spec.head_ids:
        tell(made, (len(layer.spec.head_ids), len(layer.spec.kv_ids)))
    return made


class Emptied(nn.Module):
    """An attention layer without heads: it writes its bias, and tells a cache how many tokens have passed."""

    def __init__(self, name: str | None, writes: nn.Module, layer_idx: int | None, gives: int, config: Any) -> None:
        super().__init__()
        self.layer_idx, self._name, self._gives = layer_idx, name, gives
        self.config: Any = config  # which attention runs is asked of it
        if name is not None:  # what writes was inside, and keeps its name there
            self.add_module(name, writes)

    def forward(self, hidden_states: Tensor, *given: Any, key_value_states: Any = None, **named: Any) -> Any:
        """(B, T, D) → (B, T, D), or (B, T, 0) where what writes comes behind; and nothing besides, as often as was given.

        A position bias is handed on.
        """
        from transformers import Cache

        cache: Any = next((x for x in (*given, *named.values()) if isinstance(x, Cache)), None)
        if cache is not None and key_value_states is None:
            cache = getattr(cache, "self_attention_cache", cache)
            nothing = hidden_states.new_zeros(len(hidden_states), 1, hidden_states.shape[1], 1)  # (B, 1, T, 1)
            cache.update(nothing, nothing, self.layer_idx)
        if self._name is None:
            out = hidden_states[..., :0]
        else:
            writes: Any = getattr(self, self._name)
            out = hidden_states.new_zeros(*hidden_states.shape[:-1], out_size(writes))
            out = out if writes.bias is None else out + writes.bias
        besides = [named.get(BIAS), *(None,) * (self._gives - 2)] if self._gives > 1 else []
        return (out, *besides) if self._gives else out


def _emptied(layer: Layer) -> FoundAttention:
    """Put a layer without heads in a module's place."""
    found = layer.found
    assert found.writes is not None
    inside = {id(part): name for name, part in found.module.named_children()}
    number, other, config = (getattr(found.module, name, None) for name in ("layer_idx", "layer_id", "config"))
    number = other if number is None else number
    new = Emptied(inside.get(id(found.writes)), found.writes, number, layer.gives, config)
    setattr(found.parent, found.name.rpartition(".")[2], new.train(found.module.training))
    return replace(found, module=new, reads=None)


def keep(kept: Slice) -> None:
    """Leave of a tensor what stays, and tell its module how large it is."""
    holder, value = kept.holder, getattr(kept.holder, kept.name)
    index = torch.tensor(kept.places, dtype=torch.long, device=value.device)
    setattr(holder, kept.name, _like(value, value.index_select(kept.axis, index)))
    if kept.name != "weight" or value.ndim != 2:
        return
    names = ("nx", "nf") if is_turned(holder) else ("out_features", "in_features")
    if hasattr(holder, names[kept.axis]):
        setattr(holder, names[kept.axis], len(kept.places))


def _like(before: Any, value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().contiguous().clone(), requires_grad=before.requires_grad)


def _add_bias(layer: Layer, more: Tensor) -> None:
    """Add to a layer's output bias, in float64; where there was none it begins at 0."""
    writes: Any = layer.found.writes
    old = writes.weight.new_zeros(len(more)) if writes.bias is None else writes.bias.detach()
    writes.bias = _like(writes.weight, (old.double() + more.to(old.device).double()).to(old.dtype))
