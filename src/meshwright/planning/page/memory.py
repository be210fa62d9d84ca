"""What one device holds: a stacked bar, its numbers, and the tensors at the peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...hlo.alike import grouped, pattern, without_numbers
from ...units import bytes_text
from ..tables import memory_rows
from .bars import Part, bar, swatch
from .course import course_picture
from .grid import Cell, Column, grid
from .markup import Child, Html, breakable, section, tag

if TYPE_CHECKING:
    from ...hlo.alive import LiveTensor
    from ..report import DryRun, Memory

_SMALL = 0.6  # a peak below this share of the device is shown once more, alone
REST = "temporaries at the peak"


def parts_of(memory: Memory) -> tuple[Part, ...]:
    """The parts of the peak, which add up to it: all but the arguments of the step is temporary."""
    kept = [
        ("parameters", memory.parameter_bytes, "blue"),
        ("slots", memory.slot_bytes, "orange"),
        ("other state", memory.state_bytes, "green"),
        ("inputs", memory.input_bytes, "yellow"),
        ("padding of tiles", memory.padding_bytes or 0, "grey"),
    ]
    held = sum(size for _, size, _ in kept)
    rest = 0 if memory.peak_bytes is None else max(0, memory.peak_bytes - held)
    return tuple(
        Part(name, size, bytes_text(size), paint)
        for name, size, paint in [*kept, (REST, rest, "sky")]
    )


def memory_section(run: DryRun) -> Html:
    """The section on memory."""
    memory = run.memory
    return section(
        "memory",
        "Memory of one device",
        _bar(memory),
        _numbers(memory),
        course_picture(run),
        _tensors(run) if run.tensors else None,
        _refusal(run.refusal),
    )


def _bar(memory: Memory) -> Html:
    parts = parts_of(memory)
    held = sum(part.size for part in parts)
    available = memory.available_bytes
    whole = max(held, available or 0, 1)
    free = Part("free", whole - held, bytes_text(int(whole - held)), "free")
    drawn = [bar((*parts, free), whole, "Memory of one device", available)]
    if available is None:
        below = "Device memory unknown: the bar is the peak."
    elif held > available:
        below = f"The line is what a device has, {bytes_text(available)}: the bar goes beyond it."
    else:
        below = f"The whole bar is what a device has, {bytes_text(available)}."
    if 0 < held < _SMALL * whole:
        drawn.append(bar(parts, held, "The peak alone"))
        below += " The lower bar is the peak alone."
    return tag("figure", drawn, tag("figcaption", below))


def _numbers(memory: Memory) -> Html:
    paints = {part.name: part.paint for part in parts_of(memory)}
    rows = memory_rows(memory)
    at = 1 + [name for name, *_ in rows].index("padding of tiles")
    rows.insert(at, (REST, _rest(memory), "the peak without all of the above"))
    told = [
        (
            Cell([swatch(paints[name]) if name in paints else None, name]),
            Cell(f"{n:,}", n),
            Cell(bytes_text(n), n),
            why,
        )
        for name, n, why in rows
        if n is not None
    ]
    columns = (
        Column("what"),
        Column("bytes", "num"),
        Column("in words", "num"),
        Column("which is"),
    )
    return grid("memory-table", "Bytes of one device", columns, told, None)


def _rest(memory: Memory) -> int | None:
    return None if memory.peak_bytes is None else int(parts_of(memory)[-1].size)


def _tensors(run: DryRun) -> Child:
    """The largest temporary arrays, those that are alike in one row."""
    alike: dict[tuple[str, str, str, str], list[LiveTensor]] = defaultdict(list)
    for each in run.tensors:
        dims = " × ".join(map(str, each.array.dims)) or "scalar"
        alike[each.origin.path or "-", each.origin.phase, dims, each.array.dtype].append(each)
    rows = []
    for keys in grouped(alike, lambda key: (without_numbers(key[0]), key[1:], len(alike[key]))):
        found = [each for key in keys for each in alike[key]]
        where = pattern([key[0] for key in keys])
        rows.append(_row(where, *keys[0][1:], found, run.alive_bytes))
    rows.sort(key=lambda row: -(row[5].key or 0))
    columns = (
        Column("where", "path"),
        Column("when"),
        Column("dims", "dims"),
        Column("dtype"),
        Column("how many", "num"),
        Column("bytes", "num"),
        Column("share"),
    )
    shown = sum(each.nbytes for each in run.tensors)
    return [
        tag("h3", "Largest temporary arrays at the peak"),
        tag(
            "p",
            f"{bytes_text(run.alive_bytes)} are alive in all, by our own reading of the schedule; "
            f"these {len(run.tensors)} are {bytes_text(shown)} of them.",
        ),
        grid("tensors-table", "Temporary arrays alive at the peak", columns, rows),
    ]


def _row(
    where: str, phase: str, dims: str, dtype: str, found: Sequence[LiveTensor], alive_bytes: int
) -> tuple[Cell, ...]:
    nbytes = sum(each.nbytes for each in found)
    part = Part(where, nbytes, bytes_text(nbytes), "sky")
    share = bar([part], max(alive_bytes, nbytes, 1), "share of what is alive")
    return (
        Cell(breakable(where)),
        Cell(phase),
        Cell(dims),
        Cell(dtype),
        Cell(f"{len(found)} ×", len(found)),
        Cell(bytes_text(nbytes), nbytes),
        Cell(share, nbytes),
    )


def _refusal(words: str) -> Child:
    if not words:
        return None
    return [tag("h3", "The compiler says"), tag("pre", words.strip())]
