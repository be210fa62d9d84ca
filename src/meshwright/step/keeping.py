"""Custom steps keep the layouts of the state that they begin with.

XLA lays a result out as suits the step, not as its argument lay: a replicated bias beside a split
kernel comes back split, and the next call compiles again. A loop of the library names the layouts
of its results where it compiles; here the parts of a program name them, in whatever step they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..program import Arrays, Aux, Batch, Logs, Program, TrainState
from .sharing import Sharing


def keeping(program: Program, lies: TrainState, sharing: Sharing) -> Program:
    """The program whose results and gradients lie as the state does.

    ``lies`` has a :class:`jax.sharding.Sharding` per array of the state. Gradients lie as their
    parameters, or with ZeRO as the pieces that are updated.
    """

    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        value, aux = program.loss(params, whole, batch, training)
        state = _laid(aux.state, lies.state, whole.state)
        metrics = _laid(aux.metrics, lies.metrics, whole.metrics)
        return value, aux._replace(state=state, metrics=metrics)

    def measure(metrics: Arrays, aux: Aux, batch: Batch) -> tuple[Arrays, Logs]:
        new, logs = program.measure(metrics, aux, batch)
        return _laid(new, lies.metrics), logs

    pieces = {path: layout.sharding for path, layout in sharing.shared.items()}

    def update(params: Arrays, grads: Arrays, slots: Arrays) -> tuple[Arrays, Arrays]:
        new, new_slots = program.update(params, _laid(grads, pieces), slots)
        return _laid(new, lies.params), _laid(new_slots, lies.slots)

    own = program.own_step

    def own_step(whole: TrainState, batch: Batch) -> tuple[TrainState, Logs]:
        assert own is not None
        new, logs = own(whole, batch)
        return TrainState(*map(_laid, new, lies)), logs

    return replace(program, loss=loss, measure=measure, update=update, own_step=own and own_step)


def _laid(values: Arrays, lies: dict[str, Any], before: Arrays | None = None) -> Arrays:
    """The values, each with its layout; one that is still that of ``before`` is left as it is.

    Micro-batches are computed side by side only where a program hands its state on untouched.
    """
    import jax

    before = before or {}
    return {
        path: value
        if value is before.get(path)
        else jax.lax.with_sharding_constraint(value, lies[path])
        for path, value in values.items()
    }
