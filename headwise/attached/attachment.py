"""Everything that attaching adds to a model: marks, hooks and the attention function. One call undoes it.

    handle ──► Attachment ──► model, layers          the handle owns the attachment
    module ──► hook, mark ──► layer ──(weak)──► handle   nothing that the model holds keeps the handle alive

A handle that is dropped without `detach()` is therefore collected, and its finalizer undoes the attachment. `Heads` and open
contexts hold the handle, so an edit never ends early.
"""

from typing import Any
from weakref import finalize, ref

from torch import nn

from headwise.attached.attach_support import ModelForwardGuard
from headwise.attached.hooked_sdpa import (
    ACTIVE,
    register_hooked_sdpa,
    restore_sdpa,
    route_module_to_layer,
    stop_routing_module,
)
from headwise.attached.layer import MARK, AttachedLayer, layer_of
from headwise.attached.non_sdpa_hooks import close_traces, eager_function_of, install_attention_hooks
from headwise.attached.prune_in_place import expand_kv_groups

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class Attachment:
    """Marks and hooks of one handle on one model."""

    def __init__(self, model: Any, layers: list[AttachedLayer], handle: Any) -> None:
        self.model, self.layers = model, layers
        self.handle = ref(handle)
        self._hooks: list[Any] = []
        register_hooked_sdpa(self)
        self._finalizer = finalize(handle, self.undo)
        self._finalizer.atexit = False
        self._mark()
        self.add_hooks()

    @property
    def is_active(self) -> bool:
        """Whether the model is currently attached."""
        return self in ACTIVE

    def add_hooks(self) -> None:
        """Hook every entry of the model, and W_O of the layers whose z differs from the output of attention."""
        self._hooks += ModelForwardGuard(self.model, self.layers).register_hooks()
        for layer in self.layers:
            self._hooks += [*install_attention_hooks(layer), *layer.register_output_projection_hooks()]

    def remove_hooks(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def replace_layers(self, layers: list[AttachedLayer]) -> None:
        """Attach to these layers instead of those at the same addresses."""
        self.stop_routing_modules()
        new = {layer.hook_point.address: layer for layer in layers}
        self.layers = [new.get(layer.hook_point.address, layer) for layer in self.layers]
        self._mark()
        self.remove_hooks()
        self.add_hooks()

    def _mark(self) -> None:
        for layer in self.layers:
            layer.handle = self.handle
            route_module_to_layer(layer, eager_function_of(layer))

    def stop_routing_modules(self) -> None:
        """Let plain transformers run the modules; marks of other attachments stay."""
        for layer in self.layers:
            if layer_of(layer.module) is layer:
                stop_routing_module(layer)

    def undo(self) -> None:
        """Leave the model as it was. Layers with groups of different sizes get one key and value per head."""
        if not self.is_active:
            return
        self.stop_routing_modules()
        for number, layer in enumerate(self.layers):
            if layer.has_uneven_groups and layer.spec.head_ids:
                self.layers[number] = expand_kv_groups(layer)
        self.remove_hooks()
        restore_sdpa(self)
        self._finalizer.detach()


def active_handle(model: Any) -> Any:
    """Return the handle of an attached model, or None. Attachments whose handle was collected are undone first."""
    for attachment in list(ACTIVE):
        handle = attachment.handle()
        if handle is None:
            attachment.undo()
        elif attachment.model is model:
            return handle
    return None


class AttachRollbackState:
    """Hooks and training modes of a model, stored to restore them after a failed attach."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modes = [(module, module.training) for module in model.modules()]
        self._hooks = [(hooks, set(hooks)) for module in model.modules() for hooks in _hook_dicts(module)]

    def restore(self) -> None:
        """Remove every hook, mark and registration that was added since, whether it was completed or not."""
        close_traces()
        for hooks, before in self._hooks:
            for key in [key for key in hooks if key not in before]:
                del hooks[key]
        for module, training in self._modes:
            if module.training is not training:
                module.training = training
            module.__dict__.pop(MARK, None)
        for attachment in [attachment for attachment in ACTIVE if attachment.model is self._model]:
            attachment.remove_hooks()
            restore_sdpa(attachment)


def _hook_dicts(module: nn.Module) -> list[dict[int, Any]]:
    return [module.__dict__[name] for name in HOOKS if name in module.__dict__]
