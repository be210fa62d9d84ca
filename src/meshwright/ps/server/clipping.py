"""Clipping by norms in a round, of the mean: a server tells its squares, and gets the sums of all.

A norm may go over several servers: a variable that is cut, and all variables of an optimizer
together. So a round whose gradients are to be clipped is not applied when it is complete, but when
a worker that has asked every server sends the sum of the squares. Squares are by key: a
variable's name for ``clipnorm``, the group clipped together for ``global_clipnorm``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .groups import Group, Groups
from .rounds import Gradient

Squares = dict[str, float]


@dataclass(frozen=True)
class Due:
    """The mean of a round that has all its gradients; ``squares`` are of those to be clipped."""

    means: list[Gradient]
    squares: Squares


def due_of(groups: Groups, means: list[Gradient]) -> Due:
    """What a server tells of the mean of a round."""
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
    each, together = group.twin.clipnorm, group.twin.global_clipnorm
    limit = each if each is not None else together
    assert limit is not None
    if each is None and not math.isfinite(norm):
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
