"""Prune heads of a torch module in place, and verify the result on the example call."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.attached.layer import AttachedLayer
from headwise.attached.prune_in_place import (
    check_prunable,
    flatten_tensors,
    is_close,
    prune_layers,
    rollback_on_error,
)
from headwise.attached.pruned_mha import PrunedMultiheadAttention
from headwise.attached.torch_mha import TorchMHALayer
from headwise.errors import HeadwiseError, UnsupportedModelError
from headwise.model import eval_mode
from headwise.spec import Address

if TYPE_CHECKING:
    from headwise.attached.attached_torch_model import AttachedTorchModel

ReplaceLayers = Callable[[list[AttachedLayer]], None]


def prune_module(
    handle: "AttachedTorchModel", layers: list[AttachedLayer], pruned: Sequence[Address], replace_layers: ReplaceLayers
) -> None:
    """Prune heads. If the result differs from silenced heads on the example call, raise an error and restore the module.

    Args:
        handle: Handle of the module.
        layers: Its layers.
        pruned: Heads to prune.
        replace_layers: Attaches to new layers.
    """
    touched = [layer for layer in layers if set(layer.hook_point.head_addresses) & set(pruned)]
    _check_layers(touched, pruned)
    traced = [layer for layer in touched if not isinstance(layer, TorchMHALayer)]
    check_prunable(traced, [head for head in pruned if any(head in x.hook_point.head_addresses for x in traced)])
    expected = _silenced_example_outputs(handle, pruned)
    with rollback_on_error(layers, pruned, replace_layers):
        new_layers = [
            _prune_torch_layer(layer, pruned) if isinstance(layer, TorchMHALayer) else prune_layers([layer], pruned)[0]
            for layer in touched
        ]
        replace_layers(new_layers)
        if expected is not None:
            _check_outputs(handle, expected, touched)


def _check_layers(layers: Sequence[AttachedLayer], pruned: Sequence[Address]) -> None:
    for layer in layers:
        if layer.hook_point.is_active:
            raise HeadwiseError(
                f"layer {layer.hook_point.address}: a context that records or edits its heads is open. Close it before "
                f"pruning."
            )
        if not isinstance(layer, TorchMHALayer) and layer.z_path == "unprobed":
            raise UnsupportedModelError(
                f"{layer.info.name}: its heads cannot be pruned before the layer was tested on a call. Attach the model with "
                f"one: hw.attach(model, example=…)."
            )
        if not isinstance(layer, TorchMHALayer) and not layer.pruned_spec(_pruned_head_ids(layer, pruned)).head_ids:
            raise UnsupportedModelError(
                f"{layer.info.name}: not all of its heads can be pruned. Keep one head, or silence the heads: "
                f"attached.heads[…].silenced()."
            )


def _pruned_head_ids(layer: AttachedLayer, pruned: Sequence[Address]) -> set[int]:
    return {address.head for address in layer.hook_point.head_addresses if address in set(pruned)}


@torch.no_grad()
def _prune_torch_layer(layer: TorchMHALayer, pruned: Sequence[Address]) -> TorchMHALayer:
    """Replace an `nn.MultiheadAttention` by a module with the remaining heads."""
    info, removed = layer.info, _pruned_head_ids(layer, pruned)
    indices = [index for index, head_id in enumerate(layer.spec.head_ids) if head_id not in removed]
    module: Any = PrunedMultiheadAttention(layer.module, indices)  # pyright: ignore[reportArgumentType]
    setattr(info.parent, info.name.rpartition(".")[2], module)
    info = replace(info, module=module, output_module=module.out_proj, kept_heads=module.kept_heads)
    return TorchMHALayer(info, layer.mask_converter)


def _silenced_example_outputs(handle: "AttachedTorchModel", pruned: Sequence[Address]) -> list[Tensor] | None:
    """Return the outputs of the example call with these heads silenced, or None without an example."""
    if handle.example is None:
        return None
    with torch.no_grad(), torch.random.fork_rng(), eval_mode(handle.model), handle.heads.select(pruned).silenced():
        return flatten_tensors(handle.run_call(handle.example))


def _check_outputs(handle: "AttachedTorchModel", expected: list[Tensor], layers: Sequence[AttachedLayer]) -> None:
    names = ", ".join(layer.info.name for layer in layers[:2])
    reason = "its outputs differ from those with silenced heads"
    outputs: list[Tensor] = []
    try:
        with torch.no_grad(), torch.random.fork_rng(), eval_mode(handle.model):
            outputs = flatten_tensors(handle.run_call(handle.example))
    except Exception as error:  # for example, a forward that assumes heads × head_dim = width
        reason = f"it cannot be called any more ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    if len(outputs) == len(expected) and all(
        a.shape == b.shape and is_close(b, a) for a, b in zip(expected, outputs, strict=True)
    ):
        return
    raise UnsupportedModelError(
        f"{names}: heads cannot be pruned: after pruning, {reason}. Silence the heads instead: "
        f"attached.heads[…].silenced()."
    )
