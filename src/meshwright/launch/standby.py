"""Processes that are started ahead, for the next start of a group, and wait inside the import.

To start Python and its imports would take most of the time between a failure and the next step. So
the launcher keeps one more process for each place. It runs the program up to ``import meshwright``,
loads there what the ranks have loaded, and waits for the variables of its rank. Devices are used
only after that.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .processes import Child, Command, end_all

STANDBY = "MESHWRIGHT_STANDBY"  # "4:FILE": the descriptor of a socket, and the file of modules
_LIGHT_BYTES = 1 << 30  # what a program holds that imports this package first is far below
_KIB = 1024 if sys.platform != "darwin" else 1  # what the system counts memory in
# What the library itself is made of: to load it earlier changes nothing for a program.
_PACKAGES = frozenset(
    ["meshwright", "jax", "jaxlib", "keras", "optax", "orbax", "tensorstore", "etils", "ml_dtypes"]
    + ["numpy", "msgpack", "zmq"]
)
_BY_LIBRARIES = frozenset(["TF_FORCE_GPU_ALLOW_GROWTH"])  # Keras sets it
_joined_with: dict[str, str] | None = None  # the environment
_peak_bytes = 0  # of memory, until then


def wait_for_place() -> None:
    """In a process that was started ahead, wait for the variables of its rank; else do nothing."""
    standby = os.environ.pop(STANDBY, "")
    if not standby:
        return
    descriptor, _, modules = standby.partition(":")
    with socket.socket(fileno=int(descriptor)) as gate:
        _load(Path(modules))
        with contextlib.suppress(OSError):  # the launcher has ended
            gate.shutdown(socket.SHUT_WR)  # says "ready"
        variables = b"".join(iter(lambda: gate.recv(1 << 16), b""))
    if not variables:
        os._exit(0)
    os.environ.update(json.loads(variables))


def note_joined() -> None:
    """Remember the environment with which this process has joined its group."""
    global _joined_with, _peak_bytes
    import resource  # POSIX has it alone, as the launcher

    _joined_with = dict(os.environ)
    _peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def note_loaded(path: Path) -> None:
    """Write down what a process for the next start may load ahead; ``null``: start none.

    Where a program changes its environment after ``import meshwright``, that may mean what is
    imported next, so nothing is loaded before. One that holds much memory by then is not run twice.
    """
    if _joined_with is None:
        return
    text = "null" if _peak_bytes > _LIGHT_BYTES else json.dumps(_loaded(_joined_with))
    begun = path.with_name(f"{path.name}.begun")
    begun.write_text(text)
    begun.replace(path)


def _loaded(environment: Mapping[str, str]) -> list[str]:
    if any(environment.get(n) != text for n, text in os.environ.items() if n not in _BY_LIBRARIES):
        return []
    return [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]


def _load(loaded: Path) -> None:
    """Import what the ranks have imported, in the same order."""
    with contextlib.suppress(OSError, ValueError):
        for name in json.loads(loaded.read_text()):
            with contextlib.suppress(Exception):  # the program itself gets the error, if it asks
                importlib.import_module(name)


@dataclass(frozen=True)
class _Waiting:
    command: Command
    version: float
    child: Child
    gate: socket.socket


class Standbys:
    """The processes of this host that wait for the next start, by place.

    They read in ``folder`` what to load.
    """

    def __init__(self, folder: Path) -> None:
        self._loaded = folder / "loaded"
        self._waiting: dict[int, _Waiting] = {}
        self._ready: set[int] = set()

    def prepare(self, commands: Mapping[int, Command], program: str, loaded: Path) -> None:
        """Start one more of the places that have none, unless one is on its way; returns at once.

        ``program`` is the file that is run, if there is one; ``loaded`` is what
        :func:`note_loaded` wrote.
        """
        for place, waiting in self._waiting.items():
            if place not in self._ready and waiting.child.poll() is None:
                if not _is_ready(waiting.gate):
                    return
                self._ready.add(place)
        missing = [place for place in commands if place not in self._waiting]
        if not missing or not self._may_run_ahead(loaded):
            return
        place = missing[0]
        gate, theirs = socket.socketpair()
        with theirs:
            command = commands[place]
            env = (*command.env, (STANDBY, f"{theirs.fileno()}:{self._loaded}"))
            child = Child(replace(command, env=env), passes=(theirs.fileno(),))
        self._waiting[place] = _Waiting(command, _version(program), child, gate)

    def take(
        self, place: int, command: Command, program: str, variables: Mapping[str, str]
    ) -> Child | None:
        """The process that waits for this place, now with these variables; ``None``: there is none.

        One that has ended, or that was started by another command or from another state of the
        program's file, is not used.
        """
        waiting = self._waiting.pop(place, None)
        self._ready.discard(place)
        if waiting is None:
            return None
        with waiting.gate as gate:
            is_same = (waiting.command, waiting.version) == (command, _version(program))
            if is_same and waiting.child.poll() is None:
                with contextlib.suppress(OSError):
                    gate.sendall(json.dumps(dict(variables)).encode())
                    return waiting.child
        _end([waiting.child])
        return None

    def _may_run_ahead(self, loaded: Path) -> bool:
        try:
            text = loaded.read_text()
        except OSError:  # the ranks have not said so yet
            return False
        self._loaded.write_text(text)
        return text != "null"

    @property
    def ready(self) -> set[int]:
        """The places whose process was last seen to wait for its rank."""
        return set(self._ready)

    def close(self) -> None:
        """End all of them."""
        for waiting in self._waiting.values():
            waiting.gate.close()
        _end([waiting.child for waiting in self._waiting.values()])
        self._waiting.clear()


def _is_ready(gate: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return not gate.recv(1, socket.MSG_DONTWAIT)
    return False


def _version(program: str) -> float:
    try:
        return Path(program).stat().st_mtime_ns
    except OSError:  # a module
        return 0


def _end(children: list[Child]) -> None:
    end_all(children, grace_s=0.0)
    for child in children:
        os.close(child.output)
