"""The grid of heads in the terminal: layers downwards, heads from left to right, each where it always was."""

from rich.text import Text

from headwise.analysis.roles.head_profile import HeadProfile
from headwise.analysis.roles.profile_result import Profile
from headwise.ui.role_badges import role_badge

LEVEL_STYLES = {"attention": "", "value-weighted": "bold ", "causal": "bold reverse "}
IDLE_SYMBOLS = {"sink": "‥‥", "special token": "‥‥", "broad": "~~", "idle": "__"}
NO_ROLE, ABSENT = "··", "  "
LEGEND = (
    "letters: a role, see below; bold: value-weighted; reversed: causal. Without a role: ·· nothing to be said, ‥‥ rests on "
    "the first or a special token, ~~ looks everywhere alike, __ writes next to nothing. Blank: cut, or not asked for."
)
LABEL_WIDTH, CELL_WIDTH = 8, 3  # columns for a layer's name, and for a head


def make_head_grid(profile: Profile, selected: set[str], width: int = 80) -> Text:
    """Every layer with some head that is wanted; a head that was cut or is not wanted leaves a gap."""
    head_numbers = range(1 + max((address.head for address in profile.addresses), default=0))
    heads_per_block = max(1, (width - LABEL_WIDTH) // CELL_WIDTH)
    grid_text = Text()
    for first in range(0, len(head_numbers), heads_per_block):
        grid_text.append_text(_block(profile, selected, head_numbers[first : first + heads_per_block]))
    return grid_text


def _block(profile: Profile, selected: set[str], head_numbers: range) -> Text:
    """Some columns of the grid, with their numbers above."""
    block_text = Text("   head ", "dim").append(
        "".join(f"{head_number:>{CELL_WIDTH}}" for head_number in head_numbers) + "\n", "dim"
    )
    for layer in profile.metadata["layers"]:
        heads_by_number = {
            address.head: address for address in profile.addresses if str(address.layer_address) == layer
        }
        if heads_by_number and not any(str(address) in selected for address in heads_by_number.values()):
            continue
        block_text.append(f"{layer:>7} ", "dim")
        if not heads_by_number:
            block_text.append(" no heads", "dim")
        for head_number in head_numbers if heads_by_number else ():
            is_selected = head_number in heads_by_number and str(heads_by_number[head_number]) in selected
            text, style = _cell(profile[heads_by_number[head_number]]) if is_selected else (ABSENT, "")
            block_text.append(" ").append(text, style)
        block_text.append("\n")
    return block_text


def _cell(head: HeadProfile) -> tuple[str, str]:
    if head.role == "unclear":
        return IDLE_SYMBOLS[head.idle_pattern[0]] if head.idle_pattern else NO_ROLE, "dim"
    letters, color = role_badge(head.role)
    return letters, LEVEL_STYLES[head.evidence_level] + color
