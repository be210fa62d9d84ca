"""Gradient accumulation: several micro-batches, one step of the optimizer.

The numbers are those of one batch of all the rows, for models whose rows do not meet: each
micro-batch counts by its rows, learning-rate schedules and moving averages of weights count steps
of the optimizer. Batch statistics are those of each micro-batch in turn, and dropout draws anew.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..program import Arrays, Aux, Batch, Logs, Program, TrainState
from .parts import Gathered, Pieces, in_parts, sum_parts
from .sharing import Sharing

Gradient = Callable[[Arrays, TrainState, Batch], tuple[Aux, Arrays]]


def accumulating_step(
    program: Program, gradient: Callable[[float], Gradient], sharing: Sharing
) -> Callable[[TrainState, Sequence[Batch]], tuple[TrainState, Logs]]:
    """The pure step ``(state, micro-batches) -> (state, logs)``.

    ``gradient(share)`` is the gradient of so much of the loss. Gradients gathered so far are pieces
    at levels 2 and 3 of ZeRO, to which each micro-batch is added over the devices. Below, every
    device gathers its own part, and the parts are added once; see ``parts.py``.
    """

    def train_step(whole: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, Logs]:
        run = _in_a_loop if _loops() and len(set(map(_shapes, batches))) == 1 else _written_out
        state, grads, logs = run(_Micro(program, gradient, sharing), whole, batches)
        params, slots = program.update(state.params, grads, state.slots)
        return state._replace(params=params, slots=slots), logs

    return train_step


@dataclass(frozen=True)
class _Micro:
    """One micro-batch of several."""

    program: Program
    gradient: Callable[[float], Gradient]
    sharing: Sharing

    def gradients(
        self, state: TrainState, batch: Batch, share: float, times: int = 0
    ) -> tuple[Aux, dict[str, Any]]:
        """Gradients of a share of the loss: pieces, or in parts, or not yet summed over rows."""
        gradient = self.gradient(share)
        if self.sharing.level >= 2:
            aux, grads = gradient(state.params, state, batch)
            return aux, self.sharing.accumulate(grads)
        pieces = Pieces(self.sharing.mesh, self.sharing.axes, _rows(batch), times)
        return in_parts(gradient, pieces)(state.params, state, batch)

    def measured(self, state: TrainState, aux: Aux, batch: Batch) -> tuple[TrainState, Logs]:
        """The state after a micro-batch, with parameters and slots as before."""
        metrics, logs = self.program.measure(aux.metrics, aux, batch)
        return state._replace(state=aux.state, metrics=metrics), logs


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
    micro: _Micro, whole: TrainState, batches: Sequence[Batch]
) -> tuple[TrainState, Arrays, Logs]:
    import jax
    import jax.numpy as jnp

    share = _shares(micro.program, batches)[0]
    sharing, ndims = micro.sharing, {path: value.ndim for path, value in whole.params.items()}

    # Only what a micro-batch changes travels around the loop.
    def body(carry: Any, batch: Batch) -> tuple[Any, Logs]:
        state, metrics, grads = carry
        before = whole._replace(state=state, metrics=metrics)
        aux, some = micro.gradients(before, batch, share)
        grads = sharing.accumulate({path: grads[path] + some[path] for path in some})
        after, logs = micro.measured(before, aux, batch)
        return (after.state, after.metrics, grads), logs

    _, like = jax.eval_shape(functools.partial(micro.gradients, share=share), whole, batches[0])
    zeros = {
        path: sharing.part(jnp.zeros(grad.shape, grad.dtype), ndims[path])
        for path, grad in like.items()
    }
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *batches)
    first = whole.state, whole.metrics, sharing.accumulate(zeros)
    (state, metrics, grads), logs = jax.lax.scan(body, first, stacked)
    grads = {path: sum_parts(grad, ndims[path]) for path, grad in grads.items()}
    last = jax.tree.map(lambda each: each[-1], logs)
    return whole._replace(state=state, metrics=metrics), grads, last


def _written_out(
    micro: _Micro, whole: TrainState, batches: Sequence[Batch]
) -> tuple[TrainState, Arrays, Logs]:
    state, logs = whole, dict[str, Any]()
    gathered: dict[str, Gathered] = {}
    for batch, share in zip(batches, _shares(micro.program, batches), strict=True):
        aux, some = micro.gradients(state, batch, share, times=len(batches))
        gathered = {path: gathered.get(path, Gathered()).plus(some[path]) for path in some}
        state, logs = micro.measured(state, aux, batch)
    grads = {path: each.total(whole.params[path].ndim) for path, each in gathered.items()}
    return state, micro.sharing.accumulate(grads), logs


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
