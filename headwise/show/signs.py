"""A role's two letters and its colour: one table for the terminal, for pictures and, with the same hues, for the page."""

from colorsys import hls_to_rgb

# role: its letters, and the hue of its colour in degrees
SIGNS = {
    "previous token": ("pr", 195), "next token": ("nx", 205), "fixed offset": ("of", 215), "self": ("se", 180),
    "local": ("lo", 170), "induction": ("in", 305), "duplicate token": ("du", 325), "copy": ("co", 340),
    "delimiter": ("de", 45), "capitalised": ("ca", 35), "digit": ("di", 55),
    "long range": ("lr", 230), "same phrase": ("ph", 245), "part of speech": ("ps", 260), "semantic": ("sm", 130),
    "coreference": ("cf", 145), "possessive": ("po", 110), "bracket": ("br", 5), "quote": ("qu", 15),
}  # fmt: skip


def sign(role: str) -> tuple[str, str]:
    """Two letters and a colour, dark enough for paper; other roles are relations, whose hues lie among the greens.

    >>> sign("induction"), sign("nsubj")
    (('in', '#ae29a2'), ('ns', '#29ae8a'))
    """
    named = 7
    for letter in role:
        named = (named * 31 + ord(letter)) % 997
    letters, hue = SIGNS.get(role, (role[:2], 75 + named % 90))
    return letters, coloured(hue)


def coloured(hue: int) -> str:
    """A colour dark enough for paper, by its hue in degrees.

    >>> coloured(305)
    '#ae29a2'
    """
    red, green, blue = hls_to_rgb(hue / 360, 0.42, 0.62)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"
