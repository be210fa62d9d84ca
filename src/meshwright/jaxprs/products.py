"""Kinds of products, whose speeds differ: one rule for traced and for compiled steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .factors import Dim, Dims

PRODUCTS = ("product", "product_skinny", "product_transposed")
GROUPED = "grouped_convolution"
CONVOLUTIONS = ("convolution", GROUPED)
_FEW_ROWS = 64


def rate_of(eqn: Any) -> str:
    """The rate by which the products of an equation run, whatever the shape of their matrices.

    The gradient by a depthwise filter is in groups of rows: compilers convolve those as one.
    """
    if eqn.primitive.name != "conv_general_dilated":
        return "product"
    return CONVOLUTIONS[eqn.params["feature_group_count"] > 1]


def is_transposed(left: Sequence[int], right: Sequence[int], ranks: tuple[int, int]) -> bool:
    """Whether a product sums over the rows of both operands, as the gradient of a weight does.

    ``left`` and ``right`` are the dims of each operand that are summed, of as many as ``ranks``.

    >>> is_transposed([0], [0], (2, 2)), is_transposed([1], [0], (2, 2))
    (True, False)
    """
    return max(left) < ranks[0] - 1 and max(right) < ranks[1] - 1


def is_skinny(rows: Any, columns: Any, depth: Any) -> Any:
    """Whether few rows meet many weights, so that much is read for what is computed.

    Sizes are numbers, or arrays of as many.

    >>> bool(is_skinny(16, 400, 100)), is_skinny(16, 400, np.array([32, 64])).tolist()
    (True, [False, True])
    """
    few, many = np.minimum(rows, columns), np.maximum(rows, columns)
    return (few <= _FEW_ROWS) & (4 * few <= np.minimum(depth, many))


class Product(NamedTuple):
    """A matrix product: the dims of its ``rows``, ``columns`` and ``depth``, with their sizes."""

    rows: tuple[tuple[Dim, int], ...]
    columns: tuple[tuple[Dim, int], ...]
    depth: tuple[tuple[Dim, int], ...]
    is_transposed: bool


def product_of(eqn: Any, ins: Sequence[Dims], out: Dims) -> Product | None:
    """What a ``dot_general`` multiplies; ``None`` for all else, and where operands share a dim of
    the result, as each product is then a small one of many."""
    if eqn.primitive.name != "dot_general":
        return None
    (left, right), (batch, _) = eqn.params["dimension_numbers"]
    if batch or not left:
        return None
    shapes = [var.aval.shape for var in eqn.invars]
    if not all(map(math.prod, shapes)):
        return None
    free = list(zip(out, eqn.outvars[0].aval.shape, strict=True))
    cut = len(shapes[0]) - len(left)
    depth = [(ins[0][i] or ins[1][j], shapes[0][i]) for i, j in zip(left, right, strict=True)]
    ranks = (len(shapes[0]), len(shapes[1]))
    return Product(
        tuple(free[:cut]), tuple(free[cut:]), tuple(depth), is_transposed(left, right, ranks)
    )
