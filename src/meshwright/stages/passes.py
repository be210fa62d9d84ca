"""What one stage computes in a pass: its blocks, what comes before them and after, and gradients.

A stage keeps the inputs of passes that are still needed backward, and computes itself again from
them (Chen et al., 2016), or keeps the results of products. What a step keeps does not grow with the
number of micro-batches under ``1f1b`` (Narayanan et al., 2021). Gradients are taken inside of each
branch, never through one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..jaxprs.row_parts import Pieces, in_parts
from ..program import Arrays
from .halves import Halves
from .parts import Functions
from .places import entry, plus, put
from .rooms import Around, Rooms
from .setting import Own, Rest, Setting


class Kept(NamedTuple):
    """What a pass left for later ones, by block: in ``values`` alone, or in a slot of buffers."""

    values: Any
    slot: Any = None


class Passes:
    """The passes of one device of the stages' axis; all that is traced here is of that device.

    ``state`` is what stays as it is in a step, and what counts, by micro-batch.
    """

    def __init__(
        self,
        setting: Setting,
        own: Own,
        others: Arrays,
        state: tuple[Arrays, Arrays],
        rest: Rest,
        shared: Any,
        micros: Any,
    ) -> None:
        self._setting, self._functions = setting, setting.functions
        table = setting.plan.table
        self._repeats, self._share = table.repeats, 1 / table.micro_batches
        by_repeat = self._by_repeat
        self.own = Own(
            by_repeat(own.params), by_repeat(own.fixed), by_repeat(own.counted, 1),
            by_repeat(own.taken),
        )  # fmt: skip
        self._blocks = self._by_block() if setting.unrolls else None
        self._others, self._state, self.rest = others, state, rest
        self._shared, self._micros = shared, micros
        self.before = {path: others[path] for path in setting.functions.params_before}
        self.after = {path: others[path] for path in setting.functions.params_after}
        self._rooms = Rooms()

    def _by_repeat(self, arrays: list[Any], dim: int = 0) -> list[Any]:
        """With dims of repeats and of blocks in place of that of blocks."""
        return [a.reshape(*a.shape[:dim], self._repeats, -1, *a.shape[dim + 1 :]) for a in arrays]

    def _by_block(self) -> list[Own]:
        """The arrays of each block of a run, with a dim of repeats: cut apart before the loop over
        ticks, for a CPU copies what it takes from a stack whenever it takes it."""
        alone = self.own._replace(counted=[])
        return [
            jax.tree.map(lambda values, number=number: values[:, number], alone)
            for number in range(self._setting.deal.most)
        ]

    # Gradients of the blocks' weights

    def no_grads(self) -> Any:
        """Zeros that :meth:`backward` and :meth:`weights` add to: a list by block where blocks are
        unrolled, else with a dim of them."""
        if self._blocks is None:
            return [self._zeros_like(param, 2) for param in self.own.params]
        return [[self._zeros_like(param, 1) for param in own.params] for own in self._blocks]

    def _zeros_like(self, param: Any, dim: int) -> Any:
        if self._setting.pieces == 1:
            return jnp.zeros_like(param)
        dims = *param.shape[:dim], self._setting.pieces, *param.shape[dim:]
        return self._setting.laid(jnp.zeros(dims, param.dtype), dim)

    def joined(self, grads: Any) -> list[Any]:
        """The same by place, as parameters are stored; pieces of rows come first."""
        if self._blocks is not None:
            grads = [jnp.stack(by_block, 1) for by_block in zip(*grads, strict=True)]
        grads = [grad.reshape(-1, *grad.shape[2:]) for grad in grads]
        return grads if self._setting.pieces == 1 else [g.swapaxes(0, 1) for g in grads]

    # What comes before and after the blocks

    def enter(self, micro: Any) -> list[Any]:
        """The input of the first block."""
        return self._head(self.before, micro)

    def no_grads_around(self, nothing: list[Any]) -> Around:
        """Zeros that :meth:`at_input` and :meth:`at_loss` add to; ``nothing`` are zeros like a
        result of a block."""
        before = jax.eval_shape(lambda: self._of_input(nothing, 0))
        after = jax.eval_shape(lambda: self._of_loss(nothing, 0)[1])
        zeros = self._zeros_of_rows(before, self.before), self._zeros_of_rows(after, self.after)
        if self._setting.shares_rooms:
            ndims = {path: value.ndim for path, value in self._others.items()}
            passed = sum(value.size * value.dtype.itemsize for value in nothing)
            self._rooms = Rooms.of(*zeros, ndims, passed // self._setting.pieces)
        return self._rooms.zeros(*zeros)

    def _zeros_of_rows(self, shapes: Arrays, params: Arrays) -> Arrays:
        """Zeros of these shapes; gradients in parts have a dim of them in front."""
        zeros = {path: jnp.zeros(of.shape, of.dtype) for path, of in shapes.items()}
        return {
            path: self._setting.laid(value, 0) if value.ndim > params[path].ndim else value
            for path, value in zeros.items()
        }

    def apart(self, sums: Around, stage: Any) -> tuple[Arrays, Arrays]:
        """Sums of gradients of what comes before the blocks, and of what comes after them."""
        is_last = stage == self._setting.plan.table.stages - 1
        return self._rooms.apart(sums, stage == 0, is_last)

    def at_input(self, gradient: list[Any], sums: Around, micro: Any) -> Around:
        """Sums with the gradients of what comes before the blocks."""
        return self._rooms.with_before(sums, self._of_input(gradient, micro))

    def _of_input(self, gradient: list[Any], micro: Any) -> Arrays:
        """Gradients of what comes before the blocks, of one micro-batch."""

        def grads(params: Arrays, gradient: list[Any]) -> tuple[tuple[()], Arrays]:
            _, pull = jax.vjp(lambda params: self._head(params, micro), params)
            return (), pull(gradient)[0]

        return self._in_parts(grads)(self.before, gradient)[1]

    def _in_parts(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function(...) -> (others, gradients)`` with a part per piece of the rows where it can:
        else each tick would sum over devices what only the end of the step needs."""
        if self._setting.pieces == 1:
            return function
        mesh, rows = jax.sharding.get_abstract_mesh(), self._micros[0].shape[1]
        return in_parts(function, Pieces(mesh, self._setting.rows, rows))

    def _head(self, params: Arrays, micro: Any) -> list[Any]:
        """What comes before the blocks."""
        values = self._values_known(params, micro, self.rest)
        return self._functions.evaluate(self._functions.enters, values)

    def _as_parts(self, grad: Any, ndim: int) -> Any:
        """A gradient with a part per piece."""
        return self._setting.laid(grad if grad.ndim > ndim else self._first_part(grad), 0)

    def _first_part(self, grad: Any) -> Any:
        """Parts of a gradient that has none: all of it, and zeros."""
        rest = jnp.zeros((self._setting.pieces - 1, *grad.shape), grad.dtype)
        return jnp.concatenate([grad[None], rest])

    def at_loss(self, y: list[Any], results: dict[str, Any], micro: Any) -> Any:
        """Sums of gradients, metrics and logs with those of a micro-batch, and the gradient of
        ``y``."""
        gradient, sums, metric_inputs = self.at_own_loss(y, results["around"], micro)
        metrics, logs = self._measured(results["metrics"], results["logs"], metric_inputs, micro)
        return {**results, "around": sums, "metrics": metrics, "logs": logs}, gradient

    def at_own_loss(
        self, y: list[Any], sums: Around, micro: Any
    ) -> tuple[list[Any], Around, list[Any]]:
        """The gradient of ``y``, sums with the gradients of a micro-batch, and what its metrics
        need, whatever came before it."""
        (gradient, metric_inputs), more = self._of_loss(y, micro)
        return gradient, self._rooms.with_after(sums, more), metric_inputs

    def _of_loss(self, y: list[Any], micro: Any) -> tuple[tuple[list[Any], list[Any]], Arrays]:
        """The gradient of ``y`` and what metrics need, and gradients of one micro-batch."""
        functions = self._functions

        def tail(params: Arrays, y: list[Any]) -> Any:
            values = self._values_known(params, micro, self.rest)
            values |= dict(zip(functions.leaves, y, strict=True))
            loss, *metric_inputs = functions.evaluate(
                [self._setting.traced.loss, *functions.metric_inputs], values
            )
            return loss, metric_inputs

        def grads(params: Arrays, y: list[Any]) -> tuple[tuple[list[Any], list[Any]], Arrays]:
            loss, pull, metric_inputs = jax.vjp(tail, params, y, has_aux=True)
            share = self._share if self._setting.takes_mean else 1.0
            of_params, gradient = pull(jax.numpy.asarray(share, loss.dtype))
            return (gradient, metric_inputs), of_params

        return self._in_parts(grads)(self.after, y)

    def _measured(
        self, metrics: Arrays, logs: Arrays, metric_inputs: list[Any], micro: Any
    ) -> tuple[Arrays, Arrays]:
        """Metrics and logs with those of a micro-batch."""
        traced, functions = self._setting.traced, self._functions
        values = self._values_known(self.after, micro, self.rest._replace(metrics=metrics))
        values |= dict(zip(functions.metric_inputs, metric_inputs, strict=True))
        more = functions.evaluate([*traced.metrics.values(), *traced.logs.values()], values)
        new = dict(zip(traced.logs, more[len(traced.metrics) :], strict=True))
        if self._setting.logs_of_one:
            new = {path: before + self._share * new[path] for path, before in logs.items()}
        return dict(zip(traced.metrics, more, strict=False)), new

    def measured(
        self, metrics: Arrays, logs: Arrays, metric_inputs: list[Any]
    ) -> tuple[Arrays, Arrays]:
        """The same of all micro-batches, in their order: of each one what :meth:`at_own_loss` gave,
        as arrays with a dim of a stage's micro-batches in front."""

        def in_order(values: Any) -> Any:
            every = jax.lax.all_gather(values, self._setting.axis)  # the last stage has the first
            every = jnp.flip(every, 0).swapaxes(0, 1)
            return every.reshape(-1, *every.shape[2:])

        def one(so_far: tuple[Arrays, Arrays], at: Any) -> tuple[tuple[Arrays, Arrays], None]:
            micro, metric_inputs = at
            return self._measured(*so_far, metric_inputs, micro), None

        count = self._setting.plan.table.micro_batches
        every = jnp.arange(count), list(map(in_order, metric_inputs))
        return jax.lax.scan(one, (metrics, logs), every)[0]

    # A run of blocks

    def run(self, x: list[Any], micro: Any, repeat: Any) -> list[Any]:
        """What a stage's run of blocks makes of its input."""
        read = self._read(micro)

        def block(x: list[Any], number: Any) -> tuple[list[Any], None]:
            params, rest = self._arguments(self._own(micro, repeat, number), read)
            return self._block(params, rest, x), None

        y, _ = self._over_blocks(block, self._cut(x), repeat)
        return self._join(y)

    def forward(
        self, x: list[Any], micro: Any, repeat: Any, into: Kept | None = None
    ) -> tuple[list[Any], Any]:
        """The same, and what :meth:`backward` needs of it, by block; where buffers are given, these
        with it in their slot."""
        read = self._read(micro)

        def block(x: list[Any], number: Any) -> tuple[list[Any], Any]:
            params, rest = self._arguments(self._own(micro, repeat, number), read)
            if self._setting.recompute_blocks:
                return self._block(params, rest, x), (x, [])
            y, residuals = self._halves.forward(params, rest, x)
            return y, (x, residuals)

        y, residuals = self._over_blocks(block, self._cut(x), repeat, self._keeping(into))
        return self._join(y), residuals

    def backward(
        self,
        residuals: Kept,
        gradient: list[Any],
        grads: Any,
        micro: Any,
        repeat: Any,
        into: Kept | None = None,
    ) -> tuple[list[Any], Any]:
        """The gradient of a run's input, and ``grads`` with those of its weights; without
        ``grads``, what :meth:`weights` needs, by block, as :meth:`forward` gives it."""
        read, splits = self._read(micro), grads is None

        def block(gradient: list[Any], number: Any) -> tuple[list[Any], Any]:
            x, of_block = self._of_block(residuals, number)
            params, rest = self._arguments(self._own(micro, repeat, number), read)
            if self._setting.recompute_blocks:
                _, of_block = self._halves.forward(params, rest, x)
            gradient, cut = self._halves.backward(params, rest, x, of_block, gradient)
            if splits:
                return gradient, cut
            return gradient, self._of_weights(params, rest, x, of_block, cut)

        to = self._keeping(into) if splits else self._adding(grads, repeat)
        gradient, results = self._over_blocks(block, self._cut(gradient), repeat, to, reverse=True)
        return self._join(gradient), results

    def weights(self, residuals: Kept, cut: Kept, grads: Any, micro: Any, repeat: Any) -> Any:
        """``grads`` with those of a run's weights."""
        read = self._read(micro)

        def block(_: None, number: Any) -> tuple[None, list[Any]]:
            x, of_block = self._of_block(residuals, number)
            params, rest = self._arguments(self._own(micro, repeat, number), read)
            of_cut = self._of_block(cut, number)
            return None, self._of_weights(params, rest, x, of_block, of_cut)

        return self._over_blocks(block, None, repeat, self._adding(grads, repeat))[1]

    def _of_weights(self, params: list[Any], *others: Any) -> list[Any]:
        """The gradients of a block's weights, where rows are split with a part per piece."""
        if self._setting.pieces == 1 or self._setting.by_piece is not None:
            return self._halves.weights(params, *others)

        def grads(*values: Any) -> tuple[tuple[()], dict[int, Any]]:
            return (), dict(enumerate(self._halves.weights(*values)))

        parts = self._in_parts(grads)(params, *others)[1]
        return [self._as_parts(parts[n], param.ndim) for n, param in enumerate(params)]

    @functools.cached_property
    def _halves(self) -> Halves:
        def arguments() -> tuple[Any, Any, Any]:
            x = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in self._functions.enters]
            return *self._arguments(self._own(0, 0, 0), self._read(0)), self._cut(x)

        return Halves(self._block, *jax.eval_shape(arguments))

    def _block(self, params: list[Any], rest: Any, x: list[Any]) -> list[Any]:
        """One block, on every piece of the rows by itself where they leave each other alone."""
        few = self._setting.by_piece
        read = [*self._functions.constant, *self._functions.of_batch]
        if few is None:
            return self._on_rows(self._functions, read, params, rest, x)
        functions = few.functions  # read the same in the same order
        read = [*functions.constant, *functions.of_batch]
        fixed, counted, values = rest
        axes = [
            None if value.shape == var.aval.shape else 0
            for value, var in zip(values, read, strict=True)
        ]

        def one(params: list[Any], values: list[Any], x: list[Any]) -> list[Any]:
            return self._on_rows(functions, read, params, (fixed, counted, values), x)

        pieces = self._setting.pieces
        return jax.vmap(one, in_axes=(0, axes, 0), axis_size=pieces)(params, values, x)

    def _on_rows(
        self, functions: Functions, read: list[Any], params: list[Any], rest: Any, x: list[Any]
    ) -> list[Any]:
        fixed, counted, values = rest
        arrays = {"params": iter(params), "fixed": iter(fixed), "counted": iter(counted)}
        in_order = [next(arrays[kind]) for kind in self._setting.kinds]
        return functions.block(in_order, dict(zip(read, values, strict=True)), x)

    def _arguments(self, own: Own, read: list[Any]) -> tuple[list[Any], Any]:
        """Of one block: its parameters, and what it reads beside them and its input."""
        return self.per_piece(own.params), (own.fixed, own.counted, read)

    def _read(self, micro: Any) -> list[Any]:
        """What all blocks read alike, those of every micro-batch first."""
        values = list(self._shared)
        if variables := self._functions.of_batch:
            known_values = self._values_known(self._others, micro, self.rest)
            values += self._functions.evaluate(variables, known_values)
        few = self._setting.by_piece
        if few is None:
            return values
        variables = [*few.functions.constant, *few.functions.of_batch]
        return [
            value if value.shape == var.aval.shape else self._cut([value])[0]
            for value, var in zip(values, variables, strict=True)
        ]

    def _own(self, micro: Any, repeat: Any, number: Any) -> Own:
        """The arrays of a block, read where they lie: all of a run would be copied first."""
        repeat = self._repeat(repeat)
        counted = entry(self.own.counted, (micro, repeat, number))
        if self._blocks is None:
            own = entry(self.own._replace(counted=[]), (repeat, number))
        else:
            own = entry(self._blocks[number], (repeat,))
        return own._replace(counted=counted)

    def _repeat(self, repeat: Any) -> Any:
        """Which repeat: a constant where there is one, so that nothing is looked up."""
        return repeat if self._repeats > 1 else 0

    def per_piece(self, params: list[Any]) -> list[Any]:
        """Parameters of a block with a dim of pieces in front, one of which a device has."""
        if self._setting.by_piece is None:
            return params
        pieces, laid = self._setting.pieces, self._setting.laid
        return [laid(jnp.broadcast_to(value, (pieces, *value.shape)), 0) for value in params]

    def _cut(self, values: list[Any]) -> list[Any]:
        """Rows as pieces of rows."""
        if self._setting.by_piece is None:
            return values
        pieces, laid = self._setting.pieces, self._setting.laid
        return [laid(value.reshape(pieces, -1, *value.shape[1:]), 0) for value in values]

    def _join(self, values: list[Any]) -> list[Any]:
        if self._setting.by_piece is None:
            return values
        return [self._setting.laid(v.reshape(-1, *v.shape[2:]), 0) for v in values]

    def _over_blocks(
        self,
        block: Callable[[Any, Any], tuple[Any, Any]],
        carried: Any,
        repeat: Any,
        into: tuple[Any, Callable[..., Any]] | None = None,
        reverse: bool = False,
    ) -> tuple[Any, Any]:
        """One block after the other: ``block(carried, number) -> (carried, results)``.

        Results are by block: a list where blocks are unrolled, else arrays with a dim of blocks in
        front. Or they go ``into`` what is there, ``(there, change)``, block by block: all of them
        would be as large as it is, and would be copied. Places that are left empty give zeros, or
        change nothing where that is written in place.
        """
        there, change = into or ((), None)

        def place(state: tuple[Any, Any], number: Any) -> tuple[tuple[Any, Any], Any]:
            carried, there = state

            def filled() -> tuple[Any, Any]:
                carried_on, results = block(carried, number)
                return carried_on, results if change is None else change(there, number, results)

            if self._setting.deal.is_full:
                state = filled()
            elif change is not None and self._setting.writes_in_branches:
                state = self._either(repeat, number, filled, lambda: (carried, there))
            else:
                state = self._unless_empty(block, carried, repeat, number)
                if change is not None:
                    state = state[0], change(there, number, state[1])
            if change is not None:
                return state, None
            carried, results = state
            return (carried, there), results

        most, state = self._setting.deal.most, (carried, there)
        if self._blocks is None:
            state, of_blocks = jax.lax.scan(place, state, jnp.arange(most), reverse=reverse)
        else:
            of_blocks = [None] * most
            for number in range(most)[:: -1 if reverse else 1]:
                state, of_blocks[number] = place(state, number)
        carried, there = state
        return carried, of_blocks if change is None else there

    def _adding(self, grads: Any, repeat: Any) -> tuple[Any, Callable[..., Any]]:
        """Into gradients of a stage, those of each block more."""
        return grads, functools.partial(self._changed, plus, self._repeat(repeat))

    def _keeping(self, kept: Kept | None) -> tuple[Any, Callable[..., Any]] | None:
        """Into a slot of buffers, if there are any."""
        return kept and (kept.values, functools.partial(self._changed, put, kept.slot))

    def _changed(
        self, change: Callable[..., Any], first: Any, arrays: Any, number: Any, by: Any
    ) -> Any:
        """Arrays of all blocks, changed at the place of one of them."""
        if self._blocks is None:
            return change(arrays, (first, number), by)
        return [
            change(of_block, (first,), by) if place == number else of_block
            for place, of_block in enumerate(arrays)
        ]

    def _of_block(self, kept: Kept, number: Any) -> Any:
        slot = () if kept.slot is None else (kept.slot,)
        if self._blocks is None:
            return entry(kept.values, (*slot, number))
        return entry(kept.values[number], slot)

    def _unless_empty(
        self, block: Callable[..., Any], carried: Any, repeat: Any, number: Any
    ) -> tuple[Any, Any]:
        shapes = jax.eval_shape(lambda: block(carried, number))[1]
        nothing = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        return self._either(
            repeat, number, lambda: block(carried, number), lambda: (carried, nothing)
        )

    def _either(
        self, repeat: Any, number: Any, filled: Callable[[], Any], empty: Callable[[], Any]
    ) -> Any:
        """One of two results, by whether there is a block in a place."""
        return self._setting.either(self._own(0, repeat, number).taken[0], filled, empty)

    def _values_known(self, params: Arrays, micro: Any, rest: Rest) -> dict[Any, Any]:
        """The values of the loss's arguments for a micro-batch."""
        fixed, counted = self._state
        state = {**fixed, **{path: values[micro] for path, values in counted.items()}}
        return self._setting.known(params, state, rest, [leaf[micro] for leaf in self._micros])
