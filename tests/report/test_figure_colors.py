"""Colours that colour-blind readers tell apart, on both grounds, in the page and in the files."""

import re
from pathlib import Path

import numpy as np
import pytest

import kvlab.report

# Full-strength matrices of Machado, Oliveira and Fernandes (2009), on linear RGB.
SIGHTS = {
    "every colour": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
               [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                 [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
NAMES = [f"c{number}" for number in range(8)]


def linear(colour: str):
    parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIE L*a*b* of linear sRGB, D65."""
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x, y, z = np.cbrt(to_xyz @ np.clip(rgb, 0, 1) / [0.95047, 1.0, 1.08883])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def luminance(colour: str) -> float:
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def page_themes() -> list[dict[str, str]]:
    """Of the style sheet: light, dark by the system, dark by choice."""
    style = (Path(kvlab.report.__file__).parent / "page" / "page.css").read_text()
    found = re.findall(r"color-scheme: (?:light|dark);(.*?)\}", style, re.S)
    return [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in found]


def test_dark_is_dark_either_way():
    _, system, chosen = page_themes()
    assert system == chosen


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("sight", list(SIGHTS))
def test_series_are_told_apart(theme, sight):
    """By 20 in CIE 1976, and by 45 in the sight of most; 2.3 is just noticed side by side.

    From the grey of shared lines by 13, and by 30.
    """
    colours = page_themes()[theme]
    seen = [lab(np.array(SIGHTS[sight]) @ linear(colours[name])) for name in NAMES]
    apart = [float(np.linalg.norm(one - other)) for n, one in enumerate(seen) for other in seen[:n]]
    assert min(apart) > (45 if sight == "every colour" else 20)
    grey = lab(np.array(SIGHTS[sight]) @ linear(colours["muted"]))
    from_grey = min(float(np.linalg.norm(one - grey)) for one in seen)
    assert from_grey > (30 if sight == "every colour" else 13)
    assert sum(one[0] < 25 for one in seen) <= 1, "thin dark lines all look black"


@pytest.mark.parametrize("theme", [0, 1])
def test_marks_stand_out_from_the_ground(theme):
    """3:1 for marks and 4.5:1 for text, as WCAG 2 asks."""
    colours = page_themes()[theme]
    ground = luminance(colours["ground"])

    def contrast(name):
        low, high = sorted((luminance(colours[name]), ground))
        return (high + 0.05) / (low + 0.05)

    assert min(map(contrast, NAMES)) >= 3
    assert min(map(contrast, ("ink", "soft", "link", "good", "bad"))) >= 4.5
