"""The processes of the sides: each fresh, one after the other; the last line is its result."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from environments import clean_environment

PATIENCE_S = 300


class SideFailed(Exception):
    """A side's process ended without a result."""


def run_process(command: list[str]) -> dict[str, Any]:
    """What the command printed on its last line. Raises :class:`SideFailed` if it ended badly."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=clean_environment(), timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        raise SideFailed(f"no result within {PATIENCE_S} s") from None
    if done.returncode != 0:
        raise SideFailed(f"ended with {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def say_load() -> None:
    """Say it where the machine does something else as well."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 0.25 * cores:
        print(f"The machine is busy (load {load:.1f} on {cores} cores): ratios will scatter.")
