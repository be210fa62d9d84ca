"""A dry run beside what was measured: a value that prints as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..hlo.links import collective_s, links_of
from ..units import bytes_text, seconds_text, share_text
from ..views import Viewable
from .measurement import Measured, SeenCollective
from .tables import laid_out

if TYPE_CHECKING:
    from ..hlo.traffic import Transfer
    from .report import DryRun

Unit = Literal["bytes", "seconds", "share"]
_PLATFORMS = {"cuda": "gpu"}  # a target's word for what JAX's devices say


@dataclass(frozen=True)
class Row:
    """One figure, predicted and measured; ``None`` where it is unknown."""

    what: str
    predicted: float | None
    measured: float | None
    unit: Unit
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """What was measured, as a multiple of what was predicted.

        >>> Row("step time", 0.5, 1.0, "seconds").ratio
        2.0
        """
        if not self.predicted or self.measured is None:
            return None
        return self.measured / self.predicted


@dataclass(frozen=True)
class CollectiveRow:
    """All collectives of one kind over the same axes in a step: ``(predicted, measured)`` each.

    ``count`` is how often one device takes part, ``nbytes`` the bytes of the arrays in it.
    """

    kind: str
    axes: tuple[str, ...]
    count: tuple[float | None, float | None]
    nbytes: tuple[int | None, int | None]
    time_s: tuple[float | None, float | None]


@dataclass(frozen=True)
class Comparison(Viewable):
    """A prediction beside a measurement; ``print`` it for a table.

    ``rows`` are the bytes, the time and the share of the peak of one device.
    """

    title: str
    rows: tuple[Row, ...]
    collectives: tuple[CollectiveRow, ...]
    notes: tuple[str, ...] = ()

    def row(self, what: str) -> Row:
        """The figure of that name, such as ``"step time"``. Raises :class:`KeyError`."""
        return {each.what: each for each in self.rows}[what]

    def __str__(self) -> str:
        head = ("", "predicted", "measured", "ratio", "")
        lines = [self.title, laid_out([head, *map(_cells, self.rows)], right=(1, 2, 3))]
        if self.collectives:
            head = ("kind", "axes", "count", "measured", "bytes", "measured", "time", "measured")
            rows = [head, *map(_collective_cells, self.collectives)]
            lines += ["", "collectives of one step", laid_out(rows, right=(2, 3, 4, 5, 6, 7))]
        return "\n".join([*lines, *(f"note: {each}" for each in self.notes)])


def beside(run: DryRun, measured: Measured) -> Comparison:
    """What a dry run predicted and what was measured, figure by figure."""
    memory = run.memory
    parts = [
        ("parameters", memory.parameter_bytes, measured.parameter_bytes, ""),
        ("slots", memory.slot_bytes, measured.slot_bytes, ""),
        ("other state", memory.state_bytes, measured.state_bytes, ""),
        ("inputs", memory.input_bytes, measured.input_bytes, ""),
        ("peak", memory.peak_bytes, measured.peak_bytes, f"measured: {measured.peak_is}"),
    ]
    time_s, estimate_s = measured.step_time_s, run.step_time_s
    mfu = None if run.mfu is None or estimate_s is None else run.mfu * estimate_s / time_s
    times = measured.step_times_s
    least, most = seconds_text(min(times)), seconds_text(max(times))
    spread = f"median of {len(times)} steps, {least} to {most}"
    return Comparison(
        title=f"{run.name}: predicted for {run.target}, measured on {measured.device}",
        rows=(
            *(Row(name, told, seen, "bytes", why) for name, told, seen, why in parts),
            Row("step time", estimate_s, time_s, "seconds", spread),
            *([Row("model FLOPs", run.mfu, mfu, "share", "of the peak (MFU)")] if mfu else []),
        ),
        collectives=tuple(_collectives(run, measured)),
        notes=tuple(_notes(run, measured)),
    )


_Kind = tuple[str, tuple[str, ...]]


def _collectives(run: DryRun, measured: Measured) -> list[CollectiveRow]:
    """The collectives that do something, those that move most first."""
    told: dict[_Kind, list[Transfer]] = defaultdict(list)
    for each in run.collectives:
        told[each.kind, each.axes].append(each)
    seen = {(each.kind, each.axes): each for each in measured.collectives or ()}
    times = _times(run)
    rows = [
        CollectiveRow(
            kind,
            axes,
            (_sum([each.count for each in told[kind, axes]]), _seen(measured, found, "count")),
            (
                _sum([each.bytes_per_step for each in told[kind, axes]]),
                _seen(measured, found, "bytes_per_step"),
            ),
            (times.get((kind, axes)), _seen(measured, found, "time_s")),
        )
        for kind, axes in dict.fromkeys([*told, *seen])
        for found in [seen.get((kind, axes))]
    ]
    return sorted(rows, key=lambda row: -(row.nbytes[0] or row.nbytes[1] or 0))


def _seen(measured: Measured, found: SeenCollective | None, figure: str) -> Any:
    """A figure of what ran; nothing is zero where the profiler would have recorded it."""
    if measured.collectives is None:
        return None
    return 0 if found is None else getattr(found, figure)


def _times(run: DryRun) -> dict[_Kind, float | None]:
    """Seconds that the estimate gives all collectives of a kind over the same axes.

    Nothing where not all equal blocks were compiled: their times are known by axes alone.
    """
    if run.compiled is None or run.hardware is None or run.blocks is not None:
        return {}
    links = links_of(run.compiled.target, run.hardware, run.compiled.axes)
    found: dict[_Kind, list[float | None]] = defaultdict(list)
    for each in run.compiled.collectives:
        once, count = collective_s(each, links), each.count
        times = found[each.kind, each.axes]
        times.append(None if once is None or count is None else count * once)
    return {kind: _sum(times) for kind, times in found.items()}


def _notes(run: DryRun, measured: Measured) -> list[str]:
    said = []
    platform = _PLATFORMS.get(run.target.platform, run.target.platform)
    if platform != measured.platform:
        said.append(f"predicted for {run.target}, measured on {measured.device}: times differ")
    if run.axes != measured.axes:
        here = ", ".join(f"{axis}={size}" for axis, size in measured.axes)
        said.append(f"the step ran on a different mesh from the dry run: {here}")
    if run.step_time_s is None and run.target.platform == "cpu":
        said.append(
            "no hardware table for this CPU, so no time was predicted: "
            f"dry_run(..., hardware=mw.calibrate({str(run.target)!r})) measures it"
        )
    if measured.collectives is None:
        said.append("the profiler recorded no collectives, so none are compared")
    elif measured.collectives:
        said.append("a collective's time includes waiting for other devices")
    if run.blocks is not None:
        said.append(str(run.blocks))
    if run.is_analytic:
        said.append(f"predicted by the analytic model alone: {run.not_compiled}")
    return said


def _sum(numbers: Sequence[Any]) -> Any:
    """All of them together; ``None`` where one is not known."""
    return None if None in numbers else sum(numbers)


# In words


def _cells(row: Row) -> tuple[str, ...]:
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    shown = _shown(row.predicted, row.unit), _shown(row.measured, row.unit)
    return row.what, *shown, ratio, row.note


def _collective_cells(row: CollectiveRow) -> tuple[str, ...]:
    counts = ["?" if each is None else f"{each:,g}" for each in row.count]
    nbytes = [_shown(each, "bytes") for each in row.nbytes]
    times = [_shown(each, "seconds") for each in row.time_s]
    return row.kind, ", ".join(row.axes) or "-", *counts, *nbytes, *times


def _shown(value: float | None, unit: Unit) -> str:
    if value is None:
        return "unknown"
    if unit == "bytes":
        return bytes_text(int(value))
    return seconds_text(value) if unit == "seconds" else share_text(value)
