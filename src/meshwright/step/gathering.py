"""Where a step of level 3 of ZeRO gathers parameters: where they are read, one after the other.

Left to itself, XLA may gather all parameters before the first layer: none of it waits for anything.
So each run of equations that read a gathered parameter is a stretch of its own, which gathers when
what it computes with is there, and again in the backward pass when the gradient has come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from .stretches import Cut, Equations, Stretch, but_gathered

_NEAR = 24  # equations between two that read one parameter, so that it is gathered once for both


def where_read(found: Equations, within: range | None = None) -> list[Stretch]:
    """A stretch for each parameter, or for several that are read among each other."""
    import jax

    policy = but_gathered(jax.checkpoint_policies.everything_saveable)
    joined: list[Stretch] = []
    for start, end in sorted(_runs(found, within or range(len(found.rest)))):
        if joined and start < joined[-1].end:
            joined[-1] = replace(joined[-1], end=max(end, joined[-1].end))
        else:
            joined.append(Stretch(start, end, policy, in_turn=True))
    return joined


def from_one_to_the_next(policy: Callable[..., Any]) -> Cut:
    """All of a function in stretches, each of which begins where a parameter is gathered."""

    def cut(found: Equations) -> list[Stretch]:
        starts = [0, *(each.start for each in where_read(found)[1:]), len(found.rest)]
        return [
            Stretch(start, end, but_gathered(policy), in_turn=True)
            for start, end in itertools.pairwise(starts)
        ]

    return cut


def also_between(cut: Cut) -> Cut:
    """The stretches of ``cut``, and between them those where parameters are read."""

    def both(found: Equations) -> list[Stretch]:
        stretches = [replace(each, in_turn=True) for each in cut(found)]
        ends = [0, *(each.end for each in stretches)]
        starts = [*(each.start for each in stretches), len(found.rest)]
        free = [range(*pair) for pair in zip(ends, starts, strict=True) if pair[0] < pair[1]]
        between = [each for part in free for each in where_read(found, part)]
        return sorted([*stretches, *between], key=lambda each: each.start)

    return both


def _runs(found: Equations, within: range) -> Iterator[tuple[int, int]]:
    read: dict[Any, list[int]] = {}
    for number in within:
        for var in found.gathered(found.rest[number]):
            read.setdefault(var, []).append(number)
    for numbers in read.values():
        start = before = numbers[0]
        for number in numbers[1:]:
            if number - before > _NEAR:
                yield start, before + 1
                start = number
            before = number
        yield start, before + 1
