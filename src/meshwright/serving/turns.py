"""Programs over several devices, one at a time; a thread may take a turn within its own turn."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from ..layouts.mesh import Mesh

_turns: defaultdict[int, threading.RLock] = defaultdict(threading.RLock)  # by the id of a device


@contextlib.contextmanager
def turn(mesh: Mesh) -> Iterator[None]:
    """The devices of a mesh for one program at a time.

    Two programs over several devices that are begun by two threads may begin in another order on
    each device, and wait for each other for ever.
    """
    with turn_on(mesh.devices or ()):
        yield


@contextlib.contextmanager
def turn_on(devices: Iterable[Any]) -> Iterator[None]:
    """The same for these devices."""
    with contextlib.ExitStack() as stack:
        for number in sorted({device.id for device in devices}):
            stack.enter_context(_turns[number])
        yield


@contextlib.contextmanager
def turn_of_several(mesh: Mesh) -> Iterator[None]:
    """A turn where the mesh has several devices; on one alone nothing waits for another."""
    with turn_on(mesh.devices if mesh.devices and mesh.size > 1 else ()):
        yield
