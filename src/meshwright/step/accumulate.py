"""Gradient accumulation: several micro-batches, one step of the optimizer.

The numbers are those of one batch of all the rows, for models whose rows do not meet: each
micro-batch counts by its rows, learning-rate schedules and moving averages of weights count steps
of the optimizer. Batch statistics are those of each micro-batch in turn, and dropout draws anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from ..program import Arrays, Aux, Batch, Logs, Program, TrainState
from .parts import Pieces, add_parts, in_parts, sum_parts
from .sharing import Sharing

Gradient = Callable[[Arrays, TrainState, Batch], tuple[Aux, Arrays]]
_Carry = tuple[TrainState, Arrays]  # with the gradients gathered so far
_MicroStep = Callable[[_Carry, Batch, float], tuple[_Carry, Logs]]


def accumulating_step(
    program: Program, gradient: Gradient, sharing: Sharing
) -> Callable[[TrainState, Sequence[Batch]], tuple[TrainState, Logs]]:
    """The pure step ``(state, micro-batches) -> (state, logs)``.

    Gradients gathered so far are pieces at levels 2 and 3 of ZeRO, to which each micro-batch is
    added over the devices. Below, every device gathers its own part, and the parts are added once.
    """

    def differentiate(state: TrainState, batch: Batch) -> tuple[Aux, Arrays]:
        pieces = Pieces(sharing.mesh, sharing.axes, _rows(batch))
        return in_parts(gradient, pieces)(state.params, state, batch)

    def micro_step(carry: _Carry, batch: Batch, share: float) -> tuple[_Carry, Logs]:
        state, grads = carry
        if sharing.level < 2:
            aux, some = differentiate(state, batch)
        else:
            aux, some = gradient(state.params, state, batch)
        some = sharing.accumulate({path: share * grad for path, grad in some.items()})
        grads = sharing.accumulate({path: add_parts(grads[path], some[path]) for path in some})
        metrics, logs = program.measure(aux.metrics, aux, batch)
        return (state._replace(state=aux.state, metrics=metrics), grads), logs

    def zeros(whole: TrainState, batch: Batch) -> Arrays:
        import jax
        import jax.numpy as jnp

        if sharing.level >= 2:
            zeros = {path: jnp.zeros_like(value) for path, value in whole.params.items()}
            return sharing.accumulate(zeros)
        _, like = jax.eval_shape(differentiate, whole, batch)
        return {
            path: sharing.part(jnp.zeros(grad.shape, grad.dtype), whole.params[path].ndim)
            for path, grad in like.items()
        }

    def train_step(whole: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, Logs]:
        shares = _shares(program, batches)
        run = _in_a_loop if _loops() and len(set(map(_shapes, batches))) == 1 else _written_out
        (state, grads), logs = run(micro_step, (whole, zeros(whole, batches[0])), batches, shares)
        grads = {path: sum_parts(grads[path], value.ndim) for path, value in state.params.items()}
        params, slots = program.update(state.params, grads, state.slots)
        return state._replace(params=params, slots=slots), logs

    return train_step


@contextlib.contextmanager
def accumulating_in_loops(loops: bool) -> Iterator[None]:
    """Trace accumulation as one loop, or written out, whatever the present devices are.

    A loop is right for accelerators: compiled once, with the memory of one micro-batch. On CPU it
    is written out, for XLA's CPU compiler runs convolutions many times slower inside a loop.
    """
    token = _asked.set(loops)
    try:
        yield
    finally:
        _asked.reset(token)


_asked: ContextVar[bool | None] = ContextVar("accumulating_in_loops", default=None)


def _loops() -> bool:
    import jax

    asked = _asked.get()
    return jax.default_backend() != "cpu" if asked is None else asked


def _in_a_loop(
    micro_step: _MicroStep, carry: _Carry, batches: Sequence[Batch], shares: list[float]
) -> tuple[_Carry, Logs]:
    import jax
    import jax.numpy as jnp

    # Only what a micro-batch changes travels around the loop.
    whole = carry[0]

    def body(carry: Any, batch: Batch) -> tuple[Any, Logs]:
        state, metrics, grads = carry
        now = whole._replace(state=state, metrics=metrics)
        (after, grads), logs = micro_step((now, grads), batch, shares[0])
        return (after.state, after.metrics, grads), logs

    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *batches)
    first = whole.state, whole.metrics, carry[1]
    (state, metrics, grads), logs = jax.lax.scan(body, first, stacked)
    last = jax.tree.map(lambda each: each[-1], logs)
    return (whole._replace(state=state, metrics=metrics), grads), last


def _written_out(
    micro_step: _MicroStep, carry: _Carry, batches: Sequence[Batch], shares: list[float]
) -> tuple[_Carry, Logs]:
    import jax

    logs: Logs = {}
    for batch, share in zip(batches, shares, strict=True):
        carry, logs = micro_step(carry, batch, share)
        # The next one waits, or the activations of several would be alive at once.
        carry = jax.lax.optimization_barrier(carry)
    return carry, logs


def _rows(batch: Batch) -> int:
    """The rows that are computed; none where the batch's first array has no dims."""
    import jax

    return next((leaf.shape[0] for leaf in jax.tree.leaves(batch)[:1] if leaf.ndim), 0)


def _shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    import jax

    return tuple(leaf.shape for leaf in jax.tree.leaves(batch))


def _shares(program: Program, batches: Sequence[Batch]) -> list[float]:
    """What each micro-batch's loss counts: its share of the rows, or one where losses are sums."""
    from .padding import rows_of

    if program.reduction == "sum":
        return [1.0] * len(batches)
    rows = [rows_of(batch) for batch in batches]
    return [count / sum(rows) for count in rows]
