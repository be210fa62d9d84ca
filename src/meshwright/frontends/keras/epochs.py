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
from ...data import Ahead, HostRows, LocalRows
from ...data.putter import row_count
from ...errors import BatchError
from ...launch.progress import entering
from ...layouts.placement import Placement
from ...run.options import Data
from ...step.several import Together
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
        local = isinstance(data.x, LocalRows)
        self._epochs = _compat.numpy_batches(
            data.x.source if local else data.x,
            data.y,
            data.sample_weight,
            data.batch_size,
            data.steps,
            data.shuffle,
            data.class_weight,
        )
        self._is_array = _compat.reads_arrays(self._epochs)
        self._is_capped = data.steps is not None
        # A generator may fill the same buffer again while the devices still read it.
        self._put = batches.putter(placement, model, copy=not self._is_array, local=local)
        self._local = local
        self._arrays: Any = None
        if self._is_array and jax.process_count() > 1 and not local:
            self._read_by_number(data.steps, data.shuffle)
        self._kind: Kind = kind
        self._row_wise: RowWise | None = None
        self._rows_of_full = 0
        self._warned = False
        self._ahead = Ahead()
        self._peeked: tuple[list[Any], Iterator[Any]] | None = None

    @property
    def num_batches(self) -> int | None:
        """Batches per epoch, where that is known."""
        return self._epochs.num_batches

    def first_batch(self) -> Any:
        """A batch to build the model for; the first epoch has it all the same."""
        rest = self._epoch()
        for batch in rest:
            if _compat.is_one_shot(self._epochs):
                self._peeked = [batch], rest
            else:
                self._epochs.reset()
            return batch
        raise BatchError("the data holds no batch.")

    def pad_where(self, row_wise: RowWise) -> None:
        """Pad batches that do not divide where rows leave each other alone."""
        self._row_wise = row_wise

    @property
    def restarts(self) -> bool:
        """Whether every epoch begins at the beginning of the data."""
        return not (self._is_capped or _compat.is_one_shot(self._epochs))

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
        batches comes as :class:`~meshwright.step.several.Together`.
        """
        host = itertools.islice(self._host(), skip, None)
        groups = _groups(host, size_for, copy=not self._is_array)
        number, odd = skip, None
        with contextlib.closing(
            self._ahead(self._lay_out_all(group, stacked and full) for group, full in groups)
        ) as found:
            for group in found:
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
        together = self._put.together(group) if stacked else None
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
        found = (batch for _, _, (batch, *_) in self._epochs.enumerate_epoch())
        return found if self._arrays is None else map(self._numbered, found)

    # Batches that do not divide

    def _lay_out(self, batch: Any) -> Any:
        try:
            laid_out = self._put(batch)
        except BatchError as why:
            if self._local:
                raise
            # It is laid out later, when a generator may have filled the buffer again.
            return _Odd(batch if self._is_array else jax.tree.map(np.array, batch), why)
        self._rows_of_full = self._rows_of_full or row_count(batch)
        return laid_out

    def _divide(self, odd: _Odd) -> tuple[Any, str]:
        """The batch on the mesh all the same, and what to say if more come after it."""
        rows, padded = row_count(odd.batch), self._put.padded_rows(odd.batch)
        predicts = self._kind == "predict"
        if predicts and rows < self._rows_of_full:
            padded = self._rows_of_full  # for that many the step is compiled already
        why_not = "of its layout"
        if padded > rows:
            why_not = self._why_not(odd.batch, rows, padded)
        if why_not is None:
            says = f"Each batch like it is padded to {padded} rows."
            laid_out = self._put.padded(odd.batch, padded, inputs_only=not predicts)
            return laid_out, f"{odd.why} {says}"
        says = f"Every device computes all rows of each batch like it, for rows mix ({why_not})."
        return self._put(odd.batch, last=True), f"{odd.why} {says}"

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
        size = size_for(first) if size_for else 1
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


def _copied(batch: Any) -> Any:
    return jax.tree.map(lambda v: np.array(v) if isinstance(v, np.ndarray) else v, batch)
