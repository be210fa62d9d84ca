"""A training step with all that it takes, as shapes that lie on a mesh: what is compiled ahead."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..layouts.mesh import Mesh
from ..layouts.placement import Placement
from ..layouts.strict import inspect
from ..program import Batch, Program
from ..step.assemble import Assembly, assemble
from ..step.batches import check_sizes
from ..step.options import PLAIN, StepOptions
from .faults import tracing


@dataclass(frozen=True, eq=False, kw_only=True)
class AbstractStep(Assembly):
    """The steps of a program, and a batch for the training step: its arguments without values.

    ``batch`` holds ``jax.ShapeDtypeStruct`` with shardings on the mesh of the placement, as
    ``state`` does; it is a tuple of micro-batches where the step accumulates.
    """

    batch: Any

    @property
    def jitted(self) -> Any:
        """What is compiled ahead: the training step, as training compiles it."""
        return self.train

    @property
    def has_gradients(self) -> bool:
        """Whether it computes gradients."""
        return True


class HasSteps(Protocol):
    """What planning asks of a strategy; :class:`~meshwright.Sharded` has it."""

    @property
    def placement(self) -> Placement: ...
    @property
    def how(self) -> StepOptions: ...
    def abstract_step(self, model: Any, batch: Batch) -> AbstractStep: ...
    def on(self, mesh: Mesh) -> Any: ...
    def from_placement(self, placement: Placement, how: StepOptions | None = None) -> Any: ...


def abstract_step(model: Any, batch: Batch, strategy: HasSteps | Placement) -> AbstractStep:
    """The step that would train a model, or a Program, on such batches under a strategy.

    A Program may come with a :class:`~meshwright.Placement` alone. Raises
    :class:`~meshwright.BatchError` for batches without a size.
    """
    check_sizes(batch)
    if not isinstance(model, Program):
        assert not isinstance(strategy, Placement)
        with tracing(getattr(model, "name", "model")):  # Keras builds what is not built yet
            return strategy.abstract_step(model, batch)
    if isinstance(strategy, Placement):
        return of_program(model, batch, strategy, PLAIN)
    return of_program(model, batch, strategy.placement, strategy.how)


def of_program(
    program: Program, batch: Batch, placement: Placement, how: StepOptions
) -> AbstractStep:
    """The step that :class:`~meshwright.Trainer` would take."""
    placement = unbound(placement)
    named, name = placement.naming(program.inputs), repr(program.name)
    inspect(named, program.infos, name, how.stage_axes, has_more_dims=program.has_more_dims)
    return on_batch(assemble(replace(program, example=batch), placement, how), batch)


def unbound(placement: Placement) -> Placement:
    """The placement on the same mesh without devices."""
    return placement if placement.mesh.is_abstract else placement.on(placement.mesh.abstract())


def on_batch(steps: Assembly, batch: Batch, last: bool = False) -> AbstractStep:
    """The step that takes such batches; only shapes and dtypes of their arrays matter.

    A ``last`` batch that does not divide is computed by every device in full.
    """
    (step_batch,) = steps.how.for_steps(
        [steps.batch_layouts.abstract(batch, last)] * steps.how.batches
    )
    return AbstractStep(
        steps.program, steps.placement, steps.how, steps.losses, steps.staged, batch=step_batch
    )


def unstaged(described: AbstractStep) -> AbstractStep:
    """The step of a pipeline as the model alone would take it on the same mesh: every stage does
    the work of all."""
    staged, batch = described.staged, described.batch
    assert staged is not None
    program = replace(staged.whole, example=batch)
    return on_batch(assemble(program, described.placement, PLAIN), batch)
