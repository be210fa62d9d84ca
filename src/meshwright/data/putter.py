"""Batches on the mesh: each array laid out as the placement says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .. import _compat
from ..errors import BatchError
from ..layouts.layout import Layout
from ..layouts.placement import Placement
from ..program import Batch, Label, label_inputs
from ..step.batches import BatchLayouts, is_key
from ..step.padding import Padded
from ..step.steps_per_execution import Together
from .rows import HostRows, LocalBatch


def holds_numbers(array: Any) -> bool:
    """Whether devices can hold an array: not strings, objects or dates; random keys they can."""
    return is_key(array) or np.dtype(array.dtype).kind not in "USOMm"


def not_numbers_text(array: Any) -> str:
    """What is wrong with an array that holds no numbers."""
    return (
        f"dtype {array.dtype}, which devices cannot hold: expected numbers. Convert strings to ids "
        "first."
    )


def symbolic_text(value: Any) -> str:
    """What is wrong with a placeholder where values are wanted."""
    return (
        f"a symbolic tensor of shape {tuple(value.shape)}, which has no values: expected arrays, a "
        "dataset or a generator of batches."
    )


class Putter:
    """Lays batches out; remembers the layouts of each shape of batch.

    ``label`` says which part of the batch each array is, in the order of its leaves. ``copy=False``
    may leave the devices looking at the host's memory, which must then not be written to.

    >>> import numpy as np, meshwright as mw
    >>> put = Putter(Placement.of(mw.create_mesh({"batch": 8})))
    >>> put({"image": np.zeros([16, 4])})["image"].sharding.shard_shape((16, 4))
    (2, 4)
    """

    def __init__(
        self,
        placement: Placement,
        label: Callable[[Batch], list[Label]] = label_inputs,
        copy: bool = True,
    ) -> None:
        self.layouts = BatchLayouts(placement, label)
        self._copy = copy
        self._known: dict[Any, list[Any]] = {}

    def __call__(self, batch: Batch, last: bool = False) -> Batch:
        """The batch on the mesh; a ``last`` one that does not divide gives every device all rows.

        A :class:`LocalBatch` is joined with those of the other processes. Raises
        :class:`BatchError` for another one that does not divide.
        """
        is_local = isinstance(batch, LocalBatch)
        flat, tree = jax.tree.flatten(batch.arrays if is_local else batch)
        flat = [_as_array(value, self._copy) for value in flat]
        for value in flat:
            if not holds_numbers(value):
                raise BatchError(f"an array of the batch has {not_numbers_text(value)}")
        if is_local:
            return jax.tree.unflatten(tree, self._put_local(tree, flat))
        key = (tree, tuple(value.shape for value in flat), last)
        shardings = self._known.get(key)
        if shardings is None:
            layouts = jax.tree.leaves(self.layouts(jax.tree.unflatten(tree, flat), last))
            shardings = self._known[key] = [layout.sharding for layout in layouts]
        return jax.tree.unflatten(tree, _put_all(flat, shardings))

    def together(self, batches: Sequence[Batch]) -> Together | None:
        """Batches of one shape, stacked and laid out at once; ``None`` where that is not possible.

        It is not if shapes differ or do not divide, if other processes hold devices, or if each
        process has rows of its own.

        >>> import numpy as np, meshwright as mw
        >>> put = Putter(Placement.of(mw.create_mesh({"batch": 8})))
        >>> stacked = put.together([np.zeros([16, 4]), np.ones([16, 4])])
        >>> stacked.arrays.shape, stacked.arrays.sharding.shard_shape((2, 16, 4))
        ((2, 16, 4), (2, 2, 4))
        """
        if isinstance(batches[0], LocalBatch):
            return None
        flats, trees = zip(*map(jax.tree.flatten, batches), strict=True)
        columns = list(zip(*flats, strict=True)) if len(set(trees)) == 1 else []
        alike = (
            isinstance(value, np.ndarray) and value.shape == parts[0].shape
            for parts in columns
            for value in parts
        )
        if jax.process_count() > 1 or not columns or not all(alike):
            return None
        key = (trees[0], tuple(parts[0].shape for parts in columns), "together")
        if key not in self._known:
            try:
                layouts = jax.tree.leaves(self.layouts(batches[0], last=False))
            except BatchError:
                return None
            self._known[key] = [_stacked(layout.sharding) for layout in layouts]
        stacked = jax.device_put([np.stack(parts) for parts in columns], self._known[key])
        return Together(jax.tree.unflatten(trees[0], stacked))

    def _put_local(self, tree: Any, flat: list[Any]) -> list[Any]:
        """Arrays of every process's rows from those of this one."""
        key = (tree, tuple(value.shape for value in flat), "local")
        if key not in self._known:
            layouts = self.layouts.for_any_rows(jax.tree.unflatten(tree, flat))
            self._known[key] = [
                (layout.sharding, _shape_of_all(layout, value.shape))
                for layout, value in zip(layouts, flat, strict=True)
            ]
        return [
            _from_own(value, sharding, shape)
            for value, (sharding, shape) in zip(flat, self._known[key], strict=True)
        ]

    def padded_rows(self, batch: Batch) -> int:
        """The next number of rows that every input divides by.

        Raises :class:`BatchError` if another dim does not divide.
        """
        shards = math.lcm(*(layout.num_shards(0) for layout in self.layouts.of_inputs(batch)))
        return -(-row_count(batch) // shards) * shards

    def padded(self, batch: Batch, rows: int, inputs_only: bool = True) -> Padded:
        """The batch on the mesh with ``rows`` rows of each input; other arrays keep theirs.

        The first rows stand in for those that are added: whatever is finite stays so.
        """
        flat, tree = jax.tree.flatten(batch)
        grows, layouts = zip(*self.layouts.padded(batch, inputs_only), strict=True)
        flat = [
            _cycled(value, rows) if more else _as_array(value, self._copy)
            for value, more in zip(flat, grows, strict=True)
        ]
        put = _put_all(flat, [layout.sharding for layout in layouts])
        mesh = self.layouts.placement.mesh.jax_mesh
        return Padded(jax.tree.unflatten(tree, put), row_count(batch), mesh)

    def all_of(self, batches: Iterable[Batch], alone_is_last: bool = True) -> Iterator[Batch]:
        """Every batch on the mesh; only the last one may not divide.

        Where it is the only one, ``alone_is_last`` says whether that is still fine. Raises
        :class:`BatchError` for any other that does not divide.
        """
        odd: Batch | None = None
        count = 0
        for batch in batches:
            count += 1
            if odd is not None:
                self(odd)
            try:
                laid_out = self(batch)
            except BatchError:
                if isinstance(batch, LocalBatch):
                    raise
                odd = batch
            else:
                yield laid_out
        if odd is not None:
            yield self(odd, last=count > 1 or alone_is_last)


def put(value: Any, sharding: Any) -> Any:
    """A host array on the devices of a sharding, of which other processes may hold some.

    Every process passes the same whole value and keeps its own pieces.
    """
    return _put_all([value], [sharding])[0]


def _put_all(values: list[Any], shardings: list[Any]) -> list[Any]:
    if all(sharding.is_fully_addressable for sharding in shardings):
        return jax.device_put(values, shardings)
    return [_from_whole(value, sharding) for value, sharding in zip(values, shardings, strict=True)]


def _from_whole(value: Any, sharding: Any) -> Any:
    """An array over several processes, each of which has the whole value."""
    if is_key(value):
        return _as_key(_from_whole(jax.random.key_data(value), sharding), value)
    host = value if isinstance(value, HostRows) else np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def _from_own(value: Any, sharding: Any, shape: tuple[int, ...]) -> Any:
    """An array over several processes, each of which has its rows of it; a scalar has none."""
    if not is_key(value):
        return jax.make_array_from_process_local_data(sharding, value, shape)
    words = np.asarray(jax.random.key_data(value))
    return _as_key(_from_own(words, sharding, (*shape, *words.shape[value.ndim :])), value)


def _as_key(words: Any, like: Any) -> Any:
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))


def row_count(batch: Batch) -> int:
    """The rows of a batch on the host."""
    return jax.tree.leaves(batch)[0].shape[0]


def _stacked(sharding: Any) -> Any:
    """The sharding with one more dim in front, which is whole."""
    spec = jax.sharding.PartitionSpec(None, *sharding.spec)
    return jax.sharding.NamedSharding(sharding.mesh, spec)


def _shape_of_all(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of all processes' rows together, of which this one holds ``shape``."""
    if not shape:
        return shape
    shards = layout.num_shards(0)
    pieces = layout.sharding.addressable_devices_indices_map((shards, *shape[1:]))
    parts = len({rows.start or 0 for rows, *_ in pieces.values()})
    if shape[0] % parts:
        raise BatchError(
            f"{shape[0]} rows of this process do not divide over its {parts} pieces of "
            f"the batch. The nearest sizes that do: {shape[0] // parts * parts} and "
            f"{-(-shape[0] // parts) * parts}. With mw.LocalRows leave out a smaller last batch at "
            "the source."
        )
    return (shape[0] // parts * shards, *shape[1:])


def _cycled(value: Any, rows: int) -> Any:
    if isinstance(value, HostRows):
        return value.cycled(rows)
    return np.take(np.asarray(value), np.arange(rows) % value.shape[0], axis=0)


def _as_array(value: Any, copy: bool) -> Any:
    if _compat.is_symbolic(value):
        raise BatchError(f"an array of the batch is {symbolic_text(value)}")
    if isinstance(value, jax.Array | HostRows):
        return value
    return np.array(value) if copy else np.asarray(value)
