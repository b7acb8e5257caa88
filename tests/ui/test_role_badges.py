"""Roles can be told apart: by colour as far as eight colours go, in four kinds of eyes, and by letters beyond that."""

import json
import re
from itertools import combinations
from pathlib import Path

import numpy as np

import headwise.ui
from headwise.ui.figures.roles import STRENGTH
from headwise.ui.role_badges import COLOURS, SIGNS, letter_ink, luminance, sign

PAGE = Path(headwise.ui.__file__).parent / "page"
PAPERS = ("#ffffff", "#181c24")  # of the page, light and dark
# G. M. Machado, M. M. Oliveira, L. A. F. Fernandes: A Physiologically-based Model for Simulation of Color Vision Deficiency,
# IEEE TVCG 15(6), 2009, https://doi.org/10.1109/TVCG.2009.113; severity 1.0, on linear RGB.
EYES = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
# B. Ottosson: A perceptual color space for image processing, 2020, https://bottosson.github.io/posts/oklab/
TO_LMS = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


def bytes_of(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])


def seen(parts: np.ndarray, eyes: str) -> np.ndarray:
    """Where a colour lies in OKLab, for some eyes."""
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return np.array(TO_LAB) @ np.cbrt(np.array(TO_LMS) @ np.clip(np.array(EYES[eyes]) @ linear, 0, 1))


def nearest(colours: list[np.ndarray], eyes: str) -> float:
    return min(float(np.linalg.norm(seen(a, eyes) - seen(b, eyes))) for a, b in combinations(colours, 2))


def test_oklab_is_oklab() -> None:
    """White, and the pure red of Ottosson's page, within its digits."""
    assert np.allclose(seen(np.ones(3), "usual"), [1, 0, 0], atol=1e-4)
    assert np.allclose(seen(np.array([1.0, 0, 0]), "usual"), [0.628, 0.225, 0.126], atol=1e-3)


def test_any_two_colours_are_far_apart_in_all_eyes() -> None:
    """A difference of 0.02 is about the least one sees; three hues of green before had 0.03 and less between them."""
    for eyes in EYES:
        assert nearest([bytes_of(colour) for colour in COLOURS], eyes) >= 0.14, eyes


def test_so_they_are_where_the_evidence_is_weak_and_colours_faint() -> None:
    for paper in PAPERS:
        for eyes in EYES:
            blended = [
                STRENGTH["selective"] * bytes_of(c) + (1 - STRENGTH["selective"]) * bytes_of(paper) for c in COLOURS
            ]
            assert nearest(blended, eyes) >= 0.06, (paper, eyes)


def test_colours_stand_out_from_both_papers_and_letters_from_colours() -> None:
    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    assert min(contrast(colour, paper) for colour in COLOURS for paper in PAPERS) >= 2
    assert min(contrast(colour, letter_ink(colour)) for colour in COLOURS) >= 4.5


def test_no_two_roles_share_letters_and_those_once_green_differ_in_colour() -> None:
    assert len({letters for letters, _ in SIGNS.values()}) == len(SIGNS)
    assert len({sign(role)[1] for role in ("semantic", "cause-effect", "if-then")}) == 3


def test_the_page_has_the_same_colours() -> None:
    text = (PAGE / "colour.js").read_text()
    found = re.search(r"const COLOURS = (\[.*?\]);", text)
    assert found is not None
    assert json.loads(found[1]) == list(COLOURS)
    style = (PAGE / "style.css").read_text()
    assert [re.findall(r"--paper: (#\w+)", style)[i] for i in (0, 1)] == list(PAPERS)
