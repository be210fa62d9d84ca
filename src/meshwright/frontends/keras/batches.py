"""Batches of a Keras model: which part is which, how each lies, and the smaller last one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import keras
import numpy as np

from ...errors import BatchError, LayoutError
from ...layout import Layout
from ...placement import Placement
from ...program import Batch
from .pending import put as put_array


class Putter:
    """Lays the batches of one model out; remembers the layouts of each shape of batch."""

    def __init__(self, placement: Placement, names: tuple[str, ...] = ()) -> None:
        self._placement = placement
        self._names = names
        self._known: dict[Any, list[Any]] = {}

    def __call__(self, batch: Batch, last: bool = False) -> Batch:
        """The batch on the mesh; a ``last`` one that does not divide gives every device all rows.

        Raises :class:`BatchError` for another one that does not divide.
        """
        flat, tree = jax.tree.flatten(batch)
        flat = [_as_array(value) for value in flat]
        key = (tree, tuple(value.shape for value in flat), last)
        layouts = self._known.get(key)
        if layouts is None:
            layouts = self._shardings(jax.tree.unflatten(tree, flat), last)
            self._known[key] = layouts
        if all(sharding.is_fully_addressable for sharding in layouts):
            return jax.tree.unflatten(tree, jax.device_put(flat, layouts))
        placed = [put_array(v, s) for v, s in zip(flat, layouts, strict=True)]
        return jax.tree.unflatten(tree, placed)

    def _shardings(self, batch: Batch, last: bool) -> list[Any]:
        try:
            return _shardings(self._placement, batch, self._names)
        except BatchError:
            if not last:
                raise
            return _shardings(_whole_rows(self._placement), batch, self._names)


def with_last(batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Each batch, and whether it is the last; the next one is read ahead."""
    nothing = object()
    waiting: Any = nothing
    for batch in batches:
        if waiting is not nothing:
            yield waiting, False
        waiting = batch
    if waiting is not nothing:
        yield waiting, True


def check_rows(placement: Placement, rows: int) -> None:
    """Raise :class:`BatchError` if so many rows do not divide over the batch axes."""
    bare = replace(placement, inputs=(), targets=())
    bare.input_layout(None, 0, (rows,))


def by_shape(placement: Placement, dims: tuple[int, ...]) -> Layout:
    """The layout of a batch of which only the dims are known; whole where it does not divide."""
    try:
        return placement.input_layout(None, 0, dims)
    except BatchError:
        return Layout.replicated(placement.mesh, len(dims))


def refuse_named_inputs(placement: Placement) -> None:
    """Keras' own loops know a batch by its shape only, not which input it is."""
    if placement.inputs or placement.targets:
        raise LayoutError(
            "this strategy lays inputs or targets out one by one (inputs=, targets=), and Keras' "
            "own fit, evaluate and predict cannot say which input is which. Use "
            "strategy.fit(model, ...), strategy.evaluate and strategy.predict."
        )


def input_names(model: keras.Model | None) -> tuple[str, ...]:
    """Names of the inputs of a Functional or Sequential model, in order; else none."""
    inputs = getattr(model, "inputs", None) if model is not None else None
    return tuple(tensor.name for tensor in jax.tree.leaves(inputs)) if inputs else ()


@contextlib.contextmanager
def uneven_kept_whole(placement: Placement, model: keras.Model) -> Iterator[None]:
    """While tracing inside: no activation is split over rows or columns that do not divide."""
    yield


def _leaves(part: Any, names: tuple[str, ...]) -> list[tuple[str | None, Any]]:
    """``(name, array)`` of each array of one part; a dict's keys are names, else Keras' names."""
    if isinstance(part, Mapping):
        paths = jax.tree_util.tree_flatten_with_path(part)[0]
        return [(getattr(path[0], "key", None), value) for path, value in paths]
    flat = jax.tree.leaves(part)
    named = names if len(names) == len(flat) else (None,) * len(flat)
    return list(zip(named, flat, strict=True))


def _whole_rows(placement: Placement) -> Placement:
    """The same placement with the first dim of every input and target whole."""

    def whole(layouts: tuple[tuple[str | int, Layout], ...]) -> Any:
        return tuple((key, Layout([None, *layout.specs[1:]])) for key, layout in layouts)

    return replace(
        placement, batch=None, inputs=whole(placement.inputs), targets=whole(placement.targets)
    )


def _shardings(placement: Placement, batch: Batch, names: tuple[str, ...]) -> list[Any]:
    """A sharding for every array of the batch, in the order of its leaves."""
    parts = batch if isinstance(batch, tuple) else (batch,)
    kinds = [placement.input_layout, *[placement.target_layout] * (len(parts) - 1)]
    return [
        layout(name, position, value.shape).sharding
        for kind, (layout, part) in enumerate(zip(kinds, parts, strict=True))
        for position, (name, value) in enumerate(_leaves(part, names if kind == 0 else ()))
    ]


def _as_array(value: Any) -> Any:
    return value if isinstance(value, np.ndarray | jax.Array) else np.asarray(value)
