"""The collectives of a step as a profiler saw them: the trace that JAX writes, without TensorBoard.

XLA's runtimes note for each instruction that they run which instruction of which program it is, and
on which device. The program's text says what kind of collective it is, and over which axes.
"""

from __future__ import annotations

import re
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData

from ..hlo.costs import read_costs
from ..hlo.groups import Axes
from .measurement import SeenCollective


class Event(NamedTuple):
    """One run of one instruction on one device."""

    instruction: str
    program: str
    device: str
    duration_s: float


def events_in(folder: Path) -> list[Event]:
    """The instructions that the trace in a folder holds.

    For CPUs all devices are in one plane and each event names its own; an accelerator has a plane
    for itself, of which the line of instructions (not those of steps and of whole programs) counts.
    """
    with warnings.catch_warnings():
        # From Python 3.12 on, jaxlib's reader warns of its own types; as an error that ends Python.
        warnings.simplefilter("ignore", DeprecationWarning)
        return list(_events(folder))


def _events(folder: Path) -> Iterator[Event]:
    for path in sorted(folder.rglob("*.xplane.pb")):
        for plane in ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    stats = dict(event.stats)
                    if "hlo_op" in stats and "hlo_module" in stats:
                        device = f"{plane.name}/{stats.get('device_ordinal', '')}"
                        names = str(stats["hlo_op"]), str(stats["hlo_module"])
                        yield Event(*names, device, 1e-9 * event.duration_ns)


def collectives_seen(
    events: Iterable[Event], text: str, axes: Axes, num_steps: int
) -> tuple[SeenCollective, ...] | None:
    """The collectives of a compiled step, ``text``, in the trace of several runs of it.

    ``None`` where the step has some and the trace holds none.

    >>> text = '''HloModule jit_step
    ... ENTRY %main (p: f32[4]) -> f32[4] {
    ...   %p = f32[4]{0} parameter(0)
    ...   ROOT %sum = f32[4]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1}}
    ... }'''
    >>> runs = [Event("sum", "jit_step", f"cpu/{d}", 0.5 + d) for d in (0, 1) for _ in range(3)]
    >>> collectives_seen(runs, text, (("batch", 2),), 3)[0]
    SeenCollective(kind='all-reduce', axes=('batch',), count=1.0, bytes_per_step=16, time_s=1.0)
    """
    program = re.match(r"HloModule ([\w.\-]+)", text)
    by_name = {
        operation.name: operation
        for operation in read_costs(text, axes).operations
        if operation.collectives
    }
    if not by_name:
        return ()
    counts: dict[str, int] = defaultdict(int)
    times: dict[tuple[str, tuple[str, ...]], dict[str, float]] = {}
    devices: set[str] = set()
    for event in events:
        collective = by_name.get(event.instruction)
        if collective is None or program is None or event.program != program[1]:
            continue
        devices.add(event.device)
        counts[event.instruction] += len(collective.collectives)
        first = collective.collectives[0]
        spent = times.setdefault((first.kind, first.axes), defaultdict(float))
        spent[event.device] += event.duration_s
    if not devices:
        return None
    return tuple(
        SeenCollective(
            kind,
            over,
            count=sum(counts[instruction.name] for instruction in alike) / len(devices) / num_steps,
            bytes_per_step=_sum(
                c.count and c.count * c.bytes_per_device
                for instruction in alike
                for c in instruction.collectives
            ),
            time_s=statistics.median(spent.values()) / num_steps,
        )
        for (kind, over), spent in sorted(times.items())
        if (alike := [e for e in by_name.values() if _is(e.collectives[0], kind, over)])
    )


def _is(event: object, kind: str, axes: tuple[str, ...]) -> bool:
    return (getattr(event, "kind", None), getattr(event, "axes", None)) == (kind, axes)


def _sum(numbers: Iterable[int | None]) -> int | None:
    counts = list(numbers)
    return None if None in counts else sum(number or 0 for number in counts)
