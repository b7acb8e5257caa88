"""What a pass shows besides its logits: the stream behind some layers, and the calls of some attention layers.

The kernel stays what it is: q and k are kept, and maps are made of them later, some rows at a time.
"""

import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.heads import Site
from headwise.heads.hook_point import Seen
from headwise.model import AnyModel
from headwise.spec import SiteAddress


@dataclass
class Glimpse:
    """One pass of one model."""

    hidden: Tensor | None = None  # (B, T, D), behind the last norm
    states: dict[int, Tensor] = field(default_factory=dict)  # by layer: (B, T, D)
    calls: dict[SiteAddress, Seen] = field(default_factory=dict)


class Watcher:
    """Which layers and sites of a model are kept, pass by pass."""

    def __init__(self, model: AnyModel, layers: Iterable[int] = (), sites: Iterable[SiteAddress] = ()) -> None:
        self.model = model
        wanted = set(sites)
        self.sites: list[Site] = [site for site in model.all_sites() if site.address in wanted]
        known = blocks_of(model) if (chosen := sorted(set(layers))) else {}
        for layer in chosen:
            if layer not in known:
                raise HeadwiseError(f"the model has no layer {layer} to take states from; it has 0 to {max(known)}.")
        self.blocks = {layer: known[layer] for layer in chosen}

    def __call__(self, ids: Tensor, **options: Any) -> Glimpse:
        """One pass over ids (B, T), to its last states."""
        made = Glimpse()
        with ExitStack() as watching:
            for site in self.sites:
                watching.enter_context(site.listen(lambda seen: made.calls.__setitem__(seen.site.address, seen)))
            for layer, block in self.blocks.items():
                keep = _keeper(made.states, layer)
                watching.callback(block.register_forward_hook(keep).remove)
            made.hidden = self.model(ids, hidden=True, **options)
        return made


def main_stack(model: AnyModel) -> str:
    """The stack whose states become logits."""
    return "dec" if model.spec.kind == "encoder-decoder" else ""


def blocks_of(model: AnyModel) -> dict[int, nn.Module]:
    """The block of every layer of the stack that writes: the part of the model as far as the number in its name."""
    names = {part: name for name, part in model.named_modules()}  # pyright: ignore[reportAttributeAccessIssue]
    found: dict[int, nn.Module] = {}
    parts = {name: part for part, name in names.items()}
    for layer in model.attention_layers():
        if layer.site.address.stack == main_stack(model):
            module = getattr(layer, "module", layer)
            name = re.match(r"(?:.*?\.)?\d+(?=\.)", names[module])
            if name is not None:
                found[layer.site.address.layer] = parts[name[0]]
    return found


def _keeper(states: dict[int, Tensor], layer: int) -> Any:
    def keep(module: nn.Module, given: Any, made: Any) -> None:
        states.setdefault(
            layer, made[0] if isinstance(made, tuple) else made
        )  # a checkpoint repeats it: the first counts

    return keep
