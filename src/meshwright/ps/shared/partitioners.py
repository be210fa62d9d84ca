"""Into how many shards a variable is cut: along its first dim, as in TensorFlow.

A partitioner is called with a shape and a dtype and gives one number per dim: 1 for every dim but
the first. The numbers are those of ``tf.distribute.experimental.partitioners`` (2.21).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from ...errors import ClusterError

Partitioner = Callable[[tuple[int, ...], np.dtype], Sequence[int]]


@dataclass(frozen=True)
class FixedShardsPartitioner:
    """Cuts a variable by rows into ``num_shards``, or one per row where there are fewer rows.

    >>> FixedShardsPartitioner(2)((10, 3), "float32")
    [2, 1]
    """

    num_shards: int

    def __post_init__(self) -> None:
        _check_counts(self, num_shards=self.num_shards)

    def __call__(self, shape: Sequence[int], dtype: object) -> list[int]:
        rows = _rows(self, shape)
        return _cut(min(self.num_shards, rows), shape)


@dataclass(frozen=True)
class MinSizePartitioner:
    """Shards of about ``min_shard_bytes`` or more, and at most ``max_shards`` of them.

    The number of shards is rounded up, as in TensorFlow, so a shard may be somewhat smaller than
    ``min_shard_bytes``. With the default ``max_shards=1`` nothing is cut.

    >>> MinSizePartitioner(256 << 10, max_shards=2)((784, 128), "float32")
    [2, 1]
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def __post_init__(self) -> None:
        _check_counts(self, min_shard_bytes=self.min_shard_bytes, max_shards=self.max_shards)

    def __call__(self, shape: Sequence[int], dtype: object) -> list[int]:
        rows = _rows(self, shape)
        num_shards = math.ceil(_num_bytes(shape, dtype) / self.min_shard_bytes)
        return _cut(max(1, min(num_shards, rows, self.max_shards)), shape)


@dataclass(frozen=True)
class MaxSizePartitioner:
    """As few shards as keep each at ``max_shard_bytes`` or less, at least one row in each.

    No more than ``max_shards``, if that is not ``None``.

    >>> MaxSizePartitioner(1 << 20)((1_000_000, 32), "float32")
    [123, 1]
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        most = 1 if self.max_shards is None else self.max_shards
        _check_counts(self, max_shard_bytes=self.max_shard_bytes, max_shards=most)

    def __call__(self, shape: Sequence[int], dtype: object) -> list[int]:
        rows = _rows(self, shape)
        row_bytes = max(1, _num_bytes(shape, dtype) // max(1, rows))
        num_shards = math.ceil(rows / max(1, self.max_shard_bytes // row_bytes))
        if self.max_shards is not None:
            num_shards = min(num_shards, self.max_shards)
        return _cut(num_shards, shape)


def checked_partitioner(partitioner: object) -> Partitioner | None:
    """The same; raises :class:`~meshwright.errors.ClusterError` for what cannot be called.

    >>> checked_partitioner(None)
    """
    if partitioner is None or (callable(partitioner) and not isinstance(partitioner, type)):
        return cast("Partitioner | None", partitioner)
    raise ClusterError(
        f"partitioner must be called with a shape and a dtype; received {partitioner!r}. Use one "
        "such as FixedShardsPartitioner(2)."
    )


def num_shards(partitioner: Partitioner | None, shape: tuple[int, ...], dtype: np.dtype) -> int:
    """How many shards a variable of this shape is cut into; 1 for scalars and empty ones.

    Raises :class:`~meshwright.errors.ClusterError` where the partitioner answers with anything
    but whole numbers that are 1 behind the first.

    >>> num_shards(FixedShardsPartitioner(4), (3, 8), np.dtype("float32"))
    3
    """
    if partitioner is None or not shape or math.prod(shape) == 0:
        return 1
    answer = partitioner(shape, dtype)
    fits = isinstance(answer, (list, tuple)) and len(answer) == len(shape)
    if not fits or any(not _is_count(entry) for entry in answer) or set(answer[1:]) - {1}:
        raise ClusterError(
            f"a partitioner must return one whole number per dim, 1 for every dim but the first; "
            f"for shape {tuple(shape)} it returned {answer!r}."
        )
    return min(int(answer[0]), shape[0])


def row_ranges(num_rows: int, num_shards: int) -> list[tuple[int, int]]:
    """First row and end of each shard: one run of rows each, sizes differ by at most 1.

    >>> row_ranges(13, 5)
    [(0, 3), (3, 6), (6, 9), (9, 11), (11, 13)]
    """
    small, larger = divmod(num_rows, num_shards)
    starts = [shard * small + min(shard, larger) for shard in range(num_shards + 1)]
    return list(itertools.pairwise(starts))


def _is_count(entry: object) -> bool:
    return isinstance(entry, int | np.integer) and not isinstance(entry, bool) and int(entry) >= 1


def _check_counts(partitioner: object, **counts: object) -> None:
    faults = [f"{name}={count!r}" for name, count in counts.items() if not _is_count(count)]
    if faults:
        raise ClusterError(
            f"{type(partitioner).__name__} takes whole numbers from 1; "
            f"received {', '.join(faults)}."
        )


def _rows(partitioner: object, shape: Sequence[int]) -> int:
    if not shape:
        raise ClusterError(
            f"{type(partitioner).__name__} cuts along the first dim, and a scalar has none."
        )
    return shape[0]


def _num_bytes(shape: Sequence[int], dtype: object) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize  # type: ignore[call-overload]


def _cut(num_shards: int, shape: Sequence[int]) -> list[int]:
    return [num_shards] + [1] * (len(shape) - 1)
