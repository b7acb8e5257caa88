"""A model spread over the processes of a mesh, by heads."""

import hashlib

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.errors import HeadwiseError
from headwise.kernels.collectives import Together
from headwise.model import check_model
from headwise.model.shard import Shard, part_of
from headwise.model.transformer import Transformer
from headwise.spec import ModelSpec
from headwise.spec.partition import Share, share_out

HEADS = "heads"  # the axis of a mesh along which heads are shared out


def shard(model: Transformer, mesh: DeviceMesh) -> Shard:
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
    if model.is_shared:
        raise HeadwiseError("this is a part of a model already; shard the whole one.")
    model.check_own("be spread over processes")
    shares, together = shares_on(mesh, model.spec)
    return part_of(model, shares, together)


def shares_on(mesh: DeviceMesh, spec: ModelSpec) -> tuple[tuple[Share, ...], Together]:
    """Who holds what of a model on a mesh; all processes must mean the same model."""
    together = together_on(mesh)
    shares = share_out(spec, together.size)
    check_same(together, spec.to_json(), "model")
    return shares, together


def together_on(mesh: DeviceMesh) -> Together:
    """The processes of a mesh that share heads."""
    if not isinstance(mesh, DeviceMesh):
        raise HeadwiseError(
            f'a mesh is made by torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("heads",)); got {mesh!r}.'
        )
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        return Together(mesh.get_group())
    if HEADS not in names:
        raise HeadwiseError(
            f"the mesh has the axes {', '.join(names) or 'without names'}; name the one for heads 'heads'."
        )
    return Together(mesh.get_group(HEADS))


def check_same(together: Together, what: str, name: str) -> None:
    """Refuse to go on where processes mean different things: what follows would never end."""
    digest = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "big")
    mine: Tensor = torch.tensor([digest, -digest])
    if together.size > 1 and int(together.largest(mine).sum()):
        raise HeadwiseError(f"the processes have different {name}s; give all of them the same.")
