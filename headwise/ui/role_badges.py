"""Badge of each role: two letters and a color, for the terminal, figures and the page.

Thirty colors cannot be distinguished, so there are eight. They maximize the smallest pairwise distance for normal and
color-blind vision, on light and dark backgrounds (tests/ui/test_role_badges.py computes it). The combination of letters and
color is unique to a role.
"""

from colorsys import hls_to_rgb

ROLE_COLORS = ("#4b8796", "#f09600", "#8700d2", "#78b4c3", "#961e00", "#d24b0f", "#005a69", "#b469ff")
DARK_TEXT, LIGHT_TEXT = "#000000", "#ffffff"

# role: letters and color index; roles that are easily confused have different colors
ROLE_BADGES = {
    "previous token": ("pr", 0), "next token": ("nx", 3), "fixed offset": ("of", 6), "self": ("se", 1), "local": ("lo", 5),
    "induction": ("in", 2), "duplicate token": ("du", 7), "copy": ("co", 4),
    "delimiter": ("de", 1), "capitalized": ("ca", 5), "digit": ("di", 4), "sentence end": ("st", 3),
    "long range": ("lr", 6), "same phrase": ("ph", 0), "part of speech": ("ps", 3), "semantic": ("sm", 6),
    "coreference": ("cf", 7), "possessive": ("po", 2), "bracket": ("br", 4), "quote": ("qu", 5),
    "if-then": ("if", 1), "cause-effect": ("ce", 5), "question-answer": ("qa", 0), "subject-verb": ("sv", 7),
    "verb-object": ("vo", 4), "adjective-noun": ("an", 0), "determiner-noun": ("dn", 3),
    "successor": ("su", 3), "name mover": ("nm", 5), "name suppression": ("ns", 3), "copy suppression": ("cs", 1),
    "query focus": ("qf", 6),
    "far offset": ("fo", 2), "fixed position": ("fp", 7), "retrieval": ("re", 0),
}  # fmt: skip


def role_badge(role: str) -> tuple[str, str]:
    """Return the letters and the color of a role. A role without an entry gets its first two letters and a hashed color.

    >>> role_badge("induction"), role_badge("nsubj")
    (('in', '#8700d2'), ('ns', '#d24b0f'))
    """
    name_hash = 7
    for letter in role:
        name_hash = (name_hash * 31 + ord(letter)) % 997
    letters, color_index = ROLE_BADGES.get(role, (role[:2], name_hash % len(ROLE_COLORS)))
    return letters, ROLE_COLORS[color_index]


def text_color(color: str) -> str:
    """Return the text color with the higher contrast on a background color.

    >>> text_color("#f09600"), text_color("#8700d2")
    ('#000000', '#ffffff')
    """
    background_luminance = luminance(color)
    return max((DARK_TEXT, LIGHT_TEXT), key=lambda ink: abs(_contrast(background_luminance, luminance(ink))))


def luminance(color: str) -> float:
    """Relative luminance of a color (WCAG).

    >>> luminance("#ffffff")
    1.0
    """
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(first: float, second: float) -> float:
    return (max(first, second) + 0.05) / (min(first, second) + 0.05)


def hue_to_hex(hue: int) -> str:
    """Return a color of a given hue in degrees that is dark enough for a white background.

    >>> hue_to_hex(305)
    '#ae29a2'
    """
    red, green, blue = hls_to_rgb(hue / 360, 0.42, 0.62)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"
