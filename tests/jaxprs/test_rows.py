"""Rows that are said to leave each other alone do: with more rows the first ones are as before."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from primitives import CASES, Case

from meshwright.jaxprs.rows import RowsMixError, row_dims

MORE = 3  # times as many rows
QUICK = (
    *("scatter in rows", "gather windows of rows", "convolution", "reduce_window", "name", "scan"),
    *(
        "reshape, merged behind",
        "reshape, split",
        "optimization_barrier",
        "gradient of max pooling",
    ),
    *("random_bits", "iota of rows", "dynamic_update_slice", "matmul of batches", "while"),
)
MIXED = (
    *("cummin", "rows into columns", "argmin", "matmul of rows", "scatter add", "gather rows"),
    *("random_bits of columns", "scan over rows", "pure_callback", "linear solve", "approx_top_k"),
)
ROWS = CASES | {
    "matmul of rows": Case(lambda x: x @ x.T, ((4, 6),)),
    "rows into columns": Case(lambda x: x.reshape(x.shape[1], -1), ((4, 6),)),
}


def grown(case: Case) -> tuple[tuple[int, ...], ...]:
    """The shapes with more rows: those of the first argument, and of all that have as many."""
    rows = case.shapes[0][0]
    return tuple(
        (MORE * rows, *shape[1:]) if shape[:1] == (rows,) else shape for shape in case.shapes
    )


def dims_of(case: Case) -> list[int | None]:
    return row_dims(case.traced(), case.traced(grown(case)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.full)
        for name, case in CASES.items()
        if case.shapes[0]
    ],
)
def test_more_rows_leave_the_first_ones_as_they_were(name: str) -> None:
    case = CASES[name]
    try:
        dims = dims_of(case)
    except (RowsMixError, TypeError, ValueError):  # or a function of one shape alone
        assert name not in QUICK
        return
    large = case._replace(shapes=grown(case)).arguments()
    small = [
        value[tuple(slice(size) for size in shape)]
        for value, shape in zip(large, case.shapes, strict=True)
    ]
    results = zip(*(jax.tree.leaves(case.function(*args)) for args in (small, large)), strict=True)
    for dim, (few, many) in zip(dims, results, strict=True):
        assert (dim is None) == (few.shape == many.shape)
        first = many if dim is None else jax.lax.slice_in_dim(many, 0, few.shape[dim], axis=dim)
        np.testing.assert_allclose(*map(plain, (few, first)), rtol=1e-5, atol=1e-6)


def plain(value: Any) -> np.ndarray:
    return np.asarray(value.astype("float32") if value.dtype == "bfloat16" else value)


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_rows_is_refused(name: str) -> None:
    with pytest.raises(RowsMixError):
        dims_of(ROWS[name])


def test_a_repeat_that_jax_leaves_out_of_one_row_is_followed() -> None:
    """As of a causal mask, which is the same for all rows: one row needs no copies of it."""

    def attend(x: Any) -> Any:
        length = x.shape[1]
        causal = jax.numpy.tri(length, dtype=bool)[None]
        masks = jax.numpy.broadcast_to(causal, (x.shape[0], length, length))
        scores = jax.numpy.einsum("bqd,bkd->bqk", x, x)
        return jax.numpy.einsum("bqk,bkd->bqd", jax.numpy.where(masks, scores, -1.0), x)

    def traced(rows: int, function: Any = attend) -> Any:
        return jax.make_jaxpr(function)(np.ones([rows, 4, 2], "float32"))

    assert len(traced(1).jaxpr.eqns) < len(traced(5).jaxpr.eqns)
    for rows in (1, 2):
        assert row_dims(traced(rows), traced(5)) == [0]
    with pytest.raises(RowsMixError, match="reduce_sum"):
        row_dims(*(traced(rows, lambda x: attend(x - x.mean(0))) for rows in (1, 5)))


def test_a_token_that_is_put_before_each_row_is_the_same_for_all() -> None:
    """As the class token of vision transformers."""

    def with_token(x: Any) -> Any:
        return jax.numpy.concatenate([jax.numpy.tile(x[:1, :1] * 0 + 1, (len(x), 1, 1)), x], axis=1)

    def with_own(x: Any) -> Any:
        token = jax.numpy.ones([1, 1, 2])
        return jax.numpy.concatenate([jax.numpy.tile(token, (len(x), 1, 1)), x], axis=1)

    def repeated(x: Any) -> Any:
        return jax.numpy.tile(jax.numpy.ones([2, 2]), (len(x), 1)).reshape(x.shape[0], 2, 2) + x

    def traced(rows: int, function: Any) -> Any:
        return jax.make_jaxpr(function)(np.ones([rows, 2, 2], "float32"))

    for rows in (1, 2):
        assert row_dims(traced(rows, with_own), traced(5, with_own)) == [0]
        for function in (with_token, repeated):
            with pytest.raises(RowsMixError):
                row_dims(traced(rows, function), traced(5, function))
