"""Convolutions that are refused, and the ways out that errors name."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from named_laws import of_each, ones

import meshwright as mw
import meshwright.named as mn
from meshwright import errors
from meshwright.named import convolution as c

X, K = "batch:4 h:8 w:8 io:2", "fh:3 fw:3 io:2 hidden:4"
FAULTS = [
    ("channels of another size", lambda: c.conv2d(ones(X), ones("fh:3 fw:3 io:3"), "h:fh w:fw"),
     "conv2d: dim 'io' has size 2 and size 3"),
    ("channels of another name", lambda: c.conv2d(ones(X), ones("fh:3 fw:3 inner:2"), "h:fh w:fw"),
     r"share no dim, so there are no input channels. Name those of the kernel as in x, or"),
    ("dims that are not there, all at once", lambda: c.conv2d(ones(X), ones(K), "height:fh w:taps"),
     r"(?s)x \[batch.*has no dim 'height'.*\n.*the kernel \[fh.*has no dim 'taps'"),
    ("a spatial dim in the kernel", lambda: c.conv1d(ones(X), ones("h:3 w:8 io:2"), "h:h"),
     "dim 'h' of x is in the kernel .* as well: give what moves along it another name"),
    ("a moving dim in x", lambda: c.conv1d(ones("h:8 fh:3 io:2"), ones("fh:3 io:2"), "h:fh"),
     "dim 'fh' of the kernel is in x .* as well: rename it"),
    ("one dim twice", lambda: c.conv2d(ones(X), ones(K), "h:fh h:fw"), "windows= names 'h' twice"),
    ("a wrong number of dims", lambda: c.conv1d(ones(X), ones(K), "h:fh w:fw"),
     "conv1d moves along 1 dim, and windows='h:fh w:fw' names 2. conv takes any number"),
    ("windows of no form", lambda: c.conv2d(ones(X), ones(K), "h w"),
     "'h' in 'h w' is not of the form 'h:fh'"),
    ("windows of one name", lambda: c.conv2d(ones(X), ones(K), ["h", "w"]),
     r"windows=\['h', 'w'\] does not say which dim of the kernel moves along which dim of x"),
    ("a sum over what one lacks", lambda: c.conv2d(ones(X), ones(K), "h:fh w:fw", reduce="batch"),
     r"reduce= names 'batch', which .* do not both have; they share \[io:2\]"),
    ("a stride of 0", lambda: c.conv2d(ones(X), ones(K), "h:fh w:fw", strides=(1, 0)),
     "conv2d: strides must be whole numbers, at least 1; received 0 for dim 'w'"),
    ("a dilation that is no number", lambda: c.conv2d(ones(X), ones(K), "h:fh w:fw", dilation=1.5),
     "dilation must be whole numbers, at least 1; received 1.5 for dim 'h', 1.5 for dim 'w'"),
    ("too many strides", lambda: c.conv2d(ones(X), ones(K), "h:fh w:fw", strides=[1, 2, 1]),
     r"length 3, and the windows move along 2 dims \('h', 'w'\). Give one for each dim"),
    ("a stride of another dim", lambda: c.conv2d(ones(X), ones(K), "h:fh w:fw", strides="d:2"),
     "strides names 'd'; the windows move along 'h', 'w'"),
    ("padding of one dim alone", lambda: c.conv2d(ones(X), ones(K), "h:fh w:fw", padding={"h": 1}),
     "padding lacks 'w'"),
    ("unknown padding", lambda: c.conv2d(ones(X), ones(K), "h:fh w:fw", padding="FULL"),
     r"padding 'FULL' for dim 'h' is not 'SAME', 'VALID', or a pair such as \(1, 1\)"),
    ("padding below 0", lambda: c.conv2d(ones(X), ones(K), "h:fh w:fw", padding=-1),
     "padding -1 for dim 'h' is not"),
    ("a window larger than its dim",
     lambda: c.conv2d(ones(X), ones("fh:9 fw:3 io:2"), "h:fh w:fw", padding="VALID"),
     r"dim 'h' \(size 8\) gives no result for a window of 9 \(stride 1, padding VALID\). Pad it"),
    ("a dilated window larger than its dim",
     lambda: c.conv2d(ones(X), ones("fh:3 fw:3 io:2"), "h:fh w:fw", padding="VALID", dilation=4),
     r"(?s)dim 'h' .* dilation 4.*\n.*dim 'w'"),
    ("a transposed result cut off",
     lambda: c.conv1d_transposed(ones(X), ones("f:3 io:2"), "h:f", padding=5),
     "dim 'h' .* gives no result for .* Cut off less"),
    ("channels that do not meet",
     lambda: c.separable_conv(ones(X), ones("fh:3 io:2"), ones("inner:2 o:4"), "h:fh"),
     r"pointwise \[inner:2 o:4\] shares no dim with the result of the depthwise part, \[batch:4"),
    ("a bare array",
     lambda: c.conv2d(ones(X), jnp.ones([3, 3, 2, 4]), "h:fh w:fw"), "has no names"),
]  # fmt: skip


@of_each(FAULTS)
def test_faults(call: Any, says: str) -> None:
    with pytest.raises(errors.DimError, match=says):
        call()


UNEVEN = [
    ("h:rows", "VALID", 1,
     r"dim 'h' \(size 8\) becomes 6 for a window of 3 \(stride 1, padding VALID\), and does not "
     r"divide over axis 'rows' \(size 4\) then. Ways out: use padding='SAME', which gives 8; or "
     r"pad 'h' by \(0, 2\), which gives 8; or rename 'h' before, to a name that no rule splits."),
    ("w:rows", "SAME", 4, r"dim 'w' \(size 8\) becomes 2 .* Ways out: rename 'w' before"),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "padding", "stride", "message"), UNEVEN)
def test_results_that_do_not_divide(rules: str, padding: str, stride: int, message: str) -> None:
    with (
        mn.rules(rules, mw.Mesh({"rows": 4})),
        pytest.raises(errors.DivisibilityError, match=message),
    ):
        c.conv2d(ones(X), ones(K), "h:fh w:fw", padding=padding, strides=stride)


def test_the_ways_out_that_an_error_names_are_ways_out() -> None:
    with mn.rules("h:rows", mw.create_mesh({"rows": 4, "rest": 2})):
        assert c.conv1d(ones(X), ones("fh:3 io:2"), "h:fh", padding=[(0, 2)]).shape["h"] == 8
        says = r"becomes 17 .* pad 'h' by \(0, 1\), which gives 16"
        with pytest.raises(errors.DivisibilityError, match=says):
            c.conv1d_transposed(ones(X), ones("fh:3 io:2"), "h:fh", strides=2, padding="VALID")
        y = c.conv1d_transposed(ones(X), ones("fh:3 io:2"), "h:fh", strides=2, padding=[(0, 1)])
        assert y.shape["h"] == 16


def test_two_dims_on_one_axis() -> None:
    with (
        mn.rules("h:rows;hidden:rows", mw.Mesh({"rows": 4}), strict=False),
        pytest.raises(
            errors.LayoutError, match=r"conv2d over .* dims 'h:8' and 'hidden:4' would both"
        ),
    ):
        c.conv2d(ones(X), ones(K), "h:fh w:fw")
