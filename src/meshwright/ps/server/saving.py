"""When a server's snapshots are taken, and a thread that writes them."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from ...errors import CheckpointError
from ...files import replacing
from ...warn import warn
from .core import ServerCore
from .snapshot import Snapshot, read, restore, snapshot_of, write
from .state import SnapshotInfo

_TRY_AGAIN_S = 1.0  # to write down fences
COPY_BYTES = 48 << 20  # a larger state is not held twice: the server waits while it is written


class Saver:
    """Keeps a server's snapshots in ``directory``: one file for each server, and one of fences.

    One is taken every ``every`` applied pushes, and when variables were made and the server has
    nothing to do, or has its first push. A small state is copied and written by a thread; a large
    one is written at once, in the time that its bytes take. With no ``directory`` nothing is kept.
    """

    def __init__(self, core: ServerCore, directory: str | None, every: int | None) -> None:
        self._core = core
        self._every = every
        name = core.task.replace(":", "")
        self.path = None if directory is None else Path(directory) / f"{name}.snapshot"
        self._fences = None if directory is None else Path(directory) / f"{name}.fences"
        self._writing: threading.Thread | None = None
        self._written: Snapshot | None = None
        self._fault = ""  # of the last write, in whichever thread it was
        self._fences_fault, self._fences_tried_s = "", 0.0
        self._number = 0
        self._tried = 0  # the version last tried: a full disk is not tried at every push

    def begin(self) -> None:
        """Put aside what another cluster has left: it is not to be restored in this one."""
        if self.path is not None and self.path.exists():
            self.path.replace(self.path.with_suffix(".former"))
        if self._fences is not None:
            self._fences.unlink(missing_ok=True)

    def restore(self) -> bool:
        """Take the state of the last snapshot, and the fences; returns whether there was one."""
        state = self._core.state
        exists = self.path is not None and self.path.exists()
        if self.path is not None and exists:
            self._core.state = restore(read(self.path), state.generation, state.store.memory_bytes)
            self._number = self._core.state.snapshot.number
        if self._fences is not None and self._fences.exists():
            for incarnation in json.loads(self._fences.read_text(encoding="utf-8")):
                self._core.state.fences.add(incarnation)
        return exists

    def tick(self, idle: bool) -> None:
        """To be called after every message, or when there was none: ``idle``."""
        state = self._core.state
        if self.path is None:
            return
        self._collect()
        if state.fenced and time.monotonic() - self._fences_tried_s >= _TRY_AGAIN_S:
            self.keep_fences()
        if self._writing is not None:
            return
        news = state.version - max(self._tried, state.snapshot.version)
        due = self._every is not None and news >= self._every
        if due or (state.reshaped and (idle or news > 0)):
            self.save()

    def save(self) -> None:
        """Take a snapshot now; a thread may still be writing it when this returns."""
        self.wait()
        state = self._core.state
        snapshot = snapshot_of(state, self._number + 1)
        self._number += 1
        self._tried = state.version
        state.reshaped = False
        if snapshot.num_bytes > COPY_BYTES:
            self._write(snapshot)
            self._collect()
            return
        self._writing = threading.Thread(
            target=self._write, args=(snapshot.copied(),), name="snapshot", daemon=True
        )
        self._writing.start()

    def wait(self) -> None:
        """Until no snapshot is being written."""
        if self._writing is not None:
            self._writing.join()
        self._collect()

    def _write(self, snapshot: Snapshot) -> None:
        assert self.path is not None
        try:
            write(snapshot, self.path)
            self._written, self._fault = snapshot, ""
        except CheckpointError as error:
            self._fault = str(error)
            warn(str(error))

    def _collect(self) -> None:
        if self._writing is not None and not self._writing.is_alive():
            self._writing = None
        if self._writing is None:
            self._core.state.save_fault = self._fault or self._fences_fault
        if self._writing is None and self._written is not None:
            state = self._core.state
            state.snapshot = SnapshotInfo(self._written.number, self._written.version)
            state.counts.snapshots += 1
            self._written = None

    def keep_fences(self) -> None:
        """Write down new fences; to be called before they are acknowledged.

        They must outlive a crash before the next snapshot, or the dead could push again. Where they
        cannot be written (a full disk) the server goes on: they hold while it lives, the
        coordinator has them too, and they are tried again.
        """
        if self._fences is None or not self._core.state.fenced:
            return
        self._fences_tried_s = time.monotonic()
        try:
            with replacing(self._fences) as file:
                file.write(json.dumps(sorted(self._core.state.fences.fenced)).encode())
        except OSError as error:
            fault = f"{self._fences} cannot be written: {error.strerror or error}."
            self._fences_fault = fault
        else:
            self._fences_fault, self._core.state.fenced = "", False
