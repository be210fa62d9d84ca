"""Colours of pieces differ for every eye, and numbers stand out from them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshwright.display.drawing.palette import luminance, paint

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
COLOUR_VISION = {
    "full": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def oklab(colour, vision):
    """Where a colour lies in Oklab (Ottosson 2020), seen with this colour vision."""
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    actual = np.clip(np.array(vision) @ linear, 0, 1)
    to_cones = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    to_lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return np.array(to_lab) @ np.cbrt(np.array(to_cones) @ actual)


@pytest.mark.parametrize("vision", COLOUR_VISION.values(), ids=COLOUR_VISION)
def test_eight_pieces_are_told_apart_with_any_colour_vision(vision):
    places = [oklab(paint(piece, 8).fill, vision) for piece in range(8)]
    closest = min(np.linalg.norm(a - b) for a, b in itertools.combinations(places, 2))
    assert closest > 0.08  # from about 0.02 on people can tell two adjacent colours apart


def test_the_colours_of_many_pieces_grow_lighter_all_the_way():
    lightness = [luminance(paint(piece, 64).fill) for piece in range(64)]
    assert lightness == sorted(lightness)
    assert len(set(lightness)) == 64


@pytest.mark.parametrize("pieces", [1, 2, 8, 9, 64, 1000])
def test_numbers_stand_out_from_their_colour(pieces):
    for piece in range(pieces):
        colours = paint(piece, pieces)
        lights = sorted((luminance(colours.fill), luminance(colours.ink)))
        assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 4.5
