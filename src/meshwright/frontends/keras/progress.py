"""The progress of ``fit`` on one line: how far, how long still, loss and metrics, how fast.

Keras' own bar is a callback: it wants to see every batch, so no steps are taken together, and it
fetches the loss each time, so the devices wait. This one is told where the loop is, draws a few
times a second, and shows the newest figures that are there without waiting.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from ...program import Logs
from .logs import flat, on_host, texts

_SECONDS_BETWEEN = 0.1
_SECONDS_OF_RATE = 5.0  # steps/s is that of the last seconds, not of a start with compilation
_BAR = 20
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


class Progress:
    """Draws on standard output; on what is no terminal, one line per epoch."""

    def __init__(
        self,
        epochs: int,
        steps: int | None,
        flops: Callable[[], float | None],
        clock: Callable[[], float] = time.perf_counter,
        live: bool | None = None,
    ) -> None:
        self._epochs, self._steps = epochs, steps
        self._count_flops, self._clock = flops, clock
        self._live = _is_live() if live is None else live
        self._flops: float | None = None
        self._counted = False
        self._drawn_at = -math.inf
        self._epoch, self._done, self._began, self._seconds = 0, 0, 0.0, 0.0
        self._newest: list[Logs] = []
        self._shown: Logs = {}
        self._marks: list[tuple[float, int]] = []  # when so many steps of the epoch were done

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins; counted from 0."""
        self._epoch, self._done, self._began = epoch, 0, self._clock()
        self._newest, self._shown = [], {}
        self._marks = []

    def after(self, done: int, logs: Logs) -> None:
        """So many steps of this epoch were begun; the logs may still be under way."""
        self._done = done
        self._newest = [*self._newest[-15:], logs]
        now = self._clock()
        if now - self._drawn_at < _SECONDS_BETWEEN:
            return
        self._drawn_at = now
        if not self._counted:
            self._flops, self._counted = self._count_flops(), True
        self._take_ready()
        finished = self._done - len(self._newest)  # what is under way does not count
        self._marks = [m for m in self._marks if now - m[0] < _SECONDS_OF_RATE][-100:]
        self._marks.append((now, max(finished, 0)))
        if self._live:
            _draw("\r", self._fitted_line(), "\x1b[K")

    def trained(self) -> None:
        """The last step of the epoch is done; validation may follow."""
        self._seconds = self._clock() - self._began

    def end_epoch(self, logs: Logs) -> None:
        """The epoch has ended with these logs, on the host."""
        self._steps = self._done
        seconds = self._seconds
        self._shown = dict(logs)
        rate = self._done / seconds if seconds else None
        start = "\r" if self._live else ""
        _draw(start, self._line(rate, clock(seconds)), "\x1b[K\n" if self._live else "\n")

    def _take_ready(self) -> None:
        """The newest logs that are there; older ones are forgotten."""
        for at in range(len(self._newest) - 1, -1, -1):
            if all(map(_is_ready, flat(self._newest[at]).values())):
                self._shown = on_host(self._newest[at])
                self._newest = self._newest[at + 1 :]
                return

    def _rate(self) -> float | None:
        """Steps per second of late."""
        (first, before), (last, after) = self._marks[0], self._marks[-1]
        return (after - before) / (last - first) if after > before else None

    def _fitted_line(self) -> str:
        """The line as wide as the terminal; the bar goes first."""
        width = shutil.get_terminal_size().columns - 1
        line = self._line(self._rate())
        return line if len(line) <= width else self._line(self._rate(), bar=False)[:width]

    def _line(self, rate: float | None, ended: str | None = None, bar: bool = True) -> str:
        parts = [f"epoch {self._epoch + 1}/{self._epochs}"]
        if self._steps and bar:
            filled = min(_BAR, _BAR * self._done // self._steps)
            parts.append("━" * filled + "─" * (_BAR - filled))
        parts.append(f"{self._done}/{self._steps or '?'}")
        if ended is not None:
            parts.append(ended)
        elif rate and self._steps:
            still = (self._steps - self._done) / rate
            whole = still + (self._epochs - self._epoch - 1) * self._steps / rate
            parts.append(f"{clock(still)} left" + (f", {clock(whole)} in all" * (whole > still)))
        parts += texts(dict(sorted(self._shown.items(), key=lambda item: item[0] != "loss")))
        if rate:
            parts.append(f"{rate:.3g} steps/s")
            if self._flops:
                parts.append(flops_text(self._flops * rate))
        return "  ".join(parts)


def clock(seconds: float) -> str:
    """A time as people read it.

    >>> clock(4.2), clock(84), clock(7384)
    ('4s', '1:24', '2:03:04')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def flops_text(flops_per_s: float) -> str:
    """Operations of the model per second, on all devices together.

    >>> flops_text(41.23e9)
    '41.2 model GFLOP/s'
    """
    for size, prefix in _PREFIXES:
        if flops_per_s >= size:
            return f"{flops_per_s / size:.3g} model {prefix}FLOP/s"
    return f"{flops_per_s:.3g} model FLOP/s"


def _is_ready(value: Any) -> bool:
    return not hasattr(value, "is_ready") or value.is_ready()


def _is_live() -> bool:
    """Whether a line can be drawn over: in a terminal and in a notebook."""
    return sys.stdout.isatty() or "ipykernel" in sys.modules


def _draw(*texts: str) -> None:
    sys.stdout.write("".join(texts))
    sys.stdout.flush()
