"""`AttachedTorchModel`: the handle of an attached torch module that is not a transformers model."""

import copy
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self
from weakref import finalize, ref

from torch import Tensor, nn

from headwise.attached.attached_model import AttachedModel
from headwise.attached.attention_op_trace import TracedAttentionLayer, install_module_trace
from headwise.attached.hooked_sdpa import stop_routing_module
from headwise.attached.layer import MARK, AttachedLayer, LayerMark, layer_of
from headwise.attached.layer_structure_check import check_reconstruction, probe_layers
from headwise.attached.masks import MaskConverter
from headwise.attached.module_discovery import TorchMHA, find_module_attention, infer_module_spec
from headwise.attached.module_prune import prune_module
from headwise.attached.prune_in_place import add_to_output_biases
from headwise.attached.torch_mha import TorchMHALayer, install_torch_mha_hooks
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.head import Gates, HeadPattern
from headwise.model.prune import heads_to_prune
from headwise.spec import LayerAddress, ModelSpec
from headwise.spec.cache_policy import CachePolicies

CallFunction = Callable[[Any, Any], Any]  # (model, call) → output or scalar loss


class AttachedTorchModel(AttachedModel):
    """Handle of a torch module, created by `hw.attach`.

    Its corpus is a list of calls, because a torch module has no tokenizer. `forward(model, call)` runs one of them.

    Attributes:
        model: The torch module.
        example: The call that tests the layers, or None.
    """

    has_own_calls = True

    def __init__(
        self, model: nn.Module, layers: list[AttachedLayer], forward: CallFunction | None = None, example: Any = None
    ) -> None:
        self._call_function, self.example = forward, example
        super().__init__(model, layers, None)

    def _attach(self, layers: list[AttachedLayer]) -> "ModuleAttachment":
        return ModuleAttachment(self.model, layers, self)

    @classmethod
    def attach_module(cls, model: nn.Module, forward: CallFunction | None, example: Any) -> Self:
        """Attach to a torch module, and test its layers on the example call if there is one."""
        handle = cls(model, make_module_layers(model), forward, example)
        try:
            handle._probe_traced_layers()
        except BaseException:
            handle.detach()
            raise
        return handle

    def _probe_traced_layers(self) -> None:
        traced = [layer for layer in self._layers if layer.info.backend == "traced"]
        if self.example is None or not traced:
            return
        self._attachment.remove_hooks()
        for layer in traced:
            layer.withheld_reasons = {}
        try:
            probe_layers(self.model, traced, [lambda: self.run_call(self.example)])
        finally:
            self._attachment.add_hooks()
        check_reconstruction(traced)

    # Calls.

    def forward(self, *args: Any, gates: Gates | None = None, **kwargs: Any) -> Any:
        """Call the module with its own arguments.

        Args:
            *args: Arguments of the module.
            gates: Factors for the outputs of heads, by head pattern or layer address: (H,) or (B, H) each.
            **kwargs: Keyword arguments of the module.

        Returns:
            The output of the module.
        """
        self._check_attached()
        with self._apply_gates(gates):
            return self.model(*args, **kwargs)

    def run_call(self, call: Any) -> Any:
        """Run one call of a corpus: by the `forward` that was given to `hw.attach`, or as the arguments of the module.

        Args:
            call: A dict of keyword arguments, a tuple of arguments, or one argument. With a `forward`, any object.

        Returns:
            The output of the module, or of `forward`.
        """
        self._check_attached()
        if self._call_function is not None:
            return self._call_function(self.model, call)
        if isinstance(call, Mapping):
            return self.model(**call)
        return self.model(*call) if isinstance(call, tuple) else self.model(call)

    # Properties.

    @property
    def spec(self) -> ModelSpec:
        """Sizes of the attention layers. Fields that a torch module does not have are empty."""
        if self._spec is None:
            self._spec = infer_module_spec(self._layers)
        return self._spec

    @property
    def layer_paths(self) -> dict[str, str]:
        """Path of the attention module of each layer, by layer address."""
        return {str(layer.hook_point.address): layer.info.name for layer in self._layers}

    @property
    def output(self) -> None:
        """None: a torch module has no LM head that is known."""
        return None

    @property
    def image_input(self) -> None:
        """None: images are passed as calls."""
        return None

    @property
    def decoder_start_token(self) -> int:
        """Raise an error: calls contain the inputs of the decoder."""
        self._not_available("decoder_start_token")

    def input_norms(self) -> None:
        """Return None: the norms of a torch module are not known."""
        return

    def residual_stream(self) -> NoReturn:
        """Raise an error: logit attribution requires a decoder with an LM head."""
        self._not_available("logit attribution")

    def resumable_forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: forward passes of torch modules run completely."""
        self._not_available("resuming a forward pass")

    def why_not_resumable(self) -> str:
        """Return why forward passes cannot be resumed."""
        return "the blocks of a torch module are not known"

    def prefix_forward(self, prefix_ids: Tensor) -> None:
        """Return None, because a torch module has no KV cache."""

    def cache(self, kind: Any = "dynamic") -> NoReturn:
        """Raise an error: a torch module has no KV cache."""
        self._not_available("a KV cache")

    def check_per_head_cache(self) -> NoReturn:
        """Raise an error: a torch module has no KV cache."""
        self._not_available("a KV cache")

    def streaming_forward(self) -> NoReturn:
        """Raise an error: a torch module has no KV cache."""
        self._not_available("streaming KV heads")

    def untrained(self, seed: int = 0) -> NoReturn:
        """Raise an error: how a torch module is built is not known."""
        self._not_available("a control with random weights")

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: a torch module has no `generate` that is known."""
        self._not_available("generate")

    def stream(self, *args: Any, **kwargs: Any) -> Generator[Tensor, None, None]:
        """Raise an error: a torch module has no `generate` that is known."""
        self._not_available("stream")

    def quantize(self, spec: ModelSpec) -> NoReturn:
        """Raise an error: only models of transformers are quantized."""
        self._not_available("quantize")

    def save_pretrained(self, folder: str | Path, *, full_shape: bool = False, remote_code: bool = False) -> NoReturn:
        """Raise an error: save a torch module with torch."""
        self._not_available("save", "Save the module itself: torch.save(attached.model.state_dict(), file).")

    save = save_pretrained

    def export(self, folder: str | Path, family: str | None = None) -> NoReturn:
        """Raise an error: only models of transformers are exported."""
        self._not_available("export", "Save the module itself: torch.save(attached.model.state_dict(), file).")

    def _not_available(self, operation: str, advice: str = "Call the module inside hw.record(attached).") -> NoReturn:
        raise UnsupportedModelError(
            f"{operation}: not available for {type(self.model).__name__}, which is a torch module without a known interface. "
            f"{advice}"
        )

    # Pruning.

    def prune(
        self,
        heads: HeadPattern,
        folded_biases: Mapping[LayerAddress, Tensor] | None = None,
        cache: CachePolicies | None = None,
        *,
        in_place: bool = False,
    ) -> Self:
        """Prune heads. An `nn.MultiheadAttention` is replaced by a smaller module with the same call.

        Args:
            heads: Heads to prune, by address or pattern.
            folded_biases: Tensors (D,) to add to the output biases, by layer.
            cache: Not supported.
            in_place: Prune this module instead of a copy that shares no memory with it.

        Returns:
            The handle of the pruned module.
        """
        if cache:
            self.check_native("per-head cache policies require one of Headwise's own models")
        if not in_place:
            return copy.deepcopy(self).prune(heads, folded_biases, in_place=True)
        self._check_attached()
        pruned = heads_to_prune(self.spec, heads)
        if pruned:
            prune_module(self, self._layers, pruned, self._attachment.replace_layers)
        add_to_output_biases(self._layers, folded_biases or {})
        self._spec = None
        return self

    def _attach_similar(self, model: Any) -> Self:
        """Attach to a copy of the module, without testing its layers again."""
        layers = make_module_layers(model)
        for layer, original in zip(layers, self._layers, strict=True):
            layer.copy_probe_results(original)
        return type(self)(model, layers, self._call_function, self.example)


def make_module_layers(model: nn.Module) -> list[AttachedLayer]:
    """Create the attention layers of a torch module."""
    converter, layers = MaskConverter(), []
    for info in find_module_attention(model):
        owner = layer_of(info.module)
        if owner is not None:
            raise ArgumentError(
                f"model: {info.name} is already attached, through the handle of another module. Use that handle, or detach "
                f"that module first."
            )
        is_torch = isinstance(info.module, TorchMHA)
        layers.append(TorchMHALayer(info, converter) if is_torch else TracedAttentionLayer(info, converter))
    return layers


def active_module_handle(model: nn.Module) -> AttachedTorchModel | None:
    """Return the handle of an attached torch module, or None."""
    for module in model.modules():
        layer = layer_of(module) if MARK in module.__dict__ else None
        handle = None if layer is None else layer.handle()
        if isinstance(handle, AttachedTorchModel) and handle.model is model:
            return handle
    return None


class ModuleAttachment:
    """Marks, replaced forwards and hooks of one handle on one torch module. `undo` removes them."""

    def __init__(self, model: nn.Module, layers: list[AttachedLayer], handle: AttachedTorchModel) -> None:
        self.model, self.layers, self.handle = model, layers, ref(handle)
        self.is_active = True
        self._hooks: list[Any] = []
        self._finalizer = finalize(handle, self.undo)
        self._finalizer.atexit = False
        self._mark()
        self.add_hooks()

    def _mark(self) -> None:
        for layer in self.layers:
            layer.handle = self.handle
            layer.module.__dict__[MARK] = LayerMark(layer)

    def add_hooks(self) -> None:
        """Replace the forwards of `nn.MultiheadAttention`, and trace other attention modules."""
        torch_layers = [layer for layer in self.layers if isinstance(layer, TorchMHALayer)]
        self._hooks += install_torch_mha_hooks(self.model, torch_layers)
        for layer in self.layers:
            if isinstance(layer, TracedAttentionLayer):
                self._hooks += [*install_module_trace(layer), *layer.register_output_projection_hooks()]

    def remove_hooks(self) -> None:
        """Remove the hooks."""
        for hook in reversed(self._hooks):
            hook.remove()
        self._hooks = []

    def replace_layers(self, layers: list[AttachedLayer]) -> None:
        """Attach to these layers instead of those at the same addresses."""
        self.remove_hooks()
        self.stop_routing_modules()
        new = {layer.hook_point.address: layer for layer in layers}
        self.layers = [new.get(layer.hook_point.address, layer) for layer in self.layers]
        self._mark()
        self.add_hooks()

    def stop_routing_modules(self) -> None:
        """Remove the marks of the modules."""
        for layer in self.layers:
            if layer_of(layer.module) is layer:
                stop_routing_module(layer)

    def undo(self) -> None:
        """Leave the module as it was."""
        if self.is_active:
            self.is_active = False
            self.remove_hooks()
            self.stop_routing_modules()
            self._finalizer.detach()
