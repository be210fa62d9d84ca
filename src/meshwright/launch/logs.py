"""The output of tasks, line by line, each with the task's name before it."""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import sys
import threading
from pathlib import Path
from typing import IO

from .gloo_lines import WithoutGloo

_CHUNK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20
_REMEMBERED_LINES = 20


class Lines:
    """Cuts what comes in pieces into whole lines.

    >>> lines = Lines()
    >>> lines.feed(b"one\\ntw"), lines.feed(b"o\\n"), lines.rest()
    (['one'], ['two'], [])
    """

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, piece: bytes) -> list[str]:
        """The lines that this piece completes; a line of a megabyte counts as complete."""
        *whole, self._begun = (self._begun + piece).split(b"\n")
        if len(self._begun) > _LONGEST_LINE_BYTES:
            whole += self.rest_bytes()
        return [line.decode(errors="replace").removesuffix("\r") for line in whole]

    def rest(self) -> list[str]:
        """What is left without an end of line."""
        return [line.decode(errors="replace") for line in self.rest_bytes()]

    def rest_bytes(self) -> list[bytes]:
        """The same, undecoded."""
        rest, self._begun = self._begun, b""
        return [rest] if rest else []


class _Pipe:
    def __init__(self, name: str, remembered: int, file: IO[str] | None) -> None:
        self.name = name
        self.file = file
        self.lines = Lines()
        self.without_gloo = WithoutGloo()
        self.last: collections.deque[str] = collections.deque(maxlen=remembered)
        self.at_end = threading.Event()


class LogPump:
    """A thread that reads pipes and writes their lines to ``sys.stderr``, never mixing two.

    It remembers the last lines of each task, for the error about it; with ``show=False`` it does
    only that. With ``folder`` the lines of each task also go to a file there, and ``to_stdout``
    has them written to ``sys.stdout``. What Gloo prints is left out. A reader that cannot keep up
    makes the tasks wait, as in any pipe.
    """

    def __init__(
        self,
        show: bool,
        *,
        remembered: int = _REMEMBERED_LINES,
        folder: Path | None = None,
        to_stdout: bool = False,
    ) -> None:
        self._show = show
        self._remembered, self._folder = remembered, folder
        self._to_stdout = to_stdout
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._sources: dict[str, _Pipe] = {}
        self._new: list[tuple[int, _Pipe]] = []
        self._closing = self._stopped = False
        self._thread = threading.Thread(target=self._run, name="task logs", daemon=True)
        self._thread.start()

    def add(self, name: str, pipe: int) -> None:
        """Read this pipe to its end, and close it."""
        file = None
        if self._folder is not None:
            file = (self._folder / f"{name.replace(':', '')}.log").open("a", encoding="utf-8")
        source = _Pipe(name, self._remembered, file)
        with self._lock:
            self._sources[name] = source
            self._new.append((pipe, source))
        os.write(self._wake_write, b".")

    def last_lines(self, name: str, wait_s: float = 0.0) -> list[str]:
        """The last lines of the task's present or last process.

        Of one that has just ended, they may still be in the pipe: hence ``wait_s``, at most.
        """
        with self._lock:
            source = self._sources.get(name)
        if source is None:
            return []
        source.at_end.wait(wait_s)
        return list(source.last)

    def tell(self, name: str, line: str) -> None:
        """Write a line about a task among its own."""
        self._write(name, [line])

    def close(self, timeout_s: float) -> None:
        """Read on until all pipes have come to their end, but not longer than this."""
        self._closing = True
        os.write(self._wake_write, b".")
        self._thread.join(timeout_s)
        self._stopped = True  # something that a task left behind may still hold its pipe
        if self._thread.is_alive():
            os.write(self._wake_write, b".")
            self._thread.join()
        for descriptor in (self._wake_read, self._wake_write):
            os.close(descriptor)

    def _run(self) -> None:
        with self._selector:
            while not self._stopped and not (self._closing and self._at_end()):
                for key, _ in self._selector.select():
                    if key.data is None:
                        os.read(self._wake_read, _CHUNK_BYTES)
                        self._take_new()
                    else:
                        self._read(key.fd, key.data)
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    os.close(key.fd)

    def _at_end(self) -> bool:
        with self._lock:
            return not self._new and len(self._selector.get_map()) == 1

    def _take_new(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for pipe, source in new:
            self._selector.register(pipe, selectors.EVENT_READ, source)

    def _read(self, pipe: int, source: _Pipe) -> None:
        piece = os.read(pipe, _CHUNK_BYTES)
        self._tell(source, source.lines.feed(piece) if piece else source.lines.rest())
        if not piece:
            self._selector.unregister(pipe)
            os.close(pipe)
            if source.file is not None:
                source.file.close()
            source.at_end.set()

    def _tell(self, source: _Pipe, lines: list[str]) -> None:
        lines = source.without_gloo.of(lines)
        source.last.extend(lines)
        if source.file is not None and lines:
            with contextlib.suppress(OSError):  # the disk is full; training goes on
                source.file.write("".join(f"{line}\n" for line in lines))
                source.file.flush()
        self._write(source.name, lines)

    def _write(self, name: str, lines: list[str]) -> None:
        if not lines or not self._show:
            return
        # One write for all of them: what others write to stderr comes before or after. Nobody
        # may be left to read it, and that must not end the thread that empties the pipes.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream = sys.stdout if self._to_stdout else sys.stderr
            stream.write("".join(f"[{name}] {line}\n" for line in lines))
            stream.flush()
