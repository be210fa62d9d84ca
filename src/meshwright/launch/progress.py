"""Where a rank is: its step and its section, written for its agent into memory that both map.

Writing takes about a microsecond and waits for no reader; what a rank wrote last can be read when
it is stopped, stuck or dead. Without an agent nothing is written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECTIONS = (
    "launch",  # it was started, and has not joined yet
    "join",
    "script",  # the program's own code around training
    "compile",
    "input",
    "step",
    "batch callbacks",
    "callbacks",  # of an epoch, or of the whole run
    "save",
    "barrier",
    "failed",  # an exception that nothing has caught
    "exit",  # the program is over
)
_CODES = {section: code for code, section in enumerate(SECTIONS)}
_FORM = struct.Struct("=qqqq")  # code, step, since, pid
_SAVED = struct.Struct("=q")  # behind it: the step of the newest checkpoint, and _OFFSET
_OFFSET = 2
_BYTES = _FORM.size + _SAVED.size
_END = ("failed", "exit")


@dataclass(frozen=True)
class Progress:
    """What a rank was doing at last; ``since_s`` is a time of ``time.monotonic``.

    ``step`` counts the steps of training, evaluation and prediction that the process has begun.
    ``saved`` is the step of the newest checkpoint: -1 if there is none yet, -2 where none is saved.
    """

    section: str = "launch"
    step: int = 0
    since_s: float = 0.0
    pid: int = 0  # 0: it has not joined
    saved: int = -_OFFSET

    @property
    def saves(self) -> bool:
        """Whether the run is saved."""
        return self.saved > -_OFFSET

    @property
    def is_over(self) -> bool:
        """Whether the program has ended, though its process may still be there."""
        return self.section in _END


class Board:
    """The piece of memory that a rank writes; :func:`read_board` reads it elsewhere."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BYTES)
        self._step, self._code, self._pid = 0, 0, os.getpid()

    @property
    def section(self) -> str:
        """The section that was written last."""
        return SECTIONS[self._code]

    def write(self, section: str, *, goes_on: bool = False) -> None:
        """Enter a section; ``step`` begins another step, unless one goes on. The end is final."""
        if SECTIONS[self._code] in _END and section not in _END:
            return
        self._code = _CODES[section]
        if section == "step" and not goes_on:
            self._step += 1
        self._write()

    def begin_step(self) -> None:
        """Count another step of a loop of the program's own, and stay in ``script``."""
        if SECTIONS[self._code] == "script":
            self._step += 1
            self._write()

    def _write(self) -> None:
        entry = (self._code, self._step, time.monotonic_ns(), self._pid)
        # In one piece: pack_into() writes zeros first, which the reader of a busy host would see.
        self._memory[: _FORM.size] = _FORM.pack(*entry)

    def write_saved(self, step: int) -> None:
        """Note the newest checkpoint; any thread may do so."""
        self._memory[_FORM.size : _BYTES] = _SAVED.pack(step + _OFFSET)


def new_board(path: Path) -> None:
    """Make the file of a board that nothing has been written to."""
    path.write_bytes(_FORM.pack(0, 0, time.monotonic_ns(), 0) + _SAVED.pack(0))


def read_board(path: Path) -> Progress:
    """What was written last. A piece that is just being written is read again."""
    piece = path.read_bytes()
    while (again := path.read_bytes()) != piece:
        piece = again
    code, step, since_ns, pid = _FORM.unpack_from(piece)
    (saved,) = _SAVED.unpack_from(piece, _FORM.size)
    return Progress(SECTIONS[code], step, since_ns / 1e9, pid, saved - _OFFSET)


_board: Board | None = None  # of this process, where an agent watches it


def report_to(board: Board | None) -> None:
    """Have :func:`entering` and :func:`inside` write to this board."""
    global _board
    _board = board


def is_over() -> bool:
    """Whether this process has come to its end."""
    return _board is not None and _board.section in _END


def entering(section: str) -> None:
    """This process goes on to another section; a loop calls it wherever it changes hands.

    >>> entering("input")
    """
    if _board is not None:
        _board.write(section)


def begin_step() -> None:
    """Say that this process begins another step of a loop of its own.

    The agents that watch over a group then know how far each process is: what they say of one that
    fails names the step, and the group may be started again. ``Trainer.step`` and ``strategy.run``
    say so themselves, and ``fit`` and ``Trainer.steps`` count their own steps. It costs about a
    microsecond, and does nothing without an agent.

    >>> import meshwright as mw
    >>> for batch in [1.0, 2.0]:
    ...     mw.begin_step()
    ...     loss = batch**2
    """
    if _board is not None:
        _board.begin_step()


def is_watched() -> bool:
    """Whether an agent reads what this process writes."""
    return _board is not None


def is_in_script() -> bool:
    """Whether an agent watches this process, and it is in code of the program's own."""
    return _board is not None and _board.section == "script"


def saved(step: int) -> None:
    """The newest checkpoint is that of this step; -1: the run is saved, and has none yet."""
    if _board is not None:
        _board.write_saved(step)


@contextlib.contextmanager
def inside(section: str) -> Iterator[None]:
    """A section that ends where the one before it goes on."""
    board = _board
    before = board.section if board is not None else "script"
    entering(section)
    try:
        yield
    finally:
        if board is not None:
            board.write(before, goes_on=True)


def follow_compiler() -> None:
    """Have JAX say when it traces and compiles, whatever for, on the main thread."""
    import jax

    before: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if _board is None or not event.startswith("/jax/core/compile/"):
            return
        if threading.current_thread() is not threading.main_thread():
            return
        if event.endswith("backend_compile_duration"):
            _board.write(before.pop() if before else "script", goes_on=True)
            before.clear()
        elif _board.section != "compile":  # a trace has ended, so the compiler comes next
            before[:] = [_board.section]
            _board.write("compile")

    jax.monitoring.register_event_duration_secs_listener(listen)
