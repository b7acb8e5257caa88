"""Roles are distinguishable: by eight colors under four kinds of color vision, and by letters."""

import json
import re
from itertools import combinations
from pathlib import Path

import numpy as np

import headwise.ui
from headwise.ui.figures.role_grid import LEVEL_ALPHA
from headwise.ui.role_badges import ROLE_BADGES, ROLE_COLORS, luminance, role_badge, text_color

PAGE = Path(headwise.ui.__file__).parent / "page"
BACKGROUNDS = ("#ffffff", "#181c24")  # light and dark page
# G. M. Machado, M. M. Oliveira, L. A. F. Fernandes: A Physiologically-based Model for Simulation of Color Vision Deficiency,
# IEEE TVCG 15(6), 2009, https://doi.org/10.1109/TVCG.2009.113; severity 1.0, on linear RGB.
COLOR_VISION = {
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


def hex_to_rgb(color: str) -> np.ndarray:
    return np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])


def to_oklab(rgb: np.ndarray, vision: str) -> np.ndarray:
    """Return the OKLab coordinates of a color for a kind of color vision."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return np.array(TO_LAB) @ np.cbrt(np.array(TO_LMS) @ np.clip(np.array(COLOR_VISION[vision]) @ linear, 0, 1))


def min_color_distance(colors: list[np.ndarray], vision: str) -> float:
    return min(float(np.linalg.norm(to_oklab(a, vision) - to_oklab(b, vision))) for a, b in combinations(colors, 2))


def test_to_oklab_known_colors() -> None:
    """White and pure red have the coordinates of Ottosson's page, within its digits."""
    assert np.allclose(to_oklab(np.ones(3), "usual"), [1, 0, 0], atol=1e-4)
    assert np.allclose(to_oklab(np.array([1.0, 0, 0]), "usual"), [0.628, 0.225, 0.126], atol=1e-3)


def test_role_colors_distinct_in_all_color_vision() -> None:
    """A difference of 0.02 is about the smallest visible one."""
    for vision in COLOR_VISION:
        assert min_color_distance([hex_to_rgb(color) for color in ROLE_COLORS], vision) >= 0.14, vision


def test_role_colors_distinct_at_weak_evidence() -> None:
    for background in BACKGROUNDS:
        for vision in COLOR_VISION:
            blended = [
                LEVEL_ALPHA["attention"] * hex_to_rgb(c) + (1 - LEVEL_ALPHA["attention"]) * hex_to_rgb(background)
                for c in ROLE_COLORS
            ]
            assert min_color_distance(blended, vision) >= 0.06, (background, vision)


def test_role_colors_contrast_with_background_and_text() -> None:
    def contrast(first: str, second: str) -> float:
        low, high = sorted((luminance(first), luminance(second)))
        return (high + 0.05) / (low + 0.05)

    assert min(contrast(color, background) for color in ROLE_COLORS for background in BACKGROUNDS) >= 2
    assert min(contrast(color, text_color(color)) for color in ROLE_COLORS) >= 4.5


def test_role_badges_have_unique_letters() -> None:
    assert len({letters for letters, _ in ROLE_BADGES.values()}) == len(ROLE_BADGES)
    assert len({role_badge(role)[1] for role in ("semantic", "cause-effect", "if-then")}) == 3


def test_page_colors_equal_python_colors() -> None:
    text = (PAGE / "color.js").read_text()
    match = re.search(r"const COLORS = (\[.*?\]);", text)
    assert match is not None
    assert json.loads(match[1]) == list(ROLE_COLORS)
    style = (PAGE / "style.css").read_text()
    assert [re.findall(r"--paper: (#\w+)", style)[i] for i in (0, 1)] == list(BACKGROUNDS)
