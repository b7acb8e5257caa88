"""How processes share a training run: rows of a batch, weights, heads.

ddp          each has the whole model and reads its rows; gradients are averaged (https://arxiv.org/abs/2006.15704)
fsdp         the same, but weights, gradients and what the optimizer remembers are cut into shares; a block's weights are
             put together while it runs (https://arxiv.org/abs/2304.11277)
heads        each has whole heads, a part of each MLP and of the vocabulary, and reads all rows
fsdp+heads   some processes share heads; several such groups share rows, and weights among them
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from headwise.distributed.head_parallel import HEADS, shares_on
from headwise.distributed.process_group import Team
from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention
from headwise.model.shard import Shard, part_of
from headwise.model.shard_axes import axis_of
from headwise.model.transformer import Transformer

DATA = "data"
LAYOUTS = ("ddp", "fsdp", "heads", "fsdp+heads")


@dataclass(frozen=True, eq=False)
class TeamLayout:
    """Who shares what: `team` are those that read different rows; `mesh` is where weights or heads are cut, if they are."""

    kind: str
    team: Team
    mesh: DeviceMesh | None = None

    @staticmethod
    def of(kind: str, everyone: Team, head_processes: int = 2) -> "TeamLayout":
        """The layout that was asked for, on the processes there are; one alone shares nothing."""
        size, device = everyone.size, everyone.device.type
        if size == 1 or kind == "ddp":
            return TeamLayout(kind, everyone)
        if kind == "fsdp":
            return TeamLayout(kind, everyone, init_device_mesh(device, (size,), mesh_dim_names=(DATA,)))
        if kind == "heads":
            mesh = init_device_mesh(device, (size,), mesh_dim_names=(HEADS,))
            return TeamLayout(kind, Team(0, 1, everyone.device, world=everyone), mesh)
        if size % head_processes:
            raise HeadwiseError(
                f"{size} processes are no multiple of head_processes={head_processes}, which share heads; change one of them."
            )
        mesh = init_device_mesh(device, (size // head_processes, head_processes), mesh_dim_names=(DATA, HEADS))
        rows = mesh.get_group(DATA)
        return TeamLayout(kind, Team(mesh.get_local_rank(DATA), mesh.size(0), everyone.device, rows, everyone), mesh)

    @property
    def cuts(self) -> bool:
        """Whether a process holds less than the model."""
        return self.mesh is not None

    def arranged(self, model: Transformer) -> Transformer:
        """The model as this process is to hold it. A whole one that is cut by heads is copied and can be let go of."""
        if self.mesh is None:
            return model
        if "heads" in self.kind and not model.is_shared:
            shares, together = shares_on(self.mesh, model.spec)
            model = part_of(model, shares, together)
        return model.to(self.team.device)

    def cut(self, model: Transformer) -> None:
        """Cut weights into shares, block by block; what is not in a block stays together while the model runs."""
        if self.mesh is None or "fsdp" not in self.kind:
            return
        mesh = self.mesh if self.mesh.ndim == 1 else self.mesh[DATA]
        empty = {value for value in model.parameters() if not value.numel()}  # a layer may have no heads
        for block in (*model.encoder_blocks, *model.blocks):
            fully_shard(block, mesh=mesh, ignored_params=empty)
        fully_shard(model, mesh=mesh, ignored_params=empty, reshard_after_forward=False)

    def wrap(self, loss: nn.Module, unused: bool) -> nn.Module:
        """Let gradients be averaged over those that read different rows, where cutting weights does not see to it."""
        return loss if self.cuts else self.team.wrap(loss, unused)

    def length(self, parameters: Iterable[nn.Parameter], counted: dict[nn.Parameter, Tensor]) -> float:
        """The length of the gradient of the whole model; what several hold is counted once."""
        squares = torch.zeros((), dtype=torch.float64, device=self.team.device)
        for value in parameters:
            if value.grad is not None and value.grad.numel():
                slope = value.grad.to_local() if isinstance(value.grad, DTensor) else value.grad
                rows = slope.detach().double().square().flatten(1).sum(1) if slope.ndim > 1 else slope.double().square()
                squares += (rows * counted[value]).sum() if value in counted else rows.sum()
        return self.team.everyone.total(float(squares))[0] ** 0.5


def clip(parameters: Iterable[nn.Parameter], most: float, norm: Tensor) -> None:
    """Shorten gradients that are `norm` long to `most`."""
    parameters = list(parameters)
    if not any(isinstance(value, DTensor) for value in parameters):
        nn.utils.clip_grads_with_norm_(parameters, most, norm.float())
        return
    for value in parameters:
        if value.grad is not None:
            local(value.grad).mul_(min(1.0, most / (float(norm) + 1e-6)))


def settle(model: nn.Module) -> None:
    """After a pass without a backward one: what was put together for it is cut again."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def counted_rows(model: Transformer, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """For parameters of which several processes hold the same rows: 1 for each row this one counts, 0 for the others."""
    if not isinstance(model, Shard):
        return {}
    names = {value: name for name, value in model.named_parameters()}
    made: dict[nn.Parameter, Tensor] = {}
    for value in parameters:
        rows = _counted(model, names[value], value.shape[0]) if value in names and value.ndim else None
        if rows is not None:
            start = offset(value)
            made[value] = rows.to(value.device)[start : start + local(value).shape[0]]
    return made


def _counted(model: Shard, name: str, rows: int) -> Tensor | None:
    before, _, last = name.rpartition(".read.")
    if before:
        layer = model.get_submodule(before)
        assert isinstance(layer, MultiHeadAttention)
        share = layer.share
        if share is None or not share.repeats_keys:
            return None
        made = []
        for letter in last.rpartition("_")[0]:
            heads, channels = layer.read.sizes[letter]
            first = [not any(key in some for some in share.key_places[: share.together.rank]) for key in share.my_keys]
            made += [torch.tensor(first if letter != "q" else [True] * heads).repeat_interleave(channels)]
        return torch.cat(made).double()
    axis = axis_of(name, model.spec, model.shares)
    return None if axis is not None else torch.full((rows,), float(model.together.rank == 0), dtype=torch.float64)


def local(value: Tensor) -> Tensor:
    """What of a tensor is in this process."""
    return value.to_local() if isinstance(value, DTensor) else value


def offset(value: Tensor) -> int:
    """The first row of a tensor that is in this process."""
    if not isinstance(value, DTensor):
        return 0
    size, rank = value.device_mesh.size(), value.device_mesh.get_local_rank()
    return min(value.shape[0], rank * -(-value.shape[0] // size))  # as torch.chunk cuts
