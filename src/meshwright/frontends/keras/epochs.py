"""The data of ``fit``, ``evaluate`` and ``predict``: epochs of batches on the mesh."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from ... import _compat
from ...checkpoint import Position
from ...data import HostRows, LocalBatch, LocalRows, OwnBatches, Prefetch, ShardedRows
from ...data.fingerprint import noting_first
from ...data.putter import row_count
from ...data.shard import Group
from ...errors import BatchError, DataError
from ...launch.progress import entering
from ...layouts.placement import Placement
from ...run.options import Data
from ...step.steps_per_execution import Together
from ...warn import warn
from . import batches
from .rowwise import Kind, RowWise

SizeFor = Callable[[Any], int]


def chunk_size(chunk: list[Any] | Together) -> int:
    """How many batches there are."""
    return chunk.number if isinstance(chunk, Together) else len(chunk)


class _Odd(NamedTuple):
    """A batch on the host, and why it does not divide."""

    batch: Any
    why: BatchError


class Epochs:
    """Epochs of batches, laid out; reads arrays and datasets as Keras does."""

    def __init__(
        self,
        placement: Placement,
        model: keras.Model,
        data: Data,
        kind: Kind = "train",
    ) -> None:
        self._local = isinstance(data.x, LocalRows)
        self._sharded: _ShardedEpochs | None = None
        if isinstance(data.x, ShardedRows | OwnBatches):
            self._epochs = self._sharded = _ShardedEpochs(data, Group.of(placement), kind)
        else:
            self._epochs = _compat.numpy_batches(
                data.x.source if self._local else data.x,
                data.y,
                data.sample_weight,
                data.batch_size,
                data.steps,
                data.shuffle,
                data.class_weight,
            )
        sharded = self._sharded is not None
        self._is_array = not sharded and _compat.reads_arrays(self._epochs)
        self._is_one_shot = not sharded and _compat.is_one_shot(self._epochs)
        self._is_capped = data.steps is not None
        copy = not (self._is_array or isinstance(data.x, ShardedRows))
        # A generator may fill the same buffer again while the devices still read it.
        self._putter = batches.putter(placement, model, copy=copy)
        self._arrays: Any = None
        if self._is_array and jax.process_count() > 1 and not self._local:
            self._read_by_number(data.steps, data.shuffle)
        self._kind: Kind = kind
        self._row_wise: RowWise | None = None
        self._rows_of_full = 0
        self._warned = False
        # Processes that wait for each other at each batch do so between the same steps; the next
        # item of a generator may depend on what was learned from this one.
        waits = isinstance(data.x, OwnBatches)
        self._prefetch = Prefetch(0) if waits else Prefetch(early=self._is_array)
        self._peeked: tuple[list[Any], Iterator[Any]] | None = None
        self._looked = False
        self.first_facts: dict[str, str] = {}  # of the first batch that chunks() has read

    @property
    def num_batches(self) -> int | None:
        """Batches per epoch, where that is known."""
        return self._epochs.num_batches

    def first_batch(self) -> Any:
        """A batch to build the model for; the first epoch still has it."""
        self._looked = True
        rest = self._epoch()
        for batch in rest:
            if self._is_one_shot:
                self._peeked = [batch], rest
            else:
                self._epochs.reset()
            return _arrays_of(batch)
        raise BatchError("the data holds no batch.")

    def again(self) -> None:
        """Begin the data again, as Keras does before it trains or evaluates even where it need not
        look at a batch: a dataset may lie in another order from then on.

        It keeps no more of a generator than its first two batches.
        """
        if not self._looked:
            self._epochs.reset()
            self._peeked = None
        self._looked = False

    def pad_where(self, row_wise: RowWise) -> None:
        """Pad batches that do not divide where rows leave each other alone."""
        self._row_wise = row_wise

    @property
    def restarts(self) -> bool:
        """Whether every epoch begins at the beginning of the data."""
        return not (self._is_capped or self._is_one_shot)

    def begin(self, epoch: int, start: Position | None) -> None:
        """Begin an epoch of data that is read by its own position, or resume the one at ``start``.

        Other data are drawn again, and what was trained on is left out.
        """
        if self._sharded is not None:
            self._sharded.begin(epoch, start)

    def place(self, batches: int) -> Any:
        """The place in such data after these batches of the epoch, as a value of JSON."""
        return None if self._sharded is None else self._sharded.place(batches)

    def drop_epochs(self, count: int) -> None:
        """Read and drop ``count`` epochs, on which a resumed run has trained before."""
        for _ in range(count):
            for _ in self._host():
                pass

    def batches(self) -> Iterator[tuple[int, Any]]:
        """``(number, batch on the mesh)`` for one epoch.

        A batch that does not divide comes :class:`~meshwright.step.padding.Padded`, or else whole
        on every device.
        """
        entering("input")
        for number, (batch,) in self.chunks():
            entering("step")
            yield number, batch
            entering("input")
        entering("step")  # the last ones are waited for

    def chunks(
        self, skip: int = 0, size_for: SizeFor | None = None, stacked: bool = False
    ) -> Iterator[tuple[int, list[Any] | Together]]:
        """``(number of the first, batches on the mesh)`` for one epoch, several at a time.

        The first ``skip`` batches are left out. ``size_for`` says, of a batch on the host, how many
        to take from it on; the last chunk may be smaller. With ``stacked`` a full chunk of alike
        batches comes as :class:`~meshwright.step.steps_per_execution.Together`.
        """
        # Data that are read by their own position stand there already.
        host = itertools.islice(self._host(), 0 if self._sharded else skip, None)
        if jax.process_count() > 1 and not self.first_facts:
            host = noting_first(host, self.first_facts)
        groups = _groups(host, size_for, copy=not self._is_array)
        number, odd = skip, None
        with contextlib.closing(
            self._prefetch(self._lay_out_all(group, stacked and full) for group, full in groups)
        ) as laid_out:
            for group in laid_out:
                chunk = group
                if not isinstance(group, Together):
                    chunk = []
                    for batch in group:
                        odd = self._warn_of(odd)
                        if isinstance(batch, _Odd):
                            batch, odd = self._divide(batch)
                        chunk.append(batch)
                else:
                    odd = self._warn_of(odd)
                yield number, chunk
                number += chunk_size(chunk)

    def _lay_out_all(self, group: list[Any], stacked: bool) -> list[Any] | Together:
        together = self._putter.together(group) if stacked else None
        if together is None:
            return [self._lay_out(batch) for batch in group]
        self._rows_of_full = self._rows_of_full or row_count(group[0])
        return together

    def _host(self) -> Iterator[Any]:
        """The batches of one epoch on the host; those that were looked at come first."""
        if self._peeked is None:
            return self._epoch()
        host, self._peeked = itertools.chain(*self._peeked), None
        return host

    def _epoch(self) -> Iterator[Any]:
        batches = (_unmatrixed(batch) for _, _, (batch, *_) in self._epochs.enumerate_epoch())
        if self._local:
            return map(LocalBatch, batches)
        return batches if self._arrays is None else map(self._numbered, batches)

    # Batches that do not divide

    def _lay_out(self, batch: Any) -> Any:
        try:
            laid_out = self._putter(batch)
        except BatchError as why:
            if isinstance(batch, LocalBatch):
                raise
            # It is laid out later, when a generator may have filled the buffer again.
            return _Odd(batch if self._is_array else jax.tree.map(np.array, batch), why)
        self._rows_of_full = self._rows_of_full or row_count(batch)
        return laid_out

    def _divide(self, odd: _Odd) -> tuple[Any, str]:
        """The batch on the mesh nevertheless, and what to say if more come after it."""
        rows, padded = row_count(odd.batch), self._putter.padded_rows(odd.batch)
        predicts = self._kind == "predict"
        if predicts and rows < self._rows_of_full:
            padded = self._rows_of_full  # for that many the step is compiled already
        why_not = "of its layout"
        if padded > rows:
            why_not = self._why_not(odd.batch, rows, padded)
        if why_not is None:
            says = f"Each batch like it is padded to {padded} rows."
            laid_out = self._putter.padded(odd.batch, padded, inputs_only=not predicts)
            return laid_out, f"{odd.why} {says}"
        says = f"Every device computes all rows of each batch like it, for rows mix ({why_not})."
        return self._putter(odd.batch, last=True), f"{odd.why} {says}"

    def _why_not(self, batch: Any, rows: int, padded: int) -> str | None:
        if self._row_wise is None:
            return "nothing is known of the model"
        return self._row_wise.why_not(self._kind, batch, rows, padded)

    def _warn_of(self, odd: str | None) -> None:
        """More comes after a batch that does not divide: say so once."""
        if odd is not None and not self._warned:
            warn(odd)
            self._warned = True

    # Arrays of which each process reads its rows

    def _read_by_number(self, steps: int | None, shuffle: Any) -> None:
        """Let Keras cut and shuffle row numbers in place of the arrays."""
        self._arrays, rows, size = _compat.arrays_of(self._epochs)
        self._epochs = _compat.numpy_batches(np.arange(rows), None, None, size, steps, shuffle)

    def _numbered(self, batch: Any) -> Any:
        (numbers,) = batch if isinstance(batch, tuple) else (batch,)

        def rows(of: _compat.Readable) -> HostRows:
            return HostRows(of.read, numbers, of.dims[1:])

        return jax.tree.map(rows, self._arrays, is_leaf=lambda v: isinstance(v, _compat.Readable))


def _groups(
    host: Iterator[Any], size_for: SizeFor | None, copy: bool
) -> Iterator[tuple[list[Any], bool]]:
    """Batches in groups, and whether a group is full; what was read before a failure comes too."""
    for first in host:
        size = size_for(_arrays_of(first)) if size_for else 1
        copy_first = copy and size > 1  # a generator may fill the same buffer again
        group, failure = [_copied(first) if copy_first else first], None
        try:
            while len(group) < size:
                batch = next(host)
                group.append(_copied(batch) if copy else batch)
        except StopIteration:
            pass
        except BaseException as error:
            failure = error
        yield group, len(group) == size > 1
        if failure is not None:
            raise failure


def _arrays_of(batch: Any) -> Any:
    return batch.arrays if isinstance(batch, LocalBatch) else batch


class _ShardedEpochs:
    """The epochs of :func:`meshwright.shard`, with the methods of Keras' epoch iterator."""

    def __init__(self, data: Data, group: Group, kind: Kind) -> None:
        self._source: ShardedRows | OwnBatches = data.x
        names = ("y", "sample_weight", "class_weight", "steps")
        refused = [f"{name}=" for name in names if getattr(data, name) is not None]
        if data.batch_size not in (None, self._source.batch_size):
            refused.append(f"batch_size={data.batch_size}")
        if refused:
            raise DataError(
                f"{', '.join(refused)} is not supported with {self._source!r}: its batches are "
                "(x, y) or (x, y, sample_weight) of its own batch_size, and an epoch is all rows."
            )
        self._reading = self._source.reading(group)
        if kind == "predict" and not self._reading.is_in_order:
            raise DataError(
                f"{self._source!r}: outputs come in the order of rows, and the processes read at "
                "different places. Use by='off' for predict."
            )
        self._before = 0  # batches of the epoch before those that the reading counts

    @property
    def num_batches(self) -> int | None:
        return self._source.num_batches

    def begin(self, epoch: int, start: Position | None) -> None:
        self._reading.begin(epoch)
        self._before = 0
        if start is not None and start.batches:
            if not self._reading.goes_on_from(start.data):
                raise DataError(
                    "the checkpoint was written in the middle of an epoch of other data than "
                    f"{self._source!r}, and has no position in its rows. Resume with that data."
                )
            self._reading.set_state(start.data)
            self._before = start.batches - self._reading.taken

    def place(self, batches: int) -> dict[str, Any]:
        return self._reading.state_after(batches - self._before)

    def enumerate_epoch(self) -> Iterator[tuple[int, int, list[Any]]]:
        for batch in self._reading:
            yield 0, 0, [batch]

    def reset(self) -> None:
        self._reading.begin(0)


def _unmatrixed(batch: Any) -> Any:
    """Keras makes rows of SciPy's sparse matrices ``np.matrix``, which cannot be stacked."""
    return jax.tree.map(lambda v: np.asarray(v) if isinstance(v, np.matrix) else v, batch)


def _copied(batch: Any) -> Any:
    return jax.tree.map(lambda v: np.array(v) if isinstance(v, np.ndarray) else v, batch)
