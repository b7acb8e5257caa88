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

from headwise.analysis.ablation.ablate import HOWS, How, stand_in
from headwise.analysis.ablation.custom_calls import Loss, is_calls, worth_of_calls
from headwise.analysis.ablation.eval_targets import Metric, TargetBatch, ask, askable_units, check_askable
from headwise.analysis.ablation.head_outputs import Means, Run, chosen_sites, mean_of, read_on
from headwise.analysis.ablation.sweep import TOKENS, Stands, slopes, sweep
from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.statistics import bootstrap, bootstrap_difference
from headwise.analysis.recording.batching import Unit, make_batch, make_batches, read_sites
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.errors import HeadwiseError, close_names
from headwise.heads.head import Pattern
from headwise.model import AnyModel, quiet
from headwise.progress import Progress
from headwise.spec import Address

By = Literal["ablation", "gradient", "attribution"]
BYS = ("ablation", "gradient", "attribution")
WORTH = "what heads are worth"  # as progress is told
TEXTS = 8  # the batch of texts is this much smaller than what is run at once, to leave room for copies


@dataclass(frozen=True)
class Worth:
    """One head: what is lost without it, and how much more than without another head of its layer; both with intervals."""

    head: str
    worth: float
    low: float
    high: float
    above_layer: float
    above_low: float
    above_high: float


@dataclass(frozen=True)
class Check:
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
    def worst(self) -> tuple[str, float]:
        """The head whose estimate is farthest off, and by how much: estimate − exact."""
        gaps = np.subtract(self.estimate, self.exact)
        place = int(np.abs(gaps).argmax())
        return self.heads[place], float(gaps[place])


@dataclass(frozen=True, eq=False)
class Importance:
    """What every head is worth, with sums by bucket of texts kept, so that intervals can be drawn and runs merged."""

    addresses: tuple[Address, ...]
    by: By
    how: str
    metric: str
    texts: int
    tally: Tally
    check: Check | None = None

    @property
    def mean(self) -> np.ndarray:
        """What is lost without each head, (heads,): nats a token, 1 − cosine for a model without output; or mean |∂L/∂ξ|."""
        return self.tally.mean("worth")

    @property
    def clean(self) -> float:
        """The untouched model's own loss; only with by='ablation'."""
        return float(self.tally.mean("clean")[0]) if "clean" in self.tally.fields and self.addresses else float("nan")

    @cached_property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """95 % of the bootstrap over texts: low and high, (heads,)."""
        return bootstrap(*self.tally.per_bucket("worth"))

    @cached_property
    def above_layer(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """How much more is lost than without a random other head of its layer: mean, low, high; NaN where it is alone."""
        sums, counts = self.tally.per_bucket("worth")
        others = np.zeros_like(sums)
        alone = np.zeros(len(self.addresses), dtype=bool)
        for place, address in enumerate(self.addresses):
            peers = [i for i, other in enumerate(self.addresses) if other.site == address.site and i != place]
            alone[place] = not peers
            others[:, place] = sums[:, peers].mean(1) if peers else 0.0
        with np.errstate(invalid="ignore", divide="ignore"):
            means = (sums - others).sum(0) / counts.sum(0)
        low, high = bootstrap_difference(sums, counts, others, counts)
        return tuple(np.where(alone, np.nan, figure) for figure in (means, low, high))  # pyright: ignore[reportReturnType]

    def __len__(self) -> int:
        return len(self.addresses)

    def __iter__(self) -> Iterator[Worth]:
        columns = (self.mean, *self.interval, *self.above_layer)
        for address, *figures in zip(self.addresses, *columns, strict=True):
            yield Worth(str(address), *map(float, figures))

    def __getitem__(self, head: Address | str) -> Worth:
        for worth in self:
            if worth.head == str(head).strip():
                return worth
        raise HeadwiseError(f"head {head} was not measured; {close_names(str(head), map(str, self.addresses))}")

    @property
    def ranked(self) -> tuple[Address, ...]:
        """The heads, those worth most first."""
        return tuple(self.addresses[i] for i in np.argsort(-self.mean, kind="stable"))

    def rows(self) -> list[list[str | float]]:
        """A table, those worth most first; its columns are the fields of `Worth`."""
        return [list(asdict(worth).values()) for worth in sorted(self, key=lambda worth: -worth.worth)]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data; what is not known is None."""
        made = {name: getattr(self, name) for name in ("by", "how", "metric", "texts", "clean")}
        if self.check is not None:
            head, gap = self.check.worst
            made["check"] = asdict(self.check) | {"correlation": self.check.correlation, "worst": [head, gap]}
        return _plain({**made, "heads": [asdict(worth) for worth in self]})

    def merge(self, other: "Importance") -> "Importance":
        """Both together, as if one corpus had been read; a check is left behind."""
        if (self.addresses, self.by, self.how, self.metric) != (other.addresses, other.by, other.how, other.metric):
            raise HeadwiseError("only what was measured alike, of the same heads, can be merged.")
        texts, tally = self.texts + other.texts, self.tally.merge(other.tally)
        return Importance(self.addresses, self.by, self.how, self.metric, texts, tally)


@torch.inference_mode(False)
def importance(
    model: AnyModel,
    on: Any = None,
    *,
    by: By = "ablation",
    how: How = "mean",
    heads: Pattern = "*",
    metric: Metric = "loss",
    means: Means | None = None,
    longest: int | None = None,
    tokens: int = TOKENS,
    check: int = 8,
    loss: Loss | None = None,
    progress: Progress | None = None,
) -> Importance:
    """What every head is worth `on` some texts: by taking it away, or by slopes; the model stays as it is.

    `metric` "loss" is the mean loss over all tokens (hidden ones for an encoder; 1 − cosine of the mean state for a model
    without output), "last" the last token of each text alone (of a pair that is its end). `how` says what stands in a
    head's place; means not given are taken over these texts, and with "resample" each text borrows from the next. `check`
    is how many heads an attribution is compared on. `longest` cuts plain text into units of so many tokens (None: 256, or
    the model's context); `tokens` is how many are run at once. An encoder-decoder is asked about pairs.

    `on` may also be calls of your own, a list of keyword arguments (`{"input_ids": …, "pixel_values": …, "labels": …}`): then
    it is the loss of the whole model, or `loss` of what the model gives, with zero in a head's place; a call is a unit.
    """
    _check(by, how, tokens)
    if is_calls(on):
        if by == "attribution" or means is not None:
            raise HeadwiseError("calls of your own are asked by ablation or gradient, with zero in a head's place.")
        chosen, tally, count = worth_of_calls(model, on, by, heads, loss, progress)
        return Importance(chosen, by, "zero", "loss", count, tally)
    if loss is not None:
        raise HeadwiseError("loss=… is for calls of your own: on=[{…}, …]; texts are asked by metric.")
    check_askable(model, metric)
    with quiet(model):
        reading = read_on(model, on, longest)
        reached = {site.address for site in read_sites(model, heads)}
        chosen = tuple(head for site, there in chosen_sites(model, heads) if site.address in reached for head in there)
        how = "zero" if by == "gradient" else how  # a gate closes towards zero
        count = reading.count_ahead()
        asks = _Asks(model, reading, metric, how, means, max(1, tokens // TEXTS) if by == "ablation" else tokens)
        tally = Tally(heads=len(chosen))
        for asked, stands in asks.each(chosen):
            if by == "ablation":
                _ablate(tally, model, asked, chosen, stands, tokens)
            else:
                _estimate(tally, model, asked, chosen, stands, sign=by == "attribution")
            if progress is not None:
                progress(WORTH, asks.done, count)
        made = Importance(chosen, by, how, metric, asks.done, tally)
        if by != "attribution" or not check or not chosen:
            return made
        sample = _sample(chosen, check)
        exact = Tally(heads=len(sample))
        for asked, stands in asks.each(sample):
            _ablate(exact, model, asked, sample, stands, tokens)
    estimates = dict(zip(chosen, made.mean.tolist(), strict=True))
    compared = Check(
        tuple(map(str, sample)), tuple(estimates[head] for head in sample), tuple(exact.mean("worth").tolist())
    )
    return Importance(chosen, by, how, metric, made.texts, tally, compared)


class _Asks:
    """The batches of a corpus, as often as wanted, with what stands in for heads on each."""

    def __init__(
        self, model: AnyModel, reading: Reading, metric: Metric, how: str, means: Means | None, tokens: int
    ) -> None:
        self.model, self.reading, self.how, self.means = model, reading, how, means
        self.metric: Metric = metric
        self.tokens, self.done = tokens, 0
        self.next: dict[int, Unit] = {}  # for each text under way the one behind it, and for the last the first

    def units(self) -> Iterator[Unit]:
        if self.how != "resample":
            yield from askable_units(self.model, self.reading)
            return
        units = askable_units(self.model, self.reading)
        first = before = next(units)
        for unit in units:
            self.next[before.number] = unit
            yield before
            before = unit
        if before is first:
            raise HeadwiseError("resampling borrows from another text, and there is only one; give more text.")
        self.next[before.number] = first
        yield before

    def batches(self) -> Iterator[tuple[list[Unit], TargetBatch]]:
        self.done = 0
        for batch in make_batches(self.units(), self.tokens, device=self.model.device):
            self.done += len(batch.units)
            yield list(batch.units), ask(self.model, batch, self.metric)

    def each(self, heads: Sequence[Address]) -> Iterator[tuple[TargetBatch, Stands]]:
        if self.how == "mean" and self.means is None:
            self.means = mean_of(asked.record(self.model, heads) for _, asked in self.batches())
        for units, asked in self.batches():
            other = None
            if self.how == "resample":
                donors = make_batch([self.next.pop(unit.number) for unit in units], device=self.model.device)
                other = ask(self.model, donors, self.metric).record(self.model, heads)
            yield asked, self._stands(asked, other)

    def _stands(self, batch: TargetBatch, other: Run | None) -> Stands:
        return lambda site, chosen: stand_in(site, chosen, self.how, self.means, other, batch.real_at(site.address))


def _ablate(
    tally: Tally, model: AnyModel, batch: TargetBatch, heads: Sequence[Address], stands: Stands, tokens: int
) -> None:
    """Add what a batch really loses by each head."""
    lost, clean = sweep(model, batch, heads, stands, tokens)  # (heads, B)
    own = clean if batch.targets is not None else torch.zeros(lost.shape[1])  # a mean state has no loss of its own
    sums = torch.stack((lost.mT.cpu(), own.cpu()[:, None].expand(-1, len(heads))), -1)  # (B, heads, 2)
    tally.add(("worth", "clean"), slice(0, len(heads)), batch.units, sums, batch.counts[:, None, None])


def _estimate(
    tally: Tally, model: AnyModel, batch: TargetBatch, heads: Sequence[Address], stands: Stands, sign: bool
) -> None:
    """Add slopes: with their sign, token by token, like a loss; or the absolute value of each text's mean loss."""
    found = slopes(model, batch, heads, stands).mT.cpu()  # (B, heads)
    counts = batch.counts[:, None]
    if not sign:
        found, counts = (found / counts).abs(), (counts > 0).double()
    tally.add(("worth",), slice(0, len(heads)), batch.units, found[..., None], counts[..., None])


def _sample(heads: tuple[Address, ...], count: int) -> tuple[Address, ...]:
    """So many heads, drawn the same way every time."""
    drawn = np.random.default_rng(0).permutation(len(heads))[:count]
    return tuple(heads[i] for i in sorted(drawn))


def _check(by: str, how: str, tokens: int) -> None:
    for name, given, known in (("by", by, BYS), ("how", how, HOWS)):
        if given not in known:
            raise HeadwiseError(f"there is no {name}={given!r}; {close_names(str(given), known)}")
    if tokens < 1:
        raise HeadwiseError(f"at least one token must be run at once; got tokens={tokens}.")


def _plain(value: Any) -> Any:
    """As JSON knows it: NaN becomes None, tuples lists."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
