"""A profile: the sums of a pass over a corpus, and the roles of every head with their evidence."""

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
from headwise.analysis.metrics.role_examples import ExampleStore
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
from headwise.errors import HeadwiseError
from headwise.spec import Address

if TYPE_CHECKING:
    from pandas import DataFrame

    from headwise.model import ModelProtocol
    from headwise.ui.figures.plot_accessor import PlotAccessor
    from headwise.ui.head_summary import HeadSummary


OWN_RELATIONS = "own"  # metadata["relations"] if the relations are those of the texts themselves


@dataclass(frozen=True, eq=False)
class ProfileSums:
    """Sums, examples and metadata of one pass over a corpus.

    Attributes:
        addresses: Heads, in the order of the arrays.
        accumulator: Sums and counts of every metric, by head and bucket of texts.
        relation_metric: Counts of the gold arcs. None if no relations were measured.
        top_contexts: The largest attention weights of each head, with their text.
        examples: Sampled positions with the attention of every head there.
        metadata: Model, corpus and options of the pass.
        metric_specs: Description of every measured number, by name.
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
    """Every head of a model, measured. `profile["5.1"]` is one of them.

    Attributes:
        evidence: For each head the evidence for its roles, best first.
        idle_patterns: For each head the names of its idle patterns.
        family_size: Number of tests that the p-values are corrected for.
        extra_roles: Roles that were scored besides the default ones.
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
            raise HeadwiseError(
                f"there is no head {address} in this profile; it has {self.addresses[0]} to {self.addresses[-1]}."
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
        """Number of causal tests: heads × roles × token sets that have a control, in both families."""
        return sum(
            effect.control_cost is not None for roles in self.evidence for entry in roles for effect in entry.effects
        )

    @property
    def table_metrics(self) -> tuple[str, ...]:
        """Metrics that have a column in the table of heads."""
        return profile_tables.table_metrics(self)

    @property
    def plot(self) -> "PlotAccessor":
        """Pictures: `profile.plot.roles().save("roles.svg")`; see `headwise.ui.figures.plot_accessor` for all of them."""
        from headwise.ui.figures.plot_accessor import PlotAccessor

        return PlotAccessor(self)

    def metric(self, name: str) -> np.ndarray:
        """One measure of every head, (heads,): `entropy`, `offset 1`, `delimiter`, `det > hits` …"""
        return self.accumulator.mean(name)

    def mean_by_layer(self, name: str) -> np.ndarray:
        """A measure's mean in each layer, early to late: (layers,); NaN where there are no heads, or nothing was measured."""
        return profile_tables.mean_by_layer(self, name)

    def best_head(self, role: str) -> HeadProfile | None:
        """The head with the best support for a role, or None."""
        heads = self.heads_by_role().get(role)
        return self[heads[0]] if heads else None

    def heads_by_role(self) -> dict[str, list[Address]]:
        """Every role that some head has, be it its first or not, with its heads, best first."""
        return profile_tables.heads_by_role(self)

    def table(self) -> list[dict[str, Any]]:
        """One row per head."""
        return profile_tables.table_rows(self)

    def to_frame(self) -> "DataFrame":
        """The table as a pandas DataFrame, indexed by head, with every measure."""
        return profile_tables.to_frame(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: one record per head."""
        from headwise.analysis.roles.profile_io import profile_to_dict

        return profile_to_dict(self)

    def diff(self, other: "Profile") -> list[dict[str, Any]]:
        """Compare two profiles head by head: roles, evidence levels, metrics; heads that are missing in one.

        Both must be of one model, at two times of its training, say, or with heads cut: elsewhere 5.1 is another head.
        """
        return profile_tables.diff_rows(self, other)

    def merge(self, other: "Profile") -> "Profile":
        """Both together: what one pass over this corpus and then the other's, and over the documents of both, would give.

        Documents with relations that are not the texts themselves and the same in both count once, as repeated tokens do.
        Roles and idle patterns are assessed again on all that was counted. Ablations are not made again: a role keeps what
        they showed for it, here or in the other. `variability`, which compares texts with each other, stays that of the
        larger sample.
        """
        from headwise.analysis.roles.merge_profiles import merge_profiles

        return merge_profiles(self, other)

    def save(self, path: str | Path) -> Path:
        """Write one compressed file; `Profile.load` brings it back."""
        from headwise.analysis.roles.profile_io import save_profile

        return save_profile(self, path)

    @staticmethod
    def load(path: str | Path) -> "Profile":
        """Read a file written by `save`; one that is damaged or of another version is refused."""
        from headwise.analysis.roles.profile_io import load_profile

        return load_profile(path)

    def summary(self, head: str | Address, model: "ModelProtocol | None" = None) -> "HeadSummary":
        """One head in plain sentences; with the model also what it writes, is worth, could cost less and works with."""
        from headwise.ui.head_summary import summarize_head

        return summarize_head(self, self[head], model)

    def report(self, path: str | Path, model: "ModelProtocol | None" = None, **options: Any) -> Path:
        """Write one file that shows every head in a browser, offline. With the model it can tell more of them.

        `options`: `name`, `sentences` to show (texts), `importance`, `history`, `curve`, `claims`, `sensitivity`, `plan`, as
        `headwise.ui.report_data.make_report_data` takes them.
        """
        from headwise.ui.report import write_report
        from headwise.ui.report_data import make_report_data

        return write_report(make_report_data(self, model, **options), path)

    def _repr_html_(self) -> str:
        from headwise.ui.notebook import profile_html

        return profile_html(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from headwise.ui.widget import widget_mime_bundle

        return widget_mime_bundle(self)


def build_profile(
    sums: ProfileSums, evidence: EvidencePerHead, family_size: int, extra_roles: Sequence[Role] = ()
) -> Profile:
    """Combine the sums of a pass with the evidence that was found in them."""
    return Profile(
        **vars(sums),
        evidence=tuple(map(tuple, evidence)),
        idle_patterns=find_idle_patterns(sums.accumulator, sums.layer_head_count_per_head()),
        family_size=family_size,
        extra_roles=tuple(extra_roles),
    )
