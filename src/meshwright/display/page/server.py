"""The page of a server: load, batches, latency, where the weights lie, and how to call it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...layouts.layout import Layout
from ...layouts.mesh import Mesh, axes_text
from ...layouts.params import ParamInfo, Placed
from ...units import bytes_text, seconds_text, share_text
from .document import page_of
from .elements import Cell, Column, Part, element
from .layouts import layouts_section
from .pictures import mesh_picture

if TYPE_CHECKING:
    from markupsafe import Markup

    from ...serving.api import Histogram, ModelStatus, TensorSpec, Weight
    from ...serving.http.overview import Overview

_MOST_ELEMENTS = 8  # of a row that is written out in an example


def server_page(overview: Overview) -> str:
    """The figures of a server at one moment; load the page again for newer ones."""
    all_status = [served.status for served in overview.models]
    title = ", ".join(dict.fromkeys(status.name for status in all_status)) or "No model"
    verdicts = [("good", "✓ Ready") if overview.ready else ("maybe", "? Not ready")]
    if any(status.refusal for status in all_status):
        verdicts.append(("maybe", "? Newest checkpoint refused"))
    meshes = [status.mesh for status in all_status if status.mesh]
    under = f"mesh {axes_text(meshes[0].items(), ' × ')}" if meshes else ""
    head = element("head", "Meshwright server", title, "", under, verdicts, _figures(all_status))
    sections = {
        "load": {
            "table": _load(all_status),
            "compared": _compared(overview.compared),
            "events": _events(all_status),
        },
        "batches": _charts(all_status, _batches),
        "latency": _charts(all_status, _latency),
        "mesh": _mesh(meshes),
        "layouts": layouts_section(_placed(all_status)),
        "calls": _calls(overview) if overview.models else None,
    }
    return page_of(title, head, sections)


def _figures(all_status: Iterable[ModelStatus]) -> list[tuple[str, str, str]]:
    statuses = list(all_status)
    total = sum(sum(status.answers.values()) for status in statuses)
    answered = sum(status.answers.get("answered", 0) for status in statuses)
    worst = max((status.latency_s.quantile(0.99) for status in statuses), default=0.0)
    weight_bytes = max((max(s.bytes_by_device.values(), default=0) for s in statuses), default=0)
    return [
        ("answered", f"{answered:,}", f"of {total:,} requests"),
        ("in the queue", f"{sum(status.queued_rows for status in statuses):,}", "rows"),
        ("being computed", f"{sum(status.rows_in_flight for status in statuses):,}", "rows"),
        ("p99 latency", _bound(worst), "at most, of the slowest model"),
        ("weights of a device", bytes_text(weight_bytes), "of the largest model"),
    ]


def _bound(seconds: float) -> str:
    """A quantile of a histogram, which may lie above its last bound."""
    if not seconds:
        return "-"
    return "above all bounds" if seconds == float("inf") else seconds_text(seconds)


def _label(status: ModelStatus) -> str:
    return f"{status.name}, version {status.version}"


def _load(all_status: Iterable[ModelStatus]) -> Markup:
    columns = (
        Column("model", "path"),
        Column("version", "path"),
        Column("ready"),
        Column("queued rows", "num"),
        Column("rows in flight", "num"),
        Column("answered", "num"),
        Column("refused or failed", "words"),
        Column("p50", "num"),
        Column("p99", "num"),
    )
    rows = [
        (
            status.name,
            status.version,
            "yes" if status.ready else "no",
            Cell(f"{status.queued_rows:,}", status.queued_rows),
            Cell(f"{status.rows_in_flight:,}", status.rows_in_flight),
            Cell(f"{status.answers.get('answered', 0):,}", status.answers.get("answered", 0)),
            _others(status.answers),
            Cell(_bound(status.latency_s.quantile(0.5)), status.latency_s.quantile(0.5)),
            Cell(_bound(status.latency_s.quantile(0.99)), status.latency_s.quantile(0.99)),
        )
        for status in all_status
    ]
    return element("table", "load-table", "Requests since the server started", columns, rows)


def _others(answers: Mapping[str, int]) -> str:
    counts = [
        f"{count:,} {outcome.replace('_', ' ')}"
        for outcome, count in answers.items()
        if count and outcome != "answered"
    ]
    return ", ".join(counts) or "none"


def _compared(compared: Mapping[str, Mapping[str, float]]) -> Markup | None:
    """How far versions are from the first one, where some of their answers were compared."""
    rows = [
        (model, *key.split("/", 1), Cell(f"{difference:.3g}", difference))
        for model, differences in compared.items()
        for key, difference in differences.items()
    ]
    if not rows:
        return None
    columns = (
        Column("model", "path"),
        Column("version", "path"),
        Column("output", "path"),
        Column("largest difference", "num"),
    )
    caption = "Answers of versions, compared with those of the first one"
    return element("table", "compared-table", caption, columns, rows)


def _events(all_status: Iterable[ModelStatus]) -> list[str]:
    events = []
    for status in all_status:
        lasts = status.refusal and status.refusal not in status.events  # longer than the list
        events_here = [*([status.refusal] if lasts else []), *status.events]
        events += [f"{_label(status)}: {event}" for event in events_here]
    return events


def _charts(all_status: Iterable[ModelStatus], chart: Any) -> dict[str, object] | None:
    charts = [picture for status in all_status if (picture := chart(status)) is not None]
    return {"charts": charts} if charts else None


def _batches(status: ModelStatus) -> Markup | None:
    sizes = sorted(status.bucket_batches.items())
    counts = {f"{rows:,} row{'s' * (rows != 1)}": count for rows, count in sizes}
    return _bars(
        f"Batches of {_label(status)}, by the rows of their bucket", counts, ("batch", "batches")
    )


def _latency(status: ModelStatus) -> Markup | None:
    return _bars(
        f"Requests of {_label(status)}, by the time from arrival to answer",
        _by_bound(status.latency_s),
        ("request", "requests"),
    )


def _by_bound(latency_s: Histogram) -> dict[str, int]:
    """Counts up to each bound, without the empty ones at both ends."""
    names = [f"≤ {seconds_text(bound)}" for bound in latency_s.bounds] + ["more"]
    counts = list(zip(names, latency_s.counts, strict=False))
    used = [at for at, (_, count) in enumerate(counts) if count]
    return dict(counts[used[0] : used[-1] + 1]) if used else {}


def _bars(caption: str, counts: Mapping[str, int], nouns: tuple[str, str]) -> Markup | None:
    if not counts:
        return None
    whole, total = max(1, *counts.values()), max(1, sum(counts.values()))
    rows = []
    for name, count in counts.items():
        text = f"{count:,} {nouns[count != 1]}"
        part = Part(share_text(count / total), count, text, "blue")
        rows.append((name, element("bar", [part], whole, name), text))
    return element("chart", caption, rows)


def _mesh(meshes: list[Mapping[str, int]]) -> dict[str, object] | None:
    """The mesh, where all models share one of several devices."""
    if not meshes or any(mesh != meshes[0] for mesh in meshes):
        return None
    mesh = Mesh(dict(meshes[0]))
    if mesh.size == 1:
        return None
    rows = [(axis, Cell(str(size), size)) for axis, size in meshes[0].items()]
    columns = (Column("axis"), Column("devices", "num"))
    table = element("table", "axes-table", "The axes of the mesh", columns, rows, shown=None)
    return {"picture": mesh_picture(mesh), "table": table}


def _placed(all_status: Iterable[ModelStatus]) -> list[Placed]:
    """Every weight as the layouts' section shows variables."""
    statuses = list(all_status)
    several = len(statuses) > 1
    return [
        placed
        for status in statuses
        if status.mesh
        for weight in status.weights
        if (placed := _place(weight, status, f"{_label(status)}/" if several else ""))
    ]


def _place(weight: Weight, status: ModelStatus, prefix: str) -> Placed | None:
    layout = Layout(list(weight.spec), Mesh(dict(status.mesh)))
    if layout.faults(weight.shape):
        return None
    shards = layout.total_shards
    elements = max(1, math.prod(weight.shape))
    itemsize = max(1, weight.bytes_per_device * shards // elements)
    path = prefix + weight.name
    info = ParamInfo(path, (path,), weight.shape, weight.dtype, itemsize)
    return Placed(info, layout, "as it is served")


# How to call it


def _calls(overview: Overview) -> dict[str, object]:
    models = overview.models
    columns = (Column("model", "path"), Column("tensor", "path"), Column("dtype"), Column("dims"))
    rows = [
        (served.status.name, f"{kind} {spec.name}", spec.dtype, _dims(spec))
        for served in models
        for kind, specs in (("input", served.inputs), ("output", served.outputs))
        for spec in specs
    ]
    table = element("table", "tensors-table", "Tensors", columns, rows, shown=40)
    name, inputs = models[0].status.name, models[0].inputs
    return {"table": table, "calls": list(_examples(overview.address, name, inputs))}


def _dims(spec: TensorSpec) -> str:
    return " × ".join(["rows", *("any" if size is None else str(size) for size in spec.shape[1:])])


def _examples(address: str, name: str, inputs: Iterable[TensorSpec]) -> Iterable[tuple[str, str]]:
    """Lines for curl, where a row is short enough to be written out."""
    columns = {spec.name: _example(spec) for spec in inputs}
    body = json.dumps({"inputs": columns}).replace('"..."', "...")
    yield "TensorFlow Serving's REST API", _curl(f"{address}/v1/models/{name}:predict", body)
    yield "MLflow and SageMaker", _curl(f"{address}/invocations", body)


def _curl(url: str, body: str) -> str:
    return f"curl {url} -H 'Content-Type: application/json' -d '{body}'"


def _example(spec: TensorSpec) -> Any:
    """One row of zeros; dots for what is left out."""
    zero: Any = {"bool": False}.get(spec.dtype, 0 if "int" in spec.dtype else 0.0)
    value: Any = zero
    for size in reversed(spec.shape[1:]):
        count = size or 1
        value = [value] * count if count <= _MOST_ELEMENTS else [value, "..."]
    return [value]
