"""What a served model has done: counts and histograms that several threads add to."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, deque
from typing import Any

from .api import OUTCOMES, Histogram

_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_EVENTS = 20
_WEIGHT = 0.2  # of the newest batch in the mean time of a batch


class Figures:
    """Counts of one model; :meth:`snapshot` has the fields of :class:`~.api.ModelStatus`.

    Example:
        >>> figures = Figures()
        >>> figures.answer("answered", 0.004)
        >>> figures.snapshot()["answers"]["answered"], figures.snapshot()["latency_s"].quantile(0.5)
        (1, 0.005)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self._latency = _Counts()
        self._compute = _Counts()
        self._batch_rows: Counter[int] = Counter()
        self._buckets: Counter[int] = Counter()
        self._events: deque[str] = deque(maxlen=_EVENTS)
        self.rows_per_s = 0.0  # of late
        self.refusal = ""  # why the newest weights are not served

    def answer(self, outcome: str, latency_s: float | None = None) -> None:
        """Count the end of a request."""
        with self._lock:
            self._answers[outcome] += 1
            if latency_s is not None:
                self._latency.add(latency_s)

    def batch(self, rows: int, bucket: int, compute_s: float) -> None:
        """Count a batch that was computed."""
        with self._lock:
            self._batch_rows[rows] += 1
            self._buckets[bucket] += 1
            self._compute.add(compute_s)
            speed = rows / max(compute_s, 1e-9)
            self.rows_per_s += (_WEIGHT if self.rows_per_s else 1.0) * (speed - self.rows_per_s)

    def event(self, text: str) -> None:
        """Note a swap or a refusal of weights."""
        with self._lock:
            self._events.append(text)

    def snapshot(self) -> dict[str, Any]:
        """The counts of this moment."""
        with self._lock:
            return {
                "answers": dict(self._answers),
                "latency_s": self._latency.histogram(),
                "compute_s": self._compute.histogram(),
                "batch_rows": dict(sorted(self._batch_rows.items())),
                "bucket_batches": dict(sorted(self._buckets.items())),
                "events": tuple(self._events),
                "refusal": self.refusal,
            }


class _Counts:
    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(_BOUNDS_S, value)] += 1
        self._total += value

    def histogram(self) -> Histogram:
        return Histogram(_BOUNDS_S, tuple(self._counts), self._total)
