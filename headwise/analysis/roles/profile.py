"""A profile: every head of a model, measured over a corpus in one streaming pass."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.batch_context import FeatureLayout
from headwise.analysis.metrics.default_metrics import default_metrics
from headwise.analysis.metrics.example_sampler import ExampleRecorder, ExampleSampler
from headwise.analysis.metrics.induction import InductionMetric, RepeatedSequences, make_repeated_sequences
from headwise.analysis.metrics.metric import Metric, MetricSpec
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.relation_metric import RelationMetric
from headwise.analysis.metrics.role_examples import ExamplePosition, ExampleStore, repeated_token_examples
from headwise.analysis.metrics.task_metric import TaskMetric, run_task, token_names
from headwise.analysis.metrics.token_classes import token_class_flags
from headwise.analysis.metrics.top_contexts import TopContexts
from headwise.analysis.metrics.variability import LENGTH, TEXTS, VariabilityMetric, measure_variability
from headwise.analysis.recording.batching import (
    TextSample,
    TokenBatch,
    make_batches,
    reachable_hook_points,
    tokenizer_of,
)
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.causal_test import causal_test
from headwise.analysis.roles.causal_trials import MAX_TEXTS as MAX_ANSWER_TEXTS
from headwise.analysis.roles.causal_trials import DocumentSample
from headwise.analysis.roles.image_profile import profile_images
from headwise.analysis.roles.merge_profiles import OWN_RELATIONS
from headwise.analysis.roles.profile_result import EvidencePerHead, Profile
from headwise.analysis.roles.prompt_roles import PROMPT_ROLES, prompt_metrics
from headwise.analysis.roles.roles import Role, check_roles
from headwise.distributed.head_parallel import check_same_across_processes
from headwise.distributed.process_group import ProcessGroup, init_distributed
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol, eval_mode
from headwise.model.randomize_attention_weights import control_model
from headwise.model.shard import ShardedTransformer
from headwise.progress import Progress
from headwise.text.corpus import Corpus
from headwise.text.token_alignment import Alignment

CONTROLS = ("random-init", "random-attention", "shuffled")
TEXTS_DIFFER_MESSAGE = "the processes do not read the same texts; give every machine the same files."
# Repeated tokens, many and short: a sequence is a unit of the statistics, and a dozen prove nothing among 10,000 tests.
NUM_REPEATED_SEQUENCES, REPEATED_LENGTH = 64, 16


def profile(
    model: ModelProtocol,
    corpus: Any = None,
    *,
    relations: Any = None,
    metrics: Sequence[Metric] = (),
    roles: Sequence[Role] = (),
    max_length: int | None = None,
    batch_tokens: int = 2048,
    row_stride: int = 1,
    detail: str = "full",
    causal: bool = True,
    control: str | None = None,
    prompts: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Profile:
    """What every head does, over a corpus: a text, a list of texts, a path or a Corpus; none is the embedded probe set,
    or the synthetic language for its own models.

    `relations` are documents with gold arcs, if not the corpus's own; False: none are asked. `metrics` and `roles` of your
    own are taken and judged beside the usual ones (docs/analysis.md). `max_length`: tokens of a unit of plain text.
    `batch_tokens`: in a batch. `detail="light"`: of the texts only what the fused kernel can tell; `row_stride`: for very
    long texts, one block of 64 rows in so many is looked at. `causal`: test causally, by ablation. `prompts`: ask for the
    roles that need prompts of their own too (`headwise.analysis.roles.prompt_roles`).
    `control`: profile a model with random weights throughout (`random-init`), this model with random attention weights and
    everything else as trained (`random-attention`), or texts whose tokens are shuffled (`shuffled`).

    An encoder-decoder reads each text as its source and as its target. Its relations are those that lead back, which both
    stacks can see. Cross-attention has no distances, so none of those, no relations and no repeats are asked of it.

    A model that reads pixels looks at pictures: a folder of them, a list of paths, Pillow images or tensors. Its tokens are
    patches, and it is asked what needs no words (`headwise.analysis.roles.image_profile`).
    """
    if model.image_input is not None:
        if relations or max_length is not None or detail != "full" or prompts:
            raise HeadwiseError(
                "pictures have no relations, and are read whole; leave relations, max_length, detail and prompts out."
            )
        image_options: dict[str, Any] = {
            "batch_tokens": batch_tokens,
            "row_stride": row_stride,
            "control": control,
            "seed": seed,
            "progress": progress,
        }
        return profile_images(model, corpus, metrics=metrics, roles=roles, **image_options)
    if control is not None and control not in CONTROLS:
        raise HeadwiseError(f"control={control!r}: not a control. Use {', '.join(CONTROLS)} or none.")
    if detail not in ("full", "light") or row_stride < 1:
        raise HeadwiseError(f"detail is 'full' or 'light' and row_stride at least 1, got {detail!r} and {row_stride}.")
    model = control_model(model, control, seed)
    if prompts:
        if control == "shuffled" or model.is_sharded:
            raise HeadwiseError("prompts are read as they are, by a model that one process holds; leave them out here.")
        metrics, roles = (*prompt_metrics(), *metrics), (*PROMPT_ROLES, *roles)
    progress = progress or (lambda stage, done, total: None)
    with (
        eval_mode(model),
        torch.no_grad(),
        init_distributed(model.device, single_process=model.is_sharded) as process_group,
    ):
        profile_pass = _ProfilePass(
            model, max_length, batch_tokens, row_stride, detail, seed, control, progress, process_group, metrics, roles
        )
        return profile_pass.run(corpus, relations, causal)


class _ProfilePass:
    """One profile in the making."""

    def __init__(
        self,
        model: ModelProtocol,
        max_length: int | None,
        batch_tokens: int,
        row_stride: int,
        detail: str,
        seed: int,
        control: str | None,
        progress: Progress,
        process_group: ProcessGroup,
        metrics: Sequence[Metric],
        roles: Sequence[Role],
    ) -> None:
        self.model, self.progress = model, progress
        self.max_length, self.batch_tokens, self.row_stride = max_length, batch_tokens, row_stride
        self.detail, self.seed, self.control, self.process_group = detail, seed, control, process_group
        self.hook_points = reachable_hook_points(model)
        self.addresses = tuple(address for hook_point in self.hook_points for address in hook_point.head_addresses)
        self.accumulator, self.top_contexts = Accumulator(len(self.addresses)), TopContexts(len(self.addresses))
        self.tasks = [metric for metric in metrics if isinstance(metric, TaskMetric)]
        defaults = default_metrics(token_class_flags(tokenizer_of(model), model.spec.vocab))
        corpus_metrics = [*defaults, *(metric for metric in metrics if not isinstance(metric, TaskMetric))]
        self.metrics = [metric for metric in corpus_metrics if detail == "full" or not metric.needs_full_detail]
        self.induction = InductionMetric(make_repeated_sequences(model, NUM_REPEATED_SEQUENCES, REPEATED_LENGTH, seed))
        metric_specs = _unique_metric_specs([*self.metrics, *self.tasks, self.induction, VariabilityMetric()])
        self.metric_specs = {metric_spec.name: metric_spec for metric_spec in metric_specs}
        self.roles = tuple(roles)
        check_roles(self.roles, metric_specs)

    def run(self, corpus: Any, relations: Any, causal: bool) -> Profile:
        tokenized = TokenizedCorpus.of(self.model, corpus, self.max_length)
        self.process_group.check_equal(tokenized.corpus.fingerprint, TEXTS_DIFFER_MESSAGE)
        if isinstance(self.model, ShardedTransformer):  # all look at all of them, together
            check_same_across_processes(self.model.collectives, tokenized.corpus.fingerprint, "text")
        candidate_corpus = self._relation_corpus(tokenized, relations)
        # where words have moved arcs mean nothing
        documents = (
            () if candidate_corpus is None or self.control == "shuffled" else candidate_corpus.relation_documents()
        )
        first = next(iter(documents), None)
        relation_corpus = None if first is None else candidate_corpus
        relation_metric = None
        if relation_corpus is not None:
            relation_metric = RelationMetric.of(
                self.accumulator, relation_corpus.relation_documents(), self.model.spec.kind != "encoder"
            )
        test_causally = causal and self.model.spec.kind == "decoder" and self.model.output is not None
        kept_samples = ProfileSampleCollector(test_causally)
        repeat_examples, ahead = self._repeat_examples(self.induction.repeats), self.model.spec.kind != "decoder"
        sampler = ExampleSampler(len(self.addresses), repeat_examples, FeatureLayout.of(self.metrics), ahead)
        self._collect(tokenized, relation_corpus, relation_metric, sampler, kept_samples)
        examples = sampler.build_example_store()
        self._merge_processes(tokenized, relation_metric, examples)
        run_task(
            self.model,
            self.induction,
            self.accumulator,
            self.seed,
            extra_metrics=[ExampleRecorder(examples)],
            progress=self.progress,
        )
        measure_variability(self.model, kept_samples.long_samples, self.accumulator)
        task_metadata, examples = run_tasks(
            self.model, self.tasks, self.accumulator, examples, self.seed, self.progress
        )
        relations_digest = OWN_RELATIONS if relation_corpus is tokenized else kept_samples.digest()
        metadata = {
            **self._metadata(tokenized, candidate_corpus), "documents": kept_samples.num_documents,
            "relations": relations_digest, **task_metadata,
        }  # fmt: skip
        metric_specs = {
            **self.metric_specs,
            **{
                metric_spec.name: metric_spec
                for metric_spec in (relation_metric.metric_specs if relation_metric else ())
            },
        }
        run_causal_test = partial(self._causal_test, kept_samples) if test_causally else None
        return Profile.of(
            self.addresses,
            self.accumulator,
            relation_metric,
            self.top_contexts.contexts(),
            examples,
            metadata,
            metric_specs,
            self.roles,
            run_causal_test,
        )

    def _metadata(self, corpus: TokenizedCorpus, relation_corpus: TokenizedCorpus | None) -> dict[str, Any]:
        return {
            "texts": corpus.num_samples, "tokens": corpus.num_tokens,
            "layers": [str(hook_point.address) for hook_point in self.hook_points],
            "model": _describe_model(self.model), "control": self.control, "seed": self.seed, "detail": self.detail,
            "row_stride": self.row_stride, "corpus": describe_corpus(corpus.corpus),
            "relations_corpus": "" if relation_corpus is None else describe_corpus(relation_corpus.corpus),
        }  # fmt: skip

    def _relation_corpus(self, corpus: TokenizedCorpus, relations: Any) -> TokenizedCorpus | None:
        """Where relations are taken from: the texts themselves, if they have some, other documents, or nowhere."""
        if relations is False or (isinstance(relations, list) and not relations):
            return None
        if relations is None and self.control != "shuffled" and next(corpus.relation_documents(), None) is not None:
            return corpus
        return TokenizedCorpus.of(self.model, relations, self.max_length)

    def _batches(self, samples: Iterable[TextSample], num_samples: int | None, stage: str) -> Iterator[TokenBatch]:
        """This process's share of the units; the others pass it by, and are counted."""
        num_seen, done = 0, 0
        total = (
            None if num_samples is None else len(range(self.process_group.rank, num_samples, self.process_group.size))
        )

        def own_samples() -> Iterator[TextSample]:
            nonlocal num_seen
            for sample in samples:
                if num_seen % self.process_group.size == self.process_group.rank:
                    yield sample
                num_seen += 1

        for batch in make_batches(own_samples(), self.batch_tokens, device=self.model.device):
            self.progress(stage, done, total)
            yield batch
            done += len(batch.samples)
        if 0 < num_seen < self.process_group.size:  # each needs one, to know what is counted
            raise HeadwiseError(
                f"{num_seen} {stage} cannot be shared out over {self.process_group.size} processes; start fewer."
            )
        self.progress(stage, done, done)

    def _repeat_examples(self, repeats: RepeatedSequences) -> list[ExamplePosition]:
        """The places that are shown of repeated tokens."""
        names = [token_names(tokenizer_of(self.model), ids) for ids in repeats.repeated.tolist()]
        return repeated_token_examples(names, repeats.start, repeats.length)

    def _collect(
        self,
        corpus: TokenizedCorpus,
        relation_corpus: TokenizedCorpus | None,
        relation_metric: RelationMetric | None,
        sampler: ExampleSampler,
        kept_samples: "ProfileSampleCollector",
    ) -> None:
        """The texts, and the documents with relations: in one pass where they are the same. What is shown and what is asked
        later is drawn and kept while they stream by."""
        shared_metric = relation_metric if relation_corpus is corpus else None
        metrics = [sampler, self.top_contexts, *self.metrics, *([] if shared_metric is None else [shared_metric])]
        runner = MetricRunner(self.accumulator, metrics, self.row_stride, self.detail)
        if relation_metric is not None:
            relation_metric.sampler = sampler

        def text_samples() -> Iterator[TextSample]:
            for original in corpus:
                sample = _shuffle_tokens(original, self.seed) if self.control == "shuffled" else original
                sampler.draw_token_examples(sample)
                kept_samples.add_text(sample)
                if shared_metric is not None:
                    sampler.draw_relation_examples(shared_metric.relation_targets(sample))
                    kept_samples.add_document(sample)
                yield sample

        def document_samples(tokenized: TokenizedCorpus, metric: RelationMetric) -> Iterator[TextSample]:
            for sample in tokenized:
                if sample.document is not None:
                    sampler.draw_relation_examples(metric.relation_targets(sample))
                    kept_samples.add_document(sample)
                    yield sample

        runner.run(self.model, self._batches(text_samples(), corpus.count_if_small(), "texts"))
        if relation_metric is not None and relation_corpus is not None and shared_metric is None:
            batches = self._batches(
                document_samples(relation_corpus, relation_metric), None, "documents with relations"
            )
            MetricRunner(self.accumulator, [relation_metric]).run(self.model, batches)

    def _merge_processes(
        self, corpus: TokenizedCorpus, relation_metric: RelationMetric | None, examples: ExampleStore
    ) -> None:
        """What every process counted, added up; the evidence of all."""
        if self.process_group.size == 1:
            return
        # as they were read: a tokenizer may be another one too
        self.process_group.check_equal(corpus.fingerprint, TEXTS_DIFFER_MESSAGE)
        for arrays in (
            self.accumulator.sums,
            self.accumulator.counts,
            *([] if relation_metric is None else [relation_metric.to_arrays()]),
        ):
            for name in sorted(arrays):
                self.process_group.all_reduce_inplace(arrays[name])
        self.top_contexts.gather_from_processes(self.process_group)
        examples.gather_from_processes(self.process_group)

    def _causal_test(self, kept_samples: "ProfileSampleCollector", evidence: EvidencePerHead) -> EvidencePerHead:
        """The last evidence level."""
        documents = kept_samples.relation_documents.samples.values()
        return causal_test(
            self.model, self.addresses, evidence, documents, kept_samples.first_samples, self.seed + 1, self.progress
        )


def run_tasks(
    model: ModelProtocol,
    tasks: Iterable[TaskMetric],
    accumulator: Accumulator,
    examples: ExampleStore,
    seed: int,
    progress: Progress,
) -> tuple[dict[str, Any], ExampleStore]:
    """Ask what reads texts or prompts of its own: what is told about it, and the cases with those it shows."""
    skipped, choices = {}, {}
    for task in tasks:
        reason = task.run(model, accumulator, seed, progress)
        if reason:
            skipped[task.score_spec.name] = reason
        choices |= {name: list(positions) for name, positions in task.chosen_offsets.items()}
        examples = examples if task.examples is None else examples.merge(task.examples)
    return {"skipped": skipped, "chosen_offsets": choices}, examples


class ProfileSampleCollector:
    """What is needed again when all texts have been read: a few of them, and counts."""

    def __init__(self, keep_for_causal_test: bool) -> None:
        self.keep_for_causal_test = keep_for_causal_test
        self.long_samples: list[TextSample] = []  # the first that are long enough to be compared place by place
        self.first_samples: list[TextSample] = []  # in which the causal test looks for answers
        self.relation_documents = DocumentSample()
        self.num_documents, self._digest = 0, hashlib.sha256()

    def add_text(self, sample: TextSample) -> None:
        """One text."""
        if len(self.long_samples) < TEXTS and len(sample.ids) >= LENGTH:
            self.long_samples.append(sample)
        if self.keep_for_causal_test and len(self.first_samples) < MAX_ANSWER_TEXTS:
            self.first_samples.append(sample)

    @property
    def is_full(self) -> bool:
        """Whether further texts would change nothing."""
        return len(self.long_samples) == TEXTS and (
            not self.keep_for_causal_test or len(self.first_samples) == MAX_ANSWER_TEXTS
        )

    def add_document(self, sample: TextSample) -> None:
        """One text that relations are asked about."""
        self._digest.update(f"{', ' if self.num_documents else '['}{sample.ids!r}".encode())
        self.num_documents += 1
        if self.keep_for_causal_test:
            self.relation_documents.add(sample)

    def digest(self) -> str:
        """What was read, in a few characters: whether two profiles read the same."""
        hasher = self._digest.copy()
        hasher.update(b"]" if self.num_documents else b"[]")
        return hasher.hexdigest()[:16]


def _unique_metric_specs(metrics: Iterable[Metric]) -> list[MetricSpec]:
    """All numbers; two of one name would be added up as one."""
    metric_specs = [metric_spec for metric in metrics for metric_spec in metric.metric_specs]
    duplicates = [
        name for name, count in Counter(metric_spec.name for metric_spec in metric_specs).items() if count > 1
    ]
    if duplicates:
        raise HeadwiseError(f"there is a metric {sorted(duplicates)[0]!r} already; give yours another name.")
    return metric_specs


def _describe_model(model: ModelProtocol) -> str:
    """What a model is, whatever was cut from it: whether a head's address means the same in two profiles."""
    spec = model.spec
    layers = f"{spec.encoder_layers} + {spec.layers}" if spec.encoder_layers else str(spec.layers)
    return (
        f"{spec.kind} of {layers} layers with {spec.attention.heads} heads, width {spec.width}, {spec.vocab:,} tokens"
    )


def describe_corpus(corpus: Corpus) -> str:
    """What a corpus is, as it is told beside the roles that were shown on it.

    >>> describe_corpus(Corpus.probe_set()), describe_corpus(Corpus.of(["A text."]))
    ('the probe set', 'the texts given')
    """
    if corpus.name.endswith(".tsv"):
        return "names in GAP"  # the only files of this kind
    match = re.fullmatch(r"a list of \d+ (\w+)", corpus.name)  # how many there are is told elsewhere
    return f"the {match[1]} given" if match else ", ".join(Path(part).name for part in corpus.name.split(", "))


def _shuffle_tokens(sample: TextSample, seed: int) -> TextSample:
    """The same tokens in another order; the first and the last stay where they are, as special tokens do."""
    n = len(sample.ids)
    inner = np.random.default_rng([seed, *sample.ids]).permutation(max(0, n - 2)) + 1  # wherever in a corpus it stands
    order = [0, *inner.tolist(), n - 1][:n]
    return replace(
        sample,
        ids=tuple(sample.ids[i] for i in order),
        document=None,
        _align=partial(_reorder_alignment, sample, order),
    )


def _reorder_alignment(sample: TextSample, order: list[int]) -> Alignment:
    """The tokens of a unit in another order, as a text of its own."""
    alignment = sample.alignment
    token_texts = [alignment.text[slice(*alignment.spans[i])].strip() or alignment.tokens[i] for i in order]
    ends = np.cumsum([len(token_text) + 1 for token_text in token_texts])
    spans = [(int(end) - 1 - len(token_text), int(end) - 1) for end, token_text in zip(ends, token_texts, strict=True)]
    ids, tokens = [sample.ids[i] for i in order], [alignment.tokens[i] for i in order]
    return Alignment.of(" ".join(token_texts), ids, tokens, spans)
