"""History of head metrics during training, measured on the same few texts at each step.

Heads are similar at initialization and specialize at different times, some of them suddenly
(https://arxiv.org/abs/2209.11895).
"""

import hashlib
import json
from bisect import bisect_left
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.default_metrics import default_metrics
from headwise.analysis.metrics.directed_relations import HITS
from headwise.analysis.metrics.induction import (
    DUPLICATE,
    INDUCTION,
    InductionMetric,
    RepeatedSequences,
    make_repeated_sequences,
)
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.offsets import OFFSET_SPECS
from headwise.analysis.metrics.relation_metric import RelationMetric
from headwise.analysis.metrics.row_shape import CONFIDENCE, DISTANCE, ENTROPY, FIRST_TOKEN
from headwise.analysis.metrics.task_metric import run_task_into_accumulator
from headwise.analysis.metrics.token_classes import token_class_flags
from headwise.analysis.recording.batching import TextSample, make_batches, tokenizer_of
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus, documents_within_context
from headwise.errors import ArgumentError, FileFormatError, UnsupportedModelError, suggest_names
from headwise.io.atomic_write import write_atomic
from headwise.model import Transformer, eval_mode
from headwise.spec import Address
from headwise.text.corpus import Corpus
from headwise.text.synthetic import VOCABULARY

DEFAULT_METRICS = tuple(
    metric_spec.name
    for metric_spec in (ENTROPY, CONFIDENCE, DISTANCE, FIRST_TOKEN, OFFSET_SPECS[1], INDUCTION[0], DUPLICATE[0])
)
VERSION = 3
MAX_DOCUMENTS = 48  # keeps a measurement cheap compared with the training steps in between


class MetricEmergence(NamedTuple):
    """Final value of one metric and its emergence during training.

    Attributes:
        metric: Name of the metric.
        head: Head with the largest value at the last step.
        value: Value of this head at the last step.
        baseline: Largest value of any head at the first step.
        num_rows: Number of rows or arcs in the mean.
        half_step: First step at which the head reached half of `value`. None if `value` is not positive.
    """

    metric: str
    head: str
    value: float
    baseline: float
    num_rows: int
    half_step: int | None


class HeadHistory:
    """Records metrics of every head during training.

    Pass it to `hw.train(…, callback=history, callback_every=100)`, or call it with a model and a step. The texts are selected
    at the first measurement and stay the same.

    Args:
        corpus: Texts to measure on. None uses documents of the synthetic language for models trained on it, else documents of
            the probe set.
        relations: Also measure gold arcs, if the corpus has them. `coreference > hits` is the fraction of arcs whose target
            receives the largest attention weight.

    Attributes:
        steps: Measured steps.
        addresses: Addresses of the heads.
        metric_names: Names of the metrics.
        counts: Number of rows or arcs in the mean of each metric.
        path: File to which the history is saved after each measurement. None saves nothing.

    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.training import Recipe, train
    >>> spec = ModelSpec(vocab=257, context=16, layers=1, attention=AttentionSpec(width=16, heads=2))
    >>> history = HeadHistory("to be or not to be")
    >>> recipe = Recipe(steps=6, batch_size=4, warmup=2)
    >>> result = train(spec, "to be or not to be " * 50, recipe, callback=history, callback_every=4, progress=False)
    >>> history.steps, history.addresses, len(history.curve("0.1", "induction"))
    ([0, 4, 6], ('0.0', '0.1'), 3)
    """

    def __init__(self, corpus: Any = None, relations: bool = True) -> None:
        self.corpus, self.relations = corpus, relations
        self.steps: list[int] = []
        self.addresses: tuple[str, ...] = ()
        self.metric_names: tuple[str, ...] = ()
        self.counts: tuple[int, ...] = ()
        self._rows: list[np.ndarray] = []  # (heads, metrics) for each step
        self._digest = ""  # of the texts, so that a history never mixes two sets of texts
        self._probe: tuple[list[TextSample], RepeatedSequences] | None = None
        self.path: Path | None = None

    @staticmethod
    def load_or_create(path: str | Path, corpus: Any = None) -> "HeadHistory":
        """Return a history that is saved to a file after each measurement. An existing file is continued.

        Args:
            path: File of the history (.npz).
            corpus: Texts to measure on. An existing file needs the corpus it was created with.

        >>> import tempfile
        >>> HeadHistory.load_or_create(tempfile.mkdtemp() + "/heads.npz").steps
        []
        """
        history = HeadHistory.load(path, corpus) if Path(path).is_file() else HeadHistory(corpus)
        history.path = Path(path)
        return history

    def __call__(self, model: Transformer, step: int) -> None:
        """Measure a model and store the result for a step. An existing result of the step is replaced.

        Args:
            model: The model to measure.
            step: Training step.
        """
        if model.spec.kind == "encoder-decoder":
            raise UnsupportedModelError(
                "model: HeadHistory does not support encoder-decoder models, because it uses single texts. "
                "Use a decoder or an encoder."
            )
        addresses = tuple(
            str(address) for hook_point in model.gathered_hook_points() for address in hook_point.head_addresses
        )
        if self.addresses and addresses != self.addresses:
            raise ArgumentError(
                f"model: its heads differ from those of this history. Got {len(addresses)} heads, expected "
                f"{len(self.addresses)} heads (from {self.addresses[0]} to {self.addresses[-1]}). Create a new HeadHistory."
            )
        with eval_mode(model), torch.no_grad():
            samples, repeats = self._probe_samples(model)
            metric_names, counts, row = _measure_metrics(
                model, len(addresses), samples, repeats, with_relations=self.relations
            )
        if self.metric_names and metric_names != self.metric_names:
            raise ArgumentError(
                f"model: the measured metrics differ from those of this history. Got {len(metric_names)} metrics, expected "
                f"{len(self.metric_names)}. Create a new HeadHistory."
            )
        self.addresses, self.metric_names, self.counts = addresses, metric_names, counts
        self._insert(step, row)
        if self.path is not None:
            self.save(self.path)

    def __repr__(self) -> str:
        from headwise.ui.result_text import last_step_best_heads_table

        return last_step_best_heads_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import last_step_best_heads_table

        return last_step_best_heads_table(self).as_html()

    @property
    def values(self) -> np.ndarray:
        """All values, (steps, heads, metrics), float32."""
        empty = np.zeros((0, len(self.addresses), len(self.metric_names)), dtype=np.float32)
        return np.stack(self._rows) if self._rows else empty

    def curve(self, head: str, metric: str) -> list[float]:
        """Return one metric of one head: a value for each of `steps`.

        Args:
            head: Address of the head.
            metric: Name of the metric.
        """
        if head not in self.addresses:
            raise ArgumentError(f"head: unknown head {head!r}; {suggest_names(head, self.addresses)}")
        return self.values[:, self.addresses.index(head), self._metric_index(metric)].tolist()

    def first_step_reached(self, metric: str, threshold: float) -> dict[str, int]:
        """Return the first step at which each head reached a threshold. Heads below it are omitted.

        Args:
            metric: Name of the metric.
            threshold: Minimum value.
        """
        reached = self.values[..., self._metric_index(metric)] >= threshold  # (steps, heads)
        return {
            head: self.steps[int(reached[:, i].argmax())]
            for i, head in enumerate(self.addresses)
            if reached[:, i].any()
        }

    def best_head(self, metric: str) -> tuple[str, float]:
        """Return the head with the largest value of a metric at the last step, and the value."""
        index = self._metric_index(metric)
        last = self._rows[-1][:, index]  # (heads,)
        if np.isnan(last).all():
            raise ArgumentError(
                f"metric: {metric!r} has no value for any head, because it applies to no token of the texts. "
                f"Choose another metric, or other texts."
            )
        head = int(np.nanargmax(last))
        return self.addresses[head], float(last[head])

    def initial_max(self, metric: str) -> float:
        """Return the largest value of any head at the first step: for a new model, the value without training."""
        first = self._rows[0][:, self._metric_index(metric)]
        return float("nan") if np.isnan(first).all() else float(np.nanmax(first))

    def metric_emergence(self) -> list[MetricEmergence]:
        """Return, for each metric, the head with the largest value, and the step at which it reached half of it."""
        trajectories = []
        for metric, count in zip(self.metric_names, self.counts, strict=True) if self.steps else ():
            head, value = self.best_head(metric)
            # half of zero is not a meaningful threshold
            half_step = self.first_step_reached(metric, value / 2).get(head) if value > 0 else None
            trajectories.append(MetricEmergence(metric, head, value, self.initial_max(metric), count, half_step))
        return trajectories

    def save(self, path: str | Path) -> Path:
        """Write one compressed file and return its path. Load it with `HeadHistory.load`."""
        header = {
            "version": VERSION, "steps": self.steps, "heads": self.addresses, "metrics": self.metric_names,
            "counts": self.counts,
            "relations": self.relations, "texts": self._digest,
        }  # fmt: skip
        buffer = BytesIO()
        np.savez_compressed(
            buffer, values=self.values, header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
        )
        return write_atomic(path, buffer.getvalue())

    @staticmethod
    def load(path: str | Path, corpus: Any = None) -> "HeadHistory":
        """Load a file written by `save`.

        Args:
            path: File of the history.
            corpus: Texts of the history. Required to continue a history that was created with a corpus.

        Raises:
            FileFormatError: If the file is missing, damaged or of another version.
        """
        try:
            data = BytesIO(Path(path).read_bytes())  # numpy leaves a damaged file open
            with np.load(data, allow_pickle=False) as file:
                values, header = file["values"], json.loads(file["header"].tobytes())
            if header["version"] != VERSION:
                raise FileFormatError(
                    f"the file has format version {header['version']}, and this Headwise reads version {VERSION}"
                )
            return _history_from_stored(values, header, corpus)
        except FileNotFoundError:
            raise FileFormatError(
                f"{path}: file not found. Create it with headwise train, or check the path."
            ) from None
        except Exception as error:  # zipfile, zlib, numpy and json each have their own
            raise FileFormatError(
                f"{path}: not a head history, damaged, or of another version ({error}). Move it away and create it again "
                f"with headwise train."
            ) from None

    def _metric_index(self, metric: str) -> int:
        if not self.steps:
            raise ArgumentError(
                "history: empty. Pass it to hw.train(..., callback=history), or call it with a model and a step."
            )
        if metric not in self.metric_names:
            raise ArgumentError(f"metric: {metric!r} was not measured; {suggest_names(metric, self.metric_names)}")
        return self.metric_names.index(metric)

    def _insert(self, step: int, row: np.ndarray) -> None:
        index = bisect_left(self.steps, step)
        exists = self.steps[index : index + 1] == [step]
        self.steps[index : index + exists] = [step]
        self._rows[index : index + exists] = [row]

    def _probe_samples(self, model: Transformer) -> tuple[list[TextSample], RepeatedSequences]:
        """Return the texts, which are the same at every step."""
        if self._probe is None:
            corpus = _default_corpus(model) if self.corpus is None else self.corpus
            samples = list(TokenizedCorpus.of(model, corpus))
            repeats = make_repeated_sequences(model, sequences=8, length=16)
            fingerprint_text = json.dumps(
                [[sample.ids for sample in samples], repeats.repeated.tolist(), repeats.control.tolist()]
            )
            digest = hashlib.sha256(fingerprint_text.encode()).hexdigest()
            if self._digest not in ("", digest):
                raise ArgumentError(
                    "corpus: the texts differ from those of this history. Load it with the corpus= it was created with."
                )
            self._probe, self._digest = (samples, repeats), digest
        return self._probe


def _default_corpus(model: Transformer) -> Corpus:
    """Return documents in the model's language. If none fits into its context, their texts are split into chunks."""
    tokenizer = tokenizer_of(model)
    is_synthetic = set(tokenizer.backend.get_vocab()) >= set(VOCABULARY)
    corpus = Corpus.synthetic("held-out", documents=MAX_DOCUMENTS, seed=7) if is_synthetic else Corpus.probe_set()
    return documents_within_context(model, corpus, MAX_DOCUMENTS)


def _measure_metrics(
    model: Transformer, heads: int, samples: list[TextSample], repeats: RepeatedSequences, *, with_relations: bool
) -> tuple[tuple[str, ...], tuple[int, ...], np.ndarray]:
    """Measure once: metric names, number of rows of each metric, and values (heads, metrics)."""
    accumulator = Accumulator(heads)
    metrics = default_metrics(token_class_flags(tokenizer_of(model), model.spec.vocab))
    documents = [sample.document for sample in samples if sample.document is not None]
    has_relations = with_relations and documents
    relation_metric = RelationMetric.of(accumulator, documents, model.spec.kind == "decoder") if has_relations else None
    runner = MetricRunner(accumulator, [*metrics, *([] if relation_metric is None else [relation_metric])])
    runner.run(model, make_batches(samples, 2048, device=model.device))
    run_task_into_accumulator(model, InductionMetric(repeats), accumulator, baseline=False)
    metric_names = DEFAULT_METRICS
    if relation_metric is not None:
        present = relation_metric.arcs.sum(0) > 0  # a decoder has no arcs to later words
        metric_names += tuple(
            relation.metric_specs[HITS].name
            for relation, is_present in zip(relation_metric.relations, present, strict=True)
            if is_present
        )
    counts = tuple(int(accumulator.bucket_sums_and_counts(name)[1].sum(0).max()) for name in metric_names)
    return metric_names, counts, np.stack([accumulator.mean(name) for name in metric_names], 1).astype(np.float32)


def _history_from_stored(values: np.ndarray, stored: dict[str, Any], corpus: Any) -> HeadHistory:
    history = HeadHistory(corpus, bool(stored["relations"]))
    history.steps = [int(step) for step in stored["steps"]]
    history.addresses = tuple(str(Address.parse(head)) for head in stored["heads"])
    history.metric_names, history._digest = tuple(map(str, stored["metrics"])), str(stored["texts"])
    history.counts = tuple(map(int, stored["counts"]))
    shape = (len(history.steps), len(history.addresses), len(history.metric_names))
    if values.shape != shape or values.dtype != np.float32 or history.steps != sorted(set(history.steps)):
        raise FileFormatError(
            f"the values must be float32 of shape {shape}, with steps in increasing order; got {values.dtype} of shape "
            f"{values.shape}"
        )
    history._rows = list(values)
    return history
