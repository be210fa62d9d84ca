"""The progress of a run on one line: how far, how long still, loss and metrics, how fast.

Keras' own bar is a callback that sees every batch, so no steps could be taken together, and it
fetches the loss each time, so the devices wait. This one draws a few times a second and shows the
newest figures that are ready.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ..program import Logs
from ..units import clock_text
from .logs import flat, on_host, texts

_SECONDS_BETWEEN = 0.1
_SECONDS_OF_RATE = 5.0  # steps/s is that of the last seconds, not of a start with compilation
_BAR = 20
# Ranks of the bar in its full length and in half of it.
_LONG_BAR, _SHORT_BAR = 5, 3


class Part(NamedTuple):
    """A part of the line; in a narrow terminal those of the highest rank are left out first."""

    text: str
    rank: int


class Rates(Protocol):
    """How fast a run is: the end of its line, which depends on who takes the steps."""

    def begin(self) -> None:
        """An epoch begins."""
        ...

    def look(self) -> None:
        """Note what is counted now."""
        ...

    def parts(self, steps_per_s: float | None, ended: bool) -> list[Part]:
        """The parts to show, as of the last look; ``steps_per_s`` is that of the last seconds."""
        ...


class Progress:
    """Draws on standard output; outside of terminals and notebooks, one line per epoch."""

    def __init__(
        self,
        epochs: int,
        steps: int | None,
        rates: Rates,
        clock: Callable[[], float] = time.perf_counter,
        live: bool | None = None,
    ) -> None:
        self._epochs, self._steps = epochs, steps
        self._rates, self._clock = rates, clock
        self.live = is_live() if live is None else live
        self._drawn_at = -math.inf
        self._epoch, self._done, self._skipped = 0, 0, 0
        self._began, self._seconds = 0.0, 0.0
        self._newest: list[Logs] = []
        self._logs: Logs = {}
        self._marks: list[tuple[float, int]] = []  # when so many steps of the epoch were done

    def begin_epoch(self, epoch: int, done: int = 0) -> None:
        """An epoch begins, counted from 0, of which ``done`` steps were taken before."""
        self._epoch, self._done, self._skipped, self._began = epoch, done, done, self._clock()
        self._newest, self._logs = [], {}
        self._marks = []
        self._rates.begin()

    def after(self, done: int, logs: Logs) -> None:
        """``done`` steps of this epoch have begun; the logs may still be computing."""
        self._done = done
        self._newest = [*self._newest[-15:], logs]
        now = self._clock()
        if now - self._drawn_at < _SECONDS_BETWEEN:
            return
        self._drawn_at = now
        self._rates.look()
        self._take_ready()
        finished = self._done - len(self._newest)  # what is under way does not count
        self._marks = [m for m in self._marks if now - m[0] < _SECONDS_OF_RATE][-100:]
        self._marks.append((now, max(finished, 0)))
        if self.live:
            _draw("\r", self._fitted_line(), "\x1b[K")

    def trained(self) -> None:
        """The last step of the epoch is done; validation may follow."""
        self._seconds = self._clock() - self._began
        if self._done > self._skipped:
            self._rates.look()

    def end_epoch(self, logs: Logs) -> None:
        """The epoch has ended with these logs, on the host."""
        self._steps = self._done
        seconds = self._seconds
        self._logs = dict(logs)
        rate = (self._done - self._skipped) / seconds if seconds else None
        start = "\r" if self.live else ""
        _draw(start, self._line(rate, clock_text(seconds)), "\x1b[K\n" if self.live else "\n")

    def _take_ready(self) -> None:
        """The newest logs that are there; older ones are forgotten."""
        for at in range(len(self._newest) - 1, -1, -1):
            if all(map(_is_ready, flat(self._newest[at]).values())):
                self._logs = on_host(self._newest[at])
                self._newest = self._newest[at + 1 :]
                return

    def _rate(self) -> float | None:
        """Recent steps per second."""
        (first, before), (last, after) = self._marks[0], self._marks[-1]
        return (after - before) / (last - first) if after > before else None

    def _fitted_line(self) -> str:
        """The line as wide as the terminal: what matters least goes first, and nothing is cut."""
        return fitted(self._parts(self._rate()), shutil.get_terminal_size().columns - 1)

    def _line(self, rate: float | None, ended: str) -> str:
        return "  ".join(text for text, _ in self._parts(rate, ended))

    def _parts(self, rate: float | None, ended: str | None = None) -> list[Part]:
        parts = [Part(f"epoch {self._epoch + 1}/{self._epochs}", 0)]
        if self._steps:
            filled = min(_BAR, _BAR * self._done // self._steps)
            parts.append(Part("━" * filled + "─" * (_BAR - filled), _LONG_BAR))
        parts.append(Part(f"{self._done}/{self._steps or '?'}", 0))
        if ended is not None:
            parts.append(Part(ended, 1))
        elif rate and self._steps:
            still = (self._steps - self._done) / rate
            whole = still + (self._epochs - self._epoch - 1) * self._steps / rate
            parts.append(Part(f"{clock_text(still)} left", 1))
            if whole > still:
                parts.append(Part(f"{clock_text(whole)} to the end", 8))
        measured = texts(dict(sorted(self._logs.items(), key=lambda item: item[0] != "loss")))
        # Of many metrics the last go first.
        parts += [Part(text, 2 if not at else 6) for at, text in enumerate(measured)]
        parts += self._rates.parts(rate, ended is not None)
        return [part for part in parts if part.text]


def fitted(parts: list[Part], width: int) -> str:
    """Parts of a line in a width: those of the highest rank are left out first, the last of equal.

    When it is the bar's turn, the bar becomes shorter first.

    >>> shown = ("epoch 1/2", 0), ("━" * 20, _LONG_BAR), ("5/9", 0), ("12 steps/s", 7)
    >>> parts = [Part(*text_and_rank) for text_and_rank in shown]
    >>> for width in (60, 40, 30, 20):
    ...     print(fitted(parts, width))
    epoch 1/2  ━━━━━━━━━━━━━━━━━━━━  5/9  12 steps/s
    epoch 1/2  ━━━━━━━━━━━━━━━━━━━━  5/9
    epoch 1/2  ━━━━━━━━━━  5/9
    epoch 1/2  5/9
    """
    parts = list(parts)
    while len(line := "  ".join(text for text, _ in parts)) > width:
        rank = max(rank for _, rank in parts)
        if rank == 0:
            return line[:width]
        at = max(at for at, part in enumerate(parts) if part.rank == rank)
        text = parts[at].text
        if rank == _LONG_BAR:
            parts[at] = Part(text[::2], _SHORT_BAR)
        else:
            del parts[at]
    return line


def _is_ready(value: Any) -> bool:
    return not hasattr(value, "is_ready") or value.is_ready()


def is_live() -> bool:
    """Whether a line can be drawn over: in a terminal and in a notebook."""
    return sys.stdout.isatty() or "ipykernel" in sys.modules


def _draw(*texts: str) -> None:
    sys.stdout.write("".join(texts))
    sys.stdout.flush()
