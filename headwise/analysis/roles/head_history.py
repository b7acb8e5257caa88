"""A history: every head's measures again and again while a model is trained, on the same few texts.

Heads begin alike and find their work at different times, some of them suddenly (https://arxiv.org/abs/2209.11895).
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
from headwise.analysis.metrics.task_metric import run_task
from headwise.analysis.metrics.token_classes import token_class_flags
from headwise.analysis.recording.batching import TextSample, make_batches, tokenizer_of
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus, documents_within_context
from headwise.errors import HeadwiseError, suggest_names
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
MAX_DOCUMENTS = 48  # a look must be cheap beside the steps between two looks


class MetricEmergence(NamedTuple):
    """What became of one measure: the head with most of it, beside the most any head had at the first look."""

    metric: str
    head: str
    value: float
    baseline: float  # the most of any head at the first look
    num_rows: int  # rows or arcs it is a mean over
    half_step: int | None  # the step at which that head first had half of it


class HeadHistory:
    """Give it to `hw.train(…, callback=history, callback_every=100)`, or call it with a model and a step.

    The texts are made at the first look and stay: `corpus`, or some documents of the synthetic language for models that read
    it, or some of the probe set. `relations`: ask for gold arcs too, where the corpus has some; `coreference > hits` is the
    share of arcs whose target is the word looked at most.

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
        self.counts: tuple[int, ...] = ()  # rows or arcs each measure is a mean over
        self._rows: list[np.ndarray] = []  # for each step (heads, measures)
        self._digest = ""  # of the texts, so that two sets of them never share a curve
        self._probe: tuple[list[TextSample], RepeatedSequences] | None = None
        self.path: Path | None = None  # a file that is written at every look

    @staticmethod
    def load_or_create(path: str | Path, corpus: Any = None) -> "HeadHistory":
        """One that is saved at every look, in a file; what a stopped run left there is gone on with.

        >>> import tempfile
        >>> HeadHistory.load_or_create(tempfile.mkdtemp() + "/heads.npz").steps
        []
        """
        history = HeadHistory.load(path, corpus) if Path(path).is_file() else HeadHistory(corpus)
        history.path = Path(path)
        return history

    def __call__(self, model: Transformer, step: int) -> None:
        """Look at a model as it is at a step; a step that was seen before is seen anew."""
        if model.spec.kind == "encoder-decoder":
            raise HeadwiseError("a history reads one text at a time; an encoder-decoder needs two.")
        addresses = tuple(
            str(address) for hook_point in model.gathered_hook_points() for address in hook_point.head_addresses
        )
        if self.addresses and addresses != self.addresses:
            raise HeadwiseError(
                f"this history is of {len(self.addresses)} heads, {self.addresses[0]} to {self.addresses[-1]}; the model "
                f"has {len(addresses)} heads that are not the same. Begin another for it."
            )
        with eval_mode(model), torch.no_grad():
            samples, repeats = self._probe_samples(model)
            metric_names, counts, row = _measure_metrics(model, len(addresses), samples, repeats, self.relations)
        if self.metric_names and metric_names != self.metric_names:
            raise HeadwiseError(
                f"this history keeps {len(self.metric_names)} metrics, this look gave {len(metric_names)}; begin another."
            )
        self.addresses, self.metric_names, self.counts = addresses, metric_names, counts
        self._insert(step, row)
        if self.path is not None:
            self.save(self.path)

    @property
    def values(self) -> np.ndarray:
        """Everything: (steps, heads, measures), float32."""
        empty = np.zeros((0, len(self.addresses), len(self.metric_names)), dtype=np.float32)
        return np.stack(self._rows) if self._rows else empty

    def curve(self, head: str, metric: str) -> list[float]:
        """One head's life in one measure: a number for each of `steps`."""
        if head not in self.addresses:
            raise HeadwiseError(f"there is no head {head!r} here; {suggest_names(head, self.addresses)}")
        return self.values[:, self.addresses.index(head), self._metric_index(metric)].tolist()

    def first_step_reached(self, metric: str, threshold: float) -> dict[str, int]:
        """The first step at which each head reached a threshold; heads that never did are left out."""
        reached = self.values[..., self._metric_index(metric)] >= threshold  # (steps, heads)
        return {
            head: self.steps[int(reached[:, i].argmax())]
            for i, head in enumerate(self.addresses)
            if reached[:, i].any()
        }

    def best_head(self, metric: str) -> tuple[str, float]:
        """The head with the most of a measure at the last step, and how much."""
        index = self._metric_index(metric)
        last = self._rows[-1][:, index]  # (heads,)
        if np.isnan(last).all():
            raise HeadwiseError(f"{metric!r} has no number for any head; the texts never ask for it.")
        head = int(np.nanargmax(last))
        return self.addresses[head], float(last[head])

    def initial_max(self, metric: str) -> float:
        """The most any head had of a measure at the first look: of a new model, what one sees that has learned nothing."""
        first = self._rows[0][:, self._metric_index(metric)]
        return float("nan") if np.isnan(first).all() else float(np.nanmax(first))

    def metric_emergence(self) -> list[MetricEmergence]:
        """For each measure the head with most of it, how much, and the step at which it first had half of that."""
        trajectories = []
        for metric, count in zip(self.metric_names, self.counts, strict=True) if self.steps else ():
            head, value = self.best_head(metric)
            # half of nothing is no news
            half_step = self.first_step_reached(metric, value / 2).get(head) if value > 0 else None
            trajectories.append(MetricEmergence(metric, head, value, self.initial_max(metric), count, half_step))
        return trajectories

    def save(self, path: str | Path) -> Path:
        """Write one compressed file; `HeadHistory.load` brings it back."""
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
        """Read a file written by `save`. To go on with it, give the corpus it was made with, if there was one."""
        try:
            data = BytesIO(Path(path).read_bytes())  # numpy leaves a damaged file open
            with np.load(data, allow_pickle=False) as file:
                values, header = file["values"], json.loads(file["header"].tobytes())
            if header["version"] != VERSION:
                raise HeadwiseError(f"it is of version {header['version']}, this is {VERSION}")
            return _history_from_stored(values, header, corpus)
        except FileNotFoundError:
            raise HeadwiseError(f"there is no file {path}.") from None
        except Exception as error:  # zipfile, zlib, numpy and json each have their own
            raise HeadwiseError(
                f"{path} is not a history that can be read here ({error}); move it away and make it again: "
                f"headwise train."
            ) from None

    def _metric_index(self, metric: str) -> int:
        if not self.steps:
            raise HeadwiseError("this history is empty; give it to hw.train(…, callback=history), or call it.")
        if metric not in self.metric_names:
            raise HeadwiseError(f"{metric!r} was not measured; {suggest_names(metric, self.metric_names)}")
        return self.metric_names.index(metric)

    def _insert(self, step: int, row: np.ndarray) -> None:
        index = bisect_left(self.steps, step)
        exists = self.steps[index : index + 1] == [step]
        self.steps[index : index + exists] = [step]
        self._rows[index : index + exists] = [row]

    def _probe_samples(self, model: Transformer) -> tuple[list[TextSample], RepeatedSequences]:
        """The texts, the same at every look."""
        if self._probe is None:
            corpus = _default_corpus(model) if self.corpus is None else self.corpus
            samples = list(TokenizedCorpus.of(model, corpus))
            repeats = make_repeated_sequences(model, sequences=8, length=16)
            fingerprint_text = json.dumps(
                [[sample.ids for sample in samples], repeats.repeated.tolist(), repeats.control.tolist()]
            )
            digest = hashlib.sha256(fingerprint_text.encode()).hexdigest()
            if self._digest not in ("", digest):
                raise HeadwiseError("this history was made with other texts; load it with the same corpus=….")
            self._probe, self._digest = (samples, repeats), digest
        return self._probe


def _default_corpus(model: Transformer) -> Corpus:
    """Documents in a language the model may know; where none fits into its context, their texts, to be cut."""
    tokenizer = tokenizer_of(model)
    is_synthetic = set(tokenizer.backend.get_vocab()) >= set(VOCABULARY)
    corpus = Corpus.synthetic("held-out", documents=MAX_DOCUMENTS, seed=7) if is_synthetic else Corpus.probe_set()
    return documents_within_context(model, corpus, MAX_DOCUMENTS)


def _measure_metrics(
    model: Transformer, heads: int, samples: list[TextSample], repeats: RepeatedSequences, with_relations: bool
) -> tuple[tuple[str, ...], tuple[int, ...], np.ndarray]:
    """One look: the names of the measures, what they are means over, and (heads, measures)."""
    accumulator = Accumulator(heads)
    metrics = default_metrics(token_class_flags(tokenizer_of(model), model.spec.vocab))
    documents = [sample.document for sample in samples if sample.document is not None]
    has_relations = with_relations and documents
    relation_metric = RelationMetric.of(accumulator, documents, model.spec.kind == "decoder") if has_relations else None
    runner = MetricRunner(accumulator, [*metrics, *([] if relation_metric is None else [relation_metric])])
    runner.run(model, make_batches(samples, 2048, device=model.device))
    run_task(model, InductionMetric(repeats), accumulator, baseline=False)
    metric_names = DEFAULT_METRICS
    if relation_metric is not None:
        present = relation_metric.arcs.sum(0) > 0  # a decoder is never asked about words to come
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
        raise HeadwiseError(f"its numbers are {values.dtype} {values.shape}, not float32 {shape} in the order of steps")
    history._rows = list(values)
    return history
