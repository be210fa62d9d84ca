"""Colours that people with any colour vision tell apart, on paper too.

Eight pieces or fewer take the hues of Okabe and Ito's palette (2008), changed so that black or
white numbers stand out on them, then moved apart as protanopes, deuteranopes and tritanopes see
them. More pieces take steps of a ramp whose lightness rises all the way, after viridis (van der
Walt and Smith 2015), so that it also reads in grey.
"""

from __future__ import annotations

from dataclasses import dataclass

_PIECES = (
    "#0F66BD",  # blue
    "#FBB637",  # orange
    "#40B880",  # bluish green
    "#D28CC6",  # reddish purple
    "#F6F07A",  # yellow
    "#D2622C",  # vermillion
    "#AAD7FB",  # sky blue
    "#4C5F68",  # slate, for the black of the original
)
_WHOLE = "#B9C4D2"
_RAMP = ("#46327E", "#365C8D", "#277F8E", "#1FA187", "#4AC16D", "#A0DA39", "#FDE725")
_RAMP_STEPS = 96
INK, SOFT, FAINT, RULE, PAPER = "#1B2430", "#566272", "#98A2AF", "#DDE2E8", "#FFFFFF"


@dataclass(frozen=True)
class Paint:
    """The colours of one piece: its first copy, its further copies, and the text on it."""

    fill: str
    pale: str
    ink: str


def paint(piece: int, pieces: int) -> Paint:
    """The colours of piece number ``piece`` out of ``pieces``.

    >>> paint(0, 2).fill == paint(0, 8).fill
    True
    """
    if pieces == 1:
        fill = _WHOLE
    elif pieces <= len(_PIECES):
        fill = _PIECES[piece]
    else:
        fill = _along_ramp(piece / (pieces - 1))
    # Black and white stand out equally, 4.58 to 1, from a luminance of 0.179.
    return Paint(fill, mix(fill, PAPER, 0.62), "#000000" if luminance(fill) > 0.179 else PAPER)


def mix(first: str, second: str, share: float) -> str:
    """``share`` of the second colour in the first, both as ``"#RRGGBB"``."""
    pairs = zip(_channels(first), _channels(second), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02X}" for a, b in pairs)


def luminance(colour: str) -> float:
    """Relative luminance, 0 to 1, as WCAG 2 defines it."""
    red, green, blue = (_linear(channel / 255) for channel in _channels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _along_ramp(share: float) -> str:
    # In steps, so that a picture of thousands of pieces can draw cells of one colour together.
    place = round(share * _RAMP_STEPS) / _RAMP_STEPS * (len(_RAMP) - 1)
    step = min(int(place), len(_RAMP) - 2)
    return mix(_RAMP[step], _RAMP[step + 1], place - step)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
