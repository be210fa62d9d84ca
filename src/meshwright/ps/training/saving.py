"""The tables of a run's checkpoints: files beside them, which workers write and read.

The rest of a checkpoint is the same as synchronous training's, so that either can go on. The
coordinator saves when no step is under way, so that parameters and slots of all servers belong
together. One that has died is started again with the same program: it reads the newest checkpoint,
and the tasks of the cluster, which have waited, take its values.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

from ...checkpoint import CheckpointInfo
from ...run.saver import Saver
from .table_files import (
    Tables,
    check_tables,
    read_index,
    restore_tables_here,
    save_tables_here,
)

_NOTE = "tables"  # among a checkpoint's notes: the directory of its tables, beside it


def tables_of(info: CheckpointInfo) -> Path | None:
    """The directory of a checkpoint's tables; ``None`` where it was saved without any."""
    named = info.notes.get(_NOTE)
    return None if named is None else info.directory.with_name(named).absolute()


def check_tables_of(info: CheckpointInfo, tables: Tables) -> Path | None:
    """The same; raises :class:`~meshwright.CheckpointError` unless it holds these tables."""
    source = tables_of(info)
    check_tables({} if source is None else read_index(source), tables, info.directory)
    return source


class TableSaver:
    """Saves the tables that a model itself does not have, with each checkpoint of a run."""

    def __init__(self, saver: Saver, coordinator: Any) -> None:
        self._saver, self._coordinator = saver, coordinator

    def restore(self, tables: Tables) -> None:
        """Let a worker give the servers the checkpoint's tables, if there is one to go on from.

        Raises :class:`~meshwright.CheckpointError` for a checkpoint without them.
        """
        if self._saver.start is None or not tables:
            return
        source = check_tables_of(self._saver.start, tables)
        self._run(restore_tables_here, str(source or ""), tables)

    def save(self, tables: Tables) -> dict[str, Any]:
        """Let a worker write the tables; returns a note for the checkpoint that they are of."""
        checkpoints = self._saver.checkpoints
        if checkpoints is None or not tables:
            return {}
        self.remove_old()
        name = f"tables_{self._saver.step}_{uuid.uuid4().hex[:8]}"
        target = checkpoints.directory.absolute() / name
        self._run(save_tables_here, str(target), tables)
        read_index(target)  # raises where a worker's disk is not this one's
        return {_NOTE: name}

    def remove_old(self) -> None:
        """Remove the tables of checkpoints that are kept no longer, or were never finished."""
        checkpoints = self._saver.checkpoints
        if checkpoints is None:
            return
        notes = {info.notes.get(_NOTE) for info in checkpoints.all}
        for path in checkpoints.directory.glob("*tables_*"):
            if path.name not in notes and path.name.lstrip(".").startswith("tables_"):
                shutil.rmtree(path)

    def _run(self, function: Any, where: str, tables: Tables) -> None:
        self._coordinator.fetch(self._coordinator.schedule(function, (where, dict(tables))))
