"""Reads that wait until the server has come as far as they ask."""

from __future__ import annotations

from typing import Any

from ..wire.message import Message
from .state import State


class Waiting:
    """Reads in the order in which they came."""

    def __init__(self) -> None:
        self._reads: list[tuple[str, Message]] = []

    def must_wait(self, state: State, message: Message) -> bool:
        """Whether a read asks for a round or a version that has not come."""
        rounds = message.head.get("round")
        if rounds is not None and state.rounds.applied < rounds:
            return True
        return state.version < _version(message.head.get("at_least"))

    def add(self, peer: str, message: Message) -> None:
        """Let a read wait; the same request, sent again, takes the place of the former."""
        number = message.head.get("id")
        self._reads = [
            (other, one)
            for other, one in self._reads
            if other != peer or one.head.get("id") != number
        ]
        self._reads.append((peer, message))

    def due(self, state: State) -> list[tuple[str, Message]]:
        """The reads that need wait no longer; they are no longer kept."""
        if not self._reads:
            return []
        due = [one for one in self._reads if not self.must_wait(state, one[1])]
        if due:
            self._reads = [one for one in self._reads if self.must_wait(state, one[1])]
        return due


def _version(at_least: Any) -> int:
    if isinstance(at_least, dict):
        at_least = at_least.get("version")
    return int(at_least or 0)
