"""Result of a profile: the sums of a pass over a corpus, and the roles of every head with their evidence."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.metric import MetricSpec
from headwise.analysis.metrics.relation_metric import RelationMetric
from headwise.analysis.metrics.role_example_positions import ExampleStore
from headwise.analysis.metrics.top_contexts import AttentionContext
from headwise.analysis.roles import profile_tables
from headwise.analysis.roles.head_profile import HeadProfile, head_profile
from headwise.analysis.roles.roles import (
    DEFAULT_ROLES,
    EvidencePerHead,
    Role,
    RoleScores,
    find_idle_patterns,
    score,
)
from headwise.errors import ArgumentError
from headwise.spec import Address

if TYPE_CHECKING:
    from pandas import DataFrame

    from headwise.model import ModelProtocol
    from headwise.ui.figures.plot_accessor import PlotAccessor
    from headwise.ui.head_summary import HeadSummary


OWN_RELATIONS = "own"  # value of metadata["relations"] if the relations are those of the texts


@dataclass(frozen=True, eq=False)
class ProfileSums:
    """Sums, examples and metadata of one pass over a corpus.

    Attributes:
        addresses: Heads, in the order of the arrays.
        accumulator: Sums and counts of every metric, by head and bucket of texts.
        relation_metric: Counts of the gold arcs. None if no relations were measured.
        top_contexts: The largest attention weights of each head, with their text.
        examples: Sampled positions with the attention of every head at them.
        metadata: Model, corpus and options of the pass.
        metric_specs: Specs of every measured metric, by name.
    """

    addresses: tuple[Address, ...]
    accumulator: Accumulator
    relation_metric: RelationMetric | None
    top_contexts: Sequence[Sequence[AttentionContext]]
    examples: ExampleStore
    metadata: dict[str, Any]
    metric_specs: Mapping[str, MetricSpec]

    def layer_head_count_per_head(self) -> np.ndarray:
        """Return the number of heads in the layer of each head, (heads,)."""
        counts = Counter(address.layer_address for address in self.addresses)
        return np.array([counts[address.layer_address] for address in self.addresses])


@dataclass(frozen=True, eq=False)
class Profile(ProfileSums):
    """Profile of every head of a model. `profile["5.1"]` is the profile of one head; iterating yields all heads.

    Attributes:
        addresses: Heads, in the order of the arrays.
        accumulator: Sums and counts of every metric, by head and bucket of texts.
        relation_metric: Counts of the gold arcs. None if no relations were measured.
        top_contexts: The largest attention weights of each head, with their text.
        examples: Sampled positions with the attention of every head at them.
        metadata: Model, corpus and options of the pass.
        metric_specs: Specs of every measured metric, by name.
        evidence: Evidence for the roles of each head, best first.
        idle_patterns: Names of the idle patterns of each head.
        family_size: Number of tests for which the p-values are corrected.
        extra_roles: Roles that were tested in addition to the default ones.
    """

    evidence: EvidencePerHead
    idle_patterns: Sequence[tuple[str, ...]]
    family_size: int
    extra_roles: tuple[Role, ...] = ()

    def __len__(self) -> int:
        return len(self.addresses)

    def __iter__(self) -> Iterator[HeadProfile]:
        return (head_profile(self, index) for index in range(len(self)))

    def __getitem__(self, head: str | Address) -> HeadProfile:
        address = head if isinstance(head, Address) else Address.parse(head)
        if address not in self.addresses:
            raise ArgumentError(
                f"head: this profile has no head {address}. It has {len(self.addresses)} heads, {self.addresses[0]} to "
                f"{self.addresses[-1]}."
            )
        return head_profile(self, self.addresses.index(address))

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """Every displayed metric by name, (heads,) each."""
        return {name: self.metric(name) for name in self.accumulator.fields if self.metric_specs[name].displayed}

    @cached_property
    def scores(self) -> dict[tuple[str, str], RoleScores]:
        """Scores of every role that was measured, by its name and detail."""
        all_scores = score(self.accumulator, self.relation_metric, (*DEFAULT_ROLES, *self.extra_roles))
        return {(scores.role.name, scores.role.detail): scores for scores in all_scores}

    @property
    def num_causal_tests(self) -> int:
        """Number of causal tests: heads × roles × token sets with a control, in both families."""
        return sum(
            effect.control_cost is not None for roles in self.evidence for entry in roles for effect in entry.effects
        )

    @property
    def table_metrics(self) -> tuple[str, ...]:
        """Names of the metrics that have a column in the table of heads."""
        return profile_tables.table_metrics(self)

    @property
    def plot(self) -> "PlotAccessor":
        """Figures: `profile.plot.roles().save("roles.svg")`. See `headwise.ui.figures.plot_accessor` for all of them."""
        from headwise.ui.figures.plot_accessor import PlotAccessor

        return PlotAccessor(self)

    def metric(self, name: str) -> np.ndarray:
        """Return one metric of every head, (heads,).

        Args:
            name: Name of the metric, for example `entropy`, `offset 1`, `delimiter` or `det > hits`.
        """
        return self.accumulator.mean(name)

    def mean_by_layer(self, name: str) -> np.ndarray:
        """Return the mean of a metric in each layer, (layers,). NaN for a layer without measured heads.

        Args:
            name: Name of the metric.
        """
        return profile_tables.mean_by_layer(self, name)

    def best_head(self, role: str) -> HeadProfile | None:
        """Return the head with the best support for a role, or None if no head has it."""
        heads = self.heads_by_role().get(role)
        return self[heads[0]] if heads else None

    def heads_by_role(self) -> dict[str, list[Address]]:
        """Return the heads of every role that a head has, first or not, best first."""
        return profile_tables.heads_by_role(self)

    def table(self) -> list[dict[str, Any]]:
        """Return one row per head."""
        return profile_tables.table_rows(self)

    def to_frame(self) -> "DataFrame":
        """Return the table as a pandas DataFrame, indexed by head, with every metric."""
        return profile_tables.to_frame(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: one record per head."""
        from headwise.analysis.roles.profile_io import profile_to_dict

        return profile_to_dict(self)

    def diff(self, other: "Profile") -> list[dict[str, Any]]:
        """Compare two profiles head by head: roles, evidence levels and metrics, and heads missing in one of them.

        Both must be of one model, for example at two training steps or before and after pruning. In different models, heads
        with the same address are unrelated.

        Args:
            other: The later profile.

        Returns:
            One row per head.
        """
        return profile_tables.diff_rows(self, other)

    def merge(self, other: "Profile") -> "Profile":
        """Merge two profiles of one model, as if one pass had run over both corpora, or had measured both groups of layers.

        Documents with relations that are the same in both, and repeated tokens, count once. Roles and idle patterns are
        assessed again on the merged sums. Causal tests are not repeated: a role keeps its result from either profile.
        `variability`, which compares texts with each other, is that of the larger sample.

        Args:
            other: A profile of the same model with the same options: on another corpus, or of other layers on this corpus.

        Returns:
            The merged profile.
        """
        from headwise.analysis.roles.merge_profiles import merge_profiles

        return merge_profiles(self, other)

    def save(self, path: str | Path) -> Path:
        """Write one compressed file and return its path. Load it with `Profile.load`."""
        from headwise.analysis.roles.profile_io import save_profile

        return save_profile(self, path)

    @staticmethod
    def load(path: str | Path) -> "Profile":
        """Load a file written by `save`.

        Raises:
            FileFormatError: If the file is missing, damaged or of another version.
        """
        from headwise.analysis.roles.profile_io import load_profile

        return load_profile(path)

    def summary(self, head: str | Address, model: "ModelProtocol | None" = None) -> "HeadSummary":
        """Describe one head in sentences.

        Args:
            head: Address of the head.
            model: The profiled model. It adds promoted tokens, importance, quantization and streaming, and related heads.
        """
        from headwise.ui.head_summary import summarize_head

        return summarize_head(self, self[head], model)

    def report(self, path: str | Path, model: "ModelProtocol | None" = None, **options: Any) -> Path:
        """Write a self-contained HTML file that shows every head in a browser, and return its path.

        Args:
            path: File to write.
            model: The profiled model. It adds the details that need weights.
            **options: `name`, `sentences` (texts to show), `importance`, `history`, `curve`, `claims`, `sensitivity` and
                `plan`, as in `headwise.ui.report_data.make_report_data`.
        """
        from headwise.ui.report import write_report
        from headwise.ui.report_data import make_report_data

        return write_report(make_report_data(self, model, **options), path)

    def __repr__(self) -> str:
        from headwise.ui.result_text import profile_roles_table

        return profile_roles_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.notebook import profile_html

        return profile_html(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from headwise.ui.widget import widget_mime_bundle

        return widget_mime_bundle(self)


def build_profile(
    sums: ProfileSums, evidence: EvidencePerHead, family_size: int, extra_roles: Sequence[Role] = ()
) -> Profile:
    """Combine the sums of a pass with the evidence for roles."""
    return Profile(
        **vars(sums),
        evidence=tuple(map(tuple, evidence)),
        idle_patterns=find_idle_patterns(sums.accumulator, sums.layer_head_count_per_head()),
        family_size=family_size,
        extra_roles=tuple(extra_roles),
    )
