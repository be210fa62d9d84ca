"""What a scheduled function finds around it: the servers, its step, and its buffered updates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import TaskError
from .updates import Update, Updates

if TYPE_CHECKING:
    from ..shared.client import Servers
    from ..shared.placing import VariableSpec
    from ..shared.pushing import Acknowledged

Push = Callable[[Sequence[Update], Sequence["VariableSpec"]], "Acknowledged"]


@dataclass(eq=False)
class Context:
    """Where a function runs.

    ``index`` is the worker's and ``step`` the id of the call that runs. ``updates`` are what it has
    asked for so far. ``cache`` lives as long as the worker: a place for compiled things.
    ``settings`` are the strategy's, as the coordinator sent them.
    """

    servers: Servers
    task: str = "worker:0"
    index: int = 0
    step: int | None = None
    round: int | None = None  # synchronous training: which round the step is of,
    of: int = 0  # and how many steps make one
    updates: Updates = field(default_factory=Updates)
    cache: dict[Any, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    at_once: bool = False  # at_least_once=True: nothing is buffered
    iterator: Callable[[str], Any] | None = None  # the worker's end of an iterator, by its key
    notes: list[Any] = field(default_factory=list)  # go to the coordinator with the next result
    push_now: Push | None = None  # sends the step's updates; the runner's

    def change(self, update: Update) -> None:
        """Ask for a change: it is sent when the function returns, with the values of now."""
        if self.at_once:
            self.servers.push([update])
        else:
            self.updates.add(update.as_it_is_now())

    def note_once(self, note: Any) -> None:
        """Let the coordinator know something, once in this worker's life."""
        noted = self.cache.setdefault("noted", [])
        if note not in noted:
            noted.append(note)
            self.notes.append(note)

    def push(
        self, updates: Sequence[Update] = (), then_read: Sequence[VariableSpec] = ()
    ) -> Acknowledged:
        """Send these and the buffered updates of this step now, and wait until they are applied.

        The answer holds the values of ``then_read`` after that. Servers apply a step once, so
        a step can push once: raises :class:`~meshwright.errors.TaskError` the second time.
        """
        if self.push_now is None:
            raise TaskError("nothing can be pushed here: no scheduled function runs.", self.task)
        return self.push_now(updates, then_read)


class _Here(threading.local):
    context: Context | None = None


_here = _Here()


def current() -> Context | None:
    """The context of the function that runs in this thread; ``None`` outside of workers."""
    return _here.context


@contextmanager
def entered(context: Context) -> Iterator[Context]:
    """This thread is a worker's, while the block runs."""
    before, _here.context = _here.context, context
    try:
        yield context
    finally:
        _here.context = before
