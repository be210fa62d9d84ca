"""A dry run beside what was measured, or beside another dry run: figures in pairs, as values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import write
from ..hlo.links import collective_s, links_of
from ..hlo.traffic import moved_bytes
from ..layouts.mesh import axes_text
from ..units import Unit, seconds_text
from ..views import Viewable
from .measurement import Measured, SeenCollective

if TYPE_CHECKING:
    from ..hlo.traffic import Transfer
    from .report import DryRun

_PLATFORMS = {"cuda": "gpu"}  # a target's word for what JAX's devices say


@dataclass(frozen=True)
class Row:
    """One figure twice; ``None`` where it is unknown.

    In a :class:`Comparison`, ``first`` is predicted and ``second`` is measured.
    """

    name: str
    first: float | None
    second: float | None
    unit: Unit
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """The second as a multiple of the first; ``None`` where that is zero or unknown.

        >>> Row("step time", 0.5, 1.0, "seconds").ratio
        2.0
        """
        return self.second / self.first if self.first and self.second is not None else None


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

    def row(self, name: str) -> Row:
        """The figure of that name, such as ``"step time"``. Raises :class:`KeyError`."""
        return {row.name: row for row in self.rows}[name]


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
            *(Row(name, predicted, actual, "bytes", why) for name, predicted, actual, why in parts),
            Row("step time", estimate_s, time_s, "seconds", spread),
            *([Row("model FLOPs", run.mfu, mfu, "share", "of the peak (MFU)")] if mfu else []),
        ),
        collectives=tuple(_collectives(run, measured)),
        notes=tuple(_notes(run, measured)),
    )


_Kind = tuple[str, tuple[str, ...]]


def _collectives(run: DryRun, measured: Measured) -> list[CollectiveRow]:
    """The collectives that do something, those that move most first."""
    predicted: dict[_Kind, list[Transfer]] = defaultdict(list)
    for collective in run.collectives:
        predicted[collective.kind, collective.axes].append(collective)
    by_kind = {(measure.kind, measure.axes): measure for measure in measured.collectives or ()}
    times = _times(run)
    rows = [
        CollectiveRow(
            kind,
            axes,
            (
                _sum([prediction.count for prediction in predicted[kind, axes]]),
                _figure(measured, match, "count"),
            ),
            (
                _sum([prediction.bytes_per_step for prediction in predicted[kind, axes]]),
                _figure(measured, match, "bytes_per_step"),
            ),
            (times.get((kind, axes)), _figure(measured, match, "time_s")),
        )
        for kind, axes in dict.fromkeys([*predicted, *by_kind])
        for match in [by_kind.get((kind, axes))]
    ]
    return sorted(rows, key=lambda row: -(row.nbytes[0] or row.nbytes[1] or 0))


def _figure(measured: Measured, collective: SeenCollective | None, figure: str) -> Any:
    """A figure of what ran; nothing is zero where the profiler would have recorded it."""
    if measured.collectives is None:
        return None
    return 0 if collective is None else getattr(collective, figure)


def _times(run: DryRun) -> dict[_Kind, float | None]:
    """Seconds that the estimate gives all collectives of a kind over the same axes.

    Nothing where not all equal blocks were compiled: their times are known by axes alone.
    """
    if run.compiled is None or run.hardware is None or run.blocks is not None:
        return {}
    links = links_of(run.compiled.target, run.hardware, run.compiled.axes)
    figures: dict[_Kind, list[float | None]] = defaultdict(list)
    for collective in run.compiled.collectives:
        once, count = collective_s(collective, links), collective.count
        times = figures[collective.kind, collective.axes]
        times.append(None if once is None or count is None else count * once)
    return {kind: _sum(times) for kind, times in figures.items()}


def _notes(run: DryRun, measured: Measured) -> list[str]:
    notes = []
    platform = _PLATFORMS.get(run.target.platform, run.target.platform)
    if platform != measured.platform:
        notes.append(f"predicted for {run.target}, measured on {measured.device}: times differ")
    if run.axes != measured.axes:
        here = axes_text(measured.axes)
        notes.append(f"the step ran on a different mesh from the dry run: {here}")
    if run.step_time_s is None and run.target.platform == "cpu":
        notes.append(
            "no hardware table for this CPU, so no time was predicted: "
            f"dry_run(..., hardware=mw.calibrate({str(run.target)!r})) measures it"
        )
    if measured.collectives is None:
        notes.append("the profiler recorded no collectives, so none are compared")
    elif measured.collectives:
        notes.append("a collective's time includes waiting for other devices")
    if run.blocks is not None:
        notes.append(str(run.blocks))
    if run.is_analytic:
        notes.append(f"predicted by the analytic model alone: {run.not_compiled}")
    return notes


def _sum(numbers: Sequence[Any]) -> Any:
    """All of them together; ``None`` where one is not known."""
    return None if None in numbers else sum(numbers)


# Two dry runs


@dataclass(frozen=True)
class Pair(Viewable):
    """Two dry runs; ``print`` it for a table, or :meth:`save` it as a page."""

    first: DryRun
    second: DryRun

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every figure that one of them has."""
        axes = [
            collective.axes for run in (self.first, self.second) for collective in run.collectives
        ]
        one, two = (_figures(run, axes) for run in (self.first, self.second))
        units: dict[str, Unit] = {
            name: unit for run in (one, two) for name, (_, unit) in run.items()
        }
        first, second = ({name: value for name, (value, _) in run.items()} for run in (one, two))
        rows = [Row(name, first.get(name), second.get(name), unit) for name, unit in units.items()]
        return tuple(row for row in rows if (row.first, row.second) != (None, None))

    @property
    def titles(self) -> tuple[str, str]:
        """What each is a run of, without what both have in common."""
        parts = [
            (run.name, str(run.target), axes_text(run.axes)) for run in (self.first, self.second)
        ]
        apart = [place for place, both in enumerate(zip(*parts, strict=True)) if len({*both}) > 1]
        if not apart:
            return "first", "second"
        one, two = (", ".join(part[place] for place in apart) for part in parts)
        return one, two

    def to_html(self) -> str:
        """The same as a page that needs no network."""
        return self._page()

    def save(self, path: str | Path) -> None:
        """Write the page. Raises :class:`~meshwright.DataError` if it cannot be written."""
        write(path, self.to_html(), "the page of both reports")


def _figures(run: DryRun, axes: Iterable[tuple[str, ...]]) -> dict[str, tuple[float | None, Unit]]:
    estimate = run.estimate
    figures: dict[str, tuple[float | None, Unit]] = {
        "step time": (run.step_time_s, "seconds"),
        "MFU": (run.mfu, "share"),
        "replicated": (run.replicated_share, "share"),
        "samples per second": (run.samples_per_s, "count"),
        "tokens per second": (run.tokens_per_s, "count"),
        "FLOPs of a device": (run.flops, "FLOP"),
    }
    if estimate is not None:
        figures["compute"] = estimate.compute_s, "seconds"
        figures["memory traffic"] = estimate.memory_s, "seconds"
        figures["waiting for collectives"] = estimate.waiting_s, "seconds"
    figures |= {name: (nbytes, "bytes") for name, nbytes in run.memory.figures}
    for along in dict.fromkeys(axes):
        moved = moved_bytes(
            collective for collective in run.collectives if collective.axes == along
        )
        figures[f"collectives over {', '.join(along) or '-'}"] = moved, "bytes"
    figures["unexpected collectives"] = len(run.unexpected), "count"
    return figures
