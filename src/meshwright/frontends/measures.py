"""Measures a training step where it runs, to be set beside a dry run of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from ..errors import LayoutError, ModelError
from ..layouts.context_mesh import outside_of_context
from ..layouts.placement import Placement
from ..planning.measurement import Measured
from ..planning.measuring import copier, measure_step
from ..program import Batch, Program
from ..run import Trainer
from ..step.options import PLAIN

if TYPE_CHECKING:
    import keras

    from .keras import Sharded


@outside_of_context()
def measure(
    model: keras.Model | Program,
    batch: Batch,
    *,
    strategy: Sharded | Placement | Trainer,
    steps: int = 10,
) -> Measured:
    """What one step of training takes on the devices that are here: bytes, time, collectives.

    ``model`` and ``batch`` are those of :func:`~meshwright.dry_run`, so ``report.beside(measured)``
    compares prediction and measurement. The mesh of ``strategy`` must have real devices. Two steps
    warm up, ``steps`` are timed one by one, and three run under JAX's profiler. A Keras model gets
    its values back afterwards, as if it had not been trained; for a :class:`~meshwright.Program` a
    new state is made and discarded. The batch may be shapes alone; it is then filled with zeros.
    Raises :class:`~meshwright.TopologyError` for a mesh without devices and
    :class:`~meshwright.ModelError` for a model whose step is not compiled.

    >>> import numpy as np, optax, meshwright as mw
    >>> def loss(params, batch):
    ...     return ((batch @ params["w"]) ** 2).mean()
    >>> model = mw.jax_program(loss, {"w": np.ones([4, 1], "float32")}, optax.sgd(0.1))
    >>> batch, strategy = np.ones([16, 4], "float32"), mw.Placement.of(mw.create_mesh({"batch": 8}))
    >>> report = mw.dry_run(model, batch, strategy=strategy, target="cpu:8")
    >>> report.beside(mw.measure(model, batch, strategy=strategy, steps=3)).row("parameters").ratio
    1.0
    """
    if not isinstance(steps, int) or steps < 1:
        raise ModelError(f"steps must be a whole number, at least 1; received {steps!r}.")
    batch = _valued(batch)
    if not isinstance(model, Program):
        return _of_keras(model, batch, _strategy(strategy), steps)
    if not isinstance(strategy, Trainer):
        strategy = _trainer(model, strategy)
    return _of_program(strategy, batch, steps)


def _strategy(strategy: Any) -> Sharded:
    from .keras import Sharded

    if not isinstance(strategy, Sharded):
        raise LayoutError(
            f"a Keras model is measured under the strategy that trains it, such as mw.Sharded; "
            f"received something of type {type(strategy).__name__}."
        )
    return strategy


def _trainer(program: Program, strategy: Sharded | Placement) -> Trainer:
    if isinstance(strategy, Placement):
        return Trainer(program, strategy, PLAIN)
    return Trainer(program, strategy.placement, strategy.how)


def _of_program(trainer: Trainer, batch: Batch, steps: int) -> Measured:
    (micro_batches,) = trainer.how.for_steps([trainer.put(batch)] * trainer.how.batches)
    return measure_step(
        trainer.step,
        trainer.init(),
        micro_batches,
        name=trainer.program.name,
        axes=trainer.placement.mesh.axes,
        steps=steps,
    )


def _of_keras(model: keras.Model, batch: Batch, strategy: Sharded, steps: int) -> Measured:
    from .keras.compiled import functions_of
    from .keras.options import check_compiled
    from .keras.program import take_state, write_state

    check_compiled(model)
    strategy._need_devices("measure(...)")
    variables = strategy.prepare(model, lambda: batch)
    functions = functions_of(strategy, model, variables, example=batch)
    variables = variables.stored_by(functions.steps.outside)
    if functions.is_eager:
        raise ModelError(
            f"model {model.name!r} is compiled with run_eagerly=True, and a step that runs piece "
            "by piece has no program to measure: compile it without."
        )
    (batches,) = strategy.how.for_steps([strategy.put(batch, model)] * strategy.how.batches)
    state = take_state(variables)
    again = copier(state)
    try:
        return measure_step(
            functions.train, state, batches, name=model.name, axes=strategy.mesh.axes, steps=steps
        )
    finally:
        write_state(variables, again())


def _valued(batch: Batch) -> Batch:
    """The batch, with zeros where there are shapes alone."""

    def value(array: Any) -> Any:
        shape = isinstance(array, jax.ShapeDtypeStruct)
        return np.zeros(array.shape, array.dtype) if shape else array

    return cast(Batch, jax.tree.map(value, batch))
