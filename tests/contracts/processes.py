"""Several processes of one program, started and ended together."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_together(
    script: Path, arguments: Sequence[Sequence[object]], env: Mapping[str, str], timeout_s: float
) -> tuple[list[int], list[str]]:
    """Exit codes and outputs, one process per list of arguments. None outlives this call."""
    started = []
    with contextlib.ExitStack() as ending:
        outputs = [ending.enter_context(tempfile.TemporaryFile("w+")) for _ in arguments]
        for argument, output in zip(arguments, outputs, strict=True):
            process = subprocess.Popen(
                [sys.executable, str(script), *map(str, argument)],
                env=dict(env),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            ending.callback(process.wait)
            ending.callback(process.kill)
            started.append(process)
        codes = [process.wait(timeout=timeout_s) for process in started]
        return codes, [output.seek(0) or output.read() for output in outputs]
