"""Rows of a table: duplicates, and the few rows that change."""

from __future__ import annotations

import numpy as np
import pytest
from asking import Asking
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

import meshwright as mw
from meshwright.ps.server.rows import add_rows, aggregate, subtract_rows


@st.composite
def named_rows(draw):
    size = draw(st.integers(1, 12))
    rows = draw(hn.arrays(np.int64, st.integers(0, 40), elements=st.integers(0, size - 1)))
    width = draw(st.integers(1, 3))
    whole = st.integers(-50, 50)  # so that sums are exact in any order
    values = draw(hn.arrays(np.float32, (len(rows), width), elements=whole))
    return size, rows, values


@given(named_rows())
def test_duplicates_come_out_as_with_add_at(case) -> None:
    size, rows, values = case
    expected = np.zeros((size, values.shape[1]), np.float32)
    np.add.at(expected, rows, values)
    table = np.zeros_like(expected)
    add_rows(table, rows, values)
    assert np.array_equal(table, expected)
    subtract_rows(table, rows, values)
    assert not table.any()
    once, sums = aggregate(rows, values)
    assert len(set(once.tolist())) == len(once)
    assert set(once.tolist()) == set(rows.tolist())
    assert np.array_equal(sums, expected[once])


@pytest.mark.parametrize("times", [2, 8, 9, 500])
def test_however_often_a_row_comes(times) -> None:
    rows = np.repeat(np.arange(3), times)
    values = np.random.default_rng(0).normal(size=(3 * times, 4))
    once, sums = aggregate(rows, values)
    assert once.tolist() == [0, 1, 2]
    np.testing.assert_allclose(sums, values.reshape(3, times, 4).sum(axis=1), rtol=1e-12)


def test_a_lookup_gives_rows_in_the_order_asked_for() -> None:
    server = Asking()
    server.value("t", np.arange(12, dtype="f").reshape(6, 2))
    (rows,) = server.ask("lookup", np.array([4, 0, 4]), name="t").arrays
    assert rows.tolist() == [[8, 9], [0, 1], [8, 9]]


@pytest.mark.parametrize("op", ["rows_assign", "rows_add", "rows_sub"])
def test_only_the_rows_that_are_named_change(op) -> None:
    server = Asking()
    server.value("t", np.ones((5, 2), "f"))
    server.push(("t", op, [np.array([3, 1]), np.full((2, 2), 4, "f")]))
    changed = {"rows_assign": 4, "rows_add": 5, "rows_sub": -3}[op]
    expected = np.ones((5, 2))
    expected[[3, 1]] = changed
    assert np.array_equal(server.read("t")[0], expected)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 5], r"row 5 is out of range for 't', which has rows 0 to 4 here \(1 such rows\)"),
        ([-1], r"row -1 is out of range for 't'"),
        ([[0]], r"must be integers along one dim; received int64 of shape \(1, 1\)"),
        ([0.5], "received float64"),
    ],
)
def test_rows_that_are_not_there_are_refused(rows, message) -> None:
    server = Asking()
    server.table("t", [5, 2])
    with pytest.raises(mw.ArrayError, match=message):
        server.ask("lookup", np.array(rows), name="t")
    server.table("scalar", [])
    with pytest.raises(mw.ArrayError, match="'scalar' is a scalar, and has no rows"):
        server.ask("lookup", np.array([0]), name="scalar")
    with pytest.raises(mw.ArrayError, match="takes one array of rows, not 0"):
        server.ask("lookup", name="t")
