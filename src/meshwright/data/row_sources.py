"""Rows by number: of arrays, random-access datasets, PyDatasets, Parquet and ArrayRecord files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..errors import DataError
from ..extras import require

Parse = Callable[[Any], Any]


class RowSource(ABC):
    """Rows in one or more files, each with its number of rows."""

    sizes: tuple[int, ...]
    has_files = False
    any_order = True  # reading rows in any order costs what reading them in order does
    batch_size: int | None = None  # rows of a batch, where the source has batches itself

    @abstractmethod
    def read(self, file: int, rows: np.ndarray) -> Any:
        """These rows of a file, by number, stacked: a tree of arrays."""

    def shuffled(self, file: int, draw: np.random.Generator) -> np.ndarray | None:
        """The numbers of a file's rows in a random order; ``None`` if they keep theirs."""
        return draw.permutation(self.sizes[file])

    def begin(self, ended: int) -> None:  # noqa: B027
        """An epoch begins; that many have ended since the one that began last."""

    @property
    def total(self) -> int:
        """The rows of all files."""
        return sum(self.sizes)


class ArrayRows(RowSource):
    """The rows of a tree of arrays."""

    def __init__(self, arrays: Any) -> None:
        self._arrays = arrays
        counts = {np.shape(leaf)[0] for leaf in jax.tree.leaves(arrays)}
        if len(counts) != 1:
            raise DataError(f"the arrays have different numbers of rows: {sorted(counts)}.")
        self.sizes = (counts.pop(),)

    def read(self, file: int, rows: np.ndarray) -> Any:
        return jax.tree.map(lambda array: np.asarray(array[rows]), self._arrays)


class RecordRows(RowSource):
    """The records of datasets with ``len`` and an index, one per file."""

    def __init__(self, datasets: Sequence[Any], parse: Parse | None, has_files: bool) -> None:
        self._datasets, self._parse, self.has_files = datasets, parse, has_files
        self.sizes = tuple(map(len, datasets))

    def read(self, file: int, rows: np.ndarray) -> Any:
        dataset, parse = self._datasets[file], self._parse
        records = [dataset[int(row)] for row in rows]
        if parse is not None:
            records = [parse(record) for record in records]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *records)


class BatchRows(RowSource):
    """The rows of a Keras ``PyDataset``: batches by number, all of one size but for the last.

    Batches are read whole, and one is kept. The first and the last are looked at for their sizes.
    """

    any_order = False

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._kept: tuple[int, Any] | None = None
        if not (count := _batch_count(dataset)):
            raise DataError(
                f"{type(dataset).__name__} has {'no' if count == 0 else 'an unknown number of'} "
                "batches, so they cannot be dealt out. Give it __len__, or pass it to fit itself."
            )
        dataset.on_epoch_begin()
        self.batch_size = _row_count(dataset[0])
        self._sizes = [self.batch_size] * count
        if count > 1 and (last := _row_count(dataset[count - 1])) < self.batch_size:
            self._sizes[-1] = last
        self.sizes = (sum(self._sizes),)

    def read(self, file: int, rows: np.ndarray) -> Any:
        assert self.batch_size is not None
        numbers, places = np.divmod(rows, self.batch_size)
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        parts = []
        for number, inside in zip(np.split(numbers, cuts), np.split(places, cuts), strict=True):
            batch = self._batch(int(number[0]))
            parts.append(jax.tree.map(lambda leaf, at=inside: np.asarray(leaf)[at], batch))
        return joined(parts)

    def shuffled(self, file: int, draw: np.random.Generator) -> np.ndarray | None:
        rows = np.split(np.arange(self.total), np.cumsum(self._sizes)[:-1])
        return np.concatenate([rows[number] for number in draw.permutation(len(rows))])

    def begin(self, ended: int) -> None:
        self._kept = None  # read again it may hold other rows
        for _ in range(ended):
            self._dataset.on_epoch_end()
            self._dataset.on_epoch_begin()

    def _batch(self, number: int) -> Any:
        if self._kept is None or self._kept[0] != number:
            batch = self._dataset[number]
            if (rows := _row_count(batch)) != self._sizes[number]:
                raise DataError(
                    f"batch {number} of {type(self._dataset).__name__} has {rows} rows; expected "
                    f"{self._sizes[number]}. All batches but the last must have as many rows as "
                    "the first. Otherwise pass the dataset itself to fit: every process reads all "
                    "batches."
                )
            self._kept = number, tuple(batch) if isinstance(batch, list) else batch
        return self._kept[1]


class ParquetRows(RowSource):
    """The rows of Parquet files: a dict of columns. Row groups are read whole, and one is kept."""

    has_files = True
    any_order = False

    def __init__(self, paths: Sequence[str], parse: Parse | None) -> None:
        require("pyarrow", DataError, "Parquet files are read by PyArrow", "parquet")
        import pyarrow.parquet

        self._parquet = pyarrow.parquet
        self._paths, self._parse = paths, parse
        self._ends: dict[int, np.ndarray] = {}  # of each file's row groups
        self._open: tuple[int, Any] | None = None
        self._kept: tuple[tuple[int, int], dict[str, np.ndarray]] | None = None
        for file in range(len(paths)):
            metadata = self._file(file).metadata
            groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            self._ends[file] = np.cumsum(groups, dtype=np.int64)
        self.sizes = tuple(int(ends[-1]) if len(ends) else 0 for ends in self._ends.values())

    def read(self, file: int, rows: np.ndarray) -> Any:
        ends = self._ends[file]
        parts, start = [], 0
        while start < len(rows):  # rows come in order
            group = int(np.searchsorted(ends, rows[start], side="right"))
            stop = int(np.searchsorted(rows, ends[group]))
            begin = int(ends[group - 1]) if group else 0
            columns = self._group(file, group)
            parts.append({name: c[rows[start:stop] - begin] for name, c in columns.items()})
            start = stop
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if self._parse is None:
            return columns
        records = [
            self._parse({name: column[i] for name, column in columns.items()})
            for i in range(len(rows))
        ]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *records)

    def shuffled(self, file: int, draw: np.random.Generator) -> np.ndarray | None:
        return None  # of files their order is shuffled

    def _file(self, file: int) -> Any:
        if self._open is None or self._open[0] != file:
            if self._open is not None:
                self._open[1].close()
            self._open = file, self._parquet.ParquetFile(self._paths[file])
        return self._open[1]

    def _group(self, file: int, group: int) -> dict[str, np.ndarray]:
        if self._kept is None or self._kept[0] != (file, group):
            table = self._file(file).read_row_group(group)
            columns = {name: _numbers(table.column(name)) for name in table.column_names}
            self._kept = (file, group), columns
        return self._kept[1]


def joined(parts: Sequence[Any]) -> Any:
    """Trees of arrays as one, with the rows of all.

    >>> joined([{"id": np.array([4])}, {"id": np.array([5, 6])}])
    {'id': array([4, 5, 6])}
    """
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _row_count(batch: Any) -> int:
    return int(np.shape(jax.tree.leaves(batch)[0])[0])


def _batch_count(dataset: Any) -> int | None:
    try:
        return dataset.num_batches
    except NotImplementedError:  # of a dataset without __len__
        return None


def _numbers(column: Any) -> np.ndarray:
    """A column of a Parquet file; lists of one length become rows of a matrix."""
    values = column.to_numpy()
    return np.stack(list(values)) if values.dtype == object and len(values) else values


def row_source(source: Any, parse: Parse | None) -> RowSource | None:
    """The rows of a source; ``None`` for one that yields batches in its own order.

    Raises :class:`DataError` for files that are missing or of an unknown kind.
    """
    if (paths := _paths_of(source)) is not None:
        return _files(paths, parse)
    if _is_random_access(source):
        return RecordRows([source], parse, has_files=False)
    if _is_py_dataset(source):
        if parse is not None:
            raise DataError("parse= is for records; a PyDataset has batches. Use to_batch=.")
        return BatchRows(source)
    if _has_arrays(source):
        if parse is not None:
            raise DataError("parse= is for the records of a dataset or file; arrays have none.")
        return ArrayRows(source)
    return None


def _is_random_access(source: Any) -> bool:
    """Whether a source has single records by number, as Grain's MapDataset and lists have."""
    has_rows = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    return has_rows and not (_has_arrays(source) or _is_py_dataset(source))


def _has_arrays(source: Any) -> bool:
    return isinstance(source, tuple | Mapping | np.ndarray) or hasattr(source, "__array__")


def _is_py_dataset(source: Any) -> bool:
    return any(base.__name__ == "PyDataset" for base in type(source).__mro__)


def _paths_of(source: Any) -> list[str] | None:
    """The files that a source names: a pattern, a path, or several of them."""
    several = source if isinstance(source, list | tuple) else [source]
    if not several or not all(isinstance(path, str | Path) for path in several):
        return None
    paths = []
    for pattern in map(Path, several):
        folder = Path(pattern.anchor)
        matches = [pattern] if pattern.exists() else folder.glob(str(pattern.relative_to(folder)))
        files = sorted(map(str, matches))
        if not files:
            raise DataError(f"no file matches '{pattern}'.")
        paths += files
    return paths


def _files(paths: list[str], parse: Parse | None) -> RowSource:
    kinds = {Path(path).suffix for path in paths}
    if kinds == {".parquet"}:
        return ParquetRows(paths, parse)
    if kinds <= {".array_record", ".arrayrecord"}:
        require("grain", DataError, "ArrayRecord files are read by Grain", "grain")
        import grain

        sources = [grain.sources.ArrayRecordDataSource([path]) for path in paths]
        return RecordRows(sources, parse, has_files=True)
    raise DataError(
        f"files end with {', '.join(sorted(kinds))}; expected .parquet or .array_record (one kind "
        "at a time). Read others with Grain, and pass its MapDataset."
    )
