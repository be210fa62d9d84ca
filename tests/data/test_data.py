"""Input: what is read ahead, by whom, how often, and in which order."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers
from models import Batches

import meshwright as mw
from meshwright.data import HostRows, LocalBatch, Prefetch, Putter
from meshwright.data.prefetch import AHEAD

ROWS = 40
X = np.stack([np.arange(ROWS), np.ones(ROWS)], axis=1).astype("float32")  # the first one is an id
Y = np.zeros([ROWS, 1], "float32")
MESHES = [{"batch": 8}, {"batch": 2, "model": 4}, {"batch": 1}]


class Slow:
    """Numbers, each after a while; remembers what was read and whether it was closed."""

    def __init__(self, count: int, fails_at: int | None = None, wait_s: float = 0.004) -> None:
        self.read: list[int] = []
        self.closed = False
        self._count, self._fails_at, self._wait_s = count, fails_at, wait_s

    def __call__(self) -> Iterator[int]:
        try:
            for number in range(self._count):
                time.sleep(self._wait_s)
                if number == self._fails_at:
                    raise OSError(f"no number {number}")
                self.read.append(number)
                yield number
        finally:
            self.closed = True


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "meshwright-input"]


def test_a_slow_source_is_read_ahead_but_never_further_than_told() -> None:
    source, prefetch = Slow(12), Prefetch()
    furthest = 0
    for taken, number in enumerate(prefetch(source())):
        assert number == taken
        time.sleep(0.02)  # long enough to read as much as it may
        furthest = max(furthest, len(source.read) - taken - 1)
    assert prefetch.reads_in_thread
    assert furthest == AHEAD
    assert source.closed
    assert not readers()


def test_a_fast_source_is_read_as_it_is_asked_for_and_starts_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshwright.data.prefetch._SLOW_S", 1.0)  # whatever else the machine does
    source, prefetch = Slow(50, wait_s=0), Prefetch()
    for taken, _ in enumerate(prefetch(source())):
        assert len(source.read) == taken + 1
        assert not readers()


def test_an_early_reader_is_one_item_ahead_and_gives_all_that_came_before_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshwright.data.prefetch._SLOW_S", 1.0)
    source = Slow(5, fails_at=4, wait_s=0)
    items = Prefetch(early=True)(source())
    for number in range(4):
        assert next(items) == number
        assert len(source.read) == min(number + 2, 4)
    with pytest.raises(OSError, match="no number 4"):
        next(items)
    assert source.closed
    assert not readers()


def test_what_a_source_raises_comes_after_all_that_it_gave() -> None:
    source, result = Slow(9, fails_at=6), []
    with pytest.raises(OSError, match="no number 6"):
        result.extend(Prefetch()(source()))
    for number in Prefetch()(Slow(9, fails_at=None)()):
        result.append(number)
    assert result[-9:] == list(range(9))
    assert source.read == list(range(6))
    assert not readers()


def test_stopping_early_closes_the_source_and_leaves_no_thread() -> None:
    source = Slow(1000)
    items = Prefetch()(source())
    for number in items:
        if number == 5:
            break
    assert readers()
    items.close()
    assert source.closed
    assert not readers()
    assert len(source.read) <= 6 + AHEAD + 1


def test_rows_are_read_only_where_a_process_needs_them() -> None:
    requests: list[list[int]] = []
    table = np.arange(20).reshape(10, 2)

    def read(numbers: Any) -> Any:
        requests.append(list(numbers))
        return table[numbers]

    rows = HostRows(read, np.array([3, 1, 9, 4]), (2,))
    np.testing.assert_array_equal(rows[2:4, 1:], [[19], [9]])
    assert requests == [[9, 4]]
    np.testing.assert_array_equal(rows.cycled(6)[4:6, :], table[[3, 1]])


def test_local_rows_that_do_not_divide_name_the_nearest_sizes() -> None:
    put = Putter(mw.Placement.of(mw.create_mesh({"batch": 8})))
    assert put(LocalBatch(np.zeros([16, 3]))).sharding.shard_shape((16, 3)) == (2, 3)
    with pytest.raises(mw.BatchError, match=r"12 rows of this process .*8 pieces.*8 and 16"):
        put(LocalBatch(np.zeros([12, 3])))


# Whole epochs


class Sees(keras.Model):
    """Counts how often it trained on each id, and adds up the places they came at."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)
        self.times = self.add_weight(
            shape=(ROWS,), initializer="zeros", trainable=False, name="times"
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            actual = keras.ops.one_hot(keras.ops.cast(x[:, 0], "int32"), ROWS)
            self.times.assign_add(keras.ops.sum(actual, axis=0))
        return self.dense(x)


def trained(data: dict[str, Any], mesh: dict[str, int], epochs: int = 2) -> keras.Model:
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(4)
    devices = jax.devices()[: math.prod(mesh.values())]
    strategy = mw.DataParallel(mw.create_mesh(mesh, devices=devices), batch=list(mesh))
    with strategy.scope():
        model = Sees()
        model.compile(keras.optimizers.SGD(1e-4), "mse")
    strategy.fit(model, epochs=epochs, verbose=0, **data)
    return model


class SlowBatches(Batches):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return super().__getitem__(index)


def grain_map() -> Any:
    grain = pytest.importorskip("grain")
    rows = grain.MapDataset.source(list(zip(X, Y, strict=True)))
    return rows.shuffle(seed=3).batch(16)


def grain_loader() -> Any:
    grain = pytest.importorskip("grain")
    return grain.DataLoader(
        data_source=list(zip(X, Y, strict=True)),
        sampler=grain.samplers.IndexSampler(ROWS, shuffle=True, seed=3, num_epochs=1),
        operations=[grain.transforms.Batch(16)],
    )


def tensorflow_data() -> Any:
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)


def torch_loader() -> Any:
    data = pytest.importorskip("torch.utils.data")
    return data.DataLoader(list(zip(X, Y, strict=True)), batch_size=16, shuffle=True)


def generator() -> Any:
    batches = Batches(X, Y)
    return (batches[index] for _ in range(2) for index in range(3))


SOURCES: dict[str, Any] = {
    "NumPy": lambda: {"x": X, "y": Y, "batch_size": 16},
    "PyDataset": lambda: {"x": Batches(X, Y), "shuffle": True},
    "slow PyDataset": lambda: {"x": SlowBatches(X, Y), "shuffle": True},
    "generator": lambda: {"x": generator(), "steps_per_epoch": 3, "shuffle": False},
    "grain.MapDataset": lambda: {"x": grain_map(), "shuffle": False},
    "grain.IterDataset": lambda: {"x": grain_map().to_iter_dataset(), "shuffle": False},
    "grain.DataLoader": lambda: {"x": grain_loader(), "shuffle": False},
    "tf.data": lambda: {"x": tensorflow_data(), "shuffle": False},
    "torch DataLoader": lambda: {"x": torch_loader(), "shuffle": False},
}


@pytest.mark.full_for("grain.IterDataset")
@pytest.mark.filterwarnings("ignore:Your `PyDataset` class should call")
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_sample_is_used_exactly_once_per_epoch(source: Any) -> None:
    model = trained(source(), {"batch": 8})
    np.testing.assert_array_equal(model.times, np.full(ROWS, 2))
    assert int(model.optimizer.iterations) == 6
    assert not readers()


@pytest.mark.full
def test_shuffling_is_seeded_and_the_same_under_every_mesh() -> None:
    """The order shows in the weights: they are those of one order only."""
    data = {"x": X, "y": Y + X[:, :1] / ROWS, "batch_size": 16}
    results = [np.asarray(trained(data, mesh).dense.kernel) for mesh in MESHES]
    for kernel in results[1:]:
        np.testing.assert_allclose(kernel, results[0], rtol=1e-6)
    other = np.asarray(trained(data | {"shuffle": False}, MESHES[0]).dense.kernel)
    assert np.abs(other - results[0]).max() > 1e-5


def test_local_rows_of_the_only_process_are_all_rows() -> None:
    data = {"x": mw.LocalRows(grain_map()[:2]), "shuffle": False}
    model = trained(data, {"batch": 8}, epochs=1)
    assert float(np.asarray(model.times).sum()) == 32
    with pytest.raises(mw.BatchError, match=r"12 rows of this process do not divide over its"):
        trained({"x": mw.LocalRows(Odd(X, Y)), "shuffle": False}, {"batch": 8}, epochs=1)


class Odd(Batches):
    def __getitem__(self, index: int) -> Any:
        return X[:12], Y[:12]
