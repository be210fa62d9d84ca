"""The loop over ticks on one stage: what is carried, and what is sent on after each tick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .passes import Passes
from .plan import Phase, Row
from .setting import Setting


class Carry(NamedTuple):
    """What a stage takes from tick to tick; one buffer more than needed takes what is not."""

    inputs: Any
    gradients: Any
    arriving: Any
    arriving_gradient: Any
    own_grads: Any  # (repeats, blocks of a run, ...)
    grads_before: Any  # of parameters that are read before the blocks, and after them
    grads_after: Any
    metrics: Any
    logs: Any


class Ticks:
    """What one stage does, tick by tick."""

    def __init__(self, setting: Setting, passes: Passes) -> None:
        self._setting, self._passes = setting, passes
        self._table = setting.plan.table

    # Carried

    def first(self) -> Carry:
        """Before the first tick."""
        import jax
        import jax.numpy as jnp

        plan, traced = self._setting.plan, self._setting.traced

        def buffers(count: int) -> list[Any]:
            return [
                self._setting.laid(jnp.zeros((count, *var.aval.shape), var.aval.dtype), 1)
                for var in self._setting.functions.enters
            ]

        logs = {p: jnp.zeros(v.aval.shape, v.aval.dtype) for p, v in traced.logs.items()}
        return Carry(
            inputs=buffers(plan.slots + 1),
            gradients=buffers(plan.gradient_slots + 1),
            arriving=self._nothing(),
            arriving_gradient=self._nothing(),
            own_grads=[
                jnp.zeros_like(each) for each in self._passes.per_piece(self._passes.own.params)
            ],
            grads_before=jax.tree.map(jnp.zeros_like, self._passes.before),
            grads_after=jax.tree.map(jnp.zeros_like, self._passes.after),
            metrics=self._passes.rest.metrics,
            logs=logs,
        )

    def _nothing(self) -> list[Any]:
        import jax.numpy as jnp

        enters = self._setting.functions.enters
        return [self._setting.laid(jnp.zeros(v.aval.shape, v.aval.dtype), 0) for v in enters]

    # One tick

    def take(self, phase: Phase, carry: Carry, rows: Row) -> tuple[Carry, None]:
        """The passes of one tick, and what is sent on after them."""
        import jax

        row = Row(*(value[0] for value in rows))  # of this stage
        carry = carry._replace(
            inputs=_put(carry.inputs, row.arriving, carry.arriving),
            gradients=_put(carry.gradients, row.arriving_gradient, carry.arriving_gradient),
        )
        x, y = self._if(
            row.forward >= 0,
            lambda: self._forward(carry, row),
            lambda: (self._nothing(), self._nothing()),
            phase.forward,
        )
        is_first = self._is_first(row.stage, row.backward_repeat)
        slot = jax.numpy.where(row.forward >= 0, row.forward_slot, self._setting.plan.slots)
        carry = carry._replace(inputs=_put(carry.inputs, slot, x))
        after, gradient = self._if(
            row.backward >= 0,
            lambda: self._backward(carry, row),
            lambda: (_results(carry), self._nothing()),
            phase.backward,
        )
        # What travels through a branch is copied there: of gradients as large as a vocabulary, no
        # more than this branch adds to.
        after["grads_before"] = self._if(
            (row.backward >= 0) & is_first,
            lambda: self._passes.at_input(gradient, carry.grads_before, row.backward),
            lambda: carry.grads_before,
            phase.backward,
        )
        # One transfer after the other, and both after all that is computed: stages that wait for
        # each other in several collectives at once need more threads than a CPU's client has.
        barrier = jax.lax.optimization_barrier
        y, gradient, after = barrier((y, gradient, after))
        sent, gradient = barrier((self._send(y, 1), gradient))
        back = self._send(gradient, -1)
        return carry._replace(**after, arriving=sent, arriving_gradient=back), None

    def _if(
        self, holds: Any, yes: Callable[[], Any], no: Callable[[], Any], ever: bool = True
    ) -> Any:
        """One of two, by what this stage has to do; both where devices must stay together."""
        import jax

        if not ever:
            return no()
        if self._setting.skips:
            return jax.lax.cond(holds, yes, no)
        return jax.tree.map(lambda a, b: jax.numpy.where(holds, a, b), yes(), no())

    def _send(self, values: list[Any], step: int) -> list[Any]:
        import jax

        count = self._table.stages
        pairs = [(stage, (stage + step) % count) for stage in range(count)]
        if self._table.repeats == 1:  # nothing goes around
            pairs = [(a, b) for a, b in pairs if b == a + step]
        axis = self._setting.axis
        return [jax.lax.ppermute(value, axis, pairs) for value in values] if pairs else values

    def _is_first(self, stage: Any, repeat: Any) -> Any:
        return (stage == 0) & (repeat == 0)

    def _is_last(self, stage: Any, repeat: Any) -> Any:
        return (stage == self._table.stages - 1) & (repeat == self._table.repeats - 1)

    # The passes

    def _forward(self, carry: Carry, row: Row) -> tuple[list[Any], list[Any]]:
        """What the stage begins with, and what it makes of it; the last one waits for backward."""
        micro, repeat = row.forward, row.forward_repeat
        x = self._if(
            self._is_first(row.stage, repeat),
            lambda: self._passes.enter(micro),
            lambda: _taken(carry.inputs, row.forward_slot),
        )
        y = self._if(
            self._is_last(row.stage, repeat),
            lambda: x,
            lambda: self._passes.run(x, micro, repeat),
        )
        return x, y

    def _backward(self, carry: Carry, row: Row) -> tuple[dict[str, Any], list[Any]]:
        """Gradients, metrics and logs after this pass, and the gradient of what it began with."""

        micro, repeat = row.backward, row.backward_repeat
        x = _taken(carry.inputs, row.backward_slot)
        y, pull = self._passes.differentiable(x, micro, repeat)
        results = _results(carry)
        results, gradient = self._if(
            self._is_last(row.stage, repeat),
            lambda: self._passes.at_loss(y, results, micro),
            lambda: (results, _taken(carry.gradients, row.gradient_slot)),
        )
        own, gradient = pull(gradient)
        at = repeat if self._setting.by_piece is None else (slice(None), repeat)
        results["own_grads"] = [
            grads.at[at].add(more) for grads, more in zip(results["own_grads"], own, strict=True)
        ]
        return results, gradient


def _results(carry: Carry) -> dict[str, Any]:
    """What a backward pass changes."""
    names = ("own_grads", "grads_after", "metrics", "logs")
    return {name: getattr(carry, name) for name in names}


def _put(buffers: list[Any], slot: Any, values: list[Any]) -> list[Any]:
    return [buffer.at[slot].set(value) for buffer, value in zip(buffers, values, strict=True)]


def _taken(buffers: list[Any], slot: Any) -> list[Any]:
    return [buffer[slot] for buffer in buffers]
