"""Head importance on custom calls: any inputs and any loss of the full model.

For models with inputs other than text (images with text, audio, two towers). Each call is one unit of the bootstrap.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.ablation.head_outputs import selected_hook_points
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.errors import ArgumentError
from headwise.heads.head import HeadPattern
from headwise.heads.hook_point import HookPoint
from headwise.kernels.enable_grad import copy_inference_tensors, gradients_enabled
from headwise.model import ModelProtocol, eval_mode
from headwise.progress import Progress
from headwise.spec import Address

LossFunction = Callable[[Any], Tensor]  # output of the model → scalar loss


def is_call_list(corpus: Any) -> bool:
    """Return whether `corpus` is a dict of keyword arguments or a list of them."""
    items = list(corpus) if isinstance(corpus, list | tuple) else [corpus]
    return bool(items) and all(isinstance(item, Mapping) for item in items)


def loss_from_output(output: Any) -> Tensor:
    """Return the loss that the model computed from its labels."""
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise ArgumentError(
            "corpus: the model output has no loss for these calls. Add labels to each call, or pass loss=, a function from "
            "the model output to a scalar tensor."
        )
    return loss


def importance_on_calls(
    model: ModelProtocol,
    calls: Any,
    ranking: str,
    heads: HeadPattern,
    loss: LossFunction | None,
    progress: Progress | None,
) -> tuple[tuple[Address, ...], Accumulator, int]:
    """Measure importance on calls: the loss increase under zero ablation, or the absolute gradient of a head gate."""
    call_list: Sequence[Mapping[str, Any]] = list(calls) if isinstance(calls, list | tuple) else [calls]
    loss_fn: LossFunction = loss_from_output if loss is None else loss
    hook_points = list(selected_hook_points(model, heads))
    selected = tuple(head for _, layer_heads in hook_points for head in layer_heads)
    accumulator = Accumulator(heads=len(selected))
    with eval_mode(model):
        for index, call in enumerate(call_list):
            lost, clean = (_ablation_losses if ranking == "ablation" else _gate_gradients)(
                model, call, loss_fn, hook_points
            )
            values = torch.stack((torch.tensor(lost), torch.full((len(lost),), clean)), -1)[None]  # (1, heads, 2)
            accumulator.add(("importance", "clean"), slice(0, len(selected)), [index], values, torch.ones(1, 1, 1))
            if progress is not None:
                progress("head importance", index + 1, len(call_list))
    return selected, accumulator, len(call_list)


SelectedHookPoints = Sequence[tuple[HookPoint, Sequence[Address]]]


def _ablation_losses(
    model: Any, call: Mapping[str, Any], loss_fn: LossFunction, hook_points: SelectedHookPoints
) -> tuple[list[float], float]:
    with torch.no_grad():
        clean, lost = _to_scalar(loss_fn(model(**call))), []
        for hook_point, layer_heads in hook_points:
            for head in layer_heads:
                gate = torch.ones(len(hook_point.head_addresses), device=model.device)
                gate[hook_point.head_addresses.index(head)] = 0.0
                with hook_point.scaled(gate):
                    lost.append(_to_scalar(loss_fn(model(**call))) - clean)
    return lost, clean


def _gate_gradients(
    model: Any, call: Mapping[str, Any], loss_fn: LossFunction, hook_points: SelectedHookPoints
) -> tuple[list[float], float]:
    with gradients_enabled(model), ExitStack() as stack:
        call = copy_inference_tensors(dict(call))
        gates = [
            torch.ones(len(hook_point.head_addresses), device=model.device, requires_grad=True)
            for hook_point, _ in hook_points
        ]
        for (hook_point, _), gate in zip(hook_points, gates, strict=True):
            stack.enter_context(hook_point.scaled(gate))
        loss = loss_fn(model(**call))
        gradients = torch.autograd.grad(loss, gates, allow_unused=True)
    magnitudes = []
    for (hook_point, layer_heads), gate, raw_gradient in zip(hook_points, gates, gradients, strict=True):
        gradient = torch.zeros_like(gate) if raw_gradient is None else raw_gradient
        magnitudes += [float(gradient[hook_point.head_addresses.index(head)].abs()) for head in layer_heads]
    return magnitudes, _to_scalar(loss)


def _to_scalar(loss: Any) -> float:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ArgumentError(f"loss: must return a tensor with one element. Got {got}.")
    return float(loss.detach())
