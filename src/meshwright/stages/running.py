"""A step of a pipeline as one program for all devices: a loop over ticks, stages side by side.

Each device takes the passes that the tick table has for its stage. Only the
inputs of passes that are still needed backward are kept; a backward pass computes its stage again
from them, so what a step keeps does not grow with the number of micro-batches under ``1f1b`` (Chen
et al., 2016; Narayanan et al., 2021). The axis of the stages is taken by hand (``jax.shard_map``),
all others are left to XLA. Gradients are taken inside of each branch, never through one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..program import Arrays, Logs, TrainState
from .parts import Blocks, Functions, Traced
from .plan import Phase, Plan, Row

Taken = tuple[Arrays, Arrays, Arrays, Logs]  # gradients, state, metrics, logs


class Own(NamedTuple):
    """The arrays that blocks have of their own, stacked: parameters, state that stays as it is in a
    step, and state that counts, which has a dim of micro-batches in front."""

    params: Any
    fixed: Any
    counted: Any


@dataclass(frozen=True, eq=False)
class Runner:
    """The gradients of one step by a plan.

    ``stacks`` are the paths of the stacked parameters, in the order of ``blocks.params``; ``order``
    says which block stands where in a stack. ``mesh`` is a :class:`jax.sharding.Mesh`, ``axis`` the
    stages', and ``rows`` the axes that split the rows of a batch. ``by_piece`` are the blocks for
    the rows of one of those pieces, where rows leave each other alone: their gradients come with a
    dim of pieces in front, which is still to be summed over.
    """

    blocks: Blocks
    by_piece: Blocks | None
    plan: Plan
    stacks: tuple[str, ...]
    order: tuple[int, ...]
    mesh: Any
    axis: str
    rows: tuple[str, ...]
    recompute_blocks: bool
    takes_mean: bool
    logs_of_one: bool

    def __call__(self, whole: TrainState, micros: Sequence[Any]) -> Taken:
        """Of a state with stacks, and the leaves of the batch as ``(micro-batches, rows, ...)``."""
        import jax

        others = {p: value for p, value in whole.params.items() if p not in self.stacks}
        states, state = self._counted(whole, others, micros)
        own = self._own(whole, states)
        rest = self._read_slots(whole.slots), whole.metrics
        context = self.known(others, whole.state, rest, [])
        shared = self.functions.evaluate(self.functions.constant, context)
        spec = jax.sharding.PartitionSpec
        along, by_tick, whole_of = spec(self.axis), spec(None, self.axis), spec()
        run = jax.shard_map(
            self._ticks,
            mesh=self.mesh,
            in_specs=(Own(along, along, by_tick), *[whole_of] * 5, by_tick),
            out_specs=(along if self.by_piece is None else by_tick, *[along] * 4),
            axis_names={self.axis},
            check_vma=False,
        )
        fixed = {p: value for p, value in whole.state.items() if p not in states}
        found = run(own, others, (fixed, states), rest, shared, micros, self._rows())
        own_grads, grads_before, grads_after, metrics, logs = found
        grads = dict(zip(self.stacks, own_grads, strict=True))
        for path, value in others.items():
            parts = [of[path].sum(0) for of in (grads_before, grads_after) if path in of]
            grads[path] = sum(parts) if parts else jax.numpy.zeros_like(value)
        metrics, logs = jax.tree.map(lambda value: value[-1], (metrics, logs))
        return grads, state, metrics, logs

    # What is made before the loop

    @property
    def functions(self) -> Functions:
        """What the loss is made of."""
        return self.blocks.functions

    @property
    def traced(self) -> Traced:
        """The loss of one micro-batch."""
        return self.blocks.traced

    def known(
        self, params: Arrays, state: Arrays, rest: tuple[Arrays, Arrays], leaves: Sequence[Any]
    ) -> dict[Any, Any]:
        """The values of the loss's arguments, as far as these have them; ``rest`` are slots and
        metrics."""
        values = {
            "params": params,
            "state": state,
            "slots": rest[0],
            "metrics": rest[1],
            "batch": dict(enumerate(leaves)),
        }
        return {
            var: values[part][key]
            for var, (part, key) in self.traced.arguments.items()
            if key in values[part]
        }

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        """Of each row of the blocks' own arrays, which field of :class:`Own` it is in."""
        counted = self.functions.counted
        return tuple(
            "params" if row[0][0] == "params" else "counted" if row[0][1] in counted else "fixed"
            for row in self.blocks.own
        )

    def _read_slots(self, slots: Arrays) -> Arrays:
        """Those that the loss reads, as the scale of a loss is; the others stay on their stages."""
        read = self.functions.read("slots")
        return {path: value for path, value in slots.items() if path in read}

    @functools.cached_property
    def skips(self) -> bool:
        """Whether a stage may leave out what it has nothing to do for.

        Not where XLA splits more than rows: some of its collectives wait for every device.
        """
        return {axis for axis, size in self.mesh.shape.items() if size > 1} <= {
            self.axis,
            *self.rows,
        }

    @property
    def phases(self) -> list[Phase]:
        """The loops of a step: one where stages skip what they have no work for, else several."""
        whole = Phase(0, len(self.plan.table.ticks), forward=True, backward=True)
        return [whole] if self.skips else self.plan.phases()

    def _rows(self) -> Row:
        import jax.numpy as jnp

        return Row(*map(jnp.asarray, self.plan.rows))

    def _counted(
        self, whole: TrainState, others: Arrays, micros: Sequence[Any]
    ) -> tuple[Arrays, Arrays]:
        """State that counts, as each micro-batch begins with it, and all state after the step."""
        import jax

        paths = self.functions.counted
        if not paths:
            return {}, dict(whole.state)

        def count(state: Arrays, leaves: Sequence[Any]) -> tuple[Arrays, Arrays]:
            rest = whole.slots, whole.metrics
            known = self.known(others, {**whole.state, **state}, rest, leaves)
            wanted = [self.traced.state[path] for path in paths]
            new = self.functions.evaluate(wanted, known, counting=True)
            return dict(zip(paths, new, strict=True)), state

        first = {path: whole.state[path] for path in paths}
        last, before = jax.lax.scan(count, first, list(micros))
        return before, {**whole.state, **last}

    def _own(self, whole: TrainState, states: Arrays) -> Own:
        import jax.numpy as jnp

        stacks = iter(self.stacks)
        own = Own([], [], [])
        for kind, row in zip(self.kinds, self.blocks.own, strict=True):
            paths = [row[block][1] for block in self.order]
            if kind == "params":
                own.params.append(whole.params[next(stacks)])
            elif kind == "counted":
                own.counted.append(jnp.stack([states[path] for path in paths], 1))
            else:
                own.fixed.append(jnp.stack([whole.state[path] for path in paths]))
        return own

    # The loop, on one stage

    def _ticks(
        self,
        own: Own,
        others: Arrays,
        state: tuple[Arrays, Arrays],
        rest: tuple[Arrays, Arrays],
        shared: Any,
        micros: Any,
        rows: Row,
    ) -> Any:
        import jax

        ticks = _Ticks(self, own, others, state, rest, shared, micros)
        last = ticks.first()
        for phase in self.phases:
            part = Row(*(values[phase.first : phase.end] for values in rows))
            last, _ = jax.lax.scan(functools.partial(ticks.take, phase), last, part)
        own_grads = [self._in_a_row(grad) for grad in last.own_grads]
        tops = last.grads_before, last.grads_after, last.metrics, last.logs
        return own_grads, *jax.tree.map(lambda value: value[None], tops)

    def _in_a_row(self, grad: Any) -> Any:
        """Without the dim of repeats, which stands before that of a run's blocks."""
        dim = 0 if self.by_piece is None else 1
        return grad.reshape(*grad.shape[:dim], -1, *grad.shape[dim + 2 :])

    @property
    def pieces(self) -> int:
        """Into how many pieces the rows of a batch are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.rows)


class _Carry(NamedTuple):
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


class _Ticks:
    """What one stage does; all that is traced here is of one device of the stage's axis."""

    def __init__(
        self,
        runner: Runner,
        own: Own,
        others: Arrays,
        state: tuple[Arrays, Arrays],
        rest: tuple[Arrays, Arrays],
        shared: Any,
        micros: Any,
    ) -> None:
        self._runner, self._functions = runner, runner.functions
        table = runner.plan.table
        self._stages, self._repeats = table.stages, table.repeats
        self._share = 1 / table.micro_batches
        self._own = Own(self._by_repeat(own.params), self._by_repeat(own.fixed), own.counted)
        self._others, self._state, self._rest = others, state, rest
        self._shared, self._micros = shared, micros
        self._before = {path: others[path] for path in runner.functions.params_before}
        self._after = {path: others[path] for path in runner.functions.params_after}

    def _by_repeat(self, arrays: list[Any]) -> list[Any]:
        return [a.reshape(self._repeats, -1, *a.shape[1:]) for a in arrays]

    # Carried

    def first(self) -> _Carry:
        """Before the first tick."""
        import jax
        import jax.numpy as jnp

        plan, traced = self._runner.plan, self._runner.traced

        def buffers(count: int) -> list[Any]:
            return [
                self._laid(jnp.zeros((count, *var.aval.shape), var.aval.dtype), 1)
                for var in self._functions.enters
            ]

        logs = {p: jnp.zeros(v.aval.shape, v.aval.dtype) for p, v in traced.logs.items()}
        return _Carry(
            inputs=buffers(plan.slots + 1),
            gradients=buffers(plan.gradient_slots + 1),
            arriving=self._nothing(),
            arriving_gradient=self._nothing(),
            own_grads=[jnp.zeros_like(each) for each in self._per_piece(self._own.params)],
            grads_before=jax.tree.map(jnp.zeros_like, self._before),
            grads_after=jax.tree.map(jnp.zeros_like, self._after),
            metrics=self._rest[1],
            logs=logs,
        )

    def _nothing(self) -> list[Any]:
        import jax.numpy as jnp

        enters = self._functions.enters
        return [self._laid(jnp.zeros(v.aval.shape, v.aval.dtype), 0) for v in enters]

    def _laid(self, value: Any, dim: int) -> Any:
        """An activation, or buffers of it, with its rows over the axes of the batch."""
        import jax

        axes, sizes = self._runner.rows, self._runner.mesh.shape
        spec = jax.sharding.PartitionSpec
        pieces = functools.reduce(lambda n, axis: n * sizes[axis], axes, 1)
        if pieces == 1 or value.ndim <= dim or value.shape[dim] % pieces:
            return value
        free = [spec.UNCONSTRAINED] * (value.ndim - dim - 1)
        return jax.lax.with_sharding_constraint(value, spec(*[None] * dim, axes, *free))

    # One tick

    def take(self, phase: Phase, carry: _Carry, rows: Row) -> tuple[_Carry, None]:
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
        slot = jax.numpy.where(row.forward >= 0, row.forward_slot, self._runner.plan.slots)
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
            lambda: self._at_input(gradient, carry.grads_before, row.backward),
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
        if self._runner.skips:
            return jax.lax.cond(holds, yes, no)
        return jax.tree.map(lambda a, b: jax.numpy.where(holds, a, b), yes(), no())

    def _send(self, values: list[Any], step: int) -> list[Any]:
        import jax

        count = self._stages
        pairs = [(stage, (stage + step) % count) for stage in range(count)]
        if self._repeats == 1:  # nothing goes around
            pairs = [(a, b) for a, b in pairs if b == a + step]
        axis = self._runner.axis
        return [jax.lax.ppermute(value, axis, pairs) for value in values] if pairs else values

    def _is_first(self, stage: Any, repeat: Any) -> Any:
        return (stage == 0) & (repeat == 0)

    def _is_last(self, stage: Any, repeat: Any) -> Any:
        return (stage == self._stages - 1) & (repeat == self._repeats - 1)

    # The passes

    def _forward(self, carry: _Carry, row: Row) -> tuple[list[Any], list[Any]]:
        """What the stage begins with, and what it makes of it; the last one waits for backward."""
        micro, repeat = row.forward, row.forward_repeat
        x = self._if(
            self._is_first(row.stage, repeat),
            lambda: self._head(self._before, micro),
            lambda: _taken(carry.inputs, row.forward_slot),
        )
        y = self._if(
            self._is_last(row.stage, repeat),
            lambda: x,
            lambda: self._run(self._params(repeat), x, micro, repeat),
        )
        return x, y

    def _backward(self, carry: _Carry, row: Row) -> tuple[dict[str, Any], list[Any]]:
        """Gradients, metrics and logs after this pass, and the gradient of what it began with."""

        micro, repeat = row.backward, row.backward_repeat
        x = _taken(carry.inputs, row.backward_slot)
        y, pull = self._differentiable(x, micro, repeat)
        results = _results(carry)
        results, gradient = self._if(
            self._is_last(row.stage, repeat),
            lambda: self._at_loss(y, results, micro),
            lambda: (results, _taken(carry.gradients, row.gradient_slot)),
        )
        own, gradient = pull(gradient)
        at = repeat if self._runner.by_piece is None else (slice(None), repeat)
        results["own_grads"] = [
            grads.at[at].add(more) for grads, more in zip(results["own_grads"], own, strict=True)
        ]
        return results, gradient

    def _differentiable(self, x: list[Any], micro: Any, repeat: Any) -> tuple[list[Any], Any]:
        """A stage's results, and its gradients by parameters and input; see ``by_piece``."""
        import jax

        few, pieces = self._runner.by_piece, self._runner.pieces
        if few is None:
            run = functools.partial(self._run, micro=micro, repeat=repeat)
            return jax.vjp(run, self._params(repeat), x)

        functions = few.functions
        shared = list(self._shared_by(self._functions, micro).values())
        read = [*functions.constant, *functions.of_batch]  # the same in the same order
        axes = [
            None if value.shape == var.aval.shape else 0
            for value, var in zip(shared, read, strict=True)
        ]
        shared = [v if axis is None else self._cut(v) for v, axis in zip(shared, axes, strict=True)]
        fixed, _ = self._own_state(micro, repeat)

        def one(params: list[Any], x: list[Any], values: list[Any]) -> list[Any]:
            known = dict(zip(read, values, strict=True))
            return self._chain(functions, Own(params, fixed, []), known, x)

        each = jax.vmap(one, in_axes=(0, 0, axes), axis_size=pieces)
        params = self._per_piece(self._params(repeat))
        y, pull = jax.vjp(lambda p, x: each(p, x, shared), params, list(map(self._cut, x)))

        def whole_rows(gradient: list[Any]) -> tuple[list[Any], list[Any]]:
            own, back = pull(list(map(self._cut, gradient)))
            return own, list(map(self._join, back))

        return list(map(self._join, y)), whole_rows

    def _cut(self, value: Any) -> Any:
        """Rows as pieces of rows."""
        pieces = self._runner.pieces
        return self._laid(value.reshape(pieces, -1, *value.shape[1:]), 0)

    def _join(self, value: Any) -> Any:
        return self._laid(value.reshape(-1, *value.shape[2:]), 0)

    def _per_piece(self, params: list[Any]) -> list[Any]:
        """Parameters with a dim of pieces in front, one of which a device has as it has them."""
        import jax.numpy as jnp

        if self._runner.by_piece is None:
            return params
        pieces = self._runner.pieces
        return [self._laid(jnp.broadcast_to(p, (pieces, *p.shape)), 0) for p in params]

    def _at_loss(self, y: list[Any], results: dict[str, Any], micro: Any) -> Any:
        import jax

        traced, functions = self._runner.traced, self._functions
        leaves = self._leaves(micro)

        def tail(params: Arrays, y: list[Any]) -> Any:
            known = self._known(params, micro, leaves, results["metrics"])
            known |= dict(zip(functions.leaves, y, strict=True))
            loss, *more = functions.evaluate(functions.results, known)
            return loss, more

        loss, pull, more = jax.vjp(tail, self._after, y, has_aux=True)
        share = self._share if self._runner.takes_mean else 1.0
        params, gradient = pull(jax.numpy.asarray(share, loss.dtype))
        metrics = dict(zip(traced.metrics, more, strict=False))
        logs = dict(zip(traced.logs, more[len(metrics) :], strict=True))
        if self._runner.logs_of_one:
            logs = {p: before + self._share * logs[p] for p, before in results["logs"].items()}
        grads = _added(results["grads_after"], params)
        return {**results, "grads_after": grads, "metrics": metrics, "logs": logs}, gradient

    def _at_input(self, gradient: list[Any], grads: Arrays, micro: Any) -> Arrays:
        import jax

        _, pull = jax.vjp(lambda params: self._head(params, micro), self._before)
        return _added(grads, pull(gradient)[0])

    def _head(self, params: Arrays, micro: Any) -> list[Any]:
        """What comes before the blocks."""
        known = self._known(params, micro, self._leaves(micro), self._rest[1])
        return self._functions.evaluate(self._functions.enters, known)

    def _params(self, repeat: Any) -> list[Any]:
        return [params[repeat] for params in self._own.params]

    def _run(self, params: list[Any], x: list[Any], micro: Any, repeat: Any) -> list[Any]:
        """A stage's run of blocks, one after the other."""
        fixed, counted = self._own_state(micro, repeat)
        shared = self._shared_by(self._functions, micro)
        return self._chain(self._functions, Own(params, fixed, counted), shared, x)

    def _own_state(self, micro: Any, repeat: Any) -> tuple[list[Any], list[Any]]:
        fixed = [values[repeat] for values in self._own.fixed]
        counted = self._by_repeat([values[micro] for values in self._own.counted])
        return fixed, [values[repeat] for values in counted]

    def _shared_by(self, functions: Functions, micro: Any) -> dict[Any, Any]:
        """What all blocks read alike, those of every micro-batch first."""
        shared = dict(zip(functions.constant, self._shared, strict=True))
        if functions.of_batch:
            known = self._known(self._others, micro, self._leaves(micro), self._rest[1])
            values = functions.evaluate(functions.of_batch, known)
            shared |= dict(zip(functions.of_batch, values, strict=True))
        return shared

    def _chain(
        self, functions: Functions, own: Own, shared: dict[Any, Any], x: list[Any]
    ) -> list[Any]:
        import jax

        def block(x: list[Any], own: Own) -> tuple[list[Any], None]:
            arrays = {kind: iter(values) for kind, values in own._asdict().items()}
            in_order = [next(arrays[kind]) for kind in self._runner.kinds]
            return functions.block(in_order, shared, x), None

        if self._runner.recompute_blocks:
            block = jax.checkpoint(block)
        if jax.tree.leaves(own)[0].shape[0] == 1:
            return block(x, jax.tree.map(lambda a: a[0], own))[0]
        return jax.lax.scan(block, x, own)[0]

    def _leaves(self, micro: Any) -> list[Any]:
        return [leaf[micro] for leaf in self._micros]

    def _known(
        self, others: Arrays, micro: Any, leaves: Sequence[Any], metrics: Arrays
    ) -> dict[Any, Any]:
        fixed, counted = self._state
        state = {**fixed, **{path: values[micro] for path, values in counted.items()}}
        return self._runner.known(others, state, (self._rest[0], metrics), leaves)


def _results(carry: _Carry) -> dict[str, Any]:
    """What a backward pass changes."""
    names = ("own_grads", "grads_after", "metrics", "logs")
    return {name: getattr(carry, name) for name in names}


def _put(buffers: list[Any], slot: Any, values: list[Any]) -> list[Any]:
    return [buffer.at[slot].set(value) for buffer, value in zip(buffers, values, strict=True)]


def _taken(buffers: list[Any], slot: Any) -> list[Any]:
    return [buffer[slot] for buffer in buffers]


def _added(grads: Arrays, more: Arrays) -> Arrays:
    return {path: grads[path] + more[path] for path in grads}
