"""A forward pass in a line: where it is cut into stages, and each stage as a function.

What is served by stages and what a dry run says of them are cut here, in the same places.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import PipelineError
from ..jaxprs.slices import reached, variables
from ..layouts.params import ParamInfo
from ..layouts.placement import Placement
from .cuts import line_cuts
from .line import Line
from .pipeline import Pipeline
from .traced import Traced

Paths = frozenset[str]


def forward_cuts(
    line: Line, pipeline: Pipeline, stages: int, infos: Sequence[ParamInfo], on_cpu: bool
) -> tuple[Paths, ...]:
    """The weights that each stage after the first is the first to read.

    Raises :class:`~meshwright.PipelineError` where the line cannot be cut.
    """
    if pipeline.cuts is None:
        places: Sequence[int] = line.best_cuts(stages, on_cpu)
    elif len(pipeline.cuts) != stages - 1:
        raise PipelineError(
            f"{stages} stages need {stages - 1} cuts; received {list(pipeline.cuts)}."
        )
    else:
        places = line_cuts(line, pipeline.cuts, infos, on_cpu)
    return tuple(_first_read(line, place) for place in places)


def _first_read(line: Line, place: int) -> Paths:
    """The weights that are read from a place on, and not before it."""
    before = {path for paths in line.params_read[:place] for path in paths}
    found = frozenset(p for paths in line.params_read[place:] for p in paths) - before
    if not found:
        raise PipelineError(
            "a stage would have no weights of its own. Name the layers that stages begin with, "
            "mw.Pipeline(axis, micro_batches, cuts=[...]), or use a smaller stage axis."
        )
    return found


class ForwardLine(Line):
    """The equations of a forward pass.

    What is computed from weights alone, as the transpose of a tied embedding, is not sent: each
    stage that needs it has these weights.
    """

    @functools.cached_property
    def _of_batch(self) -> set[Any]:
        arguments = self.traced.arguments.items()
        return reached(self.eqns, [var for var, (part, _) in arguments if part == "batch"])

    def is_sent(self, var: Any) -> bool:
        return var in self._of_batch


def forward_line(
    predict: Callable[..., Any], params: Mapping[str, Any], state: Mapping[str, Any], batch: Any
) -> Line:
    """The equations of a forward pass of arrays of these shapes.

    No weight changes here, so state of numbers, as of frozen layers or in eight bits, is cut as
    parameters are.
    """
    params, state, batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (dict(params), dict(state), batch)
    )
    closed = jax.make_jaxpr(predict)(params, state, batch)
    invars = iter(closed.jaxpr.invars)
    arguments = {next(invars): ("params", path) for path in sorted(params)}
    of_state = {path: next(invars) for path in sorted(state)}
    for path, var in of_state.items():
        arguments[var] = ("params" if _is_of_numbers(var.aval) else "state", path)
    arguments |= {var: ("batch", number) for number, var in enumerate(invars)}
    outputs = {str(number): var for number, var in enumerate(closed.jaxpr.outvars)}
    return ForwardLine.of(Traced(closed, arguments, outputs["0"], of_state, {}, outputs))


def _is_of_numbers(aval: Any) -> bool:
    """Whether it is an array that a layer computes with, and not a seed, a count or a table."""
    return bool(aval.shape) and (jnp.issubdtype(aval.dtype, jnp.floating) or aval.dtype == jnp.int8)


class Segments:
    """The stages of a line, each as a function of what it reads.

    Where it is cut follows from ``begins``, so that batches of all sizes are cut alike.
    """

    def __init__(self, line: Line, begins: Sequence[Paths]) -> None:
        self._line = line
        places = [line.cut_before(set(paths)) for paths in begins]
        at = [place for place in places if place is not None]
        if len(at) < len(begins) or sorted(set(at)) != at:
            raise PipelineError(
                "the model computes its layers in another order for batches of another size, which "
                "is not supported by stages. Serve it without a pipeline."
            )
        crossing = (line.crossing(place) for place in (0, *at))
        self.boundaries = [*crossing, list(line.traced.logs.values())]

    def weights(self, stage: int) -> Paths:
        """The parameters and state that a stage reads."""
        read = self._arguments(stage).values()
        return frozenset(key for part, key in read if part != "batch")

    def leaves(self, stage: int) -> tuple[int, ...]:
        """The numbers of the arrays of a batch that a stage reads."""
        return tuple(key for part, key in self._arguments(stage).values() if part == "batch")

    def function(self, stage: int) -> Any:
        """``(params, state, leaves, entering) -> leaving``, of what the stage reads."""
        line, (enters, leaves) = self._line, self.boundaries[stage : stage + 2]
        arguments = self._arguments(stage)

        def run(params: Any, state: Any, of_batch: Any, entering: Any) -> list[Any]:
            weights = {**params, **state}
            values = {
                var: of_batch[key] if part == "batch" else weights[key]
                for var, (part, key) in arguments.items()
            }
            return line.evaluate(leaves, {**values, **dict(zip(enters, entering, strict=True))})

        return run

    def form(self, stage: int) -> tuple[Any, list[str]]:
        """What a stage does, equal for stages that do the same, and its weights in the order in
        which it reads them."""
        line, (enters, leaves) = self._line, self.boundaries[stage : stage + 2]
        arguments = self._arguments(stage)
        names: dict[Any, int] = {}

        def name(atoms: Iterable[Any]) -> tuple[int, ...]:
            return tuple(names.setdefault(var, len(names)) for var in variables(atoms))

        does: list[Any] = [name(enters), *(str(var.aval) for var in enters)]
        for number in line.slice(leaves, set(enters)):
            eqn = line.eqns[number]
            does.append((line.signs[number], name(eqn.invars), name(eqn.outvars)))
        does.append(name(leaves))
        read = {var: key for var, (part, key) in arguments.items() if part != "batch"}
        of_batch = tuple(
            (names[var], key) for var, (part, key) in arguments.items() if part == "batch"
        )
        return (tuple(does), of_batch), [read[var] for var in names if var in read]

    def _arguments(self, stage: int) -> dict[Any, tuple[str, Any]]:
        line, (enters, leaves) = self._line, self.boundaries[stage : stage + 2]
        numbers = line.slice(leaves, set(enters))
        atoms = itertools.chain(leaves, *(line.eqns[number].invars for number in numbers))
        read = {atom for atom in atoms if not hasattr(atom, "val")} - set(enters)
        return {var: key for var, key in line.traced.arguments.items() if var in read}


def crossing_shape(aval: Any, rows: int, placement: Placement) -> jax.ShapeDtypeStruct:
    """The shape and layout of a value that crosses a cut: split by rows, or whole."""
    by_rows = aval.ndim and aval.shape[0] == rows and not rows % placement.batch_shards
    spec = jax.sharding.PartitionSpec(placement.batch_axes if by_rows else None)
    spec = spec if aval.ndim else jax.sharding.PartitionSpec()
    sharding = jax.sharding.NamedSharding(placement.mesh.jax_mesh, spec)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
