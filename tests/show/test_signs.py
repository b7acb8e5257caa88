"""One colour for a role, in the terminal, in pictures and on the page."""

import re
from pathlib import Path

import headwise.show
from headwise.show.signs import SIGNS

PAGE = Path(headwise.show.__file__).parent / "page" / "colour.js"


def test_the_page_has_the_same_hues() -> None:
    table = re.search(r"const HUES = \{(.*?)\};", PAGE.read_text(), re.DOTALL)
    assert table is not None
    hues = {(a or b).strip(): int(hue) for a, b, hue in re.findall(r'(?:"([^"]+)"|(\w+)): (\d+)', table[1])}
    assert hues == {role: hue for role, (_, hue) in SIGNS.items()}


def test_no_two_roles_have_the_same_letters() -> None:
    assert len({letters for letters, _ in SIGNS.values()}) == len(SIGNS)
