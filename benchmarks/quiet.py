"""How quiet the machine was while a benchmark measured: waited for before, and kept with it.

Every benchmark that measures time waits by :meth:`Quiet.wait`, and keeps :meth:`Quiet.record` with
its results, as ``quiet``. Those that only compile need neither.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

QUIET_CORES = 0.5  # that may be busy on a quiet machine
QUIET_S, LOOK_EVERY_S, WAIT_LIMIT_S = 30, 5, 600
_STAT, _PROCESSES = Path("/proc/stat"), Path("/proc")


class Used(NamedTuple):
    """Wall time, CPU time of this process and of its ended children, and of the whole machine."""

    wall_s: float
    own_s: float
    all_s: float | None

    @classmethod
    def now(cls) -> Used:
        """What has been used so far."""
        return cls(time.perf_counter(), own_cpu_s(), _all_s())


def own_cpu_s() -> float:
    """CPU time of this process, and of its children that have ended."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def load_since(before: Used) -> dict[str, float | None]:
    """CPU time of this process and those that ended since then, and the cores that others kept
    busy."""
    now = Used.now()
    wall_s, own_s = now.wall_s - before.wall_s, now.own_s - before.own_s
    others = None
    if now.all_s is not None and before.all_s is not None:
        others = max(0.0, (now.all_s - before.all_s - own_s) / max(wall_s, 1e-9))
    return {"wall_s": wall_s, "cpu_s": own_s, "other_busy_cores": others}


class Quiet:
    """What the machine did since a benchmark began to measure."""

    def __init__(self, was_quiet: bool | None, waited_s: float) -> None:
        self._was_quiet, self._waited_s = was_quiet, waited_s
        self._before, self._load = Used.now(), os.getloadavg()[0]

    @classmethod
    def wait(cls, *, dry: bool = False) -> Quiet:
        """Return when less than half a core has been busy for 30 s, or after ten minutes.

        Says so if it was not quiet. Dry runs, whose results are not kept, do not wait.
        """
        was_quiet, waited_s = (None, 0.0) if dry else _waited()
        if was_quiet is None and not dry:
            print("Load is unknown on this system: run this on a machine that does nothing else.")
        elif was_quiet is False:
            print(
                f"The machine was not quiet for {QUIET_S} s within {WAIT_LIMIT_S} s: results "
                "taken under load are marked.",
                flush=True,
            )
        return cls(was_quiet, waited_s)

    def record(self, cpu_s_of_sides: Mapping[str, float] | None = None) -> dict[str, Any]:
        """What is kept of the time since the last record, or since the wait."""
        load = load_since(self._before)
        result: dict[str, Any] = {
            "was_quiet": self._was_quiet,
            "waited_s": self._waited_s,
            "load_before": self._load,
            "load_after": os.getloadavg()[0],
            **load,
        }
        if cpu_s_of_sides:
            result["cpu_s_of_sides"] = dict(cpu_s_of_sides)
        self._before, self._load = Used.now(), os.getloadavg()[0]
        return result

    def line(self, cpu_s_of_sides: Mapping[str, float] | None = None) -> str:
        """The same in words, for benchmarks that keep no results."""
        return ". ".join(cell for cell in cells(self.record(cpu_s_of_sides)) if cell)


def cells(kept: Mapping[str, Any]) -> tuple[str, str, str]:
    """A record in words: whether it was quiet, the load, and the CPU time of each side."""
    was_quiet = {True: "quiet", False: "not quiet", None: "did not wait"}[kept["was_quiet"]]
    others = kept["other_busy_cores"]
    busy = "unknown" if others is None else f"{others:.2f}"
    sides = kept.get("cpu_s_of_sides", {})
    return (
        f"{was_quiet} after {kept['waited_s']:.0f} s" if kept["waited_s"] else was_quiet,
        f"load {kept['load_before']:.1f} to {kept['load_after']:.1f}, cores kept busy by others: "
        + busy,
        ", ".join(f"{side} {seconds:.3g} s" for side, seconds in sides.items()),
    )


class Sides:
    """CPU seconds of each side of those that run in turn in one process.

    ::

        sides = Sides()
        with sides.runs("ours"):
            step()
        quiet.record(sides.cpu_s)
    """

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}

    @contextlib.contextmanager
    def runs(self, side: str, session: int | None = None) -> Iterator[None]:
        """Add what is used meanwhile; with ``session`` what its processes use, in place of ours."""
        used = own_cpu_s if session is None else lambda: cpu_of_session_s(session)
        before_s = used()
        yield
        self.cpu_s[side] = self.cpu_s.get(side, 0.0) + used() - before_s


def cpu_of_session_s(session: int) -> float:
    """CPU time of the processes of a session, see proc(5)."""
    ticks = 0
    for stat in _PROCESSES.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12]) if int(fields[3]) == session else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def _waited() -> tuple[bool | None, float]:
    """Whether the machine became quiet, if that is known, and the seconds it took."""
    quiet_s, waited_s = 0.0, 0.0
    while quiet_s < QUIET_S and waited_s < WAIT_LIMIT_S:
        before = Used.now()
        time.sleep(LOOK_EVERY_S)
        busy = load_since(before)["other_busy_cores"]
        if busy is None:
            return None, waited_s
        quiet_s = quiet_s + LOOK_EVERY_S if busy < QUIET_CORES else 0.0
        waited_s += LOOK_EVERY_S
    return quiet_s >= QUIET_S, waited_s


def _all_s() -> float | None:
    """CPU time of the whole machine, see proc(5)."""
    if not _STAT.exists():
        return None
    ticks = [int(count) for count in _STAT.read_text().split("\n", 1)[0].split()[1:]]
    idle = ticks[3] + ticks[4]
    return (sum(ticks[:8]) - idle) / os.sysconf("SC_CLK_TCK")
