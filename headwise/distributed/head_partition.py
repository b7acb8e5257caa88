"""Tensor parallelism over heads: several processes hold heads of one layer and add up their outputs.

`HeadPartition` says which process holds which heads. Callers pass masks, biases and gates for all heads, and it selects those
of this process. The hook point of the layer shows the heads of this process. `GatheredLayer` shows the heads of all.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.distributed.process_group import ProcessGroupOps
from headwise.heads.head import OutputProjectionProtocol
from headwise.heads.hook_point import AttentionCall, Edit, HookPoint, Listener, expand_like
from headwise.kernels import Bias, Mask, ScoreParams, ScoreRequest
from headwise.kernels.score_bias import DenseBias
from headwise.spec import AttentionSpec

if TYPE_CHECKING:
    from headwise.heads.attention import MultiHeadAttention


class HeadPartition:
    """The heads of one layer that each process holds.

    Attributes:
        collectives: The processes that share the heads.
        full_spec: The spec of the layer with all heads.
        head_indices, kv_indices: Positions of each process's heads on the full head axis, and on the KV head axis.
        own_heads, own_kv_heads: The positions of this process.
    """

    def __init__(
        self, collectives: ProcessGroupOps, full_spec: AttentionSpec, heads_by_process: Sequence[tuple[int, ...]]
    ) -> None:
        self.collectives, self.full_spec = collectives, full_spec
        kv_ids_by_process = [full_spec.keep_heads(ids).kv_head_ids for ids in heads_by_process]
        self.head_indices = [[full_spec.head_ids.index(number) for number in ids] for ids in heads_by_process]
        self.kv_indices = [[full_spec.kv_head_ids.index(number) for number in ids] for ids in kv_ids_by_process]
        self.own_heads, self.own_kv_heads = self.head_indices[collectives.rank], self.kv_indices[collectives.rank]

    @property
    def has_replicated_kv(self) -> bool:
        """Whether several processes hold a copy of the same KV head."""
        return sum(map(len, self.kv_indices)) > len(self.full_spec.kv_head_ids)

    def is_first_holder(self, kv_index: int) -> bool:
        """Return whether no process of lower rank holds a KV head."""
        return not any(kv_index in indices for indices in self.kv_indices[: self.collectives.rank])

    def gather_heads(self, x: Tensor, dim: int = 1) -> Tensor:
        """Gather all heads, in their order."""
        return self._gather(x, dim, self.head_indices)

    def gather_kv(self, x: Tensor, dim: int = 1) -> Tensor:
        """Gather all KV heads, in their order. Copies come from the lowest rank."""
        return self._gather(x, dim, self.kv_indices)

    def local_slice(self, x: Tensor, dim: int) -> Tensor:
        """Select the heads of this process from all heads."""
        return self.collectives.local_slice(x, dim, self.head_indices)

    def local_gate(self, gate: Tensor) -> Tensor:
        """Select the gates of the heads of this process: (H,) or (B, H)."""
        fits = isinstance(gate, Tensor) and gate.ndim in (1, 2) and gate.shape[-1] == len(self.full_spec.head_ids)
        return self.local_slice(gate, gate.ndim - 1) if fits else gate  # apply_gate checks the shape

    def local_mask(self, mask: Mask | None) -> Mask | None:
        """Select the mask of the heads of this process."""
        if not isinstance(mask, Mask) or not self.own_heads:  # no head of this process uses it
            return mask if self.own_heads else None
        return mask if mask.leading_shape()[1] == 1 else mask.for_heads(self.own_heads)

    def local_bias(self, bias: Bias | Tensor | None) -> Bias | Tensor | None:
        """Select the bias of the heads of this process."""
        bias = DenseBias(bias) if isinstance(bias, Tensor) and bias.ndim == 4 else bias
        if not isinstance(bias, Bias) or not self.own_heads:
            return bias if self.own_heads else None
        return bias if bias.leading_shape()[1] == 1 else bias.for_heads(self.own_heads)

    def _gather(self, x: Tensor, dim: int, indices: Sequence[Sequence[int]]) -> Tensor:
        gathered = self.collectives.gather(x, dim, [len(process_indices) for process_indices in indices])
        concatenated = [index for process_indices in indices for index in process_indices]
        permutation = [concatenated.index(index) for index in range(len(set(concatenated)))]
        if permutation == list(range(gathered.shape[dim])):
            return gathered
        return gathered.index_select(dim, torch.tensor(permutation, dtype=torch.long, device=x.device))

    @contextmanager
    def fork_rng_per_rank(self, device: torch.device) -> Iterator[None]:
        """Use different random numbers in each process inside the context, and equal ones after it."""
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_rng_device_type(device)):
            torch.manual_seed(seed + self.collectives.rank)
            yield

    def sum_kv_grads_in_backward(self, weight: Tensor, projections: str, sizes: dict[str, tuple[int, int]]) -> Tensor:
        """Return a weight or bias of some projections, unchanged. Gradients of copied KV heads are summed."""
        return _SyncKVGrad.apply(weight, self, projections, sizes)  # pyright: ignore[reportReturnType]

    def score_params(
        self, layer: "MultiHeadAttention", tensors: tuple[Tensor, Tensor, Tensor], request: ScoreRequest
    ) -> "LocalHeadScoreParams":
        """Build the score params of the heads of this process from a request for all heads."""
        return sharded_score_params(layer, self, tensors, request)

    def gathered_layer(self, layer: "MultiHeadAttention") -> "GatheredLayer":
        """Return a view of the layer with the heads of all processes."""
        return GatheredLayer(layer, layer.hook_point, self)


def _rng_device_type(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type


class _SyncKVGrad(torch.autograd.Function):
    """Identity that sums the gradients of all copies of a KV head, so that the copies stay equal."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, partition: HeadPartition, projections: str, sizes: dict[str, tuple[int, int]]
    ) -> Tensor:
        ctx.partition, ctx.projections, ctx.sizes = partition, projections, sizes
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        partition, rows = (
            ctx.partition,
            [ctx.sizes[projection][0] * ctx.sizes[projection][1] for projection in ctx.projections],
        )
        grads = []
        for projection, piece in zip(ctx.projections, grad_output.split(rows), strict=True):
            if projection != "q":
                channels, own_kv = (
                    ctx.sizes[projection][1],
                    torch.tensor(partition.own_kv_heads, dtype=torch.long, device=grad_output.device),
                )
                full = piece.new_zeros(len(partition.full_spec.kv_head_ids), channels, *piece.shape[1:])
                full.index_copy_(0, own_kv, piece.unflatten(0, (len(partition.own_kv_heads), channels)))
                piece = partition.collectives.all_reduce_sum(full).index_select(0, own_kv).flatten(0, 1)
            grads.append(piece)
        return torch.cat(grads), None, None, None


@dataclass(frozen=True, eq=False)
class LocalHeadScoreParams(ScoreParams):
    """Score params of the local heads, with a function that builds those of all heads from gathered q, k and v."""

    make_full_params: Callable[[Tensor, Tensor, Tensor], ScoreParams] | None = None


def sharded_score_params(
    layer: "MultiHeadAttention", partition: HeadPartition, tensors: tuple[Tensor, Tensor, Tensor], request: ScoreRequest
) -> LocalHeadScoreParams:
    """Build the score params of the local heads of a sharded layer from a request for all heads."""
    (q, k, _), bias, num_keys = tensors, request.bias, request.num_keys
    for argument in (request.mask, DenseBias(bias) if isinstance(bias, Tensor) else bias):
        if isinstance(argument, Mask | Bias):
            argument.check(
                len(q), len(partition.full_spec.head_ids), q.shape[2], k.shape[2] if num_keys is None else num_keys
            )
    local_request = replace(
        request,
        mask=partition.local_mask(request.mask),
        bias=partition.local_bias(bias),
        policies=tuple(request.policies[i] for i in partition.own_kv_heads) if request.policies else (),
    )
    local_params = layer.build_score_params(layer.spec, layer.sink, layer.position_bias, tensors, local_request)

    def make_full_params(q: Tensor, k: Tensor, v: Tensor) -> ScoreParams:
        sink, position_bias = (
            None if x is None else partition.gather_heads(x, 0) for x in (layer.sink, layer.position_bias)
        )
        return layer.build_score_params(partition.full_spec, sink, position_bias, (q, k, v), request)

    return LocalHeadScoreParams(**vars(local_params), make_full_params=make_full_params)


class GatheredLayer(HookPoint):
    """A view of a layer with the heads of all processes: hook point, weights and spec.

    Example: layer 0 has heads 0 to 4. Heads 0 to 3 use KV head 0, and head 4 uses KV head 1. Two processes share them:

                      rank 0                  rank 1                   GatheredLayer, in every process
        heads         0  1  4                 2  3                     0  1  2  3  4
        KV heads      0  1                    0 (a copy)               0  1 (the first copy)
        q, z          (B, 3, T, ·)            (B, 2, T, ·)       →     (B, 5, T, ·)
        k, v          (B, 2, S, ·)            (B, 1, S, ·)       →     (B, 2, S, ·)
        W_Q, W_O      3 heads                 2 heads            →     5 heads

    Gathered on access: `W_O`, `weight`, `bias` and `gate`. They are copies, not live views.
    Gathered in each forward pass: q, k, v and z while a listener is open, and z while a replacement is open.
    Not gathered: gates of `scaled`. Each process applies those of its own heads.

    Gathering is a collective operation, so all processes must access, listen and edit in the same order. Edits and listeners
    are opened at the layer's own hook point, which shows local heads only, and share its key.
    """

    def __init__(self, layer: "MultiHeadAttention", local_hook_point: HookPoint, partition: HeadPartition) -> None:
        super().__init__(local_hook_point.address, partition.full_spec.head_ids, self, partition.full_spec.window)
        self.layer, self.local_hook_point, self.partition = layer, local_hook_point, partition
        self.spec, self.key = partition.full_spec, local_hook_point.key
        # The protocol of a layer: this object is the hook point and the q, k and v projections of all heads.
        self.hook_point = self.qkv = self

    def __deepcopy__(self, memo: dict) -> "GatheredLayer":
        """Return the view of the copied layer, with the hook point of the copy."""
        return GatheredLayer(*copy.deepcopy((self.layer, self.local_hook_point), memo), self.partition)

    @property
    def output_projection(self) -> OutputProjectionProtocol:
        """The output projection of the local heads, for its dtype and device. `W_O` has all heads."""
        return self.layer.output_projection

    @property
    def head_output_weights(self) -> Tensor:
        """W_O of all heads, (H, e, D). It is a copy."""
        return self.partition.gather_heads(self.layer.output_projection.head_output_weights, 0)

    @property
    def gate(self) -> Tensor | None:
        """Learned scalar of each head, (H,)."""
        return None if self.layer.gate is None else self.partition.gather_heads(self.layer.gate, 0)

    def weight_by_head(self, projection: str) -> Tensor:
        """Gather the weights of q, k or v: (heads, channels, width)."""
        return self._gather_projection(self.layer.qkv.weight_by_head(projection), projection)

    def bias_by_head(self, projection: str) -> Tensor | None:
        """Gather the biases of q, k or v: (heads, channels)."""
        bias = self.layer.qkv.bias_by_head(projection)
        return None if bias is None else self._gather_projection(bias, projection)

    def local_z(self, z: Tensor) -> Tensor:
        """Select z of the heads of this process from z of all heads, (B, H, T, e)."""
        return self.partition.local_slice(z, 1)

    @contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Show every call to a listener, with q, k, v and z of all heads."""
        with super().listen(lambda call: listener(self._gather_call(call))):
            yield

    @contextmanager
    def scaled(self, gate: Tensor) -> Iterator[None]:
        """Scale the z of each head: (H,) or (B, H)."""
        with super().scaled(self.partition.local_gate(gate)):
            yield

    @contextmanager
    def replaced(self, value: Tensor | Edit) -> Iterator[None]:
        """Replace z by a tensor that broadcasts to (B, H, T, e), or by a function of the z of all heads."""
        edit: Edit = value if callable(value) else lambda z: expand_like(value, z)

        def edit_gathered(z: Tensor) -> Tensor:
            gathered = self.partition.gather_heads(z)
            edited_z = edit(gathered)
            self.check_edit_shape(gathered, edited_z)
            return self.local_z(edited_z)

        with super().replaced(edit_gathered):
            yield

    def _gather_projection(self, x: Tensor, projection: str) -> Tensor:
        return self.partition.gather_heads(x, 0) if projection == "q" else self.partition.gather_kv(x, 0)

    def _gather_call(self, call: AttentionCall) -> AttentionCall:
        q, z = self.partition.gather_heads(call.q), self.partition.gather_heads(call.z)
        k, v = self.partition.gather_kv(call.k), self.partition.gather_kv(call.v)
        assert isinstance(call.params, LocalHeadScoreParams)
        assert call.params.make_full_params is not None
        token_gate = None if call.token_gate is None else self.partition.gather_heads(call.token_gate)
        return AttentionCall(self, q, k, v, call.params.make_full_params(q, k, v), z, token_gate)
