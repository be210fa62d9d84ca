"""How far the host may run ahead of the devices."""

from __future__ import annotations

from collections import deque
from typing import Any

import jax

_CALLS_AHEAD = 16


class Backlog:
    """Waits for an old step once many newer ones were begun.

    A loop that never waits would lay out one batch after another, all alive at once.
    """

    def __init__(self) -> None:
        self._results: deque[Any] = deque()

    def add(self, result: Any) -> None:
        """Add the results of a step that was begun."""
        self._results.append(result)
        if len(self._results) > _CALLS_AHEAD:
            jax.block_until_ready(self._results.popleft())
