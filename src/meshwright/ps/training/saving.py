"""Checkpoints of ``fit``: the same files as synchronous training's, so that either can go on.

The coordinator saves when no step is under way, so that parameters and slots of all servers belong
together. One that has died is started again with the same program: it reads the newest checkpoint,
and the tasks of the cluster, which have waited, take its values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from ...checkpoint import CheckpointInfo, Checkpoints, Position, restore_state
from ...errors import CheckpointError
from ...frontends.keras.lasting import LastingNames
from ...frontends.keras.program import KerasVariables, read_state, write_state


class TrainingSaver:
    """Saves a run now and then; without a directory it saves nothing."""

    def __init__(
        self, directory: str | Path | None, every: int | None, keep: int | None, resume: Any
    ) -> None:
        if directory is None and every is not None:
            raise CheckpointError(f"save_every={every!r} needs checkpoint=<directory>.")
        if every is not None and every < 1:
            raise CheckpointError(f"save_every={every!r}: a number of steps, at least 1.")
        self._checkpoints = None if directory is None else Checkpoints(directory, keep)
        self._every = every
        self.start: CheckpointInfo | None = self._chosen(resume)
        self.step = self.start.step if self.start else 0
        self._layout = ""

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

    def restore(self, model: keras.Model, variables: KerasVariables) -> None:
        """Put the checkpoint to go on from, if there is one, into the model."""
        if self.start is None:
            return
        names = LastingNames.of(model, variables)
        found = restore_state(self.start, names.to_checkpoint(read_state(variables)))
        write_state(variables, names.from_checkpoint(found))

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
        if self._checkpoints is None:
            return
        state = LastingNames.of(model, variables).to_checkpoint(read_state(variables))
        self._checkpoints.save(self.step, state, position, layout=layout, notes=notes)

    def close(self) -> None:
        """Wait for what is being written."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _chosen(self, resume: Any) -> CheckpointInfo | None:
        if self._checkpoints is None:
            return None
        latest = self._checkpoints.latest
        if resume not in ("auto", True, False):
            raise CheckpointError(f"resume={resume!r}. Say 'auto', True or False.")
        if resume is True and latest is None:
            raise CheckpointError(
                f"resume=True, but {self._checkpoints.directory} holds no complete checkpoint. Say "
                "resume='auto' to begin a new run there."
            )
        if resume is False and latest is not None:
            raise CheckpointError(
                f"resume=False, but {self._checkpoints.directory} holds checkpoints up to step "
                f"{latest.step}. Name another directory, or say resume='auto' to go on from there."
            )
        return latest
