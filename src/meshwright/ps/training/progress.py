"""The progress of ``fit`` on one line: how far, how fast each worker, how stale, who lags.

The figures are the coordinator's counts, looked at a few times a second by a thread that draws.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...run.logs import texts
from ...program import Logs
from ...units import clock_text

_SECONDS_BETWEEN = 0.2
_BAR = 20
_LAGS = 2.0  # a worker whose steps take so many times the median's is a straggler


@dataclass(frozen=True)
class Look:
    """What the coordinator says at one moment; counts are since it was made."""

    at_s: float
    done: int
    by_worker: Mapping[str, tuple[int, float | None]]  # steps done, seconds per step of late
    stale: int = 0  # sum of the staleness of all updates
    updates: int = 0
    queued: int = 0
    retried: int = 0

    @classmethod
    def of(cls, stats: Mapping[str, Any], at_s: float) -> Look:
        """From ``coordinator.stats()``."""
        stale = stats["staleness"]
        return cls(
            at_s,
            stats["done"],
            {name: (own["done"], own["step_s"]) for name, own in stats["workers"].items()},
            sum(by * count for by, count in stale.items()),
            sum(stale.values()),
            stats["queued"],
            stats["retried"],
        )


def stragglers(by_worker: Mapping[str, tuple[int, float | None]]) -> list[str]:
    """The workers whose steps take much longer than those of most.

    >>> stragglers({"worker:0": (9, 0.1), "worker:1": (8, 0.11), "worker:2": (2, 0.5)})
    ['worker:2']
    """
    times = {name: step_s for name, (_, step_s) in by_worker.items() if step_s is not None}
    if len(times) < 2:
        return []
    middle = sorted(times.values())[(len(times) - 1) // 2]
    return [name for name, step_s in times.items() if step_s > _LAGS * middle]


def line(
    epoch: int,
    epochs: int,
    done: int,
    steps: int,
    first: Look,
    last: Look,
    logs: Logs | None,
    *,
    steps_per_call: int = 1,
    batch_rows: int | None = None,
    columns: int | None = None,
) -> str:
    """The line: ``first`` is from the epoch's beginning, ``logs`` are there at its end.

    A call of the coordinator's is ``steps_per_call`` steps, and a step takes ``batch_rows``
    samples. What does not fit into ``columns`` is left out, from the end and as a whole.
    """
    seconds = max(last.at_s - first.at_s, 1e-9)
    steps_per_s = steps_per_call * (last.done - first.done) / seconds
    parts = [f"epoch {epoch + 1}/{epochs}"]
    if logs is None:
        filled = min(_BAR, _BAR * done // max(1, steps))
        parts.append("━" * filled + "─" * (_BAR - filled))
    parts.append(f"{done}/{steps} steps")
    if logs is not None:
        parts.append(clock_text(seconds))
        parts += texts(logs)
    if batch_rows is not None:
        parts.append(f"{_rate(batch_rows * steps_per_s)} samples/s")
    rates = [
        _rate(steps_per_call * (count - first.by_worker.get(name, (0, None))[0]) / seconds)
        for name, (count, _) in sorted(last.by_worker.items())
    ]
    by_worker = f" ({' + '.join(rates)} by worker)" if len(rates) > 1 else ""
    parts.append(f"{_rate(steps_per_s)} steps/s{by_worker}")
    if updates := last.updates - first.updates:
        parts.append(f"staleness {(last.stale - first.stale) / updates:.2g} updates")
    if lagging := stragglers(last.by_worker):
        parts.append(f"slow: {', '.join(lagging)}")
    if last.retried > first.retried:
        parts.append(f"{steps_per_call * (last.retried - first.retried)} steps repeated")
    if logs is None and last.queued:
        parts.append(f"{steps_per_call * last.queued} steps queued")
    return _fitted(parts, columns)


def _rate(per_s: float) -> str:
    """A rate in three digits, and whole from 100 on.

    >>> _rate(12.345), _rate(65432.1)
    ('12.3', '65,432')
    """
    return f"{per_s:.3g}" if per_s < 100 else f"{per_s:,.0f}"


def _fitted(parts: list[str], columns: int | None) -> str:
    """As many of the first parts as fit.

    >>> _fitted(["epoch 1/2", "3/4 steps", "10 steps/s"], 24)
    'epoch 1/2  3/4 steps'
    """
    while columns is not None and len(parts) > 1 and len("  ".join(parts)) > columns:
        parts = parts[:-1]
    return "  ".join(parts)


class Watch:
    """Draws on standard output; if that is not a terminal, one line per epoch."""

    def __init__(
        self,
        stats: Callable[[], Mapping[str, Any]],
        epochs: int,
        *,
        steps_per_call: int = 1,
        batch_rows: int | None = None,
        shown: bool = True,
        live: bool | None = None,
    ) -> None:
        self._stats, self._epochs, self._shown = stats, epochs, shown
        self._per_call, self._rows = steps_per_call, batch_rows
        self._live = shown and (sys.stdout.isatty() if live is None else live)
        self._epoch, self._steps, self._skipped = 0, 0, 0
        self._first = Look(0.0, 0, {})
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin_epoch(self, epoch: int, steps: int, skipped: int = 0) -> None:
        """An epoch begins, of which ``skipped`` steps were done before."""
        self._epoch, self._steps, self._skipped = epoch, steps, skipped
        self._first = self._look()
        if self._live:
            self._stop.clear()
            self._thread = threading.Thread(target=self._draw_on, daemon=True)
            self._thread.start()

    def trained(self) -> None:
        """The last step of the epoch is done: validation may follow."""
        self._last = self._look()
        self.stop()

    def end_epoch(self, logs: Logs) -> None:
        """The epoch has ended with these logs."""
        if self._shown:
            ended = self._line(self._steps, self._last, logs)
            print(f"\r{ended}\x1b[K" if self._live else ended, flush=True)

    def stop(self) -> None:
        """Draw no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _look(self) -> Look:
        return Look.of(self._stats(), time.monotonic())

    def _draw_on(self) -> None:
        while not self._stop.wait(_SECONDS_BETWEEN):
            look = self._look()
            done = self._skipped + self._per_call * (look.done - self._first.done)
            done = min(done, self._steps)
            text = self._line(done, look, None, shutil.get_terminal_size().columns - 1)
            print(f"\r{text}\x1b[K", end="", flush=True)

    def _line(self, done: int, look: Look, logs: Logs | None, columns: int | None = None) -> str:
        return line(
            self._epoch,
            self._epochs,
            done,
            self._steps,
            self._first,
            look,
            logs,
            steps_per_call=self._per_call,
            batch_rows=self._rows,
            columns=columns,
        )
