"""The end of the line of progress: how fast each worker is, how stale updates are, who lags."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...run.progress import Part

_LAGS = 2.0  # a worker whose steps take so many times the median's is a straggler


@dataclass(frozen=True)
class Look:
    """What the coordinator says at one moment; counts are since it was made.

    ``lives`` changes where a worker was started again, whose count began at 0.
    """

    at_s: float
    done: int
    by_worker: Mapping[str, tuple[int, float | None]]  # steps done, seconds per step of late
    stale: int = 0  # sum of the staleness of all updates
    updates: int = 0
    queued: int = 0
    retried: int = 0
    lives: Mapping[str, str] = field(default_factory=dict)

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
            {name: own["incarnation"] for name, own in stats["workers"].items()},
        )

    def done_by(self, worker: str, life: str | None) -> int:
        """The steps that a worker had done in this life; 0 where it has begun since."""
        if self.lives.get(worker) != life:
            return 0
        return self.by_worker.get(worker, (0, None))[0]


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


class WorkerRates:
    """The coordinator's counts, between the beginning of an epoch and the last look.

    A call of the coordinator's is ``steps_per_call`` steps, and a step takes ``batch_rows``
    samples.
    """

    def __init__(
        self,
        look: Callable[[], Look],
        steps_per_call: int = 1,
        batch_rows: int | None = None,
    ) -> None:
        self._look, self._per_call, self._rows = look, steps_per_call, batch_rows
        self._first = self._last = Look(0.0, 0, {})

    @classmethod
    def of(cls, stats: Callable[[], Mapping[str, Any]], *args: Any) -> WorkerRates:
        """From ``coordinator.stats``."""
        return cls(lambda: Look.of(stats(), time.monotonic()), *args)

    def begin(self) -> None:
        self._first = self._last = self._look()

    def look(self) -> None:
        self._last = self._look()

    def parts(self, steps_per_s: float | None, ended: bool) -> list[Part]:
        first, last, per_call = self._first, self._last, self._per_call
        seconds = max(last.at_s - first.at_s, 1e-9)
        mean_per_s = per_call * (last.done - first.done) / seconds
        rates = [
            _rate(per_call * (count - first.done_by(name, last.lives.get(name))) / seconds)
            for name, (count, _) in sorted(last.by_worker.items())
        ]
        by_worker = f" ({' + '.join(rates)} by worker)" if len(rates) > 1 else ""
        parts = [Part(f"{_rate(mean_per_s)} steps/s{by_worker}", 7)]
        if self._rows is not None:
            parts.insert(0, Part(f"{_rate(self._rows * mean_per_s)} samples/s", 4))
        if updates := last.updates - first.updates:
            staleness = (last.stale - first.stale) / updates
            parts.append(Part(f"staleness {staleness:.2g} updates", 8))
        if lagging := stragglers(last.by_worker):
            parts.append(Part(f"slow: {', '.join(lagging)}", 3))
        if last.retried > first.retried:
            repeated = per_call * (last.retried - first.retried)
            parts.append(Part(f"{repeated} steps repeated", 9))
        if last.queued and not ended:
            parts.append(Part(f"{per_call * last.queued} steps queued", 9))
        return parts


def _rate(per_s: float) -> str:
    """A rate in three digits, and whole from 100 on.

    >>> _rate(12.345), _rate(65432.1)
    ('12.3', '65,432')
    """
    return f"{per_s:.3g}" if per_s < 100 else f"{per_s:,.0f}"
