"""What a profile holds, and how it is asked, saved, merged and compared."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.directed_relations import DirectedRelation
from headwise.analysis.metrics.metric import MetricSpec
from headwise.analysis.metrics.relation_metric import RelationMetric
from headwise.analysis.metrics.role_examples import ExampleStore, RoleExample
from headwise.analysis.metrics.row_shape import CONFIDENCE, DISTANCE, ENTROPY, FIRST_TOKEN, OUTPUT_SHARE
from headwise.analysis.metrics.top_contexts import AttentionContext
from headwise.analysis.recording.text_hash_split import REPORTING
from headwise.analysis.roles.merge_profiles import (
    carry_over_effects,
    check_mergeable,
    merge_accumulators,
    merge_relation_sources,
    merge_relations,
    merge_top_contexts,
)  # fmt: skip
from headwise.analysis.roles.profile_io import (
    VERSION,
    evidence_from_dict,
    metric_spec_from_dict,
    read_npz,
    role_from_dict,
    write_npz,
)
from headwise.analysis.roles.prompt_roles import add_chosen_offsets
from headwise.analysis.roles.roles import (
    DEFAULT_ROLES,
    Role,
    RoleEvidence,
    RoleScores,
    assess_roles,
    find_idle_patterns,
    score_roles,
)
from headwise.errors import HeadwiseError
from headwise.spec import Address

if TYPE_CHECKING:
    from pandas import DataFrame

    from headwise.model import ModelProtocol
    from headwise.ui.figures.plot_accessor import PlotAccessor
    from headwise.ui.head_summary import HeadSummary

DEFAULT_COLUMNS = tuple(metric_spec.name for metric_spec in (ENTROPY, CONFIDENCE, DISTANCE, FIRST_TOKEN, OUTPUT_SHARE))
EvidencePerHead = Sequence[Sequence[RoleEvidence]]  # for each head, best first


@dataclass(frozen=True)
class HeadProfile:
    """One head: its best-supported role with evidence level, score, baseline and interval; all its roles; its idle pattern;
    its evidence."""

    address: Address
    role: str  # `unclear` where nothing is supported
    evidence_level: str
    score: float | None
    baseline: float | None
    interval: tuple[float, float] | None
    detail: str
    effect: float | None
    roles: tuple[RoleEvidence, ...]  # all that stand, best first
    evidence: tuple[RoleEvidence, ...]  # the same and mere patterns, which random heads show too
    idle_pattern: tuple[str, ...]
    corpus_label: str  # the texts on which its role was shown
    examples: tuple[RoleExample, ...]  # cases of its role, from the half for reporting: hits as often as they are
    examples_by_role: dict[str, tuple[RoleExample, ...]]  # the same for each of its roles
    top_contexts: tuple[AttentionContext, ...]  # where it looked hardest, whatever for
    metrics: dict[str, float]

    @property
    def causal_on(self) -> tuple[str, ...]:
        """Token sets, or prompts, on which the causal test of its first role holds."""
        return self.roles[0].causal_on if self.roles else ()

    @property
    def evidence_label(self) -> str:
        """Evidence level of its first role in words, with the token sets on which the causal test holds."""
        return self.roles[0].evidence_label if self.roles else self.evidence_level

    @property
    def role_label(self) -> str:
        """Its first role, and how many more it has: `possessive > +4`."""
        return " ".join(
            (self.role, *[self.detail] * bool(self.detail), *[f"+{len(self.roles) - 1}"] * (len(self.roles) > 1))
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data = asdict(self)
        data["address"] = str(self.address)
        data["metrics"] = {name: value for name, value in self.metrics.items() if np.isfinite(value)}
        return data


@dataclass(frozen=True, eq=False)
class Profile:
    """Every head of a model, measured. `profile["5.1"]` is one of them. Once made it stays as it is."""

    addresses: tuple[Address, ...]
    accumulator: Accumulator
    relation_metric: RelationMetric | None
    top_contexts: Sequence[Sequence[AttentionContext]]
    examples: ExampleStore
    evidence: EvidencePerHead
    idle_patterns: Sequence[tuple[str, ...]]
    family_size: int  # how many tests were made
    metadata: dict[str, Any]
    metric_specs: Mapping[str, MetricSpec]  # what was measured, by name
    extra_roles: tuple[Role, ...] = ()  # roles beside those everybody is asked

    @staticmethod
    def of(
        addresses: tuple[Address, ...],
        accumulator: Accumulator,
        relation_metric: RelationMetric | None,
        top_contexts: Sequence[Sequence[AttentionContext]],
        examples: ExampleStore,
        metadata: dict[str, Any],
        metric_specs: Mapping[str, MetricSpec],
        extra_roles: Sequence[Role] = (),
        causal_test: Callable[[EvidencePerHead], EvidencePerHead] | None = None,
    ) -> "Profile":
        """What follows from what was counted: roles and where heads rest. `causal_test` tries the last evidence level, by
        ablations."""
        evidence, family_size = assess_roles(
            score_roles(accumulator, relation_metric, roles=(*DEFAULT_ROLES, *extra_roles)), len(addresses)
        )
        evidence = add_chosen_offsets(
            [
                [
                    replace(entry, corpus_label=entry.corpus_label or _corpus_label_of(entry, metadata))
                    for entry in head_evidence
                ]
                for head_evidence in evidence
            ],
            metadata,
        )
        evidence = evidence if causal_test is None else tuple(map(tuple, causal_test(evidence)))
        heads_in_layer = Counter(address.layer_address for address in addresses)
        per_layer = np.array([heads_in_layer[address.layer_address] for address in addresses])
        idle_patterns = find_idle_patterns(accumulator, per_layer)
        return Profile(
            addresses,
            accumulator,
            relation_metric,
            top_contexts,
            examples,
            evidence,
            idle_patterns,
            family_size,
            metadata,
            metric_specs,
            tuple(extra_roles),
        )

    def __len__(self) -> int:
        return len(self.addresses)

    def __iter__(self) -> Iterator[HeadProfile]:
        return (self[address] for address in self.addresses)

    def __getitem__(self, head: str | Address) -> HeadProfile:
        address = head if isinstance(head, Address) else Address.parse(head)
        if address not in self.addresses:
            raise HeadwiseError(
                f"there is no head {address} in this profile; it has {self.addresses[0]} to {self.addresses[-1]}."
            )
        index = self.addresses.index(address)
        evidence = self.evidence[index]
        roles = tuple(entry for entry in evidence if entry.is_supported)
        role_fields = (
            "unclear",
            "none",
            None,
            None,
            None,
            "",
            None,
        )  # a pattern alone is nothing: random heads show some
        if roles:
            best = roles[0]
            role_fields = (
                best.role,
                best.evidence_level,
                best.score,
                best.baseline,
                best.interval,
                best.detail,
                best.effect,
            )
        metrics = {name: float(values[index]) for name, values in self._metrics.items()}
        examples_by_role = {entry.role: self._examples(entry, index) for entry in roles}
        corpus_label, examples = (roles[0].corpus_label, examples_by_role[roles[0].role]) if roles else ("", ())
        return HeadProfile(
            address, *role_fields, roles, tuple(evidence), self.idle_patterns[index], corpus_label, examples,
            examples_by_role, tuple(self.top_contexts[index]), metrics,
        )  # fmt: skip

    def _examples(self, evidence: RoleEvidence, head: int) -> tuple[RoleExample, ...]:
        """Cases of a role; how often a head hits is known where that is its score."""
        scores = self._role_scores.get((evidence.role, evidence.detail))
        if scores is None:  # it was not found here
            return ()
        return self.examples.examples_for_head(
            scores.role.metric_spec.target,
            scores.buckets_in_half(REPORTING),
            head,
            evidence.score if scores.role.is_hit_rate else None,
        )

    @cached_property
    def _role_scores(self) -> dict[tuple[str, str], RoleScores]:
        """What was asked for each role, by its name and detail."""
        all_scores = score_roles(self.accumulator, self.relation_metric, roles=(*DEFAULT_ROLES, *self.extra_roles))
        return {(scores.role.name, scores.role.detail): scores for scores in all_scores}

    @cached_property
    def _metrics(self) -> dict[str, np.ndarray]:
        """Every measure of every head, taken once: a profile is read head by head."""
        return {name: self.metric(name) for name in self.accumulator.fields if self.metric_specs[name].displayed}

    def metric(self, name: str) -> np.ndarray:
        """One measure of every head, (heads,): `entropy`, `offset 1`, `delimiter`, `det > hits` …"""
        return self.accumulator.mean(name)

    def mean_by_layer(self, name: str) -> np.ndarray:
        """A measure's mean in each layer, early to late: (layers,); NaN where there are no heads, or nothing was measured."""
        values = self.metric(name)
        layers: dict[str, list[float]] = {layer: [] for layer in self.metadata["layers"]}
        for value, address in zip(values, self.addresses, strict=True):
            if np.isfinite(value):
                layers[str(address.layer_address)].append(value)
        return np.array([np.mean(layer_values) if layer_values else np.nan for layer_values in layers.values()])

    def best_head(self, role: str) -> HeadProfile | None:
        """The head with the best support for a role, or None."""
        heads = self.heads_by_role().get(role)
        return self[heads[0]] if heads else None

    @property
    def num_causal_tests(self) -> int:
        """Number of causal tests: heads × roles × token sets that have a control, in both families."""
        return sum(
            effect.control_cost is not None for roles in self.evidence for entry in roles for effect in entry.effects
        )

    def heads_by_role(self) -> dict[str, list[Address]]:
        """Every role that some head has, be it its first or not, with its heads, best first."""
        heads_by_role: dict[str, list[tuple[tuple[int, float], Address]]] = {}
        for address, evidence in zip(self.addresses, self.evidence, strict=True):
            for entry in evidence:
                if entry.is_supported:
                    heads_by_role.setdefault(entry.role, []).append((entry.sort_key, address))
        return {
            role: [a for _, a in sorted(heads, key=lambda x: x[0], reverse=True)]
            for role, heads in sorted(heads_by_role.items())
        }

    @property
    def table_columns(self) -> tuple[str, ...]:
        """The measures that have a column in the table of heads."""
        available = tuple(
            name for name in DEFAULT_COLUMNS if name in self.metric_specs
        )  # of pictures some are not asked
        in_table = (name for name, metric_spec in self.metric_specs.items() if metric_spec.in_table)
        return (*available, *(name for name in in_table if name not in DEFAULT_COLUMNS))

    def table(self) -> list[dict[str, Any]]:
        """One row per head."""
        return [
            {
                "head": str(head.address), "role": head.role, "roles": "; ".join(entry.role for entry in head.roles),
                "detail": head.detail, "corpus": head.corpus_label, "evidence_level": head.evidence_level,
                "causal_on": " and ".join(head.causal_on), "score": head.score, "baseline": head.baseline,
                "low": (head.interval or (None, None))[0], "high": (head.interval or (None, None))[1], "effect": head.effect,
                "idle_pattern": ", ".join(head.idle_pattern),
                **{name: head.metrics[name] for name in self.table_columns},
            }
            for head in self
        ]  # fmt: skip

    def to_frame(self) -> "DataFrame":
        """The table as a pandas DataFrame, indexed by head, with every measure."""
        try:
            import pandas
        except ImportError:
            raise HeadwiseError(
                "a frame needs pandas: pip install 'headwise[frame]'; or use profile.table()."
            ) from None
        rows = [{**row, **head.metrics} for row, head in zip(self.table(), self, strict=True)]
        return pandas.DataFrame(rows).set_index("head")

    def merge(self, other: "Profile") -> "Profile":
        """Both together: what one pass over this corpus and then the other's, and over the documents of both, would give.

        Documents with relations that are not the texts themselves and the same in both count once, as repeated tokens do.
        Roles and rests are judged anew on all that was counted. Ablations are not made again: a role keeps what they
        showed for it, here or in the other. `variability`, which compares texts with each other, stays that of the larger
        sample.
        """
        check_mergeable(self, other)
        num_texts, (relation_source, same_documents) = (
            self.metadata["texts"],
            merge_relation_sources(self.metadata, other.metadata),
        )
        relation_parts = [
            (profile.accumulator, profile.relation_metric)
            for profile in (self, other)
            if profile.relation_metric is not None
        ]
        metric_specs = {**self.metric_specs, **other.metric_specs}
        accumulator = merge_accumulators(
            self.accumulator,
            other.accumulator,
            metric_specs,
            [metric.names[0] for _, metric in relation_parts if metric.names],
        )
        relation_metric = merge_relations(accumulator, relation_parts[:1] if same_documents else relation_parts)
        metadata = {
            **self.metadata, "texts": num_texts + other.metadata["texts"],
            "tokens": self.metadata["tokens"] + other.metadata["tokens"],
            "documents": self.metadata["documents"] + (0 if same_documents else other.metadata["documents"]),
            "relations": relation_source,
            **{name: _join_names(self.metadata[name], other.metadata[name]) for name in ("corpus", "relations_corpus")},
        }  # fmt: skip
        top_contexts = [
            merge_top_contexts(a, b, num_texts) for a, b in zip(self.top_contexts, other.top_contexts, strict=True)
        ]
        examples = self.examples.merge(other.examples)

        def carry_over(evidence: EvidencePerHead) -> EvidencePerHead:
            previous = [(*a, *b) for a, b in zip(self.evidence, other.evidence, strict=True)]
            pairs = zip(evidence, previous, strict=True)
            return [carry_over_effects(head_evidence, earlier) for head_evidence, earlier in pairs]

        return Profile.of(
            self.addresses,
            accumulator,
            relation_metric,
            top_contexts,
            examples,
            metadata,
            metric_specs,
            self.extra_roles,
            carry_over,
        )

    def diff(self, other: "Profile") -> list[dict[str, Any]]:
        """What changed from this profile to another, head by head: roles, evidence levels, metrics; heads gone or new.

        Both must be of one model, at two times of its training, say, or with heads cut: elsewhere 5.1 is another head.
        """
        if self.metadata["model"] != other.metadata["model"]:
            raise HeadwiseError(
                f"these are profiles of two models, a {self.metadata['model']} and a {other.metadata['model']}: heads of the "
                f"same address have nothing to do with each other. Give two profiles of one model."
            )
        rows = []
        for address in dict.fromkeys((*self.addresses, *other.addresses)):
            before = self[address] if address in self.addresses else None
            after = other[address] if address in other.addresses else None
            row: dict[str, Any] = {
                "head": str(address),
                "before": before.role if before else "absent", "after": after.role if after else "absent",
                "evidence_level before": before.evidence_level if before else "",
                "evidence_level after": after.evidence_level if after else "",
            }  # fmt: skip
            if before and after:
                row |= {
                    name: after.metrics[name] - before.metrics[name]
                    for name in DEFAULT_COLUMNS
                    if name in after.metrics
                }
            rows.append(row)
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: one record per head."""
        return {
            "version": VERSION,
            "metadata": self.metadata,
            "family_size": self.family_size,
            "heads": [head.to_dict() for head in self],
        }

    @property
    def plot(self) -> "PlotAccessor":
        """Pictures: `profile.plot.roles().save("roles.svg")`; see `headwise.ui.figures.plot_accessor` for all of them."""
        from headwise.ui.figures.plot_accessor import PlotAccessor

        return PlotAccessor(self)

    def summary(self, head: str | Address, model: "ModelProtocol | None" = None) -> "HeadSummary":
        """One head in plain sentences; with the model also what it writes, is worth, could cost less and works with."""
        from headwise.ui.head_summary import summarize_head

        return summarize_head(self, self[head], model)

    def _repr_html_(self) -> str:
        from headwise.ui.notebook import profile_html

        return profile_html(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from headwise.ui.widget import widget_mime_bundle

        return widget_mime_bundle(self)

    def report(self, path: str | Path, model: "ModelProtocol | None" = None, **options: Any) -> Path:
        """Write one file that shows every head in a browser, offline. With the model it can tell more of them.

        `options`: `name`, `sentences` to show (texts), `importance`, `history`, `curve`, `claims`, `sensitivity`, `plan`, as
        `headwise.ui.report_data.make_report_data` takes them.
        """
        from headwise.ui.report import write_report
        from headwise.ui.report_data import make_report_data

        return write_report(make_report_data(self, model, **options), path)

    def save(self, path: str | Path) -> Path:
        """Write one compressed file; `Profile.load` brings it back."""
        arrays = {f"sums/{group}": value for group, value in self.accumulator.sums.items()}
        arrays |= {f"counts/{group}": value for group, value in self.accumulator.counts.items()}
        header = {
            "metadata": self.metadata, "family_size": self.family_size, "heads": [str(a) for a in self.addresses],
            "fields": self.accumulator.fields,
            "metric_specs": [asdict(metric_spec) for metric_spec in self.metric_specs.values()],
            "roles": [asdict(role) for role in self.extra_roles], "idle_patterns": self.idle_patterns,
            "top_contexts": [[asdict(c) for c in items] for items in self.top_contexts],
            "examples": self.examples.to_dict(), "evidence": [[asdict(s) for s in items] for items in self.evidence],
        }  # fmt: skip
        if self.relation_metric is not None:
            relations = self.relation_metric.relations
            header["relations"] = [(relation.relation, relation.direction) for relation in relations]
            header["causal"] = self.relation_metric.causal
            arrays |= {f"relations/{name}": value for name, value in self.relation_metric.to_arrays().items()}
        arrays |= {f"examples/{name}": value for name, value in self.examples.arrays.items()}
        return write_npz(path, header, arrays)

    @staticmethod
    def load(path: str | Path) -> "Profile":
        """Read a file written by `save`; one that is damaged or of another version is refused."""
        header, arrays = read_npz(path)
        try:
            return _profile_from_stored(header, arrays)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise HeadwiseError(
                f"{path} lacks something a profile has ({error}); make it again: headwise profile MODEL --save FILE."
            ) from None


def _profile_from_stored(stored: dict[str, Any], arrays: dict[str, np.ndarray]) -> Profile:
    addresses = tuple(Address.parse(text) for text in stored["heads"])
    accumulator = Accumulator(
        len(addresses), {name: (group, column) for name, (group, column) in stored["fields"].items()}
    )
    for name, value in arrays.items():
        kind, _, group = name.partition("/")
        if kind in ("sums", "counts"):
            getattr(accumulator, kind)[group] = value
    relation_metric = None
    if "relations" in stored:
        relation_metric = RelationMetric(
            accumulator,
            tuple(DirectedRelation(name, direction) for name, direction in stored["relations"]),
            stored["causal"],
        )
        for name in relation_metric.to_arrays():
            setattr(relation_metric, name, arrays[f"relations/{name}"])
    return Profile(
        addresses, accumulator, relation_metric,
        [[AttentionContext(**c) for c in items] for items in stored["top_contexts"]],
        ExampleStore.of(len(addresses), stored["examples"], {n: value for n, value in arrays.items() if "examples/" in n}),
        tuple(tuple(evidence_from_dict(s) for s in items) for items in stored["evidence"]),
        [tuple(names) for names in stored["idle_patterns"]], stored["family_size"], stored["metadata"],
        {entry["name"]: metric_spec_from_dict(entry) for entry in stored["metric_specs"]},
        tuple(map(role_from_dict, stored["roles"])),
    )  # fmt: skip


def _corpus_label_of(evidence: RoleEvidence, metadata: dict[str, Any]) -> str:
    """The texts on which a role was shown, in words: its name claims no more."""
    return metadata["relations_corpus"] if evidence.is_relation else metadata["corpus"]


def _join_names(first: str, second: str) -> str:
    """The names of two corpora."""
    return " and ".join(dict.fromkeys(name for joined in (first, second) for name in joined.split(" and ") if name))
