"""A decode step, one new token per sequence, through the blocks of a decoder without the overhead of module calls.

In a small model the products of a step take less time than everything around them: module calls, checks and views for each
of hundreds of small operations. A `DecodeForward` looks up weights, products and their views once, and then runs the
operations of the modules on them. Attention itself is `MultiHeadAttention.attend_projected`, so gates, caches, listeners and
edits of hook points work as in every other call. Other steps run the modules: steps with hooks of `torch.nn.Module` or with
gradients, traced or compiled steps, other dtypes and devices, and models split over processes.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from headwise.cache import NO_CACHE
from headwise.heads import MultiHeadAttention
from headwise.heads.hook_point import HOOKS
from headwise.heads.projections import QKVProjection
from headwise.heads.quantized_layers import QuantizedLinear, QuantizedWeight, bind_quantized_linear
from headwise.kernels.matmul_tuner import MAX_DECODE_ROWS, Linear, MatmulTuner
from headwise.model.block import Block, BlockContext
from headwise.model.non_attention_layers import MLP

RowFunction = Callable[[Tensor], Tensor]  # (rows, ·) → (rows, ·)


class DecodeForwardCache:
    """The decode forwards of a model by number of rows and threads. Copies of a model start without any."""

    def __init__(self) -> None:
        self._forwards: dict[tuple[int, int], DecodeForward | None] = {}

    def __reduce__(self) -> tuple[type["DecodeForwardCache"], tuple[()]]:
        return DecodeForwardCache, ()

    def find(self, blocks: Iterable[Any], tuner: MatmulTuner, x: Tensor) -> "DecodeForward | None":
        """Return the forward of a step with these inputs, (B, 1, D), or None if the modules must run."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        rows = len(x)
        is_plain = type(x) is Tensor and not torch._C._are_functorch_transforms_active()
        is_plain = is_plain and x.dtype == torch.float32 and x.device.type == "cpu"
        if not is_plain or x.shape[1] != 1 or not 0 < rows <= MAX_DECODE_ROWS:
            return None
        key, blocks = (rows, torch.get_num_threads()), list(blocks)
        forward = self._forwards.get(key)
        if forward is None or forward.tuner is not tuner or forward.blocks != blocks or not forward.is_current():
            forward = DecodeForward(blocks, tuner, rows) if all(map(_is_supported, blocks)) else None
            self._forwards[key] = forward
        return None if forward is None or forward.must_call_modules() else forward


class DecodeForward:
    """Blocks of a decoder as functions of one token per sequence.

    Args:
        blocks: Blocks that `_is_supported` accepts.
        tuner: Matrix products of the model, tuned for this number of rows.
        rows: Number of sequences.
    """

    def __init__(self, blocks: list[Block], tuner: MatmulTuner, rows: int) -> None:
        self.blocks, self.tuner = blocks, tuner
        self._block_forwards = [_BlockForward(block, tuner, rows) for block in blocks]
        modules = [module for block in blocks for module in block.modules()]
        # modules and tensors that the functions above refer to
        self._members = [
            (members, name, member)
            for module in modules
            for members in (module._modules, module._parameters, module._buffers)
            for name, member in members.items()
            if member is not None
        ]
        self._tensors = [member for _, _, member in self._members if isinstance(member, Tensor)]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._quantized = [
            buffer
            for module in modules
            if isinstance(module, QuantizedWeight)
            for buffer in module.buffers(recurse=False)
        ]
        self._versions = [buffer._version for buffer in self._quantized]
        self._backends = [block.attention.backend for block in blocks]
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._dropouts = [block.dropout for block in blocks if block.dropout.p > 0]

    def is_current(self) -> bool:
        """Return False if a module, a tensor or a backend was replaced, or quantized weights were changed in place."""
        return (
            all(members.get(name) is member for members, name, member in self._members)
            and [tensor.data_ptr() for tensor in self._tensors] == self._addresses
            and [block.attention.backend for block in self.blocks] == self._backends
            and [buffer._version for buffer in self._quantized] == self._versions
        )

    def must_call_modules(self) -> bool:
        """Return True if a hook of torch must be called, or if a dropout is active."""
        return bool(any(self._hooks) or _has_any_global_hook()) or any(dropout.training for dropout in self._dropouts)

    def run(self, x: Tensor, context: BlockContext) -> Tensor:
        """Run the blocks on the residual stream: (B, 1, D) → (B, 1, D)."""
        x = x.flatten(1)  # (B, D)
        is_plain = context.mask is None and context.attention_mask is None and HOOKS.now is HOOKS
        for block in self._block_forwards:
            x = block.run(x, context, is_plain=is_plain)
        return x[:, None]


class _BlockForward:
    """One block with norms before its sub-layers: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, block: Block, tuner: MatmulTuner, rows: int) -> None:
        assert block.norm_mlp is not None
        attention = block.attention
        self.block, self.attention, self.hook_point = block, attention, attention.hook_point
        self.position_kind, self.has_policies = block.position_kind, bool(attention.spec.cache)
        self.attention_norm = None if block.norm_attention is None else _bind_norm(block.norm_attention)
        self.mlp_norm = _bind_norm(block.norm_mlp)
        self.qkv: Any = attention.qkv
        self.qkv_product = attention.qkv.bind(tuner, rows) if _is_plain_attention(attention) else None
        self.output = attention.output_projection.bind(tuner, rows)
        self.mlp = _bind_mlp(block.mlp, tuner, rows)
        self.plain_request = attention.single_query_request()

    def run(self, x: Tensor, context: BlockContext, *, is_plain: bool) -> Tensor:
        """Run the block: (B, D) → (B, D). `is_plain` is True without a mask, padding and hooks of hook points."""
        normed = x if self.attention_norm is None else self.attention_norm(x)
        z = self._attend(normed, context, is_plain=is_plain)  # (B, H, 1, e)
        x = x + (self.attention.output_projection(z)[:, 0] if self.output is None else self.output(z))
        return x + self.mlp(self.mlp_norm(x))

    def _attend(self, normed: Tensor, context: BlockContext, *, is_plain: bool) -> Tensor:
        address, attention = self.hook_point.address, self.attention
        assert context.cache is not None
        cache = context.cache.layers.get(address, NO_CACHE)
        request = self.plain_request if is_plain and cache.window is None else None
        if request is None:
            request = context.score_request(cache, 1, has_policies=self.has_policies)
        gate = context.gates.get(address) if context.gates else None
        table = context.rotary_tables[self.position_kind]
        if self.qkv_product is None or cache is NO_CACHE:
            return attention.compute_z(normed[:, None], request=request, positions=table, gate=gate, cache=cache)
        q, k, v = self.qkv.split_and_rotate(self.qkv_product(normed), table)
        if table is not None and table.query_factor is not None:
            q = table.scale_queries(q)
        if request is self.plain_request:
            return attention.attend_one(q, k, v, request, gate, cache)
        return attention.attend_projected(q, k, v, request, gate, cache)


def _is_supported(block: nn.Module) -> bool:
    """Return True for plain blocks of a decoder with norms before both sub-layers. Their parts may be of any kind."""
    if type(block) is not Block or type(block.attention) is not MultiHeadAttention:
        return False
    is_called_as_written = not any(
        "forward" in vars(module) or module._compiled_call_impl is not None for module in block.modules()
    )
    is_split = block.attention.partition is not None or block.mlp.collectives is not None
    return block.norm_placement == "pre" and block.cross is None and is_called_as_written and not is_split


def _is_plain_attention(attention: MultiHeadAttention) -> bool:
    """Return True if q, k and v are one product followed by rotation."""
    return type(attention.qkv) is QKVProjection and attention.q_norm is None and attention.output_gate is None


def _bind_norm(norm: nn.Module) -> RowFunction:
    """Return a norm as a function: (B, D) → (B, D)."""
    if type(norm) is not nn.RMSNorm or norm.weight is None or norm.weight.dtype != torch.float32:
        return norm
    eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
    width, zero = norm.weight.numel(), torch.zeros((), dtype=torch.float32, device="cpu")
    return partial(_rms_norm, norm.weight, math.sqrt(width), torch.full_like(zero, math.sqrt(width * eps)), zero)


def _rms_norm(weight: Tensor, root_width: float, offset: Tensor, zero: Tensor, x: Tensor) -> Tensor:
    """Compute x · √D / √(‖x‖² + D · eps) · weight in four operations, half of those of `torch.rms_norm` on a CPU."""
    length = torch.linalg.vector_norm(x, 2, -1, True)  # (B, 1)
    return torch.addcdiv(zero, x, torch.hypot(length, offset), value=root_width).mul_(weight)


def _bind_mlp(mlp: nn.Module, tuner: MatmulTuner, rows: int) -> RowFunction:
    """Return the MLP as a function: (B, D) → (B, D). Its result is a new tensor."""
    if type(mlp) is not MLP:
        return mlp
    down, activation = _bind_linear(mlp.down, tuner, rows), mlp.activation
    if mlp.gate is None:
        up = _bind_linear(mlp.up, tuner, rows)
        return lambda x: down(activation(up(x)))
    joint = None if mlp.joint_weights is None else bind_quantized_linear(tuner, mlp.joint_weights, rows)
    if joint is not None:

        def run_joint(x: Tensor) -> Tensor:
            product = joint(x)  # (B, 2 · width)
            gate, up = product.chunk(2, 1)
            return down(activation(gate).mul_(up))

        return run_joint
    gate, up = _bind_linear(mlp.gate, tuner, rows), _bind_linear(mlp.up, tuner, rows)
    return lambda x: down(activation(gate(x)).mul_(up(x)))


def _bind_linear(linear: nn.Module, tuner: MatmulTuner, rows: int) -> RowFunction:
    """Return a linear layer as a function: (B, in) → (B, out)."""
    bound = None
    if type(linear) is Linear:
        bound = tuner.bind(linear.weight, linear.bias, rows)
    elif type(linear) is QuantizedLinear:
        bound = bind_quantized_linear(tuner, (linear,), rows, linear.bias)
    return linear if bound is None else bound
