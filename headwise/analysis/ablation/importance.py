"""What each head is worth: what the model loses without it, measured, or estimated from a slope.

ablation:     every head is really taken away, one at a time, by the quick sweep
gradient:     E |∂L/∂ξ|, ξ a gate on the head, the absolute value text by text (https://arxiv.org/abs/1905.10650)
attribution:  the first-order estimate of ablation, all heads from one backward pass, checked against the real thing on a
              sample of heads (https://arxiv.org/abs/2310.10348); behind a saturated softmax it can miss everything

Later heads take over from one that is gone, so one ablation is a lower bound of what a head does.
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
from headwise.analysis.ablation.custom_call_importance import LossFunction, importance_on_calls, is_call_list
from headwise.analysis.ablation.eval_targets import (
    EvalMetric,
    TargetBatch,
    check_metric,
    evaluable_samples,
    make_target_batch,
)
from headwise.analysis.ablation.head_outputs import (
    HeadOutputs,
    MeanActivations,
    eval_corpus,
    mean_of_outputs,
    selected_hook_points,
)
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.statistics import bootstrap_difference_interval, bootstrap_interval
from headwise.analysis.recording.batching import TextSample, make_batch, make_batches, reachable_hook_points
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.errors import HeadwiseError, suggest_names
from headwise.heads.head import HeadPattern
from headwise.model import ModelProtocol, eval_mode
from headwise.progress import Progress
from headwise.spec import Address

ImportanceRanking = Literal["ablation", "gradient", "attribution"]
IMPORTANCE_RANKINGS = ("ablation", "gradient", "attribution")
PROGRESS_LABEL = "what heads are worth"  # as progress is told
BATCH_DIVISOR = 8  # the batch of texts is this much smaller than what is run at once, to leave room for copies


@dataclass(frozen=True)
class HeadImportance:
    """One head: what is lost without it, and how much more than without another head of its layer; both with intervals."""

    head: str
    importance: float
    low: float
    high: float
    above_layer: float
    above_low: float
    above_high: float


@dataclass(frozen=True)
class AttributionCheck:
    """Estimates beside real ablation on a sample of heads."""

    heads: tuple[str, ...]
    estimate: tuple[float, ...]
    exact: tuple[float, ...]

    @property
    def correlation(self) -> float:
        """Pearson's; NaN where there is nothing to correlate."""
        if len(self.heads) < 2 or np.ptp(self.estimate) == 0 or np.ptp(self.exact) == 0:
            return float("nan")
        return float(np.corrcoef(self.estimate, self.exact)[0, 1])

    @property
    def worst_estimate(self) -> tuple[str, float]:
        """The head whose estimate is farthest off, and by how much: estimate − exact."""
        gaps = np.subtract(self.estimate, self.exact)
        index = int(np.abs(gaps).argmax())
        return self.heads[index], float(gaps[index])


@dataclass(frozen=True, eq=False)
class Importance:
    """What every head is worth, with sums by bucket of texts kept, so that intervals can be drawn and runs merged."""

    addresses: tuple[Address, ...]
    ranking: ImportanceRanking
    ablation: str
    metric: str
    texts: int
    accumulator: Accumulator
    check: AttributionCheck | None = None

    @property
    def mean(self) -> np.ndarray:
        """What is lost without each head, (heads,): nats a token, 1 − cosine for a model without output; or mean |∂L/∂ξ|."""
        return self.accumulator.mean("importance")

    @property
    def clean_loss(self) -> float:
        """The untouched model's own loss; only with ranking='ablation'."""
        return (
            float(self.accumulator.mean("clean")[0])
            if "clean" in self.accumulator.fields and self.addresses
            else float("nan")
        )

    @cached_property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """95 % of the bootstrap over texts: low and high, (heads,)."""
        return bootstrap_interval(*self.accumulator.bucket_sums_and_counts("importance"))

    @cached_property
    def above_layer(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """How much more is lost than without a random other head of its layer: mean, low, high; NaN where it is alone."""
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

    def __len__(self) -> int:
        return len(self.addresses)

    def __iter__(self) -> Iterator[HeadImportance]:
        columns = (self.mean, *self.interval, *self.above_layer)
        for address, *values in zip(self.addresses, *columns, strict=True):
            yield HeadImportance(str(address), *map(float, values))

    def __getitem__(self, head: Address | str) -> HeadImportance:
        for entry in self:
            if entry.head == str(head).strip():
                return entry
        raise HeadwiseError(f"head {head} was not measured; {suggest_names(str(head), map(str, self.addresses))}")

    @property
    def ranked(self) -> tuple[Address, ...]:
        """The heads, those worth most first."""
        return tuple(self.addresses[i] for i in np.argsort(-self.mean, kind="stable"))

    def table_rows(self) -> list[list[str | float]]:
        """A table, those worth most first; its columns are the fields of `HeadImportance`."""
        return [list(asdict(entry).values()) for entry in sorted(self, key=lambda entry: -entry.importance)]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data; what is not known is None."""
        data = {name: getattr(self, name) for name in ("ranking", "ablation", "metric", "texts", "clean_loss")}
        if self.check is not None:
            head, gap = self.check.worst_estimate
            data["check"] = asdict(self.check) | {"correlation": self.check.correlation, "worst": [head, gap]}
        return _to_json({**data, "heads": [asdict(entry) for entry in self]})

    def merge(self, other: "Importance") -> "Importance":
        """Both together, as if one corpus had been read; a check is left behind."""
        if (self.addresses, self.ranking, self.ablation, self.metric) != (
            other.addresses,
            other.ranking,
            other.ablation,
            other.metric,
        ):
            raise HeadwiseError("only what was measured alike, of the same heads, can be merged.")
        texts, accumulator = self.texts + other.texts, self.accumulator.merge(other.accumulator)
        return Importance(self.addresses, self.ranking, self.ablation, self.metric, texts, accumulator)


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
    progress: Progress | None = None,
) -> Importance:
    """What every head is worth on a `corpus`: by taking it away, or by slopes; the model stays as it is.

    `metric` "loss" is the mean loss over all tokens (hidden ones for an encoder; 1 − cosine of the mean state for a model
    without output), "last" the last token of each text alone (of a pair that is its end). `ablation` says what stands
    in a head's place; means not given are taken over these texts, and with "resample" each text borrows from the next.
    `check_heads` is how many heads an attribution is compared on. `max_length` cuts plain text into units of so many tokens
    (None: 256, or the model's context); `batch_tokens` is how many are run at once. An encoder-decoder is asked about pairs.

    `corpus` may also be calls of your own, a list of keyword arguments (`{"input_ids": …, "pixel_values": …, "labels": …}`):
    then it is the loss of the whole model, or `loss` of what the model gives, with zero in a head's place; a call is a unit.
    """
    _check_arguments(ranking, ablation, batch_tokens)
    if is_call_list(corpus):
        if ranking == "attribution" or means is not None:
            raise HeadwiseError("calls of your own are asked by ablation or gradient, with zero in a head's place.")
        selected, accumulator, num_samples = importance_on_calls(model, corpus, ranking, heads, loss, progress)
        return Importance(selected, ranking, "zero", "loss", num_samples, accumulator)
    if loss is not None:
        raise HeadwiseError("loss=… is for calls of your own: corpus=[{…}, …]; texts are asked by metric.")
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
        ablation = "zero" if ranking == "gradient" else ablation  # a gate closes towards zero
        num_samples = tokenized.count_if_small()
        target_batches = _TargetBatches(
            model,
            tokenized,
            metric,
            ablation,
            means,
            max(1, batch_tokens // BATCH_DIVISOR) if ranking == "ablation" else batch_tokens,
        )
        accumulator = Accumulator(heads=len(selected))
        for batch, make_replacement in target_batches.with_replacements(selected):
            if ranking == "ablation":
                _add_ablation(accumulator, model, batch, selected, make_replacement, batch_tokens)
            else:
                _add_gradients(accumulator, model, batch, selected, make_replacement, signed=ranking == "attribution")
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


class _TargetBatches:
    """The batches of a corpus, as often as wanted, with what stands in for heads on each."""

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
        # for each text under way the one behind it, and for the last the first
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
            raise HeadwiseError("resampling borrows from another text, and there is only one; give more text.")
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


def _add_ablation(
    accumulator: Accumulator,
    model: ModelProtocol,
    batch: TargetBatch,
    heads: Sequence[Address],
    make_replacement: ReplacementFactory,
    batch_tokens: int,
) -> None:
    """Add what a batch really loses by each head."""
    lost, clean = ablation_sweep(model, batch, heads, make_replacement, batch_tokens)  # (heads, B)
    # a mean state has no loss of its own
    clean_sums = clean if batch.targets is not None else torch.zeros(lost.shape[1])
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
    signed: bool,
) -> None:
    """Add slopes: with their sign, token by token, like a loss; or the absolute value of each text's mean loss."""
    gradients = ablation_gradients(model, batch, heads, make_replacement).mT.cpu()  # (B, heads)
    counts = batch.targets_per_text[:, None]
    if not signed:
        gradients, counts = (gradients / counts).abs(), (counts > 0).double()
    accumulator.add(("importance",), slice(0, len(heads)), batch.sample_ids, gradients[..., None], counts[..., None])


def _sample_heads(heads: tuple[Address, ...], count: int) -> tuple[Address, ...]:
    """So many heads, drawn the same way every time."""
    indices = np.random.default_rng(0).permutation(len(heads))[:count]
    return tuple(heads[i] for i in sorted(indices))


def _check_arguments(ranking: str, ablation: str, batch_tokens: int) -> None:
    for name, value, valid in (("ranking", ranking, IMPORTANCE_RANKINGS), ("ablation", ablation, ABLATION_METHODS)):
        if value not in valid:
            raise HeadwiseError(f"there is no {name}={value!r}; {suggest_names(str(value), valid)}")
    if batch_tokens < 1:
        raise HeadwiseError(f"at least one token must be run at once; got batch_tokens={batch_tokens}.")


def _to_json(value: Any) -> Any:
    """As JSON knows it: NaN becomes None, tuples lists."""
    if isinstance(value, dict):
        return {key: _to_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(inner) for inner in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
