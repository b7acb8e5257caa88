"""Heads carry different gradients."""

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis import TargetBatch, default_corpus
from headwise.errors import UnsupportedModelError
from headwise.experiments.claim import Claim, PlotSpec, PrimaryQuantity, Verdict, statistic_key_selector
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.heads import AttentionCall
from headwise.model import ModelProtocol, eval_mode

TEXTS = 32  # number of texts for the gradient
MAX_LENGTH = 128
MAX_COSINE = 0.3  # a smaller mean cosine counts as different
OWN_WEIGHTS, OV_MATRIX, RANDOM = "of its weights", "of what it moves", "random vectors"


def mean_abs_cosine(vectors: Tensor) -> float:
    """Return the mean |cosine| over pairs of rows, (H, N): 1 for copies, about √(2/πN) for random vectors.

    >>> mean_abs_cosine(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]))  # one pair of three points the same way
    0.3333333333333333
    """
    normalized = nn.functional.normalize(vectors.double(), dim=1)
    upper = torch.ones(len(vectors), len(vectors)).triu(1).bool()
    return float((normalized @ normalized.mT)[upper].abs().mean())


def weight_and_ov_gradient_similarity(model: ModelProtocol, corpus: Any = None, texts: int = TEXTS) -> dict[str, float]:
    """Return the mean |cosine| between the gradients of a layer's heads, over pairs of heads and layers.

    `of its weights`: W_Q, W_K, W_V and W_O concatenated (only W_Q and W_O if keys are shared by a group).
    `of what it moves`: W_V W_O as one D×D matrix, which does not depend on the basis of the head's channels.
    `random vectors`: chance level for vectors of the same size.
    """
    target_batch = _target_batch(model, corpus, texts)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    maps: list[Tensor] = []
    with eval_mode(model), torch.enable_grad(), ExitStack() as stack:
        for layer in model.attention_layers():
            stack.enter_context(layer.hook_point.listen(lambda call: maps.append(_maps(call))))
            stack.callback(layer.register_forward_pre_hook(_collect_input(inputs)).remove)
            stack.callback(layer.register_forward_hook(_collect_output(outputs)).remove)
        hidden = target_batch.final_hidden_states(model).flatten(0, 1)  # (B·T, D)
        assert target_batch.targets is not None
        assert model.output is not None
        loss = model.output.cross_entropy(hidden, target_batch.targets.flatten())
        grads = torch.autograd.grad(loss, [*weights, *outputs], allow_unused=True)
    head_grads = _per_head_gradients(model, dict(zip(weights, grads, strict=False)))
    output_grads = [grad for grad in grads[len(weights) :] if grad is not None]
    layers = [entry for entry in zip(maps, inputs, output_grads, strict=True) if entry[0].shape[1] > 1]
    return {
        OWN_WEIGHTS: _mean([mean_abs_cosine(layer) for layer in head_grads]),
        OV_MATRIX: _mean([mean_abs_cosine(_ov_gradient(*entry)) for entry in layers]),
        RANDOM: math.sqrt(2 / math.pi / head_grads[0].shape[1]),
    }


def _target_batch(model: ModelProtocol, corpus: Any, texts: int) -> TargetBatch:
    target_batch = TargetBatch.of(model, corpus, texts=texts, max_length=MAX_LENGTH)
    if target_batch.targets is None:
        raise UnsupportedModelError(
            "model: it has no output over a vocabulary, so it does not have a loss to differentiate. Use a language model."
        )
    return target_batch


def _collect_input(collected: list[Tensor]) -> Any:
    return lambda module, args: collected.append(args[0].detach())


def _collect_output(collected: list[Tensor]) -> Any:
    return lambda module, args, out: collected.append(out)


def _maps(call: AttentionCall) -> Tensor:
    with torch.no_grad():
        return call.maps()  # (B, H, T, S)


def _per_head_gradients(model: ModelProtocol, grads: dict[nn.Parameter, Tensor | None]) -> list[Tensor]:
    """Return the gradient of each head as one row, one matrix (H, N) per layer.

    Gradients are temporarily copied into the weights, so that the views of each head select its part.
    """
    previous_data = {weight: weight.data for weight in grads}
    projections = "QKVO" if model.spec.attention.kv_heads == model.spec.attention.heads else "QO"
    try:
        for weight, grad in grads.items():
            weight.data = torch.zeros_like(weight.data) if grad is None else grad
        rows = {
            head.address: torch.cat([getattr(head, f"W_{projection}").detach().flatten() for projection in projections])
            for head in model.heads
        }
    finally:
        for weight, data in previous_data.items():
            weight.data = data
    hook_points = [hook_point for hook_point in model.hook_points() if len(hook_point.head_ids) > 1]
    if not hook_points:
        raise UnsupportedModelError(
            "model: no layer has two heads whose gradients can be compared. Use a model with more heads."
        )
    return [torch.stack([rows[address] for address in hook_point.head_addresses]) for hook_point in hook_points]


def _ov_gradient(maps: Tensor, inputs: Tensor, grad_output: Tensor) -> Tensor:
    """Return the gradient of W_V W_O, one row per head: Σ over texts of (P x)ᵀ ∂L/∂out, (H, D·D)."""
    gathered = maps @ inputs[:, None]  # (B, H, T, D)
    return torch.einsum("bhtd,bte->hde", gathered, grad_output).flatten(1)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def training_configs(experiment: TrainedModelProvider) -> list[ExperimentConfig]:
    """Return the default model of every seed."""
    return [experiment.make_config(seed) for seed in experiment.seeds]


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure the default model at every checkpoint on the same held-out texts."""
    statistics = StatisticTable()
    trained = [experiment.train_or_load(experiment.make_config(seed)) for seed in experiment.seeds]
    steps = trained[0].config.recipe.steps
    for step in (*trained[0].config.checkpoint_steps, None):
        results = [
            weight_and_ov_gradient_similarity(entry.load_model(step), experiment.held_out_corpus(seed))
            for entry, seed in zip(trained, experiment.seeds, strict=True)
        ]
        for name in (OWN_WEIGHTS, OV_MATRIX, RANDOM):
            statistics.add(f"cosine {name}", 1.0 if step is None else step / steps, [entry[name] for entry in results])
    return statistics


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """Measure a given model."""
    statistics = StatisticTable()
    for name, value in weight_and_ov_gradient_similarity(
        model, default_corpus(model) if text is None else text
    ).items():
        statistics.add(f"cosine {name}", 1.0, value)
    return statistics


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    by_kind = {name: statistics.by_condition(f"cosine {name}") for name in (OWN_WEIGHTS, OV_MATRIX)}
    all_statistics = [statistic for group in by_kind.values() for statistic in group.values()]
    if all(statistic.is_interval_below(MAX_COSINE) for statistic in all_statistics):
        return Verdict("holds")
    if all(statistic.is_interval_above(MAX_COSINE) for statistic in all_statistics):
        return Verdict("does not hold")
    details = [
        f"{name} at {sum(statistic_at_step.is_interval_below(MAX_COSINE) for statistic_at_step in group.values())}"
        for name, group in by_kind.items()
    ]
    unsure = [
        statistic
        for statistic in all_statistics
        if not statistic.is_interval_below(MAX_COSINE) and not statistic.is_interval_above(MAX_COSINE)
    ]
    summary = f"significantly different {' and '.join(details)} of {max(map(len, by_kind.values()))} measured steps"
    return Verdict("undecided", summary) if unsure else Verdict("depends", f"on the gradient: {summary}")


CLAIM = Claim(
    number=20,
    name="gradients",
    statement="Heads have different gradients, so that each learns something different.",
    counterevidence="Heads of a layer whose gradients point in the same direction.",
    setup=f"The gradient of the loss on {TEXTS} held-out texts, before training, after 1/8, 1/4 and 1/2 of it and at the "
    "end, for each head: of all its weights concatenated, and of W_V W_O as one matrix. The second does not depend on the "
    "basis of the head's channels. Random bases alone make the first different. Mean |cosine| over the head pairs of a "
    "layer: 1 for copies, about √(2/πN) for random vectors.",
    rule=f"Holds if both mean cosines are significantly below {MAX_COSINE:g} at every step. Does not hold if all are "
    "significantly above it. Otherwise undecided if any is inconclusive, else depends on the gradient.",
    judged=statistic_key_selector(f"cosine {OWN_WEIGHTS}", f"cosine {OV_MATRIX}"),
    primary=PrimaryQuantity(f"cosine {OV_MATRIX}", 1.0, MAX_COSINE, "below", planned_seeds=3),
    measure=measure,
    judge=judge,
    plot=PlotSpec(
        tuple(f"cosine {name}" for name in (OWN_WEIGHTS, OV_MATRIX, RANDOM)),
        x="fraction of training done",
        y="mean |cosine|",
    ),
    training_configs=training_configs,
    measure_model=measure_model,
)
