"""What a worker computes in a step, as pure functions of named arrays.

A worker holds no state of its own but random seeds. Parameters come from the servers and their
gradients go there. State that moves (batch statistics) comes from the servers too, and how far this
batch moved it goes back to be added, as TensorFlow's workers do; so do the counts of the metrics.
Whatever a step changes therefore travels in one push, which is applied once or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from ... import _compat
from ...errors import ArrayError, ModelError
from ...program import Arrays, Aux, Batch, Program, TrainState, shapes_of
from ...step.gradient import Gradient, gradient
from ...step.padding import Padded
from ...step.staged_gradients import StagedGradients
from .tables import Lookups, NoLookups, Table, Taken

Clip = Callable[[Arrays], Arrays]


def _on_one_device(program: Program) -> Gradient:
    return gradient(program, splits_rows_only=True)


@dataclass(frozen=True)
class IdsOf:
    """An array of a batch, by its number, whose values are ids of a table of ``num_rows`` rows."""

    leaf: int
    table: str
    num_rows: int

    def check(self, leaves: Sequence[Any]) -> None:
        """Raise :class:`~meshwright.ArrayError` for ids that the table does not have.

        Ids from ``-num_rows`` to -1 count from the end, as in Keras on JAX. Others would be
        looked up as NaN, and the loss would be NaN from then on.

        >>> IdsOf(0, "words", 10).check([np.array([[3, 12], [9, 0]])])
        Traceback (most recent call last):
            ...
        meshwright.errors.ArrayError: id 12 is out of range for table 'words', which has 10 rows...
        """
        ids = np.asarray(leaves[self.leaf])
        if not ids.size or (ids.max() < self.num_rows and ids.min() >= -self.num_rows):
            return
        wrong = ids[(ids >= self.num_rows) | (ids < -self.num_rows)]
        raise ArrayError(
            f"id {wrong[0]} is out of range for table {self.table!r}, which has {self.num_rows} "
            f"rows: ids must be from 0 to {self.num_rows - 1} ({wrong.size} of {ids.size} ids of "
            "this batch are not). Make the table larger, or map the ids into its range."
        )


@dataclass(frozen=True)
class Parts:
    """Which arrays of a program a worker reads and what it returns of each, by path.

    Of ``params`` it returns gradients, of ``moving`` how far they moved, ``frozen`` never change,
    ``seeds`` are each worker's own; a step draws from them so often that their counters move by
    ``draws``, and a batch that is evaluated moves them by ``draws_held_out``. ``tables`` travel by
    rows. ``metrics`` are counted from 0.
    """

    params: tuple[str, ...]
    moving: tuple[str, ...]
    frozen: tuple[str, ...]
    seeds: tuple[str, ...]
    tables: tuple[Table, ...]
    metrics: tuple[tuple[str, tuple[int, ...]], ...]  # (path, dims), in the order of the counts
    ids: tuple[IdsOf, ...] = ()  # of tables that travel whole
    draws: tuple[int, ...] = ()  # of each seed
    draws_held_out: tuple[int, ...] = ()

    @property
    def num_counts(self) -> int:
        """The length of the vector that metrics are counted in."""
        return sum(math.prod(dims) for _, dims in self.metrics)

    @classmethod
    def of(cls, program: Program, batch: Any, lookups: Lookups | None = None) -> Parts:
        """Those of a program for batches like this one (arrays or their shapes).

        Raises :class:`~meshwright.ModelError` for a model that brings its own training step.
        """
        if program.own_step is not None:
            raise ModelError(
                f"model {program.name!r} overrides train_step, which is not supported: on "
                "parameter servers gradients are computed on workers and applied on servers. "
                "Override compute_loss instead, or schedule your own steps."
            )
        lookups = lookups or NoLookups()
        away = {table.name for table in lookups.tables}
        seeds = tuple(info.path for info in program.state if info.role == "seed")
        traced = _traced(program, batch, lookups, seeds)
        changed = traced.changed
        others = [info.path for info in program.state if info.path not in seeds]
        return cls(
            params=tuple(info.path for info in program.params if info.path not in away),
            moving=tuple(path for path in others if path in changed),
            frozen=tuple(path for path in others if path not in changed),
            seeds=seeds,
            tables=lookups.tables,
            metrics=tuple((info.path, tuple(info.dims)) for info in program.metrics),
            ids=traced.ids,
            draws=traced.draws,
            draws_held_out=_draws_held_out(program, batch, lookups, seeds),
        )


@dataclass(frozen=True, eq=False)
class StepFunctions:
    """The functions that are exported for one program.

    ``base`` is what its metrics begin with and ``clip`` what is done to whole gradients before
    they are pushed. ``on_layouts`` is the program as it is computed on a worker of several devices,
    and ``gradient_of`` makes the gradient of a program there; ``stages`` are those by which
    gradients are taken, if they are.
    """

    program: Program
    parts: Parts
    base: Mapping[str, Any]
    lookups: Lookups
    clip: Clip | None = None
    on_layouts: Program | None = None
    gradient_of: Callable[[Program], Gradient] = _on_one_device
    stages: StagedGradients | None = None

    def gradients(
        self,
        params: Arrays,
        moving: Arrays,
        frozen: Arrays,
        seeds: Arrays,
        rows: Arrays,
        positions: list[Any],
        batch: Batch,
    ) -> tuple[Arrays, Arrays, Arrays, Arrays, Any, Any]:
        """``(gradients, gradients of rows, moves, new seeds, counts of metrics, loss)``.

        ``rows`` holds for each table the rows that this batch looks up, and ``positions`` for each
        lookup, in order, where in them it finds what it asks for.
        """
        with_rows = _with_rows(self._computed, self.parts, self.lookups, positions)
        values = {**params, **{ROWS + t: v for t, v in rows.items()}}
        whole = self._whole({**moving, **frozen, **seeds})
        grads, state, counts, loss = self._taken(with_rows, values, whole, batch)
        if self.clip is not None:
            grads = self.clip(grads)
        moves = {path: state[path] - moving[path] for path in self.parts.moving}
        return (
            {path: grads[path] for path in self.parts.params},
            {t.name: grads[ROWS + t.name] for t in self.parts.tables},
            moves,
            {path: state[path] for path in self.parts.seeds},
            counts,
            loss,
        )

    def _taken(
        self, program: Program, params: Arrays, whole: TrainState, batch: Batch
    ) -> tuple[Arrays, Arrays, Any, Any]:
        """The gradients of a batch, the state after it, counts of metrics, and the loss; by stages
        where the batch divides into micro-batches."""
        if self.stages is not None and not isinstance(batch, Padded):
            rows = jax.tree.leaves(batch)[0].shape[0]
            if isinstance(rows, int) and self.stages.takes(batch):
                whole = whole._replace(params=params)
                grads, state, metrics, logs = self.stages.gradients(whole, batch)
                return grads, state, self._counted(metrics), logs["loss"]
        aux, grads = self.gradient_of(program)(params, whole, batch)
        return grads, aux.state, self._counts(aux, batch), aux.loss

    def measures(self, *arguments: Any) -> Any:
        """The counts of the metrics over one batch; takes what :meth:`gradients` takes."""
        return self._counts(self._evaluated(*arguments), arguments[-1])

    def outputs(self, *arguments: Any) -> Any:
        """What the model returns for one batch of inputs, as a list of arrays."""
        return jax.tree.leaves(self._evaluated(*arguments).outputs)

    def _evaluated(
        self, params: Arrays, moving: Arrays, frozen: Arrays, seeds: Arrays, rows: Arrays,
        positions: list[Any], batch: Batch,
    ) -> Aux:  # fmt: skip
        with_rows = _with_rows(self._computed, self.parts, self.lookups, positions)
        values = {**params, **{ROWS + t: v for t, v in rows.items()}}
        return with_rows.loss(values, self._whole({**moving, **frozen, **seeds}), batch, False)[1]

    def local(
        self,
        params: Arrays,
        moving: Arrays,
        frozen: Arrays,
        seeds: Arrays,
        slots: Arrays,
        batch: Batch,
    ) -> tuple[Arrays, Arrays, Arrays, Arrays, Any, Any]:
        """A whole step with the model's own optimizer.

        ``(params, moving, seeds, slots, counts, loss)``, all new.
        """
        whole = self._whole({**moving, **frozen, **seeds})._replace(slots=slots)
        grads, state, counts, loss = self._taken(self._computed, params, whole, batch)
        new, new_slots = self._computed.update(params, grads, slots)
        return (
            new,
            {path: state[path] for path in self.parts.moving},
            {path: state[path] for path in self.parts.seeds},
            new_slots,
            counts,
            loss,
        )

    def ids(
        self,
        values: Arrays,
        state: Arrays,
        batch: Batch,
        tables: Arrays | None = None,
        unknown: Any = 0.0,
    ) -> list[Any]:
        """The ids of every lookup, in order.

        ``tables``, if given, are the model's own, whole, and ``unknown`` stands for whatever rows
        hold: neither is there before the ids are known, and ids that depend on them show so.
        """
        looked_up: list[tuple[str, Any]] = []
        tables = _hollow(self.parts.tables) if tables is None else tables
        self.loss_reading(tables, values, state, batch, looked_up, unknown)
        return [ids for _, ids in looked_up]

    def lookup_tables(self, values: Arrays, state: Arrays, batch: Batch) -> list[str]:
        """The name of the table of every lookup, in order."""
        looked_up: list[tuple[str, Any]] = []

        def run(values: Arrays, state: Arrays, batch: Batch) -> Any:
            hollow = _hollow(self.parts.tables)
            return self.loss_reading(hollow, values, state, batch, looked_up)

        jax.eval_shape(run, values, state, batch)
        return [name for name, _ in looked_up]

    def loss_reading(
        self,
        tables: Arrays,
        values: Arrays,
        state: Arrays,
        batch: Batch,
        looked_up: list[tuple[str, Any]] | None = None,
        unknown: Any = 0.0,
    ) -> Any:
        """The loss with tables given whole beside caught lookups: who reads them shows here.

        Every lookup is noted in ``looked_up``: its table's name, and the ids.
        """

        def take(name: str, ids: Any) -> Taken:
            if looked_up is not None:
                looked_up.append((name, ids))
            return no_rows(self.parts.tables, name, ids, unknown)

        with self.lookups.taking(take):
            return self.program.loss({**values, **tables}, self._whole(state), batch, True)[0]

    @property
    def _computed(self) -> Program:
        return self.on_layouts or self.program

    def _counts(self, aux: Aux, batch: Batch) -> Any:
        metrics, _ = self.program.measure(aux.metrics, aux, batch)
        return self._counted(metrics)

    def _counted(self, metrics: Arrays) -> Any:
        counted = [
            jnp.ravel(metrics[path] - self.base[path]).astype(jnp.float32)
            for path, _ in self.parts.metrics
        ]
        return jnp.concatenate(counted) if counted else jnp.zeros([0], jnp.float32)

    def _whole(self, state: Arrays) -> TrainState:
        # A loss reads the optimizer only to scale itself, and such optimizers are refused.
        return TrainState({}, state, _zeros(self.program.slots), dict(self.base))


ROWS = "rows of "  # before a table's name, among gradients; no path begins so


def _with_rows(program: Program, parts: Parts, lookups: Lookups, positions: list[Any]) -> Program:
    """The program whose tables are given by the rows that a batch looks up."""

    def loss(values: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        waiting = iter(positions)
        pads = {table.name for table in parts.tables if table.padding_id is not None}
        fixed = {table.name for table in parts.tables if not table.trains}

        def take(name: str, ids: Any) -> Taken:
            del ids  # the positions say the same of the rows that are there
            at = next(waiting)
            rows = jnp.take(values[ROWS + name], at, axis=0, mode="clip")
            if name in fixed:  # their gradients count in no norm, either
                rows = jax.lax.stop_gradient(rows)
            present = at >= 0
            if name in pads:
                rows = jnp.where(present[..., None], rows, 0)
            return Taken(rows, present)

        params = {path: value for path, value in values.items() if not path.startswith(ROWS)}
        with lookups.taking(take):
            return program.loss({**params, **_hollow(parts.tables)}, whole, batch, training)

    return replace(program, loss=loss)


def no_rows(tables: Sequence[Table], name: str, ids: Any, unknown: Any = 0.0) -> Taken:
    """What stands for a lookup where only shapes or ids matter; all of it is ``unknown``."""
    table = next(table for table in tables if table.name == name)
    rows = jnp.full((*ids.shape, table.dim), unknown, table.dtype)
    return Taken(rows, jnp.full(ids.shape, unknown == 0.0, bool))


def program_of_ids(
    ids: Callable[..., list[Any]], inputs: Sequence[Any], *others: Any
) -> tuple[Any, bool]:
    """What computes the ids of lookups, as a jaxpr, and whether it reads more than ``inputs``.

    Raises :class:`~meshwright.ModelError` for ids that are made inside of a transformation.
    """
    whole = jax.make_jaxpr(ids)(list(inputs), *others)
    if any(isinstance(const, Tracer) for const in whole.consts):
        raise ModelError(
            "the model looks up ids that it makes inside of a loop, a branch, a vectorized map or "
            "a checkpoint (keras.ops.scan, cond, vectorized_map, jax.checkpoint), so they are "
            "unknown before a step. Look them up outside of it, or train the table densely: leave "
            "its layer out of Tables(embeddings=)."
        )
    jaxpr = _compat.without_dead_code(whole)
    read = {id(var) for eqn in jaxpr.eqns for var in eqn.invars} | set(map(id, jaxpr.outvars))
    return jaxpr, any(id(var) in read for var in jaxpr.invars[len(inputs) :])


def _hollow(tables: tuple[Table, ...]) -> Arrays:
    """Zeros in place of tables that the model has as parameters; nothing reads them."""
    return {t.name: jnp.zeros((t.rows or 0, t.dim), t.dtype) for t in tables if t.in_model}


def _zeros(infos: Any) -> Arrays:
    return {info.path: jnp.zeros(info.dims, info.dtype) for info in infos}


class _Traced(NamedTuple):
    """The paths of the state that a step changes, the arrays of a batch that are ids, and how far
    it moves the counter of each seed."""

    changed: set[str]
    ids: tuple[IdsOf, ...]
    draws: tuple[int, ...]


def _traced(program: Program, batch: Any, lookups: Lookups, seeds: Sequence[str]) -> _Traced:
    """What one trace of a step shows.

    What a step does not change it returns as it came in. Ids are followed back through casts.
    """
    try:
        return _trace(program, batch, lookups, seeds, watch=True)
    except jax.errors.UnexpectedTracerError:  # looked up inside of a transformation of the model's
        return _trace(program, batch, lookups, seeds, watch=False)


def _trace(
    program: Program, batch: Any, lookups: Lookups, seeds: Sequence[str], *, watch: bool
) -> _Traced:
    params = shapes_of(program.params)
    state = shapes_of(program.state)
    tables: list[tuple[str, int]] = []

    def take(name: str, ids: Any) -> Taken:
        return no_rows(lookups.tables, name, ids)

    def run(state: Arrays, params: Arrays, batch: Any) -> tuple[Arrays, list[Any]]:
        looked_up: list[Any] = []

        def note(name: str, num_rows: int, ids: Any) -> None:
            tables.append((name, num_rows))
            looked_up.append(ids)

        with lookups.taking(take), lookups.watching(note) if watch else nullcontext():
            whole = TrainState({}, state, _zeros(program.slots), _zeros(program.metrics))
            return program.loss(params, whole, batch, True)[1].state, looked_up

    traced = jax.make_jaxpr(run)(state, params, batch)
    jaxpr = traced.jaxpr
    outputs = jaxpr.outvars[: len(state)], jaxpr.outvars[len(state) :]
    after = dict(zip(sorted(state), outputs[0], strict=True))
    changed = {
        path
        for (path, new), before in zip(after.items(), jaxpr.invars, strict=False)
        if before is not new
    }
    leaves = jaxpr.invars[len(state) + len(params) :]
    sources = [origin(jaxpr, var) for var in outputs[1]]
    ids = {
        IdsOf(at, *table)
        for table, source in zip(tables, sources, strict=True)
        for at, leaf in enumerate(leaves)
        if leaf is source
    }
    in_order = tuple(sorted(ids, key=lambda one: (one.leaf, one.table)))
    return _Traced(changed, in_order, _draws(traced, _numbers(state, seeds)))


def _draws_held_out(
    program: Program, batch: Any, lookups: Lookups, seeds: Sequence[str]
) -> tuple[int, ...]:
    """How far a batch that is evaluated, or predicted, moves the counter of each seed."""
    if not seeds:
        return ()

    def take(name: str, ids: Any) -> Taken:
        return no_rows(lookups.tables, name, ids)

    def run(state: Arrays, params: Arrays, batch: Any) -> Arrays:
        with lookups.taking(take):
            whole = TrainState({}, state, _zeros(program.slots), _zeros(program.metrics))
            return program.loss(params, whole, batch, False)[1].state

    state = shapes_of(program.state)
    traced = jax.make_jaxpr(run)(state, shapes_of(program.params), batch)
    return _draws(traced, _numbers(state, seeds))


def _numbers(state: Arrays, paths: Sequence[str]) -> list[int]:
    """The number of each of these among the arguments of a traced function of the state."""
    return [sorted(state).index(path) for path in paths]


def _draws(traced: Any, seeds: Sequence[int]) -> tuple[int, ...]:
    """How far one step moves the last number of each seed, its counter: by as many as it draws.

    ``seeds`` are the numbers of their arguments and results. 1 each where what a step draws depends
    on what it computes.
    """
    jaxpr = _compat.without_dead_code(traced, seeds)
    read = {id(var) for eqn in jaxpr.eqns for var in eqn.invars} | set(map(id, jaxpr.outvars))
    if any(id(var) in read for n, var in enumerate(jaxpr.invars) if n not in seeds):
        return (1,) * len(seeds)
    zeros = [
        np.zeros(var.aval.shape, var.aval.dtype) if n in seeds else np.zeros(())
        for n, var in enumerate(jaxpr.invars)
    ]
    after = jaxpr_as_fun(ClosedJaxpr(jaxpr, traced.consts))(*zeros)
    by_number = dict(zip(sorted(seeds), after, strict=True))
    return tuple(int(np.ravel(np.asarray(by_number[n]))[-1]) for n in seeds)


def origin(jaxpr: Any, var: Any) -> Any:
    """The variable that this one is, but for its dtype."""
    makers = {id(out): eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    while (eqn := makers.get(id(var))) is not None and eqn.primitive.name in _CASTS:
        (var,) = eqn.invars
    return var


_CASTS = ("convert_element_type", "copy")
