"""Starting a process for a task, and ending it with all that it has started itself."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ..errors import ClusterError
from . import tie

_ASK_EVERY_S = 0.01


@dataclass(frozen=True)
class Command:
    """A program with its arguments, and the variables that it gets beside those of its parent.

    ``ties_itself`` says that it is of Meshwright's own (see :mod:`.tie`), and ``closes_pipes`` that
    it closes what it inherits.

    >>> Command.of(["python", "train.py"], {"A": "1"}).argv
    ('python', 'train.py')
    """

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    ties_itself: bool = False
    closes_pipes: bool = False

    @classmethod
    def of(
        cls, argv: Iterable[str], env: Mapping[str, str] | None = None, *, ties_itself: bool = False
    ) -> Self:
        """From a list and a mapping."""
        return cls(tuple(argv), tuple(sorted((env or {}).items())), ties_itself)


def own_module(arguments: Iterable[str], env: Mapping[str, str]) -> Command:
    """This Python with these arguments, which name something that ties itself.

    A function that is shipped by name is imported there from where it was imported here.
    """
    # -P: a file beside the user's program must not stand in for a module of the library's own.
    return Command.of([sys.executable, "-P", *arguments], _with_paths(env), ties_itself=True)


def check_program(arguments: Sequence[str]) -> None:
    """Raise :class:`~meshwright.errors.ClusterError` for what Python cannot run: a file, or -m."""
    is_module = arguments[0] == "-m" and len(arguments) > 1
    if not is_module and arguments[0].startswith("-"):
        raise ClusterError(
            f"unknown option {arguments[0]!r}. Options come before the program and are listed by "
            "`meshwright launch --help`; the program is a file, or a module by -m."
        )
    if not is_module and not Path(arguments[0]).is_file():
        raise ClusterError(
            f"there is no program {arguments[0]!r} to launch. Name a file, or a module by -m."
        )


def program(arguments: Iterable[str], env: Mapping[str, str]) -> Command:
    """This Python with the user's program and its arguments."""
    return Command.of([sys.executable, *arguments], _with_paths(env))


def _with_paths(env: Mapping[str, str]) -> dict[str, str]:
    return {"PYTHONPATH": _python_path(), "PYTHONUNBUFFERED": "1", **env}


def _python_path() -> str:
    own = {str(Path(path).resolve()) for path in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    absolute = [str(Path(path or ".").resolve()) for path in sys.path]
    paths = [p for p in absolute if not any(p == o or p.startswith(o + os.sep) for o in own)]
    return os.pathsep.join(dict.fromkeys(paths))


class Child:
    """A running process in a session of its own, tied to this one (see :mod:`.tie`).

    ``output`` is the reading end of a pipe with its stdout and stderr; the code that takes it must
    close it. ``exit_descriptor`` becomes readable when the process has ended (``None`` where the
    system has no such descriptor, or the end is noted already). ``passes`` are descriptors that it
    inherits. Not thread-safe.
    """

    def __init__(self, command: Command, passes: tuple[int, ...] = ()) -> None:
        reading, self._lifeline = os.pipe()
        _hold(self._lifeline)
        self.exit_code: int | None = None
        argv, env = list(command.argv), {**os.environ, **dict(command.env)}
        if command.ties_itself:
            env[tie.VARIABLE] = str(reading)
        else:
            argv = tie.tied(argv, reading, group=True, beside=command.closes_pipes)
        try:
            self._process = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the terminal is for the parent alone
                pass_fds=(reading, *passes),
            )
        except BaseException:
            _let_go(self._lifeline)
            raise
        finally:
            os.close(reading)
        assert self._process.stdout is not None
        self.output = os.dup(self._process.stdout.fileno())
        self._process.stdout.close()
        self.exit_descriptor = _exit_descriptor(self.pid)

    @property
    def pid(self) -> int:
        """The number of the process, also of one that has ended."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code if it has ended, and what it started is ended too; else ``None``."""
        if self.exit_code is None and _has_ended(self._process):
            # Before the process is taken note of: only until then its number is its own.
            self._signal_group(signal.SIGKILL)
            self.exit_code = self._process.wait()
            _let_go(self._lifeline)
            if self.exit_descriptor is not None:
                os.close(self.exit_descriptor)
                self.exit_descriptor = None
        return self.exit_code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it is still there."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def ask_to_end(self) -> None:
        """Send SIGTERM; a stopped process goes on to take it."""
        if self.poll() is None:
            self._signal_group(signal.SIGTERM)
            self._signal_group(signal.SIGCONT)

    def kill(self) -> int:
        """End it and all that it has started, at once; returns the exit code."""
        while self.poll() is None:
            self._signal_group(signal.SIGKILL)
            time.sleep(0.001)
        assert self.exit_code is not None
        return self.exit_code

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def end_all(children: Iterable[Child], grace_s: float) -> None:
    """Ask all to end, and kill those that have not after ``grace_s``; all at the same time."""
    remaining = list(children)
    try:
        for child in remaining if grace_s > 0 else ():
            child.ask_to_end()
        deadline_s = time.monotonic() + grace_s
        while (
            remaining := [c for c in remaining if c.poll() is None]
        ) and time.monotonic() < deadline_s:
            time.sleep(_ASK_EVERY_S)
    finally:  # a second Ctrl-C comes while waiting
        for child in remaining:
            child.kill()


def free_port() -> int:
    """A TCP port of this host that was free just now."""
    with socket.socket() as opened:
        opened.bind(("", 0))
        return opened.getsockname()[1]


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a child has ended; where possible, without taking note of it."""
    if not hasattr(os, "waitid"):  # macOS
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _exit_descriptor(pid: int) -> int | None:
    return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None


# A child that this process forks (multiprocessing does) gets the writing ends too, and would keep
# the tasks alive after their parent's death.

_shared_descriptors: set[int] = set()


def _hold(descriptor: int) -> None:
    _shared_descriptors.add(descriptor)


def _let_go(descriptor: int) -> None:
    _shared_descriptors.discard(descriptor)
    os.close(descriptor)


def _after_fork() -> None:
    for descriptor in _shared_descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _shared_descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
