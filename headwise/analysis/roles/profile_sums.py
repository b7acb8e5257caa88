"""Collect: one streaming pass over a corpus that sums the metrics of every head."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.batch_context import TokenFeatureColumns
from headwise.analysis.metrics.default_metrics import default_metrics
from headwise.analysis.metrics.example_sampler import ExampleAttentionRecorder, ExampleSampler
from headwise.analysis.metrics.induction import InductionMetric, make_repeated_sequences
from headwise.analysis.metrics.metric import BaseHeadMetric, Metric, MetricSpec
from headwise.analysis.metrics.metric_runner import MetricRunner, points_in_layers
from headwise.analysis.metrics.relation_metric import RelationMetric
from headwise.analysis.metrics.role_example_positions import ExampleStore, repeated_token_examples
from headwise.analysis.metrics.task_metric import TaskMetric, run_task_into_accumulator, token_names
from headwise.analysis.metrics.token_classes import token_class_flags
from headwise.analysis.metrics.top_contexts import TopContexts
from headwise.analysis.metrics.variability import LENGTH, TEXTS, VariabilityMetric, accumulate_variability
from headwise.analysis.recording.batching import (
    TextSample,
    TokenBatch,
    make_batches,
    reachable_hook_points,
    tokenizer_of,
)
from headwise.analysis.recording.model_calls import reads_calls
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.build_causal_trials import MAX_TEXTS as MAX_ANSWER_TEXTS
from headwise.analysis.roles.build_causal_trials import DocumentSample
from headwise.analysis.roles.profile_result import OWN_RELATIONS, ProfileSums
from headwise.distributed.model_shard import ShardedTransformer, check_same_across_processes
from headwise.distributed.process_group import ProcessGroup
from headwise.errors import ArgumentError
from headwise.model import ModelProtocol
from headwise.progress import Progress
from headwise.spec import LayerAddress, select
from headwise.text.corpus import Corpus
from headwise.text.token_alignment import Alignment

TEXTS_DIFFER_MESSAGE = "corpus: the processes have different texts. Give every machine the same files."
# Many short sequences of repeated tokens: a sequence is a unit of the statistics, and 10,000 tests need many units.
NUM_REPEATED_SEQUENCES, REPEATED_LENGTH = 64, 16

SampleListener = Callable[[TextSample], None]


def ignore_progress(stage: str, done: int, total: int | None) -> None:
    """Discard progress reports."""


@dataclass(frozen=True, kw_only=True)
class CollectOptions:
    """Options of a pass over a corpus.

    Attributes:
        relations: Documents with gold arcs. None uses those of the corpus, or the default ones. False measures no relations.
        control: Name of the control that is profiled. `shuffled` shuffles the tokens of each text.
        max_length: Plain text is split into chunks of this many tokens.
        batch_tokens: Maximum number of tokens per batch.
        row_stride: One of every `row_stride` blocks of 64 query rows is measured.
        keep_texts: Store the texts that the causal test needs.
        seed: Seed of repeated tokens, shuffling and tasks.
        layers: Layers to measure. None measures all.
        progress: Progress callback.
    """

    relations: Any = None
    control: str | None = None
    max_length: int | None = None
    batch_tokens: int = 2048
    row_stride: int = 1
    keep_texts: bool = False
    seed: int = 0
    layers: frozenset[LayerAddress] | None = None
    progress: Progress = ignore_progress

    def __post_init__(self) -> None:
        if self.row_stride < 1:
            raise ArgumentError(f"row_stride: must be at least 1. Got {self.row_stride}. Use 1 to measure every row.")


@dataclass(frozen=True, eq=False)
class MetricSelection:
    """Metrics of a profile.

    Attributes:
        corpus_metrics: Metrics of the corpus.
        induction: Metric of repeated tokens.
        tasks: Tasks with their own texts or prompts.
        metric_specs: Specs of all metrics, by name.
    """

    corpus_metrics: tuple[Metric, ...]
    induction: InductionMetric
    tasks: tuple[TaskMetric, ...]
    metric_specs: dict[str, MetricSpec]


def select_metrics(model: ModelProtocol, metrics: Sequence[Metric | TaskMetric] = (), seed: int = 0) -> MetricSelection:
    """Return the default metrics and the additional ones."""
    defaults = default_metrics(token_class_flags(tokenizer_of(model), model.spec.vocab))
    tasks = [metric for metric in metrics if isinstance(metric, TaskMetric)]
    given_metrics = [metric for metric in metrics if not isinstance(metric, TaskMetric)]
    corpus_metrics = [*defaults, *given_metrics]
    induction = InductionMetric(make_repeated_sequences(model, NUM_REPEATED_SEQUENCES, REPEATED_LENGTH, seed))
    metric_specs = metric_specs_by_name([*corpus_metrics, *tasks, induction, VariabilityMetric()])
    return MetricSelection(tuple(corpus_metrics), induction, tuple(tasks), metric_specs)


def select_layers(
    model: ModelProtocol, only_layers: str | None, metrics: Sequence[Metric | TaskMetric] = (), *, prompts: bool = False
) -> frozenset[LayerAddress] | None:
    """Return the layers that a text such as `0-7` selects, or None for all."""
    if only_layers is None:
        return None
    unsupported = {
        "images": model.image_input is not None,
        "a corpus of calls": reads_calls(model),
        "prompts=True": prompts,
        "metrics with their own texts": any(isinstance(metric, TaskMetric) for metric in metrics),
    }
    for reason, applies in unsupported.items():
        if applies:
            raise ArgumentError(f"only_layers={only_layers!r}: not supported with {reason}. Use only_layers=None.")
    addresses = [address for hook_point in reachable_hook_points(model) for address in hook_point.head_addresses]
    try:
        selected = select(",".join(f"{part}.*" for part in only_layers.split(",")), addresses)
    except ArgumentError:
        names = sorted({address.layer_address for address in addresses})
        raise ArgumentError(
            f"only_layers={only_layers!r}: the model does not have these layers. Its layers are {names[0]} to {names[-1]}. "
            f"Use, for example, only_layers='{names[0]}'."
        ) from None
    return frozenset(address.layer_address for address in selected)


def metric_specs_by_name(metrics: Iterable[BaseHeadMetric]) -> dict[str, MetricSpec]:
    """Return all metric specs by name. Raise if a name occurs twice, because both would be summed as one."""
    metric_specs = [metric_spec for metric in metrics for metric_spec in metric.metric_specs]
    counts = Counter(metric_spec.name for metric_spec in metric_specs)
    duplicates = sorted(name for name, count in counts.items() if count > 1)
    if duplicates:
        raise ArgumentError(
            f"metrics: the name {duplicates[0]!r} is already used by another metric. Choose another name."
        )
    return {metric_spec.name: metric_spec for metric_spec in metric_specs}


def collect(
    model: ModelProtocol,
    corpus: Any,
    selection: MetricSelection,
    options: CollectOptions,
    process_group: ProcessGroup,
) -> tuple[ProfileSums, "RetainedTextCollector"]:
    """Run the model over a corpus once and sum every metric at every hook point.

    Args:
        model: Model in eval mode, without gradients.
        corpus: Texts, in any form that `hw.profile` accepts.
        selection: Metrics to sum.
        options: Options of the pass.
        process_group: Processes that share the texts. Each runs a part of them and receives the total sums.

    Returns:
        The sums, and the texts that the causal test needs.
    """
    texts = TokenizedCorpus.of(model, corpus, options.max_length)
    process_group.check_equal(texts.corpus.fingerprint, TEXTS_DIFFER_MESSAGE)
    if isinstance(model, ShardedTransformer):  # all processes run each text together
        check_same_across_processes(model.collectives, texts.corpus.fingerprint, "text")
    hook_points = points_in_layers(reachable_hook_points(model), options.layers)
    addresses = tuple(address for hook_point in hook_points for address in hook_point.head_addresses)
    accumulator, top_contexts = Accumulator(len(addresses)), TopContexts(len(addresses))
    sampler = _make_example_sampler(model, selection, len(addresses))
    relation_corpus = select_relation_corpus(model, texts, options)
    relation_metric = _relation_metric(model, relation_corpus, accumulator, sampler, options)
    samples = RetainedTextCollector(keep_for_causal_test=options.keep_texts)
    text_metrics: list[Metric] = [*selection.corpus_metrics]
    text_listeners: list[SampleListener] = [sampler.draw_token_examples, samples.add_text]
    document_listeners: list[SampleListener] = []
    if relation_metric is not None:
        document_listeners = [relation_metric.draw_examples, samples.add_document]
        if relation_corpus is texts:
            text_metrics.append(relation_metric)
            text_listeners += document_listeners
    read_batches = partial(_iterate_local_batches, model.device, options, process_group)
    observers = (sampler, top_contexts)
    runner = MetricRunner(accumulator, text_metrics, options.row_stride, observers, options.layers)
    is_shuffled = options.control == "shuffled"
    text_samples = (_shuffle_tokens(sample, options.seed) for sample in texts) if is_shuffled else texts
    runner.run(model, read_batches(text_samples, text_listeners, texts.count_if_small(), "texts"))
    if relation_metric is not None and relation_corpus is not None and relation_corpus is not texts:
        documents = (sample for sample in relation_corpus if sample.document is not None)
        batches = read_batches(documents, document_listeners, None, "documents with relations")
        MetricRunner(accumulator, [relation_metric], layers=options.layers).run(model, batches)
    examples = sampler.build_example_store()
    if process_group.size > 1:
        process_group.check_equal(texts.fingerprint, TEXTS_DIFFER_MESSAGE)  # tokenizers may differ too
        _merge_processes(process_group, accumulator, relation_metric, top_contexts, examples)
    recorder = ExampleAttentionRecorder(examples)
    run_task_into_accumulator(
        model, selection.induction, accumulator, options.seed, observers=[recorder], progress=options.progress,
        layers=options.layers,
    )  # fmt: skip
    accumulate_variability(model, samples.long_samples, accumulator, layers=options.layers)
    task_metadata, examples = run_tasks(model, selection.tasks, accumulator, examples, options.seed, options.progress)
    metadata = {
        "texts": texts.num_samples, "tokens": texts.num_tokens,
        "layers": [str(hook_point.address) for hook_point in hook_points],
        "model": _describe_model(model), "control": options.control, "seed": options.seed,
        "row_stride": options.row_stride, "corpus": corpus_display_name(texts.corpus),
        "relations_corpus": "" if relation_corpus is None else corpus_display_name(relation_corpus.corpus),
        "documents": samples.num_documents,
        "relations": OWN_RELATIONS if relation_metric and relation_corpus is texts else samples.documents_digest(),
        **task_metadata,
    }  # fmt: skip
    relation_specs = () if relation_metric is None else relation_metric.metric_specs
    metric_specs = {**selection.metric_specs, **{metric_spec.name: metric_spec for metric_spec in relation_specs}}
    sums = ProfileSums(
        addresses, accumulator, relation_metric, top_contexts.contexts(), examples, metadata, metric_specs
    )
    return sums, samples


def _make_example_sampler(model: ModelProtocol, selection: MetricSelection, heads: int) -> ExampleSampler:
    """Return the example sampler of a pass, with the repeated-token positions that are shown as examples."""
    repeats = selection.induction.repeats
    names = [token_names(tokenizer_of(model), ids) for ids in repeats.repeated.tolist()]
    repeat_examples = repeated_token_examples(names, repeats.start, repeats.length)
    layout = TokenFeatureColumns.of(selection.corpus_metrics)
    return ExampleSampler(heads, repeat_examples, layout, ahead=model.spec.kind != "decoder")


def select_relation_corpus(
    model: ModelProtocol, texts: TokenizedCorpus, options: CollectOptions
) -> TokenizedCorpus | None:
    """Return the documents of the relations: the texts themselves if they have relations, other documents, or None."""
    relations = options.relations
    if relations is False or (isinstance(relations, list) and not relations):
        return None
    if relations is None and options.control != "shuffled" and next(texts.relation_documents(), None) is not None:
        return texts
    return TokenizedCorpus.of(model, relations, options.max_length)


def _relation_metric(
    model: ModelProtocol,
    corpus: TokenizedCorpus | None,
    accumulator: Accumulator,
    sampler: ExampleSampler,
    options: CollectOptions,
) -> RelationMetric | None:
    """Return the metric of all relations in a corpus. None for shuffled texts, whose gold arcs are meaningless."""
    if corpus is None or options.control == "shuffled" or next(corpus.relation_documents(), None) is None:
        return None
    is_causal = model.spec.kind != "encoder"
    return RelationMetric.of(accumulator, corpus.relation_documents(), is_causal, sampler)


def _iterate_local_batches(
    device: torch.device,
    options: CollectOptions,
    process_group: ProcessGroup,
    samples: Iterable[TextSample],
    listeners: Sequence[SampleListener],
    num_samples: int | None,
    stage: str,
) -> Iterator[TokenBatch]:
    """Yield this process's texts in batches. The listeners receive the texts of all processes."""
    num_seen, done = 0, 0
    total = None if num_samples is None else len(range(process_group.rank, num_samples, process_group.size))

    def own_samples() -> Iterator[TextSample]:
        nonlocal num_seen
        for sample in samples:
            for listener in listeners:
                listener(sample)
            if num_seen % process_group.size == process_group.rank:
                yield sample
            num_seen += 1

    for batch in make_batches(own_samples(), options.batch_tokens, device=device):
        options.progress(stage, done, total)
        yield batch
        done += len(batch.samples)
    if 0 < num_seen < process_group.size:  # each process needs a text, to register the metrics
        raise ArgumentError(
            f"corpus: {num_seen} {stage} cannot be split over {process_group.size} processes. "
            f"Start at most {num_seen} processes."
        )
    options.progress(stage, done, done)


def _merge_processes(
    process_group: ProcessGroup,
    accumulator: Accumulator,
    relation_metric: RelationMetric | None,
    top_contexts: TopContexts,
    examples: ExampleStore,
) -> None:
    """Add up the sums of all processes, in place, and gather their examples."""
    relation_arrays = {} if relation_metric is None else relation_metric.arc_count_arrays()
    for arrays in (accumulator.sums, accumulator.counts, relation_arrays):
        for name in sorted(arrays):
            process_group.all_reduce_array_inplace(arrays[name])
    top_contexts.gather_from_processes(process_group)
    examples.gather_from_processes(process_group)


def run_tasks(
    model: ModelProtocol,
    tasks: Iterable[TaskMetric],
    accumulator: Accumulator,
    examples: ExampleStore,
    seed: int,
    progress: Progress,
) -> tuple[dict[str, Any], ExampleStore]:
    """Run the tasks. Return their part of the metadata, and the examples with those of the tasks."""
    skipped, choices = {}, {}
    for task in tasks:
        result = task.run(model, accumulator, seed, progress)
        if result.skip_reason:
            skipped[task.score_spec.name] = result.skip_reason
        choices |= {name: list(positions) for name, positions in result.chosen_offsets.items()}
        examples = examples if result.examples is None else examples.merge(result.examples)
    return {"skipped": skipped, "chosen_offsets": choices}, examples


class RetainedTextCollector:
    """Texts that are needed again after the pass, and counts."""

    def __init__(self, *, keep_for_causal_test: bool) -> None:
        self.keep_for_causal_test = keep_for_causal_test
        self.long_samples: list[TextSample] = []  # the first long texts, for variability
        self.first_samples: list[TextSample] = []  # texts in which the causal test searches for answers
        self.relation_documents = DocumentSample()
        self.num_documents, self._digest = 0, hashlib.sha256()

    def add_text(self, sample: TextSample) -> None:
        """Add one text."""
        if len(self.long_samples) < TEXTS and len(sample.ids) >= LENGTH:
            self.long_samples.append(sample)
        if self.keep_for_causal_test and len(self.first_samples) < MAX_ANSWER_TEXTS:
            self.first_samples.append(sample)

    @property
    def is_full(self) -> bool:
        """Whether further texts are not needed."""
        return len(self.long_samples) == TEXTS and (
            not self.keep_for_causal_test or len(self.first_samples) == MAX_ANSWER_TEXTS
        )

    def add_document(self, sample: TextSample) -> None:
        """Add one document with relations."""
        self._digest.update(f"{', ' if self.num_documents else '['}{sample.ids!r}".encode())
        self.num_documents += 1
        if self.keep_for_causal_test:
            self.relation_documents.add_if_needed(sample)

    def documents_digest(self) -> str:
        """Return a digest of the documents, equal for profiles of the same documents."""
        hasher = self._digest.copy()
        hasher.update(b"]" if self.num_documents else b"[]")
        return hasher.hexdigest()[:16]


def _describe_model(model: ModelProtocol) -> str:
    """Describe a model, pruned or not. Heads with one address are the same head if the descriptions are equal."""
    spec = model.spec
    layers = f"{spec.encoder_layers} + {spec.layers}" if spec.encoder_layers else str(spec.layers)
    return (
        f"{spec.kind} of {layers} layers with {spec.attention.heads} heads, width {spec.width}, {spec.vocab:,} tokens"
    )


def corpus_display_name(corpus: Corpus) -> str:
    """Describe a corpus, as shown with the roles that were found on it.

    >>> corpus_display_name(Corpus.probe_set()), corpus_display_name(Corpus.of(["A text."]))
    ('the probe set', 'the texts given')
    """
    if corpus.name.endswith(".tsv"):
        return "names in GAP"  # the only files of this kind
    match = re.fullmatch(r"a list of \d+ (\w+)", corpus.name)  # the number is shown elsewhere
    return f"the {match[1]} given" if match else ", ".join(Path(part).name for part in corpus.name.split(", "))


def _shuffle_tokens(sample: TextSample, seed: int) -> TextSample:
    """Shuffle the tokens of a text, except the first and the last, which may be special tokens."""
    n = len(sample.ids)
    inner = np.random.default_rng([seed, *sample.ids]).permutation(max(0, n - 2)) + 1  # independent of the text's index
    order = [0, *inner.tolist(), n - 1][:n]
    return replace(
        sample,
        ids=tuple(sample.ids[i] for i in order),
        document=None,
        _align=partial(_reorder_alignment, sample, order),
    )


def _reorder_alignment(sample: TextSample, order: list[int]) -> Alignment:
    """Return the alignment of a text with reordered tokens."""
    alignment = sample.alignment
    token_texts = [alignment.text[slice(*alignment.spans[i])].strip() or alignment.tokens[i] for i in order]
    ends = np.cumsum([len(token_text) + 1 for token_text in token_texts])
    spans = [(int(end) - 1 - len(token_text), int(end) - 1) for end, token_text in zip(ends, token_texts, strict=True)]
    ids, tokens = [sample.ids[i] for i in order], [alignment.tokens[i] for i in order]
    return Alignment.of(" ".join(token_texts), ids, tokens, spans)
