"""Roles that need prompts. They are measured if a profile is created with `prompts=True`.

They are a separate family of tests, so the scores and p-values of the other roles do not depend on them.
"""

import numpy as np

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.copy_suppression import CopySuppressionMetric
from headwise.analysis.metrics.far_attention import (
    FAR_OFFSET_SPECS,
    FIXED_POSITION_SPECS,
    OUTSIDE_WINDOW,
    FarAttentionMetric,
)
from headwise.analysis.metrics.name_movers import NameMoverMetric
from headwise.analysis.metrics.name_suppression import NameSuppressionMetric
from headwise.analysis.metrics.query_focused_retrieval import QueryFocusMetric
from headwise.analysis.metrics.statistics import bootstrap_interval
from headwise.analysis.metrics.successor import SuccessorMetric
from headwise.analysis.metrics.task_metric import TaskMetric
from headwise.analysis.roles.roles import LEAD, PROMPT_PROBE, SUPPRESSION_PROBE, Role

STREAMING_THRESHOLD = 0.05  # attention condition for streaming: maximum attention outside sink tokens and window


def prompt_metrics() -> tuple[TaskMetric, ...]:
    """Create the metrics of the prompt roles. A profile needs new ones."""
    return (
        SuccessorMetric(),
        NameMoverMetric(),
        NameSuppressionMetric(),
        CopySuppressionMetric(),
        QueryFocusMetric(),
        FarAttentionMetric(),
    )


THRESHOLDS = {"successor": 0.3, "name mover": 0.1, "name suppression": 0.1, "copy suppression": 0.1, "query focus": 0.1}
# probes of the causal test; the other roles have no answers
CAUSAL_PROBES = {
    "successor": PROMPT_PROBE,
    "name mover": LEAD,
    "name suppression": LEAD,
    "copy suppression": SUPPRESSION_PROBE,
}
PROMPT_ROLES = (
    *(
        Role(name, metric.score_spec, THRESHOLDS[name], CAUSAL_PROBES.get(name), separate_family=True)
        for metric in prompt_metrics()[:-1]
        for name in (metric.score_spec.name,)
    ),
    *(
        Role(metric_spec.name, metric_spec, 0.3, separate_family=True)
        for metric_spec in (FAR_OFFSET_SPECS[0], FIXED_POSITION_SPECS[0])
    ),
)


def streaming_candidate_mask(accumulator: Accumulator) -> np.ndarray | None:
    """Return the heads that meet the attention condition for streaming, (heads,). None if it was not measured.

    The upper end of the 95% CI of the attention outside sink tokens and window is below STREAMING_THRESHOLD. The condition is
    necessary, not sufficient: induction heads meet it, because they attend to the first token of ordinary text. Streaming is
    recommended only if the loss with the KV head streaming was measured as well
    (`headwise.compression.streaming_loss_evaluator`).
    """
    if OUTSIDE_WINDOW.name not in accumulator.fields:
        return None
    sums, counts = accumulator.bucket_sums_and_counts(OUTSIDE_WINDOW.name)
    return None if not counts.any() else bootstrap_interval(sums, counts)[1] < STREAMING_THRESHOLD
