"""Things that branches make, heads of a layer or groups of a convolution: do gradients run through each by itself?"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.model import AnyModel

WHOLE, SOME = (
    256,
    8,
)  # outputs up to so many give the whole Jacobian; of more, so many random mixtures are followed back


@dataclass(frozen=True)
class Branches:
    """Something that branches make: `run` gives what was read, what came out and each branch's part of it."""

    run: Callable[[], tuple[Tensor, Tensor, list[Tensor]]]
    weights: list[Tensor]
    own: Callable[[], list[list[Tensor]]]  # live views of the weights, those of each branch
    channels: int  # which axis of what is read they are


def heads_of(model: AnyModel, layer: Any, ids: Tensor) -> Branches:
    """The heads of one attention layer of a model, ours or attached, while it reads tokens (1, T)."""
    ours = isinstance(layer, nn.Module)
    mixer: Any = layer.write if ours else layer.found.writes

    def run() -> tuple[Tensor, Tensor, list[Tensor]]:
        read, z, out, W_O = [], [], [], layer.site.W_O  # (H, e, D)
        hooks = (
            layer.register_forward_pre_hook(lambda _, given: read.append(given[0])),
            mixer.register_forward_hook(lambda _, given, made: out.append(made)),
        )
        try:
            with torch.enable_grad(), layer.site.listen(lambda seen: z.append(seen.z)):
                model(ids, hidden=True)
        finally:
            for hook in hooks:
                hook.remove()
        return read[0], out[0], [z[0][:, i] @ own for i, own in enumerate(W_O)]  # (B, T, D) each

    def own() -> list[list[Tensor]]:
        groups = layer.spec.kv_of_head
        views = [[W_O] for W_O in layer.site.W_O]  # (e, D) each
        for letter, places in (("q", range(len(groups))), ("k", groups), ("v", groups)):
            for part in (layer.read.weight(letter), layer.read.bias(letter)):
                for mine, place in zip(views, places, strict=True):
                    mine += [] if part is None else [part[place]]
        return views

    reading: list[Any] = [layer.read] if ours else [layer.found.reader(i) for i in range(len(layer.found.reads[1]))]
    return Branches(run, [weight for module in (*reading, mixer) for weight in module.parameters()], own, 2)


def convolution(channels: int, branches: int, tokens: int, seed: int = 0) -> Branches:
    """A grouped convolution over three neighbours, then one that mixes channels: what W_O is to heads. In float64."""
    torch.manual_seed(seed)
    x = torch.randn(1, channels, tokens, dtype=torch.float64, requires_grad=True)  # (B, C, T)
    grouped = nn.Conv1d(channels, channels, 3, padding=1, groups=branches, bias=False).double()
    mix = nn.Conv1d(channels, channels, 1, bias=False).double()
    size = channels // branches
    parts = [slice(i * size, (i + 1) * size) for i in range(branches)]

    def run() -> tuple[Tensor, Tensor, list[Tensor]]:
        found = grouped(x)  # (B, C, T)
        return x, mix(found), [F.conv1d(found[:, part], mix.weight[:, part]) for part in parts]

    def own() -> list[list[Tensor]]:
        return [[grouped.weight[part], mix.weight[:, part]] for part in parts]

    return Branches(run, [grouped.weight, mix.weight], own, 1)


def compare(branches: Branches, seed: int = 0) -> dict[str, float]:
    """What the sum of the branches' Jacobians leaves of the whole's, how far a branch's own gradient moves when the others
    are drawn anew (with the gradient from above fixed, and through a squared loss), and the share of channels it reads.
    """
    dice = torch.Generator().manual_seed(seed)
    x, out, parts = branches.run()
    ways = torch.eye(out.numel()) if out.numel() <= WHOLE else torch.randn(SOME, out.numel(), generator=dice)
    ways = ways.to(out).unflatten(1, out.shape)  # (R, *out)
    whole, each = _jacobian(out, x, ways), [_jacobian(part, x, ways) for part in parts]
    above = torch.randn(out.shape, generator=dice, dtype=torch.float64).to(out)
    return {
        "left over": float((whole - torch.stack(each).sum(0)).norm() / whole.norm()),
        "moved by others": _moved(branches, lambda made: (made * above).sum(), dice),
        "moved through a loss": _moved(branches, lambda made: made.square().sum(), dice),
        "channels read": sum(_share_used(one, branches.channels) for one in each) / len(each),
    }


def _jacobian(out: Tensor, x: Tensor, ways: Tensor) -> Tensor:
    """(R, *x)"""
    return torch.stack([torch.autograd.grad(out, x, way, retain_graph=True)[0] for way in ways])


def _share_used(jacobian: Tensor, channels: int) -> float:
    """The share of channels that anything hangs on."""
    hangs = (jacobian != 0).any(0).movedim(channels, 0).flatten(1).any(1)  # (C,)
    return float(hangs.double().mean())


def _moved(branches: Branches, loss: Callable[[Tensor], Tensor], dice: torch.Generator) -> float:
    """The most that any branch's own gradient moves, relative to its length."""
    before, worst = _gradients(branches, loss), 0.0
    for number, had in enumerate(before):
        with _others_drawn_anew(branches, number, dice):
            has = _gradients(branches, loss)[number]
        apart = float((has - had).norm())
        worst = max(worst, apart and apart / float(had.norm()))  # a silent head has no gradient, and keeps none
    return worst


def _gradients(branches: Branches, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Each branch's own, in one piece: gradients are put where the weights are, and seen through the same views."""
    made = torch.autograd.grad(loss(branches.run()[1]), branches.weights, allow_unused=True, materialize_grads=True)
    with _holding(branches.weights, made), torch.no_grad():
        return [torch.cat([view.flatten() for view in views]) for views in branches.own()]


@contextmanager
def _holding(weights: Sequence[Tensor], numbers: Sequence[Tensor]) -> Iterator[None]:
    before = [weight.detach().clone() for weight in weights]
    _fill(weights, numbers)
    try:
        yield
    finally:
        _fill(weights, before)


@torch.no_grad()
def _fill(weights: Sequence[Tensor], numbers: Sequence[Tensor]) -> None:
    for weight, new in zip(weights, numbers, strict=True):
        weight.copy_(new)


@contextmanager
def _others_drawn_anew(branches: Branches, number: int, dice: torch.Generator) -> Iterator[None]:
    kept = [view.detach().clone() for view in branches.own()[number]]
    drawn = [torch.randn(w.shape, generator=dice).to(w) * w.detach().square().mean().sqrt() for w in branches.weights]
    with _holding(branches.weights, drawn):
        _fill(branches.own()[number], kept)
        yield
