"""Room for sums of gradients that the first stage makes, and for those that the last one makes.

All stages run one program, so each has room for every sum that any of them makes. What comes before
the blocks is differentiated by the first stage alone, and what comes after them by the last one
alone, so a sum of the one takes the room of a sum of the other that has dims of the same sizes: the
head of a Transformer that of its embedding. Sums with fewer bytes than what stages pass on stay
alone: compilers may copy more than these save.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..program import Arrays

Order = tuple[int, ...]  # of dims


class Around(NamedTuple):
    """Sums of gradients of what comes before the blocks and after them, by path; ``both`` are those
    that have one room, by the paths of what comes before."""

    before: Arrays
    after: Arrays
    both: Arrays


@dataclass(frozen=True)
class Rooms:
    """``of_after`` says which sums of what comes after the blocks take the room of a sum of what
    comes before, and in which order of dims they lie there.

    >>> from jax import ShapeDtypeStruct as shape
    >>> embed, head = shape((50, 8), "float32"), shape((8, 50), "float32")
    >>> Rooms.of({"embed": embed}, {"head": head}, {"embed": 2, "head": 2}, least_bytes=1600)
    Rooms(of_after={'head': ('embed', (1, 0))})
    """

    of_after: Mapping[str, tuple[str, Order]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        ndims: Mapping[str, int],
        least_bytes: int = 0,
    ) -> Rooms:
        """Of the shapes of sums, and how many dims each weight has: a sum in parts has one more.

        Those with less than ``least_bytes`` in a part stay alone. A weight that is read before and
        after has one room, the others find theirs from the largest on.
        """

        def is_large(path: str, shape: Any) -> bool:
            parts = len(shape.shape) - ndims[path]
            return math.prod(shape.shape[parts:]) * shape.dtype.itemsize >= least_bytes

        free = {path: shape for path, shape in before.items() if is_large(path, shape)}
        result: dict[str, tuple[str, Order]] = {}

        def take(path: str, candidates: list[str]) -> None:
            for other in candidates:
                room, parts = free[other], len(free[other].shape) - ndims[other]
                if parts != len(after[path].shape) - ndims[path]:
                    continue
                if (order := _order_in(room, after[path], parts)) is not None:
                    result[path] = other, order
                    del free[other]
                    return

        for path in after:
            take(path, [path] if path in free else [])
        for path in sorted(after, key=lambda path: -math.prod(after[path].shape)):
            if path not in result:
                take(path, [other for other in free if other not in after])
        return cls(result)

    def zeros(self, before: Arrays, after: Arrays) -> Around:
        """The rooms, of zeros for all sums."""
        shared = {of for of, _ in self.of_after.values()}
        return Around(
            {path: value for path, value in before.items() if path not in shared},
            {path: value for path, value in after.items() if path not in self.of_after},
            {path: value for path, value in before.items() if path in shared},
        )

    def with_before(self, sums: Around, more: Arrays) -> Around:
        """Sums with gradients of what comes before the blocks."""
        return sums._replace(before=_added(sums.before, more), both=_added(sums.both, more))

    def with_after(self, sums: Around, more: Arrays) -> Around:
        """Sums with gradients of what comes after the blocks."""
        in_rooms = {of: more[path].transpose(order) for path, (of, order) in self.of_after.items()}
        return sums._replace(after=_added(sums.after, more), both=_added(sums.both, in_rooms))

    def apart(self, sums: Around, is_first: Any, is_last: Any) -> tuple[Arrays, Arrays]:
        """Sums of what comes before the blocks, and of what comes after: in a room of both lie
        those of the former on the first stage, and of the latter on the last one."""
        before, after = dict(sums.before), dict(sums.after)
        for path, (of, order) in self.of_after.items():
            room = sums.both[of]
            if of == path:  # one weight's, which are added up over the stages
                before[of] = room
                continue
            before[of] = jnp.where(is_first, room, 0)
            back = sorted(range(len(order)), key=order.__getitem__)
            after[path] = jnp.where(is_last, room, 0).transpose(back)
        return before, after


def _added(sums: Arrays, more: Arrays) -> Arrays:
    return {path: value + more[path] if path in more else value for path, value in sums.items()}


def _order_in(room: Any, shape: Any, first: int) -> Order | None:
    """The order of dims in which an array has the shape of a room, if there is any; the ``first``
    ones stay in front."""
    if room.dtype != shape.dtype or sorted(room.shape) != sorted(shape.shape):
        return None
    if room.shape == shape.shape:
        return tuple(range(len(room.shape)))
    order, free = list(range(first)), list(range(first, len(shape.shape)))
    for size in room.shape[first:]:
        order.append(next(dim for dim in free if shape.shape[dim] == size))
        free.remove(order[-1])
    return tuple(order)
