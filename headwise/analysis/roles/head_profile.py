"""One head of a profile: its roles with their evidence, its idle pattern, metrics and examples."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.analysis.metrics.role_examples import RoleExample
from headwise.analysis.metrics.top_contexts import AttentionContext
from headwise.analysis.recording.text_hash_split import REPORTING
from headwise.analysis.roles.roles import RoleEvidence
from headwise.spec import Address

if TYPE_CHECKING:
    from headwise.analysis.roles.profile_result import Profile


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


def head_profile(profile: "Profile", index: int) -> HeadProfile:
    """Return one head of a profile, by its index in `profile.addresses`."""
    evidence = tuple(profile.evidence[index])
    roles = tuple(entry for entry in evidence if entry.is_supported)
    best = roles[0] if roles else None
    examples_by_role = {entry.role: _examples(profile, entry, index) for entry in roles}
    return HeadProfile(
        address=profile.addresses[index],
        role=best.role if best else "unclear",  # level `none` is not reported as a role: random heads have it too
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


def _examples(profile: "Profile", evidence: RoleEvidence, head: int) -> tuple[RoleExample, ...]:
    """Return the examples of one role. Their hit rate is known if it is the score of the role."""
    scores = profile.scores.get((evidence.role, evidence.detail))
    if scores is None:  # the offset was chosen on prompts
        return ()
    return profile.examples.examples_for_head(
        scores.role.metric_spec.target,
        scores.buckets_in_half(REPORTING),
        head,
        evidence.score if scores.role.is_hit_rate else None,
    )
