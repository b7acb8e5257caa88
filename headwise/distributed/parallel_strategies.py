"""Parallel strategies of a training run: rows of a batch, weights and heads can be distributed over processes.

ddp          each process has the full model and processes its own rows; gradients are averaged
             (https://arxiv.org/abs/2006.15704)
fsdp         as ddp, but weights, gradients and optimizer state are sharded; the weights of a block are gathered while it runs
             (https://arxiv.org/abs/2304.11277)
heads        each process has complete heads, a part of each MLP and of the vocabulary, and processes all rows
fsdp+heads   groups of processes share heads; the groups share rows, and weights are sharded over the groups
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from headwise.distributed.head_partition import HeadPartition
from headwise.distributed.model_shard import HEADS_AXIS, ShardedTransformer, partitions_and_group_ops, shard_of
from headwise.distributed.process_group import ProcessGroup
from headwise.distributed.shard_axes import shard_axis_of
from headwise.errors import ArgumentError
from headwise.heads import MultiHeadAttention
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model.transformer import Transformer

DATA_AXIS = "data"


@dataclass(frozen=True, eq=False)
class ParallelStrategy:
    """Distribution of a training run over processes.

    Attributes:
        kind: ddp, fsdp, heads or fsdp+heads.
        process_group: Processes that process different rows.
        mesh: Device mesh along which weights or heads are split. None if each process has the full model.
    """

    kind: str
    process_group: ProcessGroup
    mesh: DeviceMesh | None = None

    @staticmethod
    def of(kind: str, world: ProcessGroup, head_processes: int = 2) -> "ParallelStrategy":
        """Return the strategy of this kind on the processes of `world`. A single process has the full model."""
        size, device = world.size, world.device.type
        if size == 1 or kind == "ddp":
            return ParallelStrategy(kind, world)
        if kind == "fsdp":
            return ParallelStrategy(kind, world, init_device_mesh(device, (size,), mesh_dim_names=(DATA_AXIS,)))
        if kind == "heads":
            mesh = init_device_mesh(device, (size,), mesh_dim_names=(HEADS_AXIS,))
            return ParallelStrategy(kind, ProcessGroup(0, 1, world.device, world=world), mesh)
        if size % head_processes:
            raise ArgumentError(
                f"head_processes: it must divide the number of processes, {size}. Got {head_processes}. Change one of them."
            )
        mesh = init_device_mesh(
            device, (size // head_processes, head_processes), mesh_dim_names=(DATA_AXIS, HEADS_AXIS)
        )
        data_group = mesh.get_group(DATA_AXIS)
        return ParallelStrategy(
            kind, ProcessGroup(mesh.get_local_rank(DATA_AXIS), mesh.size(0), world.device, data_group, world), mesh
        )

    @property
    def is_sharded(self) -> bool:
        """Whether a process holds only a part of the model."""
        return self.mesh is not None

    def place_model(self, model: Transformer) -> Transformer:
        """Return the model on the device of this process. If heads are split, return a copy of the local part."""
        if self.mesh is None:
            return model
        if "heads" in self.kind and not model.is_sharded:
            partitions, collectives = partitions_and_group_ops(self.mesh, model.spec)
            model = shard_of(model, partitions, collectives)
        return model.to(self.process_group.device)

    def apply_fsdp(self, model: Transformer) -> None:
        """Shard the weights with FSDP, block by block. Weights outside of blocks stay gathered while the model runs."""
        if self.mesh is None or "fsdp" not in self.kind:
            return
        mesh = self.mesh if self.mesh.ndim == 1 else self.mesh[DATA_AXIS]
        # A layer may have no heads, and FSDP does not support empty parameters.
        empty_parameters = {parameter for parameter in model.parameters() if not parameter.numel()}
        for block in (*model.encoder_blocks, *model.blocks):
            fully_shard(block, mesh=mesh, ignored_params=empty_parameters)
        fully_shard(model, mesh=mesh, ignored_params=empty_parameters, reshard_after_forward=False)

    def wrap_ddp(self, loss: nn.Module, find_unused: bool) -> nn.Module:
        """Average gradients over processes with different rows, if FSDP does not do it."""
        return loss if self.is_sharded else self.process_group.wrap_ddp(loss, find_unused)

    def grad_norm(self, parameters: Iterable[nn.Parameter], row_masks: dict[nn.Parameter, Tensor]) -> float:
        """Return the gradient norm of the full model. Replicated parameters count once."""
        squares = torch.zeros((), dtype=torch.float64, device=self.process_group.device)
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.numel():
                grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                row_squares = (
                    to_float64(grad.detach()).square().flatten(1).sum(1) if grad.ndim > 1 else to_float64(grad).square()
                )
                squares += (row_squares * row_masks[parameter]).sum() if parameter in row_masks else row_squares.sum()
        return self.process_group.all_processes.all_reduce_values(float(squares))[0] ** 0.5


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale gradients of norm `norm` down to `max_norm`."""
    parameters = list(parameters)
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.float())
        return
    for parameter in parameters:
        if parameter.grad is not None:
            local_tensor(parameter.grad).mul_(min(1.0, max_norm / (float(norm) + 1e-6)))


def reshard(model: nn.Module) -> None:
    """Shard the weights again that FSDP gathered in a forward pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def unique_row_mask(model: Transformer, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Return a mask for parameters with replicated rows: 1 at rows that this process counts, 0 at others."""
    if not isinstance(model, ShardedTransformer):
        return {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    row_masks: dict[nn.Parameter, Tensor] = {}
    for parameter in parameters:
        rows = (
            _unique_rows(model, names[parameter], parameter.shape[0]) if parameter in names and parameter.ndim else None
        )
        if rows is not None:
            start = local_offset(parameter)
            row_masks[parameter] = rows.to(parameter.device)[start : start + local_tensor(parameter).shape[0]]
    return row_masks


def _unique_rows(model: ShardedTransformer, name: str, rows: int) -> Tensor | None:
    layer_name, _, parameter_name = name.rpartition(".qkv.")
    if layer_name:
        layer = model.get_submodule(layer_name)
        assert isinstance(layer, MultiHeadAttention)
        partition = layer.partition
        assert isinstance(partition, HeadPartition)
        if not partition.has_replicated_kv:
            return None
        row_masks = []
        for projection in parameter_name.rpartition("_")[0]:
            heads, channels = layer.qkv.sizes[projection]
            is_first_holder = [partition.is_first_holder(kv_index) for kv_index in partition.own_kv_heads]
            row_masks += [
                torch.tensor(is_first_holder if projection != "q" else [True] * heads).repeat_interleave(channels)
            ]
        return to_float64(torch.cat(row_masks))
    axis = shard_axis_of(name, model.spec, model.partitions)
    return None if axis is not None else torch.full((rows,), float(model.collectives.rank == 0), dtype=torch.float64)


def local_tensor(value: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    return value.to_local() if isinstance(value, DTensor) else value


def local_offset(value: Tensor) -> int:
    """Return the first row of a tensor that is in this process."""
    if not isinstance(value, DTensor):
        return 0
    size, rank = value.device_mesh.size(), value.device_mesh.get_local_rank()
    return min(value.shape[0], rank * -(-value.shape[0] // size))  # the split of torch.chunk
