"""Contrast of the colours that pictures use, light and dark: axe measures text of the document only (WCAG 2.2, 1.4.3
and 1.4.11)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import offramp_operator.web.render

CSS = (Path(offramp_operator.web.render.__file__).parent / "static" / "page.css").read_text()
TEXT = [
    ("soft", "paper"),
    ("ink", "paper"),
    ("ink", "raised"),
    ("soft", "raised"),
    ("accent", "raised"),
    ("accent", "paper"),
    ("good", "raised"),
    ("bad", "raised"),
    ("bad", "bad-soft"),
    ("bad", "paper"),
    ("good", "good-soft"),
    ("block-ink", "block"),
    ("busy", "busy-soft"),
]
GRAPHICS = [
    ("accent", "paper"),
    ("accent", "hair"),
    ("soft", "paper"),
    ("bad", "paper"),
    ("bad", "hair"),
    ("busy", "paper"),
    ("accent", "bad-soft"),
]


def palettes() -> dict[str, dict[str, str]]:
    light, dark = re.findall(r":root \{(.*?)\}", CSS, flags=re.S)[:2]
    found = [dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block)) for block in (light, dark)]
    return {"light": found[0], "dark": found[1]}


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """The formula of WCAG; 21 for black on white."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_black_on_white_has_the_contrast_that_the_standard_states() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("pair", "least"), [*((p, 4.5) for p in TEXT), *((p, 3.0) for p in GRAPHICS)])
def test_colours_of_pictures_can_be_told_apart(scheme: str, pair: tuple[str, str], least: float) -> None:
    palette = palettes()[scheme]
    assert contrast(palette[pair[0]], palette[pair[1]]) >= least


def test_both_schemes_name_the_same_colours() -> None:
    assert palettes()["light"].keys() == palettes()["dark"].keys()
