"""What each head is worth for calls of your own: any inputs, any loss, of the whole model.

For models that read more than texts: pictures and words together, sounds, two towers. Each call is a unit of the statistics.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.ablation.head_outputs import chosen_sites
from headwise.analysis.metrics.accumulator import Tally
from headwise.errors import HeadwiseError
from headwise.heads.head import Pattern
from headwise.heads.hook_point import Site
from headwise.kernels.gradients import gradients_enabled, normal_tensors
from headwise.model import AnyModel, quiet
from headwise.progress import Progress
from headwise.spec import Address

Loss = Callable[[Any], Tensor]  # what the model gives → one number


def is_calls(on: Any) -> bool:
    """Whether what heads shall be asked on are calls: keyword arguments, in a list or by themselves."""
    some = list(on) if isinstance(on, list | tuple) else [on]
    return bool(some) and all(isinstance(one, Mapping) for one in some)


def own_loss(made: Any) -> Tensor:
    """The loss that a model itself gives, where it was given labels."""
    loss = getattr(made, "loss", None)
    if not isinstance(loss, Tensor):
        raise HeadwiseError(
            "the model gives no loss for these calls; give labels in each of them, or loss=…, a function of what the model "
            "gives."
        )
    return loss


def worth_of_calls(
    model: AnyModel, calls: Any, by: str, heads: Pattern, loss: Loss | None, progress: Progress | None
) -> tuple[tuple[Address, ...], Tally, int]:
    """What each head is worth by the loss of the whole model: zero in its place, or the absolute slope of a gate on it."""
    asked: Sequence[Mapping[str, Any]] = list(calls) if isinstance(calls, list | tuple) else [calls]
    take: Loss = own_loss if loss is None else loss
    sites = list(chosen_sites(model, heads))
    chosen = tuple(head for _, there in sites for head in there)
    tally = Tally(heads=len(chosen))
    with quiet(model):
        for number, call in enumerate(asked):
            lost, clean = (_ablated if by == "ablation" else _slopes)(model, call, take, sites)
            made = torch.stack((torch.tensor(lost), torch.full((len(lost),), clean)), -1)[None]  # (1, heads, 2)
            tally.add(("worth", "clean"), slice(0, len(chosen)), [number], made, torch.ones(1, 1, 1))
            if progress is not None:
                progress("what heads are worth", number + 1, len(asked))
    return chosen, tally, len(asked)


Sites = Sequence[tuple[Site, Sequence[Address]]]


def _ablated(model: Any, call: Mapping[str, Any], take: Loss, sites: Sites) -> tuple[list[float], float]:
    with torch.no_grad():
        clean, lost = _number(take(model(**call))), []
        for site, there in sites:
            for head in there:
                gate = torch.ones(len(site.addresses), device=model.device)
                gate[site.addresses.index(head)] = 0.0
                with site.scaled(gate):
                    lost.append(_number(take(model(**call))) - clean)
    return lost, clean


def _slopes(model: Any, call: Mapping[str, Any], take: Loss, sites: Sites) -> tuple[list[float], float]:
    with gradients_enabled(model), ExitStack() as open_:
        call = normal_tensors(dict(call))
        gates = [torch.ones(len(site.addresses), device=model.device, requires_grad=True) for site, _ in sites]
        for (site, _), gate in zip(sites, gates, strict=True):
            open_.enter_context(site.scaled(gate))
        loss = take(model(**call))
        found = torch.autograd.grad(loss, gates, allow_unused=True)
    slopes = []
    for (site, there), gate, slope in zip(sites, gates, found, strict=True):
        told = torch.zeros_like(gate) if slope is None else slope
        slopes += [float(told[site.addresses.index(head)].abs()) for head in there]
    return slopes, _number(loss)


def _number(loss: Any) -> float:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise HeadwiseError(f"a loss is one number, as a tensor; got {got}.")
    return float(loss.detach())
