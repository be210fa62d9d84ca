"""What one device holds: a bar, its numbers, its course over a step, tensors at the peak."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...hlo.peak import Alive
from ...hlo.text import parse
from ...units import bytes_text
from ..drawing.words import dims_text
from ..figures import Figure, memory_figures, tensor_rows
from .elements import Cell, Column, Part, element

if TYPE_CHECKING:
    from markupsafe import Markup

    from ...planning.report import DryRun, Memory

SLOTS = 400
_SMALL = 0.6  # a peak below this share of the device is shown once more, alone
_WIDE, _HIGH = 800, 160  # of the picture, in its own units
_REST = "temporaries at the peak"


def memory_section(run: DryRun) -> dict[str, object]:
    """The section on memory."""
    return {
        "bars": _bars(run.memory),
        "caption": _caption(run.memory),
        "figures": _figures(run.memory),
        "course": _course(run),
        "tensors": _tensors(run) if run.tensors else None,
        "alive_bytes": bytes_text(run.alive_bytes),
        "shown_bytes": bytes_text(sum(tensor.nbytes for tensor in run.tensors)),
    }


def parts_of(memory: Memory) -> tuple[Part, ...]:
    """The parts of the peak, which add up to it: all but the arguments of the step is temporary."""
    arrays = [
        ("parameters", memory.parameter_bytes, "blue"),
        ("slots", memory.slot_bytes, "orange"),
        ("other state", memory.state_bytes, "green"),
        ("inputs", memory.input_bytes, "yellow"),
        ("padding of tiles", memory.padding_bytes or 0, "grey"),
    ]
    total = sum(size for _, size, _ in arrays)
    rest = 0 if memory.peak_bytes is None else max(0, memory.peak_bytes - total)
    return tuple(
        Part(name, size, bytes_text(size), paint)
        for name, size, paint in [*arrays, (_REST, rest, "sky")]
    )


def _bars(memory: Memory) -> list[Markup]:
    parts = parts_of(memory)
    total = sum(part.size for part in parts)
    whole = max(total, memory.available_bytes or 0, 1)
    free = Part("free", whole - total, bytes_text(whole - total), "free")
    bars = [element("bar", (*parts, free), whole, "Memory of one device", memory.available_bytes)]
    return (
        [*bars, element("bar", parts, total, "The peak alone")]
        if 0 < total < _SMALL * whole
        else bars
    )


def _caption(memory: Memory) -> str:
    if memory.available_bytes is None:
        return "Device memory unknown: the bar is the peak."
    text = bytes_text(memory.available_bytes)
    if sum(part.size for part in parts_of(memory)) > memory.available_bytes:
        text = f"The line is what a device has, {text}: the bar goes beyond it."
    else:
        text = f"The whole bar is what a device has, {text}."
    return text + (" The lower bar is the peak alone." if len(_bars(memory)) > 1 else "")


def _figures(memory: Memory) -> Markup:
    parts = parts_of(memory)
    paints = {part.name: part.paint for part in parts}
    figures = memory_figures(memory)
    at = 1 + [figure.name for figure in figures].index("padding of tiles")
    rest = None if memory.peak_bytes is None else parts[-1].size
    figures.insert(at, Figure(_REST, rest, parts[-1].text, "the peak without all of the above"))
    rows = [
        (
            element("swatch", name, paints[name]) if name in paints else name,
            Cell(f"{value:,}", value),
            Cell(text, value),
            meaning,
        )
        for name, value, text, meaning in figures
        if value is not None
    ]
    columns = (
        Column("what"),
        Column("bytes", "num"),
        Column("in words", "num"),
        Column("which is"),
    )
    return element("table", "memory-table", "Bytes of one device", columns, rows, shown=None)


def _tensors(run: DryRun) -> Markup:
    """The largest temporary arrays, those that are alike in one row."""
    columns = (
        Column("where", "path"),
        Column("when"),
        Column("dims", "dims"),
        Column("dtype"),
        Column("how many", "num"),
        Column("bytes", "num"),
        Column("share"),
    )
    rows = []
    for where, phase, dims, dtype, count, nbytes in tensor_rows(run):
        part = Part(where, nbytes, bytes_text(nbytes), "sky")
        share = element("bar", [part], max(run.alive_bytes, nbytes, 1), "share of what is alive")
        sizes = Cell(f"{count} ×", count), Cell(part.text, nbytes), Cell(share, nbytes)
        rows.append((element("path", where), phase, dims_text(dims), dtype, *sizes))
    return element("table", "tensors-table", "Temporary arrays alive at the peak", columns, rows)


# The course of the memory


def heights_of(text: str) -> list[int]:
    """Bytes of temporary arrays at each instruction of a program, in the order of its schedule;
    while a loop runs, those of the moment at which it holds most."""
    module = parse(text)
    moments = Alive(module).at_each(module.computations[module.entry])
    return [outside + within for _, outside, within in moments]


def in_slots(heights: Sequence[int], slots: int = SLOTS) -> list[int]:
    """The most of each of ``slots`` equal parts, fewer if there are not as many heights.

    >>> in_slots([1, 5, 2, 3], 2)
    [5, 3]
    """
    count = min(slots, len(heights))
    edges = [len(heights) * i // count for i in range(count + 1)] if count else []
    return [max(heights[a:b]) for a, b in itertools.pairwise(edges)]


def _course(run: DryRun) -> dict[str, object] | None:
    """Memory over the schedule; none where nothing was compiled."""
    if run.compiled is None or not run.tensors:
        return None
    always = run.memory.argument_bytes + (run.memory.padding_bytes or 0)
    heights = in_slots(heights_of(run.compiled.text))
    whole = always + max(heights)
    none, foot = [0] * len(heights), [always] * len(heights)
    return {
        "whole": bytes_text(whole),
        "paths": [("blue", _shape(none, foot, whole)), ("sky", _shape(foot, heights, whole))],
        "box": f"0 0 {_WIDE} {_HIGH}",
    }


def _shape(feet: Sequence[int], heights: Sequence[int], whole: int) -> str:
    """A closed shape that is as high as each height, over its feet."""
    unit, wide = _HIGH / max(1, whole), _WIDE / len(heights)
    at = [_HIGH - unit * (foot + height) for foot, height in zip(feet, heights, strict=True)]
    top = "".join(f"V{y:.1f}h{wide:.3f}" for y in at)
    return f"M0 {_HIGH - unit * feet[0]:.1f}{top}V{_HIGH - unit * feet[-1]:.1f}z"
