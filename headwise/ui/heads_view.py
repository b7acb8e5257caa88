"""Heads in the terminal: the grid of all heads in colour, the best of each role with its evidence, one head's whole story."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from headwise.analysis.metrics.long_offsets import BEYOND, KEEPS
from headwise.analysis.metrics.offsets import OFFSET
from headwise.analysis.metrics.role_examples import Example
from headwise.analysis.roles.profile_result import HeadProfile, Profile
from headwise.analysis.roles.prompt_roles import STREAMS, could_stream
from headwise.analysis.roles.roles import Support
from headwise.ui.glossary import how
from headwise.ui.head_facts import Facts
from headwise.ui.head_grid import LEGEND, grid
from headwise.ui.head_summary import story
from headwise.ui.role_badges import sign
from headwise.ui.tables import make_table


def show_profile(profile: Profile, wanted: set[str], console: Console | None = None) -> None:
    """Print the grid, then the strongest head of each role with evidence."""
    console = console or Console()
    about = profile.about
    related = f"{about['documents']:,} documents with relations; "
    what, related = ("pictures", "") if about.get("pictures") else ("texts", related)
    console.print(
        f"{len(profile)} heads on {about['texts']:,} {what}, {about['tokens']:,} tokens; {related}{profile.family:,} "
        f"tests{_tried(profile)}{_left_out(profile)}",
        highlight=False,
    )
    console.print(grid(profile, wanted, console.width))
    console.print(Text(LEGEND, "dim"))
    strongest = {}
    for role, heads in profile.roles().items():
        there = [address for address in heads if str(address) in wanted]
        if there:
            head = profile[there[0]]
            strongest[role] = head, next(one for one in head.roles if one.role == role), len(there)
    rows = [
        [
            *(role, Text(*sign(role)), heads, str(head.address), one.detail, one.evidence_level, one.score, one.null),
            *(_interval(one.interval), _effect(one), one.on),
            "" if head.role == role and len(head.roles) == 1 else head.role_label,
        ]
        for role, (head, one, heads) in strongest.items()
    ]
    columns = ["role", "", "heads", "best", "", "rung", "score", "baseline", "95 % CI", "effect", "shown on", "told as"]
    console.print(make_table("The strongest head of each role", columns, rows))
    streams = could_stream(profile.tally)
    if streams is not None:
        console.print(
            f"On {BEYOND.on}, {streams.sum()} of {len(profile)} heads have less than {STREAMS:.0%} of their attention "
            f"(upper end of the 95% CI) outside {KEEPS.first} sink tokens and a window of {KEEPS.last}",
            highlight=False,
        )
    for name, why in about.get("unasked", {}).items():
        console.print(Text(f"Not asked for {name}: {why}", "dim"))
    for role, (head, _, _) in strongest.items():
        cases = head.cases[role]
        if cases:
            console.print(Text.assemble((f"{role} {head.address}", "bold"), f"  {_hits(cases)}"))
            kinds = {one.hit: one for one in reversed(cases)}  # the first of each kind
            for hit in sorted(kinds, reverse=True):
                console.print(_case(kinds[hit]))


def show_role(profile: Profile, role: str, wanted: set[str], console: Console | None = None) -> None:
    """Print every head that has a role, best first: how well it does, against what, and how sure that is."""
    console = console or Console()
    found = [(head, next(one for one in profile[head].roles if one.role == role)) for head in profile.roles()[role]]
    rows = [
        [
            *(
                str(head),
                one.detail,
                one.score,
                one.null,
                _interval(one.interval),
                f"{one.p:.4f}",
                one.rows,
                one.evidence_level,
            ),
            *(_effect(one), one.on),
        ]
        for head, one in found
        if str(head) in wanted
    ]
    columns = ["head", "", "score", "baseline", "95 % CI", "p", "cases", "rung", "effect", "shown on"]
    family = next((one.family for _, one in found if one.family), profile.family)
    title = f"{len(rows)} of {len(profile)} heads have the role {role}; p is corrected for {family:,} tests"
    console.print(make_table(title, columns, rows))


def show_story(profile: Profile, head: HeadProfile, known: Facts | None = None, console: Console | None = None) -> None:
    """Print one head's story, each sentence with where it is told how its numbers are made; what could not be asked last."""
    console = console or Console()
    shown = ""
    for line in story(profile, head, known):
        console.print(Text(line.text))
        pointer = how(line.about)
        if pointer != shown:
            console.print(Text(f"  how: {pointer}", "dim"))
        shown = pointer
    for refused in known.refused if known is not None else ():
        console.print(Text(f"Not asked: {refused}", "dim"))


def show_head(profile: Profile, head: HeadProfile, known: Facts | None = None, console: Console | None = None) -> None:
    """Print every number of one head: what speaks for its roles, its measures, its cases."""
    console = console or Console()
    console.print(
        Text.assemble(
            (f"head {head.address}", "bold"),
            f"  {head.role_label}{', ' * bool(head.on)}{head.on}  ({head.evidence_level})",
        )
    )
    if head.rest:
        console.print(f"rests: {', '.join(head.rest)}", highlight=False)
    rows = [
        [
            s.role,
            s.detail,
            s.evidence_level,
            s.score,
            s.null,
            _interval(s.interval),
            f"{s.p:.4f}",
            s.rows,
            s.coverage,
            *("" if x is None else f"{x:+.3f}" for x in (s.effect, s.cost, s.control, s.bar)),
        ]
        for s in head.roles
    ]
    if rows:
        columns = [
            "role",
            "",
            "rung",
            "score",
            "baseline",
            "95 % CI",
            "p",
            "cases",
            "coverage",
            "effect",
            "cost",
            "control",
            "bar",
        ]
        console.print(make_table(f"What speaks for it ({profile.family:,} tests in the family)", columns, rows))
    listed = [name for name in head.measures if not profile.numbers[name].series]
    rows = [[name, head.measures[name]] for name in listed]
    if known is not None and known.wrote is not None:
        rows += [] if known.wrote.effect is None else [["direct effect", known.wrote.effect.mean]]
        rows.append(["OV eigenvalue score", known.wrote.copying])
    console.print(make_table("Measures", ["measure", "value"], rows))
    near = [(o, head.measures[OFFSET[o].name]) for o in range(8) if OFFSET[o].name in head.measures]
    if near:
        console.print("weight by distance: " + "  ".join(f"{o}: {v:.2f}" for o, v in near), highlight=False)
    for one in head.roles:
        if head.cases[one.role]:
            told = f"{one.role} {one.detail}".strip()
            console.print(Text.assemble((f"{told}, {one.on}", "bold"), f"  {_hits(head.cases[one.role])}"))
            for case in head.cases[one.role]:
                console.print(_case(case))
    if head.hardest:
        console.print(Text("looked hardest", "bold"))
    for seen in head.hardest:
        console.print(Text(f"  {seen.weight:.2f}  {seen.text}"))


def _tried(profile: Profile) -> str:
    """The other family of tests: heads taken away."""
    return f", and {profile.tried:,} times whether answers hang on a head" if profile.tried else ""


def _left_out(profile: Profile) -> str:
    """Arcs that could not be asked about, told beside what was."""
    relations = profile.relations
    if relations is None or not relations.left_out.any():
        return ""
    asked, left = int(relations.arcs.sum()), int(relations.left_out.sum())
    return f"; {left:,} of {asked + left:,} questions left out, for the words share the token that would be looked at"


def _hits(cases: Sequence[Example]) -> str:
    return f"hits {sum(one.hit for one in cases)} of {len(cases)} shown, as often as on the texts held out"


def _case(one: Example) -> Text:
    """One case: whether it is hit, the weight on what the role means, the text; of a miss, how hard it looks elsewhere."""
    miss = "" if one.hit else f"  (*{one.attended}* {one.most:.2f})"
    return Text.assemble(
        ("  hit   " if one.hit else "  miss  ", "green" if one.hit else "red"), f"{one.weight:.2f}  {one.text}{miss}"
    )


def _interval(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.2f}–{ends[1]:.2f}"


def _effect(one: Support) -> str:
    return "" if one.effect is None else f"{one.effect:+.3f}"
