"""What a measure is: numbers of every head, each a mean over rows of attention; and the two kinds that anyone can make.

A measure says how its numbers are called and told, which marks over the keys it needs, what it takes from rows. Beside a
number stand its baseline (what a head that looks at nothing in particular would have, over the same rows) and its
value-weighted variant (the same with attention weighted by the length of what it fetches). What rows give is summed, so
halves of a corpus add up.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.analysis.recording.batching import TextSample, TokenBatch
from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from headwise.analysis.metrics.attention_call import AttentionCallContext
    from headwise.analysis.metrics.row_blocks import RowBlock
    from headwise.analysis.metrics.row_stats import RowStats

# How two become one: sums add up; both are the same, for they do not come from the corpus; the larger sample stays.
ADD, IDENTICAL, LARGER = "add", "identical", "larger"


@dataclass(frozen=True)
class RoleTarget:
    """What a row should look at: what is shown as a hit or a miss of a role. Plain data, so that files can hold it."""

    kind: str  # one of KINDS
    value: int | str = 0

    # so many tokens back; up to so many away, itself left out; so many away or more; at marked keys; at the key a rule names;
    # at the n-th of the places in repeated tokens; at what a prompt of the number of this name asks for; at the word an arc
    # leads to
    KINDS = ("offset", "within", "beyond", "feature", "key_target", "repeat", "prompt", "arc")


@dataclass(frozen=True)
class MetricSpec:
    """One number of every head: what it is called and told as. Its name is unique, in tables, files and on the page."""

    name: str
    label: str = ""  # in a few words
    unit: str = "share"
    high_means: str = ""  # what more of it means
    hue: int | None = None  # of its colour in pictures, in degrees
    baseline: str = ""  # the name of the number that is its baseline, over the same rows
    value_weighted: str = ""  # and of its twin weighted by what is fetched
    displayed: bool = True  # a baseline or a variant stands beside another, and is not shown by itself
    positional: bool = False  # told by distances, of which there are none between two texts
    series: str = ""  # the picture or table of their own it belongs to, among many; such are not listed one by one
    in_table: bool = False  # it has a column in the table of heads
    merge: str = ADD
    corpus_label: str = ""  # in words, the texts it is measured on, where they are not the corpus
    target: RoleTarget | None = None
    hits: bool = False  # the share of rows whose largest weight is on the target, not the weight on it

    def with_variants(
        self, baseline: str = "", value_weighted: str = ""
    ) -> tuple["MetricSpec", "MetricSpec", "MetricSpec"]:
        """Itself with its baseline and its value-weighted variant.

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
    """Marks over the keys, by name: a row's weight on each is summed, with the weight on all. Mostly 0 and 1.

    The first token of a text has none, unless `include_first`: a head that rests there would seem to look for what is marked.
    """

    name: str
    # one for each token of a text; or for each entry of the vocabulary
    values: Callable[[TextSample], Sequence[float]] | Tensor
    include_first: bool = False

    def batch_values(self, batch: TokenBatch) -> Tensor:
        """The marks of a batch, (B, S)."""
        if isinstance(self.values, Tensor):
            values = self.values.to(batch.ids.device)[batch.ids]
        else:
            values = _fill_per_token(self.name, self.values, batch, 0.0)
        values = values.float() * batch.real_tokens
        if not self.include_first:
            values = values.scatter(1, batch.first_token_positions[:, None], 0.0)
        return values


@dataclass(frozen=True, eq=False)
class KeyTarget:
    """One key for each row of a text, by a rule; below 0 where a row has none. The first token is no target."""

    name: str
    positions: Callable[[TextSample], Sequence[int]]
    hits: bool = False  # whether the largest weight is there is asked too

    def batch_positions(self, batch: TokenBatch) -> Tensor:
        """Where the rows of a batch should look, (B, T), by columns of the batch; -1: nowhere."""
        positions = _fill_per_token(self.name, self.positions, batch, -1.0).long()
        lengths = batch.real_tokens.sum(1)[:, None]
        if bool((positions >= lengths).any()):
            raise HeadwiseError(
                f"{self.name!r} aims at a token behind the end of its text; give its place in the text."
            )
        return torch.where((positions > 0) & batch.real_tokens, positions + batch.first_token_positions[:, None], -1)


class BlockAccumulator(ABC):
    """What a measure of blocks takes from one call at one site."""

    @abstractmethod
    def add_block(self, block: "RowBlock") -> None:
        """One block of rows, as it goes by."""

    @abstractmethod
    def sums_and_counts(self) -> tuple[Tensor, Tensor] | None:
        """Sums and counts, as `Metric.compute` gives them, when all blocks were seen; None: nothing is counted."""


class MetricSpecMixin:
    """Numbers that are measured for every head, by name."""

    metric_specs: tuple[MetricSpec, ...] = ()

    @property
    def score_spec(self) -> MetricSpec:
        """The first of its numbers: what a role may refer to."""
        return self.metric_specs[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its numbers."""
        return tuple(metric_spec.name for metric_spec in self.metric_specs)


class Metric(MetricSpecMixin):
    """Numbers of every head, taken from the attention of the corpus. Make one by `AttentionToTokens` or
    `AttentionToPosition`, or give `metric_specs` and either `compute`, from rows, or `on_call`, from blocks of rows."""

    features: tuple[TokenFeature, ...] = ()
    key_targets: tuple[KeyTarget, ...] = ()
    needs_full_detail = (
        False  # it needs a walk over every cell (`FullDetailRowStats`), which detail="light" does not make
    )

    @property
    def supports_cross_attention(self) -> bool:
        """Whether it can be asked of cross-attention, where there are no distances."""
        return not all(metric_spec.positional for metric_spec in self.metric_specs)

    def begin_batch(self, batch: TokenBatch) -> None:
        """A batch that will be read: what does not depend on heads is worked out here."""

    def make_accumulator(self, call: "AttentionCallContext") -> BlockAccumulator | None:
        """One call at one site. What it gives is shown every block of rows; None: the measure takes rows."""

    def compute(self, rows: "RowStats") -> tuple[Tensor, Tensor]:
        """Sums over the rows of one call, (B, H, numbers), and how many rows they are sums over, which broadcast to that."""
        raise NotImplementedError


class AttentionToTokens(Metric):
    """The weight on marked tokens, over the rows that see one. Its baseline is their share among what is visible.

    `values` gives a number for each token of a text: 1 for what is looked for, 0 for the rest. It is called with a text as
    the model reads it: `.token_texts` (its tokens as a person writes them), `.document` (words and relations, or None),
    `.alignment`.

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
        self.all_rows = all_rows  # all rows count, and the first token may be marked: where a head rests
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
        """The weight, a uniform head's, and the weight of what is fetched."""
        (feature,) = self.features
        # (B, H, n) (B, 1, n)
        weight, counted = (rows.feature_fraction(feature.name), rows.counted.to(rows.total)[:, None])
        value_weighted = rows.value_weighted_sum(feature.name) / rows.feature_fraction(rows.NORM).clamp(min=1e-30)
        matching_keys = rows.visible_feature_sum(
            feature.name
        )  # (B, 1 or H, n): keys that are marked, among the visible
        baseline = (matching_keys / rows.visible_keys.to(weight).clamp(min=1) * counted).sum(2).expand(weight.shape[:2])
        eligible = counted if self.all_rows else (matching_keys > 0) * counted
        return torch.stack((weight.sum(2), baseline, value_weighted.sum(2)), -1), eligible.sum(2)[..., None]


class AttentionToPosition(Metric):
    """The weight on one token of each row's own, over the rows that have and see it. Its baseline is one token in all
    visible.

    `positions` gives for each token of a text the place of the one it should look at; -1: none. `hits`: not the weight but
    whether it is the largest of the row; of equals each gets its share. `all_rows`: rows that have such a token and do not
    see it count too.

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
        self.key_targets, self.needs_full_detail = (KeyTarget(name, positions, hits),), hits
        label = label or (f"largest weight on {name}" if hits else f"weight on {name}")
        metric_spec = MetricSpec(
            name, label, high_means=high_means, hue=hue, positional=True, in_table=True, merge=merge,
            corpus_label=corpus_label, target=RoleTarget("key_target", name), hits=hits,
        )  # fmt: skip
        self.metric_specs = metric_spec.with_variants()

    def compute(self, rows: "RowStats") -> tuple[Tensor, Tensor]:
        """The weight, a uniform head's, and the weight of what is fetched."""
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
    """What a function of a text gives for each of its tokens, as (B, S), padding left out."""
    filled = torch.full(batch.ids.shape, empty)
    for row, (sample, first) in enumerate(zip(batch.samples, batch.first_token_positions.tolist(), strict=True)):
        values = torch.as_tensor(per_token(sample), dtype=torch.float32)
        if values.shape != (len(sample.ids),):
            raise HeadwiseError(
                f"{name!r} gave {tuple(values.shape)} numbers for a text of {len(sample.ids)} tokens; give one for "
                f"each token."
            )
        filled[row, first : first + len(values)] = values
    return filled.to(batch.ids.device)
