"""What each side's script does alike: reads its job, takes the time, prints one line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

from settings import DEVICES, JOBS, Job


def job_from_arguments(says: str | None) -> Job:
    """The job named on the command line; ``--epochs`` shortens it for a trial."""
    return read_arguments(argparse.ArgumentParser(description=says))[0]


def read_arguments(parser: argparse.ArgumentParser) -> tuple[Job, argparse.Namespace]:
    """The job, and what else the parser was made to take."""
    parser.add_argument("job", choices=sorted(JOBS))
    parser.add_argument("--epochs", type=int, help="at least 2; the first one is not measured")
    given = parser.parse_args()
    job = JOBS[given.job]
    if given.epochs is None:
        return job, given
    if given.epochs < 2:
        parser.error(f"--epochs {given.epochs}: one epoch warms up, so at least 2 are needed.")
    return replace(job, epochs=given.epochs), given


class Clock:
    """Takes the time at the start of training and after each epoch.

    An epoch has ended when its loss and accuracy are numbers on the host, so every side has
    waited for its devices by then, and never before.
    """

    def __init__(self) -> None:
        self._marks_s: list[float] = []

    def mark(self) -> None:
        self._marks_s.append(time.perf_counter())

    def ms_per_step_by_epoch(self, job: Job) -> list[float]:
        """Of every epoch but the first."""
        ends = self._marks_s[1:]
        return [1000 * (end - begin) / job.steps_per_epoch for begin, end in pairwise(ends)]


def report(
    side: str, job: Job, clock: Clock, *, loss: float, accuracy: float, versions: dict[str, str]
) -> None:
    """Print the result: time of the measured steps, loss and accuracy of the last epoch.

    The fastest epoch is what a side takes when nothing disturbs it: other processes on the machine
    can only add time.
    """
    epochs_ms = clock.ms_per_step_by_epoch(job)
    result: dict[str, Any] = {
        "side": side,
        "job": job.name,
        "ms_per_step": min(epochs_ms),
        "mean_ms_per_step": sum(epochs_ms) / len(epochs_ms),
        "ms_per_step_by_epoch": epochs_ms,
        "measured_steps": job.measured_steps,
        "loss": float(loss),
        "accuracy": float(accuracy),
        "versions": versions,
    }
    print(json.dumps(result), flush=True)


def eight_jax_devices() -> None:
    """Virtual CPU devices, and a pool that holds their collectives, without Meshwright's help.

    XLA's pool has a thread per core otherwise, and unblocked collectives lock up on few cores.
    """
    os.environ["NPROC"] = str(2 * DEVICES)
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
