"""Things that branches make, heads of a layer or groups of a convolution: do gradients run through each by itself?"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.model import ModelProtocol

# Outputs up to so many give the whole Jacobian; of more, so many random mixtures are followed back.
MAX_FULL_OUTPUTS, NUM_DIRECTIONS = 256, 8


@dataclass(frozen=True)
class BranchedFunction:
    """Something that branches make: `run` gives what was read, what came out and each branch's part of it."""

    run: Callable[[], tuple[Tensor, Tensor, list[Tensor]]]
    weights: list[Tensor]
    branch_weights: Callable[[], list[list[Tensor]]]  # live views of the weights, those of each branch
    channel_dim: int  # which axis of what is read they are


def head_branches(model: ModelProtocol, layer: Any, ids: Tensor) -> BranchedFunction:
    """The heads of one attention layer of a model, ours or attached, while it reads tokens (1, T)."""
    is_native = isinstance(layer, nn.Module)
    output_projection: Any = layer.output_projection if is_native else layer.info.output_module

    def run() -> tuple[Tensor, Tensor, list[Tensor]]:
        inputs, z, out, W_O = [], [], [], layer.hook_point.W_O  # (H, e, D)
        hooks = (
            layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])),
            output_projection.register_forward_hook(lambda _, args, output: out.append(output)),
        )
        try:
            with torch.enable_grad(), layer.hook_point.listen(lambda call: z.append(call.z)):
                model(ids, hidden=True)
        finally:
            for hook in hooks:
                hook.remove()
        # (B, T, D) each
        return (inputs[0], out[0], [z[0][:, i] @ head_output_weight for i, head_output_weight in enumerate(W_O)])

    def branch_weights() -> list[list[Tensor]]:
        kv_of_head = layer.spec.kv_of_head
        views = [[W_O] for W_O in layer.hook_point.W_O]  # (e, D) each
        for projection, indices in (("q", range(len(kv_of_head))), ("k", kv_of_head), ("v", kv_of_head)):
            for tensor in (layer.qkv.weight_by_head(projection), layer.qkv.bias_by_head(projection)):
                for head_views, index in zip(views, indices, strict=True):
                    head_views += [] if tensor is None else [tensor[index]]
        return views

    readers: list[Any] = (
        [layer.qkv] if is_native else [layer.info.qkv_module(i) for i in range(len(layer.info.qkv_modules[1]))]
    )
    return BranchedFunction(
        run, [weight for module in (*readers, output_projection) for weight in module.parameters()], branch_weights, 2
    )


def convolution_branches(channels: int, branches: int, tokens: int, seed: int = 0) -> BranchedFunction:
    """A grouped convolution over three neighbours, then one that mixes channels: what W_O is to heads. In float64."""
    torch.manual_seed(seed)
    x = torch.randn(1, channels, tokens, dtype=torch.float64, requires_grad=True)  # (B, C, T)
    grouped = nn.Conv1d(channels, channels, 3, padding=1, groups=branches, bias=False).double()
    mix = nn.Conv1d(channels, channels, 1, bias=False).double()
    size = channels // branches
    slices = [slice(i * size, (i + 1) * size) for i in range(branches)]

    def run() -> tuple[Tensor, Tensor, list[Tensor]]:
        grouped_out = grouped(x)  # (B, C, T)
        return (
            x,
            mix(grouped_out),
            [F.conv1d(grouped_out[:, channel_slice], mix.weight[:, channel_slice]) for channel_slice in slices],
        )

    def branch_weights() -> list[list[Tensor]]:
        return [[grouped.weight[channel_slice], mix.weight[:, channel_slice]] for channel_slice in slices]

    return BranchedFunction(run, [grouped.weight, mix.weight], branch_weights, 1)


def measure_gradient_independence(branches: BranchedFunction, seed: int = 0) -> dict[str, float]:
    """What the sum of the branches' Jacobians leaves of the whole's, how far a branch's own gradient moves when the others
    are drawn anew (with the gradient from above fixed, and through a squared loss), and the share of channels it reads.
    """
    generator = torch.Generator().manual_seed(seed)
    x, out, branch_outputs = branches.run()
    directions = (
        torch.eye(out.numel())
        if out.numel() <= MAX_FULL_OUTPUTS
        else torch.randn(NUM_DIRECTIONS, out.numel(), generator=generator)
    )
    directions = directions.to(out).unflatten(1, out.shape)  # (R, *out)
    full_jacobian, branch_jacobians = (
        _jacobian(out, x, directions),
        [_jacobian(branch_output, x, directions) for branch_output in branch_outputs],
    )
    grad_output = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    return {
        "left over": float((full_jacobian - torch.stack(branch_jacobians).sum(0)).norm() / full_jacobian.norm()),
        "moved by others": _gradient_change(branches, lambda output: (output * grad_output).sum(), generator),
        "moved through a loss": _gradient_change(branches, lambda output: output.square().sum(), generator),
        "channels read": sum(_channel_fraction(jacobian, branches.channel_dim) for jacobian in branch_jacobians)
        / len(branch_jacobians),
    }


def _jacobian(out: Tensor, x: Tensor, directions: Tensor) -> Tensor:
    """(R, *x)"""
    return torch.stack([torch.autograd.grad(out, x, direction, retain_graph=True)[0] for direction in directions])


def _channel_fraction(jacobian: Tensor, channel_dim: int) -> float:
    """The share of channels that anything hangs on."""
    is_used = (jacobian != 0).any(0).movedim(channel_dim, 0).flatten(1).any(1)  # (C,)
    return float(is_used.double().mean())


def _gradient_change(branches: BranchedFunction, loss: Callable[[Tensor], Tensor], generator: torch.Generator) -> float:
    """The most that any branch's own gradient moves, relative to its length."""
    before, worst = _gradients(branches, loss), 0.0
    for index, grad_before in enumerate(before):
        with _others_resampled(branches, index, generator):
            grad_after = _gradients(branches, loss)[index]
        distance = float((grad_after - grad_before).norm())
        # a silent head has no gradient, and keeps none
        worst = max(worst, distance and distance / float(grad_before.norm()))
    return worst


def _gradients(branches: BranchedFunction, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Each branch's own, in one piece: gradients are put where the weights are, and seen through the same views."""
    grads = torch.autograd.grad(loss(branches.run()[1]), branches.weights, allow_unused=True, materialize_grads=True)
    with _temporarily_set(branches.weights, grads), torch.no_grad():
        return [torch.cat([view.flatten() for view in views]) for views in branches.branch_weights()]


@contextmanager
def _temporarily_set(weights: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    before = [weight.detach().clone() for weight in weights]
    _fill(weights, values)
    try:
        yield
    finally:
        _fill(weights, before)


@torch.no_grad()
def _fill(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


@contextmanager
def _others_resampled(branches: BranchedFunction, index: int, generator: torch.Generator) -> Iterator[None]:
    own_weights = [view.detach().clone() for view in branches.branch_weights()[index]]
    random_weights = [
        torch.randn(w.shape, generator=generator).to(w) * w.detach().square().mean().sqrt() for w in branches.weights
    ]
    with _temporarily_set(branches.weights, random_weights):
        _fill(branches.branch_weights()[index], own_weights)
        yield
