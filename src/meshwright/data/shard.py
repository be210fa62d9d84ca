"""Sources of which every process reads its own part, with one position for all of them.

TensorFlow deals out files or elements (``AutoShardPolicy``), and PyTorch's sampler row numbers; in
both the position is a process's own, and rows are lost or read twice when the number of processes
changes. Here the position is what is left of the epoch for all processes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from ..errors import DataError
from ..layouts.placement import Placement
from .groups import Group
from .own_batches import OwnBatches
from .row_sources import Parse, RowSource, joined, row_source
from .rows import LocalBatch
from .spans import Dealing, Span, Spans, Step, after, steps_of

By = Literal["auto", "file", "row", "off"]
Uneven = Literal["pad", "drop"]


@dataclass(frozen=True, eq=False)
class ShardedRows:
    """Rows of which every process reads its own part; made by :func:`shard`."""

    rows: RowSource
    by: By
    batch_size: int
    seed: int | None
    uneven: Uneven
    to_batch: Callable[[Any], Any] | None

    def __repr__(self) -> str:
        files = f" in {len(self.rows.sizes)} files" if self.rows.has_files else ""
        return (
            f"mw.shard({self.rows.total} rows{files}, by={self.by!r}, "
            f"batch_size={self.batch_size}, seed={self.seed}, uneven={self.uneven!r})"
        )

    @property
    def num_batches(self) -> int:
        """Batches of an epoch, for any number of processes."""
        rest = 0 if self.uneven == "drop" else self.batch_size - 1
        return (self.rows.total + rest) // self.batch_size

    def reading(self, group: Group) -> Reading:
        """What a group of processes reads. Raises :class:`DataError` where that cannot be."""
        return Reading(self, group)

    def __iter__(self) -> Reading:
        return self.reading(Group.of_processes())


class Reading:
    """The batches of one epoch that a group of processes reads, from where it stands.

    A batch of this group's rows alone comes as a :class:`LocalBatch`. ``get_state`` and
    ``set_state`` are those of Grain's iterators: a value of JSON that any number of processes goes
    on from. As many processes as before read on exactly as they would have done.
    """

    def __init__(self, source: ShardedRows, group: Group) -> None:
        self._source = source
        self.group = Group(0, 1) if source.by == "off" else group
        self._rows_here = _rows_here(source, self.group)
        self._dealing: Dealing = _dealing(source, self.group)
        self._shuffled: tuple[Any, Any] = None, None
        self._epoch = 0
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """Begin an epoch."""
        self._start(epoch, _whole(self._source, epoch), 0)

    def _start(self, epoch: int, rest: Spans, batches: int) -> None:
        self._source.rows.begin(max(0, epoch - self._epoch))
        self._epoch, self._from, self._taken = epoch, rest, batches
        group = self.group
        steps = steps_of(rest, group.index, group.number, self._rows_here, self._dealing)
        self._steps: Iterator[Step] = itertools.islice(steps, batches, None)

    def __iter__(self) -> Reading:
        return self

    def __next__(self) -> Any:
        step = next(self._steps)
        if step.is_rest and self._source.uneven == "drop":
            raise StopIteration
        batch = self._read(step.spans)
        self._taken += 1
        return batch if step.is_rest or self.group.number == 1 else LocalBatch(batch)

    @property
    def is_in_order(self) -> bool:
        """Whether the batches of all processes together are the rows in their order."""
        return self.group.number == 1 or self._dealing == "batch"

    @property
    def taken(self) -> int:
        """Batches since the rows that its state names first."""
        return self._taken

    def state_after(self, taken: int) -> dict[str, Any]:
        """The state after ``taken`` batches, see :attr:`taken`."""
        return {
            "epoch": self._epoch,
            "rest": [list(span) for span in self._from],
            "taken": taken,
            "processes": self.group.number,
            "rows": self._rows_here,
            "dealing": self._dealing,
        }

    def get_state(self) -> dict[str, Any]:
        """Where all processes stand after the batches that were yielded."""
        return self.state_after(self._taken)

    def goes_on_from(self, state: Any) -> bool:
        """Whether this is a state of sharded rows."""
        return isinstance(state, dict) and "rest" in state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        rest = tuple(Span(*span) for span in state["rest"])
        before = state["processes"], state["rows"], state["dealing"]
        if before == (self.group.number, self._rows_here, self._dealing):
            self._start(state["epoch"], rest, state["taken"])
        else:
            self._start(state["epoch"], after(rest, state["taken"], *before), 0)

    def _read(self, spans: Spans) -> Any:
        source, parts = self._source, []
        for span in spans:
            rows = np.arange(span.start, span.stop)
            if (order := self._order(span.file)) is not None:
                rows = order[rows]
            parts.append(source.rows.read(span.file, rows))
        batch = joined(parts)
        return batch if source.to_batch is None else source.to_batch(batch)

    def _order(self, file: int) -> np.ndarray | None:
        """The shuffled rows of a file in this epoch; ``None`` if they keep their order."""
        source, key = self._source, (self._epoch, file)
        if source.seed is not None and self._shuffled[0] != key:
            draw = np.random.default_rng([source.seed, *key])
            self._shuffled = key, source.rows.shuffled(file, draw)
        return self._shuffled[1]


def reading_of(batches: Any, placement: Placement) -> Any:
    """What this process reads of sharded rows under a placement; other batches are as they are."""
    if isinstance(batches, ShardedRows | OwnBatches):
        return batches.reading(Group.of(placement))
    return batches


def shard(
    source: Any,
    by: By = "auto",
    *,
    batch_size: int | None = None,
    seed: int | None = None,
    uneven: Uneven = "pad",
    parse: Parse | None = None,
    to_batch: Callable[[Any], Any] | None = None,
) -> Any:
    """A source of which every process reads its own part, for ``fit`` and ``Trainer``.

    ``source`` is a tuple or dict of arrays, a dataset with ``len`` and an index that yields single
    rows (Grain's ``MapDataset``), a Keras ``PyDataset`` with batches of one size, or files: paths
    or patterns of ``.parquet`` (a dict of columns) or ``.array_record`` (through Grain; ``parse``
    makes arrays of a record). ``batch_size`` is that of all processes together, of a ``PyDataset``
    that of its batches unless given; ``to_batch`` makes of a stacked batch what ``fit`` takes,
    ``(x, y)``.

    ``by="file"`` deals whole files out, ``"row"`` rows; ``"auto"`` takes files where each process
    gets one, and ``"off"`` lets every process read all rows. ``seed`` shuffles every epoch: rows,
    of Parquet files their order, of a ``PyDataset`` its batches. The rows left at the end, fewer
    than a batch, are read by every process and trained on with the numbers of one device
    (``uneven="pad"``), or dropped. The position in a checkpoint is what is left of the epoch, and
    any number of processes goes on from it; each row is read once.

    Sources that yield batches in an order of their own (``tf.data``, generators, Grain's
    ``IterDataset``) are read whole by every process, which keeps its rows of each batch. To read
    less, pass a function that makes them, ``make(index, count)``, with ``uneven="drop"``: it
    yields the batches of process ``index`` of ``count``, with its rows only.
    Raises :class:`~meshwright.DataError`.

    >>> import numpy as np, meshwright as mw
    >>> x = np.arange(12.0)
    >>> rows = mw.shard((x, 2 * x), batch_size=4)
    >>> rows
    mw.shard(12 rows, by='auto', batch_size=4, seed=None, uneven='pad')
    >>> [batch.arrays[0].tolist() for batch in rows.reading(Group(1, 2))]
    [[2.0, 3.0], [6.0, 7.0], [10.0, 11.0]]
    """
    make: Any = source
    is_function = inspect.isroutine(source) or isinstance(source, functools.partial)
    rows = None if is_function else row_source(source, parse)
    faults = []
    if by not in get_args(By):
        faults.append(f"by must be one of {get_args(By)}; received {by!r}.")
    if uneven not in get_args(Uneven):
        faults.append(f"uneven must be 'pad' or 'drop'; received {uneven!r}.")
    if is_function and uneven != "drop":
        faults.append(
            f"uneven must be 'drop' for a function that makes batches; received {uneven!r}. An "
            "epoch ends where the first process has no batch left."
        )
    if rows is None:
        options = {"batch_size": batch_size, "seed": seed, "parse": parse, "to_batch": to_batch}
        faults += _faults_without_rows(source, is_function, by, options)
    else:
        batch_size = rows.batch_size if batch_size is None else batch_size
        if by == "file" and not rows.has_files:
            faults.append(f"by='file' needs files; {type(source).__name__} has none. Use by='row'.")
        if not isinstance(batch_size, int) or batch_size < 1:
            faults.append(
                "batch_size must be the rows of a batch of all processes, 1 or more; received "
                f"{batch_size!r}."
            )
    if faults:
        raise DataError("\n".join(f"mw.shard: {fault}" for fault in faults))
    if rows is None:
        return OwnBatches(make) if is_function else source
    assert batch_size is not None
    return ShardedRows(rows, by, batch_size, seed, uneven, to_batch)


def _faults_without_rows(
    source: Any, is_function: bool, by: By, options: Mapping[str, Any]
) -> list[str]:
    """The options that only a source of rows supports."""
    refused = [f"{name}=" for name, value in options.items() if value is not None]
    refused += ["by='file'"] if by == "file" else []
    if not refused:
        return []
    keeps = "" if is_function else " (every process keeps its rows of each batch)"
    return [
        f"{', '.join(refused)} needs rows by number or files, and {type(source).__name__} yields "
        f"batches in an order of its own. Leave it out{keeps}, or pass the paths of the files."
    ]


def _rows_here(source: ShardedRows, group: Group) -> int:
    """The rows of a batch that each group reads."""
    number = group.number
    if source.batch_size % number:
        size = source.batch_size // number * number
        raise DataError(
            f"mw.shard: batch_size={source.batch_size} does not divide over {number} processes. "
            f"The nearest sizes that do: {size or number} and {size + number}."
        )
    return source.batch_size // number


def _dealing(source: ShardedRows, group: Group) -> Dealing:
    files = len(source.rows.sizes)
    if source.by == "file" and files < group.number:
        raise DataError(
            f"mw.shard: by='file' gives each process whole files, and there are {files} for "
            f"{group.number} processes. Write at least {group.number} files, or use by='row'."
        )
    if source.by == "file" or (
        source.by == "auto" and source.rows.has_files and files >= group.number
    ):
        return "file"
    return "batch" if source.rows.any_order else "block"


def _whole(source: ShardedRows, epoch: int) -> Spans:
    """All rows of an epoch, in its order of files."""
    sizes = source.rows.sizes
    files = np.arange(len(sizes))
    if source.seed is not None:
        files = np.random.default_rng([source.seed, epoch]).permutation(files)
    return tuple(Span(int(file), 0, sizes[file]) for file in files if sizes[file])
