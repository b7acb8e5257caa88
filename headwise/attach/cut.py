"""Cutting heads out of somebody else's model, in place: projections become smaller, and modules are told so.

Keys and values nobody reads any more go too. Where that leaves groups of different sizes, which transformers cannot share
out, our function does it while the model is attached. A layer without heads is replaced by one that writes its bias.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attach.families import family_of
from headwise.attach.find import CUT, Found, is_turned
from headwise.attach.layer import Layer, matrix
from headwise.errors import HeadwiseError
from headwise.spec import Address, AttentionSpec, SiteAddress


@torch.no_grad()
def cut_layers(
    layers: list[Layer], gone: Iterable[Address], folded: Mapping[SiteAddress, Tensor] | None = None
) -> list[Layer]:
    """Take heads out of these layers; what is folded, (D,) each, goes into output biases. Gives the layers there are now."""
    by_site: dict[SiteAddress, set[int]] = {}
    for address in gone:
        by_site.setdefault(address.site, set()).add(address.head)
    for layer in layers:  # all is checked before anything is touched
        if layer.site.address in by_site:
            check_cut(layer)
    made = []
    for layer in layers:
        more = (folded or {}).get(layer.site.address)
        if more is not None:
            _add_bias(layer, more)
        numbers = by_site.get(layer.site.address)
        made.append(layer if not numbers else _cut_layer(layer, layer.without(numbers)))
    return made


def check_cut(layer: Layer) -> None:
    """Refuse to cut what is not known to stay right when it is cut."""
    found, family = layer.found, family_of(layer.found)
    name = type(found.module).__name__
    instead = "silence them instead: theirs.heads[…].silenced()."
    if isinstance(found.module, Emptied):
        return
    if family is None or not family.cut or found.reads is None or found.writes is None:
        raise HeadwiseError(f"heads of {name} cannot be cut: how it counts its heads is not known here; {instead}")
    if layer.site.is_open:
        raise HeadwiseError(
            f"somebody looks at {layer.site.address} or silences its heads now; end that before cutting."
        )
    for part in (*(found.read(i) for i in range(len(found.reads[1]))), found.writes):
        if type(part) is not nn.Linear and not is_turned(part):
            raise HeadwiseError(
                f"{found.name} projects with {type(part).__name__}, which cannot be cut here; {instead}"
            )


def _cut_layer(layer: Layer, after: AttentionSpec) -> Layer:
    found, before = layer.found, layer.spec
    heads = [before.head_ids.index(number) for number in after.head_ids]
    keys = [before.kv_ids.index(number) for number in after.kv_ids]
    d, e = before.head_dim, before.value_dim
    rows = {"q": _rows(heads, d), "k": _rows(keys, d), "v": _rows(keys, e)}
    assert found.reads is not None
    assert found.writes is not None
    if found.reads[0] == "apart":
        for place, chosen in enumerate(rows.values()):
            _keep_rows(found.read(place), chosen)
    else:
        starts = (0, len(before.head_ids) * d, (len(before.head_ids) + len(before.kv_ids)) * d)
        joined = [row + start for start, chosen in zip(starts, rows.values(), strict=True) for row in chosen]
        _keep_rows(found.read(0), joined)
    _keep_columns(found.writes, _rows(heads, e))
    found = replace(found if after.head_ids else _emptied(found), kept=after.head_ids)
    found.module.__dict__[CUT] = found  # whoever attaches to it again finds its numbers
    made = Layer(found, layer.masks)
    if after.head_ids:
        tell_sizes(made)
    return made


def tell_sizes(layer: Layer) -> None:
    """Set what a module keeps about its number of heads."""
    module, family, spec = layer.module, family_of(layer.found), layer.spec
    assert family is not None
    for name in family.heads:
        setattr(module, name, len(spec.head_ids))
    for name in family.channels:
        setattr(module, name, len(spec.head_ids) * spec.head_dim)
    if hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = 1 if layer.uneven else len(spec.head_ids) // len(spec.kv_ids)  # pyright: ignore


@torch.no_grad()
def even_out(layer: Layer) -> Layer:
    """Give every head a key and a value of its own, so that plain transformers can run a layer of uneven groups."""
    spec, found = layer.spec, layer.found
    for place, channels in ((1, spec.head_dim), (2, spec.value_dim)):
        _keep_rows(found.read(place), _rows(list(spec.kv_of_head), channels))
    found = found.module.__dict__[CUT] = replace(found, kv_heads=found.heads, apart=True)
    made = Layer(found, layer.masks)
    tell_sizes(made)
    return made


class Emptied(nn.Module):
    """An attention layer without heads: it writes its bias, and tells a cache how many tokens have passed."""

    def __init__(self, name: str | None, writes: nn.Module, layer_idx: int | None) -> None:
        super().__init__()
        self.layer_idx, self._name = layer_idx, name
        if name is not None:  # what writes was inside, and keeps its name there
            self.add_module(name, writes)

    def forward(
        self, hidden_states: Tensor, *_: Any, key_value_states: Any = None, past_key_values: Any = None, **__: Any
    ) -> tuple[Tensor, None]:
        """(B, T, D) → (B, T, D), or (B, T, 0) where what writes comes behind."""
        if past_key_values is not None and key_value_states is None:
            past_key_values = getattr(past_key_values, "self_attention_cache", past_key_values)
            nothing = hidden_states.new_zeros(len(hidden_states), 1, hidden_states.shape[1], 1)  # (B, 1, T, 1)
            past_key_values.update(nothing, nothing, self.layer_idx)
        if self._name is None:
            return hidden_states[..., :0], None
        writes: Any = getattr(self, self._name)
        out = torch.zeros_like(hidden_states)
        return (out if writes.bias is None else out + writes.bias), None


def _emptied(found: Found) -> Found:
    """Put a layer without heads in a module's place."""
    assert found.writes is not None
    inside = {id(part): name for name, part in found.module.named_children()}
    new = Emptied(inside.get(id(found.writes)), found.writes, getattr(found.module, "layer_idx", None))
    setattr(found.parent, found.name.rpartition(".")[2], new.train(found.module.training))
    return replace(found, module=new, reads=None)


def _rows(heads: list[int], channels: int) -> list[int]:
    return [head * channels + channel for head in heads for channel in range(channels)]


def _keep_rows(module: nn.Module, rows: list[int]) -> None:
    weight: Any = module.weight
    index = torch.tensor(rows, dtype=torch.long, device=weight.device)
    _set(module, matrix(module).index_select(0, index))
    if module.bias is not None:
        module.bias = _like(module.bias, module.bias.index_select(0, index))  # pyright: ignore


def _keep_columns(module: nn.Module, columns: list[int]) -> None:
    weight: Any = module.weight
    _set(module, matrix(module).index_select(1, torch.tensor(columns, dtype=torch.long, device=weight.device)))


def _set(module: nn.Module, weight: Tensor) -> None:
    """A new weight, (out, in), in the way the module keeps it."""
    turned = is_turned(module)
    module.weight = _like(module.weight, weight.mT if turned else weight)  # pyright: ignore
    names = ("nf", "nx") if turned else ("out_features", "in_features")
    for name, size in zip(names, weight.shape, strict=True):
        setattr(module, name, size)


def _like(before: Any, value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().contiguous().clone(), requires_grad=before.requires_grad)


def _add_bias(layer: Layer, more: Tensor) -> None:
    """Add to a layer's output bias, in float64; where there was none it begins at 0."""
    writes: Any = layer.found.writes
    old = writes.weight.new_zeros(len(more)) if writes.bias is None else writes.bias.detach()
    writes.bias = _like(writes.weight, (old.double() + more.to(old.device).double()).to(old.dtype))
