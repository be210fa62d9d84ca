"""Synchronous training: the gradients of a round are applied once, together, or come too late.

A norm by which they are clipped may go over several servers: a variable that is cut, or all
variables of an optimizer. So such a round is not applied when it is complete, but when a worker
that has asked every server sends the sums of the squares: by variable for ``clipnorm``, by group
for ``global_clipnorm``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .groups import Group, Groups
from .rows import add_rows, aggregate

Squares = dict[str, float]


@dataclass(frozen=True)
class Gradient:
    """A gradient that is ready to be applied: of a whole shard, or of ``rows`` of it.

    ``together`` names those with which it is clipped by their common norm; empty: its group.
    """

    name: str
    values: np.ndarray
    rows: np.ndarray | None = None
    scale: float = 1.0
    compensation: float = 0.0
    together: str = ""
    adaptive: bool = False


@dataclass
class _Round:
    of: int
    steps: dict[int, tuple[Gradient, ...]] = field(default_factory=dict)


class Rounds:
    """Rounds count from 0; round r is applied when ``of`` different steps have given to it.

    Those that come later are dropped, as with the backup workers of Chen and others, 2016.
    """

    def __init__(self, applied: int = 0) -> None:
        self.applied = applied
        self.last: dict[str, float] = {}  # the squares that the round before was clipped with
        self._open: dict[int, _Round] = {}
        self._means: list[Gradient] | None = None  # of the next round, once it is complete

    @property
    def is_open(self) -> bool:
        """Whether some round has begun, and was not applied."""
        return bool(self._open)

    def offer(self, number: int, of: int, step: int, gradients: Sequence[Gradient]) -> bool:
        """Give a step's gradients to a round; ``False``: too late, they are dropped.

        The gradients are kept until the round is applied, so they must own their memory.
        """
        if number < self.applied:
            return False
        open_round = self._open.setdefault(number, _Round(of))
        if len(open_round.steps) >= open_round.of:
            return False
        open_round.steps[step] = tuple(gradients)
        return True

    def resize(self, number: int, of: int) -> None:
        """Change the number of steps that a round needs."""
        if number >= self.applied:
            self._open.setdefault(number, _Round(of)).of = of
            self._means = None

    def complete(self) -> list[Gradient] | None:
        """The mean of the next round's gradients, if it has all of them."""
        next_round = self._open.get(self.applied)
        if next_round is None or len(next_round.steps) < next_round.of:
            return None
        if self._means is None:
            # Where the round was made smaller these may be more than it needs: they were accepted.
            steps = sorted(next_round.steps)
            self._means = _means([next_round.steps[step] for step in steps], max(len(steps), 1))
        return self._means

    def end(self, squares: Mapping[str, float]) -> None:
        """The next round was applied, whose gradients to be clipped had these squares here."""
        del self._open[self.applied]
        self._means = None
        self.applied += 1
        self.last = dict(squares)

    def held(self) -> list[tuple[int, int, int, Gradient]]:
        """What waits: round, of, step, gradient; for a snapshot."""
        return [
            (number, open_round.of, step, gradient)
            for number, open_round in self._open.items()
            for step, gradients in open_round.steps.items()
            for gradient in gradients
        ]

    def sizes(self) -> list[tuple[int, int, list[int]]]:
        """The open rounds: number, how many steps are needed, and the ids of those that gave."""
        return [
            (number, open_round.of, sorted(open_round.steps))
            for number, open_round in self._open.items()
        ]


def _means(steps: Sequence[Sequence[Gradient]], count: int) -> list[Gradient]:
    """One gradient for each variable: their sum in the order of the steps, by the count."""
    by_name: dict[str, list[Gradient]] = {}
    for gradients in steps:
        for gradient in gradients:
            by_name.setdefault(gradient.name, []).append(gradient)
    return [_mean(gradients, count) for gradients in by_name.values()]


def _mean(gradients: Sequence[Gradient], count: int) -> Gradient:
    first = gradients[0]
    dense = [gradient.values for gradient in gradients if gradient.rows is None]
    sparse = [gradient for gradient in gradients if gradient.rows is not None]
    if not dense:
        rows = np.concatenate([np.asarray(gradient.rows) for gradient in sparse])
        rows, values = aggregate(rows, np.concatenate([gradient.values for gradient in sparse]))
        return replace(first, values=values / count, rows=rows, compensation=0.0)
    total = dense[0].copy()
    for values in dense[1:]:
        total += values
    for gradient in sparse:
        add_rows(total, np.asarray(gradient.rows), gradient.values)
    total /= count
    return replace(first, values=total, rows=None, compensation=0.0)


def restored(
    applied: int,
    sizes: Sequence[tuple[int, int, Sequence[int]]],
    held: Sequence[tuple[int, int, Gradient]],
    last: Mapping[str, float],
) -> Rounds:
    """The rounds that a snapshot holds."""
    rounds = Rounds(applied)
    rounds.last = dict(last)
    gradients: Mapping[tuple[int, int], list[Gradient]] = {
        (number, step): [] for number, _, steps in sizes for step in steps
    }
    for number, step, gradient in held:
        gradients[number, step].append(gradient)
    for number, of, steps in sizes:
        for step in steps:
            rounds.offer(number, of, step, gradients[number, step])
        rounds.resize(number, of)
    return rounds


@dataclass(frozen=True)
class Due:
    """The mean of a round that has all its gradients; ``squares`` are of those to be clipped."""

    means: list[Gradient]
    squares: Squares


def due_of(groups: Groups, means: list[Gradient]) -> Due:
    """What a server reports of the mean of a round."""
    squares: Squares = {}
    for gradient in means:
        group = _group(groups, gradient)
        if group.clips:
            unscaled = _square(gradient.values) / (group.twin.loss_scale_factor or 1.0) ** 2
            key = _key(group, gradient)
            squares[key] = squares.get(key, 0.0) + unscaled
    return Due(means, squares)


def clipped(groups: Groups, means: Sequence[Gradient], totals: Squares) -> list[Gradient]:
    """The mean as it is applied, where the squares of all servers come to ``totals``."""
    return [_clipped(_group(groups, gradient), gradient, totals) for gradient in means]


def _clipped(group: Group, gradient: Gradient, totals: Squares) -> Gradient:
    if not group.clips:
        return gradient
    share = _share(group, math.sqrt(totals[_key(group, gradient)]))
    return gradient if share == 1 else replace(gradient, values=gradient.values * share)


def _share(group: Group, norm: float) -> float:
    """How much is left of a gradient, as Keras has it."""
    own, together = group.twin.clipnorm, group.twin.global_clipnorm
    limit = own if own is not None else together
    assert limit is not None
    if own is None and not math.isfinite(norm):
        return math.nan
    return limit / max(norm, limit)


def _group(groups: Groups, gradient: Gradient) -> Group:
    group = groups.of(gradient.name)
    assert group is not None  # checked when the push came
    return group


def _key(group: Group, gradient: Gradient) -> str:
    if group.twin.clipnorm is not None:
        return f"variable {group.wholes.get(gradient.name, gradient.name)}"
    return f"together {gradient.together or group.name}"


def _square(values: np.ndarray) -> float:
    flat = values.reshape(-1).astype(np.float64, copy=False)
    return float(np.dot(flat, flat))
