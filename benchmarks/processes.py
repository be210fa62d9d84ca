"""The processes of the sides: each fresh, one after the other; the last line is its result."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from environments import clean_environment

PATIENCE_S = 300
QUIET_CORES = 0.5  # that may be busy on a quiet machine
QUIET_S, LOOK_EVERY_S, WAIT_LIMIT_S = 30, 5, 600
_STAT = Path("/proc/stat")


class SideFailed(Exception):
    """A side's process ended without a result."""


def run_process(command: list[str]) -> dict[str, Any]:
    """What the command printed on its last line, and ``load``: see :func:`load_since`.

    Raises :class:`SideFailed` if it ended badly.
    """
    before = Used.now()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=clean_environment(), timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        raise SideFailed(f"no result within {PATIENCE_S} s") from None
    if done.returncode != 0:
        raise SideFailed(f"ended with {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]) | {"load": load_since(before)}


def in_turn(commands: dict[str, list[str]], number: int) -> dict[str, dict[str, Any]]:
    """What every side printed, run once each; every other round runs backwards."""
    order = list(commands)[:: 1 if number % 2 == 0 else -1]
    return {side: run_process(commands[side]) for side in order}


def ranks_together(
    command: list[str], processes: int, *, independent: bool = False
) -> dict[str, Any]:
    """What rank 0 printed last, and ``load``, of processes with torchrun's variables.

    ``independent`` processes run side by side, each as a world of its own; they may meet at
    ``MEETING_PORT``. Raises :class:`SideFailed` if one ended badly.
    """
    port, *own_ports = _free_ports(1 + processes)
    before, started = Used.now(), []
    for rank in range(processes):
        place = ("0", "1") if independent else (str(rank), str(processes))
        env = clean_environment() | dict(zip(("RANK", "WORLD_SIZE"), place, strict=True))
        env |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MEETING_PORT": str(port)}
        env["MASTER_PORT"] = str(own_ports[rank if independent else 0])
        env |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=env, **piped))
    try:
        outputs = [process.communicate(timeout=PATIENCE_S) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        raise SideFailed("\n".join(error[-3000:] for _, error in outputs))
    found = json.loads([line for line in outputs[0][0].splitlines() if line.startswith("{")][-1])
    return found | {"load": load_since(before)}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class Used(NamedTuple):
    """Wall time, CPU time of ended child processes, and of the whole machine if known."""

    wall_s: float
    own_s: float
    all_s: float | None

    @classmethod
    def now(cls) -> Used:
        """What has been used so far."""
        own = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(time.perf_counter(), own.ru_utime + own.ru_stime, _all_s())


def load_since(before: Used) -> dict[str, float | None]:
    """CPU time of the processes that ended since then, and the cores that others kept busy."""
    now = Used.now()
    wall_s, own_s = now.wall_s - before.wall_s, now.own_s - before.own_s
    others = None
    if now.all_s is not None and before.all_s is not None:
        others = max(0.0, (now.all_s - before.all_s - own_s) / wall_s)
    return {"wall_s": wall_s, "cpu_s": own_s, "other_busy_cores": others}


def wait_for_quiet() -> None:
    """Return when less than half a core has been busy for 30 s, or after ten minutes; say which."""
    quiet_s, waited_s = 0.0, 0.0
    while quiet_s < QUIET_S and waited_s < WAIT_LIMIT_S:
        before = Used.now()
        time.sleep(LOOK_EVERY_S)
        busy = load_since(before)["other_busy_cores"]
        if busy is None:
            print("Load is unknown on this system: run this on a machine that does nothing else.")
            return
        quiet_s = quiet_s + LOOK_EVERY_S if busy < QUIET_CORES else 0.0
        waited_s += LOOK_EVERY_S
    if quiet_s < QUIET_S:
        print(
            f"The machine was not quiet for {QUIET_S} s within {WAIT_LIMIT_S} s: results taken "
            "under load are marked.",
            flush=True,
        )


def _all_s() -> float | None:
    """CPU time of the whole machine, see proc(5)."""
    if not _STAT.exists():
        return None
    ticks = [int(count) for count in _STAT.read_text().split("\n", 1)[0].split()[1:]]
    idle = ticks[3] + ticks[4]
    return (sum(ticks[:8]) - idle) / os.sysconf("SC_CLK_TCK")
