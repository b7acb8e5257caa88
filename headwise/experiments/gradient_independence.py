"""Measure whether gradients flow independently through parallel branches: heads of a layer, or groups of a convolution."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.model import ModelProtocol

# Up to MAX_FULL_OUTPUTS outputs the full Jacobian is computed. Above, NUM_DIRECTIONS random directions are backpropagated.
MAX_FULL_OUTPUTS, NUM_DIRECTIONS = 256, 8


@dataclass(frozen=True)
class BranchedFunction:
    """A function whose output is a sum over branches.

    Attributes:
        run: Returns the input, the output and the contribution of each branch to the output.
        weights: Weights of all branches.
        branch_weights: Returns views of the weights of each branch.
        channel_dim: Channel axis of the input.
    """

    run: Callable[[], tuple[Tensor, Tensor, list[Tensor]]]
    weights: list[Tensor]
    branch_weights: Callable[[], list[list[Tensor]]]
    channel_dim: int


def head_branches(model: ModelProtocol, layer: Any, ids: Tensor) -> BranchedFunction:
    """Describe the heads of one attention layer (native or attached) as branches, for the tokens ids (1, T)."""
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
    """Create a grouped convolution of kernel size 3 and a 1×1 convolution that mixes channels, as W_O does. In float64."""
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
    """Measure how independent the gradients of the branches are.

    Returns:
        "left over": Norm of the full Jacobian minus the sum of the branch Jacobians, relative to the full Jacobian.
        "moved by others": Largest relative change of a branch's gradient after the other branches are resampled, with a
            fixed output gradient.
        "moved through a loss": The same change, with the gradient of a squared loss.
        "channels read": Mean fraction of input channels that a branch depends on.
    """
    generator = torch.Generator().manual_seed(seed)
    x, out, branch_outputs = branches.run()
    directions = (
        torch.eye(out.numel())
        if out.numel() <= MAX_FULL_OUTPUTS
        else torch.randn(NUM_DIRECTIONS, out.numel(), generator=generator, device="cpu")
    )
    directions = directions.to(out).unflatten(1, out.shape)  # (R, *out)
    full_jacobian, branch_jacobians = (
        _jacobian(out, x, directions),
        [_jacobian(branch_output, x, directions) for branch_output in branch_outputs],
    )
    grad_output = torch.randn(out.shape, generator=generator, dtype=torch.float64, device="cpu").to(out)
    return {
        "left over": float((full_jacobian - torch.stack(branch_jacobians).sum(0)).norm() / full_jacobian.norm()),
        "moved by others": _gradient_change(branches, lambda output: (output * grad_output).sum(), generator),
        "moved through a loss": _gradient_change(branches, lambda output: output.square().sum(), generator),
        "channels read": sum(_nonzero_channel_fraction(jacobian, branches.channel_dim) for jacobian in branch_jacobians)
        / len(branch_jacobians),
    }


def _jacobian(out: Tensor, x: Tensor, directions: Tensor) -> Tensor:
    """Vector-Jacobian products for all directions, (R, *x)."""
    return torch.stack([torch.autograd.grad(out, x, direction, retain_graph=True)[0] for direction in directions])


def _nonzero_channel_fraction(jacobian: Tensor, channel_dim: int) -> float:
    """Return the fraction of channels with a nonzero gradient."""
    is_used = (jacobian != 0).any(0).movedim(channel_dim, 0).flatten(1).any(1)  # (C,)
    return float(is_used.double().mean())


def _gradient_change(branches: BranchedFunction, loss: Callable[[Tensor], Tensor], generator: torch.Generator) -> float:
    """Return the largest change of any branch's own gradient, relative to its norm."""
    before, worst = _gradients(branches, loss), 0.0
    for index, grad_before in enumerate(before):
        with _other_branches_temporarily_resampled(branches, index, generator):
            grad_after = _gradients(branches, loss)[index]
        distance = float((grad_after - grad_before).norm())
        # a silenced head has zero gradient before and after
        worst = max(worst, distance and distance / float(grad_before.norm()))
    return worst


def _gradients(branches: BranchedFunction, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the flattened gradient of each branch. Gradients are copied into the weights and read through the views."""
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
def _other_branches_temporarily_resampled(
    branches: BranchedFunction, index: int, generator: torch.Generator
) -> Iterator[None]:
    own_weights = [view.detach().clone() for view in branches.branch_weights()[index]]
    random_weights = [
        torch.randn(w.shape, generator=generator, device="cpu").to(w) * w.detach().square().mean().sqrt()
        for w in branches.weights
    ]
    with _temporarily_set(branches.weights, random_weights):
        _fill(branches.branch_weights()[index], own_weights)
        yield
