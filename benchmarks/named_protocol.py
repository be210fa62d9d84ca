"""What each side of the named jobs does alike: reads its job, takes the time, prints JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from named_jobs import JOBS, MEASUREMENTS, STEPS, WARM_UP_STEPS, NamedJob


def job_from_arguments(says: str | None) -> NamedJob:
    parser = argparse.ArgumentParser(description=says)
    parser.add_argument("job", choices=sorted(JOBS))
    return JOBS[parser.parse_args().job]


def measure(
    side: str, job: NamedJob, step: Callable[[], Any], wait: Callable[[Any], float]
) -> None:
    """Time ``step``, which gives a loss that ``wait`` turns into a number.

    Nothing waits between the steps of one measurement. The fastest one counts: other processes on
    the machine can only add time.
    """
    losses = [wait(step()) for _ in range(WARM_UP_STEPS)]
    times_ms = []
    for _ in range(MEASUREMENTS):
        began_s = time.perf_counter()
        for _ in range(STEPS):
            loss = step()
        losses.append(wait(loss))
        times_ms.append(1000 * (time.perf_counter() - began_s) / STEPS)
    result = {
        "side": side,
        "job": job.name,
        "ms_per_step": min(times_ms),
        "ms_per_step_by_measurement": times_ms,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    print(json.dumps(result), flush=True)
