"""Terminal output about heads: the grid of all heads, the best head of each role with evidence, and single heads."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from headwise.analysis.head_facts import HeadFacts
from headwise.analysis.metrics.far_attention import OUTSIDE_WINDOW, STREAMING_POLICY
from headwise.analysis.metrics.offsets import OFFSET_SPECS
from headwise.analysis.metrics.role_example_positions import ObservedAttentionExample
from headwise.analysis.roles.head_profile import HeadProfile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.prompt_role_definitions import STREAMING_THRESHOLD, streaming_candidate_mask
from headwise.analysis.roles.roles import RoleEvidence
from headwise.compression.head_compression_cost import HeadCompressionCost
from headwise.ui.head_summary import summary_lines
from headwise.ui.head_summary_printer import HeadSummaryPrinter
from headwise.ui.role_badges import role_badge
from headwise.ui.terminal_head_grid import LEGEND, make_selected_heads_grid
from headwise.ui.terminal_table import make_table


def show_profile(profile: Profile, selected: set[str], console: Console | None = None) -> None:
    """Print the grid, then the best head of each role with evidence and examples."""
    console = console or Console()
    about = profile.metadata
    relations_note = f", {about['documents']:,} documents with relations"
    noun, relations_note = ("images", "") if about.get("image_grid") else ("texts", relations_note)
    console.print(
        f"{len(profile)} heads on {about['texts']:,} {noun}, {about['tokens']:,} tokens{relations_note}. "
        f"{profile.family_size:,} tests{_causal_test_count_note(profile)}.{_unmeasured_arcs_note(profile)}",
        highlight=False,
    )
    console.print(make_selected_heads_grid(profile, selected, console.width))
    console.print(Text(LEGEND, "dim"))
    strongest = {}
    for role, heads in profile.heads_by_role().items():
        present_heads = [address for address in heads if str(address) in selected]
        if present_heads:
            head = profile[present_heads[0]]
            strongest[role] = head, next(entry for entry in head.roles if entry.role == role), len(present_heads)
    rows = [
        [
            *(
                role,
                Text(*role_badge(role)),
                heads,
                str(head.address),
                entry.detail,
                entry.evidence_label,
                entry.score,
                entry.baseline,
            ),
            *(_format_interval(entry.interval), _format_effect(entry), entry.corpus_label),
            "" if head.role == role and len(head.roles) == 1 else head.role_label,
        ]
        for role, (head, entry, heads) in strongest.items()
    ]
    columns = [
        "role",
        "",
        "heads",
        "best head",
        "",
        "evidence",
        "score",
        "baseline",
        "95% CI",
        "effect",
        "measured on",
        "all roles",
    ]
    console.print(make_table("Best head of each role", columns, rows))
    _show_streamable_count(profile, console)
    for name, reason in about.get("skipped", {}).items():
        console.print(Text(f"{name}: not measured, {reason}", "dim"))
    for role, (head, _, _) in strongest.items():
        examples = head.examples_by_role[role]
        if examples:
            console.print(Text.assemble((f"{role} {head.address}", "bold"), f"  {_hit_count(examples)}"))
            first_by_hit = {entry.hit: entry for entry in reversed(examples)}  # the first hit and the first miss
            for hit in sorted(first_by_hit, reverse=True):
                console.print(_format_example(first_by_hit[hit]))


def _show_streamable_count(profile: Profile, console: Console) -> None:
    """Print the number of heads whose attention stays inside the sink tokens and the window."""
    streamable = streaming_candidate_mask(profile.accumulator)
    if streamable is not None:
        console.print(
            f"Measured on {OUTSIDE_WINDOW.corpus_label}: {streamable.sum()} of {len(profile)} heads have less than "
            f"{STREAMING_THRESHOLD:.0%} of their attention "
            f"(upper end of the 95% CI) outside {STREAMING_POLICY.sink_tokens} sink tokens and a window of "
            f"{STREAMING_POLICY.window} tokens.",
            highlight=False,
        )


def show_role(profile: Profile, role: str, selected: set[str], console: Console | None = None) -> None:
    """Print every head with the role, best first, with its score, baseline, interval and evidence."""
    console = console or Console()
    role_heads = [
        (head, next(evidence for evidence in profile[head].roles if evidence.role == role))
        for head in profile.heads_by_role()[role]
    ]
    rows = [
        [
            *(
                str(head),
                evidence.detail,
                evidence.score,
                evidence.baseline,
                _format_interval(evidence.interval),
                f"{evidence.p:.4f}",
                evidence.rows,
                evidence.evidence_label,
            ),
            *(_format_effect(evidence), evidence.corpus_label),
        ]
        for head, evidence in role_heads
        if str(head) in selected
    ]
    columns = ["head", "", "score", "baseline", "95% CI", "p", "cases", "evidence", "effect", "measured on"]
    family = next((evidence.family_size for _, evidence in role_heads if evidence.family_size), profile.family_size)
    title = f"{len(rows)} of {len(profile)} heads have the role {role}; p is corrected for {family:,} tests"
    console.print(make_table(title, columns, rows))


def show_summary(
    profile: Profile,
    head: HeadProfile,
    facts: HeadFacts | None = None,
    cost: HeadCompressionCost | None = None,
    console: Console | None = None,
) -> None:
    """Print the summary of one head, each part with its documentation page, then the parts that were not measured."""
    printer = HeadSummaryPrinter(console or Console())
    printer.print_lines(summary_lines(profile, head, facts, cost))
    printer.print_errors(error for part in (facts, cost) if part is not None for error in part.errors)


def show_head(
    profile: Profile, head: HeadProfile, facts: HeadFacts | None = None, console: Console | None = None
) -> None:
    """Print the evidence, metrics and examples of one head."""
    console = console or Console()
    console.print(
        Text.assemble(
            (f"head {head.address}", "bold"),
            f"  {head.role_label}{', ' * bool(head.corpus_label)}{head.corpus_label}  ({head.evidence_label})",
        )
    )
    if head.idle_pattern:
        console.print(f"idle pattern: {', '.join(head.idle_pattern)}", highlight=False)
    _show_evidence(profile, head, console)
    listed = [name for name in head.metrics if not profile.metric_specs[name].series]
    rows = [[name, head.metrics[name]] for name in listed]
    if facts is not None and facts.ov_summary is not None:
        rows += [] if facts.ov_summary.effect is None else [["direct effect", facts.ov_summary.effect.mean]]
        rows.append(["OV eigenvalue score", facts.ov_summary.copying])
    console.print(make_table("Metrics", ["metric", "value"], rows))
    offset_weights = [(o, head.metrics[OFFSET_SPECS[o].name]) for o in range(8) if OFFSET_SPECS[o].name in head.metrics]
    if offset_weights:
        console.print(
            "attention by distance in tokens: " + "  ".join(f"{o}: {v:.2f}" for o, v in offset_weights), highlight=False
        )
    _show_examples(head, console)
    if head.top_contexts:
        console.print(Text("Largest attention weights", "bold"))
    for context in head.top_contexts:
        console.print(Text(f"  {context.weight:.2f}  {context.text}"))


def _show_evidence(profile: Profile, head: HeadProfile, console: Console) -> None:
    """Print the evidence for each role of a head."""
    rows = [
        [
            s.role,
            s.detail,
            s.evidence_label,
            s.score,
            s.baseline,
            _format_interval(s.interval),
            f"{s.p:.4f}",
            s.rows,
            s.coverage,
            *("" if x is None else f"{x:+.3f}" for x in (s.effect, s.cost, s.control_cost, s.cost_threshold)),
        ]
        for s in head.roles
    ]
    if rows:
        columns = [
            "role",
            "",
            "evidence",
            "score",
            "baseline",
            "95% CI",
            "p",
            "cases",
            "coverage",
            "effect",
            "cost",
            "control",
            "threshold",
        ]
        console.print(make_table(f"Evidence; p is corrected for {profile.family_size:,} tests", columns, rows))


def _show_examples(head: HeadProfile, console: Console) -> None:
    """Print the sampled examples of each role of a head."""
    for evidence in head.roles:
        if head.examples_by_role[evidence.role]:
            title = f"{evidence.role} {evidence.detail}".strip()
            console.print(
                Text.assemble(
                    (f"{title}, {evidence.corpus_label}", "bold"),
                    f"  {_hit_count(head.examples_by_role[evidence.role])}",
                )
            )
            for example in head.examples_by_role[evidence.role]:
                console.print(_format_example(example))


def _causal_test_count_note(profile: Profile) -> str:
    """Describe the number of causal tests."""
    return f" and {profile.num_causal_tests:,} causal tests" if profile.num_causal_tests else ""


def _unmeasured_arcs_note(profile: Profile) -> str:
    """Describe the relation arcs that could not be measured."""
    relations = profile.relation_metric
    if relations is None or not relations.left_out.any():
        return ""
    num_used, num_left_out = int(relations.arcs.sum()), int(relations.left_out.sum())
    return f" {num_left_out:,} of {num_used + num_left_out:,} relation arcs left out because their words share a token."


def _hit_count(examples: Sequence[ObservedAttentionExample]) -> str:
    return (
        f"{sum(example.hit for example in examples)} hits in {len(examples)} examples, the rate on the held-out texts"
    )


def _format_example(example: ObservedAttentionExample) -> Text:
    """Return hit or miss, the weight on the target and the text. For a miss, add the most attended token."""
    miss = "" if example.hit else f"  (*{example.attended}* {example.max_weight:.2f})"
    return Text.assemble(
        ("  hit   " if example.hit else "  miss  ", "green" if example.hit else "red"),
        f"{example.weight:.2f}  {example.text}{miss}",
    )


def _format_interval(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.2f}–{ends[1]:.2f}"


def _format_effect(evidence: RoleEvidence) -> str:
    return "" if evidence.effect is None else f"{evidence.effect:+.3f}"
