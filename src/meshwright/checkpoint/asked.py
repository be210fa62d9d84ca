"""What options of a training run ask of its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..errors import CheckpointError
from .record import CheckpointInfo
from .store import Checkpoints

Resume = Literal["auto"] | bool


def check_every(every: int | None) -> None:
    """Raise :class:`CheckpointError` unless steps can be saved so often."""
    if every is not None and not (isinstance(every, int) and every >= 1):
        raise CheckpointError(
            f"save_every must be a whole number of steps, at least 1; received {every!r}."
        )


def checkpoints_of(
    directory: str | Path | None, every: int | None, keep: int | None
) -> Checkpoints | None:
    """The checkpoints of a run; ``None`` without a directory.

    Raises :class:`CheckpointError` for options that contradict each other.
    """
    if directory is None and every is not None:
        raise CheckpointError(f"save_every={every!r} needs checkpoint=<directory>.")
    check_every(every)
    return None if directory is None else Checkpoints(directory, keep)


def to_go_on_from(checkpoints: Checkpoints, resume: Resume) -> CheckpointInfo | None:
    """The checkpoint that a run begins with, if with any.

    Raises :class:`CheckpointError` where the directory does not hold what ``resume`` says.
    """
    if resume not in ("auto", True, False):
        raise CheckpointError(
            "resume must be 'auto' (resume if there is a checkpoint), True (there must be one) or "
            f"False (there must be none); received {resume!r}."
        )
    latest = checkpoints.latest
    if resume is True and latest is None:
        raise CheckpointError(
            f"resume=True, but {checkpoints.directory} holds no complete checkpoint. Say "
            "resume='auto' to begin a new run there."
        )
    if resume is False and latest is not None:
        raise CheckpointError(
            f"resume=False, but {checkpoints.directory} holds checkpoints up to step "
            f"{latest.step}, which are not written over. Name another directory, remove this one, "
            "or say resume='auto' to go on from there."
        )
    return latest
