"""A forward pass cut into stages: which weights each stage reads, and what it computes.

Each stage is a program of its own on its own devices, so that batches of any size can follow each
other through them, as requests come, without a schedule that all devices share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import numpy as np

from ..errors import ModelError
from ..layouts.mesh import Mesh
from ..stages.forward_line import Paths, Segments, forward_cuts, forward_line
from ..stages.line import Line
from ..stages.pipeline import Pipeline

if TYPE_CHECKING:
    from .forward import Forward, Shape
    from .source import Source


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
    line, program = line_of(forward, shape), sources[0].steps.program
    infos, on_cpu = (*program.params, *program.state), mesh.platform == "cpu"
    begins = forward_cuts(line, pipeline, len(sources), infos, on_cpu)
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


def line_of(forward: Forward, shape: Shape) -> Line:
    """The equations of a forward pass for a batch of this shape."""
    batch = forward.source.batch(forward.shapes_of(shape))
    state = forward.state
    return forward_line(forward.source.steps.predict_step, state.params, state.state, batch)
