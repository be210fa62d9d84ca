"""Gradient accumulation: several micro-batches, one step of the optimizer.

The numbers are those of one batch of all the rows, for models whose rows do not meet: each
micro-batch counts by its rows, also in what is logged; learning-rate schedules and moving averages
of weights count steps of the optimizer. Batch statistics are those of each micro-batch in turn, and
dropout draws a new mask for each.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import BatchError
from ..jaxprs.edits import equations
from ..jaxprs.row_parts import Gathered
from ..program import Arrays, Aux, Batch, Logs, Program, TrainState
from ..scoped import scoped
from .gradient import Gradient
from .metric_sums import counted
from .platform import traced_for
from .sharing import Sharing

Way = Literal["side by side", "in a loop", "written out"]


def accumulating_step(
    program: Program, gradient: Callable[[Program, float], Gradient], sharing: Sharing
) -> Callable[[TrainState, Sequence[Batch]], tuple[TrainState, Logs]]:
    """The pure step ``(state, micro-batches) -> (state, logs)``.

    ``gradient(program, share)`` is that of so much of the program's loss. Where it costs no memory,
    micro-batches are taken side by side; see :func:`side_by_side`. Else gradients gathered so far
    are pieces at levels 2 and 3 of ZeRO, to which each micro-batch is added over the devices.
    Below, every device gathers its own part, and the parts are added once; see ``row_parts.py``.
    """

    def train_step(whole: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, Logs]:
        check_alike(batches, "accumulate= above 1 a step takes a tuple of micro-batches")
        micro = _Micro(program, gradient, sharing)
        run = _WAYS[_way_override.get() or _way(micro, whole, batches)]
        state, grads, logs = run(micro, whole, batches)
        slots = program.noting(state.slots, logs.get("loss"))
        params, slots = program.update(state.params, grads, slots)
        return state._replace(params=params, slots=slots), logs

    return train_step


@dataclass(frozen=True)
class _Micro:
    """One micro-batch of several."""

    program: Program
    gradient: Callable[[Program, float], Gradient]
    sharing: Sharing

    def gradients(
        self, state: TrainState, batch: Batch, share: float, times: int = 0
    ) -> tuple[Aux, dict[str, Any]]:
        """Gradients of a share of the loss: pieces, or in parts, or not yet summed over rows.

        ``times`` is how many such micro-batches are written out; none where they are a loop's.
        """
        gradient, sharing = self.gradient(self.program, share), self.sharing
        if sharing.level < 2:
            gradient = sharing.in_parts(gradient, batch, times)
            gradient = gradient if times else sharing.leaving_in_turn(gradient)
        elif sharing.level == 2 and times:
            # In a loop XLA would add up whole gradients and move the reduce-scatter behind it.
            gradient = sharing.in_parts(gradient, batch, narrow=True)
        aux, grads = gradient(state.params, state, batch)
        if sharing.level < 2:
            return aux, grads
        return aux, sharing.accumulate(sharing.summed(grads, state.params))

    def measured(
        self, state: TrainState, aux: Aux, batch: Batch, rows: float
    ) -> tuple[TrainState, Logs]:
        """The state after a micro-batch, with parameters and slots as before, and its logs.

        ``rows`` is its share in the rows of the step.
        """
        metrics, logs = self.program.measure(aux.metrics, self.weighed(aux, rows), batch)
        return state._replace(state=aux.state, metrics=metrics), logs

    def weighed(self, aux: Aux, rows: Any) -> Aux:
        """A micro-batch's results as they are measured: metrics weigh each loss by its rows."""
        return aux._replace(loss=aux.loss / rows) if self.program.reduction == "sum" else aux

    def logs(self, per_micro: Sequence[Logs], rows: Sequence[float]) -> Logs:
        """The logs of a step from those of its micro-batches."""
        if self.program.logs == "of all counted":
            return per_micro[-1]
        return {
            name: sum(share * logs[name] for share, logs in zip(rows, per_micro, strict=True))
            for name in per_micro[-1]
        }


_way_override: ContextVar[Way | None] = ContextVar("accumulating", default=None)


def accumulating_in(way: Way | None) -> contextlib.AbstractContextManager[None]:
    """Trace accumulation in this way, whatever the devices and the sizes are."""
    return scoped(_way_override, way)


def _way(micro: _Micro, whole: TrainState, batches: Sequence[Batch]) -> Way:
    """The faster way to take these micro-batches.

    A loop is right for accelerators: compiled once, with the memory of one micro-batch. On CPU it
    is written out, for XLA's CPU compiler runs convolutions many times slower inside a loop.
    """
    if len(set(map(_shapes, batches))) > 1:
        return "written out"
    by_xla = micro.sharing.by is None  # side by side, rows are a dim that no sum is found over
    if by_xla and saves_nothing_in_turn(micro.program, whole, batches, micro.sharing.pieces):
        return "side by side"
    return "written out" if traced_for() == "cpu" else "in a loop"


def _side_by_side(
    micro: _Micro, whole: TrainState, batches: Sequence[Batch]
) -> tuple[TrainState, Arrays, Logs]:
    stacked = _stacked(batches)
    gradient = micro.gradient(side_by_side(micro.program), _shares(micro.program, batches)[0])
    gradient = micro.sharing.in_loops(gradient)
    aux, grads = gradient(whole.params, whole, stacked)

    rows = _row_shares(batches)

    def measure(metrics: Arrays, results: Any) -> tuple[Arrays, Logs]:
        loss, outputs, batch = results
        aux = micro.weighed(Aux(loss, outputs, whole.state, metrics), rows[0])
        return micro.program.measure(metrics, aux, batch)

    results = aux.loss, aux.outputs, stacked
    if micro.program.logs == "of all counted":
        metrics, logs = counted(measure)(whole.metrics, results)
    else:
        metrics, every = whole.metrics, list[Logs]()
        for number in range(len(batches)):
            one = jax.tree.map(lambda array, number=number: array[number], results)
            metrics, logs = measure(metrics, one)
            every.append(logs)
        logs = micro.logs(every, rows)
    return whole._replace(metrics=metrics), micro.sharing.accumulate(grads), logs


def _in_a_loop(
    micro: _Micro, whole: TrainState, batches: Sequence[Batch]
) -> tuple[TrainState, Arrays, Logs]:
    share, rows = _shares(micro.program, batches)[0], _row_shares(batches)
    sharing, ndims = micro.sharing, {path: value.ndim for path, value in whole.params.items()}

    # Only what a micro-batch changes travels around the loop.
    def body(carry: Any, batch: Batch) -> tuple[Any, Logs]:
        state, metrics, grads = carry
        before = whole._replace(state=state, metrics=metrics)
        aux, some = micro.gradients(before, batch, share)
        grads = sharing.accumulate({path: grads[path] + some[path] for path in some})
        after, logs = micro.measured(before, aux, batch, rows[0])
        return (after.state, after.metrics, grads), logs

    _, like = jax.eval_shape(functools.partial(micro.gradients, share=share), whole, batches[0])
    zeros = {
        path: sharing.part(jnp.zeros(grad.shape, grad.dtype), ndims[path])
        for path, grad in like.items()
    }
    first = whole.state, whole.metrics, sharing.accumulate(zeros)
    (state, metrics, grads), logs = jax.lax.scan(body, first, _stacked(batches))
    grads = sharing.summed(grads, whole.params)
    every = [
        jax.tree.map(lambda stacked, number=number: stacked[number], logs)
        for number in range(len(rows))
    ]
    return whole._replace(state=state, metrics=metrics), grads, micro.logs(every, rows)


def _written_out(
    micro: _Micro, whole: TrainState, batches: Sequence[Batch]
) -> tuple[TrainState, Arrays, Logs]:
    state, every = whole, list[Logs]()
    gathered: dict[str, Gathered] = {}
    rows = _row_shares(batches)
    for batch, share, part in zip(batches, _shares(micro.program, batches), rows, strict=True):
        aux, some = micro.gradients(state, batch, share, times=len(batches))
        gathered = {path: gathered.get(path, Gathered()).plus(some[path]) for path in some}
        state, logs = micro.measured(state, aux, batch, part)
        every.append(logs)
    sharing, whole_grads = micro.sharing, {}
    for grads in _by_form(gathered, whole.params):
        for path, grad in sharing.summed(grads, whole.params).items():
            whole_grads[path] = whole_grads[path] + grad if path in whole_grads else grad
    return state, sharing.accumulate(whole_grads), micro.logs(every, rows)


def _by_form(gathered: dict[str, Gathered], params: Arrays) -> list[Arrays]:
    """What was gathered of each gradient: those in parts, and those that are not."""
    totals = [(path, grad) for path, sums in gathered.items() for grad in sums.totals()]
    in_parts = {path: grad for path, grad in totals if grad.ndim > params[path].ndim}
    return [in_parts, {path: grad for path, grad in totals if grad.ndim == params[path].ndim}]


_WAYS: dict[Way, Callable[..., tuple[TrainState, Arrays, Logs]]] = {
    "side by side": _side_by_side,
    "in a loop": _in_a_loop,
    "written out": _written_out,
}


def check_alike(batches: Any, takes: str) -> None:
    """Raise :class:`BatchError` for what is not a tuple of batches of one kind, as one batch is.

    ``takes`` says which option asks for such a tuple.
    """
    kinds = [_kind(batch) for batch in batches] if isinstance(batches, tuple | list) else []
    if len(set(kinds)) != 1:
        shapes = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", batches)
        raise BatchError(
            f"with {takes}, all of one kind; received {shapes}. Pass (batch, batch), or call "
            "Trainer.steps, which takes batches one by one."
        )


def _kind(batch: Batch) -> tuple[Any, ...]:
    """Not by the tree: a padded batch differs there from one that is not."""
    leaves = jax.tree.leaves(batch)
    return tuple((np.ndim(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)


def _stacked(batches: Sequence[Batch]) -> Batch:
    return jax.tree.map(lambda *parts: jax.numpy.stack(parts), *batches)


def _shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    return tuple(leaf.shape for leaf in jax.tree.leaves(batch))


def _shares(program: Program, batches: Sequence[Batch]) -> list[float]:
    """The weight of each micro-batch's loss: its share of the rows, or 1 where losses are sums."""
    return [1.0] * len(batches) if program.reduction == "sum" else _row_shares(batches)


def _row_shares(batches: Sequence[Batch]) -> list[float]:
    """The share of each micro-batch in the rows of the step."""
    from .padding import rows_of  # which needs JAX as it loads

    rows = [rows_of(batch) for batch in batches]
    return [count / sum(rows) for count in rows]


# Side by side, where taking micro-batches in turn would save no memory. Accumulation is asked for
# because the activations of all rows together do not fit. Where they take less than the gradients
# that would be gathered, a step in turn is only slower: the same operations on fewer rows each, k
# times. Side by side each micro-batch is still computed by itself (batch statistics are its own),
# and every gradient comes out summed over all of them.


def side_by_side(program: Program) -> Program:
    """The program that takes batches stacked along a new first dim; its loss is their sum.

    Losses and outputs in :class:`~meshwright.program.Aux` are stacked likewise.
    """

    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        def one(batch: Batch) -> tuple[Any, Aux]:
            return program.loss(params, whole, batch, training)

        apart, shared = 0, cast(Any, None)
        values, aux = jax.vmap(one, out_axes=(0, Aux(apart, apart, shared, shared)))(batch)
        return values.sum(), aux

    return replace(program, loss=loss)


def saves_nothing_in_turn(
    program: Program, whole: TrainState, batches: Sequence[Batch], pieces: int
) -> bool:
    """Whether these batches may be taken side by side, with no more memory than in turn.

    They may where no batch changes what the next one reads: a seed, or batch statistics. Their
    activations, over ``pieces`` pieces of the rows, are counted as if all were kept at once.
    """

    def run(state: Arrays, metrics: Arrays, params: Arrays, batch: Batch) -> Any:
        _, aux = program.loss(params, whole._replace(state=state, metrics=metrics), batch, True)
        return aux.state, aux.metrics, aux

    closed = jax.make_jaxpr(run)(whole.state, whole.metrics, whole.params, batches[0])
    count = len(whole.state) + len(whole.metrics)
    if closed.jaxpr.outvars[:count] != closed.jaxpr.invars[:count]:
        return False
    computed = sum(_nbytes(var) for eqn in equations(closed) for var in eqn.outvars)
    gathered = sum(map(_nbytes, jax.tree.leaves(whole.params)))
    return (len(batches) - 1) * computed <= pieces * gathered


def _nbytes(value: Any) -> int:
    shaped = getattr(value, "aval", value)
    return math.prod(getattr(shaped, "shape", ())) * getattr(shaped.dtype, "itemsize", 0)
