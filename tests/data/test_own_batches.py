"""Batches that each process makes itself: one end for all, and a position for as many processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest

import meshwright as mw
from meshwright.data.groups import Group
from meshwright.data.own_batches import OwnBatches, OwnReading


class Files:
    """Stands for a ``tf.data.Dataset`` of files, which counts the batches that are read of each."""

    def __init__(self, rows: dict[str, int], read: dict[str, int]) -> None:
        self._rows, self._read = rows, read

    def shard(self, num_shards: int, index: int) -> Files:
        return Files(dict(list(self._rows.items())[index::num_shards]), self._read)

    def batches(self, size: int) -> Iterator[Any]:
        for name, rows in self._rows.items():
            for start in range(0, rows, size):
                self._read[name] = self._read.get(name, 0) + 1
                yield {"id": np.arange(start, min(start + size, rows))}


def together(source: OwnBatches, count: int) -> list[list[int]]:
    """The rows of all batches that each of several processes, here threads, takes."""
    rows, barrier = [0] * count, threading.Barrier(count)

    def taken(index: int) -> list[int]:
        def exchange(own: int) -> list[int]:
            rows[index] = own
            barrier.wait(10)
            of_all = list(rows)
            barrier.wait(10)
            return of_all

        reading = OwnReading(source, Group(index, count), exchange)
        return [len(batch.arrays["id"]) for batch in reading]

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(taken, range(count)))


def test_a_process_reads_its_files_and_all_end_where_the_first_has_none_left() -> None:
    read: dict[str, int] = {}
    files = Files({"a": 12, "b": 8, "c": 4, "d": 14}, read)  # 16 and 22 rows

    def make(index: int, count: int) -> Iterator[Any]:
        return files.shard(count, index).batches(4)

    source = mw.shard(make, uneven="drop")
    with pytest.warns(mw.MeshwrightWarning, match="process 0 has no whole batch after 4"):
        assert together(source, 2) == [[4] * 4, [4] * 4]
    assert read == {"a": 3, "c": 1, "b": 2, "d": 3}  # "d" is read one batch farther than is used


def test_a_short_batch_ends_the_epoch_and_batches_of_different_sizes_are_an_error() -> None:
    source = mw.shard(lambda index, _: Files({"a": 10 + index}, {}).batches(4), uneven="drop")
    assert together(source, 2) == [[4, 4], [4, 4]]
    source = mw.shard(lambda index, _: Files({"a": 12}, {}).batches(4 - index), uneven="drop")
    with pytest.raises(mw.DataError, match=r"as many rows in each process; received \[4, 3\]"):
        together(source, 2)


def test_as_many_processes_go_on_and_others_are_refused() -> None:
    source = mw.shard(lambda *_: iter([np.full(2, n) for n in range(5)]), uneven="drop")

    def reading(index: int, count: int) -> OwnReading:
        return OwnReading(source, Group(index, count), lambda rows: [rows] * count)

    first = reading(1, 2)
    before = [next(first).arrays[0] for _ in range(3)]
    again = reading(1, 2)
    again.set_state(first.get_state())
    assert [*before, *(batch.arrays[0] for batch in again)] == list(range(5))
    with pytest.raises(mw.DataError, match="by 2 processes, and there are 3"):
        reading(0, 3).set_state(first.get_state())


def test_a_function_needs_uneven_drop_and_takes_no_options_of_rows() -> None:
    with pytest.raises(mw.DataError, match="uneven must be 'drop' for a function"):
        mw.shard(lambda index, count: iter([]))
    with pytest.raises(mw.DataError, match="batch_size= needs rows by number or files"):
        mw.shard(lambda index, count: iter([]), batch_size=4, uneven="drop")


def test_fit_trains_on_the_batches_of_a_function_in_every_epoch() -> None:
    made = []

    def make(index: int, count: int) -> Iterator[Any]:
        made.append((index, count))
        return ((np.full([8, 4], n, "f"), np.full([8, 1], n, "f")) for n in range(3))

    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    strategy.fit(model, mw.shard(make, uneven="drop"), epochs=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 6
    assert set(made) == {(0, 1)}
