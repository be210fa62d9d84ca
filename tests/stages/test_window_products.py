"""Convolutions whose windows are one place, or all of them, are computed as products."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from meshwright.stages.window_products import is_product, product

DRAW = np.random.default_rng(0)
HERE, FULL = ((0, 0), (0, 0)), ((1, 1), (2, 2))


def convolved(size: Any, window: Any, stride: Any, padding: Any, groups: int, dims: Any) -> Any:
    """The equation of a convolution, and what it reads."""
    sizes = {"N": 3, "C": 4, "H": size[0], "W": size[1]}
    windows = {"I": 4 // groups, "O": 6, "H": window[0], "W": window[1]}
    read = [
        DRAW.normal(size=[of[name] for name in names]).astype("float32")
        for of, names in zip((sizes, windows), dims, strict=False)
    ]

    def convolve(x: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, kernel, stride, padding, dimension_numbers=dims, feature_group_count=groups
        )

    return jax.make_jaxpr(convolve)(*read).eqns[0], read, convolve(*read)


@pytest.mark.parametrize("dims", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "WNCH")])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("size", "window", "stride", "padding"),
    [
        ((3, 4), (1, 1), (1, 1), HERE),
        ((3, 4), (3, 4), (2, 1), HERE),
        ((3, 4), (3, 1), (1, 1), HERE),
        ((1, 1), (2, 3), (1, 1), FULL),
        ((1, 4), (2, 4), (1, 3), (FULL[0], HERE[1])),
    ],
)
def test_it_is_the_convolution(
    size: Any, window: Any, stride: Any, padding: Any, groups: int, dims: Any
) -> None:
    eqn, read, expected = convolved(size, window, stride, padding, groups, dims)
    assert is_product(eqn)
    np.testing.assert_allclose(product(eqn, *read), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "window", "stride", "padding"),
    [
        ((3, 4), (1, 1), (2, 1), HERE),
        ((3, 4), (2, 1), (1, 1), HERE),
        ((3, 4), (3, 4), (1, 1), FULL),
    ],
)
def test_other_windows_stay(size: Any, window: Any, stride: Any, padding: Any) -> None:
    eqn, *_ = convolved(size, window, stride, padding, 1, ("NHWC", "HWIO", "NHWC"))
    assert not is_product(eqn)
