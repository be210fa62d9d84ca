"""What keeps a model from being cut into stages or branches."""

from __future__ import annotations

from typing import Any

from ..errors import PipelineError
from ..jaxprs.edits import equations
from ..layouts.placement import Placement
from ..program import Program
from .pipeline import Pipeline


def check_stages(program: Program, placement: Placement, pipeline: Pipeline) -> None:
    """Raises :class:`PipelineError` with all that is in the way."""
    mesh, faults = placement.mesh, faults_of(program, placement, pipeline.axis, "stages")
    beside = {axis for axis, size in mesh.axes if size > 1} - {pipeline.axis, *placement.batch_axes}
    if pipeline.schedule == "zero_bubble" and beside:
        faults.append(
            f"schedule='zero_bubble' is not supported beside axis {min(beside)!r}, which splits "
            "more than the rows of a batch: stages then compute all three kinds of passes in every "
            "tick, and discard what they have no work for. Use schedule='1f1b'."
        )
    if faults:
        raise PipelineError("\n".join(faults))


def faults_of(program: Program, placement: Placement, axis: str, what: str) -> list[str]:
    """What keeps a model from being cut into ``what``: stages or branches."""
    mesh, faults = placement.mesh, list[str]()
    name = {"stages": "a pipeline", "branches": "branches"}[what]
    if axis not in mesh:
        faults.append(no_axis(placement, axis, what))
    elif axis in placement.batch_axes:
        faults.append(
            f"axis {axis!r} is given to the {what} and to the batch. Name another one for "
            "the batch, batch='data', or batch=None."
        )
    if program.own_step is not None and program.step_of == "optimizer":
        faults.append(
            f"{name} cannot take the steps of an optimizer that evaluates the loss again (lbfgs, "
            "line searches, sophia). Take another optimizer."
        )
    elif program.own_step is not None:
        faults.append(
            f"{name} cannot take the train_step of model {program.name!r}: its gradients are "
            f"taken by {what}. Use Keras' own train_step."
        )
    if placement.zero > 2:
        faults.append(
            f"zero=3 is not supported with {name}, whose devices hold their weights already. Use "
            f"a lower level, or zero=3 without the {what}."
        )
    if any(entry.layout.pad for entry in placement.layouts):
        faults.append(f"pad=True is not supported with {name}. Use axes that divide.")
    if program.example is None:
        faults.append(
            f"to cut model {program.name!r} into {what} needs an example of a batch: train it "
            "first, or pass a batch, for a program as mw.jax_program(..., batch=example)."
        )
    return faults


def check_callbacks(jaxpr: Any, placement: Placement, axis: str, what: str) -> None:
    """Refuse a loss that calls Python on the host, which JAX does not lower beside other axes."""
    beside = [name for name in placement.mesh.axis_names if name != axis]
    names = (eqn.primitive.name for eqn in equations(jaxpr))
    called = next((name for name in names if name in ("pure_callback", "io_callback")), None)
    if called is not None and beside:
        raise PipelineError(
            f"the loss calls Python by jax.{called}, which JAX does not support in {what} beside "
            f"axis {beside[0]!r} of the mesh. Leave the call out, or the other axes. Checks by "
            "equinox.error_if, as in Diffrax, are such calls: EQX_ON_ERROR=nan leaves them out."
        )


def no_axis(placement: Placement, axis: str, what: str) -> str:
    """In words: the mesh has no axis for the stages or branches."""
    return (
        f"the mesh ({placement.mesh.axes_text}) has no axis {axis!r} for the {what}: add it, "
        f"mw.create_mesh({{{axis!r}: 4, ...}})."
    )
