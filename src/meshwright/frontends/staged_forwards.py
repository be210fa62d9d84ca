"""The forward pass of a model cut into stages, as shapes: as a server cuts it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from .. import _compat
from ..layouts.mesh import Mesh
from ..layouts.placement import Placement
from ..planning.faults import tracing
from ..planning.graph import Graph
from ..planning.serving import ForwardStep
from ..planning.serving_stages import StageStep
from ..planning.traced_graph import graph_of_step
from ..program import Program
from ..stages.forward_line import Paths, Segments, crossing_shape, forward_cuts, forward_line
from ..stages.line import Line
from ..stages.pipeline import Pipeline
from ..step.assemble import Assembly
from ..step.platform import tracing_for
from ..targets.target import Target
from .forwards import Forwards
from .typical_length import typical_length


def served_pipeline(strategy: Any) -> Pipeline | None:
    """The pipeline that a strategy or a plan is served by, where its mesh has several stages.

    >>> import meshwright as mw
    >>> served_pipeline(mw.Sharded(mw.Mesh({"batch": 8}))) is None
    True
    """
    pipeline = getattr(getattr(strategy, "how", None), "pipeline", None)
    if not isinstance(pipeline, Pipeline):
        return None
    mesh = strategy.mesh
    return pipeline if pipeline.axis in mesh and mesh[pipeline.axis] > 1 else None


@dataclass(frozen=True, eq=False)
class StagedForwards:
    """The stages of a forward pass under a placement, for batches of any size.

    Stages that are not compiled have the operations of one device, so that the model is traced once
    for all placements. They are cut as a server cuts them, or with ``is_rough``, for a search, as
    one device would run the batch. Unless ``is_named``, a stage may stand for others that do the
    same. Raises :class:`~meshwright.PipelineError` for a model that cannot be cut.
    """

    forwards: Forwards
    placement: Placement
    pipeline: Pipeline
    target: Target
    compiles: bool = True
    is_rough: bool = False
    is_named: bool = True

    def on(self, rows: int) -> list[StageStep]:
        """The stages of a batch of this size, each on its own devices."""
        whole = self.forwards.on(self._steps, rows)
        if not self.compiles:
            return self._stages(whole, rows, self._line_alone(rows))
        return self._stages(whole, rows, _line(whole, whole.batch, self.target.platform))

    def graph(self, rows: int, number: int) -> Graph:
        """The operations of one stage of a batch, as one device would do them."""
        line, graphs = self._line_alone(rows), self.forwards.stage_graphs
        begins = self._begins(line)
        if (rows, begins, number) not in graphs:
            stages = self.forwards.stages
            if (rows, begins) not in stages:
                step = self.forwards.on(self.forwards.alone, rows)
                stages[rows, begins] = self._stages(step, rows, line)
            step = stages[rows, begins][number]
            with tracing(step.program.name):
                graphs[rows, begins, number] = graph_of_step(step)
        return graphs[rows, begins, number]

    def _line_alone(self, rows: int) -> Line:
        """The operations of a batch as one device does them; traced once for all placements."""
        lines = self.forwards.lines
        if rows not in lines:
            step = self.forwards.on(self.forwards.alone, rows)
            lines[rows] = _line(step, step.batch, "cpu")
        return lines[rows]

    @functools.cached_property
    def _steps(self) -> Assembly:
        """The whole model on the devices of one stage."""
        mesh = self.placement.mesh
        axes = {**dict(mesh.axes), self.pipeline.axis: 1}
        return self.forwards.steps(self.placement.on(Mesh(axes)))

    def _begins(self, line: Line) -> tuple[Paths, ...]:
        """The weights that each stage after the first is the first to read."""
        return self._cut(line) if self.is_rough else self._as_served

    @functools.cached_property
    def _as_served(self) -> tuple[Paths, ...]:
        return self._cut(_line(self._steps, self._typical, self.target.platform))

    def _cut(self, line: Line) -> tuple[Paths, ...]:
        steps, on = self._steps, self.target.platform
        infos = (*steps.program.params, *steps.program.state)
        stages = self.placement.mesh[self.pipeline.axis]
        return forward_cuts(line, self.pipeline, stages, infos, on == "cpu")

    @property
    def _typical(self) -> Any:
        """A batch of the size by which a server cuts the model."""
        steps, model = self._steps, self.forwards.model
        rows = steps.placement.mesh.size
        if isinstance(model, Program):
            return self.forwards.batch(rows)
        from .keras.forward import own_inputs

        if (like := own_inputs(model)) is None:
            return self.forwards.batch(rows)

        def batch(length: int) -> Any:
            def shape(one: Any) -> Any:
                dims = (length if size is None else size for size in one.shape[1:])
                return jax.ShapeDtypeStruct((rows, *dims), one.dtype)

            return (jax.tree.map(shape, like),)

        def trace(length: int) -> Any:
            with _traced_on(steps, self.target.platform):
                state = steps.state
                return jax.make_jaxpr(steps.predict_step)(state.params, state.state, batch(length))

        has_lengths = any(None in one.shape[1:] for one in jax.tree.leaves(like))
        return batch(typical_length(trace) if has_lengths else 0)

    def _stages(self, whole: ForwardStep, rows: int, line: Line) -> list[StageStep]:
        begins = self._begins(line)
        cuts = Segments(line, begins)
        leaves = jax.tree.leaves(whole.batch)
        crossing = [
            tuple(crossing_shape(var.aval, rows, whole.placement) for var in values)
            for values in cuts.boundaries[:-1]
        ]
        last = len(begins)
        stages = [
            StageStep(
                _part(whole.program, cuts.weights(number)),
                whole.placement,
                whole.how,
                batch=({n: leaves[n] for n in cuts.leaves(number)}, list(crossing[number])),
                function=cuts.function(number),
                leaving=crossing[number + 1] if number < last else (),
                layer=_layer(line, begins[number - 1] if number else cuts.weights(0)),
            )
            for number in range(last + 1)
        ]
        return stages if self.is_named else _with_likes(stages, cuts)


def _line(steps: Assembly, batch: Any, on: str) -> Line:
    with _traced_on(steps, on):
        return forward_line(steps.predict_step, steps.state.params, steps.state.state, batch)


@contextlib.contextmanager
def _traced_on(steps: Assembly, on: str) -> Iterator[None]:
    with _compat.keras_sees(on), tracing_for(on), tracing(steps.program.name):
        yield


def _with_likes(stages: list[StageStep], cuts: Segments) -> list[StageStep]:
    """The stages, each with the first that does the same to weights that lie alike."""
    first, result = dict[Any, int](), list[StageStep]()
    for number, stage in enumerate(stages):
        specs = {entry.info.path: entry.layout for entry in stage.placed}
        form, weights = cuts.form(number)
        before = first.setdefault((form, tuple(specs.get(path) for path in weights)), number)
        result.append(replace(stage, like=before if before != number else None))
    return result


def _part(program: Program, weights: Paths) -> Program:
    """The program with these weights alone."""
    params, state = (
        tuple(info for info in infos if info.path in weights)
        for infos in (program.params, program.state)
    )
    return replace(program, params=params, state=state)


def _layer(line: Line, paths: Paths) -> str:
    return next(iter(line.in_order(paths)), "")
