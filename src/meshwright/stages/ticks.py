"""The loop over ticks on one stage: what it keeps, what it does in a tick, what it sends on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .passes import Kept, Passes
from .places import entry, put
from .plan import Phase, Row
from .rooms import Around
from .setting import Setting


class Carry(NamedTuple):
    """What a stage takes from tick to tick; one buffer more than needed takes what is not."""

    inputs: Any
    gradients: Any
    residuals: Any  # of forward passes, and of backward passes for gradients of weights
    cuts: Any
    arriving: Any
    leaving: Any  # a gradient
    own_grads: Any  # of the blocks, as passes add to them
    around: Any  # sums of gradients of parameters that are read before the blocks, and after them
    metrics: Any
    logs: Any
    losses: Any = ()  # where all stages compute the loss: results, then their gradients
    metric_inputs: Any = ()  # what metrics need of each micro-batch of this stage
    passing: Any = ()  # a result on its way to the stage that computes its loss
    coming: Any = ()  # a gradient on its way from there to the last stage


class Ticks:
    """What one stage does, tick by tick.

    A result is sent on while the stage works backward, and a gradient while it works forward in the
    next tick, so that transfers and work overlap where the platform lets them.
    """

    def __init__(self, setting: Setting, passes: Passes) -> None:
        self._setting, self._passes = setting, passes
        self._table = setting.plan.table
        self._waits = setting.plan.cut_slots > 0  # gradients of weights

    # Carried

    def first(self) -> Carry:
        """Before the first tick."""
        plan, traced, passes = self._setting.plan, self._setting.traced, self._passes

        def buffers(count: int) -> list[Any]:
            return [
                self._setting.laid(jnp.zeros((count, *var.aval.shape), var.aval.dtype), 1)
                for var in self._setting.functions.enters
            ]

        logs = {p: self._no_log(v.aval) for p, v in traced.logs.items()}
        around = passes.no_grads_around(self._nothing())
        losses = self._no_losses(buffers, around) if self._shares_loss else {}
        return Carry(
            inputs=buffers(plan.slots + 1),
            gradients=buffers(plan.gradient_slots + 1),
            residuals=self._buffers(plan.slots + self._has_spare, self._residuals),
            cuts=self._buffers(plan.cut_slots + self._has_spare, self._cuts),
            arriving=self._nothing(),
            leaving=self._nothing(),
            own_grads=passes.no_grads(),
            around=around,
            metrics=passes.rest.metrics,
            logs=logs,
            **losses,
        )

    def _no_log(self, of: Any) -> Any:
        """Zeros of a log; where it becomes a mean over micro-batches, a count becomes a float."""
        dtype = jnp.result_type(of.dtype, 0.0) if self._setting.logs_of_one else of.dtype
        return jnp.zeros(of.shape, dtype)

    @property
    def _shares_loss(self) -> bool:
        return self._setting.deal.shares_loss

    @property
    def _has_spare(self) -> bool:
        """Whether stages write in every tick, what is not needed into one buffer more."""
        return not self._setting.writes_in_branches

    def _no_losses(self, buffers: Callable[[int], list[Any]], around: Around) -> dict[str, Any]:
        """Before the first tick, of what all stages do after the blocks."""
        table, at_loss = self._table, self._passes.at_own_loss
        shapes = jax.eval_shape(lambda: at_loss(self._nothing(), around, 0)[2])
        count = table.micro_batches // table.stages
        metric_inputs = [jnp.zeros((count, *of.shape), of.dtype) for of in shapes]
        nothing = {"passing": self._nothing(), "coming": self._nothing()}
        return {
            "losses": buffers(self._setting.plan.loss_slots),
            "metric_inputs": metric_inputs,
            **nothing,
        }

    def _nothing(self) -> list[Any]:
        enters = self._setting.functions.enters
        return [self._setting.laid(jnp.zeros(v.aval.shape, v.aval.dtype), 0) for v in enters]

    @functools.cached_property
    def _residuals(self) -> Any:
        """The shapes of what a forward pass keeps, if anything beside its input."""
        if self._setting.recompute:
            return ()
        return jax.eval_shape(lambda: self._passes.forward(self._nothing(), 0, 0)[1])

    @functools.cached_property
    def _cuts(self) -> Any:
        """The shapes of what gradients of weights wait for, if they do."""
        if not self._waits:
            return ()
        residuals, nothing = Kept(self._zeros(self._residuals)), self._nothing()
        return jax.eval_shape(lambda: self._passes.backward(residuals, nothing, None, 0, 0)[1])

    def _zeros(self, shapes: Any) -> Any:
        return jax.tree.map(
            lambda shape: self._by_piece(jnp.zeros(shape.shape, shape.dtype), 0), shapes
        )

    def _buffers(self, count: int, shapes: Any) -> Any:
        def of(shape: Any) -> Any:
            return self._by_piece(jnp.zeros((count, *shape.shape), shape.dtype), 1)

        return jax.tree.map(of, shapes)

    def _by_piece(self, value: Any, before: int) -> Any:
        """With the pieces of rows, if any, over their devices; ``before`` them come as many dims,
        and that of blocks where they are not apart."""
        if self._setting.by_piece is None:
            return value
        return self._setting.laid(value, before + (not self._setting.unrolls))

    # One tick

    def take(self, phase: Phase, carry: Carry, rows: Row) -> tuple[Carry, None]:
        """The passes of one tick."""
        row = Row(*(value[0] for value in rows))  # of this stage
        back = self._send(carry.leaving, -1) if phase.backward else carry.leaving
        back, inputs = _one_after_the_other((back, carry.inputs))
        if self._shares_loss:
            back, carry = self._at_losses(phase, back, carry, row)
        carry = carry._replace(
            inputs=put(inputs, (row.arriving,), carry.arriving),
            gradients=put(carry.gradients, (row.arriving_gradient,), back),
        )
        carry, y = self._forward(phase, carry, row)
        if self._shares_loss and phase.forward:
            carry = carry._replace(passing=self._sent_around(carry, row, y))
        carry, gradient = self._backward(phase, carry, row)
        carry = self._late_weights(phase, carry, row)
        y, carry = _one_after_the_other((y, carry))
        arriving = self._send(y, 1) if phase.forward else carry.arriving
        return carry._replace(arriving=arriving, leaving=gradient), None

    def _if(
        self, holds: Any, yes: Callable[[], Any], no: Callable[[], Any], ever: bool = True
    ) -> Any:
        """One of two, by what this stage has to do; both where devices must stay together."""
        return self._setting.either(holds, yes, no) if ever else no()

    # What comes after the blocks, where all stages compute it: the results of as many micro-batches
    # as there are stages go around until every stage has one, and their gradients go on from there
    # to the last stage, one at each tick.

    def _at_losses(
        self, phase: Phase, back: list[Any], carry: Carry, row: Row
    ) -> tuple[list[Any], Carry]:
        """With losses and their gradients, in the ticks that have them, and the gradients a stage
        further."""
        only_after = carry.around._replace(before={})

        def work() -> tuple[Any, ...]:
            at_loss = self._passes.at_own_loss
            gradient, around, metric_inputs = at_loss(carry.passing, only_after, row.loss)
            number = row.loss // self._table.stages
            return (
                put(carry.losses, (row.loss_slot,), gradient),
                around.after,
                put(carry.metric_inputs, (number,), metric_inputs),
            )

        rows = self._setting.plan.rows.loss[phase.first : phase.end]
        if (rows >= 0).any():  # in one tick all stages have one, so any may wait for all there
            nothing = carry.losses, only_after.after, carry.metric_inputs
            losses, after, metric_inputs = jax.lax.cond(row.loss >= 0, work, lambda: nothing)
            around = carry.around._replace(after=after)
            carry = carry._replace(losses=losses, around=around, metric_inputs=metric_inputs)
        if not phase.backward:
            return back, carry
        back, coming = _one_after_the_other((back, carry.coming))
        coming, begins = self._send(coming, 1), row.loss_begins >= 0
        first = entry(carry.losses, (jnp.maximum(row.loss_begins, 0),))
        coming = [jnp.where(begins, *of) for of in zip(first, coming, strict=True)]
        return back, carry._replace(coming=coming)

    def _sent_around(self, carry: Carry, row: Row, y: list[Any]) -> list[Any]:
        """What goes around, a stage further, with the last stage's result in it."""
        is_last = self._is_last(row.stage, row.forward_repeat)
        passing = [jnp.where(is_last, *of) for of in zip(y, carry.passing, strict=True)]
        return self._send(passing, 1, goes_around=True)

    def _send(self, values: list[Any], step: int, goes_around: bool = False) -> list[Any]:
        count = self._table.stages
        pairs = [(stage, (stage + step) % count) for stage in range(count)]
        if self._table.repeats == 1 and not goes_around:
            pairs = [(a, b) for a, b in pairs if b == a + step]
        axis = self._setting.axis
        return [jax.lax.ppermute(value, axis, pairs) for value in values] if pairs else values

    def _is_first(self, stage: Any, repeat: Any) -> Any:
        return (stage == 0) & (repeat == 0)

    def _is_last(self, stage: Any, repeat: Any) -> Any:
        return (stage == self._table.stages - 1) & (repeat == self._table.repeats - 1)

    # The passes

    def _forward(self, phase: Phase, carry: Carry, row: Row) -> tuple[Carry, list[Any]]:
        """The stage's result, beside what it keeps."""
        if not phase.forward:
            return carry, self._nothing()
        is_working = row.forward >= 0

        slot = jnp.where(is_working, row.forward_slot, self._setting.plan.slots)

        def write(x: list[Any], y: list[Any]) -> dict[str, Any]:
            changed = {"inputs": put(carry.inputs, (slot,), x)}
            if not self._setting.recompute:
                changed["gradients"] = put(carry.gradients, (row.result_slot,), y)
            return changed

        def work() -> tuple[dict[str, Any], list[Any]]:
            x, y, residuals = self._result(carry, row, Kept(carry.residuals, slot))
            return write(x, y) | {"residuals": residuals}, y

        # Buffers go through the branch, where they are written in place: else a stage with nothing
        # to do would write as much as one that works. Stages that stay together do write it, and so
        # do GPUs, whose compiler copies a buffer that goes through a branch.
        if not self._setting.skips:
            changed, y = work()
        elif self._setting.in_branches:
            names = ("inputs",) if self._setting.recompute else ("inputs", "gradients")
            unchanged = {name: getattr(carry, name) for name in (*names, "residuals")}
            changed, y = self._setting.either(
                is_working, work, lambda: (unchanged, self._nothing())
            )
        else:
            x, y, residuals = self._setting.either(
                is_working,
                lambda: self._result(carry, row),
                lambda: (self._nothing(), self._nothing(), self._zeros(self._residuals)),
            )
            changed = write(x, y) | {"residuals": put(carry.residuals, (slot,), residuals)}
        return carry._replace(**changed), y

    def _result(
        self, carry: Carry, row: Row, into: Kept | None = None
    ) -> tuple[list[Any], list[Any], Any]:
        """What the stage begins with, what it makes of it, and what it keeps on the way: alone, or
        buffers with it."""
        micro, repeat = row.forward, row.forward_repeat
        x = self._if(
            self._is_first(row.stage, repeat),
            lambda: self._passes.enter(micro),
            lambda: entry(carry.inputs, (row.forward_slot,)),
        )
        if not self._setting.recompute:
            return x, *self._passes.forward(x, micro, repeat, into)
        if self._shares_loss:
            return x, self._passes.run(x, micro, repeat), ()
        y = self._if(  # the last one waits for its backward pass
            self._is_last(row.stage, repeat),
            lambda: x,
            lambda: self._passes.run(x, micro, repeat),
        )
        return x, y, ()

    def _backward(self, phase: Phase, carry: Carry, row: Row) -> tuple[Carry, list[Any]]:
        """The gradient of what the stage began with, beside gradients, metrics and logs."""
        if self._waits and phase.backward:
            results, gradient = self._in_halves(carry, row)
        else:
            results, gradient = self._if(
                row.backward >= 0,
                lambda: self._differentiated(carry, row),
                lambda: (_results(carry) | {"own_grads": carry.own_grads}, self._nothing()),
                phase.backward,
            )
        around = results["around"]
        sums = around._replace(before=carry.around.before, after={})
        sums = self._if(
            (row.backward >= 0) & self._is_first(row.stage, row.backward_repeat),
            lambda: self._passes.at_input(gradient, sums, row.backward),
            lambda: sums,
            phase.backward,
        )
        results["around"] = sums._replace(after=around.after)
        return carry._replace(**results), gradient

    def _differentiated(self, carry: Carry, row: Row) -> tuple[dict[str, Any], list[Any]]:
        micro, repeat = row.backward, row.backward_repeat
        arrived = entry(carry.gradients, (row.gradient_slot,))
        if self._setting.recompute:
            x = entry(carry.inputs, (row.backward_slot,))
            y, values = self._passes.forward(x, micro, repeat)
            residuals = Kept(values)
        else:
            y, residuals = arrived, Kept(carry.residuals, row.backward_slot)
        results, gradient = self._at_loss(carry, row, y, arrived)
        own = carry.own_grads
        gradient, own = self._passes.backward(residuals, gradient, own, micro, repeat)
        return results | {"own_grads": own}, gradient

    def _at_loss(
        self, carry: Carry, row: Row, y: list[Any], arrived: list[Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """The gradient of a stage's result, beside what the loss of a micro-batch changes."""
        is_last = self._is_last(row.stage, row.backward_repeat)
        if self._shares_loss:
            both = zip(carry.coming, arrived, strict=True)
            return _results(carry), [jnp.where(is_last, *of) for of in both]
        return self._if(
            is_last,
            lambda: self._passes.at_loss(y, _results(carry), row.backward),
            lambda: (_results(carry), arrived),
        )

    def _in_halves(self, carry: Carry, row: Row) -> tuple[dict[str, Any], list[Any]]:
        """The same where some gradients of weights wait. Branches stand side by side: what a branch
        within another one passes on is copied."""
        micro, repeat = row.backward, row.backward_repeat
        works, waits = row.backward >= 0, row.cut_slot >= 0
        arrived, own = entry(carry.gradients, (row.gradient_slot,)), carry.own_grads
        results, gradient = self._if(
            works & self._is_last(row.stage, repeat),
            lambda: self._passes.at_loss(arrived, _results(carry), micro),
            lambda: (_results(carry), arrived),
        )

        def gradients(grads: Any, into: Kept | None = None) -> tuple[list[Any], Any]:
            residuals = Kept(carry.residuals, row.backward_slot)
            return self._passes.backward(residuals, gradient, grads, micro, repeat, into)

        x, own = self._if(works & ~waits, lambda: gradients(own), lambda: (gradient, own))
        if self._setting.in_branches:
            kept = Kept(carry.cuts, row.cut_slot)
            x, cuts = self._if(waits, lambda: gradients(None, kept), lambda: (x, carry.cuts))
        else:
            nothing = self._zeros(self._cuts)
            x, cut = self._if(waits, lambda: gradients(None), lambda: (x, nothing))
            slot = jax.numpy.where(waits, row.cut_slot, self._setting.plan.cut_slots)
            cuts = put(carry.cuts, (slot,), cut)
        return results | {"own_grads": own, "cuts": cuts}, x

    def _late_weights(self, phase: Phase, carry: Carry, row: Row) -> Carry:
        """With the gradients of weights that waited, if any did."""
        if not (self._waits and phase.weights):
            return carry

        def take(grads: Any, at: tuple[Any, ...]) -> tuple[Any, None]:
            micro, repeat, slot, cut_slot = at

            def added() -> Any:
                residuals, cut = Kept(carry.residuals, slot), Kept(carry.cuts, cut_slot)
                return self._passes.weights(residuals, cut, grads, micro, repeat)

            return self._if(micro >= 0, added, lambda: grads), None

        late = row.weights, row.weights_repeat, row.weights_slot, row.weights_cut_slot
        return carry._replace(own_grads=jax.lax.scan(take, carry.own_grads, late)[0])


def _one_after_the_other(values: Any) -> Any:
    """The values, all of which are there before any is used, on a CPU: stages that wait for each
    other in several collectives at once need more threads than its client has."""
    barrier = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(values, cpu=barrier, default=lambda values: values)


def _results(carry: Carry) -> dict[str, Any]:
    """What the loss of a micro-batch changes. What travels through a branch is copied there: of
    gradients as large as a vocabulary, no more than it adds to."""
    around = carry.around._replace(before={})
    return {"around": around, "metrics": carry.metrics, "logs": carry.logs}
