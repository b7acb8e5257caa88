"""Head importance: the loss increase without a head, measured by ablation or estimated from gradients.

ablation:     every head is ablated, one at a time, by the fast sweep.
gradient:     E |∂L/∂ξ| for a gate ξ on the head; absolute value per text (https://arxiv.org/abs/1905.10650).
attribution:  first-order estimate of ablation, all heads in one backward pass, compared with exact ablation on a sample
              of heads (https://arxiv.org/abs/2310.10348). It can miss the full effect if a softmax is saturated.

Later heads can compensate for an ablated head, so the importance is a lower bound of its contribution.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from headwise.analysis.ablation.ablate import ABLATION_METHODS, AblationMethod, make_replacement_fn
from headwise.analysis.ablation.ablation_sweep import (
    BATCH_TOKENS,
    ReplacementFactory,
    ablation_gradients,
    ablation_sweep,
)
from headwise.analysis.ablation.eval_targets import (
    EvalMetric,
    TargetBatch,
    check_metric,
    evaluable_samples,
    make_target_batch,
)
from headwise.analysis.ablation.gradient_memory import GradientMemoryPlan, frozen_weights
from headwise.analysis.ablation.importance_on_model_kwargs import LossFunction, importance_on_model_kwargs
from headwise.analysis.ablation.recorded_head_outputs import (
    HeadOutputs,
    MeanActivations,
    eval_corpus,
    mean_of_outputs,
    selected_hook_points,
)
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.statistics import bootstrap_difference_interval, bootstrap_interval
from headwise.analysis.recording.batching import TextSample, make_batch, make_batches, reachable_hook_points
from headwise.analysis.recording.model_calls import is_call_list, normalize_call_list, reads_calls
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.errors import ArgumentError, suggest_names
from headwise.heads.head import HeadPattern
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol, eval_mode
from headwise.progress import ProgressOption, callback_of, shows_progress
from headwise.spec import Address

ImportanceRanking = Literal["ablation", "gradient", "attribution"]
IMPORTANCE_RANKINGS = ("ablation", "gradient", "attribution")
PROGRESS_LABEL = "head importance"
BATCH_DIVISOR = 8  # text batches are this factor smaller than batch_tokens, to leave room for copies


@dataclass(frozen=True)
class SingleHeadImportance:
    """Importance of one head, with 95% confidence intervals from a bootstrap over texts.

    Attributes:
        head: Address of the head.
        importance: Loss increase without the head.
        low: Lower bound of `importance`.
        high: Upper bound of `importance`.
        above_layer: Importance minus the mean importance of the other heads of the layer. NaN for a single head.
        above_low: Lower bound of `above_layer`.
        above_high: Upper bound of `above_layer`.
    """

    head: str
    importance: float
    low: float
    high: float
    above_layer: float
    above_low: float
    above_high: float


@dataclass(frozen=True)
class AttributionCheck:
    """Comparison of attribution estimates with exact ablation on a sample of heads.

    Attributes:
        heads: Addresses of the sampled heads.
        estimate: Estimated importance of each head.
        exact: Importance of each head, measured by ablation.
    """

    heads: tuple[str, ...]
    estimate: tuple[float, ...]
    exact: tuple[float, ...]

    @property
    def correlation(self) -> float:
        """Pearson correlation. NaN for fewer than two heads or constant values."""
        if len(self.heads) < 2 or np.ptp(self.estimate) == 0 or np.ptp(self.exact) == 0:
            return float("nan")
        return float(np.corrcoef(self.estimate, self.exact)[0, 1])

    @property
    def worst_estimate(self) -> tuple[str, float]:
        """The head with the largest error, and its error (estimate − exact)."""
        gaps = np.subtract(self.estimate, self.exact)
        index = int(np.abs(gaps).argmax())
        return self.heads[index], float(gaps[index])


@dataclass(frozen=True, eq=False)
class Importance:
    """Importance of every head, with sums per bucket of texts for confidence intervals and merging.

    Iterating yields one `SingleHeadImportance` per head; `result["5.1"]` returns the row of one head.

    Attributes:
        addresses: Measured heads.
        ranking: Ranking method: "ablation", "gradient" or "attribution".
        ablation: Replacement for the ablated heads: "mean", "zero" or "resample".
        metric: "loss" (all tokens) or "last" (last token of each text).
        texts: Number of texts, or of custom calls.
        accumulator: Sums and counts per bucket of texts.
        check: Comparison of estimates with exact ablation. Only for ranking "attribution".
    """

    addresses: tuple[Address, ...]
    ranking: ImportanceRanking
    ablation: str
    metric: str
    texts: int
    accumulator: Accumulator
    check: AttributionCheck | None = None

    @property
    def mean(self) -> np.ndarray:
        """Importance of each head, (heads,).

        Loss increase in nats per token; 1 − cosine for a model without an output layer; mean |∂L/∂ξ| for "gradient".
        """
        return self.accumulator.mean("importance")

    @property
    def clean_loss(self) -> float:
        """Loss of the unmodified model in nats per token. NaN unless the ranking is "ablation"."""
        return (
            float(self.accumulator.mean("clean")[0])
            if "clean" in self.accumulator.fields and self.addresses
            else float("nan")
        )

    @cached_property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """95% confidence interval from a bootstrap over texts: low and high, (heads,) each."""
        return bootstrap_interval(*self.accumulator.bucket_sums_and_counts("importance"))

    @cached_property
    def above_layer(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Importance minus the mean of the other heads of the layer: mean, low, high. NaN for a single head."""
        sums, counts = self.accumulator.bucket_sums_and_counts("importance")
        others = np.zeros_like(sums)
        is_only_head = np.zeros(len(self.addresses), dtype=bool)
        for index, address in enumerate(self.addresses):
            peers = [
                i
                for i, other in enumerate(self.addresses)
                if other.layer_address == address.layer_address and i != index
            ]
            is_only_head[index] = not peers
            others[:, index] = sums[:, peers].mean(1) if peers else 0.0
        with np.errstate(invalid="ignore", divide="ignore"):
            means = (sums - others).sum(0) / counts.sum(0)
        low, high = bootstrap_difference_interval(sums, counts, others, counts)
        return tuple(np.where(is_only_head, np.nan, values) for values in (means, low, high))  # pyright: ignore[reportReturnType]

    def __repr__(self) -> str:
        from headwise.ui.result_text import importance_table

        return importance_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import importance_table

        return importance_table(self).as_html()

    def __len__(self) -> int:
        return len(self.addresses)

    def __iter__(self) -> Iterator[SingleHeadImportance]:
        columns = (self.mean, *self.interval, *self.above_layer)
        for address, *values in zip(self.addresses, *columns, strict=True):
            yield SingleHeadImportance(str(address), *map(float, values))

    def __getitem__(self, head: Address | str) -> SingleHeadImportance:
        for entry in self:
            if entry.head == str(head).strip():
                return entry
        raise ArgumentError(f"head: {head} was not measured; {suggest_names(str(head), map(str, self.addresses))}")

    @property
    def ranked(self) -> tuple[Address, ...]:
        """Addresses of the heads, most important first."""
        return tuple(self.addresses[i] for i in np.argsort(-self.mean, kind="stable"))

    def table_rows(self) -> list[list[str | float]]:
        """Return table rows, most important head first. Columns are the fields of `SingleHeadImportance`."""
        return [list(asdict(entry).values()) for entry in sorted(self, key=lambda entry: -entry.importance)]

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain data for JSON. NaN becomes None."""
        data = {name: getattr(self, name) for name in ("ranking", "ablation", "metric", "texts", "clean_loss")}
        if self.check is not None:
            head, gap = self.check.worst_estimate
            data["check"] = asdict(self.check) | {"correlation": self.check.correlation, "worst": [head, gap]}
        return _to_json({**data, "heads": [asdict(entry) for entry in self]})

    def merge(self, other: "Importance") -> "Importance":
        """Combine two results as if one corpus had been used. The check of attribution is dropped."""
        if (self.addresses, self.ranking, self.ablation, self.metric) != (
            other.addresses,
            other.ranking,
            other.ablation,
            other.metric,
        ):
            differing = [
                name
                for name in ("addresses", "ranking", "ablation", "metric")
                if getattr(self, name) != getattr(other, name)
            ]
            raise ArgumentError(
                f"other: importances of different measurements cannot be merged. They differ in {', '.join(differing)}. "
                f"Measure both with the same heads=, ranking=, ablation= and metric=."
            )
        texts, accumulator = self.texts + other.texts, self.accumulator.merge(other.accumulator)
        return Importance(self.addresses, self.ranking, self.ablation, self.metric, texts, accumulator)


@shows_progress
@torch.inference_mode(False)
def importance(
    model: ModelProtocol,
    corpus: Any = None,
    *,
    ranking: ImportanceRanking = "ablation",
    ablation: AblationMethod = "mean",
    heads: HeadPattern = "*",
    metric: EvalMetric = "loss",
    means: MeanActivations | None = None,
    max_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    check_heads: int = 8,
    loss: LossFunction | None = None,
    progress: ProgressOption = None,
) -> Importance:
    """Measure the importance of every head: the loss increase without it.

    The model is unchanged afterwards.

    Args:
        model: The model to measure.
        corpus: A text, a list of texts, a path or a `Corpus`; pairs (source, text) for an encoder-decoder. None uses the
            default corpus of the model. Also custom calls, as a dict of keyword arguments or a list of dicts
            (`{"input_ids": …, "pixel_values": …, "labels": …}`): the loss is then that of the full model, heads are
            replaced with zeros, and each call is one unit of the bootstrap. A torch module takes any calls (`hw.attach`).
        ranking: "ablation" ablates each head; "gradient" is the mean absolute gradient of a head gate; "attribution" is
            the first-order estimate of ablation.
        ablation: Replacement for a head: "mean", "zero" or "resample" (its output on the next text).
        heads: Head pattern. "*" selects all heads.
        metric: "loss" is the mean loss over all tokens (masked tokens for an encoder; 1 − cosine of the mean hidden
            state for a model without an output layer). "last" is the loss of the last token of each text.
        means: Precomputed means for "mean" ablation. None computes them over the corpus.
        max_length: Plain text is split into chunks of this many tokens. None is 256, or the model's context if shorter.
        batch_tokens: Maximum number of tokens per forward pass, copies included.
        check_heads: Number of heads on which "attribution" is compared with exact ablation. 0 skips the comparison.
        loss: Function from the model output to a scalar loss. Only for custom calls; None uses the loss of the output.
        progress: Called with a label, the number of texts done and the total, which may be None.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        Importance of each head, with 95% confidence intervals.

    Raises:
        ArgumentError: If an argument is unknown, or the arguments cannot be combined.
        UnsupportedModelError: If the model does not support the metric or the ranking.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(ModelSpec(vocab=257, context=32, layers=2, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> result = importance(model, ["To be or not to be", "that is the question"])
    >>> [entry.head for entry in result], result.texts
    (['0.0', '0.1', '1.0', '1.1'], 2)
    """
    progress = callback_of(progress)
    _check_arguments(ranking, ablation, batch_tokens)
    if is_call_list(corpus) or reads_calls(model):
        if ranking == "attribution" or (means is not None and not reads_calls(model)):
            unsupported = "ranking='attribution'" if ranking == "attribution" else "means="
            raise ArgumentError(
                f"corpus: a corpus of model calls, [{{...}}, ...], supports only ranking='ablation' or 'gradient' with zero "
                f"ablation. Got {unsupported}. Remove this argument, or pass texts as the corpus."
            )
        calls = normalize_call_list(model, corpus)
        selected, accumulator, num_samples = importance_on_model_kwargs(
            model, calls, ranking, heads, loss, progress, means
        )
        ablation = "zero" if means is None or ranking == "gradient" else "mean"
        return Importance(selected, ranking, ablation, "loss", num_samples, accumulator)
    if loss is not None:
        raise ArgumentError(
            "loss: can be used only if the corpus is a list of model calls, corpus=[{...}, ...]. Got texts. "
            "Remove loss= and choose metric= instead."
        )
    check_metric(model, metric)
    with eval_mode(model):
        tokenized = eval_corpus(model, corpus, max_length)
        reachable = {hook_point.address for hook_point in reachable_hook_points(model, heads)}
        selected = tuple(
            head
            for hook_point, layer_heads in selected_hook_points(model, heads)
            if hook_point.address in reachable
            for head in layer_heads
        )
        ablation = "zero" if ranking == "gradient" else ablation  # a closed gate equals zero ablation
        num_samples = tokenized.count_if_small()
        memory = None if ranking == "ablation" else _gradient_memory(model, tokenized)
        max_tokens = max(1, batch_tokens // BATCH_DIVISOR) if memory is None else min(batch_tokens, memory.max_tokens)
        target_batches = _AblationBatches(model, tokenized, metric, ablation, means, max_tokens)
        accumulator = Accumulator(heads=len(selected))
        for batch, make_replacement in target_batches.with_replacements(selected):
            if ranking == "ablation":
                _add_ablation(accumulator, model, batch, selected, make_replacement, batch_tokens)
            else:
                is_signed = ranking == "attribution"
                _add_gradients(accumulator, model, batch, selected, make_replacement, memory, signed=is_signed)
            if progress is not None:
                progress(PROGRESS_LABEL, target_batches.num_done, num_samples)
        result = Importance(selected, ranking, ablation, metric, target_batches.num_done, accumulator)
        if ranking != "attribution" or not check_heads or not selected:
            return result
        sample = _sample_heads(selected, check_heads)
        exact = Accumulator(heads=len(sample))
        for batch, make_replacement in target_batches.with_replacements(sample):
            _add_ablation(exact, model, batch, sample, make_replacement, batch_tokens)
    estimates = dict(zip(selected, result.mean.tolist(), strict=True))
    compared = AttributionCheck(
        tuple(map(str, sample)), tuple(estimates[head] for head in sample), tuple(exact.mean("importance").tolist())
    )
    return Importance(selected, ranking, ablation, metric, result.texts, accumulator, compared)


class _AblationBatches:
    """Batches of a corpus with the replacements for ablated heads. Can be iterated several times."""

    def __init__(
        self,
        model: ModelProtocol,
        corpus: TokenizedCorpus,
        metric: EvalMetric,
        ablation: str,
        means: MeanActivations | None,
        batch_tokens: int,
    ) -> None:
        self.model, self.corpus, self.ablation, self.means = model, corpus, ablation, means
        self.metric: EvalMetric = metric
        self.batch_tokens, self.num_done = batch_tokens, 0
        # each pending text → the next text, whose z replaces that of the text; the last text uses the first
        self.donor_of: dict[int, TextSample] = {}

    def samples(self) -> Iterator[TextSample]:
        if self.ablation != "resample":
            yield from evaluable_samples(self.model, self.corpus)
            return
        samples = evaluable_samples(self.model, self.corpus)
        first = previous = next(samples)
        for sample in samples:
            self.donor_of[previous.index] = sample
            yield previous
            previous = sample
        if previous is first:
            raise ArgumentError(
                "corpus: resample ablation replaces z with that of another text, but the corpus has only one text. "
                "Add texts, or use ablation='mean'."
            )
        self.donor_of[previous.index] = first
        yield previous

    def batches(self) -> Iterator[tuple[list[TextSample], TargetBatch]]:
        self.num_done = 0
        for batch in make_batches(self.samples(), self.batch_tokens, device=self.model.device):
            self.num_done += len(batch.samples)
            yield list(batch.samples), make_target_batch(self.model, batch, self.metric)

    def with_replacements(self, heads: Sequence[Address]) -> Iterator[tuple[TargetBatch, ReplacementFactory]]:
        if self.ablation == "mean" and self.means is None:
            self.means = mean_of_outputs(batch.record_head_outputs(self.model, heads) for _, batch in self.batches())
        for samples, batch in self.batches():
            other = None
            if self.ablation == "resample":
                donors = make_batch([self.donor_of.pop(sample.index) for sample in samples], device=self.model.device)
                other = make_target_batch(self.model, donors, self.metric).record_head_outputs(self.model, heads)
            yield batch, self._replacement_factory(batch, other)

    def _replacement_factory(self, batch: TargetBatch, other: HeadOutputs | None) -> ReplacementFactory:
        return lambda hook_point, selected: make_replacement_fn(
            hook_point, selected, self.ablation, self.means, other, batch.real_tokens_at(hook_point.address)
        )


def _gradient_memory(model: ModelProtocol, corpus: TokenizedCorpus) -> GradientMemoryPlan:
    """Measure on the first text how many tokens fit into the memory of one backward pass."""
    sample = next(iter(evaluable_samples(model, corpus)))
    batch = make_batch([sample], device=model.device)
    with frozen_weights(model):
        return GradientMemoryPlan.measure(model, batch.ids, batch.source)


def _add_ablation(
    accumulator: Accumulator,
    model: ModelProtocol,
    batch: TargetBatch,
    heads: Sequence[Address],
    make_replacement: ReplacementFactory,
    batch_tokens: int,
) -> None:
    """Add the measured loss increase of each head on a batch."""
    lost, clean = ablation_sweep(model, batch, heads, make_replacement, batch_tokens)  # (heads, B)
    # a model without an output layer has no loss of its own
    clean_sums = clean if batch.targets is not None else torch.zeros(lost.shape[1], device="cpu", dtype=torch.float32)
    sums = torch.stack((lost.mT.cpu(), clean_sums.cpu()[:, None].expand(-1, len(heads))), -1)  # (B, heads, 2)
    accumulator.add(
        ("importance", "clean"), slice(0, len(heads)), batch.sample_ids, sums, batch.targets_per_text[:, None, None]
    )


def _add_gradients(
    accumulator: Accumulator,
    model: ModelProtocol,
    batch: TargetBatch,
    heads: Sequence[Address],
    make_replacement: ReplacementFactory,
    memory: GradientMemoryPlan | None,
    *,
    signed: bool,
) -> None:
    """Add gradients: signed sums per token, or the absolute gradient of each text's mean loss."""
    gradients = ablation_gradients(model, batch, heads, make_replacement, memory).mT.cpu()  # (B, heads)
    counts = batch.targets_per_text[:, None]
    if not signed:
        gradients, counts = (gradients / counts).abs(), to_float64(counts > 0)
    accumulator.add(("importance",), slice(0, len(heads)), batch.sample_ids, gradients[..., None], counts[..., None])


def _sample_heads(heads: tuple[Address, ...], count: int) -> tuple[Address, ...]:
    """Draw `count` heads at random with a fixed seed."""
    indices = np.random.default_rng(0).permutation(len(heads))[:count]
    return tuple(heads[i] for i in sorted(indices))


def _check_arguments(ranking: str, ablation: str, batch_tokens: int) -> None:
    for name, value, valid in (("ranking", ranking, IMPORTANCE_RANKINGS), ("ablation", ablation, ABLATION_METHODS)):
        if value not in valid:
            raise ArgumentError(f"{name}={value!r}: unknown value; {suggest_names(str(value), valid)}")
    if batch_tokens < 1:
        raise ArgumentError(f"batch_tokens: must be at least 1. Got {batch_tokens}.")


def _to_json(value: Any) -> Any:
    """Convert to JSON types: NaN becomes None, tuples become lists."""
    if isinstance(value, dict):
        return {key: _to_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(inner) for inner in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
