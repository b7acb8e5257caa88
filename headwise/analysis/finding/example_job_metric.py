"""A job described by examples as a metric, so that a profile can test its role together with all other roles."""

from collections.abc import Sequence

import numpy as np
import torch

from headwise.analysis.finding.head_search import find_heads
from headwise.analysis.finding.job_examples import LabeledExample
from headwise.analysis.finding.per_input_scores import chosen_baselines
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.metric import IDENTICAL, MetricSpec
from headwise.analysis.metrics.task_metric import TaskMetric, TaskMetricDetails
from headwise.analysis.recording.batching import reachable_hook_points
from headwise.errors import ArgumentError
from headwise.model import ModelProtocol
from headwise.progress import Progress


class HeadJobMetric(TaskMetric):
    """Score of every head at a job: `hw.profile(model, metrics=[result.metric()], roles=[result.role()])`.

    Args:
        name: Unique name of the metric.
        examples: The examples.
        job: "pairs" or "alignment".
    """

    def __init__(self, name: str, examples: Sequence[LabeledExample], job: str = "pairs") -> None:
        if job not in ("pairs", "alignment"):
            raise ArgumentError(
                f"job={job!r}: a role is a pattern of attention, so only the jobs 'pairs' and 'alignment' have one."
            )
        self.examples, self.job = list(examples), job
        spec = MetricSpec(
            name, f"examples of the job {name!r}", high_means="does the job of the examples", hue=155, in_table=True,
            merge=IDENTICAL, corpus_label=f"examples of {name}", hits=job == "pairs",
        )  # fmt: skip
        self.metric_specs = spec.with_variants()

    def run(
        self, model: ModelProtocol, accumulator: Accumulator, seed: int = 0, progress: Progress | None = None
    ) -> TaskMetricDetails:
        """Score the examples and add the sums of each input."""
        accumulator.register_metrics(self.names)
        result = find_heads(model, self.examples, job=self.job, seed=seed, progress=progress)
        table, addresses = result.table, result.metadata["addresses"]
        baselines = chosen_baselines(table)
        available = [address for point in reachable_hook_points(model) for address in point.head_addresses]
        order = sorted(range(len(table.keys)), key=lambda index: table.keys[index])
        for column, address in enumerate(addresses):
            head = [str(item) for item in available].index(address)
            values = np.stack((table.scores[:, column], baselines[:, column], table.value_weighted[:, column]), -1)
            counts = np.broadcast_to(table.counts[:, None], values.shape)
            measured = np.isfinite(values)
            accumulator.add(
                self.names, slice(head, head + 1), range(len(order)),
                torch.from_numpy(np.where(measured, values, 0.0)[order][:, None]),
                torch.from_numpy(np.where(measured, counts, 0.0)[order][:, None]),
            )  # fmt: skip
        return TaskMetricDetails()
