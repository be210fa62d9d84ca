"""One step of an optimizer on a shard, or on some rows of one.

It walks through the arrays block by block, so that what it works with stays in the processor's
cache and takes no memory of the variable's size. The order of things is Keras' own: unscale,
accumulate, clip, decay, update, average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .delays import Delay
from .groups import ACCUMULATOR, AVERAGE, TOUCHED, Group, begin_averages
from .optimizers import Block, Moment, Twin
from .rows import add_rows, aggregate
from .shards import Shard

BLOCK_ELEMENTS = 1 << 15
_ADD, _STEP = "add", "step"  # what one step does with the gradient


@dataclass(frozen=True)
class _Plan:
    """What one step does, as numbers in the variable's dtype."""

    twin: Twin
    does: str
    constants: tuple[Any, ...]
    unscale: Any  # None: nothing
    divide_by: int | None  # gradients that were accumulated
    decay: Any  # of the weights, times the learning rate
    average_keep: Any  # None: no average is kept
    overwrite: bool


@dataclass(frozen=True)
class _Walked:
    """The flat arrays that a step walks through side by side; ``None`` for those it has not."""

    value: np.ndarray
    gradient: np.ndarray
    slots: tuple[np.ndarray, ...]
    accumulator: np.ndarray | None = None
    average: np.ndarray | None = None
    delay: Delay | None = None


class Stepper:
    """Runs the twins of optimizers; holds the little memory that they work in."""

    def __init__(self) -> None:
        self._rooms: dict[np.dtype, tuple[np.ndarray, ...]] = {}

    def dense(
        self,
        group: Group,
        shard: Shard,
        gradient: np.ndarray,
        scale: float = 1.0,
        delay: Delay | None = None,
    ) -> None:
        """One step with the gradient of the whole shard.

        ``scale`` multiplies the learning rate, and ``delay`` corrects the gradient.
        """
        plan = _plan(group, shard, scale)
        accumulator = shard.slots.get(ACCUMULATOR)
        average = shard.slots.get(AVERAGE)
        walked = _Walked(
            shard.values.reshape(-1),
            gradient.reshape(-1),
            tuple(shard.slot(name).reshape(-1) for name in group.twin.slots),
            None if accumulator is None else shard.slot(ACCUMULATOR).reshape(-1),
            None if average is None else shard.slot(AVERAGE).reshape(-1),
            delay,
        )
        self._walk(plan, walked)
        if plan.divide_by and TOUCHED in shard.slots:
            shard.slots[TOUCHED][...] = False
        shard.changed()
        shard.steps += 1

    def rows(
        self, group: Group, shard: Shard, rows: np.ndarray, values: np.ndarray, scale: float = 1.0
    ) -> None:
        """One step with the gradient of some rows; no other row changes, nor do its slots.

        For optimizers with a memory that is the "lazy" step: rows that had no gradient stand
        still, where the dense optimizer would move them on.
        """
        plan = _plan(group, shard, scale)
        rows, values = aggregate(rows, values.astype(shard.dtype, copy=False))
        if ACCUMULATOR in shard.slots:
            plan, rows, values = _accumulated(plan, shard, rows, values)
        names = [*group.twin.slots, *([AVERAGE] if begin_averages(shard) else [])]
        value, *slots = (np.take(shard.full(name), rows, axis=0) for name in (None, *names))
        flat = tuple(slot.reshape(-1) for slot in slots)
        count = len(group.twin.slots)
        average = flat[count] if len(flat) > count else None
        gradient = np.ascontiguousarray(values).reshape(-1)
        self._walk(plan, _Walked(value.reshape(-1), gradient, flat[:count], None, average))
        for name, part in zip((None, *names), (value, *slots), strict=True):
            shard.full(name)[rows] = part
        shard.changed(rows)
        shard.steps += 1

    def _walk(self, plan: _Plan, walked: _Walked) -> None:
        room = self._room(walked.value.dtype)
        size = len(walked.value)
        for start in range(0, size, BLOCK_ELEMENTS):
            here = slice(start, min(start + BLOCK_ELEMENTS, size))
            _block(plan, walked, here, [part[: here.stop - start] for part in room])

    def _room(self, dtype: np.dtype) -> tuple[np.ndarray, ...]:
        if dtype not in self._rooms:
            self._rooms[dtype] = tuple(np.empty(BLOCK_ELEMENTS, dtype) for _ in range(3))
        return self._rooms[dtype]


def _plan(group: Group, shard: Shard, scale: float) -> _Plan:
    twin, one = group.twin, shard.dtype.type
    every = twin.gradient_accumulation_steps
    count = shard.steps // every if every else shard.steps
    does = _ADD if every and (shard.steps + 1) % every else _STEP
    rate = one(group.rate_at(shard.steps) * scale)
    decay = group.decay_of(shard.name)
    scalars = {name: shard.slots[name] for name in twin.scalars}
    overwrite = twin.ema_overwrite_frequency
    return _Plan(
        twin,
        does,
        twin.constants(Moment(count, rate, scalars, one)) if does == _STEP else (),
        one(twin.loss_scale_factor) if twin.loss_scale_factor is not None else None,
        every if does == _STEP else None,
        one(decay) * rate if decay is not None else None,
        (one(twin.ema_momentum) if count else one(0)) if twin.use_ema else None,
        bool(twin.use_ema and overwrite and (count + 1) % overwrite == 0),
    )


def _accumulated(
    plan: _Plan, shard: Shard, rows: np.ndarray, values: np.ndarray
) -> tuple[_Plan, np.ndarray, np.ndarray]:
    """Put the gradient of these rows with those before it; on a step, give them all back."""
    if plan.unscale is not None:
        values, plan = values / plan.unscale, replace(plan, unscale=None)
    accumulator, touched = shard.full(ACCUMULATOR), shard.full(TOUCHED)
    add_rows(accumulator, rows, values)
    touched[rows] = True
    if plan.does == _ADD:
        return plan, rows, values
    rows = np.flatnonzero(touched[: shard.shape[0]])
    values = accumulator[rows]
    accumulator[rows] = 0
    touched[rows] = False
    return plan, rows, values


def _block(plan: _Plan, walked: _Walked, here: slice, room: Sequence[np.ndarray]) -> None:
    value = walked.value[here]
    accumulator = None if walked.accumulator is None else walked.accumulator[here]
    delay = None if walked.delay is None else walked.delay.part(here)
    if plan.does == _ADD:
        if accumulator is not None:
            accumulator += _raw(plan, value, walked.gradient[here], delay, room)
    else:
        gradient = _raw(plan, value, walked.gradient[here], delay, room)
        gradient = _clipped(plan, gradient, accumulator, room[0])
        if plan.decay is not None:
            np.multiply(value, plan.decay, out=room[1])
            value -= room[1]
        slots = [slot[here] for slot in walked.slots]
        plan.twin.update(Block(value, gradient, slots, room[1:], plan.constants))
    if walked.average is not None:
        _average(plan, value, walked.average[here], room[1])


def _raw(
    plan: _Plan,
    value: np.ndarray,
    gradient: np.ndarray,
    delay: Delay | None,
    room: Sequence[np.ndarray],
) -> np.ndarray:
    """The gradient in the variable's dtype, unscaled, its delay compensated."""
    mine = room[0]
    if gradient.dtype != mine.dtype:
        np.copyto(mine, gradient, casting="same_kind")
        gradient = mine
    if plan.unscale is not None:
        gradient = np.divide(gradient, plan.unscale, out=mine)
    return gradient if delay is None else delay.corrected(value, gradient)


def _clipped(
    plan: _Plan, gradient: np.ndarray, accumulator: np.ndarray | None, mine: np.ndarray
) -> np.ndarray:
    if plan.divide_by:
        if accumulator is not None:
            gradient = np.add(gradient, accumulator, out=mine)
            accumulator[...] = 0
        gradient = np.divide(gradient, plan.divide_by, out=mine)
    limit = plan.twin.clipvalue
    if limit is not None and limit > 0:
        gradient = np.clip(gradient, -limit, limit, out=mine)
    return gradient


def _average(plan: _Plan, value: np.ndarray, average: np.ndarray, work: np.ndarray) -> None:
    average *= plan.average_keep
    np.multiply(value, 1 - plan.average_keep, out=work)
    average += work
    if plan.overwrite:
        value[...] = average
