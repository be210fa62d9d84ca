"""The processes of the sides: each fresh, one after the other; the last line is its result."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from environments import clean_environment
from quiet import Used, load_since

PATIENCE_S = 300
_ORPHANS_S = 10.0  # for processes that a side has left behind to end
_SET_CHILD_SUBREAPER = 36  # of prctl(2)


class SideFailed(Exception):
    """A side's process ended without a result."""


def run_process(command: list[str]) -> dict[str, Any]:
    """What the command printed on its last line, and ``load``: see :func:`quiet.load_since`.

    Raises :class:`SideFailed` if it ended badly.
    """
    before, name = Used.now(), " ".join(Path(part).name for part in command)
    _adopt_orphans()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=clean_environment(), start_new_session=True, **pipes)
    try:
        output, errors = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise SideFailed(f"{name}: no result within {PATIENCE_S} s") from None
    finally:
        if process.returncode is None:  # with its servers and workers
            os.killpg(process.pid, signal.SIGKILL)
    _wait_for_orphans()
    if process.returncode != 0:
        raise SideFailed(f"{name}: ended with {process.returncode}\n{errors[-2000:]}")
    return json.loads(output.splitlines()[-1]) | {"load": load_since(before)}


def _adopt_orphans() -> None:
    """Become the parent of processes that lose theirs, such as the servers and workers of a side
    that ends without waiting for them: their CPU time would count as that of others."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _wait_for_orphans() -> None:
    until_s = time.monotonic() + _ORPHANS_S
    with contextlib.suppress(ChildProcessError):  # there are none left
        while time.monotonic() < until_s:
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if not ended:
                time.sleep(0.05)


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
    port, *own_ports = free_ports(1 + processes)
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


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing listens on."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def cpu_s_of_sides(rounds: Iterable[Mapping[str, dict[str, Any]]]) -> dict[str, float]:
    """CPU seconds of the processes of each side, in all rounds together."""
    found: dict[str, float] = {}
    for sides in rounds:
        for side, result in sides.items():
            if result:
                found[side] = found.get(side, 0.0) + result["load"]["cpu_s"]
    return found
