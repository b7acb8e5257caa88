"""Effect of ablating one head on a metric of the examples: the job `effect`, and the causal test of the other jobs.

A metric is a number per example, larger is better. The cost of a head is the metric of the unmodified model minus the metric
without the head. Its baseline is the mean cost of the other heads of the layer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.ablation.ablate import AblationMethod, ablated
from headwise.analysis.ablation.recorded_head_outputs import HeadOutputs, MeanActivations, mean_of_outputs
from headwise.analysis.finding.job_examples import LabeledExample
from headwise.analysis.finding.prepared_example import PreparedExample
from headwise.analysis.recording.batching import tokenizer_of
from headwise.errors import ArgumentError, UnsupportedModelError, suggest_names
from headwise.heads.hook_point import AttentionCall, HookPoint
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol

METRICS, ABLATIONS = ("loss", "answer"), ("mean", "zero")
MAX_MASKED = 32  # masked tokens per example of a masked language model
OutputMetric = Callable[[Any, LabeledExample], float]
Metric = OutputMetric | str


def check_metric(metric: Metric | None) -> None:
    """Raise if a metric is neither None, nor a function, nor the name of a metric."""
    if metric is not None and not callable(metric) and metric not in METRICS:
        raise ArgumentError(
            f"metric={metric!r}: unknown metric; {suggest_names(str(metric), METRICS)} Or pass a function."
        )


def check_ablation(ablation: str) -> None:
    """Raise if the replacement of head outputs is unknown."""
    if ablation not in ABLATIONS:
        raise ArgumentError(f"ablation={ablation!r}: unknown; {suggest_names(str(ablation), ABLATIONS)}")


def measure_metric(model: ModelProtocol, prepared: PreparedExample, metric: Metric) -> float:
    """Return the metric of one example: a function of the output, minus the loss, or the log-probability of the answer."""
    check_metric(metric)
    if callable(metric):
        output = prepared.run(model, hidden=False)
        returned = metric(output[0] if isinstance(output, Tensor) else output, prepared.example)
        try:
            value = float(returned)
        except (TypeError, ValueError, RuntimeError):
            raise ArgumentError(
                f"{prepared.where}: the metric must return a number. Got {type(returned).__name__} {returned!r:.60}."
            ) from None
    else:
        value = -_mean_token_loss(model, prepared) if metric == "loss" else _answer_log_prob_difference(model, prepared)
    if not np.isfinite(value):
        raise ArgumentError(f"{prepared.where}: the metric is {value}. It must be a finite number for every example.")
    return value


def _mean_token_loss(model: ModelProtocol, prepared: PreparedExample) -> float:
    """Return the mean loss in nats: of all next tokens, or of tokens masked one at a time (the queries of the pairs)."""
    ids = prepared.ids
    if model.output is None or prepared.source is not None or not ids.numel():
        raise UnsupportedModelError(
            "metric='loss': needs a model with output layer that reads texts without source. Pass a function as metric."
        )
    if model.spec.output == "lm":
        if ids.shape[1] < 2:
            raise ArgumentError(f"{prepared.where}: metric='loss' needs at least 2 tokens. Got {ids.shape[1]}.")
        log_probs = to_float64(model(ids)[0, :-1]).log_softmax(-1)
        return -float(log_probs.gather(1, ids[0, 1:, None]).mean())
    tokenizer = tokenizer_of(model)
    if tokenizer.mask is None:
        raise UnsupportedModelError("metric='loss': the tokenizer has no mask token. Pass a function as metric.")
    units = [prepared.queries.index(query) for query, _ in prepared.example.pairs]
    rows = sorted({token for unit in units for token in prepared.queries.tokens[unit]})
    prefix, suffix = tokenizer.template_ids
    rows = (rows or list(range(len(prefix), ids.shape[1] - len(suffix))))[:MAX_MASKED]
    masked = ids.repeat(len(rows), 1)
    masked[range(len(rows)), rows] = tokenizer.mask
    log_probs = to_float64(model(masked)[range(len(rows)), rows]).log_softmax(-1)
    return -float(log_probs.gather(1, ids[0, rows][:, None]).mean())


def _answer_log_prob_difference(model: ModelProtocol, prepared: PreparedExample) -> float:
    """Return the log-probability of the answer after the text, minus that of the wrong answer if there is one."""
    example = prepared.example
    if example.answer is None or model.spec.output != "lm" or model.spec.kind != "decoder":
        raise ArgumentError(
            f"{prepared.where}: metric='answer' needs an answer in each example and a decoder with output layer."
        )
    right = _continuation_log_prob(model, prepared, example.answer)
    return (
        right if example.wrong_answer is None else right - _continuation_log_prob(model, prepared, example.wrong_answer)
    )


def _continuation_log_prob(model: ModelProtocol, prepared: PreparedExample, continuation: str) -> float:
    suffix = tokenizer_of(model).template_ids[1]
    text_ids = prepared.ids[0, : prepared.ids.shape[1] - len(suffix)].tolist()
    answer_ids = tokenizer_of(model).encode(continuation, add_special_tokens=False)
    if not answer_ids:
        raise ArgumentError(f"{prepared.where}: the answer {continuation!r} has no tokens. Give a text.")
    ids = torch.tensor([[*text_ids, *answer_ids]], device=model.device)
    log_probs = to_float64(model(ids)[0, len(text_ids) - 1 : -1]).log_softmax(-1)
    return float(log_probs.gather(1, ids[0, len(text_ids) :, None]).sum())


def mean_over_examples(
    model: ModelProtocol, prepared: Sequence[PreparedExample], hook_points: Sequence[HookPoint]
) -> MeanActivations:
    """Return the mean z of every head over the positions of the examples, for mean ablation."""

    def outputs() -> Iterator[HeadOutputs]:
        for item in prepared:
            z: dict[Any, Tensor] = {}

            def store(call: AttentionCall, z: dict[Any, Tensor] = z) -> None:
                z[call.hook_point.address] = call.z.detach()

            with ExitStack() as stack:
                for hook_point in hook_points:
                    stack.enter_context(hook_point.listen(store))
                item.run(model)
            head_ids = {point.address: tuple(point.head_ids) for point in hook_points}
            yield HeadOutputs(head_ids, z, dict.fromkeys(head_ids))

    return mean_of_outputs(outputs())


class HeadAblator:
    """Cost of ablating single heads on the examples.

    Args:
        model: The model.
        prepared: The examples.
        hook_points: Layers of the heads.
        metric: Metric of an example.
        ablation: Replacement of the head output: "mean" (over the examples) or "zero".
    """

    def __init__(
        self,
        model: ModelProtocol,
        prepared: Sequence[PreparedExample],
        hook_points: Sequence[HookPoint],
        metric: Metric,
        ablation: AblationMethod = "mean",
    ) -> None:
        check_ablation(ablation)
        self.model, self.prepared, self.metric = model, prepared, metric
        self.ablation: AblationMethod = ablation
        self.means = mean_over_examples(model, prepared, hook_points) if ablation == "mean" else None
        self.clean = [measure_metric(model, item, metric) for item in prepared]

    def costs(self, address: str) -> list[float]:
        """Return the cost of one head on each example."""
        with ablated(self.model, address, self.ablation, means=self.means):
            values = [measure_metric(self.model, item, self.metric) for item in self.prepared]
        return [clean - value for clean, value in zip(self.clean, values, strict=True)]


def other_head_costs(costs: np.ndarray, layer_of_head: Sequence[Any]) -> np.ndarray:
    """Return the mean cost of the other heads of each head's layer, (n, H); of all other heads if it is alone.

    >>> other_head_costs(np.array([[1.0, 3.0, 8.0]]), ["0", "0", "1"]).tolist()
    [[3.0, 1.0, 2.0]]
    """
    layers = np.array([str(layer) for layer in layer_of_head])
    others = np.zeros_like(costs)
    for head in range(costs.shape[1]):
        same_layer = (layers == layers[head]) & (np.arange(len(layers)) != head)
        pool = same_layer if same_layer.any() else np.arange(len(layers)) != head
        others[:, head] = costs[:, pool].mean(1) if pool.any() else 0.0
    return others
