"""A layer whose heads are held by several processes: each has some, whole, and all write into one stream.

What a caller gives for heads (a mask for each, a bias, gates) is for all of them; each process takes its own. `HeadPartition`
says who has which. A layer's own hook point shows the heads that are here; `GatheredHookPoint` shows all of them, in every
process, and `GatheredLayer` their weights: whoever asks them must do so in every process, for they are fetched from where
they are.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.heads.build_score_params import ScoreRequest, layer_score_params
from headwise.heads.hook_point import AttentionCall, Edit, HookPoint, Listener, expand_like
from headwise.kernels import Bias, Mask, ScoreParams
from headwise.kernels.collectives import ProcessGroupOps
from headwise.kernels.score_bias import DenseBias
from headwise.spec import AttentionSpec

if TYPE_CHECKING:
    from headwise.heads.attention import MultiHeadAttention


class HeadPartition:
    """Who holds which heads of one layer. `full_spec` is the layer with all of them.

    `heads_by_process` are the heads of each process by number.
    """

    def __init__(
        self, collectives: ProcessGroupOps, full_spec: AttentionSpec, heads_by_process: Sequence[tuple[int, ...]]
    ) -> None:
        self.collectives, self.full_spec = collectives, full_spec
        kv_ids_by_process = [full_spec.keep_heads(ids).kv_head_ids for ids in heads_by_process]
        # on the whole head axis
        self.head_indices = [[full_spec.head_ids.index(number) for number in ids] for ids in heads_by_process]
        self.kv_indices = [[full_spec.kv_head_ids.index(number) for number in ids] for ids in kv_ids_by_process]
        self.own_heads, self.own_kv_heads = self.head_indices[collectives.rank], self.kv_indices[collectives.rank]

    @cached_property
    def has_replicated_kv(self) -> bool:
        """Whether some key head is held by two processes."""
        return sum(map(len, self.kv_indices)) > len(self.full_spec.kv_head_ids)

    def gather_heads(self, x: Tensor, dim: int = 1) -> Tensor:
        """All heads, in their order, from the heads that are here."""
        return self._gather(x, dim, self.head_indices)

    def gather_kv(self, x: Tensor, dim: int = 1) -> Tensor:
        """All key heads, in their order; of one that several hold, the first copy."""
        return self._gather(x, dim, self.kv_indices)

    def local_slice(self, x: Tensor, dim: int) -> Tensor:
        """The heads that are here, from all of them."""
        return self.collectives.local_slice(x, dim, self.head_indices)

    def local_gate(self, gate: Tensor) -> Tensor:
        """The gates of the heads that are here, from those of all: (H,) or (B, H)."""
        fits = isinstance(gate, Tensor) and gate.ndim in (1, 2) and gate.shape[-1] == len(self.full_spec.head_ids)
        return self.local_slice(gate, gate.ndim - 1) if fits else gate  # what does not fit is refused by who applies it

    def local_mask(self, mask: Mask | None) -> Mask | None:
        """A mask for the heads that are here."""
        if not isinstance(mask, Mask) or not self.own_heads:  # without heads nobody looks
            return mask if self.own_heads else None
        return mask if mask.leading_shape()[1] == 1 else mask.for_heads(self.own_heads)

    def local_bias(self, bias: Bias | Tensor | None) -> Bias | Tensor | None:
        """A bias for the heads that are here."""
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
    def local_rng(self, device: torch.device) -> Iterator[None]:
        """What is drawn inside is each process's own; afterwards all draw alike again, however much that was."""
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_rng_device_type(device)):
            torch.manual_seed(seed + self.collectives.rank)
            yield

    def local_rng_if(self, enabled: bool, device: torch.device) -> Any:
        """The same where something is drawn."""
        return self.local_rng(device) if enabled else nullcontext()

    def sync_kv_grad(self, weight: Tensor, projections: str, sizes: dict[str, tuple[int, int]]) -> Tensor:
        """The weight or bias of some letters, as it is; its gradient, for keys that several hold, is that of all of them."""
        return _SyncKVGrad.apply(weight, self, projections, sizes) if self.has_replicated_kv else weight  # pyright: ignore


def _rng_device_type(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type


class _SyncKVGrad(torch.autograd.Function):
    """Copies of a key head are one: what is learned about it anywhere is learned everywhere."""

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
class ShardedScoreParams(ScoreParams):
    """The score params of the heads that are here, and how those of all heads are made, from the q, k and v of all."""

    make_full_params: Callable[[Tensor, Tensor, Tensor], ScoreParams] | None = None


def sharded_score_params(
    layer: "MultiHeadAttention", partition: HeadPartition, tensors: tuple[Tensor, Tensor, Tensor], request: ScoreRequest
) -> ShardedScoreParams:
    """The score params of a call at a layer that is shared; what is given is about all heads."""
    mask, bias, policies, row_starts, num_keys = request
    q, k, _ = tensors
    for argument in (mask, DenseBias(bias) if isinstance(bias, Tensor) else bias):
        if isinstance(argument, Mask | Bias):
            argument.check(
                len(q), len(partition.full_spec.head_ids), q.shape[2], k.shape[2] if num_keys is None else num_keys
            )
    local_request = (
        partition.local_mask(mask),
        partition.local_bias(bias),
        tuple(policies[i] for i in partition.own_kv_heads) if policies else (),
    )
    local_params = layer_score_params(
        layer.spec, layer.sink, layer.position_bias, tensors, (*local_request, row_starts, num_keys), layer.training
    )

    def make_full_params(q: Tensor, k: Tensor, v: Tensor) -> ScoreParams:
        sink, position_bias = (
            None if x is None else partition.gather_heads(x, 0) for x in (layer.sink, layer.position_bias)
        )
        return layer_score_params(partition.full_spec, sink, position_bias, (q, k, v), request, layer.training)

    return ShardedScoreParams(**vars(local_params), make_full_params=make_full_params)


class GatheredHookPoint(HookPoint):
    """A hook point with all heads of a layer, wherever they are. Listened to and edited in every process alike."""

    def __init__(self, layer: "MultiHeadAttention", partition: HeadPartition) -> None:
        super().__init__(
            layer.hook_point.address, partition.full_spec.head_ids, layer.output_projection, partition.full_spec.window
        )
        self.layer, self.partition = layer, partition

    @property
    def W_O(self) -> Tensor:
        """The heads' output projections, (H, e, D): fetched, so not live."""
        return self.partition.gather_heads(self.layer.output_projection.head_weights, 0)

    @property
    def is_active(self) -> bool:
        """Whether somebody listens or edits there now."""
        return self.layer.hook_point.is_active

    @property
    def has_listeners(self) -> bool:
        """Whether somebody listens there now."""
        return self.layer.hook_point.has_listeners

    @property
    def has_edits(self) -> bool:
        """Whether what passes is changed now."""
        return self.layer.hook_point.has_edits

    def local_z(self, z: Tensor) -> Tensor:
        """Of z of all heads, (B, H, T, e), that of the heads this process has."""
        return self.partition.local_slice(z, 1)

    @contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        """Show every call to a listener, with the q, k, v and z of all heads."""
        with self.layer.hook_point.listen(lambda call: listener(self._gather_call(call))):
            yield

    @contextmanager
    def scaled(self, gate: Tensor) -> Iterator[None]:
        """Scale each head's z: (H,) or (B, H)."""
        with self.layer.hook_point.scaled(self.partition.local_gate(gate)):
            yield

    @contextmanager
    def replaced(self, value: Tensor | Edit) -> Iterator[None]:
        """Put another z in: a tensor that broadcasts to (B, H, T, e), or a function of the z of all heads."""
        edit: Edit = value if callable(value) else lambda z: expand_like(value, z)

        def edited(z: Tensor) -> Tensor:
            gathered = self.partition.gather_heads(z)
            edited_z = edit(gathered)
            self.check_edit_shape(gathered, edited_z)
            return self.local_z(edited_z)

        with self.layer.hook_point.replaced(edited):
            yield

    def _gather_call(self, call: AttentionCall) -> AttentionCall:
        q, z = self.partition.gather_heads(call.q), self.partition.gather_heads(call.z)
        k, v = self.partition.gather_kv(call.k), self.partition.gather_kv(call.v)
        assert isinstance(call.params, ShardedScoreParams)
        assert call.params.make_full_params is not None
        return AttentionCall(self, q, k, v, call.params.make_full_params(q, k, v), z)


@dataclass(frozen=True, eq=False)
class GatheredLayer:
    """All heads of a layer as an object that heads can be taken from; weights are fetched when asked for, so not live."""

    layer: "MultiHeadAttention"
    partition: HeadPartition

    def __deepcopy__(self, memo: dict) -> "GatheredLayer":
        return GatheredLayer(copy.deepcopy(self.layer, memo), self.partition)  # with a hook point of its own

    @property
    def hook_point(self) -> HookPoint:
        """Where calls of all heads are seen."""
        return self._hook_point

    @cached_property
    def _hook_point(self) -> GatheredHookPoint:
        return GatheredHookPoint(self.layer, self.partition)

    @property
    def spec(self) -> AttentionSpec:
        """The sizes of the whole layer."""
        return self.partition.full_spec

    @property
    def qkv(self) -> "GatheredQKV":
        """q, k and v."""
        return GatheredQKV(self.layer, self.partition)

    @property
    def output_projection(self) -> "GatheredOutput":
        """W_O."""
        return GatheredOutput(self.layer, self.hook_point)

    @property
    def gate(self) -> Tensor | None:
        """A learned scalar per head, (H,)."""
        return None if self.layer.gate is None else self.partition.gather_heads(self.layer.gate, 0)

    @property
    def b_O(self) -> Tensor | None:
        """The output bias, (D,): every process has it."""
        return self.layer.b_O


@dataclass(frozen=True, eq=False)
class GatheredQKV:
    """The projections of all heads."""

    layer: "MultiHeadAttention"
    partition: HeadPartition

    def weight(self, projection: str) -> Tensor:
        """(heads, channels, width)"""
        return self._gather(self.layer.qkv.weight(projection), projection)

    def bias(self, projection: str) -> Tensor | None:
        """(heads, channels)"""
        bias = self.layer.qkv.bias(projection)
        return None if bias is None else self._gather(bias, projection)

    def _gather(self, x: Tensor, projection: str) -> Tensor:
        return self.partition.gather_heads(x, 0) if projection == "q" else self.partition.gather_kv(x, 0)


@dataclass(frozen=True, eq=False)
class GatheredOutput:
    """The output projection of all heads."""

    layer: "MultiHeadAttention"
    hook_point: HookPoint

    @property
    def head_weights(self) -> Tensor:
        """(H, e, D)"""
        return self.hook_point.W_O

    @property
    def weight(self) -> Tensor:
        """A tensor of the layer's dtype and device: its own."""
        return self.layer.output_projection.weight
