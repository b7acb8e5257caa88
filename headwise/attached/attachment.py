"""Everything that attaching adds to a model: marks, hooks and the attention function. One call undoes it.

    handle ──► Attachment ──► model, layers          the handle owns the attachment
    module ──► hook, mark ──► layer ──(weak)──► handle   nothing that the model holds keeps the handle alive

A handle that is dropped without `detach()` is therefore collected, and its finalizer undoes the attachment. `Heads` and open
contexts hold the handle, so an edit never ends early.
"""

from typing import Any
from weakref import finalize, ref

from torch import nn

from headwise.attached.interface import ACTIVE, mark, register, unmark, unregister
from headwise.attached.layer import MARK, Layer, layer_of
from headwise.attached.non_sdpa_hooks import close_traces, hooks_around, own_eager
from headwise.attached.prune_in_place import even_out
from headwise.attached.validate import CallGuard

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class Attachment:
    """Marks and hooks of one handle on one model."""

    def __init__(self, model: Any, layers: list[Layer], handle: Any) -> None:
        self.model, self.layers = model, layers
        self.handle = ref(handle)
        self._hooks: list[Any] = []
        register(self)
        self._finalizer = finalize(handle, self.undo)
        self._finalizer.atexit = False
        self._mark()
        self.watch()

    @property
    def is_active(self) -> bool:
        """Whether the model is attached through this."""
        return self in ACTIVE

    def watch(self) -> None:
        """Hook every entry of the model, and W_O of the layers whose z differs from the output of attention."""
        self._hooks += CallGuard(self.model, self.layers).hooks()
        for layer in self.layers:
            self._hooks += [*hooks_around(layer), *layer.watch_entry()]

    def unwatch(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def replace(self, layers: list[Layer]) -> None:
        """Attach to these layers instead of those at the same addresses."""
        self.unmark()
        new = {layer.site.address: layer for layer in layers}
        self.layers = [new.get(layer.site.address, layer) for layer in self.layers]
        self._mark()
        self.unwatch()
        self.watch()

    def _mark(self) -> None:
        for layer in self.layers:
            layer.handle = self.handle
            mark(layer, own_eager(layer))

    def unmark(self) -> None:
        """Let plain transformers run the modules; marks of other attachments stay."""
        for layer in self.layers:
            if layer_of(layer.module) is layer:
                unmark(layer)

    def undo(self) -> None:
        """Leave the model as it was. Layers with groups of different sizes get one key and value per head."""
        if not self.is_active:
            return
        self.unmark()
        for number, layer in enumerate(self.layers):
            if layer.uneven and layer.spec.head_ids:
                self.layers[number] = even_out(layer)
        self.unwatch()
        unregister(self)
        self._finalizer.detach()


def live_handle(model: Any) -> Any:
    """The handle of an attached model, or None; attachments whose handle was collected are undone first."""
    for attachment in list(ACTIVE):
        handle = attachment.handle()
        if handle is None:
            attachment.undo()
        elif attachment.model is model:
            return handle
    return None


class ModelState:
    """Hooks and training modes of a model, kept to restore them after a failed attach."""

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
            attachment.unwatch()
            unregister(attachment)


def _hook_dicts(module: nn.Module) -> list[dict[int, Any]]:
    return [module.__dict__[name] for name in HOOKS if name in module.__dict__]
