"""The data of ``fit``, ``evaluate`` and ``predict``: epochs of batches on the mesh."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras

from ... import _compat
from ...data import check_rows
from ...errors import BatchError
from ...placement import Placement
from . import batches

_KERAS_BATCH_SIZE = 32  # where none is given


class Epochs:
    """Epochs of batches, laid out; reads arrays and datasets as Keras does."""

    def __init__(
        self,
        placement: Placement,
        model: keras.Model,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int | None,
        steps: int | None,
        shuffle: bool = False,
        class_weight: Any = None,
        training: bool = False,
    ) -> None:
        self._epochs = _compat.numpy_batches(
            x, y, sample_weight, batch_size, steps, shuffle, class_weight
        )
        self._placement = placement
        self._is_array = _compat.reads_arrays(self._epochs)
        # A generator may fill the same buffer again while the devices still read it.
        self._put = batches.putter(placement, model, copy=not self._is_array)
        self._small_is_fine = self._is_array or not training
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

    def check_batch_size(self, batch_size: int | None) -> None:
        """Raise :class:`BatchError` if the size of a full batch does not divide."""
        if self._is_array:
            check_rows(self._placement, batch_size or _KERAS_BATCH_SIZE)

    def batches(self) -> Iterator[tuple[int, Any]]:
        """``(number, batch on the mesh)`` for one epoch."""
        host = self._epoch()
        if self._peeked is not None:
            host, self._peeked = itertools.chain(*self._peeked), None
        # A dataset whose only batch does not divide was meant to be shared out.
        return enumerate(self._put.each(host, alone_is_last=self._small_is_fine))

    def _epoch(self) -> Iterator[Any]:
        return (batch for _, _, (batch, *_) in self._epochs.enumerate_epoch())
