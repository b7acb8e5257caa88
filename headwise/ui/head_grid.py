"""The grid of heads in the terminal: layers downwards, heads from left to right, each where it always was."""

from rich.text import Text

from headwise.analysis.roles.profile_result import HeadProfile, Profile
from headwise.ui.role_badges import sign

STRONG = {"selective": "", "effective": "bold ", "causal": "bold reverse "}
RESTING = {"sink": "‥‥", "special token": "‥‥", "broad": "~~", "idle": "__"}
NONE, CUT = "··", "  "
LEGEND = (
    "letters: a role, see below; bold: effective; reversed: causal. Without a role: ·· nothing to be said, ‥‥ rests on the "
    "first or a special token, ~~ looks everywhere alike, __ writes next to nothing. Blank: cut, or not asked for."
)
LEFT, CELL = 8, 3  # columns for a layer's name, and for a head


def grid(profile: Profile, wanted: set[str], width: int = 80) -> Text:
    """Every layer with some head that is wanted; a head that was cut or is not wanted leaves a gap."""
    numbers = range(1 + max((address.head for address in profile.addresses), default=0))
    fit = max(1, (width - LEFT) // CELL)
    drawn = Text()
    for first in range(0, len(numbers), fit):
        drawn.append_text(_block(profile, wanted, numbers[first : first + fit]))
    return drawn


def _block(profile: Profile, wanted: set[str], numbers: range) -> Text:
    """Some columns of the grid, with their numbers above."""
    drawn = Text("   head ", "dim").append("".join(f"{number:>{CELL}}" for number in numbers) + "\n", "dim")
    for layer in profile.about["layers"]:
        there = {address.head: address for address in profile.addresses if str(address.site) == layer}
        if there and not any(str(address) in wanted for address in there.values()):
            continue
        drawn.append(f"{layer:>7} ", "dim")
        if not there:
            drawn.append(" no heads", "dim")
        for number in numbers if there else ():
            here = number in there and str(there[number]) in wanted
            text, style = _cell(profile[there[number]]) if here else (CUT, "")
            drawn.append(" ").append(text, style)
        drawn.append("\n")
    return drawn


def _cell(head: HeadProfile) -> tuple[str, str]:
    if head.role == "unclear":
        return RESTING[head.rest[0]] if head.rest else NONE, "dim"
    letters, colour = sign(head.role)
    return letters, STRONG[head.rung] + colour
