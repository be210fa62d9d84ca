"""What changed between two dry runs of the same target and mesh, and what of it got worse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..errors import TargetError
from ..layouts.mesh import axes_text
from ..units import UNKNOWN, Unit
from ..views import Viewable
from .lock import COMPILED, Lock, LockedCollective
from .report import MEMORY_NAMES

_STEP: dict[str, tuple[str, Unit]] = {
    "step_time_s": ("step time", "seconds"),
    "flops": ("FLOPs", "FLOP"),
    "mfu": ("MFU", "share"),
}
_TOLERANCE = 0.01  # of what the compiler says; what we count ourselves is exact


@dataclass(frozen=True)
class Finding(Viewable):
    """One thing that is not as it was, and whether that is ``"worse"``, ``"better"`` or just
    ``"changed"``.

    ``before`` and ``now`` are bytes of one device, or in another ``unit``: ``"count"`` is how often
    a step runs a collective, ``"seconds"``, ``"FLOP"`` and ``"share"`` are of the step; ``None`` is
    not known. ``detail`` says what numbers do not.
    """

    verdict: str
    what: str  # "fit", "step", "memory", "collective" or "layout"
    name: str
    before: float | None
    now: float | None
    unit: Unit | Literal["none"] = "bytes"
    detail: str = ""


def worse(before: Lock, now: Lock, tolerance: float | None = None) -> tuple[Finding, ...]:
    """What got worse, all of it: time, memory, collectives, layouts, and whether it fits at all.

    ``tolerance`` is the share by which a figure may grow (MFU: shrink); without it nothing for
    bytes that follow from layouts and shapes, and 1 % for what the compiler says: other bytes,
    FLOPs, MFU and the time of a step. Counts are exact. Raises
    :class:`~meshwright.TargetError` where the two are of different targets or meshes.

    >>> from meshwright.planning.lock import Lock
    >>> before = Lock("net", "cpu:8", (("batch", 8),), (), True, (("slot_bytes", 100),), (), ())
    >>> now = Lock("net", "cpu:8", (("batch", 8),), (), True, (("slot_bytes", 150),), (), ())
    >>> print(*worse(before, now))
    worse   memory      slots: 100 B -> 150 B (+50.0%)
    """
    return tuple(change for change in compare(before, now, tolerance) if change.verdict == "worse")


def compare(before: Lock, now: Lock, tolerance: float | None = None) -> tuple[Finding, ...]:
    """Everything that differs, what got worse first; see :func:`worse`.

    Of a compiled step and the planner's model nothing is compared but what follows from layouts and
    shapes, and :func:`notes` says so.
    """
    for name, old, new in (
        ("target", before.target, now.target),
        ("mesh", axes_text(before.mesh), axes_text(now.mesh)),
    ):
        if old != new:
            raise TargetError(
                f"the plan in the file is for the {name} {old}, and this dry run for {new}. Ask "
                "for the same, or write another file with --save."
            )
    exact = tolerance or 0.0
    compiled = _TOLERANCE if tolerance is None else tolerance
    alike = before.analytic == now.analytic
    changes = [
        *(_fit(before, now) if alike else ()),
        *(_step(before, now, compiled) if alike else ()),
        *_memory(before, now, exact, compiled if alike else math.inf),
        *(_collectives(before, now, compiled) if alike else ()),
        *_layouts(before, now, exact),
    ]
    order = ("worse", "better", "changed")
    return tuple(sorted(changes, key=lambda change: order.index(change.verdict)))


def notes(before: Lock, now: Lock) -> tuple[str, ...]:
    """What makes a comparison less sure: other versions of what compiles, another model's name."""
    old, new = dict(before.versions), dict(now.versions)
    result = [
        f"the file was written with {package} {old.get(package, 'absent')}, this is "
        f"{new.get(package, 'absent')}"
        for package in dict.fromkeys((*old, *new))
        if old.get(package) != new.get(package)
    ]
    if before.analytic != now.analytic:
        was, is_now = (_source(value) for value in (before, now))
        result.append(
            f"the file was written {was}, this is {is_now}: whether it fits, its peak, its time "
            "and its collectives are not compared; write another file with --save"
        )
    elif before.blocks != now.blocks:
        was, is_now = (_compiled(run.blocks) for run in (before, now))
        result.append(f"the file was written of a step with {was}, this is of one with {is_now}")
    if now.step and not before.step:
        result.append("the file holds no step time, FLOPs and MFU: write it again with --save")
    elif before.hardware != now.hardware:
        result.append(
            f"the file's times are by the numbers of {before.hardware or 'no hardware'}, these by "
            f"those of {now.hardware or 'none'}: step time and MFU are not compared"
        )
    if before.name != now.name:
        result.append(f"the file is about {before.name!r}, this is {now.name!r}")
    return tuple(result)


def _source(lock: Lock) -> str:
    return "by the analytic model alone" if lock.analytic else "of a compiled step"


def _compiled(blocks: int | None) -> str:
    return "all blocks compiled" if blocks is None else f"one and two of {blocks} blocks compiled"


def _fit(before: Lock, now: Lock) -> Iterator[Finding]:
    if before.fits != now.fits:
        verdict = {False: "worse", True: "better", None: "changed"}[now.fits]
        words = {False: "does not fit", True: "fits", None: "fit unknown"}
        detail = f"{words[before.fits]} -> {words[now.fits]}"
        yield Finding(verdict, "fit", "the step", None, None, "none", detail)


def _step(before: Lock, now: Lock, share: float) -> Iterator[Finding]:
    """Time, FLOPs and MFU of the step; a lower MFU is worse, and more of the others."""
    if before.collectives is None or now.collectives is None:
        return  # of a step that the compiler refused, which is said by itself
    old, new = dict(before.step), dict(now.step)
    for line in (line_of_old for line_of_old in old if line_of_old in new):
        if line != "flops" and before.hardware != now.hardware:
            continue
        was, takes = old[line], new[line]
        costs = [_inverse(value) if line == "mfu" else value for value in (was, takes)]
        if verdict := _verdict(costs[0], costs[1], share):
            name, unit = _STEP.get(line, (line, "seconds"))
            yield Finding(verdict, "step", name, was, takes, unit)


def _inverse(number: float | None) -> float | None:
    return 1 / number if number else None


def _memory(before: Lock, now: Lock, exact: float, compiled: float) -> Iterator[Finding]:
    old, new = dict(before.memory), dict(now.memory)
    for line in dict.fromkeys((*old, *new)):
        was, holds = old.get(line), new.get(line)
        if was is None or holds is None:
            continue  # of a step that the compiler refused, which is said by itself
        verdict = _verdict(was, holds, compiled if line in COMPILED else exact)
        if verdict:
            yield Finding(verdict, "memory", MEMORY_NAMES.get(line, line), was, holds)


def _collectives(before: Lock, now: Lock, share: float) -> Iterator[Finding]:
    if before.collectives is None or now.collectives is None:
        return
    old, new = (
        {(e.kind, e.axes, e.path, e.unexpected): e for e in lock.collectives or ()}
        for lock in (before, now)
    )
    for key in dict.fromkeys((*old, *new)):
        none = LockedCollective(*key, count=0, bytes_per_step=0)
        was, runs = old.get(key, none), new.get(key, none)
        counted = _verdict(was.count, runs.count, 0.0)
        moved = _verdict(was.bytes_per_step, runs.bytes_per_step, share)
        if moved:
            moves = was.bytes_per_step, runs.bytes_per_step
            detail = f"{count_text(was.count)} -> {count_text(runs.count)}"
            yield Finding(moved, "collective", str(runs), *moves, detail=detail * bool(counted))
        if counted and counted != moved:
            yield Finding(counted, "collective", str(runs), was.count, runs.count, "count")


def _layouts(before: Lock, now: Lock, share: float) -> Iterator[Finding]:
    old, new = ({layout.path: layout for layout in lock.layouts} for lock in (before, now))
    for path in dict.fromkeys((*old, *new)):
        if path not in old or path not in new:
            one = (old.get(path) or new[path]).layout
            text = f"new, {one}" if path in new else f"gone, was {one}"
            yield Finding("changed", "layout", path, None, None, "none", text)
            continue
        was, lies = old[path], new[path]
        verdict = _verdict(was.bytes_per_device, lies.bytes_per_device, share)
        if verdict or was.layout != lies.layout:
            sizes = was.bytes_per_device, lies.bytes_per_device
            moved = f"{was.layout} -> {lies.layout}"
            yield Finding(verdict or "changed", "layout", path, *sizes, detail=moved)


def _verdict(before: float | None, now: float | None, share: float) -> str:
    """What is not known counts as more than anything that is."""
    old, new = (math.inf if value is None else value for value in (before, now))
    if old == new:
        return ""
    if math.isinf(new) or new - old > share * old:
        return "worse"
    return "better" if math.isinf(old) or old - new > share * old else ""


def count_text(count: float | None) -> str:
    """How often a step runs something: ``"3 x"``."""
    return UNKNOWN if count is None else f"{count:g} x"
