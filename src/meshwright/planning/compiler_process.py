"""Asks a compiler in a process of its own, which ends whenever this one does.

The process gets the step as a file and an environment of its own, so that nothing is started here
but what tracing needs. It is stopped, with whatever it started, when the time is up, when the user
presses Ctrl-C, and, as it watches its standard input, also when this process is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from .. import _compat
from ..errors import CompileError
from ..targets.target import Target
from . import cache

_EVERY_S = 1.0
_watcher: ContextVar[Callable[[float], None]] = ContextVar("watcher", default=lambda _: None)


def ask(step: bytes, job: dict[str, Any], target: Target, timeout_s: float) -> dict[str, Any]:
    """What the compiler says of a serialized step: ``memory`` and ``text``, or an ``error``.

    Raises :class:`~meshwright.CompileError` if it takes longer than ``timeout_s``.
    """
    text = json.dumps(job, sort_keys=True)
    asker = Path(__file__).with_name("child.py").read_bytes()
    key = cache.key_of((step, text, str(target), asker))
    answer = cache.recall(key)
    if answer is None:
        answer = _ask(step, text, target, timeout_s)
        # Another failure may be one of this machine, such as too little memory on the host.
        if "memory" in answer or _compat.ran_out_of_memory(answer["error"]):
            cache.remember(key, answer)
    return answer


def _ask(step: bytes, job: str, target: Target, timeout_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="meshwright-") as name:
        folder = Path(name)
        (folder / "step.bin").write_bytes(step)
        (folder / "job.json").write_text(job)
        answer = _run(folder, target, timeout_s, dump=False)
        if "no_text" in answer:  # it could not print the program, and is asked for a dump
            answer = _run(folder, target, timeout_s, dump=True)
        if "memory" in answer:
            answer["text"] = (folder / "hlo.txt").read_text()
    return answer


def _run(folder: Path, target: Target, timeout_s: float, dump: bool) -> dict[str, Any]:
    environment = _environment(target, folder / "dump" if dump else None)
    words = folder / "words.txt"
    with words.open("wb") as errors, _started(folder, environment, errors) as child:
        ended = _wait(child, target, timeout_s)
    written = folder / "answer.json"
    if not written.exists():
        text = words.read_text(errors="replace")
        return {"error": f"{_how_it_ended(ended)}\n{text}"}
    return json.loads(written.read_text())


def _wait(child: subprocess.Popen[bytes], target: Target, timeout_s: float) -> int:
    """How the process ended; the watcher is called about once a second."""
    report = _watcher.get()
    begin = time.monotonic()
    while True:
        report(elapsed := time.monotonic() - begin)
        try:
            return child.wait(min(_EVERY_S, max(0.0, timeout_s - elapsed)))
        except subprocess.TimeoutExpired:
            if time.monotonic() - begin >= timeout_s:
                raise CompileError(
                    f"compiling for {target} took longer than {timeout_s:g} s and was stopped. "
                    "Raise timeout_s=."
                ) from None


@contextlib.contextmanager
def watching(report: Callable[[float], None]) -> Iterator[None]:
    """Call ``report`` with the seconds that a compiler has been at work: as it begins, then about
    once a second. What was compiled before is not reported.

    >>> with watching(lambda elapsed_s: print(f"{elapsed_s:.0f} s")):
    ...     pass
    """
    token = _watcher.set(report)
    try:
        yield
    finally:
        _watcher.reset(token)


@contextlib.contextmanager
def _started(
    folder: Path, environment: dict[str, str], errors: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """The compiling process; nothing is left of it after the block."""
    child = subprocess.Popen(
        [sys.executable, "-m", "meshwright.planning.child", str(folder)],
        env=environment,
        stdin=subprocess.PIPE,  # closed by the system when this process ends, however it ends
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,  # Ctrl-C is for this process, which then stops the whole group
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            _kill_group(child)
        child.wait()
        if child.stdin is not None:
            child.stdin.close()


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()


def _how_it_ended(status: int) -> str:
    if status == -9:
        return (
            "the compiling process was killed, which is what happens when the host runs out of "
            "memory. Compile on a larger machine, or fewer blocks of the model."
        )
    return f"the compiling process ended with {status}."


def _environment(target: Target, dump: Path | None) -> dict[str, str]:
    """The environment of the child: the CPU and nothing else is started there."""
    flags = os.environ.get("XLA_FLAGS", "")
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags)
    if dump is not None:
        flags += f" --xla_dump_to={dump} --xla_dump_hlo_as_text"
    devices = target.num_devices if target.platform == "cpu" else 1
    return {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "TPU_SKIP_MDS_QUERY": "1",  # there is no cloud machine to ask
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # a lock file would let one process compile at a time
    }
