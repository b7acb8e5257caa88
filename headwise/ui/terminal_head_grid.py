"""Grid of all heads in the terminal: one row per layer, one column per head number."""

from rich.text import Text

from headwise.analysis.roles.head_profile import HeadProfile
from headwise.analysis.roles.profile_result import Profile
from headwise.ui.role_badges import role_badge

LEVEL_STYLES = {"attention": "", "value-weighted": "bold ", "causal": "bold reverse "}
IDLE_SYMBOLS = {"sink": "‥‥", "special token": "‥‥", "broad": "~~", "idle": "__"}
NO_ROLE, ABSENT = "··", "  "
LEGEND = (
    "Letters: role (see the table); bold: value-weighted evidence; reversed: causal evidence. Heads without a role: "
    "‥‥ attention sink, ~~ diffuse attention, __ output near zero, ·· other. Blank: pruned or not selected."
)
LABEL_WIDTH, CELL_WIDTH = 8, 3  # characters of the layer label and of one head


def make_selected_heads_grid(profile: Profile, selected: set[str], width: int = 80) -> Text:
    """Return the grid of the layers with selected heads. Pruned and unselected heads are blank."""
    head_numbers = range(1 + max((address.head for address in profile.addresses), default=0))
    heads_per_block = max(1, (width - LABEL_WIDTH) // CELL_WIDTH)
    grid_text = Text()
    for first in range(0, len(head_numbers), heads_per_block):
        grid_text.append_text(_block(profile, selected, head_numbers[first : first + heads_per_block]))
    return grid_text


def _block(profile: Profile, selected: set[str], head_numbers: range) -> Text:
    """Return a block of columns with the head numbers above."""
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
