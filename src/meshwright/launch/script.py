"""``meshwright launch``: a program as the chief of a local cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from . import tie
from .local import LocalCluster
from .processes import check_program

_PATIENCE_S = 60.0  # for the program to end after Ctrl-C: it may be saving; a second one kills


def run_launched(arguments: Sequence[str], *, evaluator: bool = False, **options: Any) -> int:
    """Start a :class:`LocalCluster` with these options, and run a program as its chief.

    With ``evaluator`` the same program is also run as the evaluator. Returns the exit code of the
    chief. Raises :class:`~meshwright.errors.ClusterError` where there is no such program.
    """
    check_program(arguments)
    with LocalCluster(evaluator=arguments if evaluator else (), **options) as cluster:
        return run_script(arguments, cluster)


def run_script(arguments: Sequence[str], cluster: LocalCluster) -> int:
    """Run a Python program with this cluster in its environment; returns its exit code.

    The program is ended with this process, however that ends. A signal's number is returned as a
    shell does: 128 and the number.
    """
    reading, writing = os.pipe()
    # Alone: it is in the terminal's own group, as is whatever started this.
    process = subprocess.Popen(
        tie.tied([sys.executable, *arguments], reading, group=False),
        env={**os.environ, **cluster.chief_variables()},
        pass_fds=(reading,),
    )
    os.close(reading)
    try:
        with _passing_on(signal.SIGTERM, process):
            return _wait(process)
    finally:
        os.close(writing)


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the program has got it from the terminal, and says what it has to
        try:
            code = process.wait(_PATIENCE_S)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            process.kill()
            code = process.wait()
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _passing_on(number: int, process: subprocess.Popen[bytes]) -> Iterator[None]:
    before = signal.signal(number, lambda *_: process.send_signal(number))
    try:
        yield
    finally:
        signal.signal(number, before)
