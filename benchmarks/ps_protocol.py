"""What both sides of the parameter-server jobs do alike: sizes, timing, CPU time, JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

WORKERS, SERVERS = 2, 2
MEASUREMENTS = 3
ROWS, WIDTH, LOOKUPS = 1_000_000, 32, 1024  # of the embedding
BATCH_SIZE, INPUTS, HIDDEN, CLASSES = 128, 784, 128, 10  # of the MLP
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class PsJob:
    """One kind of scheduled step; ``at_least`` is the wanted ratio of steps per second."""

    name: str
    says: str
    steps: int
    at_least: float


JOBS = {
    job.name: job
    for job in (
        PsJob("counter", "a function that adds 1 to a counter", 2000, 3.0),
        PsJob("mlp", "MLP 784-128-10, batch 128, SGD", 400, 2.0),
        PsJob("embedding", "embedding 1,000,000 × 32, 1,024 sparse lookups, SGD", 400, 2.0),
    )
}


def job_from_arguments(says: str | None) -> PsJob:
    parser = argparse.ArgumentParser(description=says)
    parser.add_argument("job", choices=list(JOBS))
    return JOBS[parser.parse_args().job]


def measure(
    side: str,
    job: PsJob,
    run: Callable[[int], None],
    pids: Callable[[], Sequence[int]],
    check: Callable[[], float],
) -> None:
    """Time ``run(steps)``, which schedules so many steps and waits for them; print the result.

    The fastest measurement counts: other processes can only add time. ``pids`` are
    the tasks' processes, whose CPU time is taken together with this one's. ``check`` gives a number
    that both sides must agree on.
    """
    run(job.steps // 10)
    wall_s, cpu_s = [], []
    for _ in range(MEASUREMENTS):
        used_s, began_s = _cpu_s(pids()), time.perf_counter()
        run(job.steps)
        wall_s.append(time.perf_counter() - began_s)
        cpu_s.append(_cpu_s(pids()) - used_s)
    result = {
        "side": side,
        "job": job.name,
        "steps_per_s": job.steps / min(wall_s),
        "steps_per_s_by_measurement": [job.steps / each for each in wall_s],
        "cpu_ms_per_step": 1000 * min(cpu_s) / job.steps,
        "check": check(),
    }
    print(json.dumps(result), flush=True)


def _cpu_s(pids: Sequence[int]) -> float:
    ticks = sum(_ticks(pid) for pid in {*pids, os.getpid()})
    return ticks / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])  # utime and stime, see proc(5)
