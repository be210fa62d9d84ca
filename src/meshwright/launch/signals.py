"""Signals to a launcher: they go to the processes of its group, which may take their time."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Collection, Iterator

PREEMPTED = 75
PATIENCE_S = {signal.SIGTERM: 60.0, signal.SIGINT: 10.0}  # after Ctrl-C ranks may differ by a step
ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopping:
    """Whether the launcher was asked to stop, and how long its processes may still take.

    ``send`` is set while there are processes to pass a signal on to.
    """

    def __init__(self) -> None:
        self.number = 0
        self.until_s = float("inf")
        self.send: Callable[[int], None] | None = None

    def exit_code(self, codes: Collection[int], are_all: bool = False) -> int:
        """That of a group whose processes ended with these: 75 if they saved what they had.

        0 where SIGTERM came and all of them ended with 0, as servers do that have drained.
        """
        if PREEMPTED in codes:
            return PREEMPTED
        if are_all and self.number == signal.SIGTERM and not any(codes):
            return 0
        return 128 + self.number if self.number else 0

    def is_over(self) -> bool:
        """Whether they have had their time."""
        return time.monotonic() > self.until_s

    def hear(self, number: int) -> None:
        """Pass a signal on; a second one ends the processes at once.

        A terminal or a connection by ssh that is closed (SIGHUP) is a request to end.
        """
        number = signal.SIGTERM if number == signal.SIGHUP else number
        again, self.number = self.number, number
        patience_s = 0.0 if again else PATIENCE_S[signal.Signals(number)]
        self.until_s = time.monotonic() + patience_s
        if self.send is not None:
            self.send(number)


@contextlib.contextmanager
def passing_on() -> Iterator[Stopping]:
    """Inside, these signals are heard by the result and do nothing else; those ignored stay so."""
    stopping = Stopping()
    before = {
        n: signal.signal(n, lambda number, _: stopping.hear(number))
        for n in ASKED
        if signal.getsignal(n) != signal.SIG_IGN
    }
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
