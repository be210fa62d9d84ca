"""Every row of an epoch is read once, by whichever processes, however their number changes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.data import LocalBatch, ShardedRows
from meshwright.data.shard import Group
from meshwright.data.spans import Span, after, row_count, steps_of

SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=6)
DEALING = st.sampled_from(["file", "block", "batch"])


def numbers(spans: Any) -> list[tuple[int, int]]:
    return [(span.file, row) for span in spans for row in range(span.start, span.stop)]


@settings(deadline=None, max_examples=60)
@given(SIZES, DEALING, st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), max_size=4))
def test_every_row_is_read_once_however_the_number_of_processes_changes(
    sizes: list[int], dealing: Any, runs: list[tuple[int, int]]
) -> None:
    rest = tuple(Span(file, 0, rows) for file, rows in enumerate(sizes) if rows)
    read: Counter[tuple[int, int]] = Counter()
    for processes, most in [*runs, (2, 1000)]:
        by_process = [list(steps_of(rest, i, processes, 2, dealing)) for i in range(processes)]
        assert len({len(steps) for steps in by_process}) == 1  # they all end at the same step
        taken = min(most, len(by_process[0]))
        for steps in zip(*(steps[:taken] for steps in by_process), strict=True):
            whole = [step for step in steps if step.is_rest]
            assert len(whole) in (0, processes)
            if whole:
                assert len({step.spans for step in whole}) == 1
                assert row_count(whole[0].spans) < 2 * processes
            for step in steps[:1] if whole else steps:
                read.update(numbers(step.spans))
                assert whole or row_count(step.spans) == 2
        rest = after(rest, taken, processes, 2, dealing)
    assert rest == ()
    assert set(read.values()) <= {1}
    assert len(read) == sum(sizes)


def rows_of(batch: Any) -> list[int]:
    arrays = batch.arrays if isinstance(batch, LocalBatch) else batch
    return [int(row) for row in arrays["id"]]


X = {"id": np.arange(50), "value": np.arange(50.0)}


def test_a_position_is_one_for_all_processes_and_for_any_number_of_them() -> None:
    rows: ShardedRows = mw.shard(X, batch_size=6, seed=4)
    three = [rows.reading(Group(i, 3)) for i in range(3)]
    actual = [row for _ in range(4) for reading in three for row in rows_of(next(reading))]
    states = [json.loads(json.dumps(reading.get_state())) for reading in three]
    assert states[0] == states[1] == states[2]
    two = [rows.reading(Group(i, 2)) for i in range(2)]
    for reading in two:
        reading.set_state(states[0])
    rest = [[rows_of(batch) for batch in reading] for reading in two]
    assert rest[0][-1] == rest[1][-1]  # of 50 rows, 2 are left for everybody
    actual += [row for reading in rest for batch in reading[:-1] for row in batch] + rest[0][-1]
    assert sorted(actual) == list(range(50))
    assert actual[:6] != list(range(6))
    one = rows.reading(Group(0, 1))
    order = [row for batch in one for row in rows_of(batch)]
    assert actual[:24] == order[:24]  # the batches of any number of processes are the same


def test_as_many_processes_as_before_read_on_as_they_would_have_done(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install 'meshwright[parquet]'")
    rows = mw.shard(parquet(tmp_path, [20, 9, 13, 30]), batch_size=8, seed=1)
    whole = [rows_of(batch) for batch in rows.reading(Group(1, 2))]
    first, again = rows.reading(Group(1, 2)), rows.reading(Group(1, 2))
    began = [rows_of(next(first)) for _ in range(5)]
    again.set_state(first.get_state())
    assert began + [rows_of(batch) for batch in again] == whole


def test_a_rest_may_be_dropped() -> None:
    rows: ShardedRows = mw.shard(X, batch_size=8, uneven="drop")
    assert rows.num_batches == 6
    assert sum(len(rows_of(b)) for i in range(2) for b in rows.reading(Group(i, 2))) == 48


# Files


def parquet(folder: Path, sizes: list[int], width: int = 2) -> list[Path]:
    import pyarrow
    import pyarrow.parquet

    paths, start = [], 0
    for number, rows in enumerate(sizes):
        ids = np.arange(start, start + rows)
        draw = np.random.default_rng(number)
        columns = {"id": ids, "x": list(draw.normal(size=(rows, width)).astype("float32"))}
        paths.append(folder / f"part-{number}.parquet")
        table = pyarrow.table(columns)
        pyarrow.parquet.write_table(table, paths[-1], row_group_size=64, compression="none")
        start += rows
    return paths


def bytes_read() -> int:
    """What this process has read from files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


@pytest.mark.parametrize("by", ["file", "row"])
def test_a_process_reads_its_share_of_the_bytes_and_a_file_at_most(tmp_path: Path, by: Any) -> None:
    pytest.importorskip("pyarrow", reason="pip install 'meshwright[parquet]'")
    paths = parquet(tmp_path, [512, 640, 320, 512, 448, 600], width=512)
    sizes = [path.stat().st_size for path in paths]
    rows: ShardedRows = mw.shard(str(tmp_path / "*.parquet"), by, batch_size=32)
    observations: list[int] = []
    for index in range(2):
        before = bytes_read()
        batches = [rows_of(batch) for batch in rows.reading(Group(index, 2))]
        assert bytes_read() - before <= sum(sizes) / 2 + max(sizes)
        rest = 3032 % 32
        assert len(batches[-1]) == rest
        observations += [row for batch in batches[: -1 if index == 0 else None] for row in batch]
    assert sorted(observations) == list(range(sum([512, 640, 320, 512, 448, 600])))


class CountedRows:
    """A dataset of 48 rows that counts how often one is read."""

    def __init__(self) -> None:
        self.read = Counter[int]()

    def __len__(self) -> int:
        return 48

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        self.read[number] += 1
        return {"id": np.array(number)}


class CountedBatches(keras.utils.PyDataset):
    """Batches of six rows, the last of which may be short; each epoch has other values."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows
        self.read = Counter[int]()
        self.epoch = 0

    def __len__(self) -> int:
        return -(-self._rows // 6)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self.read[index] += 1
        rows = np.arange(6 * index, min(6 * index + 6, self._rows))
        return {"id": rows, "epoch": np.full(len(rows), self.epoch)}

    def on_epoch_end(self) -> None:
        self.epoch += 1


def test_of_rows_by_number_a_process_reads_its_share() -> None:
    counted = CountedRows()
    shares = mw.shard(counted, batch_size=6, seed=3)
    begun = counted.read.total()  # a row is looked at for its form
    for index in range(2):
        assert len(list(shares.reading(Group(index, 2)))) == 8
        assert counted.read.total() - begun == 24 * (index + 1)


# Batches by number


@pytest.mark.parametrize(("rows", "processes"), [(48, 2), (48, 3), (64, 2), (67, 3), (5, 1)])
@pytest.mark.parametrize("seed", [None, 2])
def test_of_batches_by_number_a_process_reads_its_share(
    rows: int, processes: int, seed: int | None
) -> None:
    seen: list[int] = []
    for index in range(processes):
        batches = CountedBatches(rows)
        shares: ShardedRows = mw.shard(batches, seed=seed)
        assert shares.batch_size == min(rows, 6)
        looked_at = batches.read.total()
        assert looked_at <= 2
        read = [rows_of(batch) for batch in shares.reading(Group(index, processes))]
        whole = rows // shares.batch_size
        assert [len(batch) for batch in read[:whole]] == [shares.batch_size // processes] * whole
        rest = read[whole:] if index == 0 else []  # which every process reads
        assert batches.read.total() - looked_at <= len(batches) / processes + 3
        seen += [row for batch in read[:whole] + rest for row in batch]
    assert sorted(seen) == list(range(rows))
    assert processes > 1 or (seen == sorted(seen)) == (seed is None or rows < 6)


def test_where_batches_divide_each_is_read_once_by_one_process() -> None:
    batches = CountedBatches(48)
    shares = mw.shard(batches)
    batches.read.clear()
    for index in range(2):
        assert len(list(shares.reading(Group(index, 2)))) == 8
    assert batches.read == Counter(range(8))


def test_batches_by_number_go_on_with_another_number_of_processes_and_in_their_epoch() -> None:
    three = [mw.shard(CountedBatches(40), seed=1).reading(Group(i, 3)) for i in range(3)]
    for reading in three:
        reading.begin(2)
    batches = [next(reading) for _ in range(4) for reading in three]
    seen = [row for batch in batches for row in rows_of(batch)]
    state = json.loads(json.dumps(three[0].get_state()))
    two = [mw.shard(CountedBatches(40), seed=1).reading(Group(i, 2)) for i in range(2)]
    for reading in two:
        reading.set_state(state)
    rest = [list(reading) for reading in two]
    seen += [row for batches in rest for batch in batches[:-1] for row in rows_of(batch)]
    assert rows_of(rest[0][-1]) == rows_of(rest[1][-1])
    assert sorted(seen + rows_of(rest[0][-1])) == list(range(40))
    assert {int(row) for batch in rest[0][:-1] for row in batch.arrays["epoch"]} == {2}


class GrowingBatches(CountedBatches):
    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"id": np.arange(index + 1)}


class EndlessBatches(keras.utils.PyDataset):
    def __getitem__(self, index: int) -> np.ndarray:
        return np.zeros(4)


def test_batches_that_cannot_be_dealt_out_are_an_error_with_the_way_out() -> None:
    with pytest.raises(mw.DataError, match="EndlessBatches has an unknown number of batches"):
        mw.shard(EndlessBatches())
    with pytest.raises(mw.DataError, match="CountedBatches has no batches"):
        mw.shard(CountedBatches(0))
    with pytest.raises(mw.DataError, match="batch 1 of GrowingBatches has 2 rows; expected 1"):
        list(mw.shard(GrowingBatches(12)).reading(Group(0, 1)))


def test_files_of_records_are_read_by_grain(tmp_path: Path) -> None:
    pytest.importorskip("grain", reason="pip install 'meshwright[grain]'")
    from array_record.python.array_record_module import ArrayRecordWriter

    for file in range(3):
        writer = ArrayRecordWriter(str(tmp_path / f"{file}.array_record"), "group_size:1")
        for row in range(8):
            writer.write(np.int64(8 * file + row).tobytes())
        writer.close()
    rows: ShardedRows = mw.shard(
        str(tmp_path / "*.array_record"),
        batch_size=4,
        parse=lambda record: {"id": np.frombuffer(record, "int64")[0]},
    )
    actual = [
        row for i in range(2) for batch in rows.reading(Group(i, 2)) for row in rows_of(batch)
    ]
    assert sorted(actual) == list(range(24))


def test_fewer_files_than_processes_is_an_error_with_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install 'meshwright[parquet]'")
    rows = mw.shard(parquet(tmp_path, [4, 4]), "file", batch_size=6)
    with pytest.raises(mw.DataError, match="there are 2 for 3 processes"):
        rows.reading(Group(0, 3))
    rows = mw.shard(parquet(tmp_path, [4, 4]), "auto", batch_size=6)
    assert [len(rows_of(batch)) for batch in rows.reading(Group(0, 3))] == [2, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mw.shard(X, "file", batch_size=4), "by='file' needs files; dict has none"),
        (lambda: mw.shard(X), "batch_size must be the rows of a batch of all processes"),
        (lambda: mw.shard(X, "cols", batch_size=4), "by must be one of"),
        (lambda: mw.shard(iter([X]), batch_size=4), "batch_size= needs rows by number or files"),
        (lambda: mw.shard("nowhere-*.parquet", batch_size=4), "no file matches 'nowhere-"),
        (lambda: mw.shard(__file__, batch_size=4), "expected .parquet or .array_record"),
        (
            lambda: mw.shard(X, batch_size=10).reading(Group(0, 4)),
            "batch_size=10 does not divide over 4 processes. The nearest sizes that do: 8 and 12",
        ),
    ],
)
def test_what_cannot_be_sharded_is_an_error_with_the_way_out(make: Any, message: str) -> None:
    with pytest.raises(mw.DataError, match=message):
        make()


# Training


def model_in(strategy: mw.Sharded) -> keras.Model:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def test_fit_trains_on_all_rows_as_on_arrays_and_resumes_in_mid_epoch(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(90, 4)).astype("float32"), draw.normal(size=(90, 1))
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    plain, sharded, resumed = (model_in(strategy) for _ in range(3))
    how: dict[str, Any] = {"epochs": 2, "verbose": 0}
    strategy.fit(plain, x, y, batch_size=16, shuffle=False, **how)
    strategy.fit(sharded, mw.shard((x, y), batch_size=16), **how)
    for one, other in zip(plain.get_weights(), sharded.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3:
                raise KeyboardInterrupt

    saving: dict[str, Any] = {"checkpoint": tmp_path, "save_every": 2}
    rows = mw.shard((x, y), batch_size=16)
    with pytest.raises(KeyboardInterrupt):
        strategy.fit(resumed, rows, callbacks=[Stop()], **saving, **how)
    strategy.fit(resumed, mw.shard((x, y), batch_size=16), **saving, **how)
    for one, other in zip(plain.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_fit_refuses_what_a_sharded_source_has_itself() -> None:
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    rows = mw.shard((np.ones([16, 4]), np.ones([16, 1])), batch_size=8)
    with pytest.raises(mw.DataError, match="batch_size=16 is not supported"):
        strategy.fit(model_in(strategy), rows, batch_size=16, verbose=0)
