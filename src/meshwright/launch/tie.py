"""A process that ends with the one that started it, however that ended.

The parent keeps the writing end of a pipe and never writes to it: when the parent is gone, killed
or not, the kernel closes the pipe. On Linux the kernel also signals that by itself (``F_SETSIG``),
with SIGKILL to the whole process group, so it reaches a process that is stopped, one that is deep
in a long call, and what it has started. Elsewhere a thread waits for the end of the pipe.

(``PR_SET_PDEATHSIG`` would do for less: it goes by the parent's *thread*, and not to the group.)

As a program, ``tie.py FD group|alone|beside PROGRAM ARGS...`` ties itself and becomes that program;
``beside`` one that closes the pipe, as ssh does, it stays, in its group. It imports nothing of this
package, to be quick.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Sequence

VARIABLE = "MESHWRIGHT_LIFELINE"  # number of the pipe's reading end


def tie_from_environment() -> None:
    """Tie this process to its parent if the parent asked for it; children do not inherit that."""
    number = os.environ.pop(VARIABLE, "")
    if number:
        tie(int(number), group=True)


def tie(pipe: int, *, group: bool) -> None:
    """End this process, or its group, when the other end of the pipe is closed."""
    owner = -os.getpgrp() if group else os.getpid()
    if not _by_signal(pipe, owner):
        threading.Thread(target=_wait, args=(pipe, group), name="lifeline", daemon=True).start()
    elif _is_closed(pipe):  # the parent was gone before the kernel was asked
        _end(group)


def tied(argv: Sequence[str], pipe: int, *, group: bool, beside: bool = False) -> list[str]:
    """The command that ties itself to the pipe, and becomes this one, or runs ``beside`` it."""
    how = "beside" if beside else "group" if group else "alone"
    return [sys.executable, "-I", "-S", __file__, str(pipe), how, *argv]


def _by_signal(pipe: int, owner: int) -> bool:
    try:
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETOWN, owner)
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)  # type: ignore[attr-defined]
        flags = fcntl.fcntl(pipe, fcntl.F_GETFL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, flags | os.O_ASYNC)  # type: ignore[attr-defined]
    except (ImportError, AttributeError, OSError):
        return False
    return True


def _is_closed(pipe: int) -> bool:
    poller = select.poll()
    poller.register(pipe, select.POLLIN)  # and POLLHUP, always
    return bool(poller.poll(0))


def _wait(pipe: int, group: bool) -> None:
    os.read(pipe, 1)
    _end(group)


def _end(group: bool) -> None:
    os.kill(0 if group else os.getpid(), signal.SIGKILL)


def _run_beside(argv: list[str]) -> int:
    """Run a program as one of this group, and end as it does."""
    pid = os.posix_spawn(argv[0], argv, os.environ)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the program gets it, too
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    tie(int(sys.argv[1]), group=sys.argv[2] != "alone")
    if sys.argv[2] == "beside":
        sys.exit(_run_beside(sys.argv[3:]))
    os.execv(sys.argv[3], sys.argv[3:])
