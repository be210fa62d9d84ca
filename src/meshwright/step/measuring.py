"""A training step in two halves, of which the second can wait: train, then measure.

What is measured changes nothing that the next step reads. So several steps that are taken in one
program are measured together after the last of them; see ``counting.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..program import Arrays, Aux, Batch, Logs, Program, TrainState
from .counting import counted


class Seen(NamedTuple):
    """What is measured of some batches; every array has one more dim in front, their number."""

    loss: Any
    outputs: Any
    batch: Batch


class Taken(NamedTuple):
    """A step that was taken: the new state, what is still to be measured, or else the logs."""

    state: TrainState
    seen: Seen | None = None
    logs: Logs | None = None

    @classmethod
    def of(cls, state: TrainState, aux: Aux, batch: Batch) -> Taken:
        """A step on one batch."""
        import jax
        import jax.numpy as jnp

        one = Seen(aux.loss, aux.outputs, batch)
        return cls(state, jax.tree.map(lambda each: jnp.expand_dims(each, 0), one))


@dataclass(frozen=True, eq=False)
class TrainStep:
    """``(state, batch) -> (state, logs)``; ``take(state, batch)`` is its first half."""

    program: Program
    take: Callable[[TrainState, Batch], Taken]

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Logs]:
        return self.in_a_row(state, [batch])

    def in_a_row(self, state: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, Logs]:
        """One step after another; the logs are those of the last."""
        waiting: list[Seen] = []
        logs: Logs = {}
        for batch in batches:
            before, (state, seen, some) = state.metrics, self.take(state, batch)
            logs = some or logs
            if seen is not None:
                waiting.append(seen)
                if any(state.metrics[path] is not value for path, value in before.items()):
                    state, logs = self._measured(state, waiting)  # the loss counts by itself
                    waiting = []
        return self._measured(state, waiting) if waiting else (state, logs)

    def _measured(self, state: TrainState, waiting: Sequence[Seen]) -> tuple[TrainState, Logs]:
        import jax
        import jax.numpy as jnp

        def measure(metrics: Arrays, seen: Seen) -> tuple[Arrays, Logs]:
            aux = Aux(seen.loss, seen.outputs, state.state, metrics)
            return self.program.measure(metrics, aux, seen.batch)

        seen = jax.tree.map(lambda *parts: jnp.concatenate(parts), *waiting)
        metrics, logs = counted(measure)(state.metrics, seen)
        return state._replace(metrics=metrics), logs
