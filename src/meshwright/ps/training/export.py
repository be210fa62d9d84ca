"""A worker's step as bytes: StableHLO that JAX alone runs, without Keras or the model's code.

``jax.export`` makes them: one for the shape of the first batch, and one for any number of rows
where the model allows that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import export as jax_export

from ... import _compat
from ...errors import ModelError
from ...program import Batch, Program, shapes_of
from ...step.platform import export_platform, tracing_for
from .exported import AnyRows, Code, Exported, FindIds
from .gradients import Clip, Parts, StepFunctions, origin, program_of_ids
from .signature import Signature
from .tables import Lookups, NoLookups

if TYPE_CHECKING:
    from ...step.staged_gradients import StagedGradients
    from .worker_layout import WorkerLayout

_ROWS = "rows"  # the symbol for the number of rows


def export_step(
    program: Program,
    batches: Sequence[Batch],
    *,
    lookups: Lookups | None = None,
    clip: Clip | None = None,
    base: dict[str, Any] | None = None,
    any_rows: bool = True,
    local: bool = False,
    predicts: bool = False,
    platforms: Sequence[str] | None = None,
    layout: WorkerLayout | None = None,
) -> Exported:
    """Export a program's step for batches like these.

    ``base`` is what its metrics begin with (0, if not given). With ``local`` the whole step with
    the program's own optimizer is exported, not its gradients; with ``predicts`` the outputs that
    the program's loss returns beside it. ``platforms`` are those of the workers (``"cpu"``,
    ``"cuda"``, ``"tpu"``), else that of this process. ``layout`` is for workers of several devices.
    Raises :class:`~meshwright.ModelError` for a model that cannot be exported or split.

    >>> import optax, numpy as np
    >>> from meshwright import jax_program
    >>> loss = lambda p, batch: jnp.mean((batch @ p["w"]) ** 2)
    >>> program = jax_program(loss, {"w": jnp.ones([3])}, optax.sgd(0.1))
    >>> exported = export_step(program, [np.ones([8, 3], "float32")])
    >>> exported.parts.params, str(exported.codes[0][0]), len(exported.any_rows)
    (('w',), '8x3 float32', 1)
    """
    lookups = lookups or NoLookups()
    first = shapes(batches[0])
    parts = Parts.of(program, first, lookups)
    base = base or {i.path: jnp.zeros(i.dims, i.dtype) for i in program.metrics}
    functions = StepFunctions(program, parts, base, lookups, clip)
    if layout:
        step = layout.step(program)
        functions = replace(functions, on_layouts=step.computed, gradient_of=step.gradient_of)
        if layout.pipeline is not None and not predicts:
            functions = replace(functions, stages=_stages(program, parts, first, layout))
    if local and parts.tables:
        names = ", ".join(table.name for table in parts.tables)
        raise ModelError(
            f"local= does not support tables that travel by rows ({names}): a worker has only the "
            "rows of one batch. Use Tables(embeddings=None), or leave local= out."
        )
    platforms = tuple(platforms or (export_platform(),))
    exporter = _Exporter(program, functions, platforms, local, predicts, layout)
    if parts.tables:
        exporter.check_tables(first)
    codes = {Signature.of(batch): exporter.code(shapes(batch)) for batch in batches}
    lookup_tables = (
        functions.lookup_tables(exporter.params, exporter.state, first) if parts.tables else []
    )
    exported = Exported(program.name, parts, tuple(codes.items()), tuple(lookup_tables))
    row_shards = layout.row_shards(first) if layout else 1
    if layout:
        exported = replace(exported, mesh=layout.mesh, row_shards=row_shards)
    if not any_rows:
        return exported
    steps = tuple(
        exporter.any_rows(signature, shapes(batch), row_shards)
        for signature, batch in _structures(batches).items()
    )
    return replace(exported, any_rows=steps)


def _structures(batches: Sequence[Batch]) -> dict[Signature, Batch]:
    """One batch of each kind, where kinds differ in more than the number of rows."""
    kinds: dict[Signature, tuple[Signature, Batch]] = {}
    for batch in batches:
        signature = Signature.of(batch)
        kind = signature if signature.rows is None else signature.with_rows(0)
        kinds.setdefault(kind, (signature, batch))
    return dict(kinds.values())


def _stages(
    program: Program, parts: Parts, example: Batch, layout: WorkerLayout
) -> StagedGradients | None:
    if parts.tables:
        names = ", ".join(table.name for table in parts.tables)
        raise ModelError(
            f"a pipeline on workers does not support tables that travel by rows ({names}): stages "
            "hold whole weights. Use Tables(embeddings=None), or leave pipeline= out."
        )
    by_stages = layout.stages(program, example)
    return by_stages and by_stages.stages


def shapes(batch: Batch) -> Any:
    """Shapes and dtypes of a batch as it is on devices."""
    signature = Signature.of(batch)
    leaves = [jax.ShapeDtypeStruct(dims, dtype) for dims, dtype in signature.arrays]
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)


class _Exporter:
    """Traces and exports the functions of one program."""

    def __init__(
        self,
        program: Program,
        functions: StepFunctions,
        platforms: tuple[str, ...],
        local: bool,
        predicts: bool,
        layout: WorkerLayout | None,
    ) -> None:
        self._local, self._predicts, self._layout = local, predicts, layout
        self._slots = shapes_of(program.slots)
        self._functions, self._parts = functions, functions.parts
        self._name, self._platforms = program.name, platforms
        self._traced_for = max(platforms, key=lambda platform: platform != "cpu")
        away = {table.name for table in self._parts.tables}
        self.params = shapes_of(i for i in program.params if i.path not in away)
        self.state = shapes_of(program.state)
        self._tables = shapes_of(i for i in program.params if i.path in away)

    def code(self, batch: Any) -> Code:
        """The step for batches of these shapes."""
        leaves, tree = jax.tree.flatten(batch)
        ids, looked_up = self._look_up(tree, leaves)
        positions = [jax.ShapeDtypeStruct(ids_of.shape, jnp.int32) for ids_of in looked_up]
        rows = self._rows(looked_up, batch)
        functions, parts, layout = self._functions, self._parts, self._layout
        # What is looked up is known of the true rows only.
        filling = layout.filling(batch) if layout and not parts.tables else None
        if filling is not None:
            leaves = [
                _with_rows(leaf, filling.rows) if more else leaf
                for leaf, more in zip(leaves, filling.grow, strict=True)
            ]
        state = self.state
        arguments = (
            self.params,
            {path: state[path] for path in self._parts.moving},
            {path: state[path] for path in self._parts.frozen},
            {path: state[path] for path in self._parts.seeds},
            rows,
            positions,
            leaves,
        )

        def whole(leaves: list[Any]) -> Any:
            unflattened = jax.tree.unflatten(tree, leaves)
            return layout.padded(unflattened, batch) if layout and filling else unflattened

        def unflattened(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: function(*args[:-1], whole(args[-1]))

        shardings = layout and layout.arguments(parts, tuple(rows), positions, batch, filling)
        to_measure = layout and (shardings, layout.whole)
        if self._predicts:
            outputs = self._export(unflattened(functions.outputs), arguments, to_measure)
            return Code(b"", b"", ids, filling=filling, outputs=outputs)
        measures = self._export(unflattened(functions.measures), arguments, to_measure)
        if self._local:
            stepped = (*arguments[:4], self._slots, leaves)
            shardings = layout and layout.local(parts, self._slots, batch, filling)
            local = self._export(unflattened(functions.local), stepped, shardings)
            return Code(b"", measures, local=local, filling=filling)
        to_push = layout and (shardings, layout.returned(parts))
        gradients = self._export(unflattened(functions.gradients), arguments, to_push)
        return Code(gradients, measures, ids, filling=filling)

    def _look_up(self, tree: Any, leaves: list[Any]) -> tuple[FindIds, list[Any]]:
        """What finds the ids of a batch, and their shapes."""
        if not self._parts.tables:
            return FindIds(), []
        looking = self._looking(tree)
        looked_up = jax.eval_shape(looking, leaves)
        jaxpr = jax.make_jaxpr(looking)(leaves).jaxpr
        where = _as_they_are(jaxpr)
        return FindIds(self._export(looking, (leaves,)), where, _read(jaxpr, where)), looked_up

    def any_rows(self, signature: Signature, batch: Any, row_shards: int) -> AnyRows:
        """The step for any number of rows of batches like this, as far as there is one."""
        even, why_not = self.open_code(signature, batch, row_shards)
        if row_shards == 1:
            return AnyRows(signature, even, None, why_not)
        uneven, why_not_uneven = self.open_code(signature, batch, 1)
        return AnyRows(signature, even, uneven, why_not or why_not_uneven)

    def open_code(self, signature: Signature, batch: Any, multiple: int) -> tuple[Code | None, str]:
        """The step for any number of rows that is such a multiple, or why there is none."""
        if signature.rows is None:
            return None, "the arrays of a batch differ in their first dims"
        (rows,) = jax_export.symbolic_shape(_ROWS if multiple == 1 else f"{multiple}*{_ROWS}")
        leaves, tree = jax.tree.flatten(batch)
        free = [_with_rows(leaf, rows) for leaf in leaves]
        try:
            return self.code(jax.tree.unflatten(tree, free)), ""
        except Exception as error:  # whatever a model does with a number that it does not know
            return None, f"{type(error).__name__}: {str(error).splitlines()[0]}"

    def check_tables(self, batch: Any) -> None:
        """Raise :class:`~meshwright.ModelError` for tables that are read otherwise than by rows."""
        leaves, tree = jax.tree.flatten(batch)
        functions, tables = self._functions, self._tables

        def ids(batch: list[Any], params: Any, state: Any, tables: Any, unknown: Any) -> Any:
            whole = jax.tree.unflatten(tree, batch)
            return functions.ids(params, state, whole, tables, unknown)

        others = (self.params, self.state, tables, jax.ShapeDtypeStruct((), jnp.float32))
        if program_of_ids(ids, leaves, *others)[1]:
            names = functions.lookup_tables(self.params, self.state, batch)
            computed = {
                name
                for at, name in enumerate(names)
                if program_of_ids(lambda *args, at=at: [ids(*args)[at]], leaves, *others)[1]
            }
            raise ModelError(
                f"model {self._name!r} looks up ids that it computes from its own weights, from "
                "looked-up rows or from random numbers, so they are unknown before a step: in "
                f"{', '.join(map(repr, sorted(computed)))}. Train these tables densely: leave "
                "their layers out of Tables(embeddings=). Random ids may be made in the dataset."
            )
        if used := _read_otherwise(functions, self.params, self.state, tables, leaves, tree):
            raise ModelError(
                "these tables are read as a whole, by a regularizer, by tied weights or by a "
                "layer of your own, so they cannot travel by rows: "
                + ", ".join(repr(name) for name in used)
                + ". Train them densely: name only the other layers in Tables(embeddings=)."
            )

    def _looking(self, tree: Any) -> Callable[[list[Any]], list[Any]]:
        def looking(leaves: list[Any]) -> list[Any]:
            def zeros(shapes: Any) -> Any:  # nothing of them is read, as was checked
                return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

            batch = jax.tree.unflatten(tree, leaves)
            return self._functions.ids(zeros(self.params), zeros(self.state), batch)

        return looking

    def _rows(self, looked_up: list[Any], batch: Any) -> dict[str, Any]:
        """As many rows of each table as there are ids: more cannot be asked for."""
        if not looked_up:
            return {}
        names = self._functions.lookup_tables(self.params, self.state, batch)
        rows: dict[str, Any] = {}
        for table in self._parts.tables:
            sizes = [
                ids.size for ids, name in zip(looked_up, names, strict=True) if name == table.name
            ]
            size = sum(sizes[1:], sizes[0]) if sizes else 0
            rows[table.name] = jax.ShapeDtypeStruct((size, table.dim), table.dtype)
        return rows

    def _export(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], shardings: Any = None
    ) -> bytes:
        """``shardings`` are the shardings of arguments and results, on several devices."""
        if shardings is None:
            jitted = jax.jit(function)
        else:
            assert self._layout is not None
            around = self._layout.around(function)
            jitted = jax.jit(around, in_shardings=shardings[0], out_shardings=shardings[1])
        try:
            with tracing_for(self._traced_for):
                exported = jax_export.export(jitted, platforms=self._platforms)(*arguments)
            return bytes(exported.serialize())
        except (ValueError, NotImplementedError) as error:
            raise ModelError(
                f"model {self._name!r} cannot be exported for workers: {error} Write your own "
                "step that builds the model on the worker, and schedule it."
            ) from error


def _with_rows(leaf: Any, rows: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)


def _as_they_are(jaxpr: Any) -> tuple[int | None, ...]:
    """Which array of the batch the ids of each lookup are: whole numbers, of whatever type."""
    where = {id(var): at for at, var in enumerate(jaxpr.invars)}
    sources = [(var, origin(jaxpr, var)) for var in jaxpr.outvars]
    return tuple(
        where.get(id(source)) if source is var or _keeps_keys(source, var) else None
        for var, source in sources
    )


def _keeps_keys(source: Any, ids: Any) -> bool:
    """Whether ids of this type were to be those of the source: not its last bits, say."""
    return jnp.issubdtype(source.aval.dtype, jnp.integer) and ids.aval.dtype.itemsize >= 4


def _read(jaxpr: Any, where: Sequence[int | None]) -> tuple[int, ...]:
    """The arrays of the batch that the other ids are computed from."""
    computed = [number for number, at in enumerate(where) if at is None]
    needed = _compat.without_dead_code(jaxpr, computed)
    read = {id(var) for eqn in needed.eqns for var in eqn.invars} | set(map(id, needed.outvars))
    return tuple(at for at, var in enumerate(needed.invars) if id(var) in read)


def _read_otherwise(
    functions: StepFunctions, params: Any, state: Any, tables: Any, leaves: Any, tree: Any
) -> list[str]:
    """The tables that the loss reads although its lookups were caught."""

    def loss(tables: Any, batch: Any, params: Any, state: Any) -> Any:
        return functions.loss_reading(tables, params, state, jax.tree.unflatten(tree, batch))

    exported = jax_export.export(jax.jit(loss), platforms=("cpu",))(tables, leaves, params, state)
    names = sorted(tables)
    return [names[at] for at in exported.module_kept_var_idx if at < len(names)]
