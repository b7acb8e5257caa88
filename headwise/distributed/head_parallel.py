"""A model spread over the processes of a mesh, by heads."""

import hashlib

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.errors import HeadwiseError
from headwise.kernels.collectives import ProcessGroupOps
from headwise.model import check_model
from headwise.model.shard import ShardedTransformer, shard_of
from headwise.model.transformer import Transformer
from headwise.spec import ModelSpec
from headwise.spec.rank_partition import RankPartition, partition_model

HEADS_AXIS = "heads"  # the axis of a mesh along which heads are shared out


def shard(model: Transformer, mesh: DeviceMesh) -> ShardedTransformer:
    """What this process holds of a model: whole heads of each layer, a part of each MLP and of the vocabulary.

    Every process of the mesh calls it with the same model, and then calls what it gets as it would the whole. A mesh of
    several axes needs one that is named "heads". The model itself stays as it is; let go of it, and its memory is free.

    >>> import os, torch.distributed as dist
    >>> from headwise.spec import preset
    >>> store = dist.HashStore()
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("heads",))
    >>> part = shard(Transformer(preset("nano")), mesh)
    >>> part(torch.tensor([[72, 105, 33]])).shape
    torch.Size([1, 3, 256])
    >>> dist.destroy_process_group()
    """
    check_model(model)
    if model.is_sharded:
        raise HeadwiseError("this is a part of a model already; shard the whole one.")
    model.check_native("be spread over processes")
    partitions, collectives = partitions_on_mesh(mesh, model.spec)
    return shard_of(model, partitions, collectives)


def partitions_on_mesh(mesh: DeviceMesh, spec: ModelSpec) -> tuple[tuple[RankPartition, ...], ProcessGroupOps]:
    """Who holds what of a model on a mesh; all processes must mean the same model."""
    collectives = head_collectives(mesh)
    partitions = partition_model(spec, collectives.size)
    check_same_across_processes(collectives, spec.to_json(), "model")
    return partitions, collectives


def head_collectives(mesh: DeviceMesh) -> ProcessGroupOps:
    """The processes of a mesh that share heads."""
    if not isinstance(mesh, DeviceMesh):
        raise HeadwiseError(
            f'a mesh is made by torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("heads",)); got {mesh!r}.'
        )
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        return ProcessGroupOps(mesh.get_group())
    if HEADS_AXIS not in names:
        raise HeadwiseError(
            f"the mesh has the axes {', '.join(names) or 'without names'}; name the one for heads 'heads'."
        )
    return ProcessGroupOps(mesh.get_group(HEADS_AXIS))


def check_same_across_processes(collectives: ProcessGroupOps, value: str, name: str) -> None:
    """Refuse to go on where processes mean different things: what follows would never end."""
    digest = int.from_bytes(hashlib.sha256(value.encode()).digest()[:7], "big")
    signed_digest: Tensor = torch.tensor([digest, -digest])
    if collectives.size > 1 and int(collectives.all_reduce_max(signed_digest).sum()):
        raise HeadwiseError(f"the processes have different {name}s; give all of them the same.")
