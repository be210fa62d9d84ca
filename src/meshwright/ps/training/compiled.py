"""The exported step on a worker: bytes become compiled functions, once per shape of batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export as jax_export

from ... import topology
from ...errors import ArrayError, TopologyError
from ...layouts.mesh import Mesh, create_mesh
from .exported import Code, Exported
from .signature import Signature, on_devices

_PADDING = -1  # the position of an id that stands for none
_FROZEN = 2  # which argument of a step they are


class Looked(NamedTuple):
    """Which rows a batch looks up.

    ``unique`` are the ids per table, each once, and ``positions`` of each lookup, in order, where
    among them its ids stand, -1 for padding. ``num_rows`` is how many rows of each table the step
    takes.
    """

    unique: dict[str, np.ndarray]
    positions: list[np.ndarray]
    num_rows: dict[str, int]


class CompiledStep:
    """One exported step for one signature of batches."""

    def __init__(self, exported: Exported, code: Code, mesh: Mesh | None = None) -> None:
        self._lookup_tables, self._code, self._mesh = exported.lookup_tables, code, mesh
        self._tables = exported.parts.tables

    @functools.cached_property
    def gradients(self) -> Callable[..., Any]:
        """See :meth:`StepFunctions.gradients`; compiled when first asked for, as all of these."""
        return OnDevices(self._code.gradients, self._mesh).call

    @functools.cached_property
    def measures(self) -> Callable[..., Any]:
        return self._measures.call

    @functools.cached_property
    def outputs(self) -> Callable[..., Any]:
        return self._outputs.call

    @functools.cached_property
    def local(self) -> Callable[..., Any]:
        return OnDevices(self._code.local, self._mesh).call

    def filled(self, leaves: list[Any]) -> list[Any]:
        """The arrays of a batch as the step takes them."""
        return leaves if self._code.filling is None else self._code.filling(leaves)

    def put_frozen(self, values: dict[str, Any]) -> Any:
        """What never changes on the devices, once for all steps; it lies there alike in each."""
        reading = self._measures if self._code.measures else self._outputs
        return reading.put(_FROZEN, values)

    @functools.cached_property
    def _outputs(self) -> OnDevices:
        return OnDevices(self._code.outputs, self._mesh)

    @functools.cached_property
    def _measures(self) -> OnDevices:
        return OnDevices(self._code.measures, self._mesh)

    @functools.cached_property
    def _ids(self) -> Callable[..., Any]:
        return OnDevices(self._code.ids.code, None).call

    def look(self, leaves: list[Any]) -> Looked:
        """Which rows a batch asks for; its arrays as they are on the host."""
        if not self._tables:
            return Looked({}, [], {})
        ids = self._ids_of(leaves)
        unique: dict[str, np.ndarray] = {}
        positions: list[Any] = [None] * len(ids)
        num_rows: dict[str, int] = {}
        for table in self._tables:
            where = [at for at, name in enumerate(self._lookup_tables) if name == table.name]
            flat = [ids[at].reshape(-1) for at in where]
            joined = np.concatenate(flat) if flat else np.zeros([0], np.int64)
            unique[table.name], places = _unique(joined, table.padding_id)
            num_rows[table.name] = joined.size
            stops = np.cumsum([part.size for part in flat])[:-1]
            for at, part in zip(where, np.split(places, stops) if flat else [], strict=True):
                positions[at] = part.reshape(ids[at].shape).astype(np.int32)
        return Looked(unique, positions, num_rows)

    def _ids_of(self, leaves: list[Any]) -> list[np.ndarray]:
        where = self._code.ids.leaves
        computed: Any = [None] * len(where)
        if None in where:
            computed = self._ids([on_devices(leaf) for leaf in leaves])
            for at in self._code.ids.read:
                self._check_whole(leaves, at, computed)
        # As they came, wherever they are an input: devices cut keys down to 32 bits.
        found = [ids if at is None else leaves[at] for ids, at in zip(computed, where, strict=True)]
        return [np.asarray(ids).astype(np.int64, copy=False) for ids in found]

    def _check_whole(self, leaves: list[Any], at: int, computed: list[Any]) -> None:
        """Raise :class:`~meshwright.ArrayError` where ids were computed from keys cut down."""
        array = np.asarray(leaves[at])
        if array.dtype.kind not in "iu":
            return
        there = [on_devices(leaf) for leaf in leaves]
        is_cut = there[at] != array
        if not is_cut.any():
            return
        # With other numbers in their places ids stay as they are, unless they depend on these.
        there[at] = np.where(is_cut, ~there[at], there[at])
        places = zip(self._lookup_tables, self._code.ids.leaves, strict=True)
        pairs = zip(places, computed, self._ids(there), strict=True)
        tables = [n for (n, leaf), a, b in pairs if leaf is None and not np.array_equal(a, b)]
        if tables:
            raise ArrayError(
                f"the model computes ids of table {', '.join(map(repr, dict.fromkeys(tables)))} "
                f"from key {array[is_cut][0]}, on devices that hold numbers of 32 bits. Make the "
                "keys an input of their own that the layer of the table takes as it is, or map "
                "them to 32 bits in the dataset."
            )


class Compiled:
    """The compiled steps of one model, by signature."""

    def __init__(self, exported: Exported) -> None:
        self._exported = exported
        self._mesh = None if exported.mesh is None else mesh_here(exported.mesh)
        self._steps: dict[Signature, CompiledStep] = {}

    def step_for(self, signature: Signature) -> CompiledStep:
        """The step for batches like this. Raises :class:`~meshwright.BatchError` if none fits."""
        if signature not in self._steps:
            code = self._exported.code_for(signature)
            same = [step for step in self._steps.values() if step._code is code]
            new = CompiledStep(self._exported, code, self._mesh)
            self._steps[signature] = same[0] if same else new
        return self._steps[signature]


def _unique(ids: np.ndarray, padding_id: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The ids without padding, each once, and where among them each id stands.

    >>> _unique(np.array([7, 0, 3, 7]), 0)
    (array([3, 7]), array([ 1, -1,  0,  1]))
    """
    if padding_id is None:
        return np.unique(ids, return_inverse=True)
    present = ids != padding_id
    unique, at = np.unique(ids[present], return_inverse=True)
    positions = np.full(ids.shape, _PADDING, at.dtype)
    positions[present] = at
    return unique, positions


def padded_rows(rows: np.ndarray, count: int) -> np.ndarray:
    """The rows with zeros behind, ``count`` in all: a step has one size whatever repeats."""
    whole = np.zeros((count, *rows.shape[1:]), rows.dtype)
    whole[: len(rows)] = rows
    return whole


def mesh_here(mesh: Mesh) -> Mesh:
    """This mesh on the devices of this process, all of them; one that has devices is as it is.

    Raises :class:`~meshwright.TopologyError` where their number is another.
    """
    if not mesh.is_abstract:
        return mesh
    there = topology.devices()
    if len(there) != mesh.size:
        raise TopologyError(
            f"the worker's strategy needs a mesh of {mesh.size} devices ({mesh.axes_text}), but "
            f"this worker has {len(there)} ({there[0].platform}). {_way_out(mesh, there)}"
        )
    return create_mesh(mesh.axes)


class OnDevices:
    """Exported code as a function; on the devices of a mesh, where it was exported for one."""

    def __init__(self, code: bytes, mesh: Mesh | None) -> None:
        exported = jax_export.deserialize(bytearray(code))
        self._lies: tuple[Any, ...] | None = None
        if mesh is not None:
            flat = exported.in_shardings_jax(mesh.jax_mesh)
            self._lies, _ = jax.tree.unflatten(exported.in_tree, flat)
        self.call: Callable[..., Any] = (
            jax.jit(exported.call)
            if self._lies is None
            else jax.jit(exported.call, in_shardings=self._lies)
        )

    def put(self, argument: int, values: Any) -> Any:
        """The values of one argument on the devices, to be given many times."""
        return jax.device_put(values, None if self._lies is None else self._lies[argument])


def _way_out(mesh: Mesh, there: list[Any]) -> str:
    if there[0].platform == "cpu":
        return (
            f"Start the cluster with LocalCluster(worker_devices={mesh.size}), or workers with the "
            f"environment variable JAX_NUM_CPU_DEVICES={mesh.size}, or make the mesh smaller."
        )
    return (
        f"Use a mesh of {len(there)} devices, or set the devices that each worker sees in its "
        "environment (CUDA_VISIBLE_DEVICES, for example)."
    )
