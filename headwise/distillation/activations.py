"""Capture hidden states after some layers and the calls of some attention layers in one forward pass.

The attention kernel does not change. Only q and k are stored; attention rows are computed from them later, in blocks.
"""

import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from headwise.errors import ArgumentError
from headwise.heads import HookPoint
from headwise.heads.hook_point import AttentionCall
from headwise.model import ModelProtocol
from headwise.spec import LayerAddress


@dataclass
class Activations:
    """Activations of one forward pass.

    Attributes:
        last_hidden_state: Hidden states after the final norm, (B, T, D).
        hidden_states: Hidden states by layer, (B, T, D).
        calls: Attention calls by layer address.
    """

    last_hidden_state: Tensor | None = None
    hidden_states: dict[int, Tensor] = field(default_factory=dict)
    calls: dict[LayerAddress, AttentionCall] = field(default_factory=dict)


class ActivationExtractor:
    """Captures the activations of selected layers and hook points in each forward pass."""

    def __init__(
        self, model: ModelProtocol, layers: Iterable[int] = (), layer_addresses: Iterable[LayerAddress] = ()
    ) -> None:
        self.model = model
        wanted_addresses = set(layer_addresses)
        self.hook_points: list[HookPoint] = [
            hook_point for hook_point in model.gathered_hook_points() if hook_point.address in wanted_addresses
        ]
        blocks = blocks_by_layer(model) if (selected := sorted(set(layers))) else {}
        for layer in selected:
            if layer not in blocks:
                raise ArgumentError(
                    f"layers: no such layer. Got {layer}. The model has layers 0 to {max(blocks)}; use one of these."
                )
        self.blocks = {layer: blocks[layer] for layer in selected}

    def __call__(self, ids: Tensor, **options: Any) -> Activations:
        """Run the model on ids (B, T) and return the activations."""
        activations = Activations()
        with ExitStack() as hooks:
            for hook_point in self.hook_points:
                hooks.enter_context(
                    hook_point.listen(lambda call: activations.calls.__setitem__(call.hook_point.address, call))
                )
            for layer, block in self.blocks.items():
                store = _make_store_hook(activations.hidden_states, layer)
                hooks.callback(block.register_forward_hook(store).remove)
            activations.last_hidden_state = self.model(ids, hidden=True, **options)
        return activations


def main_stack_name(model: ModelProtocol) -> str:
    """Return the name of the stack that produces the logits."""
    return "dec" if model.spec.kind == "encoder-decoder" else ""


def blocks_by_layer(model: ModelProtocol) -> dict[int, nn.Module]:
    """Return the block module of each layer of the main stack: the module whose name ends at the layer number."""
    names = {module_part: name for name, module_part in model.named_modules()}  # pyright: ignore[reportAttributeAccessIssue]
    blocks: dict[int, nn.Module] = {}
    modules = {name: module_part for module_part, name in names.items()}
    for layer in model.attention_layers():
        if layer.hook_point.address.stack == main_stack_name(model):
            module = getattr(layer, "module", layer)
            name = re.match(r"(?:.*?\.)?\d+(?=\.)", names[module])
            if name is not None:
                blocks[layer.hook_point.address.layer] = modules[name[0]]
    return blocks


def _make_store_hook(hidden_states: dict[int, Tensor], layer: int) -> Any:
    def store(module: nn.Module, inputs: Any, output: Any) -> None:
        # Activation checkpointing calls the block again in the backward pass; keep the first output.
        hidden_states.setdefault(layer, output[0] if isinstance(output, tuple) else output)

    return store
