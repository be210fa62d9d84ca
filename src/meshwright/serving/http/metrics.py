"""``/metrics`` for Prometheus: the engine's figures at that moment, and HTTP's own counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ..api import Histogram as Counts
from ..api import Models, ModelStatus
from .body import Pending
from .looking import every

MEDIA_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# Counts go on when the weights are swapped, so their labels must not change with them.
_COUNTED = ("model", "first_version")
_GAUGES = {  # fields of ModelStatus
    "ready": "1 where the model answers.",
    "queued_requests": "Requests in the queue.",
    "queued_rows": "Rows in the queue.",
    "rows_in_flight": "Rows being computed.",
}


class Metrics:
    """The registry of one app; two apps in a process do not meet."""

    def __init__(self, models: Models, pending: Pending) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Engine(models, pending))  # pyright: ignore[reportArgumentType]
        self._requests = Counter(
            "meshwright_http_requests",
            "Requests by contract and status.",
            ["contract", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "meshwright_http_request_seconds",
            "Time from the first byte of a request to the last of its answer.",
            ["contract"],
            buckets=_SECONDS,
            registry=self._registry,
        )

    def observe(self, contract: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(contract, str(status or 499)).inc()
        self._seconds.labels(contract).observe(seconds)

    def text(self) -> bytes:
        """All figures, in the text format of Prometheus."""
        return generate_latest(self._registry)


class _Engine:
    """Reads the figures of every model when Prometheus asks, so none is counted twice."""

    def __init__(self, models: Models, pending: Pending) -> None:
        self._models = models
        self._pending = pending

    def describe(self) -> Iterable[Metric]:
        """Nothing: the families depend on the models."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One family for each figure, with a sample for each model and version."""
        all_status = statuses(self._models)
        yield from _gauges(all_status)
        yield _versions_now(all_status)
        yield _refused(all_status)
        yield from _counts(all_status)
        yield self._compared()
        pending = GaugeMetricFamily("meshwright_http_pending_bytes", "Bytes of bodies held.")
        pending.add_metric([], self._pending.bytes)
        yield pending

    def _compared(self) -> Metric:
        compared = GaugeMetricFamily(
            "meshwright_largest_difference",
            "Largest difference of a version's answers from those of the first one.",
            labels=["model", "version", "output"],
        )
        for name in self._models.names():
            for key, difference in self._models.compared(name).items():
                compared.add_metric([name, *key.split("/", 1)], difference)
        return compared


def _gauges(all_status: Sequence[ModelStatus]) -> Iterator[Metric]:
    for field, text in _GAUGES.items():
        family = GaugeMetricFamily(f"meshwright_{field}", text, labels=["model", "version"])
        for status in all_status:
            family.add_metric([status.name, status.version], float(getattr(status, field)))
        yield family


def _versions_now(all_status: Sequence[ModelStatus]) -> Metric:
    now = GaugeMetricFamily(
        "meshwright_version",
        "1 for the version that is served now, beside the one that counts are labelled with.",
        labels=[*_COUNTED, "version"],
    )
    for status in all_status:
        first = status.first_version or status.version
        now.add_metric([status.name, first, status.version], 1.0)
    return now


def _refused(all_status: Sequence[ModelStatus]) -> Metric:
    refused = GaugeMetricFamily(
        "meshwright_newest_refused",
        "1 where the newest checkpoint is not served; the page and the log say why.",
        labels=["model", "version"],
    )
    for status in all_status:
        refused.add_metric([status.name, status.version], float(bool(status.refusal)))
    return refused


def _counts(all_status: Sequence[ModelStatus]) -> tuple[Metric, ...]:
    """Answers, batches, weights and times."""
    answers = CounterMetricFamily(
        "meshwright_answers", "Requests by outcome.", labels=[*_COUNTED, "outcome"]
    )
    batches = CounterMetricFamily(
        "meshwright_batches", "Batches by bucket.", labels=[*_COUNTED, "bucket_rows"]
    )
    weights = GaugeMetricFamily(
        "meshwright_weight_bytes", "Weights held.", labels=["model", "version", "device"]
    )
    latency = _histogram("meshwright_latency_seconds", "From arrival to answer.")
    compute = _histogram("meshwright_compute_seconds", "One batch on the devices.")
    for status in all_status:
        labels = [status.name, status.first_version or status.version]
        for outcome, count in status.answers.items():
            answers.add_metric([*labels, outcome], count)
        for rows, count in status.bucket_batches.items():
            batches.add_metric([*labels, str(rows)], count)
        for device, size in status.bytes_by_device.items():
            weights.add_metric([status.name, status.version, device], size)
        latency.add_metric(labels, _cumulative(status.latency_s), status.latency_s.total)
        compute.add_metric(labels, _cumulative(status.compute_s), status.compute_s.total)
    return answers, batches, weights, latency, compute


def statuses(models: Models) -> list[ModelStatus]:
    """The figures of every version of every model."""
    return [model.status() for model in every(models)]


def _histogram(name: str, text: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, labels=_COUNTED)


def _cumulative(counts: Counts) -> list[tuple[str, float]]:
    """As Prometheus counts: all values up to each bound.

    >>> _cumulative(Counts((0.1, 1.0), (2, 1, 1)))
    [('0.1', 2.0), ('1.0', 3.0), ('+Inf', 4.0)]
    """
    bounds = [*map(str, counts.bounds), "+Inf"]
    total, result = 0.0, []
    for bound, count in zip(bounds, counts.counts, strict=True):
        total += count
        result.append((bound, total))
    return result
