"""The fewest bytes of variables from which others follow: a cut through equations.

Of a graph whose nodes are variables, each as wide as its bytes, a cut of the least width is as wide
as the largest flow (Ford and Fulkerson, 1956), which is found path by path.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

Node = Any  # that can be a key
Place = tuple[Node, int]


def narrowest(
    begins: Collection[Node],
    ends: Collection[Node],
    follows: Mapping[Node, Sequence[Node]],
    width: Mapping[Node, int],
) -> set[Node]:
    """The nodes of least width that all ways from ``begins`` to ``ends`` lead through; of cuts that
    are as wide, that nearest to where they begin.

    ``follows`` says which nodes follow on each one.

    >>> follows = {"a": ["gate"], "b": ["gate"], "gate": ["out"], "c": ["out"]}
    >>> width = {"a": 4, "b": 4, "gate": 4, "c": 4, "out": 9}
    >>> sorted(narrowest(["a", "b", "c"], ["out"], follows, width))
    ['c', 'gate']
    """
    flow = _Flow(set(begins), set(ends), follows, width)
    while path := flow.path():
        flow.push(path)
    return flow.cut()


# A node is two, what leads into it and what leads out of it, with its width between them.
_IN, _OUT = 0, 1


class _Flow:
    def __init__(
        self,
        begins: set[Node],
        ends: set[Node],
        follows: Mapping[Node, Sequence[Node]],
        width: Mapping[Node, int],
    ) -> None:
        self._begins, self._ends, self._follows, self._width = begins, ends, follows, width
        self._all = 1 + sum(width.values())
        self._through: dict[Node, int] = {}
        self._along: dict[tuple[Node, Node], int] = {}
        self._before: dict[Node, list[Node]] = {}
        for node, after in follows.items():
            for other in after:
                self._before.setdefault(other, []).append(node)

    def _next(self, at: Place) -> Iterable[tuple[Place, int]]:
        """Where more can flow to, and how much: flow that is there can also be taken back."""
        node, side = at
        through = self._through.get(node, 0)
        if side == _IN:
            yield (node, _OUT), self._width[node] - through
            for other in self._before.get(node, ()):
                yield (other, _OUT), self._along.get((other, node), 0)
        else:
            yield (node, _IN), through
            for other in self._follows.get(node, ()):
                yield (other, _IN), self._all

    def _reached(self) -> tuple[dict[Place, Place | None], Place | None]:
        """From where each place is reached, and an end that is."""
        came: dict[Place, Place | None] = {(node, _IN): None for node in self._begins}
        waiting = deque(came)
        while waiting:
            at = waiting.popleft()
            if at[1] == _OUT and at[0] in self._ends:
                return came, at
            for place, room in self._next(at):
                if room > 0 and place not in came:
                    came[place] = at
                    waiting.append(place)
        return came, None

    def path(self) -> list[Place]:
        """A way from a beginning to an end that has room; empty where there is none."""
        came, at = self._reached()
        path: list[Place] = []
        while at is not None:
            path.append(at)
            at = came[at]
        return path[::-1]

    def push(self, path: Sequence[Place]) -> None:
        """As much as a way has room for."""
        steps = list(itertools.pairwise(path))
        room = min(dict(self._next(at))[to] for at, to in steps)
        for (node, side), (other, _) in steps:
            if node == other:
                self._through[node] = self._through.get(node, 0) + (room if side == _IN else -room)
            elif side == _OUT:
                self._along[node, other] = self._along.get((node, other), 0) + room
            else:
                self._along[other, node] -= room

    def cut(self) -> set[Node]:
        """The nodes that are reached and have no room left."""
        came, _ = self._reached()
        return {node for node, side in came if side == _IN and (node, _OUT) not in came}
