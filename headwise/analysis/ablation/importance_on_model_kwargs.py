"""Head importance on custom calls: any inputs and any loss of the full model.

For models with inputs other than text (images with text, audio, two towers). Each call is one unit of the bootstrap.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.ablation.ablate import make_replacement_edit, make_replacement_fn
from headwise.analysis.ablation.gradient_memory import frozen_weights
from headwise.analysis.ablation.recorded_head_outputs import MeanActivations, selected_hook_points
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.recording.model_calls import run_call
from headwise.errors import ArgumentError
from headwise.heads.head import HeadPattern
from headwise.heads.hook_point import HookPoint
from headwise.kernels.enable_grad import copy_inference_tensors, enable_gradients
from headwise.model import ModelProtocol, eval_mode
from headwise.progress import Progress
from headwise.spec import Address

LossFunction = Callable[[Any], Tensor]  # output of the model → scalar loss


def loss_from_output(output: Any) -> Tensor:
    """Return the loss that the model computed from its labels, or the output if it is a scalar."""
    loss = output if isinstance(output, Tensor) and output.numel() == 1 else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise ArgumentError(
            "corpus: the model output has no loss for these calls. Add labels to each call, or attach a torch module with a "
            "function that returns a loss: hw.attach(module, forward=…). hw.importance also takes loss=, a function from the "
            "model output to a scalar tensor."
        )
    return loss


def importance_on_model_kwargs(
    model: ModelProtocol,
    calls: Sequence[Any],
    ranking: str,
    heads: HeadPattern,
    loss: LossFunction | None,
    progress: Progress | None,
    means: MeanActivations | None = None,
) -> tuple[tuple[Address, ...], Accumulator, int]:
    """Measure importance on calls: the loss increase without a head, or the absolute gradient of a head gate.

    An ablated head is replaced by its mean if means are given, else by zeros.
    """
    loss_fn: LossFunction = loss_from_output if loss is None else loss
    hook_points = list(selected_hook_points(model, heads))
    selected = tuple(head for _, layer_heads in hook_points for head in layer_heads)
    accumulator = Accumulator(heads=len(selected))
    with eval_mode(model):
        for index, call in enumerate(calls):
            if ranking == "ablation":
                lost, clean = _ablation_losses(model, call, loss_fn, hook_points, means)
            else:
                lost, clean = _gate_gradients(model, call, loss_fn, hook_points)
            values = torch.stack(
                (
                    torch.tensor(lost, device="cpu", dtype=torch.float32),
                    torch.full((len(lost),), clean, device="cpu", dtype=torch.float32),
                ),
                -1,
            )[None]  # (1, heads, 2)
            accumulator.add(
                ("importance", "clean"),
                slice(0, len(selected)),
                [index],
                values,
                torch.ones(1, 1, 1, device="cpu", dtype=torch.float32),
            )
            if progress is not None:
                progress("head importance", index + 1, len(calls))
    return selected, accumulator, len(calls)


SelectedHookPoints = Sequence[tuple[HookPoint, Sequence[Address]]]


def _ablation_losses(
    model: Any, call: Any, loss_fn: LossFunction, hook_points: SelectedHookPoints, means: MeanActivations | None
) -> tuple[list[float], float]:
    with torch.no_grad():
        clean, lost = _to_scalar(loss_fn(run_call(model, call))), []
        for hook_point, layer_heads in hook_points:
            for head in layer_heads:
                replacement = make_replacement_fn(hook_point, (head,), "zero" if means is None else "mean", means)
                with hook_point.replaced(make_replacement_edit(hook_point, (head,), replacement)):
                    lost.append(_to_scalar(loss_fn(run_call(model, call))) - clean)
    return lost, clean


def _gate_gradients(
    model: Any, call: Any, loss_fn: LossFunction, hook_points: SelectedHookPoints
) -> tuple[list[float], float]:
    with enable_gradients(model), frozen_weights(model), ExitStack() as stack:
        call = copy_inference_tensors(call)
        gates = [
            torch.ones(len(hook_point.head_addresses), device=model.device, requires_grad=True, dtype=torch.float32)
            for hook_point, _ in hook_points
        ]
        for (hook_point, _), gate in zip(hook_points, gates, strict=True):
            stack.enter_context(hook_point.scaled(gate))
        loss = loss_fn(run_call(model, call))
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
