"""Base classes of metrics, and two metrics that users can define with a function.

A metric computes one or more scores for every head. A score is a mean over attention rows (one row per query). It may come
with two variants over the same rows: a baseline, which is the score of a head with uniform attention, and a value-weighted
score, in which each attention weight is multiplied by the norm of the value output ‖v W_O‖ of its key. A metric declares its
scores (`MetricSpec`) and the token features and key targets that it needs. Sums and counts are stored instead of means, so
that the results of two halves of a corpus can be added.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.analysis.recording.batching import TextSample, TokenBatch
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    from headwise.analysis.metrics.attention_call import AttentionCallContext
    from headwise.analysis.metrics.row_blocks import RowBlock
    from headwise.analysis.metrics.row_stats import RowStats

# How two profiles are merged: ADD adds the sums; IDENTICAL keeps one of two equal results, which do not depend on the corpus;
# LARGER keeps the result with more samples.
ADD, IDENTICAL, LARGER = "add", "identical", "larger"


@dataclass(frozen=True)
class RoleTarget:
    """Keys that a head with a role attends to. Used to show examples as hits or misses. Stored in profile files.

    Attributes:
        kind: One of `KINDS`.

            - `offset`: the key `value` tokens before the query.
            - `within`: keys at most `value` tokens away, without the query itself.
            - `beyond`: keys at least `value` tokens away.
            - `feature`: keys with the token feature named `value`.
            - `key_target`: the key given by the key target named `value`.
            - `repeat`: target number `value` in a sequence of repeated tokens.
            - `prompt`: the target in the prompts of the metric named `value`.
            - `arc`: the target word of the relation named `value`, such as `det >`.
        value: Parameter of the kind.
    """

    kind: str
    value: int | str = 0

    KINDS = ("offset", "within", "beyond", "feature", "key_target", "repeat", "prompt", "arc")


@dataclass(frozen=True)
class MetricSpec:
    """Description of one score of every head.

    Attributes:
        name: Unique name in tables, files and the report page.
        label: Short description.
        unit: Unit of the score. `share` is a fraction from 0 to 1.
        high_means: Meaning of a high score, in a few words.
        hue: Hue of its color in figures, in degrees.
        baseline: Name of the score that is its baseline over the same rows. Empty if it has no baseline.
        value_weighted: Name of its value-weighted score over the same rows. Empty if it has no such score.
        displayed: Whether it is listed by itself. False for baselines and value-weighted scores.
        positional: Whether it depends on distances between tokens. Positional scores are not computed for
            cross-attention.
        series: Name of a figure or table of many scores, such as `offset`. The scores of a series are not listed
            individually.
        in_table: Whether it has a column in the table of heads.
        merge: How the scores of two profiles are merged: ADD, IDENTICAL or LARGER.
        corpus_label: Description of the texts if they are not the corpus.
        target: Keys that the score is about, used to show examples.
        hits: Whether the score is the fraction of rows with the largest weight on the target, instead of the weight on it.
    """

    name: str
    label: str = ""
    unit: str = "share"
    high_means: str = ""
    hue: int | None = None
    baseline: str = ""
    value_weighted: str = ""
    displayed: bool = True
    positional: bool = False
    series: str = ""
    in_table: bool = False
    merge: str = ADD
    corpus_label: str = ""
    target: RoleTarget | None = None
    hits: bool = False

    def with_variants(
        self, baseline: str = "", value_weighted: str = ""
    ) -> tuple["MetricSpec", "MetricSpec", "MetricSpec"]:
        """Return this score, its baseline and its value-weighted score.

        Args:
            baseline: Name of the baseline. Default: the name with ` baseline` appended.
            value_weighted: Name of the value-weighted score. Default: the name with ` value-weighted` appended.

        >>> [spec.name for spec in MetricSpec("digit").with_variants()]
        ['digit', 'digit baseline', 'digit value-weighted']
        """
        score = replace(
            self,
            baseline=baseline or f"{self.name} baseline",
            value_weighted=value_weighted or f"{self.name} value-weighted",
        )
        variant = replace(self, displayed=False, in_table=False, label="", high_means="", target=None)
        return score, replace(variant, name=score.baseline), replace(variant, name=score.value_weighted)


@dataclass(frozen=True, eq=False)
class TokenFeature:
    """A number for each key, usually 0 or 1. The attention on a feature is the sum of weight times value over the keys.

    Attributes:
        name: Unique name of the feature.
        values: Function from a text to one number per token, or a tensor with one number per vocabulary entry.
        include_first: Whether the first token of a text can have the feature. By default it cannot, because a head that
            uses the first token as an attention sink would seem to attend to the feature.
    """

    name: str
    values: Callable[[TextSample], Sequence[float]] | Tensor
    include_first: bool = False

    def batch_values(self, batch: TokenBatch) -> Tensor:
        """Return the values of a batch, (B, S)."""
        if isinstance(self.values, Tensor):
            values = self.values.to(batch.ids.device)[batch.ids]
        else:
            values = _fill_per_token(self.name, self.values, batch, 0.0).to(batch.ids.device)
        values = values.float() * batch.real_tokens
        if not self.include_first:
            values = values.scatter(1, batch.first_token_positions[:, None], 0.0)
        return values


@dataclass(frozen=True, eq=False)
class KeyTarget:
    """One target key for each row of a text. The first token of a text is never a target.

    Attributes:
        name: Unique name of the target.
        positions: Function from a text to the target position of each token; negative for a token without a target.
        hits: Whether to compute also if the target has the largest weight of the row.
    """

    name: str
    positions: Callable[[TextSample], Sequence[int]]
    hits: bool = False

    def batch_positions(self, batch: TokenBatch) -> Tensor:
        """Return the target column of each row of a batch, (B, T). -1 means that the row has no target."""
        filled = _fill_per_token(self.name, self.positions, batch, -1.0)  # on the host
        positions, lengths = filled.long(), torch.tensor([len(sample.ids) for sample in batch.samples], device="cpu")
        if bool((positions >= lengths[:, None]).any()):
            raise ArgumentError(
                f"metric {self.name!r}: `positions` returned a position after the end of the text. Return positions from 0 "
                f"to len(text.ids) - 1, or -1 for a token without a target."
            )
        positions = positions.to(batch.ids.device)
        return torch.where((positions > 0) & batch.real_tokens, positions + batch.first_token_positions[:, None], -1)


class RowBlockAccumulator(ABC):
    """Sums of a block metric over the blocks of one attention call."""

    @abstractmethod
    def add_block(self, block: "RowBlock") -> None:
        """Add one block of rows. `block.e` is valid only during this call."""

    @abstractmethod
    def sums_and_counts(self) -> tuple[Tensor, Tensor] | None:
        """Return sums and counts, as `Metric.compute` does. Called after the last block. None adds nothing."""


class BaseHeadMetric:
    """Base class of objects that measure scores of every head.

    Attributes:
        metric_specs: Descriptions of the scores.
    """

    metric_specs: tuple[MetricSpec, ...] = ()

    @property
    def score_spec(self) -> MetricSpec:
        """The first score. Roles refer to it."""
        return self.metric_specs[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the scores."""
        return tuple(metric_spec.name for metric_spec in self.metric_specs)


class Metric(BaseHeadMetric):
    """Base class of metrics that are computed from the attention on the corpus.

    Use `AttentionToTokens` or `AttentionToPosition` for simple metrics. To write another one, subclass, set `metric_specs`
    and override `compute`, which gets statistics of all rows, or `make_accumulator`, which gets the attention weights in
    blocks of rows.

    Attributes:
        features: Token features that the metric needs.
        key_targets: Key targets that the metric needs.
    """

    features: tuple[TokenFeature, ...] = ()
    key_targets: tuple[KeyTarget, ...] = ()

    @property
    def supports_cross_attention(self) -> bool:
        """Whether the metric has a score for cross-attention, where distances are not defined."""
        return not all(metric_spec.positional for metric_spec in self.metric_specs)

    def begin_batch(self, batch: TokenBatch) -> None:
        """Prepare a batch before the forward pass. Override it for work that does not depend on heads."""

    def make_accumulator(self, call: "AttentionCallContext") -> RowBlockAccumulator | None:
        """Return an accumulator for the blocks of one attention call, or None if `compute` is used."""

    def compute(self, rows: "RowStats") -> tuple[Tensor, Tensor]:
        """Compute the scores of one attention call.

        Args:
            rows: Statistics of the attention rows.

        Returns:
            Sums over rows, (B, H, scores), and the number of rows, in a shape that broadcasts to it.
        """
        raise NotImplementedError


class AttentionToTokens(Metric):
    """Attention weight on a set of tokens.

    The score is the mean weight on the set over the rows that can see a token of it. The baseline is the fraction of visible
    keys that are in the set, which is the score of uniform attention.

    Args:
        name: Unique name of the metric.
        values: Function that returns 1 for each token in the set and 0 for each other token. It gets a `TextSample` with
            `.token_texts` (texts of the tokens), `.document` (words and relations, or None) and `.alignment`. Or a tensor
            with one value per vocabulary entry.
        label: Short description. Default: `weight on {name}`.
        high_means: Meaning of a high score, in a few words.
        hue: Hue of its color in figures, in degrees.
        in_table: Whether it has a column in the table of heads.
        all_rows: Whether all rows count and the first token can be in the set. Use it for tokens that serve as attention
            sinks.

    >>> comma = AttentionToTokens("comma", lambda text: [token == "," for token in text.token_texts])
    >>> comma.names
    ('comma', 'comma baseline', 'comma value-weighted')
    """

    def __init__(
        self,
        name: str,
        values: Callable[[TextSample], Sequence[float]] | Tensor,
        *,
        label: str = "",
        high_means: str = "",
        hue: int | None = None,
        in_table: bool = True,
        all_rows: bool = False,
    ) -> None:
        self.all_rows = all_rows
        self.features = (TokenFeature(name, values, all_rows),)
        metric_spec = MetricSpec(
            name,
            label or f"weight on {name}",
            high_means=high_means,
            hue=hue,
            in_table=in_table,
            target=RoleTarget("feature", name),
        )
        self.metric_specs = metric_spec.with_variants()

    def compute(self, rows: "RowStats") -> tuple[Tensor, Tensor]:
        """Compute the weight, the baseline and the value-weighted score, (B, H, 3)."""
        (feature,) = self.features
        # (B, H, n) (B, 1, n)
        weight, counted = (rows.feature_fraction(feature.name), rows.counted.to(rows.total)[:, None])
        value_weighted = rows.value_weighted_sum(feature.name) / rows.feature_fraction(rows.NORM).clamp(min=1e-30)
        matching_keys = rows.visible_feature_sum(feature.name)  # (B, 1 or H, n): number of visible keys in the set
        baseline = (matching_keys / rows.visible_keys.to(weight).clamp(min=1) * counted).sum(2).expand(weight.shape[:2])
        eligible = counted if self.all_rows else (matching_keys > 0) * counted
        return torch.stack((weight.sum(2), baseline, value_weighted.sum(2)), -1), eligible.sum(2)[..., None]


class AttentionToPosition(Metric):
    """Attention weight on one target position per token.

    The score is the mean weight on the target over the rows that have a target and can see it. The baseline is 1 divided by
    the number of visible keys, which is the score of uniform attention.

    Args:
        name: Unique name of the metric.
        positions: Function that returns the target position of each token of a text, or -1 for a token without a target.
            It gets a `TextSample`. The first token of a text is never a target.
        label: Short description. Default: `weight on {name}`.
        high_means: Meaning of a high score, in a few words.
        hue: Hue of its color in figures, in degrees.
        hits: Whether to score 1 if the target has the largest weight of the row and 0 otherwise, instead of the weight. Ties
            are divided equally.
        all_rows: Whether rows that cannot see their target count, with score 0.
        merge: How the scores of two profiles are merged: ADD, IDENTICAL or LARGER.
        corpus_label: Description of the texts if they are not the corpus.

    >>> AttentionToPosition("back two", lambda text: [row - 2 for row in range(len(text.ids))]).metric_specs[0].unit
    'share'
    """

    def __init__(
        self,
        name: str,
        positions: Callable[[TextSample], Sequence[int]],
        *,
        label: str = "",
        high_means: str = "",
        hue: int | None = None,
        hits: bool = False,
        all_rows: bool = False,
        merge: str = ADD,
        corpus_label: str = "",
    ) -> None:
        self.all_rows = all_rows
        self.key_targets = (KeyTarget(name, positions, hits),)
        label = label or (f"largest weight on {name}" if hits else f"weight on {name}")
        metric_spec = MetricSpec(
            name, label, high_means=high_means, hue=hue, positional=True, in_table=True, merge=merge,
            corpus_label=corpus_label, target=RoleTarget("key_target", name), hits=hits,
        )  # fmt: skip
        self.metric_specs = metric_spec.with_variants()

    def compute(self, rows: "RowStats") -> tuple[Tensor, Tensor]:
        """Compute the weight (or hits), the baseline and the value-weighted score, (B, H, 3)."""
        (key_target,) = self.key_targets
        # (B, 1 or H, n)
        eligible = (rows.has_target(key_target.name) if self.all_rows else rows.sees[key_target.name]) & rows.counted[
            :, None
        ]
        baseline = (eligible / rows.visible_keys.to(rows.total).clamp(min=1)).sum(2)
        # (B, H, n)
        weight, value_weighted = (
            rows.target_hits[key_target.name] if key_target.hits else rows.weights_and_value_shares_at(key_target.name)
        )
        sums = [(scores * eligible).sum(2) for scores in (weight, value_weighted)]
        return torch.stack((sums[0], baseline.expand_as(sums[0]), sums[1]), -1), eligible.sum(2)[..., None]


def _fill_per_token(
    name: str, per_token: Callable[[TextSample], Sequence[float]], batch: TokenBatch, empty: float
) -> Tensor:
    """Evaluate a function of a text for each sample, (B, S), on the host. Padding is filled with `empty`."""
    filled = torch.full(batch.ids.shape, empty, device="cpu", dtype=torch.float32)
    for row, (sample, first) in enumerate(zip(batch.samples, batch.first_columns, strict=True)):
        values = torch.as_tensor(per_token(sample), dtype=torch.float32, device="cpu")
        if values.shape != (len(sample.ids),):
            raise ArgumentError(
                f"metric {name!r}: its function returned values of shape {tuple(values.shape)} for a text of "
                f"{len(sample.ids)} tokens. Return one number per token."
            )
        filled[row, first : first + len(values)] = values
    return filled
