"""A worker's step as bytes: StableHLO that JAX alone runs, without Keras or the model's code.

``jax.export`` makes them: one for the shape of the first batch, and one for any number of rows
where the model allows that.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import export as jax_export

from ...errors import BatchError, ModelError
from ...program import Batch, Program
from .gradients import Clip, Parts, StepFunctions, shapes_of
from .signature import Signature
from .tables import Lookups, NoLookups

_ROWS = "rows"  # the symbol for the number of rows


@dataclass(frozen=True)
class Code:
    """The step for one signature of batches; ``ids`` is empty where no table travels by rows.

    ``leaves`` says of each lookup which array of the batch its ids are, where they are one as it
    is; then nothing need run to find them.
    """

    gradients: bytes
    measures: bytes
    ids: bytes = b""
    leaves: tuple[int | None, ...] = ()
    local: bytes = b""  # a whole step with the model's own optimizer, where that was asked for


@dataclass(frozen=True)
class Exported:
    """A program's step, exported; a value that may travel.

    ``any_rows`` is the step for any number of rows; where there is none, ``why_not`` says why.
    ``asked`` names the table of every lookup, in order.
    """

    name: str
    parts: Parts
    codes: tuple[tuple[Signature, Code], ...]
    asked: tuple[str, ...] = ()
    any_rows: Code | None = None
    why_not: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all code."""
        return sum(map(len, self._code))

    @functools.cached_property
    def digest(self) -> str:
        """Equal for equal code."""
        return hashlib.blake2b(b"".join(self._code), digest_size=16).hexdigest()

    @property
    def _code(self) -> list[bytes]:
        codes = [code for _, code in self.codes] + ([self.any_rows] if self.any_rows else [])
        return [part for c in codes for part in (c.gradients, c.measures, c.ids, c.local)]

    def code_for(self, signature: Signature) -> Code:
        """The code for batches like this. Raises :class:`~meshwright.BatchError` if none fits."""
        for known, code in self.codes:
            if known == signature:
                return code
        first = self.codes[0][0]
        if self.any_rows is not None and signature.rows is not None:
            if signature == first.with_rows(signature.rows):
                return self.any_rows
            raise BatchError(
                f"a batch holds {signature} ({signature.tree}), but model {self.name!r} was "
                f"exported for {first} ({first.tree}). Only the number of rows may differ."
            )
        raise BatchError(
            f"a batch holds {signature}, but model {self.name!r} was exported for {first}"
            + (f", and cannot be for any number of rows: {self.why_not}" if self.why_not else "")
            + ". Make all batches alike, and drop a smaller last one in dataset_fn."
        )


def export_step(
    program: Program,
    batches: Sequence[Batch],
    *,
    lookups: Lookups | None = None,
    clip: Clip | None = None,
    base: dict[str, Any] | None = None,
    any_rows: bool = True,
    local: bool = False,
    platforms: Sequence[str] | None = None,
) -> Exported:
    """Export a program's step for batches like these.

    ``base`` is what its metrics begin with (0, if not given). With ``local`` the whole step with
    the program's own optimizer is exported, not its gradients. ``platforms`` are those of the
    workers (``"cpu"``, ``"cuda"``, ``"tpu"``), else that of this process. Raises
    :class:`~meshwright.ModelError` for a model that cannot be exported or split.

    >>> import optax, numpy as np
    >>> from meshwright import jax_program
    >>> loss = lambda p, batch: jnp.mean((batch @ p["w"]) ** 2)
    >>> program = jax_program(loss, {"w": jnp.ones([3])}, optax.sgd(0.1))
    >>> exported = export_step(program, [np.ones([8, 3], "float32")])
    >>> exported.parts.params, str(exported.codes[0][0]), exported.any_rows is not None
    (('w',), '8x3 float32', True)
    """
    lookups = lookups or NoLookups()
    first = shapes(batches[0])
    parts = Parts.of(program, first, lookups)
    base = base or {i.path: jnp.zeros(i.dims, i.dtype) for i in program.metrics}
    functions = StepFunctions(program, parts, base, lookups, clip)
    if local and parts.tables:
        names = ", ".join(table.name for table in parts.tables)
        raise ModelError(
            f"tables that travel by rows ({names}) cannot be trained by several local steps: the "
            "rows of later batches are not there. Use embeddings=None, or no local=."
        )
    made = _Exporter(program, functions, tuple(platforms or (jax.default_backend(),)), local)
    if parts.tables:
        made.check_tables(first)
    codes = {Signature.of(batch): made.code(shapes(batch)) for batch in batches}
    open_code, why_not = made.open_code(Signature.of(batches[0]), first, any_rows)
    asked = functions.asked(made.params, made.state, first) if parts.tables else []
    return Exported(program.name, parts, tuple(codes.items()), tuple(asked), open_code, why_not)


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
    ) -> None:
        self._local = local
        self._slots = shapes_of(program.slots)
        self._functions, self._parts = functions, functions.parts
        self._name, self._platforms = program.name, platforms
        away = {table.name for table in self._parts.tables}
        self.params = shapes_of(i for i in program.params if i.path not in away)
        self.state = shapes_of(program.state)
        self._tables = shapes_of(i for i in program.params if i.path in away)

    def code(self, batch: Any) -> Code:
        """The step for batches of these shapes."""
        leaves, tree = jax.tree.flatten(batch)
        ids: bytes = b""
        found: list[Any] = []
        at: tuple[int | None, ...] = ()
        if self._parts.tables:
            looking = self._looking(tree)
            found = jax.eval_shape(looking, leaves)
            at = _as_they_are(looking, leaves)
            ids = self._export(looking, leaves)
        positions = [jax.ShapeDtypeStruct(each.shape, jnp.int32) for each in found]
        rows = self._rows(found, batch)
        state = self.state
        given = (
            self.params,
            {path: state[path] for path in self._parts.moving},
            {path: state[path] for path in self._parts.frozen},
            {path: state[path] for path in self._parts.seeds},
            rows,
            positions,
            leaves,
        )

        def unflattened(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: function(*args[:-1], jax.tree.unflatten(tree, args[-1]))

        functions = self._functions
        measures = self._export(unflattened(functions.measures), *given)
        if self._local:
            stepped = (*given[:4], self._slots, leaves)
            return Code(b"", measures, local=self._export(unflattened(functions.local), *stepped))
        gradients = self._export(unflattened(functions.gradients), *given)
        return Code(gradients, measures, ids, at)

    def open_code(self, signature: Signature, batch: Any, asked: bool) -> tuple[Code | None, str]:
        """The step for any number of rows, or why there is none."""
        if not asked:
            return None, ""
        if signature.rows is None:
            return None, "the arrays of a batch differ in their first dims"
        (rows,) = jax_export.symbolic_shape(_ROWS)
        leaves, tree = jax.tree.flatten(batch)
        free = [jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        try:
            return self.code(jax.tree.unflatten(tree, free)), ""
        except Exception as error:  # whatever a model does with a number that it does not know
            return None, f"{type(error).__name__}: {str(error).splitlines()[0]}"

    def check_tables(self, batch: Any) -> None:
        """Raise :class:`~meshwright.ModelError` for tables that are read otherwise than by rows."""
        leaves, tree = jax.tree.flatten(batch)
        functions, tables = self._functions, self._tables

        def ids(batch: list[Any], params: Any, state: Any) -> Any:
            return functions.ids(params, state, jax.tree.unflatten(tree, batch))

        args = jax.tree.leaves((leaves, self.params, self.state))
        kept = jax_export.export(jax.jit(ids), platforms=self._platforms)(
            leaves, self.params, self.state
        ).module_kept_var_idx
        if beyond := [at for at in kept if at >= len(leaves)]:
            raise ModelError(
                f"model {self._name!r} looks up rows whose ids it computes from its own weights "
                f"({len(beyond)} of {len(args) - len(leaves)} arrays), so they are not known "
                "before a step. Train such tables densely: leave their layers out of embeddings=."
            )
        if used := _read_otherwise(functions, self.params, self.state, tables, leaves, tree):
            raise ModelError(
                "these tables are not only looked up by rows: "
                + ", ".join(repr(name) for name in used)
                + ". A regularizer, tied weights or a layer of your own reads them whole. Train "
                "them densely: name in embeddings= only the layers whose tables travel by rows."
            )

    def _looking(self, tree: Any) -> Callable[[list[Any]], list[Any]]:
        def looking(leaves: list[Any]) -> list[Any]:
            def zeros(shapes: Any) -> Any:  # nothing of them is read, as was checked
                return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

            batch = jax.tree.unflatten(tree, leaves)
            return self._functions.ids(zeros(self.params), zeros(self.state), batch)

        return looking

    def _rows(self, found: list[Any], batch: Any) -> dict[str, Any]:
        """As many rows of each table as there are ids: more cannot be asked for."""
        if not found:
            return {}
        names = self._functions.asked(self.params, self.state, batch)
        rows: dict[str, Any] = {}
        for table in self._parts.tables:
            asked = [ids.size for ids, name in zip(found, names, strict=True) if name == table.name]
            size = sum(asked[1:], asked[0]) if asked else 0
            rows[table.name] = jax.ShapeDtypeStruct((size, table.dim), table.dtype)
        return rows

    def _export(self, function: Callable[..., Any], *given: Any) -> bytes:
        try:
            exported = jax_export.export(jax.jit(function), platforms=self._platforms)(*given)
            return bytes(exported.serialize())
        except (ValueError, NotImplementedError) as error:
            raise ModelError(
                f"model {self._name!r} cannot be exported for workers: {error} Schedule steps of "
                "your own that build the model on the worker."
            ) from error


def _as_they_are(looking: Any, leaves: list[Any]) -> tuple[int | None, ...]:
    """Which array of the batch the ids of each lookup are, unchanged."""
    jaxpr = jax.make_jaxpr(looking)(leaves).jaxpr
    where = {var: at for at, var in enumerate(jaxpr.invars)}
    return tuple(
        where.get(var) if hasattr(var, "count") or not hasattr(var, "val") else None
        for var in jaxpr.outvars
    )


def _read_otherwise(
    functions: StepFunctions, params: Any, state: Any, tables: Any, leaves: Any, tree: Any
) -> list[str]:
    """The tables that the loss reads although its lookups were caught."""

    def loss(tables: Any, batch: Any, params: Any, state: Any) -> Any:
        return functions.loss_reading(tables, params, state, jax.tree.unflatten(tree, batch))

    exported = jax_export.export(jax.jit(loss), platforms=("cpu",))(tables, leaves, params, state)
    names = sorted(tables)
    return [names[at] for at in exported.module_kept_var_idx if at < len(names)]
