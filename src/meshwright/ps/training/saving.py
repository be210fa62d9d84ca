"""Checkpoints of ``fit``: the same files as synchronous training's, so that either can go on.

The coordinator saves when no step is under way, so that parameters and slots of all servers belong
together. One that has died is started again with the same program: it reads the newest checkpoint,
and the tasks of the cluster, which have waited, take its values.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import keras

from ...checkpoint import CheckpointInfo, Position, restore_state
from ...checkpoint.asked import Resume, checkpoints_of, to_go_on_from
from ...frontends.keras.lasting import LastingNames
from ...frontends.keras.program import KerasVariables, read_state, write_state
from ...run.stopping import Stopping
from .table_files import (
    Tables,
    check_tables,
    read_index,
    restore_tables_here,
    save_tables_here,
)

TABLES = "tables"  # among a checkpoint's notes: the directory of its tables, beside it


class TrainingSaver:
    """Saves a run now and then; without a directory it saves nothing."""

    def __init__(
        self, directory: str | Path | None, every: int | None, keep: int | None, resume: Resume
    ) -> None:
        self._checkpoints = checkpoints_of(directory, every, keep)
        self._every = every
        self.start: CheckpointInfo | None = (
            None if self._checkpoints is None else to_go_on_from(self._checkpoints, resume)
        )
        self.step = self.start.step if self.start else 0
        self.stopping = Stopping(saves=self.is_on)
        self._counts = self.start.notes.get("counts") if self.start else None
        self._saved = (self.step, self.position)

    @property
    def is_on(self) -> bool:
        """Whether anything is saved."""
        return self._checkpoints is not None

    @property
    def position(self) -> Position:
        """Where the run begins."""
        return self.start.position if self.start else Position()

    @property
    def was_stopped(self) -> bool:
        """Whether a callback (EarlyStopping, say) had ended the run."""
        return bool(self.start and self.start.notes.get("stopped"))

    def history(self) -> dict[str, Any]:
        """The history of the run before."""
        return dict(self.start.notes.get("history", {})) if self.start else {}

    def take_counts(self) -> list[float] | None:
        """What metrics had counted in the epoch that the run begins in the midst of; once."""
        counts, self._counts = self._counts, None
        return counts

    def restore(self, model: keras.Model, variables: KerasVariables) -> None:
        """Put the checkpoint to go on from, if there is one, into the model."""
        if self.start is None:
            return
        names = LastingNames.of(model, variables)
        found = restore_state(self.start, names.to_checkpoint(read_state(variables)))
        write_state(variables, names.from_checkpoint(found))

    def restore_tables(self, coordinator: Any, tables: Tables) -> None:
        """Let a worker give the servers the checkpoint's tables, if there is one to go on from.

        Raises :class:`~meshwright.CheckpointError` for a checkpoint without them.
        """
        if self.start is None or not tables:
            return
        named = self.start.notes.get(TABLES)
        source = None if named is None else self.start.directory.with_name(named)
        check_tables({} if source is None else read_index(source), tables, self.start.directory)
        args = (str(source.absolute()) if source else "", dict(tables))
        coordinator.fetch(coordinator.schedule(restore_tables_here, args))

    def save_tables(self, coordinator: Any, tables: Tables) -> dict[str, Any]:
        """Let a worker write the tables; returns a note for the checkpoint that they are of."""
        if self._checkpoints is None or not tables:
            return {}
        self._remove_old_tables()
        target = (
            self._checkpoints.directory.absolute() / f"tables_{self.step}_{uuid.uuid4().hex[:8]}"
        )
        args = (str(target), dict(tables))
        coordinator.fetch(coordinator.schedule(save_tables_here, args))
        read_index(target)  # says so where a worker's disk is not this one's
        return {TABLES: target.name}

    def until_due(self, left: int) -> int:
        """How many of the steps that are left may be done before the next checkpoint."""
        if not (self.is_on and self._every):
            return left
        return min(left, self._every - self.step % self._every)

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is due after this step."""
        return bool(self.is_on and self._every and self.step % self._every == 0)

    @property
    def by_epoch(self) -> bool:
        """Whether a checkpoint is due after each epoch."""
        return self.is_on and not self._every

    def save(
        self,
        model: keras.Model,
        variables: KerasVariables,
        position: Position,
        *,
        layout: str = "",
        notes: dict[str, Any] | None = None,
    ) -> None:
        """Write the model as it is now, in the background."""
        if self._checkpoints is None or (self.step, position) == self._saved:
            return
        self._saved = (self.step, position)
        state = LastingNames.of(model, variables).to_checkpoint(read_state(variables))
        self._checkpoints.save(self.step, state, position, layout=layout, notes=notes)

    def close(self) -> None:
        """Wait for what is being written."""
        if self._checkpoints is None:
            return
        try:
            self._remove_old_tables()
        finally:
            self._checkpoints.close()

    def _remove_old_tables(self) -> None:
        """Remove the tables of checkpoints that are kept no longer, or were never finished."""
        if self._checkpoints is None:
            return
        kept = {info.notes.get(TABLES) for info in self._checkpoints.all}
        for path in self._checkpoints.directory.glob("*tables_*"):
            if path.name not in kept and path.name.lstrip(".").startswith("tables_"):
                shutil.rmtree(path)
