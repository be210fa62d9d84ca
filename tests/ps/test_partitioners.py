"""TensorFlow's numbers (table A2), and laws that hold for any shape."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ClusterError
from meshwright.ps.shared.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    num_shards,
    row_ranges,
)

_K = 1 << 10
_M = 1 << 20


@pytest.mark.parametrize(
    ("partitioner", "shape", "expected"),
    [
        (FixedShardsPartitioner(2), (10, 3), [2, 1]),
        (FixedShardsPartitioner(4), (3,), [3]),
        (MinSizePartitioner(256 * _K, 2), (1024, 1024), [2, 1]),
        (MinSizePartitioner(256 * _K, 2), (784, 128), [2, 1]),
        (MinSizePartitioner(256 * _K, 8), (1000, 128), [2, 1]),
        (MinSizePartitioner(256 * _K, 2), (1_000_000, 32), [2, 1]),
        (MinSizePartitioner(64 * _M, 2), (1_000_000, 16), [1, 1]),
        (MinSizePartitioner(4, 2), (6, 1), [2, 1]),
        (MinSizePartitioner(4, 10), (6, 1), [6, 1]),
        (MinSizePartitioner(), (1_000_000, 32), [1, 1]),
        (MaxSizePartitioner(4), (6, 1), [6, 1]),
        (MaxSizePartitioner(4, 2), (6, 1), [2, 1]),
        (MaxSizePartitioner(1024), (6, 1), [1, 1]),
        (MaxSizePartitioner(_M), (1_000_000, 32), [123, 1]),
    ],
)
def test_tensorflow_numbers(partitioner, shape, expected):
    assert partitioner(shape, np.dtype("float32")) == expected


@pytest.mark.parametrize(
    ("rows", "shards", "sizes"),
    [(13, 5, [3, 3, 3, 2, 2]), (10, 4, [3, 3, 2, 2]), (5, 2, [3, 2]), (3, 3, [1, 1, 1])],
)
def test_tensorflow_rows(rows, shards, sizes):
    assert [stop - start for start, stop in row_ranges(rows, shards)] == sizes


@given(st.integers(1, 500), st.integers(1, 40))
def test_ranges_cover_every_row_once(rows, shards):
    shards = min(rows, shards)
    ranges = row_ranges(rows, shards)
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(rows))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 3000), st.integers(1, 64), st.integers(1, 10**6))
def test_shards_of_a_greatest_size_are_not_larger(rows, width, most):
    count = num_shards(MaxSizePartitioner(most), (rows, width), np.dtype("float32"))
    largest = max(stop - start for start, stop in row_ranges(rows, count))
    assert largest * width * 4 <= max(most, width * 4)


@pytest.mark.parametrize(
    "answer", [None, [], [0, 1, 1], [2, 2, 1], [2, 1], [1.5, 1, 1], [-1, 1, 1]]
)
def test_a_wrong_answer_is_named(answer):
    with pytest.raises(ClusterError, match=r"shape \(4, 2, 2\) it returned"):
        num_shards(lambda shape, dtype: answer, (4, 2, 2), np.dtype("float32"))


def test_scalars_and_empty_variables_are_whole():
    assert num_shards(FixedShardsPartitioner(3), (), np.dtype("float32")) == 1
    assert num_shards(FixedShardsPartitioner(3), (0, 4), np.dtype("float32")) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedShardsPartitioner(0),
        lambda: MinSizePartitioner(0),
        lambda: MinSizePartitioner(1, max_shards=0),
        lambda: MaxSizePartitioner(0),
        lambda: MaxSizePartitioner(1, max_shards=0),
    ],
)
def test_numbers_below_one_are_refused(make):
    with pytest.raises(ClusterError, match="whole numbers from 1"):
        make()


def test_a_scalar_given_directly_is_refused():
    with pytest.raises(ClusterError, match="a scalar has none"):
        FixedShardsPartitioner(2)((), np.dtype("float32"))
