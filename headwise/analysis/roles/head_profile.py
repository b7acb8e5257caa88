"""One head of a profile: its roles with their evidence, its idle pattern, metrics and examples."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.analysis.metrics.role_example_positions import ObservedAttentionExample
from headwise.analysis.metrics.top_contexts import AttentionContext
from headwise.analysis.recording.text_hash_split import REPORTING
from headwise.analysis.roles.roles import RoleEvidence
from headwise.spec import Address

if TYPE_CHECKING:
    from headwise.analysis.roles.profile_result import Profile


@dataclass(frozen=True)
class HeadProfile:
    """Profile of one head: its best-supported role, all its roles, idle patterns, metrics and examples.

    Attributes:
        address: Address of the head.
        role: Best-supported role. `unclear` if no role is supported.
        evidence_level: Evidence level of the role: `none`, `attention`, `value-weighted` or `causal`.
        score: Score of the role. None if unclear.
        baseline: Baseline of the role. None if unclear.
        interval: 95% confidence interval of the score. None if unclear.
        detail: Offset or direction of the role.
        effect: Cost of ablating the head, minus that of the other heads of its layer, in nats per answer.
        roles: All supported roles, best first.
        evidence: Evidence for the supported roles and for those with level `none`, which random heads also have.
        idle_pattern: Names of its idle patterns.
        corpus_label: Texts on which the role was found.
        examples: Examples of its role from the reporting half. Hits are as frequent as in the texts.
        examples_by_role: Examples of each role.
        top_contexts: Positions with its largest attention weights.
        metrics: All displayed metrics, by name.
    """

    address: Address
    role: str
    evidence_level: str
    score: float | None
    baseline: float | None
    interval: tuple[float, float] | None
    detail: str
    effect: float | None
    roles: tuple[RoleEvidence, ...]
    evidence: tuple[RoleEvidence, ...]
    idle_pattern: tuple[str, ...]
    corpus_label: str
    examples: tuple[ObservedAttentionExample, ...]
    examples_by_role: dict[str, tuple[ObservedAttentionExample, ...]]
    top_contexts: tuple[AttentionContext, ...]
    metrics: dict[str, float]

    def __repr__(self) -> str:
        from headwise.ui.result_text import head_roles_table

        return head_roles_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import head_roles_table

        return head_roles_table(self).as_html()

    @property
    def causal_on(self) -> tuple[str, ...]:
        """Token sets or prompts on which its first role passes the causal test."""
        return self.roles[0].causal_on if self.roles else ()

    @property
    def evidence_label(self) -> str:
        """Evidence level of its first role in words, with the token sets on which it passes the causal test."""
        return self.roles[0].evidence_label if self.roles else self.evidence_level

    @property
    def role_label(self) -> str:
        """Its first role and the number of further roles: `possessive > +4`."""
        return " ".join(
            (self.role, *[self.detail] * bool(self.detail), *[f"+{len(self.roles) - 1}"] * (len(self.roles) > 1))
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data = asdict(self)
        data["address"] = str(self.address)
        data["metrics"] = {name: value for name, value in self.metrics.items() if np.isfinite(value)}
        return data


def head_profile(profile: "Profile", index: int) -> HeadProfile:
    """Return one head of a profile, by its index in `profile.addresses`."""
    evidence = tuple(profile.evidence[index])
    roles = tuple(entry for entry in evidence if entry.is_supported)
    best = roles[0] if roles else None
    examples_by_role = {entry.role: _examples(profile, entry, index) for entry in roles}
    return HeadProfile(
        address=profile.addresses[index],
        role=best.role if best else "unclear",  # level `none` is not reported, because random heads have it too
        evidence_level=best.evidence_level if best else "none",
        score=best.score if best else None,
        baseline=best.baseline if best else None,
        interval=best.interval if best else None,
        detail=best.detail if best else "",
        effect=best.effect if best else None,
        roles=roles,
        evidence=evidence,
        idle_pattern=profile.idle_patterns[index],
        corpus_label=best.corpus_label if best else "",
        examples=examples_by_role[best.role] if best else (),
        examples_by_role=examples_by_role,
        top_contexts=tuple(profile.top_contexts[index]),
        metrics={name: float(values[index]) for name, values in profile.metrics.items()},
    )


def _examples(profile: "Profile", evidence: RoleEvidence, head: int) -> tuple[ObservedAttentionExample, ...]:
    """Return the examples of one role. They are sampled at the hit rate if this is the score of the role."""
    scores = profile.scores.get((evidence.role, evidence.detail))
    if scores is None:  # the offset was selected on prompts
        return ()
    return profile.examples.examples_for_head(
        scores.role.metric_spec.target,
        scores.buckets_in_half(REPORTING),
        head,
        evidence.score if scores.role.is_hit_rate else None,
    )
