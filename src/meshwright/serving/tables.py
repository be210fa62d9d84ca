"""Tables on parameter servers: a forward pass is given the rows that its batch looks up.

The traced model says which ids are looked up in which table. Rows come from the files of a
checkpoint, which may be larger than memory, or from the servers beside training; either way only
those that a batch asks for. They enter the compiled forward pass as inputs that clients do not see.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..checkpoint import CheckpointInfo
from ..errors import CheckpointError, MeshwrightError, ModelError, NotReadyError, RequestError
from ..program import Program, TrainState, shapes_of
from .api import TensorSpec
from .averages import AVERAGE

_WAIT_S = 4.0  # for an answer of a server: clients hear of a silent one within 5 s
_ANY = 2  # stands for any number of rows, and of ragged dims, in a trace


class Rows(Protocol):
    """One state of the tables."""

    def lookup(self, table: str, ids: np.ndarray) -> np.ndarray:
        """The rows of these ids, each of which the table has."""
        ...


@dataclass(frozen=True, eq=False)
class Lookup:
    """One place of a model that looks ids up; ``leaf`` is the input that holds them unchanged."""

    table: Any  # a meshwright.ps.training.tables.Table
    leaf: int | None

    def padding(self, ids: np.ndarray) -> np.ndarray:
        """Which of these ids stand for none."""
        padding_id = self.table.padding_id
        return np.zeros(ids.shape, bool) if padding_id is None else ids == padding_id

    def outside(self, ids: np.ndarray) -> np.ndarray:
        """Which of these ids the table cannot have."""
        if self.table.rows is None:
            return np.zeros(ids.shape, bool)
        return ((ids < 0) | (ids >= self.table.rows)) & ~self.padding(ids)


@dataclass(frozen=True, eq=False)
class TableInputs:
    """What the lookups of a model need beside its inputs.

    ``ids`` finds the ids of each lookup in the inputs of a batch. ``layers`` are the layers of the
    tables by name. ``computed`` are the inputs, by number, that the model also computes with.
    """

    lookups: tuple[Lookup, ...]
    layers: Mapping[str, Any]
    ids: Callable[[list[Any]], list[Any]]
    computed: frozenset[int]

    @classmethod
    def of(cls, program: Program, lookups: Any, inputs: Sequence[Any], tree: Any) -> TableInputs:
        """Those of a program for inputs of these shapes, and of this structure.

        Raises :class:`ModelError` where a model computes ids from its own weights.
        """
        import jax

        from ..ps.training.gradients import no_rows, origin, program_of_ids

        tables = {table.name: table for table in lookups.tables}
        assert program.predict is not None
        predict, names = program.predict, list[str]()

        def ids(arrays: list[Any], params: Any, state: Any, unknown: Any = 0.0) -> list[Any]:
            looked_up: list[tuple[str, Any]] = []

            def take(name: str, ids: Any) -> Any:
                looked_up.append((name, ids))
                return no_rows(lookups.tables, name, ids, unknown)

            with lookups.taking(take):
                predict(params, state, (jax.tree.unflatten(tree, arrays),))
            names[:] = [name for name, _ in looked_up]
            return [ids for _, ids in looked_up]

        def outputs(arrays: list[Any], params: Any, state: Any) -> Any:
            with lookups.taking(lambda name, ids: no_rows(lookups.tables, name, ids)):
                return predict(params, state, (jax.tree.unflatten(tree, arrays),))[0]

        def zeros(infos: Any) -> Any:
            return {i.path: jax.numpy.zeros(i.dims, i.dtype) for i in infos}

        def of_inputs(arrays: list[Any]) -> list[Any]:
            return ids(arrays, zeros(program.params), zeros(program.state))

        params, state = shapes_of(program.params), shapes_of(program.state)
        unknown = jax.ShapeDtypeStruct((), "float32")
        jaxpr, reads_more = program_of_ids(ids, inputs, params, state, unknown)
        if reads_more:
            raise ModelError(
                f"model {program.name!r} looks up ids that it computes from its own weights or "
                "from looked-up rows, so they are unknown before a batch is computed, which is not "
                "supported."
            )
        leaves = {id(var): number for number, var in enumerate(jaxpr.invars[: len(inputs)])}
        places = [leaves.get(id(origin(jaxpr, var))) for var in jaxpr.outvars]
        return cls(
            tuple(Lookup(tables[n], leaf) for n, leaf in zip(names, places, strict=True)),
            lookups.served,
            jax.jit(of_inputs),
            _read_inputs(jax.make_jaxpr(outputs)(list(inputs), params, state), len(inputs)),
        )

    # The arrays that are added to those of a batch

    def specs(self, inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """The inputs as clients see them: keys of hash tables have 64 bits, unless the model
        computes with them, too, in a type that may have fewer."""
        keys = {lookup.leaf for lookup in self.lookups if lookup.table.rows is None}
        keys -= self.computed
        return tuple(
            replace(spec, dtype="int64") if number in keys else spec
            for number, spec in enumerate(inputs)
        )

    def shapes(self, inputs: Sequence[Any]) -> list[Any]:
        """Shapes and dtypes of what is added to inputs of these shapes."""
        import jax

        added = []
        ids = jax.eval_shape(self.ids, list(inputs))
        for table, at in zip((lookup.table for lookup in self.lookups), ids, strict=True):
            rows = jax.ShapeDtypeStruct((*at.shape, table.dim), table.dtype)
            added += _parts(table, rows, jax.ShapeDtypeStruct(at.shape, "bool"))
        return added

    def nested(self, arrays: Sequence[Any]) -> list[list[Any]]:
        """What was added, for each lookup."""
        remaining = iter(arrays)
        return [[next(remaining) for _ in _parts(lookup.table, 0, 0)] for lookup in self.lookups]

    def added(self, rows: Rows, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The rows for a batch, and which ids are not padding; each table is asked once.

        Ids that the model computes and the table does not have give NaN, as in Keras on JAX.
        """
        pairs = list(zip(self.lookups, self._ids_of(arrays), strict=True))
        present = [~(lookup.padding(ids) | lookup.outside(ids)) for lookup, ids in pairs]
        keys: dict[str, list[np.ndarray]] = {}
        for (lookup, ids), take in zip(pairs, present, strict=True):
            keys.setdefault(lookup.table.name, []).append(ids[take])
        unique = {name: np.unique(np.concatenate(own)) for name, own in keys.items()}
        rows_of = {name: rows.lookup(name, own) for name, own in unique.items()}
        added = []
        for (lookup, ids), take in zip(pairs, present, strict=True):
            table = lookup.table
            values = np.zeros((*ids.shape, table.dim), table.dtype)
            values[take] = rows_of[table.name][np.searchsorted(unique[table.name], ids[take])]
            values[lookup.outside(ids)] = np.nan
            added += _parts(table, values, ~lookup.padding(ids))
        return added

    def _ids_of(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        import jax

        computed: Any = {}
        if any(lookup.leaf is None for lookup in self.lookups):
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                computed = self.ids(list(arrays))
        return [
            np.asarray(computed[number] if lookup.leaf is None else arrays[lookup.leaf], np.int64)
            for number, lookup in enumerate(self.lookups)
        ]

    def check(self, specs: Sequence[TensorSpec], arrays: Sequence[np.ndarray]) -> None:
        """Raise :class:`RequestError` for ids that a table does not have; lists all inputs."""
        faults = []
        for lookup in self.lookups:
            if lookup.leaf is None:
                continue
            ids, table = arrays[lookup.leaf], lookup.table
            if (wrong := ids[lookup.outside(ids)]).size:
                faults.append(
                    f"input {specs[lookup.leaf].name!r}: id {wrong[0]} is out of range for table "
                    f"{table.name!r}, whose ids are 0 to {table.rows - 1} ({wrong.size} of "
                    f"{ids.size} ids of the request)"
                )
        if faults:
            raise RequestError("; ".join(faults) + ".")

    # Where rows come from

    def saved(self, info: CheckpointInfo) -> Rows:
        """The rows of a checkpoint. Raises :class:`CheckpointError` where it has other tables."""
        from ..ps.training.saving import check_tables_of
        from ..ps.training.table_files import SavedRows

        directory = check_tables_of(info, self._specs_of_tables())
        if directory is None:
            raise CheckpointError(
                f"{info.directory} was saved without tables, and the model has "
                f"{', '.join(self.layers)}. Train it with strategy.fit(checkpoint=)."
            )
        return SavedRows(directory, self.layers, AVERAGE)

    def exported(self, directory: Path) -> Any:
        """The rows of an export. Raises :class:`CheckpointError` where it has other tables."""
        from ..ps.training.table_files import SavedRows, check_tables, read_index

        check_tables(read_index(directory), self._specs_of_tables(), directory)
        return SavedRows(directory, self.layers)

    def _specs_of_tables(self) -> dict[str, Any]:
        from ..ps.shared.placing import VariableSpec

        return {
            layer.name: VariableSpec(
                layer.name, (layer.table.rows or 0, layer.dim), "float32", (), layer.size == "hash"
            )
            for layer in self.layers.values()
        }


def _read_inputs(jaxpr: Any, count: int) -> frozenset[int]:
    """The first arguments, by number, that results depend on."""
    from .. import _compat

    jaxpr = _compat.without_dead_code(jaxpr)
    read = {id(var) for eqn in jaxpr.eqns for var in eqn.invars} | {id(v) for v in jaxpr.outvars}
    return frozenset(n for n, var in enumerate(jaxpr.invars[:count]) if id(var) in read)


def _parts(table: Any, rows: Any, present: Any) -> list[Any]:
    return [rows] if table.padding_id is None else [rows, present]


class ModelTables:
    """A Keras model with tables on parameter servers, while its forward pass is put together."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.lookups: Any = None
        self._plain: Program | None = None

    @classmethod
    def of(cls, model: Any) -> ModelTables | None:
        """``None`` for a model without such tables."""
        module: Any = sys.modules.get("meshwright.ps.training.embeddings")
        if module is None:
            return None
        from .. import _compat

        layers = _compat.layers_inside(model)
        return cls(model) if any(isinstance(layer, module.Embedding) for layer in layers) else None

    def building(self) -> AbstractContextManager[None]:
        """While the block runs, lookups give zeros: shapes are looked at."""
        from ..ps.training.embeddings import building

        return building()

    def given_rows(self, program: Program, variables: Any) -> Program:
        """The program that takes ``(inputs, rows)``, rows as :meth:`TableInputs.nested` says."""
        import jax.numpy as jnp

        from ..ps.training.embeddings import KerasLookups
        from ..ps.training.tables import Taken

        assert program.predict is not None
        plain = program.predict
        self._plain, self.lookups = program, KerasLookups(self._model, variables, None)

        def predict(params: Any, state: Any, batch: Any) -> Any:
            inputs, looked_up = batch
            remaining = iter(looked_up)

            def take(name: str, ids: Any) -> Taken:
                del name
                rows, *present = next(remaining)
                return Taken(rows, present[0] if present else jnp.ones(ids.shape, bool))

            with self.lookups.taking(take):
                return plain(params, state, (inputs,))

        return replace(program, predict=predict)

    def inputs(self, like: Any) -> TableInputs:
        """What its lookups need beside inputs like these."""
        import jax

        assert self._plain is not None
        leaves, tree = jax.tree.flatten(like)
        shapes = [
            jax.ShapeDtypeStruct([_ANY if n is None else n for n in leaf.shape], leaf.dtype)
            for leaf in leaves
        ]
        return TableInputs.of(self._plain, self.lookups, shapes, tree)


# Beside training


def is_parameter_server(strategy: Any) -> bool:
    """Whether it is a :class:`~meshwright.ParameterServer`."""
    module: Any = sys.modules.get("meshwright.ps.strategy")
    return module is not None and isinstance(strategy, module.ParameterServer)


class OnServers:
    """The values of a model on the servers of the strategy that trains it, newest at each call.

    What the servers do not have yet is made there, with the values of the model.
    """

    def __init__(self, strategy: Any, model: Any, variables: Any) -> None:
        from ..ps.training.embeddings import KerasLookups
        from ..ps.training.server_variables import ServerVariables

        lookups = KerasLookups(model, variables, None)
        places = ServerVariables(strategy, model.name, variables, lookups)
        roles = {path: variables.infos[id(value)].role for path, value in variables.state.items()}
        state = [path for path, role in roles.items() if role != "seed"]
        self._name = model.name
        self._seeds = {p: v for p, v in variables.state.items() if p not in state}
        self._specs = (
            places.of(list(variables.params), variables.params),
            places.of(state, variables.state),
        )
        self._tables = places.of_tables([table.name for table in lookups.tables])
        self._strategy = strategy
        self._servers: Any = None  # until they are asked
        self._lock = threading.Lock()  # a channel belongs to one thread at a time

    def values(self) -> TrainState:
        """Parameters and state; seeds are the model's own. Raises :class:`NotReadyError`."""
        params, state = (
            dict(zip(specs, self.ask(lambda s, of=specs: s.read(list(of.values()))), strict=True))
            for specs in self._specs
        )
        seeds = {path: np.asarray(variable.value) for path, variable in self._seeds.items()}
        return TrainState(params, {**state, **seeds}, {}, {})

    def lookup(self, table: str, ids: np.ndarray) -> np.ndarray:
        """The rows of these ids. Raises :class:`NotReadyError` where a server does not answer."""
        return self.ask(lambda servers: servers.lookup(self._tables[table], ids))

    def close(self) -> None:
        """End the connections to the servers; the next question opens them again."""
        with self._lock:
            if self._servers is not None:
                self._servers.close()
                self._servers = None

    @property
    def tables(self) -> Mapping[str, Any]:
        """Where each table lies on the servers."""
        return dict(self._tables)

    def ask(self, do: Callable[[Any], Any]) -> Any:
        """What ``do`` asks of the servers. Raises :class:`NotReadyError`."""
        try:
            with self._lock:
                if self._servers is None:
                    self._servers = self._strategy.connect("serving:0")
                    self._servers.timeout_s = _WAIT_S
                return do(self._servers)
        except MeshwrightError as error:
            raise NotReadyError(
                f"the parameter servers of model {self._name!r} do not answer: {error}"
            ) from error
