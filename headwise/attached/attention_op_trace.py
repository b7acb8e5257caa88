"""Attention modules of torch models that are not `nn.MultiheadAttention`: their softmax and matmuls, or SDPA, are traced.

Nothing about such a module is trusted. The first call that is looked at must be reproduced from its queries, keys and values.
A call in which no attention was seen raises an error, so that silencing a head is never without effect.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.layer import AttachedLayer
from headwise.attached.layer_structure_check import reproduces_output
from headwise.attached.non_sdpa_hooks import TracedAttentionHook
from headwise.attached.uncopied_hook import UncopiedHook
from headwise.errors import UnsupportedModelError
from headwise.kernels.score_params import ScoreParams


class TracedAttentionLayer(AttachedLayer):
    """Layer of a traced attention module. Until a call of it was tested, z is compared with the input of W_O."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.z_path = "unprobed"
        reason = "the layer was not tested. Attach the model with a call to test it: hw.attach(model, example=…)"
        self.withheld_reasons = dict.fromkeys("qkvo", reason)
        self.num_traced = 0  # calls of attention that were seen
        self._is_verified = False

    def apply_hook_point(
        self, q: Tensor, k: Tensor, v: Tensor, params: Callable[[], ScoreParams], out: Tensor
    ) -> Tensor:
        """Verify the first call, then apply the hook point: (B, T, H, e) → (B, T, H, e)."""
        self.num_traced += 1
        if not self._is_verified and not (self.module.training and self._contains_dropout_module()):
            with torch.no_grad():
                if q.shape[1] != len(self.spec.head_ids) or not reproduces_output(q, k, v, params(), out):
                    raise UnsupportedModelError(
                        f"{self.info.name}: its heads cannot be recorded or silenced, because its output could not be "
                        f"reproduced from its queries, keys and values. Detach the model to call it."
                    )
            self._is_verified = True
        return super().apply_hook_point(q, k, v, params, out)

    def _contains_dropout_module(self) -> bool:
        return any(isinstance(part, nn.Dropout) and part.p > 0 for part in self.module.modules())


class MissingAttentionErrorHook(TracedAttentionHook):
    """Trace of a module. Raises an error if a listener or an edit is open and no attention was seen in a call."""

    def __init__(self, layer: TracedAttentionLayer) -> None:
        super().__init__(layer)
        self._traced_layer, self._before = layer, 0

    def start_trace(self, *args: Any) -> None:
        """Start tracing, before the module is called."""
        self._before = self._traced_layer.num_traced
        super().start_trace(*args)

    def end_trace(self, *args: Any) -> None:
        """Stop tracing, after the call."""
        super().end_trace(*args)
        layer = self._traced_layer
        is_finished = len(args) == 3 and args[2] is not None
        if is_finished and layer.hook_point.is_active and layer.probe is None and layer.num_traced == self._before:
            raise UnsupportedModelError(
                f"{layer.info.name}: its heads cannot be recorded or silenced, because it calls neither "
                f"scaled_dot_product_attention nor matmul, softmax and matmul. Attach only the other parts of the model."
            )


def install_module_trace(layer: TracedAttentionLayer) -> list[Any]:
    """Trace the calls of a module. Each returned hook has `.remove()`."""
    if not layer.spec.head_ids:
        return []
    hook, module = MissingAttentionErrorHook(layer), layer.module
    return [
        module.register_forward_pre_hook(UncopiedHook(hook.start_trace)),
        module.register_forward_hook(UncopiedHook(hook.end_trace), always_call=True),
    ]
