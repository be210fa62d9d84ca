"""Two dry runs side by side: every figure of both, and how much the second is of the first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..files import write
from ..hlo.traffic import moved_bytes
from ..units import UNKNOWN, bytes_text, flops_text, seconds_text, share_text
from .tables import laid_out, memory_rows

if TYPE_CHECKING:
    from .report import DryRun


class PairedRow(NamedTuple):
    """A figure of both; ``None`` where one has none. ``shown`` writes it."""

    name: str
    first: float | None
    second: float | None
    shown: Callable[[Any], str]

    @property
    def ratio(self) -> float | None:
        """The second over the first, where both are there and the first is not zero."""
        return self.second / self.first if self.first and self.second is not None else None

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Name, both figures and the ratio as text."""
        both = (UNKNOWN if each is None else self.shown(each) for each in (self.first, self.second))
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        return (self.name, *both, ratio)  # type: ignore[return-value]


@dataclass(frozen=True)
class Pair:
    """Two dry runs; ``print`` it for a table, or :meth:`save` it as a page."""

    first: DryRun
    second: DryRun

    @property
    def rows(self) -> tuple[PairedRow, ...]:
        """Every figure that one of them has."""
        every = [each.axes for run in (self.first, self.second) for each in run.collectives]
        one, two = (_figures(run, every) for run in (self.first, self.second))
        names = dict.fromkeys((*one, *two))
        none: tuple[None, Callable[[Any], str]] = (None, str)
        found = []
        for name in names:
            (first, shown), (second, other) = one.get(name, none), two.get(name, none)
            written = shown if name in one else other
            if first is not None or second is not None:
                found.append(PairedRow(name, first, second, written))
        return tuple(found)

    @property
    def titles(self) -> tuple[str, str]:
        """What each is a run of, without what both have in common."""
        parts = [_parts(run) for run in (self.first, self.second)]
        apart = [i for i in range(len(parts[0])) if parts[0][i] != parts[1][i]]
        if not apart:
            return "first", "second"
        one, two = (", ".join(each[i] for i in apart) for each in parts)
        return one, two

    def __str__(self) -> str:
        heading = ("", *self.titles, "ratio")
        table = laid_out([heading, *(row.cells for row in self.rows)], right=(1, 2, 3))
        return f"{_title(self.first)}\n{_title(self.second)}\n\n{table}"

    def to_html(self) -> str:
        """The same as a page that needs no network."""
        from . import page

        return page.of_pair(self)

    def save(self, path: str | Path) -> None:
        """Write the page. Raises :class:`~meshwright.DataError` if it cannot be written."""
        write(path, self.to_html(), "the page of both reports")


def _parts(run: DryRun) -> tuple[str, str, str]:
    return run.name, str(run.target), ", ".join(f"{axis}={size}" for axis, size in run.axes)


def _title(run: DryRun) -> str:
    name, target, axes = _parts(run)
    how = ", not compiled" if run.is_analytic else ""
    return f"{name} on {target} ({axes}{how})"


def _figures(
    run: DryRun, every: Iterable[tuple[str, ...]]
) -> dict[str, tuple[float | None, Callable[[Any], str]]]:
    found = run.estimate
    figures: dict[str, tuple[float | None, Callable[[Any], str]]] = {
        "step time": (run.step_time_s, seconds_text),
        "MFU": (run.mfu, share_text),
        "replicated": (run.replicated_share, share_text),
        "samples per second": (run.samples_per_s, "{:,.0f}".format),
        "tokens per second": (run.tokens_per_s, "{:,.0f}".format),
        "FLOPs of a device": (run.flops, flops_text),
    }
    if found is not None:
        figures["compute"] = found.compute_s, seconds_text
        figures["memory traffic"] = found.memory_s, seconds_text
        figures["waiting for collectives"] = found.waiting_s, seconds_text
    figures |= {name: (nbytes, bytes_text) for name, nbytes, _ in memory_rows(run.memory)}
    for axes in dict.fromkeys(every):
        some = moved_bytes(each for each in run.collectives if each.axes == axes)
        figures[f"collectives over {', '.join(axes) or '-'}"] = some, bytes_text
    figures["unexpected collectives"] = len(run.unexpected), str
    return figures
