"""Hooks for `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`.

torch runs such a module in one of several ways: as one fused kernel per block (`nn.TransformerEncoderLayer` in evaluation
without gradients), as one fused kernel per attention module, by SDPA, or by matmuls if weights are requested. The choice
depends on forward hooks, too, so no hooks are registered. Instead the `forward` of each instance is replaced:

- Nothing is open: the original forward runs.
- Listeners are open: the original forward runs and its output is returned. z is computed a second time, by the module itself
  with the identity in place of W_O. If torch ran a whole block as one kernel, the block runs a second time in Python.
- Edits are open: z is computed by the module with the identity in place of W_O, edited, and multiplied by W_O. A block that
  torch would run as one kernel runs in Python. Its attention keeps its fused kernel, and gets bool masks, because torch does
  not pass float masks to that kernel.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attached.hooked_sdpa import in_backward
from headwise.attached.layer import AttachedLayer
from headwise.attached.non_sdpa_hooks import mask_and_bias
from headwise.attached.pruned_mha import (
    TorchMHACall,
    make_linear,
    mask_scores_to_add,
    project_qkv,
    qkv_weights_and_biases,
)
from headwise.errors import UnsupportedModelError
from headwise.heads.hook_point import is_replaying
from headwise.kernels.masks import CausalMask, Mask
from headwise.kernels.random_state import get_rng_state, replayed_rng
from headwise.kernels.score_bias import DenseBias
from headwise.kernels.score_params import ScoreParams


class TorchMHALayer(AttachedLayer):
    """Layer of an `nn.MultiheadAttention`, whose q, k and v projections are parameters instead of modules."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.qkv = TorchMHAProjectionView(self)
        module: Any = self.module
        self.hook_point.extra_keys = (module.bias_k is not None) + module.add_zero_attn
        # `count`: number of calls of the module in this thread. `in_python`: whether its block runs in Python.
        self._calls = threading.local()
        self._identity: nn.Linear | None = None

    @property
    def num_calls(self) -> int:
        """Number of calls of the module in this thread."""
        return getattr(self._calls, "count", 0)

    def count_call(self) -> None:
        """Count one call of the module in this thread."""
        self._calls.count = self.num_calls + 1

    @property
    def block_runs_in_python(self) -> bool:
        """Whether the block of the module runs in Python in place of one kernel, in this thread."""
        return getattr(self._calls, "in_python", False)

    @contextmanager
    def block_in_python(self) -> Iterator[None]:
        """Mark calls inside the context as those of a block that runs in Python in place of one kernel."""
        self._calls.in_python = True
        try:
            yield
        finally:
            self._calls.in_python = False

    def register_forward_pre_hook(self, hook: Any) -> Any:
        """Raise an error: hooks on this module would change how torch runs it."""
        raise UnsupportedModelError(
            f"{self.info.name}: the input of nn.MultiheadAttention cannot be recorded, because a hook would change the "
            f"kernel that torch selects. Record q, k, v and z with hw.record."
        )

    register_forward_hook = register_forward_pre_hook

    def without_output_projection(self) -> nn.Module:
        """Return a module that shares all weights but W_O, which is the identity, so that its output is z."""
        module: Any = self.module
        W_O: Tensor = module.out_proj.weight
        identity = self._identity
        if identity is None or identity.weight.dtype != W_O.dtype or identity.weight.device != W_O.device:
            with torch.inference_mode(False):
                tensors = torch.eye(W_O.shape[1], dtype=W_O.dtype, device=W_O.device), W_O.new_zeros(W_O.shape[1])
                identity = make_linear(*(nn.Parameter(x, requires_grad=False) for x in tensors))
            self._identity = identity
        shared = copy.copy(module)
        shared.__dict__["_modules"] = module._modules | {"out_proj": identity}
        shared.__dict__.pop("forward", None)
        return shared


class TorchMHAProjectionView:
    """Live views of the q, k and v projections of an `nn.MultiheadAttention` by head."""

    def __init__(self, layer: TorchMHALayer) -> None:
        self._layer = layer

    def weight_by_head(self, projection: str) -> Tensor:
        """Return the weights by head: (H, d, width of the input)."""
        weight = qkv_weights_and_biases(self._layer.module)[0]["qkv".index(projection)]
        return weight.unflatten(0, (len(self._layer.spec.head_ids), -1))

    def bias_by_head(self, projection: str) -> Tensor | None:
        """Return the biases by head, (H, d), or None."""
        bias = qkv_weights_and_biases(self._layer.module)[1]["qkv".index(projection)]
        return None if bias is None else bias.unflatten(0, (len(self._layer.spec.head_ids), -1))


class ReplacedForward:
    """Replacement for the `forward` of one module. Copies of the module run the forward of their class."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._previous = module.__dict__.get("forward")
        self._original: Callable[..., Any] = module.forward
        module.__dict__["forward"] = self

    def remove(self) -> None:
        """Restore the forward of the module."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self._previous is not None:
                self.module.__dict__["forward"] = self._previous

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward."""
        return self._original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(type(self.module).forward, copy.deepcopy(self.module, memo))

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")


class HookedMultiheadAttention(ReplacedForward):
    """Forward of an `nn.MultiheadAttention` that passes z by the hook point of its layer."""

    def __init__(self, layer: TorchMHALayer) -> None:
        super().__init__(layer.module)
        self._layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Run the module."""
        layer = self._layer
        layer.count_call()
        if not torch.compiler.is_compiling() and in_backward() and not is_replaying():
            call = TorchMHACall(*args, **kwargs)
            layer.check_replay_unedited(project_qkv(layer.module, *_batch_first(layer.module, call)[:3])[0])
            return self._original(*args, **kwargs)
        if not layer.hook_point.is_active:
            return self._original(*args, **kwargs)
        call = TorchMHACall(*args, **kwargs)
        if layer.block_runs_in_python:
            call = replace(
                call,
                attn_mask=_as_hidden_key_mask(call.attn_mask),
                key_padding_mask=_as_hidden_key_mask(call.key_padding_mask),
            )
        return self._run_edited(call) if layer.hook_point.has_edits else self._run_observed(call)

    def _run_observed(self, call: TorchMHACall) -> tuple[Tensor, Tensor | None]:
        """Run the original forward, then compute z again for the listeners, with the same dropout."""
        module: Any = self.module
        device = call.query.device
        rng_state = get_rng_state(device) if module.training and module.dropout > 0 else None
        result = call.run(self._original)
        with replayed_rng(rng_state, device):
            attended = call.run(self._layer.without_output_projection())[0]
        self._apply_hook_point(call, attended)
        return result

    def _run_edited(self, call: TorchMHACall) -> tuple[Tensor, Tensor | None]:
        """Compute z, apply the edits, and multiply by W_O in the row order of torch."""
        module: Any = self.module
        attended, weights = call.run(self._layer.without_output_projection())
        edited = self._apply_hook_point(call, attended).flatten(2)  # (B, T, H·e)
        W_O, b_O = module.out_proj.weight, module.out_proj.bias
        if attended.is_nested:
            real = _real_rows_mask(call.query)  # (B, T)
            rows = F.linear(edited[real], W_O, b_O)  # (rows, D)
            out = rows.new_zeros(*edited.shape[:2], rows.shape[-1])
            out[real] = rows
            return torch._nested_tensor_from_mask(out, real, mask_check=False), weights  # pyright: ignore
        if attended.ndim == 2:
            return F.linear(edited[0], W_O, b_O), weights
        tokens_first = not module.batch_first or not attended.is_contiguous()
        ordered = edited.transpose(0, 1) if tokens_first else edited
        out = F.linear(ordered.reshape(-1, ordered.shape[-1]), W_O, b_O).view(*ordered.shape[:2], -1)
        return out.transpose(0, 1) if tokens_first == module.batch_first else out, weights

    def _apply_hook_point(self, call: TorchMHACall, attended: Tensor) -> Tensor:
        """Apply the hook point to z, given as torch returns it: (B, T, H, e)."""
        layer, module = self._layer, self.module
        padded = attended.to_padded_tensor(0.0) if attended.is_nested else attended
        if padded.ndim == 2:
            padded = padded[None]
        elif not module.batch_first:
            padded = padded.transpose(0, 1)
        query, key, value, padding = _batch_first(module, call)
        q, k, v = project_qkv(module, query, key, value)
        out = padded.unflatten(-1, (len(layer.spec.head_ids), layer.spec.value_dim))  # (B, T, H, e)
        call = replace(call, key_padding_mask=padding)
        return layer.apply_hook_point(q, k, v, lambda: _score_params(module, call, q, k), out)


class HookedEncoderLayer(ReplacedForward):
    """Forward of an `nn.TransformerEncoderLayer` that torch may run as one kernel, without calling its attention module."""

    def __init__(self, block: nn.TransformerEncoderLayer, layer: TorchMHALayer) -> None:
        super().__init__(block)
        self._layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        layer = self._layer
        if not layer.hook_point.is_active:
            return self._original(*args, **kwargs)
        has_bias = any(_has_additive_bias(mask) for mask in (*args[1:], *kwargs.values()))
        if layer.hook_point.has_edits and not has_bias:
            return self._run_in_python(*args, **kwargs)
        num_calls = layer.num_calls
        out = self._original(*args, **kwargs)
        if layer.num_calls == num_calls:  # torch ran the block as one kernel
            if has_bias:
                raise UnsupportedModelError(
                    f"{layer.info.name}: its heads cannot be recorded or silenced in this call, because the fused kernel of "
                    f"torch takes a float mask with finite values as a bool mask. Call "
                    f"torch.backends.mha.set_fastpath_enabled(False), which also makes torch add the values."
                )
            self._run_in_python(*args, **kwargs)
        return out

    def _run_in_python(self, *args: Any, **kwargs: Any) -> Any:
        """Run a block that shares all weights and calls its parts in Python: torch fuses only ReLU and GELU."""
        shared = copy.copy(self.module)
        shared.__dict__["activation_relu_or_gelu"] = 0
        shared.__dict__.pop("forward", None)
        with self._layer.block_in_python() if self._is_fusable() else nullcontext():
            return shared(*args, **kwargs)

    def _is_fusable(self) -> bool:
        """Return whether nothing but the attention module keeps torch from running the block as one kernel."""
        block: Any = self.module
        has_hooks = any(part._forward_hooks or part._forward_pre_hooks for part in block.modules())
        needs_grad = torch.is_grad_enabled() and any(weight.requires_grad for weight in block.parameters())
        return bool(block.activation_relu_or_gelu) and block.norm1.eps == block.norm2.eps and not has_hooks | needs_grad


def install_torch_mha_hooks(model: nn.Module, layers: list[TorchMHALayer]) -> list[ReplacedForward]:
    """Replace the forwards of the attention modules and of the blocks that contain them."""
    layers_by_module = {layer.module: layer for layer in layers if layer.spec.head_ids}
    hooks: list[ReplacedForward] = [HookedMultiheadAttention(layer) for layer in layers_by_module.values()]
    blocks = [block for block in model.modules() if isinstance(block, nn.TransformerEncoderLayer)]
    return hooks + [
        HookedEncoderLayer(block, layers_by_module[block.self_attn])
        for block in blocks
        if block.self_attn in layers_by_module
    ]


def _has_additive_bias(mask: Any) -> bool:
    """Return whether a mask adds numbers other than 0 and minus infinity to scores."""
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        return False
    return not bool(((mask == 0) | (mask == -torch.inf)).all())


def _as_hidden_key_mask(mask: Tensor | None) -> Tensor | None:
    """Return a mask that is True at hidden keys."""
    return mask if mask is None or not mask.is_floating_point() or _has_additive_bias(mask) else mask == -torch.inf


def _batch_first(module: Any, call: TorchMHACall) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the inputs (B, T, D), padded and with a batch axis, and the key padding mask (B, S)."""
    inputs, padding = (call.query, call.key, call.value), call.key_padding_mask
    if call.query.is_nested:
        query, key, value = (x.to_padded_tensor(0.0) for x in inputs)
        return query, key, value, ~_real_rows_mask(call.key)
    if call.query.ndim == 2:
        query, key, value = (x[None] for x in inputs)
        return query, key, value, None if padding is None else padding[None]
    query, key, value = inputs if module.batch_first else (x.transpose(0, 1) for x in inputs)
    return query, key, value, padding


def _real_rows_mask(nested: Tensor) -> Tensor:
    """Return the mask of real rows of a nested tensor after padding, (B, T)."""
    lengths = torch.tensor([len(x) for x in nested.unbind()], device=nested.device)
    return torch.arange(int(lengths.max()), device=nested.device) < lengths[:, None]


@torch.no_grad()
def _score_params(module: Any, call: TorchMHACall, q: Tensor, k: Tensor) -> ScoreParams:
    """Return the scale, mask and bias of a call. Extra keys are visible to every query."""
    H, d = q.shape[1], q.shape[3]
    mask: Mask | None = None
    bias: DenseBias | None = None
    if call.is_causal and call.key_padding_mask is None and not call.need_weights:
        mask = CausalMask(0)  # torch takes the hint, which is aligned with the upper left corner, instead of the mask
    else:
        scores = mask_scores_to_add(module, q, k.shape[2], call.attn_mask, call.key_padding_mask)
        if scores is not None:
            mask, bias = mask_and_bias(scores)
    return ScoreParams(d**-0.5, tuple(range(H)), mask, bias)
