"""Processes that are started ahead, for the next start of a group, and wait inside the import.

To start Python and its imports would take most of the time between a failure and the next step. So
the launcher keeps two more processes for each place, the second for a failure soon after the first.
They run the program up to ``import meshwright``, load there what the ranks have loaded, and wait
for the variables of their rank. Devices are used only after that.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .processes import Child, Command, end_all

STANDBY = "MESHWRIGHT_STANDBY"  # "4:FILE": the descriptor of a socket, and the file of modules
_LIGHT_BYTES = 1 << 30  # what a program holds that imports this package first is far below
_PER_PLACE = 2
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

    def is_ready(self) -> bool:
        """Whether it has loaded everything, which it says by closing its side of the gate."""
        with contextlib.suppress(BlockingIOError):
            return not self.gate.recv(1, socket.MSG_DONTWAIT)
        return False

    def has_ended(self) -> bool:
        return self.child.poll() is not None


class Standbys:
    """The processes of this host that wait for the next starts, by place, the oldest first.

    They read in ``folder`` what to load.
    """

    def __init__(self, folder: Path) -> None:
        self._loaded = folder / "loaded"
        self._waiting: dict[int, list[_Waiting]] = {}

    def prepare(self, commands: Mapping[int, Command], program: str, loaded: Path) -> None:
        """Start one more of the places that have fewest, unless one is on its way; does not wait.

        ``program`` is the file that is run, if there is one; ``loaded`` is what
        :func:`note_loaded` wrote.
        """
        if any(not (waiting.is_ready() or waiting.has_ended()) for waiting in self._all()):
            return
        counts = {place: len(self._waiting.get(place, ())) for place in commands}
        place = min(counts, key=counts.__getitem__)
        if counts[place] == _PER_PLACE or not self._may_run_ahead(loaded):
            return
        gate, theirs = socket.socketpair()
        with theirs:
            command = commands[place]
            env = (*command.env, (STANDBY, f"{theirs.fileno()}:{self._loaded}"))
            child = Child(replace(command, env=env), passes=(theirs.fileno(),))
        waiting = _Waiting(command, _version(program), child, gate)
        self._waiting.setdefault(place, []).append(waiting)

    def take(
        self, place: int, command: Command, program: str, variables: Mapping[str, str]
    ) -> Child | None:
        """A process that waits for this place, now with these variables; ``None``: there is none.

        Those that have ended, or that were started by another command or from another state of the
        program's file, are not used.
        """
        queue = self._waiting.get(place, [])
        while queue:
            waiting = queue.pop(0)
            with waiting.gate as gate:
                is_same = (waiting.command, waiting.version) == (command, _version(program))
                if is_same and not waiting.has_ended():
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
    def ready(self) -> Counter[int]:
        """How many processes of each place wait for their rank."""
        return Counter(
            {
                place: sum(waiting.is_ready() for waiting in queue)
                for place, queue in self._waiting.items()
            }
        )

    def close(self) -> None:
        """End all of them."""
        for waiting in self._all():
            waiting.gate.close()
        _end([waiting.child for waiting in self._all()])
        self._waiting.clear()

    def _all(self) -> list[_Waiting]:
        return [waiting for queue in self._waiting.values() for waiting in queue]


def _version(program: str) -> float:
    try:
        return Path(program).stat().st_mtime_ns
    except OSError:  # a module
        return 0


def _end(children: list[Child]) -> None:
    end_all(children, grace_s=0.0)
    for child in children:
        os.close(child.output)
