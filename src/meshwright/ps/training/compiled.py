"""The exported step on a worker: bytes become compiled functions, once per shape of batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .export import Code, Exported
from .signature import Signature, on_devices


class Looked(NamedTuple):
    """Which rows a batch looks up.

    ``unique`` are the ids per table, each once, and ``positions`` of each lookup, in order, where
    among them its ids stand. ``num_rows`` is how many rows of each table the step takes.
    """

    unique: dict[str, np.ndarray]
    positions: list[np.ndarray]
    num_rows: dict[str, int]


class CompiledStep:
    """One exported step for one signature of batches."""

    def __init__(self, exported: Exported, code: Code) -> None:
        self._asked, self._code = exported.asked, code
        self._tables = exported.parts.tables

    @functools.cached_property
    def gradients(self) -> Callable[..., Any]:
        """See :meth:`StepFunctions.gradients`; compiled when first asked for, as all of these."""
        return _function(self._code.gradients)

    @functools.cached_property
    def measures(self) -> Callable[..., Any]:
        """See :meth:`StepFunctions.measures`."""
        return _function(self._code.measures)

    @functools.cached_property
    def local(self) -> Callable[..., Any]:
        """See :meth:`StepFunctions.local`."""
        return _function(self._code.local)

    @functools.cached_property
    def _ids(self) -> Callable[..., Any]:
        return _function(self._code.ids)

    def look(self, leaves: list[Any]) -> Looked:
        """Which rows a batch asks for; its arrays as they are on the host."""
        if not self._tables:
            return Looked({}, [], {})
        asked = self._ids_of(leaves)
        unique: dict[str, np.ndarray] = {}
        positions: list[Any] = [None] * len(asked)
        num_rows: dict[str, int] = {}
        for table in self._tables:
            where = [at for at, name in enumerate(self._asked) if name == table.name]
            flat = [asked[at].reshape(-1) for at in where]
            joined = np.concatenate(flat) if flat else np.zeros([0], np.int64)
            unique[table.name], found = np.unique(joined, return_inverse=True)
            num_rows[table.name] = joined.size
            stops = np.cumsum([part.size for part in flat])[:-1]
            for at, part in zip(where, np.split(found, stops) if flat else [], strict=True):
                positions[at] = part.reshape(asked[at].shape).astype(np.int32)
        return Looked(unique, positions, num_rows)

    def _ids_of(self, leaves: list[Any]) -> list[np.ndarray]:
        if all(at is not None for at in self._code.leaves):
            return [np.asarray(leaves[at]) for at in self._code.leaves if at is not None]
        return [np.asarray(each) for each in self._ids([on_devices(leaf) for leaf in leaves])]


class Compiled:
    """The compiled steps of one model, by signature."""

    def __init__(self, exported: Exported) -> None:
        self._exported = exported
        self._steps: dict[Signature, CompiledStep] = {}

    def step_for(self, signature: Signature) -> CompiledStep:
        """The step for batches like this. Raises :class:`~meshwright.BatchError` if none fits."""
        if signature not in self._steps:
            code = self._exported.code_for(signature)
            same = [step for step in self._steps.values() if step._code is code]
            self._steps[signature] = same[0] if same else CompiledStep(self._exported, code)
        return self._steps[signature]


def padded_rows(rows: np.ndarray, count: int) -> np.ndarray:
    """The rows with zeros behind, ``count`` in all: a step has one size whatever repeats."""
    whole = np.zeros((count, *rows.shape[1:]), rows.dtype)
    whole[: len(rows)] = rows
    return whole


def _function(code: bytes) -> Callable[..., Any]:
    import jax
    from jax import export as jax_export

    return jax.jit(jax_export.deserialize(bytearray(code)).call)
