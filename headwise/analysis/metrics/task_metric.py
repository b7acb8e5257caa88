"""Tasks: metrics on generated texts or prompts, independent of the corpus."""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.attention_call import AttentionObserver
from headwise.analysis.metrics.metric import BaseHeadMetric, Metric
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.role_example_positions import ExampleStore
from headwise.analysis.recording.batching import TextSample, TokenBatch, make_batches
from headwise.model import ModelProtocol
from headwise.progress import Progress
from headwise.spec import LayerAddress
from headwise.text import Tokenizer
from headwise.text.token_alignment import Alignment

BATCH_TOKENS = 2048  # tokens per batch
SCORE, BASELINE, VALUE_WEIGHTED = range(3)  # columns of each group of three scores


@dataclass(frozen=True, eq=False)
class TaskMetricDetails:
    """Result of a task besides its sums.

    Attributes:
        skip_reason: Why the task was not run on this model. Empty if it was.
        chosen_offsets: Offset or position chosen for each head, by metric name. It is shown with the role.
        examples: Attention of every head at some of the positions of the task.
    """

    skip_reason: str = ""
    chosen_offsets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    examples: ExampleStore | None = None


class TaskMetric(BaseHeadMetric, ABC):
    """Base class of metrics that generate their own input.

    The scores come in groups of three: score, baseline and value-weighted score.
    """

    @abstractmethod
    def run(
        self, model: ModelProtocol, accumulator: Accumulator, seed: int = 0, progress: Progress | None = None
    ) -> TaskMetricDetails:
        """Run the task on a model and add its scores to an accumulator."""


class ControlledTextMetric(TaskMetric, Metric):
    """Base class of metrics on generated texts with controls.

    The score and the value-weighted score are measured on the texts. The baseline is the score at the same positions of the
    controls, which lack the structure that the metric is about. Each pair of text and control is one sample.
    """

    batch_tokens = BATCH_TOKENS

    @abstractmethod
    def texts_and_controls(self, model: ModelProtocol, seed: int) -> tuple[list[TextSample], list[TextSample]]:
        """Return the texts and one control per text. Both are empty if the model is not supported."""

    def run(
        self, model: ModelProtocol, accumulator: Accumulator, seed: int = 0, progress: Progress | None = None
    ) -> TaskMetricDetails:
        """Run the texts and the controls."""
        run_task_into_accumulator(model, self, accumulator, seed, progress=progress)
        return TaskMetricDetails()


def run_task_into_accumulator(
    model: ModelProtocol,
    task: ControlledTextMetric,
    accumulator: Accumulator,
    seed: int = 0,
    *,
    baseline: bool = True,
    observers: Sequence[AttentionObserver] = (),
    progress: Progress | None = None,
    layers: Container[LayerAddress] | None = None,
) -> None:
    """Run a model on the texts of a task and add the scores to an accumulator.

    Args:
        model: The model.
        task: The task.
        accumulator: Destination of the sums and counts.
        seed: Seed of the texts.
        baseline: Whether to run the controls too.
        observers: Observers of the attention calls on the texts.
        progress: Called with the task name, finished samples and total samples.
        layers: Layers to measure. None measures all.
    """
    accumulator.register_metrics(task.names)
    group, (texts, others) = task.names[0], task.texts_and_controls(model, seed)
    total, accumulators = (
        len(texts) + len(others) * baseline,
        [Accumulator(accumulator.heads), Accumulator(accumulator.heads)],
    )
    label, passes = (
        task.score_spec.corpus_label or task.score_spec.name,
        [(texts, observers), (others if baseline else [], ())],
    )
    done = 0

    def batches(samples: list[TextSample]) -> Iterator[TokenBatch]:
        nonlocal done
        for batch in make_batches(samples, task.batch_tokens, device=model.device):
            if progress is not None:
                progress(label, done, total)
            yield batch
            done += len(batch.samples)

    for totals, (samples, pass_observers) in zip(accumulators, passes, strict=True):
        MetricRunner(totals, [task], observers=pass_observers, layers=layers).run(model, batches(samples))
    if progress is not None:
        progress(label, total, total)
    for kind in ("sums", "counts"):
        scored, control = (getattr(totals, kind)[group] for totals in accumulators)  # (buckets, heads, numbers)
        combined = np.empty_like(scored)
        for column, source in ((SCORE, scored), (BASELINE, control), (VALUE_WEIGHTED, scored)):
            combined[..., column::3] = source[..., SCORE if column == BASELINE else column :: 3]
        getattr(accumulator, kind)[group] += combined


def sample_from_ids(index: int, ids: tuple[int, ...], tokenizer: Tokenizer) -> TextSample:
    """Create a sample from token ids. Its bucket is its index, and it has no text."""
    token_texts = [tokenizer.token(i) for i in ids]
    return TextSample(index, index, ids, None, partial(Alignment.of, "", ids, token_texts, [(0, 0)] * len(ids)))


def token_names(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, ...]:
    """Return the display text of each token.

    >>> from headwise.text.build_tokenizers import word_tokenizer
    >>> token_names(word_tokenizer(["the", "cat"]), [1, 0])
    ('cat', 'the')
    """
    return tuple(tokenizer.decode([i], keep_special_tokens=True).strip() or tokenizer.token(i) for i in ids)
