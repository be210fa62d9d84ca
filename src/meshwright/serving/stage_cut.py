"""A forward pass cut into stages: which weights each stage reads, and what it computes.

Each stage is a program of its own on its own devices, so that batches of any size can follow each
other through them, as requests come, without a schedule that all devices share.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ModelError, PipelineError
from ..jaxprs.slices import reached
from ..layouts.mesh import Mesh
from ..stages.cuts import line_cuts
from ..stages.line import Line
from ..stages.pipeline import Pipeline
from ..stages.traced import Traced

if TYPE_CHECKING:
    from .forward import Forward, Shape
    from .source import Source

Paths = frozenset[str]


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage: its source, which has the whole model's steps on its devices and its weights
    alone, and the process of these devices."""

    number: int
    source: Source
    process: int

    @property
    def is_here(self) -> bool:
        """Whether its devices are of this process."""
        return self.process == jax.process_index()


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages of a served model, and the mesh that they share; ``begins`` has the weights that
    each stage after the first is the first to read."""

    mesh: Mesh
    begins: tuple[Paths, ...]
    all: tuple[Stage, ...]

    @property
    def here(self) -> tuple[Stage, ...]:
        """Those of this process."""
        return tuple(stage for stage in self.all if stage.is_here)

    @property
    def are_here(self) -> bool:
        """Whether all of them are of this process."""
        return len(self.here) == len(self.all)


def meshes_of(mesh: Mesh, axis: str) -> list[Mesh]:
    """The part of a mesh that each stage has: its axis stays, with one device.

    >>> from meshwright.layouts.mesh import create_mesh
    >>> [part.axes for part in meshes_of(create_mesh({"stage": 2, "model": 4}), "stage")]
    [(('stage', 1), ('model', 4)), (('stage', 1), ('model', 4))]
    """
    grid = np.empty(mesh.size, object)
    grid[:] = mesh.devices
    grid = grid.reshape(mesh.shape)
    at, axes = mesh.axis_names.index(axis), {**dict(mesh.axes), axis: 1}
    return [Mesh(axes, grid.take([n], at).ravel()) for n in range(mesh[axis])]


def cut(sources: Sequence[Source], mesh: Mesh, pipeline: Pipeline) -> Source:
    """The source that is served by stages; ``sources`` has the whole model on each stage's devices.

    Raises :class:`~meshwright.PipelineError` where the model cannot be cut, and
    :class:`~meshwright.ModelError` where the devices of a stage are in several processes.
    """
    from .forward import Forward

    processes = [_process_of(source.mesh, pipeline.axis) for source in sources]
    if sorted(processes) != processes:
        raise ModelError(
            f"the stages of axis {pipeline.axis!r} must follow each other in the order of "
            f"processes; they are in processes {processes}. Make it the first axis of the mesh."
        )
    forward = Forward(sources[0])
    shape = forward.typical
    line = line_of(forward, shape)
    on_cpu, count = mesh.platform == "cpu", len(sources)
    if pipeline.cuts is None:
        places = line.best_cuts(count, on_cpu)
    elif len(pipeline.cuts) != count - 1:
        raise PipelineError(
            f"{count} stages need {count - 1} cuts; received {list(pipeline.cuts)}."
        )
    else:
        program = sources[0].steps.program
        places = line_cuts(line, pipeline.cuts, (*program.params, *program.state), on_cpu)
    begins = tuple(_first_read(line, place) for place in places)
    cuts = Segments(line, begins)
    stages = tuple(
        Stage(n, source.of_stage(cuts.weights(n)), processes[n]) for n, source in enumerate(sources)
    )
    return replace(sources[0], stages=Stages(mesh, begins, stages))


def _process_of(mesh: Mesh, axis: str) -> int:
    processes = {device.process_index for device in mesh.devices or ()}
    if len(processes) > 1:
        raise ModelError(
            f"a stage has devices of processes {sorted(processes)}; a stage of a served model must "
            f"lie in one process. Make {axis!r} the first axis of the mesh, and start as many "
            "processes as stages, or fewer."
        )
    return processes.pop()


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


def line_of(forward: Forward, shape: Shape) -> Line:
    """The equations of a forward pass for a batch of this shape.

    No weight changes here, so state of numbers, as of frozen layers or in eight bits, is cut as
    parameters are.
    """
    bare = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    params, state = bare(forward.state.params), bare(forward.state.state)
    batch = forward.source.batch(forward.shapes_of(shape))
    closed = jax.make_jaxpr(forward.source.steps.predict_step)(params, state, batch)
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

    def _arguments(self, stage: int) -> dict[Any, tuple[str, Any]]:
        line, (enters, leaves) = self._line, self.boundaries[stage : stage + 2]
        numbers = line.slice(leaves, enters)
        atoms = itertools.chain(leaves, *(line.eqns[number].invars for number in numbers))
        read = {atom for atom in atoms if not hasattr(atom, "val")} - set(enters)
        return {var: key for var, key in line.traced.arguments.items() if var in read}
